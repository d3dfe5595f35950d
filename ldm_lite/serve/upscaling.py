"""What enlarges images in AUTOMATIC1111's API: the second pass of txt2img, and /sdapi/v1/extra-single-image."""

import json
import threading
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import Field

from ldm_lite.cli.task_options import UPSCALERS
from ldm_lite.image import PIXEL_UPSCALERS, to_rgb
from ldm_lite.serve.http import Body, Refused, encoded, open_base64, read_json
from ldm_lite.serve.library import Library
from ldm_lite.serve.queue import Engine

SAME = ("", "Use same sampler", "Use same scheduler")
MULTIPLE = 8  # of the sides of an enlarged image
FACES = ("gfpgan_visibility", "codeformer_visibility")


class HiresFields(Body):
    """The second pass of an image."""

    enable_hr: bool = False
    denoising_strength: float | None = Field(None, description="of the second pass, 0.75 if it is missing")
    hr_scale: float = 2.0
    hr_resize_x: int = Field(0, ge=0, description="the width, in place of hr_scale")
    hr_resize_y: int = Field(0, ge=0, description="the height, in place of hr_scale")
    hr_upscaler: str | None = Field(None, description="one of latent-upscale-modes and upscalers; Latent if missing")
    hr_second_pass_steps: int = Field(0, ge=0, description="0: as many as in the first")
    hr_sampler_name: str | None = None
    hr_scheduler: str | None = None
    hr_prompt: str = ""
    hr_negative_prompt: str = ""


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


class OneRequest(ExtrasRequest):
    """One picture in base64."""

    image: str


class File(Body):
    """A picture of several."""

    data: str = Field(description="in base64")
    name: str = ""


class SeveralRequest(ExtrasRequest):
    """Pictures in base64."""

    imageList: list[File]


def add_upscaling(routes: APIRouter, engine: Engine) -> None:
    """Add the routes that enlarge images, and those that list with what."""
    one_by_one = threading.Lock()  # each takes much memory

    def answer(given: ExtrasRequest, pictures: list[str]) -> tuple[list[str], str]:
        _check_extras(given)
        found = [open_base64(each, "image", engine.limits.max_pixels) for each in pictures]
        with one_by_one:
            made = [_enlarged(engine, given, each) for each in found]
        texts = [each.info.get("parameters") for each in found]
        for image, text in zip(made, texts, strict=True):
            image.info = {} if text is None else {"parameters": text}
        about = {"Postprocess upscaler": given.upscaler_1}
        return [encoded(each) for each in made], json.dumps(about)

    @routes.post("/extra-single-image", openapi_extra=OneRequest.docs())
    async def single(request: Request) -> dict[str, Any]:
        """Enlarge an image."""
        given = await read_json(request, OneRequest)
        images, info = await run_in_threadpool(answer, given, [given.image])
        return {"html_info": info, "image": images[0]}

    @routes.post("/extra-batch-images", openapi_extra=SeveralRequest.docs())
    async def several(request: Request) -> dict[str, Any]:
        """Enlarge images."""
        given = await read_json(request, SeveralRequest)
        if len(given.imageList) > engine.limits.max_images:
            raise Refused(422, f"got {len(given.imageList)} images, wanted at most {engine.limits.max_images}")
        images, info = await run_in_threadpool(answer, given, [each.data for each in given.imageList])
        return {"html_info": info, "images": images}

    @routes.get("/upscalers")
    def upscalers() -> list[dict[str, Any]]:
        """What enlarges pixels: of `upscalers`, and without a network."""
        none = {"model_name": None, "model_path": None, "model_url": None, "scale": 4}
        return [{"name": name, **none} for name in ("None", *PIXEL_UPSCALERS, *engine.library.upscalers)]

    @routes.get("/latent-upscale-modes")
    def modes() -> list[dict[str, str]]:
        """What enlarges latents."""
        return [{"name": name} for name in UPSCALERS]


def hires_options(given: Any, library: Library) -> dict[str, Any]:
    """Return the options of the second pass that a request with HiresFields asks for.  Raises ValueError."""
    own = library.model.family.resolution
    times = _times(given, given.width or own, given.height or own)
    strength = 0.75 if given.denoising_strength is None else given.denoising_strength
    options: dict[str, Any] = {"hires": times, "hires_strength": strength}
    options |= {"hires_steps": given.hr_second_pass_steps or None, **_upscaler(given.hr_upscaler, library)}
    names = (given.hr_sampler_name, given.sampler_name or given.sampler_index), (given.hr_scheduler, given.scheduler)
    if any(mine and mine not in SAME for mine, _ in names):
        sampler, kind = (mine if mine and mine not in SAME else first for mine, first in names)
        if not sampler:
            raise ValueError("got hr_scheduler without a sampler: give sampler_name, or hr_sampler_name")
        options["hires_sampler"] = f"webui {sampler} {kind or ''}".strip()
    options |= {"hires_prompt": given.hr_prompt or None, "hires_negative_prompt": given.hr_negative_prompt or None}
    return options


def _times(given: HiresFields, width: int, height: int) -> float:
    """How many times larger the second pass is.  Raises ValueError for a size of another shape."""
    shares = [wanted / side for wanted, side in ((given.hr_resize_x, width), (given.hr_resize_y, height)) if wanted]
    if not shares:
        return given.hr_scale
    if max(shares) - min(shares) > 1e-6:
        size = f"{given.hr_resize_x}x{given.hr_resize_y}"
        raise ValueError(f"hr_resize_x and hr_resize_y, {size}, have not the shape of {width}x{height}: give only one")
    return shares[0] * (1 + 1e-12)  # a product with the side is rounded down


def _upscaler(name: str | None, library: Library) -> dict[str, Any]:
    """Return the options for an upscaler by A1111's name.  Raises ValueError for an unknown one."""
    if name is None or name in UPSCALERS:
        return {} if name is None else {"hires_upscaler": name}
    if name == "None" or name in PIXEL_UPSCALERS:
        return {"hires_upscaler": "Lanczos" if name == "None" else name}
    if name not in library.upscalers:
        known = ", ".join((*UPSCALERS, "None", *PIXEL_UPSCALERS, *library.upscalers))
        raise ValueError(f"unknown hr_upscaler {name!r:.60}: wanted one of {known}")
    return {"hires_esrgan": library.upscaler(name)}


def _check_extras(given: ExtrasRequest) -> None:
    """Raises Refused for what restores faces."""
    for name in FACES:
        if (given.model_extra or {}).get(name):
            raise Refused(422, f"{name} is not supported: leave it out, or give 0")


def _enlarged(engine: Engine, given: ExtrasRequest, image: Image.Image) -> Image.Image:
    """Enlarge an image as A1111 does.  Raises ValueError."""
    image, width, height = to_rgb(image), given.upscaling_resize_w, given.upscaling_resize_h
    if given.upscaler_1 == "None":
        return image
    to_this = given.resize_mode == 1
    times = max(width / image.width, height / image.height) if to_this else given.upscaling_resize
    size = int(image.width * times // MULTIPLE * MULTIPLE), int(image.height * times // MULTIPLE * MULTIPLE)
    if min(size) == 0:
        raise ValueError(f"got an image of {image.width} x {image.height} pixels, wanted sides of {MULTIPLE} or more")
    engine.check_size(*size)
    made = _by(engine.library, given.upscaler_1, image, size, times)
    if given.upscaler_2 != "None" and given.extras_upscaler_2_visibility > 0:
        other = _by(engine.library, given.upscaler_2, image, size, times)
        made = Image.blend(made, other, given.extras_upscaler_2_visibility)
    if not (to_this and given.upscaling_crop):
        return made
    engine.check_size(width, height)
    cut = Image.new("RGB", (width, height))
    cut.paste(made, (width // 2 - made.width // 2, height // 2 - made.height // 2))
    return cut


def _by(library: Library, name: str, image: Image.Image, size: tuple[int, int], times: float) -> Image.Image:
    if name not in PIXEL_UPSCALERS:
        return library.upscaler(name).to_size(image, size, least=int(times == 1))
    resized = image.resize((int(image.width * times), int(image.height * times)), PIXEL_UPSCALERS[name])
    return resized if resized.size == size else resized.resize(size, Image.Resampling.LANCZOS)
