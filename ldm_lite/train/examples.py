"""Examples of training data, and what is common to all kinds of it: sizes, captions, files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ldm_lite.cli.options import MOST_CHARACTERS

CAPTIONS = ("text", "caption", "prompt")  # what others call it in JSON


class Example(NamedTuple):
    """A captioned image, H x W pixels."""

    pixels: Tensor  # (3,H,W) uint8; or the moments (2C,h,w) of its latents, encoded beforehand
    caption: str
    context: Tensor | None = None  # (T,D): the caption, encoded beforehand
    y: Tensor | None = None  # (V,): the vector that SDXL reads besides
    sizes: Tensor | None = None  # (6,) int32: height, width of the image; top, left of its crop; H, W: what SDXL reads
    mask: Tensor | None = None  # (1,H,W) or (1,h,w) uint8: 255 where the image is learned
    hint: Tensor | None = None  # (3,H,W) uint8: the image that a ControlNet reads


class Dataset(Protocol):
    """Captioned images of one size."""

    @property
    def shards(self) -> Sequence[int] | None:
        """Number of examples in each file, which are best read together; None: infinitely many examples."""

    def example(self, index: int) -> Example:
        """Return an example, of a finite dataset 0 <= index < sum(shards)."""


@dataclass(frozen=True)
class Buckets:
    """Finite datasets of one size each, as one; a batch is of one of them."""

    parts: tuple[Dataset, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of examples in each part."""
        return tuple(sum(part.shards or ()) for part in self.parts)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of all parts."""
        return tuple(count for part in self.parts for count in part.shards or ())

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where the examples of each part end."""
        return np.cumsum(self.counts)

    def example(self, index: int) -> Example:
        """Return an example, in the order of the parts."""
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part].example(index - int(self.ends[part]) + self.counts[part])


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset, for instance those that are held out for validation."""

    whole: Dataset
    indices: tuple[int, ...]

    @property
    def shards(self) -> tuple[int]:
        """Their number: all in one shard."""
        return (len(self.indices),)

    def example(self, index: int) -> Example:
        """Return an example of the whole."""
        return self.whole.example(self.indices[index])


# ---- sizes ----------------------------------------------------------------------------------------------------------


def bucket_sizes(resolution: int, step: int) -> list[tuple[int, int]]:
    """Return (height, width) of buckets: multiples of `step`, about resolution^2 pixels, a ratio of up to 4.

    Podell et al. 2023, appendix I.
    """
    most, sizes = 2 * resolution, set()
    for long in range(resolution // step * step, most + 1, step):
        short = resolution**2 // long // step * step
        if short >= resolution // 2:
            sizes |= {(long, short), (short, long)}
    return sorted(sizes)


def nearest(sizes: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """Return the size whose ratio is nearest to an image's, of equal ones the largest."""
    wanted = math.log(height / width)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - wanted), -size[0] * size[1]))


def crop(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """Scale an image to cover `size` = (height, width) and cut out its middle.

    Returns it, with the top and left of the cut in the scaled image.
    """
    (height, width), (w, h) = size, image.size
    box = (w, w * height / width) if w * height <= h * width else (h * width / height, h)
    left, top = (w - box[0]) // 2, (h - box[1]) // 2
    cut = image.resize((width, height), Image.Resampling.LANCZOS, (left, top, left + box[0], top + box[1]))
    return cut, (round(top * height / box[1]), round(left * width / box[0]))


def sizes_of(image: Image.Image, corner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Return Example.sizes of a whole image and its crop."""
    return torch.tensor([image.height, image.width, *corner, *size], dtype=torch.int32)


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB or grey image as a tensor (3,H,W) or (1,H,W) uint8."""
    values = torch.from_numpy(np.array(image))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1)


def to_float(pixels: Tensor, device: torch.device) -> Tensor:
    """Convert pixels uint8 [0,255] to float32 [-1,1] on the device."""
    return pixels.to(device, non_blocking=True).float() / 127.5 - 1


# ---- captions and files ---------------------------------------------------------------------------------------------


def check_caption(caption: str, path: object) -> None:
    """Raise ValueError, one line, for a caption that is empty or too long."""
    if not caption:
        raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
    if len(caption) > MOST_CHARACTERS:
        raise ValueError(f"{path}: its caption has {len(caption):,} characters, wanted at most {MOST_CHARACTERS:,}")


def caption_in(row: object, where: object) -> str:
    """Return the caption in a JSON object.  Raises ValueError if there is none."""
    values = row if isinstance(row, dict) else {}
    for name in CAPTIONS:
        if isinstance(text := values.get(name), str):
            return text.strip()
    raise ValueError(f"{where}: wanted a JSON object with a caption called {' or '.join(CAPTIONS)}")
