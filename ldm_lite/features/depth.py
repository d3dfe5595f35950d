"""depth: a depth map, or edges, that the network reads besides the latents."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from ldm_lite.image import depth_latent, open_depth, read_image, to_image, to_pixels, to_rgb
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job


class Depth(Feature):
    """Sets the channels of the network that are not the image's."""

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Read the file.  Raises ValueError for one too many or missing, and if it holds no depth map; OSError."""
        source, reads = options.depth, model.family.task in ("depth", "control_image")
        if (source is not None) != reads:
            got, wanted = ("no", "one: `depth=FILE`") if source is None else ("a", "none")
            raise ValueError(f"got {got} depth map, but {model.family.title} wants {wanted}")
        if not isinstance(source, (str, os.PathLike)):
            self.image = to_image(source)
        elif model.family.task == "depth":
            self.image = open_depth(source)
        else:
            self.image = read_image(Path(source), to_rgb)
        return model, options

    def change_job(self, job: Job) -> Job:
        """Bring the map to the size of the latents: (1,1,h,w), or the latents of the picture (FLUX.1)."""
        _, h, w = job.shape
        if job.model.family.task == "depth":
            channels = depth_latent(self.image, (h, w))
        else:
            factor = job.model.vae.spec.factor
            picture = to_rgb(self.image).resize((factor * w, factor * h))
            channels = job.model.encode_pixels(to_pixels(picture)[None])
        return dataclasses.replace(job, channels={"concat": channels})
