"""reference: images that the network reads beside the noised one, and edits or combines by the prompt: FLUX.2."""

import dataclasses
import math
from typing import Any

from PIL import Image
from torch import Tensor

from ldm_lite.cli.task_options import ImageOptions
from ldm_lite.image import to_pixels
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.image_inputs import open_source, side_unit, sources
from ldm_lite.tasks.job import Job

MOST = 1024**2  # pixels of a reference


class References(Feature):
    """Adds the latents of the references to what every branch of guidance reads."""

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Read the images; the first one's size is the default of text to image.

        Raises ValueError, OSError for what is no image, and for a network that reads none.
        """
        if not getattr(model.family.unet, "reads_references", False):
            raise ValueError(f"{model.family.title} reads no reference images: leave out `reference`")
        unit = side_unit(model)
        self._images = [fitted(open_source(source).image, unit) for source in sources(options.reference, "reference")]
        self._latents: list[Tensor] = []
        if not isinstance(options, ImageOptions) and options.height is options.width is None:
            width, height = self._images[0].size
            options = dataclasses.replace(options, width=width, height=height)
        return model, options

    def change_job(self, job: Job) -> Job:
        """Add the latents, each (1,C,h,w) of its own size."""
        if not self._latents:
            self._latents = [job.model.encode_pixels(to_pixels(image)[None]) for image in self._images]
        latents = {f"reference_{i}": latent for i, latent in enumerate(self._latents, 1)}
        return dataclasses.replace(job, channels={**job.channels, **latents})


def fitted(image: Image.Image, unit: int) -> Image.Image:
    """Reduce an image to MOST pixels, and cut its edges to multiples of unit.

    black-forest-labs/flux2 sampling.py, default_prep.  Raises ValueError if a side is shorter than unit.
    """
    ratio = math.sqrt(MOST / (image.width * image.height))
    if ratio < 1:
        size = max(1, int(image.width * ratio)), max(1, int(image.height * ratio))
        image = image.resize(size, Image.Resampling.LANCZOS)
    width, height = image.width // unit * unit, image.height // unit * unit
    if not width or not height:
        raise ValueError(f"got a reference of {image.width} x {image.height} pixels, wanted {unit} or more a side")
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
