"""Result: an image with its prompt, seed and settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ldm_lite.cli.pictures import TEXT, Picture, save_whole
from ldm_lite.image import to_array, to_pil


@dataclass(frozen=True, eq=False)
class Result:
    """One image, with its prompt, seed and settings."""

    pixels: Tensor = field(repr=False)  # (3,H,W) float32 in [-1,1], on the CPU
    prompt: str
    seed: int
    parameters: str  # the text in AUTOMATIC1111's format that its PNG carries
    truncated: bool = False  # 8 bits are cut off, not rounded
    key: str = ""  # by which `skip_existing` finds it: see existing.py
    settings: Mapping[str, object] = field(default_factory=dict, repr=False)  # those in `parameters`, by name

    @property
    def image(self) -> Image.Image:
        """The image as PIL, RGB, with .info["parameters"], which its `save` writes into PNG, JPEG and WebP."""
        image = Image.fromarray(self.array) if self.truncated else to_pil(self.pixels)
        return Picture.of(image, self.parameters)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The image as numpy, (H,W,3) in [0,255]."""
        return to_array(self.pixels, self.truncated)

    def save(self, path: str | os.PathLike[str], **arguments: Any) -> None:
        """Write a PNG, JPEG or WebP with the settings, whole or not at all; arguments are those of Pillow's `save`.

        Raises ValueError for a name with another ending; OSError.
        """
        save_whole(self.image, Path(path).expanduser(), {TEXT: self.parameters}, **arguments)

    def _repr_png_(self) -> bytes | None:
        """Show it in a notebook."""
        return self.image._repr_png_()
