"""Control: a ControlNet or T2I-Adapter with its image, from Python or as text from the command line."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ldm_lite.control.canny import canny
from ldm_lite.image import read_image, resize_image, to_image, to_rgb, upright

SYNTAX = "FILE:IMAGE[:WEIGHT][:START-END][:guess][:pool]"
NUMBER = r"\d*\.?\d+"
PREPROCESSORS = ("none", "canny", "inpaint")


@dataclass(frozen=True)
class Control:
    """A ControlNet or T2I-Adapter and the image it follows.  Its network is loaded at first use, once for each model.

    source is a file or folder, or its name on the hub; image a path, a PIL image, an array (H,W,3) or a tensor (3,H,W)
    in [-1,1].  It acts from `start` to `end`, fractions of the steps in [0,1].  guess: not for the negative prompt, and
    stronger in deeper layers; pool: averaged over the image, for the shuffle network, and not for the negative prompt.
    preprocess makes the map first: "none", "canny", "canny:LOW:HIGH" or "inpaint" (transparent parts are the hole).
    name replaces the source in texts.
    Raises ValueError for values out of range.
    """

    source: str | os.PathLike[str]
    image: str | os.PathLike[str] | Image.Image | NDArray[Any] | Tensor
    weight: float = 1.0
    start: float = 0.0
    end: float = 1.0
    guess: bool = False
    pool: bool = False
    preprocess: str = "none"
    name: str | None = None
    networks: WeakKeyDictionary[nn.Module, Any] = field(
        default_factory=WeakKeyDictionary, compare=False, repr=False
    )  # loaded networks, by UNet

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without its networks, which are loaded again at first use."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "networks"}
        return partial(Control, **values), ()

    def __post_init__(self) -> None:
        for name in ("weight", "start", "end"):
            value = getattr(self, name)
            if isinstance(value, str) or not math.isfinite(value):
                raise ValueError(f"got `{name}` {value!r}, expected a finite number")
        if not 0 <= self.start < self.end <= 1:
            raise ValueError(
                f"got control {str(self)!r}, expected it to start before it ends, as fractions of the steps, 0 to 1"
            )
        if not re.fullmatch(rf"{'|'.join(PREPROCESSORS)}|canny:{NUMBER}:{NUMBER}", str(self.preprocess)):
            raise ValueError(
                f"got `preprocess` {self.preprocess!r}, expected {', '.join(PREPROCESSORS)} or canny:LOW:HIGH"
            )

    def __str__(self) -> str:
        """The control as on the command line, without defaults."""
        image = os.fspath(self.image) if isinstance(self.image, (str, os.PathLike)) else "image"
        text = f"{self.name or os.fspath(self.source)}:{image}" + (f":{self.weight:g}" if self.weight != 1 else "")
        if (self.start, self.end) != (0, 1):
            text += f":{self.start:g}-{self.end:g}"
        return text + ":guess" * self.guess + ":pool" * self.pool

    def with_image(self, image: Any) -> "Control":
        """Return the same control for another image, sharing a loaded network."""
        return replace(self, image=image)

    def pixels(self, size: tuple[int, int]) -> Tensor:
        """Return the image, cropped to (width, height), as (1,3,H,W) in [0,1], with -1 in the hole of "inpaint".

        Raises ValueError if it is not an image, or has no hole for "inpaint"; OSError if it cannot be opened.
        """
        image = resize_image(self.rgb(), size, "crop")
        if self.preprocess.startswith("canny"):
            image = canny(image, *map(float, self.preprocess.split(":")[1:]))
        pixels = unit_pixels(image)
        if self.preprocess != "inpaint":
            return pixels
        alpha = self._read(lambda image: upright(image).convert("RGBA").getchannel("A"))
        alpha = alpha.point(lambda value: 255 * (value < 128))
        hole = torch.from_numpy(np.array(resize_image(alpha, size, "crop")) > 0)
        if not hole.any():
            raise ValueError(f"{self}: the image has no transparent part, which `preprocess=inpaint` repaints")
        return pixels.masked_fill(hole, -1.0)

    @staticmethod
    def parse(texts: Sequence[str], preprocess: str | None = None) -> "list[Control]":
        """Parse controls as on the command line, such as "FILE:IMAGE:0.8".  Raises ValueError for other texts."""
        return parse(texts, preprocess)

    def rgb(self) -> Image.Image:
        """Return the image, upright and opaque, at its own size."""
        return self._read(to_rgb)

    def _read(self, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
        is_path = isinstance(self.image, (str, os.PathLike))
        return read_image(self.image, convert) if is_path else convert(to_image(self.image))  # type: ignore[arg-type]


def unit_pixels(image: Image.Image) -> Tensor:
    """Convert an RGB image to pixels (1,3,H,W) in [0,1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255


def parse(controls: Sequence[str | Control], preprocess: str | None = None) -> list[Control]:
    """Parse controls given as text (see SYNTAX); `preprocess` is "canny" for all texts, or "canny,none" for each.

    Raises ValueError for other texts.
    """
    for control in controls:
        if not isinstance(control, (str, Control)):
            raise TypeError(f"got {type(control).__name__} as `control`, expected a Control or {SYNTAX}")
    texts = [control for control in controls if isinstance(control, str)]
    if preprocess is not None and not texts:
        raise ValueError("got `preprocess`, but no `control` whose image it is for")
    ways = ["none"] if preprocess is None else preprocess.split(",")
    ways = ways * len(texts) if len(ways) == 1 else ways
    if len(ways) != len(texts):
        raise ValueError(f"got {len(ways)} ways to preprocess for {len(texts)} images, expected one, or one for each")
    parsed = iter([_parse(text, way) for text, way in zip(texts, ways, strict=True)])
    return [next(parsed) if isinstance(control, str) else control for control in controls]


def _parse(text: str, preprocess: str) -> Control:
    names, options = text, dict[str, Any]()
    while ":" in names:
        rest, _, last = names.rpartition(":")
        if re.fullmatch(rf"-?{NUMBER}", last):
            options["weight"] = float(last)
        elif between := re.fullmatch(rf"({NUMBER})-({NUMBER})", last):
            options["start"], options["end"] = float(between[1]), float(between[2])
        elif last in ("guess", "pool"):
            options[last] = True
        else:
            break
        names = rest
    name = r"(?:[A-Za-z]:(?=[\\/]))?[^:]+"  # a drive letter is not a file
    files = re.fullmatch(f"({name}):({name})", names)
    if files is None:
        raise ValueError(f"got control {text!r}, expected {SYNTAX}")
    return Control(files[1], files[2], **options, preprocess=preprocess)


def natural_size(control: Control, resolution: int) -> tuple[int, int]:
    """Return (width, height) of a control's image, short side scaled to `resolution`, in multiples of 64."""
    image = control.rgb()
    width, height = (max(64, round(side * resolution / min(image.size) / 64) * 64) for side in image.size)
    return width, height
