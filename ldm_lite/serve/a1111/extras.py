"""AUTOMATIC1111's extras: images enlarged without a prompt."""

import functools

from PIL import Image
from pydantic import Field

from ldm_lite.image import PIXEL_UPSCALERS, to_rgb
from ldm_lite.serve.http import Body, PictureRequest, Refused, open_base64
from ldm_lite.serve.library import Library
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import Ticket

FACES = ("gfpgan_visibility", "codeformer_visibility")
MULTIPLE = 8  # of the sides of an enlarged image


class ExtrasRequest(Body):
    """How images are enlarged, without a prompt."""

    resize_mode: int = Field(0, ge=0, le=1, description="0: upscaling_resize times; 1: to a width and a height")
    upscaling_resize: float = Field(2, ge=1, le=8)
    upscaling_resize_w: int = Field(512, ge=1)
    upscaling_resize_h: int = Field(512, ge=1)
    upscaling_crop: bool = Field(True, description="cut what is larger than width and height")
    upscaler_1: str = Field("None", description="one of upscalers")
    upscaler_2: str = Field("None", description="another one, mixed in by extras_upscaler_2_visibility")
    extras_upscaler_2_visibility: float = Field(0, ge=0, le=1)


class SingleRequest(ExtrasRequest, PictureRequest):
    """One picture in base64."""


class File(Body):
    """A picture of several."""

    data: str = Field(description="in base64")
    name: str = ""


class SeveralRequest(ExtrasRequest):
    """Pictures in base64."""

    imageList: list[File]


def submit(engine: Engine, asked: ExtrasRequest, pictures: list[str]) -> tuple[Ticket, list[str | None]]:
    """Queue pictures in base64 to be enlarged; also return their texts.

    Raises ValueError, and Refused for restoring faces.
    """
    for name in FACES:
        if (asked.model_extra or {}).get(name):
            raise Refused(422, f"{name} is not supported: leave it out, or give 0")
    if not 1 <= len(pictures) <= engine.limits.max_images:
        raise Refused(422, f"got {len(pictures)} images, expected 1 to {engine.limits.max_images}")
    for name in {asked.upscaler_1, asked.upscaler_2} - {"None", *PIXEL_UPSCALERS}:
        engine.library.file("upscalers", name)
    opened = [open_base64(picture, "image", engine.limits.max_pixels) for picture in pictures]
    images = [to_rgb(image) for image in opened]
    sizes = [_size_of(asked, image)[1] for image in images]
    for size in sizes if asked.upscaler_1 != "None" else ():
        engine.check_size(*size)
        if asked.resize_mode == 1 and asked.upscaling_crop:
            engine.check_size(asked.upscaling_resize_w, asked.upscaling_resize_h)
    ticket = engine.submit_call("extras", functools.partial(_enlarge, engine.library, asked), images, sizes)
    return ticket, [image.info.get("parameters") for image in opened]


def _size_of(asked: ExtrasRequest, image: Image.Image) -> tuple[float, tuple[int, int]]:
    """How many times an image is enlarged, and to which size.  Raises ValueError."""
    if asked.upscaler_1 == "None":
        return 1, image.size
    times = asked.upscaling_resize
    if asked.resize_mode == 1:
        times = max(asked.upscaling_resize_w / image.width, asked.upscaling_resize_h / image.height)
    size = int(image.width * times // MULTIPLE * MULTIPLE), int(image.height * times // MULTIPLE * MULTIPLE)
    if min(size) == 0:
        raise ValueError(f"got an image of {image.width} x {image.height} pixels, expected sides of {MULTIPLE} or more")
    return times, size


def _enlarge(library: Library, asked: ExtrasRequest, image: Image.Image) -> Image.Image:
    """Return the enlarged image.  Runs in the engine's thread."""
    times, size = _size_of(asked, image)
    if asked.upscaler_1 == "None":
        return image

    def by(name: str) -> Image.Image:
        if name not in PIXEL_UPSCALERS:
            return library.upscaler(name).to_size(image, size, least=int(times == 1))
        resized = image.resize((int(image.width * times), int(image.height * times)), PIXEL_UPSCALERS[name])
        return resized if resized.size == size else resized.resize(size, Image.Resampling.LANCZOS)

    enlarged = by(asked.upscaler_1)
    if asked.upscaler_2 != "None" and asked.extras_upscaler_2_visibility > 0:
        enlarged = Image.blend(enlarged, by(asked.upscaler_2), asked.extras_upscaler_2_visibility)
    if asked.resize_mode == 0 or not asked.upscaling_crop:
        return enlarged
    cut = Image.new("RGB", (asked.upscaling_resize_w, asked.upscaling_resize_h))
    cut.paste(enlarged, (cut.width // 2 - enlarged.width // 2, cut.height // 2 - enlarged.height // 2))
    return cut
