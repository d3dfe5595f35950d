"""AUTOMATIC1111's API, under /sdapi/v1: images, extras, what there is to choose from, settings, progress, interrupt.

A field that would change the image and that ldm_lite does not have is refused unless it is at its neutral value; other
fields that are not heeded are named in the answer's info, under "ignored".
"""

import json
import re
import secrets
import threading
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field

from ldm_lite.cli.task_options import UPSCALERS, Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.diffusion.names import has, resolve
from ldm_lite.diffusion.webui import OFFERED, TYPES, from_webui
from ldm_lite.image import PIXEL_UPSCALERS, to_rgb
from ldm_lite.serve.http import Body, Refused, encoded, ended, open_base64, read_json
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.queue import Engine, Ticket
from ldm_lite.text.parameters import read_parameters, text_of
from ldm_lite.toolkit import lora_weight

VERSION = {"Version": "v1.10.0"}  # whose names and defaults these are
NEUTRAL: dict[str, tuple[object, ...]] = {  # field that would change the image -> values at which it does nothing
    "hr_checkpoint_name": ("Use same checkpoint", ""),
    "enable_hr": (False,),  # of img2img
    "restore_faces": (False,),
    "tiling": (False,),
    "styles": ([],),
    "seed_resize_from_h": (0, -1),
    "seed_resize_from_w": (0, -1),
    "s_tmin": (0,),
    "s_noise": (1,),
    "script_name": ("",),
    "image_cfg_scale": (1.5,),
}
EMPTY = ("sd-vae", "hypernetworks", "face-restorers", "realesrgan-models", "prompt-styles")
SAME = (None, "", "Use same sampler", "Use same scheduler")  # in the second pass as in the first
FACES = ("gfpgan_visibility", "codeformer_visibility")
MULTIPLE = 8  # of the sides of an enlarged image
_LORA = re.compile(r"<(?:lora|lyco):([^<>:]{1,200}):?([^<>]{0,400})>")

# ---- requests -------------------------------------------------------------------------------------------------------


class ImagesRequest(Body):
    """What both tasks have; the defaults are the model's own."""

    prompt: str = ""
    negative_prompt: str = ""
    seed: int = Field(-1, description="-1: random; image k has seed + k")
    sampler_name: str | None = None
    sampler_index: str | None = Field(None, description="the sampler, if sampler_name is missing")
    scheduler: str | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    batch_size: int = Field(1, ge=1)
    n_iter: int = Field(1, ge=1)
    subseed: int = Field(-1, description="-1: random; mixed in by subseed_strength")
    subseed_strength: float = 0
    eta: float | None = None
    s_churn: float | None = None
    send_images: bool = True
    override_settings: dict[str, Any] | None = Field(None, description="sd_model_checkpoint, CLIP_stop_at_last_layers")
    alwayson_scripts: dict[str, Any] | None = None


class Txt2imgRequest(ImagesRequest):
    """The second pass."""

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


class Img2imgRequest(ImagesRequest):
    """What to start from."""

    init_images: list[str] = Field([], description="one image in base64")
    mask: str | None = Field(None, description="white is repainted")
    denoising_strength: float = 0.75
    resize_mode: int = Field(0, ge=0, le=2, description="0 stretches, 1 crops, 2 fits")
    mask_blur: float = 4
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    inpainting_fill: int = Field(0, ge=0, le=3, description="under the mask: 0 fill, 1 original, 2 noise, 3 nothing")
    inpaint_full_res: bool = Field(True, description="only the masked area, at width and height")
    inpaint_full_res_padding: int = Field(0, ge=0, description="more pixels around that area")


class PictureRequest(Body):
    """A picture in base64."""

    image: str


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


class SingleRequest(ExtrasRequest):
    """One picture in base64."""

    image: str


class File(Body):
    """A picture of several."""

    data: str = Field(description="in base64")
    name: str = ""


class SeveralRequest(ExtrasRequest):
    """Pictures in base64."""

    imageList: list[File]


# ---- routes ---------------------------------------------------------------------------------------------------------


class State:
    """What A1111's clients share: the settings, and the requests that run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.settings: dict[str, Any] = {"sd_model_checkpoint": engine.library.default, "CLIP_stop_at_last_layers": 1}
        self.tickets: list[Ticket] = []
        self.one_by_one = threading.Lock()  # enlarging takes much memory

    @property
    def running(self) -> list[Ticket]:
        """The tickets that have not ended, the oldest first."""
        self.tickets = [ticket for ticket in self.tickets if not ticket.ended]
        return self.tickets


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes, state, library = APIRouter(prefix="/sdapi/v1", tags=["AUTOMATIC1111"]), State(engine), engine.library

    @routes.post("/txt2img", openapi_extra=Txt2imgRequest.docs())
    async def txt2img(request: Request) -> dict[str, Any]:
        """Text to image."""
        return await _respond(request, state, await read_json(request, Txt2imgRequest))

    @routes.post("/img2img", openapi_extra=Img2imgRequest.docs())
    async def img2img(request: Request) -> dict[str, Any]:
        """Image to image, or inpainting with a mask."""
        return await _respond(request, state, await read_json(request, Img2imgRequest))

    @routes.post("/extra-single-image", openapi_extra=SingleRequest.docs())
    async def single(request: Request) -> dict[str, Any]:
        """Enlarge an image."""
        asked = await read_json(request, SingleRequest)
        [image] = await run_in_threadpool(_enlarged, state, asked, [asked.image])
        return {"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "image": image}

    @routes.post("/extra-batch-images", openapi_extra=SeveralRequest.docs())
    async def several(request: Request) -> dict[str, Any]:
        """Enlarge images."""
        asked = await read_json(request, SeveralRequest)
        images = await run_in_threadpool(_enlarged, state, asked, [file.data for file in asked.imageList])
        return {"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "images": images}

    @routes.post("/png-info", openapi_extra=PictureRequest.docs())
    async def png_info(request: Request) -> dict[str, Any]:
        """The text of a picture."""
        asked = await read_json(request, PictureRequest)
        image = await run_in_threadpool(open_base64, asked.image, "image", engine.limits.max_pixels)
        text, settings = text_of(image), {}
        if text is None:
            return {"info": "", "items": {}, "parameters": {}}
        try:
            parsed = read_parameters(image)
            settings = {"Prompt": parsed.prompt, "Negative prompt": parsed.negative_prompt or "", **parsed.settings}
        except ValueError:
            pass
        return {"info": text, "items": {"parameters": text}, "parameters": settings}

    @routes.get("/progress")
    def progress(skip_current_image: bool = False) -> dict[str, Any]:
        """The progress of the oldest request, and its preview."""
        running = state.running
        first = running[0] if running else None
        image = None if first is None or skip_current_image else first.preview()
        about = {
            "skipped": False,
            "interrupted": bool(first and first.interrupted),
            "stopping_generation": False,
            "job": first.task if first else "",
            "job_count": len(running),
            "job_timestamp": "0",
            "job_no": len(first.results) if first else 0,
            "sampling_step": first.step if first else 0,
            "sampling_steps": first.num_steps if first else 0,
        }
        share = first.progress if first else 0.0
        current = None if image is None else encoded(image)
        return {"progress": share, "eta_relative": 0.0, "state": about, "current_image": current, "textinfo": None}

    @routes.post("/interrupt")
    @routes.post("/skip")
    def interrupt() -> dict[str, Any]:
        """Stop this API's oldest request after its step; its answer holds what is there."""
        for ticket in state.running[:1]:
            ticket.interrupt()
        return {}

    @routes.get("/options")
    def options() -> dict[str, Any]:
        """The settings of this API's requests."""
        return state.settings

    @routes.post("/options", openapi_extra=Body.docs())
    async def set_options(request: Request) -> None:
        """Set the model and the layer of the text encoder for this API's requests."""
        changed: dict[str, Any] = {}
        for name, value in ((await read_json(request, Body)).model_extra or {}).items():
            if name not in state.settings:
                raise ValueError(f"unknown setting {name!r:.80}: wanted {' or '.join(state.settings)}")
            if name == "sd_model_checkpoint":
                changed[name] = library.check(str(value), ())
            else:
                changed[name] = Txt2imgOptions(clip_skip=value).clip_skip
        state.settings = state.settings | changed

    @routes.post("/refresh-checkpoints")
    def refresh() -> None:
        """Folders are read for every request."""

    no_file, no_path = {"hash": None, "sha256": None, "config": None}, {"model_path": None, "model_url": None}
    schedule = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    schedules = ["Automatic", *(name for name in TYPES if name != "Turbo")]
    lists: dict[str, Callable[[], Any]] = {
        "samplers": lambda: [{"name": name, "aliases": [OFFERED[name].key], "options": {}} for name in OFFERED],
        "schedulers": lambda: [
            {"name": name.lower().replace(" ", "_"), "label": name, **schedule} for name in schedules
        ],
        "sd-models": lambda: [
            {"title": name, "model_name": name, "filename": name, **no_file} for name in library.names
        ],
        "loras": lambda: [
            {"name": name, "alias": name, "path": name, "metadata": {}} for name in library.files("loras")
        ],
        "upscalers": lambda: [
            {"name": name, "model_name": None, "scale": 4, **no_path}
            for name in ("None", *PIXEL_UPSCALERS, *library.files("upscalers"))
        ],
        "latent-upscale-modes": lambda: [{"name": name} for name in UPSCALERS],
        # of these there is none here, but clients ask for them when they start
        "scripts": lambda: {"txt2img": [], "img2img": []},
        "embeddings": lambda: {"loaded": {}, "skipped": {}},
        "cmd-flags": lambda: {},
        **dict.fromkeys(EMPTY, lambda: []),
    }
    for path, names in lists.items():
        routes.add_api_route(f"/{path}", names, name=path)

    return routes


# ---- images ---------------------------------------------------------------------------------------------------------


async def _respond(request: Request, state: State, asked: ImagesRequest) -> dict[str, Any]:
    ticket = await run_in_threadpool(_submit, state, asked)
    state.tickets.append(ticket)
    await ended(request, ticket, state.engine.limits.timeout)
    results = ticket.results
    first = results[0]
    info = {
        "prompt": first.prompt,
        "all_prompts": [result.prompt for result in results],
        "negative_prompt": asked.negative_prompt,
        "seed": first.seed,
        "all_seeds": [result.seed for result in results],
        "width": first.pixels.shape[2],
        "height": first.pixels.shape[1],
        "steps": ticket.num_steps,
        "batch_size": asked.batch_size,
        "sd_model_name": ticket.model,
        "infotexts": [result.parameters for result in results],
        "interrupted": ticket.interrupted,
        "ignored": sorted(name for name in asked.model_extra or () if name not in NEUTRAL),
    }
    images = [await run_in_threadpool(encoded, result.image) for result in results if asked.send_images]
    sent = asked.model_dump(exclude={"init_images", "mask"})
    return {"images": images, "parameters": sent, "info": json.dumps(info)}


def _submit(state: State, asked: ImagesRequest) -> Ticket:
    """Queue a request.  Raises ValueError, and Refused for a field that would change the image and is not ours."""
    engine, settings, most = state.engine, dict(state.settings), state.engine.limits.max_pixels
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refused(422, f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}")
    for name, script in (asked.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if arguments and arguments != [False]:
            raise Refused(422, f"the script {name!r:.60} is not supported: leave it out of alwayson_scripts")
    settings |= {name: value for name, value in (asked.override_settings or {}).items() if name in settings}
    model = str(settings["sd_model_checkpoint"])
    prompt, loras = _loras(asked.prompt)
    seed, subseed = (secrets.randbelow(2**32) if number == -1 else number for number in (asked.seed, asked.subseed))
    options: dict[str, Any] = {"prompt": prompt, "negative_prompt": asked.negative_prompt, "prompt_syntax": "a1111"}
    options |= {"seed": seed, "batch_size": asked.batch_size, "n_iter": asked.n_iter, "steps": asked.steps}
    options |= {"scale": asked.cfg_scale, "width": asked.width, "height": asked.height}
    options |= {"clip_skip": settings["CLIP_stop_at_last_layers"], **_sampler(asked)}
    if asked.subseed_strength:
        options |= {"variation_seed": subseed, "variation_strength": asked.subseed_strength}
    if isinstance(asked, Txt2imgRequest):
        options |= _second_pass(asked, engine.library) if asked.enable_hr else {}
        return engine.submit("txt2img", Txt2imgOptions(**options), model, loras)
    assert isinstance(asked, Img2imgRequest)
    if len(asked.init_images) != 1:
        raise ValueError(f"got {len(asked.init_images)} images as init_images, wanted one")
    image = open_base64(asked.init_images[0], "init_images", most)
    resize = ("stretch", "crop", "fit")[asked.resize_mode]
    options |= {"init_img": (image,), "strength": asked.denoising_strength, "resize": resize}
    if asked.mask is None:
        return engine.submit("img2img", Img2imgOptions(**options), model, loras)
    mask = open_base64(asked.mask, "mask", most)
    if mask.size != image.size:  # it gets the image's proportions, as in A1111, without regard to its own
        mask = mask.convert("L").resize(ImageOps.exif_transpose(image).size)
    options |= {"mask": (mask,), "feather": asked.mask_blur, "invert_mask": bool(asked.inpainting_mask_invert)}
    options["masked_content"] = ("fill", "original", "noise", "nothing")[asked.inpainting_fill]
    options["only_masked"] = asked.inpaint_full_res_padding if asked.inpaint_full_res else None
    return engine.submit("inpaint", InpaintOptions(**options), model, loras)


def _loras(prompt: str) -> tuple[str, Loras]:
    """Take <lora:NAME:WEIGHT> out of a prompt; WEIGHT may name networks and blocks.  Raises ValueError for others."""
    if "<hypernet:" in prompt:
        raise ValueError("hypernetworks are not supported: leave <hypernet:...> out of the prompt")
    loras = []
    for name, weight in _LORA.findall(prompt):
        try:
            loras.append((name, lora_weight(weight)))
        except ValueError as error:
            raise ValueError(f"the LoRA {name!r}: {error}") from None
    return _LORA.sub("", prompt), tuple(loras)


def _sampler(asked: ImagesRequest) -> dict[str, Any]:
    """The options for a sampler by A1111's name, or by one of ldm_lite's.  Raises ValueError."""
    name = asked.sampler_name or asked.sampler_index
    if not name:
        return {}
    kind = (asked.scheduler or "").strip() or "Automatic"
    try:
        key, spacing = from_webui(name, VERSION | {"Schedule type": kind})
    except ValueError:
        if name in OFFERED:
            raise
        return dict(zip(("sampler", "spacing"), resolve(name), strict=True))
    options: dict[str, Any] = {"sampler": key, "spacing": spacing}
    for option, value in (("eta", asked.eta), ("churn", asked.s_churn)):
        if value is not None and has(key, option):
            options[option] = value
    return options


def _second_pass(asked: Txt2imgRequest, library: Library) -> dict[str, Any]:
    """The options of the second pass.  Raises ValueError."""
    side, strength = library.model.family.resolution, asked.denoising_strength
    width, height, times = asked.width or side, asked.height or side, asked.hr_scale
    shares = [wanted / side for wanted, side in ((asked.hr_resize_x, width), (asked.hr_resize_y, height)) if wanted]
    if shares:
        if max(shares) - min(shares) > 1e-6:
            size = f"{asked.hr_resize_x}x{asked.hr_resize_y}"
            raise ValueError(
                f"hr_resize_x and hr_resize_y, {size}, have not the shape of {width}x{height}: give only one"
            )
        times = shares[0] * (1 + 1e-12)  # a product with the side is rounded down
    options: dict[str, Any] = {"hires": times, "hires_strength": 0.75 if strength is None else strength}
    options |= {"hires_steps": asked.hr_second_pass_steps or None}
    options |= {"hires_prompt": asked.hr_prompt or None, "hires_negative_prompt": asked.hr_negative_prompt or None}

    upscaler, networks = asked.hr_upscaler, library.files("upscalers")
    if upscaler in networks and upscaler not in (*UPSCALERS, "None", *PIXEL_UPSCALERS):
        options["hires_esrgan"] = library.upscaler(upscaler)
    elif upscaler in (*UPSCALERS, "None", *PIXEL_UPSCALERS):
        options["hires_upscaler"] = "Lanczos" if upscaler == "None" else upscaler
    elif upscaler is not None:
        known = ", ".join((*UPSCALERS, "None", *PIXEL_UPSCALERS, *networks))
        raise ValueError(f"unknown hr_upscaler {upscaler!r:.60}: wanted one of {known}")

    if asked.hr_sampler_name not in SAME or asked.hr_scheduler not in SAME:
        first = asked.sampler_name or asked.sampler_index
        sampler = first if asked.hr_sampler_name in SAME else asked.hr_sampler_name
        kind = asked.scheduler if asked.hr_scheduler in SAME else asked.hr_scheduler
        if not sampler:
            raise ValueError("got hr_scheduler without a sampler: give sampler_name, or hr_sampler_name")
        options["hires_sampler"] = f"webui {sampler} {kind or ''}".strip()
    return options


# ---- extras ---------------------------------------------------------------------------------------------------------


def _enlarged(state: State, asked: ExtrasRequest, pictures: list[str]) -> list[str]:
    """Enlarge images, all in base64, as A1111 does.  Raises ValueError, and Refused for what restores faces."""
    limits = state.engine.limits
    if len(pictures) > limits.max_images:
        raise Refused(422, f"got {len(pictures)} images, wanted at most {limits.max_images}")
    for name in FACES:
        if (asked.model_extra or {}).get(name):
            raise Refused(422, f"{name} is not supported: leave it out, or give 0")
    answers = []
    for image in [open_base64(picture, "image", limits.max_pixels) for picture in pictures]:
        with state.one_by_one:
            enlarged = _enlarge(state.engine, asked, to_rgb(image))
        text = image.info.get("parameters")
        enlarged.info = {} if text is None else {"parameters": text}
        answers.append(encoded(enlarged))
    return answers


def _enlarge(engine: Engine, asked: ExtrasRequest, image: Image.Image) -> Image.Image:
    if asked.upscaler_1 == "None":
        return image
    width, height, times = asked.upscaling_resize_w, asked.upscaling_resize_h, asked.upscaling_resize
    if asked.resize_mode == 1:
        times = max(width / image.width, height / image.height)
    size = int(image.width * times // MULTIPLE * MULTIPLE), int(image.height * times // MULTIPLE * MULTIPLE)
    if min(size) == 0:
        raise ValueError(f"got an image of {image.width} x {image.height} pixels, wanted sides of {MULTIPLE} or more")
    engine.check_size(*size)

    def by(name: str) -> Image.Image:
        if name not in PIXEL_UPSCALERS:
            return engine.library.upscaler(name).to_size(image, size, least=int(times == 1))
        resized = image.resize((int(image.width * times), int(image.height * times)), PIXEL_UPSCALERS[name])
        return resized if resized.size == size else resized.resize(size, Image.Resampling.LANCZOS)

    enlarged = by(asked.upscaler_1)
    if asked.upscaler_2 != "None" and asked.extras_upscaler_2_visibility > 0:
        enlarged = Image.blend(enlarged, by(asked.upscaler_2), asked.extras_upscaler_2_visibility)
    if asked.resize_mode == 0 or not asked.upscaling_crop:
        return enlarged
    engine.check_size(width, height)
    cut = Image.new("RGB", (width, height))
    cut.paste(enlarged, (width // 2 - enlarged.width // 2, height // 2 - enlarged.height // 2))
    return cut
