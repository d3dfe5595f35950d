"""Convert images between files, PIL, tensors and text.  Nothing here writes files.

An image is an RGB PIL image unless stated otherwise; a mask is a PIL image of mode L, 255 = repaint and 0 = keep.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFilter, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.cli.files import open_file
from ldm_lite.cli.options import MOST_PX
from ldm_lite.core import image as core
from ldm_lite.core.image import MOST_PIXELS, mask_latent, pad, stretch, to_pil, to_pixels
from ldm_lite.image_headers import check_exif, check_image

__all__ = ["MOST_PIXELS", "mask_latent", "pad", "to_pil", "to_pixels"]  # of the core, beside what is defined here

log = logging.getLogger("ldm_lite")

T = TypeVar("T")

_HEIF = importlib.util.find_spec("pillow_heif") is not None
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", *(".heic", ".heif") * _HEIF)
# Pillow knows forty more, some of which start other programs: EPS runs Ghostscript, whatever the file's name.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF")
MOST_BYTES = 2**28  # of a file
RESIZES = ("crop", "fit", "stretch")
PIXEL_UPSCALERS = {"Lanczos": Image.Resampling.LANCZOS, "Nearest": Image.Resampling.NEAREST}
SIDES = ("left", "top", "right", "bottom")
MOST_SHOWN = 2048  # pixels a side of the grid in a notebook

# ---- from files -----------------------------------------------------------------------------------------------------


def list_images(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name.  Skip hidden files: half-written ones and macOS metadata."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def read_rgb(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image file as RGB (see `to_rgb`).  Raises ValueError if it is not a readable image; OSError."""
    return read_image(path, to_rgb)


def read_mask(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image file as a mask (see `to_mask`).  Raises ValueError if it is not a readable image; OSError."""
    return read_image(path, to_mask)


def open_depth(path: str | os.PathLike[str]) -> Image.Image:
    """Open a depth map as grey values: mode F keeps 16-bit and float precision, other files give mode L.

    Raises ValueError if it is not a readable image; OSError.
    """
    return read_image(path, lambda image: upright(image).convert("F" if image.mode[0] in "IF" else "L"))


def read_image(path: str | os.PathLike[str], convert: Callable[[Image.Image], T]) -> T:
    """Open an image file of one of _FORMATS and return `convert` of it, or of its first frame.

    Raises ValueError if either fails, if it is not a regular file, or beyond MOST_BYTES or MOST_PIXELS; OSError.
    """
    with open_file(path, MOST_BYTES) as file:  # a missing file raises OSError
        return decode_image(file, os.fspath(path), convert)


def decode_image(file: BinaryIO, name: str | os.PathLike[str], convert: Callable[[Image.Image], T], most: int = 0) -> T:
    """Decode an open image file as read_image does; `most` is a smaller limit on its pixels.  Raises ValueError."""
    with _readable(name):
        check_image(file)
        image = Image.open(file, formats=_formats())
        check_exif(image.info)
    try:
        _check_size(image.size, most or MOST_PIXELS)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a phone's additional views of a picture
        log.info("%s: holds several images, of which the first is used", name)
    with _readable(name):
        return convert(image)


@contextlib.contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn Pillow's errors into a ValueError: for a damaged file it may raise nearly any exception."""
    try:
        yield
    except Exception as error:
        why = f" ({' '.join(str(error).split()) or type(error).__name__})"
        if isinstance(error, UnidentifiedImageError):
            why = f", expected {', '.join(_formats())}"
        elif isinstance(error, Image.DecompressionBombError):
            why = f": it has more than {MOST_PIXELS} pixels, make it smaller"
        raise ValueError(f"{os.fspath(path)}: is not an image that can be read{why}") from error


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this installation of Pillow reads."""
    if _HEIF:
        importlib.import_module("pillow_heif").register_heif_opener()
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _check_size(size: tuple[int, int], limit: int = MOST_PIXELS) -> None:
    """Raises ValueError for a (width, height) in pixels that no image has, or that is beyond the limit."""
    width, height = size
    if not 0 < width * height <= limit or max(size) > MOST_PX:
        most = f"at most {limit} in all and {MOST_PX} a side: make it smaller"
        wanted = "one or more" if width * height == 0 else most
        raise ValueError(f"got an image of {width} x {height} pixels, expected {wanted}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB: rotated by its EXIF tag, 16 bits reduced to 8, transparency filled with white."""
    image = _flatten(image, "white")
    return image if image.mode == "RGB" else image.convert("RGB")


def to_mask(image: Image.Image) -> Image.Image:
    """Convert any PIL image to a mask: 255 where it is lighter than middle grey, else 0; transparency is 0."""
    return core.black_or_white(_flatten(image, "black").convert("L"))


def mask_of(value: Any) -> Image.Image:
    """Convert a mask as PIL, or as an array or tensor of bool, 0 and 1, 0 to 255 or floats in [0,1] (see `to_mask`).

    Arrays are (H,W), (1,H,W), (H,W,1) or (H,W,3), tensors (H,W), (1,H,W) or (3,H,W); the last may also be in [-1,1].
    Raises ValueError as to_image does.
    """
    is_signed = isinstance(value, Tensor) and value.shape[-3:-2] == (3,) and bool((value < 0).any())
    if isinstance(value, Tensor) and not is_signed:
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
        value = np.moveaxis(value[0] if value.ndim == 4 else value, 0, -1) if value.ndim > 2 else value
    if isinstance(value, np.ndarray):
        value = value[0] if value.ndim == 3 and len(value) == 1 else value
        is_bool = value.dtype.kind in "iu" and value.size > 0 and 0 <= value.min() <= value.max() <= 1
        value = value.astype(bool) if is_bool else value
    return to_mask(to_image(value, "a mask"))


def _flatten(image: Image.Image, background: str) -> Image.Image:
    """Rotate an image by its EXIF tag, reduce it to 8 bits per channel and fill transparency with `background`."""
    image = in_8_bits(upright(image))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            log.info("transparent parts of an image are filled with %s", background)
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return image


def in_8_bits(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel; the same object if it has them.  Raises ValueError for floats."""
    if image.mode == "F":
        raise ValueError("got an image of floating-point numbers, whose range is unknown: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.float32)  # 16-bit grey: PIL's own conversion would clip it
    values /= 257
    return Image.fromarray(values.round(out=values).clip(0, 255, out=values).astype(np.uint8))


def upright(image: Image.Image) -> Image.Image:
    """Return an image rotated by its EXIF tag; the same object if there is nothing to rotate.

    Raises ValueError for EXIF data that check_exif refuses, and Pillow's errors for damaged files.
    """
    image.load()
    check_exif(image.info)
    return image if image.getexif().get(ExifTags.Base.Orientation, 1) == 1 else ImageOps.exif_transpose(image)


def to_image(value: Any, name: str = "an image") -> Image.Image:
    """Convert an array (H,W), (H,W,3) or (H,W,4), uint8, uint16, bool or float in [0,1], or a tensor (3,H,W) in [-1,1].

    Values may lie slightly out of range, as resampling leaves them; there is a warning for those that fit another
    range.  A PIL image is returned as is, loaded.  Raises ValueError, with the name, for anything else, and for more
    than MOST_PIXELS.
    """
    if not isinstance(value, (Image.Image, Tensor, np.ndarray)):
        raise ValueError(f"got {type(value).__name__} as {name}, expected a path, PIL, an array (H,W,3) or a tensor")
    if isinstance(value, Image.Image):
        _check_size(value.size)
        try:
            value.load()
        except (OSError, SyntaxError, EOFError, struct.error) as error:
            raise ValueError(f"got an image that cannot be read ({error})") from error
        return value
    if isinstance(value, Tensor):
        pixels = value[0] if value.ndim == 4 and len(value) == 1 else value
        if pixels.ndim != 3 or len(pixels) != 3 or not pixels.numel():
            raise ValueError(f"got a tensor of shape {tuple(value.shape)} as {name}, expected (3,H,W) in [-1,1]")
        _check_size((pixels.shape[2], pixels.shape[1]))
        least, most = float(pixels.min()), float(pixels.max())
        if not pixels.is_floating_point() or not -2 <= least <= most <= 2:
            raise ValueError(f"got a tensor of {value.dtype} from {least:g} to {most:g} as {name}, expected [-1,1]")
        if least >= 0 and least != 1:
            log.warning("got a tensor from %g to %g as %s, read as [-1,1]: scale [0,1] by 2 * x - 1", least, most, name)
        return to_pil(pixels.detach().cpu())
    value = value[:, :, 0] if value.ndim == 3 and value.shape[2] == 1 else value
    if value.ndim not in (2, 3) or value.shape[2:] not in ((), (3,), (4,)) or not value.size:
        raise ValueError(f"got an array of shape {value.shape} as {name}, expected (H,W), (H,W,3) or (H,W,4)")
    _check_size((value.shape[1], value.shape[0]))
    if value.dtype.kind not in "buif":
        raise ValueError(f"got an array of {value.dtype} as {name}, expected uint8, or floats in [0,1]")
    least, most = float(value.min()), float(value.max())
    floats = value.dtype.kind == "f"
    largest = 65535 if value.dtype == "u2" else 255  # of whole numbers
    got = f"got an array of {value.dtype} from {least:g} to {most:g} as {name}"
    if not (-0.5 <= least <= most <= 1.5 if floats else 0 <= least <= most <= largest):
        raise ValueError(f"{got}, expected {'[0,1]' if floats else f'0 to {largest}'}")
    if value.dtype.kind in "iu" and 0 < most <= largest // 255:
        log.warning("%s, read as 0 to %d: it is nearly black", got, largest)
    scale = 255 if floats or value.dtype.kind == "b" else 255 / largest
    result = np.empty(value.shape, dtype=np.uint8)
    for row, into in zip(value, result, strict=True):  # by row: eight times less memory
        into[:] = (row.astype(np.float64) * scale).round().clip(0, 255)
    return Image.fromarray(result)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def resize_image(image: Image.Image, size: tuple[int, int], how: str) -> Image.Image:
    """Resize an image or mask to `size` = (width, height).  `how` is one of RESIZES.

    "crop" fills the size and crops the rest, equally on both sides; "fit" fits inside it, so one side may be shorter;
    "stretch" changes the aspect ratio.  No marked pixel of a mask is lost.  Raises ValueError for another `how`,
    and for sizes, before cropping too, beyond MOST_PIXELS.
    """
    if how not in RESIZES:
        raise ValueError(f"got resize {how!r}, expected {', '.join(RESIZES)}")
    width, height = size
    if how != "stretch":
        ratios = [wanted / side for wanted, side in zip(size, image.size, strict=True)]
        ratio = min(ratios) if how == "fit" else max(ratios)
        width, height = (max(1, round(side * ratio)) for side in image.size)
    _check_size((width, height))
    return core.resize(image, size) if how == "crop" else stretch(image, (width, height))


def clip_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize and centre-crop an image to (size, size), as CLIP's image encoder expects it.

    Raises ValueError for an image so narrow that it has more than MOST_PIXELS on the way.
    """
    width, height = image.size
    short = min(width, height)
    _check_size(scaled_size := (size * width // short, size * height // short))
    scaled = image.resize(scaled_size, Image.Resampling.BICUBIC)
    left, top = (scaled.width - size) // 2, (scaled.height - size) // 2
    return scaled.crop((left, top, left + size, top + size))


def extend(image: Image.Image, sides: Mapping[str, int]) -> tuple[Image.Image, Image.Image]:
    """Add pixels to the given SIDES by repeating the edge; return the larger image and the mask of the new area.

    Raises ValueError for unknown sides, negative numbers, or if nothing is added.
    """
    if not sides or set(sides) - set(SIDES) or min(sides.values()) < 0 or not any(sides.values()):
        raise ValueError(f"got extend {dict(sides)}, expected pixels above 0 for some of {', '.join(SIDES)}")
    left, top, right, bottom = (sides.get(side, 0) for side in SIDES)
    edges = np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode="edge")
    mask = Image.new("L", (edges.shape[1], edges.shape[0]), 255)
    mask.paste(0, (left, top, left + image.width, top + image.height))
    return Image.fromarray(edges), mask


# ---- tensors --------------------------------------------------------------------------------------------------------


def feathered_weights(mask: Image.Image, feather: float = 0.0) -> Tensor:
    """Convert a mask to weights (1,H,W) float32: 1 inside, falling to 0 outside over about `feather` pixels."""
    if feather > 0:
        blurred = mask.filter(ImageFilter.GaussianBlur(feather / 2))
        mask = Image.fromarray(np.maximum(np.asarray(mask), np.asarray(blurred)))
    return core.mask_weights(mask)


def depth_latent(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Convert a depth map (lighter = nearer) to (1,1,h,w) float32 of size (h, w), normalised to [-1,1].

    Like `scripts/gradio/depth2img.py` of stablediffusion with MiDaS' inverse depth.  A flat map is -1 everywhere.
    """
    depth = torch.from_numpy(np.asarray(image.convert("F")).copy())[None, None]
    depth = F.interpolate(depth, size=size, mode="bicubic", align_corners=False)
    low, high = depth.amin(), depth.amax()
    return 2 * (depth - low) / (high - low).clamp(min=1e-6) - 1


def to_array(pixels: Tensor, truncate: bool = False) -> NDArray[np.uint8]:
    """Convert pixels (3,H,W) in [-1,1], on the CPU, to uint8 (H,W,3), clamped and rounded.

    `truncate` drops the fraction instead, as the original scripts do, in the same float32 operations.
    """
    if not truncate:
        return np.array(to_pil(pixels))
    scaled = ((pixels.float() + 1) / 2).clamp(0, 1) * 255
    return scaled.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Tile images into a grid of the largest one's size, `columns` wide, with the original scripts' gap of 2 pixels.

    A single image is its own grid: torchvision's make_grid gives it no border either.
    """
    if len(images) == 1:
        return images[0]
    gap, (width, height) = 2, [max(sides) for sides in zip(*(image.size for image in images), strict=True)]
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap))
    for i, image in enumerate(images):
        sheet.paste(image, (gap + i % columns * (width + gap), gap + i // columns * (height + gap)))
    return sheet


class Images(list[Any]):
    """A list of images, or of objects with an `image`, that a notebook shows as a grid."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError: `images` of what diffusers returns, and methods of a single image."""
            what = "" if name.startswith("_") else ": it is a list of images, take one of them, images[0]"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{what}")

    def _repr_png_(self) -> bytes | None:
        """Return a PNG of the grid, of up to MOST_SHOWN pixels a side; None without images."""
        columns = math.ceil(len(self) ** 0.5)
        images = [getattr(item, "image", item).copy() for item in self]
        for image in images:
            image.thumbnail((max(16, MOST_SHOWN // columns),) * 2)
        return grid(images, columns)._repr_png_() if images else None
