"""Convert images between files, PIL and tensors.  An image is RGB; a mask is of mode L, 255 = repaint, 0 = keep."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

# Pillow knows forty more, some of which start other programs: EPS runs Ghostscript, whatever the file's name.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
MOST_PIXELS = 2**26  # of an image, 8192 x 8192


def open_image(source: Any) -> Image.Image:
    """Open a file, or convert an array (H,W,3) uint8 or a tensor (3,H,W) in [-1,1], to upright RGB on white.

    Raises ValueError for what is not a readable image, OSError for a missing file.
    """
    return _flatten(source, "white").convert("RGB")


def open_mask(source: Any) -> Image.Image:
    """Open a mask, as open_image does: 255 where it is lighter than middle grey, else 0; transparency is 0."""
    return black_or_white(_flatten(source, "black").convert("L"))


def black_or_white(grey: Image.Image) -> Image.Image:
    """Return a grey image with 255 where it is lighter than middle grey, and 0 elsewhere; of 0 and 1, 1 is white."""
    least = 1 if grey.getextrema()[1] == 1 else 128
    return grey.point(lambda value: 255 * (value >= least))


def _flatten(source: Any, background: str) -> Image.Image:
    """Open an image, rotated by its EXIF tag, and fill its transparent parts."""
    is_path, image = isinstance(source, (str, os.PathLike)), source
    if is_path:
        open(source, "rb").close()  # a missing file raises OSError
    try:
        if isinstance(source, Tensor):
            if not source.is_floating_point() or not bool((source.abs() <= 1.01).all()):
                raise ValueError("these are not pixels in [-1,1]")
            image = to_pil(source.detach().cpu())
        elif isinstance(source, np.ndarray):
            image = Image.fromarray(source)
        elif is_path:
            image = Image.open(Path(source), formats=FORMATS)
        if not isinstance(image, Image.Image) or image.mode in "IF":  # modes I and F have no range
            raise TypeError("this is not an image of 8 or 16 bits")
    except Exception as error:  # Pillow may raise nearly any exception for a damaged file
        if is_path:
            raise ValueError(f"{source}: is not an image that can be read, expected {', '.join(FORMATS)}") from error
        kinds = "a path, PIL, an array or a tensor: (H,W,3) uint8 or (3,H,W) in [-1,1]"
        raise ValueError(f"got {type(source).__name__} as an image, expected {kinds}") from error
    if not 0 < image.width * image.height <= MOST_PIXELS:
        if image is not source:  # else the caller closes it
            image.close()
        raise ValueError(f"got an image of {image.width} x {image.height} pixels, expected {MOST_PIXELS} or fewer")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # grey of 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return image


# ---- sizes ----------------------------------------------------------------------------------------------------------


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image or mask to fill (width, height), and crop both sides alike.  A mask loses no marked pixel."""
    ratio = max(wanted / side for wanted, side in zip(size, image.size, strict=True))
    width, height = (max(1, round(side * ratio)) for side in image.size)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    return stretch(image, (width, height)).crop((left, top, left + size[0], top + size[1]))


def stretch(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image or mask to (width, height), whatever its proportions."""
    if image.size == size:
        return image
    if image.mode != "L":
        return image.resize(size, Image.Resampling.LANCZOS)
    # In floating point, the mean over a new pixel's area is above zero if any of it was masked.
    means = np.asarray(image.convert("F").resize(size, Image.Resampling.BOX))
    return Image.fromarray(np.where(means > 0, 255, 0).astype(np.uint8))


def pad(pixels: Tensor, factor: int) -> Tensor:
    """Pad pixels (C,H,W) on the right and bottom to multiples of `factor` by repeating the edge."""
    _, height, width = pixels.shape
    right, bottom = -width % factor, -height % factor
    return F.pad(pixels[None], (0, right, 0, bottom), mode="replicate")[0]


# ---- tensors --------------------------------------------------------------------------------------------------------


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an image to pixels (3,H,W) float32 in [-1,1].  `to_pil` inverts this bit for bit."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def to_pil(pixels: Tensor) -> Image.Image:
    """Convert pixels (3,H,W) in [-1,1], on the CPU, to an RGB image, clamped and rounded."""
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return Image.fromarray(scaled.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def mask_weights(mask: Image.Image) -> Tensor:
    """Convert a mask to weights (1,H,W) float32: 1 inside, 0 outside."""
    return torch.from_numpy(np.array(mask))[None].float() / 255


def mask_latent(weights: Tensor, factor: int) -> Tensor:
    """Reduce weights (1,H,W), H and W multiples of `factor`, to (1,1,h,w): 1 if any pixel of the cell is 1."""
    return F.max_pool2d((weights[None] == 1).float(), factor)
