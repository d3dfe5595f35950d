"""Images between files, PIL, tensors and text: nothing here writes.

A picture is an RGB PIL image; a mask is one of mode L, 255 where a picture is to be repainted and 0 elsewhere.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps, UnidentifiedImageError
from torch import Tensor

log = logging.getLogger("ldm_lite")

T = TypeVar("T")

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
RESIZES = ("crop", "fit", "stretch")
SIDES = ("left", "top", "right", "bottom")

# ---- from files -----------------------------------------------------------------------------------------------------


def listed(folder: Path) -> list[Path]:
    """The pictures in a folder, by name: hidden ones are half written, or another system's notes."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def open_picture(path: str | os.PathLike[str]) -> Image.Image:
    """A file -> to_picture of it.  Raises ValueError for what is no image; OSError if it cannot be opened."""
    return read(path, to_picture)


def open_mask(path: str | os.PathLike[str]) -> Image.Image:
    """A file -> to_mask of it.  Raises ValueError for what is no image; OSError if it cannot be opened."""
    return read(path, to_mask)


def open_depth(path: str | os.PathLike[str]) -> Image.Image:
    """A file -> its grey values, all bits of them, as an image of mode F.  Raises as open_picture does."""
    return read(path, lambda image: ImageOps.exif_transpose(image).convert("F" if image.mode[0] in "IF" else "L"))


def read(path: str | os.PathLike[str], convert: Callable[[Image.Image], T]) -> T:
    """A file -> what `convert` makes of its image.  Raises ValueError for what is no image, or none for it; OSError."""
    with open(path, "rb") as file:  # first, so that only a file that is there is called no image
        try:
            return convert(Image.open(file))
        except Exception as error:  # of a damaged file PIL raises nearly anything
            why = "" if isinstance(error, UnidentifiedImageError) else f" ({str(error) or type(error).__name__})"
            raise ValueError(f"{os.fspath(path)}: is not an image that can be read{why}") from error


def to_picture(image: Image.Image) -> Image.Image:
    """Any PIL image -> RGB: turned as its EXIF says, 16 bits made 8, transparency laid over white."""
    return _over(image, "white").convert("RGB")


def to_mask(image: Image.Image) -> Image.Image:
    """Any PIL image -> a mask: 255 where it is lighter than middle grey, else 0; transparency is 0."""
    return _over(image, "black").convert("L").point(lambda value: 255 * (value >= 128))


def _over(image: Image.Image, background: str) -> Image.Image:
    """Upright, of 8 bits a channel, and opaque."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey, which PIL's own conversion would clip
        values = np.asarray(image).astype(np.float64)
        image = Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("got an image of floating-point numbers, whose range is not known: save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if np.asarray(image)[:, :, 3].min() < 255:
            log.info("what is transparent in an image is taken as %s", background)
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return image


# ---- sizes ----------------------------------------------------------------------------------------------------------


def resize(image: Image.Image, size: tuple[int, int], how: str) -> Image.Image:
    """A picture or mask -> one of size (width, height): how is one of RESIZES.

    "crop" fills the size and cuts what is over, the same on both sides; "fit" lies inside it, so that one side may be
    shorter; "stretch" changes the proportions.  No pixel of a mask is lost.  Raises ValueError for another `how`.
    """
    if how not in RESIZES:
        raise ValueError(f"got resize {how!r}, wanted {', '.join(RESIZES)}")
    if how == "stretch":
        return _scale(image, size)
    ratios = [wanted / got for wanted, got in zip(size, image.size, strict=True)]
    ratio = min(ratios) if how == "fit" else max(ratios)
    width, height = (max(1, round(side * ratio)) for side in image.size)
    if how == "fit":
        return _scale(image, (width, height))
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    return _scale(image, (width, height)).crop((left, top, left + size[0], top + size[1]))


def clip_pixels(image: Image.Image, size: int) -> Image.Image:
    """A picture as CLIP's image encoder takes it: its middle, scaled to size pixels a side."""
    width, height = image.size
    short = min(width, height)
    scaled = image.resize((size * width // short, size * height // short), Image.Resampling.BICUBIC)
    left, top = (scaled.width - size) // 2, (scaled.height - size) // 2
    return scaled.crop((left, top, left + size, top + size))


def _scale(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    if image.size == size:
        return image
    if image.mode != "L":
        return image.resize(size, Image.Resampling.LANCZOS)
    # The mean over each new pixel's area, in floating point: above zero wherever anything was masked.
    means = np.asarray(image.convert("F").resize(size, Image.Resampling.BOX))
    return Image.fromarray(np.where(means > 0, 255, 0).astype(np.uint8))


def extend(image: Image.Image, sides: Mapping[str, int]) -> tuple[Image.Image, Image.Image]:
    """A picture -> it with so many pixels more on each of SIDES, its edge drawn out, and the mask of what is new.

    Raises ValueError for other sides, negative numbers, and nothing at all.
    """
    if not sides or set(sides) - set(SIDES) or min(sides.values()) < 0 or not any(sides.values()):
        raise ValueError(f"got extend {dict(sides)}, wanted pixels above 0 for some of {', '.join(SIDES)}")
    left, top, right, bottom = (sides.get(side, 0) for side in SIDES)
    edges = np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode="edge")
    mask = Image.new("L", (edges.shape[1], edges.shape[0]), 255)
    mask.paste(0, (left, top, left + image.width, top + image.height))
    return Image.fromarray(edges), mask


def pad(pixels: Tensor, factor: int) -> Tensor:
    """Pixels (C,H,W) -> the same with their right and bottom edges drawn out to sides that are multiples of factor."""
    _, height, width = pixels.shape
    return F.pad(pixels[None], (0, -width % factor, 0, -height % factor), mode="replicate")[0]


# ---- tensors --------------------------------------------------------------------------------------------------------


def to_pixels(picture: Image.Image) -> Tensor:
    """A picture -> pixels (3,H,W) float32 in [-1,1], from which to_array gets it back bit for bit."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 127.5 - 1


def mask_weights(mask: Image.Image, feather: float = 0.0) -> Tensor:
    """A mask -> (1,H,W) float32: 1 where it is white, falling to 0 around that over about `feather` pixels."""
    if feather > 0:
        blurred = mask.filter(ImageFilter.GaussianBlur(feather / 2))
        mask = Image.fromarray(np.maximum(np.asarray(mask), np.asarray(blurred)))
    return torch.from_numpy(np.array(mask))[None].float() / 255


def mask_latent(weights: Tensor, factor: int) -> Tensor:
    """Weights (1,H,W), both sides multiples of factor -> (1,1,h,w): 1 wherever one of a position's pixels is 1."""
    return F.max_pool2d((weights[None] == 1).float(), factor)


def depth_latent(picture: Image.Image, size: tuple[int, int]) -> Tensor:
    """A depth map, lighter = nearer -> (1,1,h,w) float32 of size (h, w), its values stretched to [-1,1].

    As `scripts/gradio/depth2img.py` of stablediffusion does with MiDaS' inverse depth.  A flat map is -1 everywhere.
    """
    depth = torch.from_numpy(np.asarray(picture.convert("F")).copy())[None, None]
    depth = F.interpolate(depth, size=size, mode="bicubic", align_corners=False)
    low, high = depth.amin(), depth.amax()
    return 2 * (depth - low) / (high - low).clamp(min=1e-6) - 1


def to_array(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels (3,H,W) in [-1,1], clamped -> (H,W,3) in [0,255], rounded."""
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def to_pil(pixels: Tensor) -> Image.Image:
    """Pixels (3,H,W) in [-1,1], on the CPU -> an RGB image."""
    return Image.fromarray(to_array(pixels))


def grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Images of one size -> one image, `columns` wide, with the 2 pixels between that the original scripts leave."""
    gap, (width, height) = 2, images[0].size
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap))
    for i, image in enumerate(images):
        sheet.paste(image, (gap + i % columns * (width + gap), gap + i // columns * (height + gap)))
    return sheet


def parameters(prompt: str, negative_prompt: str | None, settings: Mapping[str, object]) -> str:
    """The text that AUTOMATIC1111's web UI stores in a PNG under "parameters", so that its readers understand it."""
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    lines.append(", ".join(f"{key}: {value}" for key, value in settings.items()))
    return "\n".join(lines)
