"""depth: a depth map, or edges, that the network reads besides the latents."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.image import depth_latent, open_depth, read_image, to_image, to_pixels, to_rgb
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class Depth(Feature):
    """Sets the channels of the network that do not hold the image."""

    stage: ClassVar = "text"
    topic: ClassVar = "control"
    brought_by: ClassVar = ("task=depth", "task=control_image")
    depth: Any = option(
        None, "depth map, lighter = nearer, for models that read one; for FLUX.1 Canny the edges", metavar="FILE"
    )

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Read the file.  Raises ValueError if it is missing or not needed, and if it holds no depth map; OSError."""
        source, reads = self.depth, model.family.task in ("depth", "control_image")
        if (source is not None) != reads:
            got, wanted = ("no", "one: `depth=FILE`") if source is None else ("a", "none")
            raise ValueError(f"got {got} depth map, but {model.family.title} expects {wanted}")
        if not isinstance(source, (str, os.PathLike)):
            image = to_image(source)
        elif model.family.task == "depth":
            image = open_depth(source)
        else:
            image = read_image(Path(source), to_rgb)
        self.state["image"] = image
        return model, options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Bring the map to the size of the latents: (1,1,h,w), or the latents of the picture (FLUX.1)."""
        image, (_, h, w) = self.state["image"], job.shape
        if job.model.family.task == "depth":
            channels = depth_latent(image, (h, w))
        else:
            factor = job.model.vae.spec.factor
            picture = to_rgb(image).resize((factor * w, factor * h))
            channels = job.model.encode_pixels(to_pixels(picture)[None])
        return dataclasses.replace(job, channels={"concat": channels})
