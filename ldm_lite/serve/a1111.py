"""AUTOMATIC1111's API: /sdapi/v1/txt2img, img2img, samplers, sd-models, options, loras, progress, interrupt, png-info.

What enlarges images is in upscaling.py.

A field that would change the image and that ldm_lite does not have is refused unless it is at its neutral value; other
fields that are not heeded are named in the answer's info, under "ignored".
"""

import json
import re
import secrets
import threading
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field

from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.diffusion.names import has, resolve
from ldm_lite.diffusion.webui import OFFERED, TYPES, from_webui
from ldm_lite.serve.http import Body, Refused, encoded, ended, open_base64, read_json
from ldm_lite.serve.library import Loras
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.queue import Ticket
from ldm_lite.serve.upscaling import HiresFields, add_upscaling, hires_options
from ldm_lite.text.parameters import read_parameters, text_of
from ldm_lite.toolkit import lora_weight

VERSION = {"Version": "v1.10.0"}  # whose names and defaults these are
EMPTY = ("sd-vae", "hypernetworks", "face-restorers", "realesrgan-models")
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
_LORA = re.compile(r"<(?:lora|lyco):([^<>:]{1,200}):?([^<>]{0,400})>")


class Txt2imgRequest(Body):
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


class OwnTxt2imgRequest(Txt2imgRequest, HiresFields):
    """What text to image alone has."""


class Img2imgRequest(Txt2imgRequest):
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


class State:
    """What A1111's clients share: the settings, and the requests that run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.settings: dict[str, Any] = {"sd_model_checkpoint": engine.library.default, "CLIP_stop_at_last_layers": 1}
        self.tickets: list[Ticket] = []
        self._lock = threading.Lock()

    def set(self, given: dict[str, Any]) -> None:
        """Change settings.  Raises ValueError for those that there are not, and for values that do not fit."""
        checked = dict(self.settings)
        for name, value in given.items():
            if name not in checked:
                raise ValueError(f"unknown setting {name!r:.80}: wanted {' or '.join(checked)}")
            if name == "sd_model_checkpoint":
                checked[name] = self.engine.library.check(str(value), ())
            else:
                checked[name] = Txt2imgOptions(clip_skip=value).clip_skip
        with self._lock:
            self.settings = checked

    @property
    def running(self) -> list[Ticket]:
        """The tickets that have not ended, the oldest first."""
        self.tickets = [ticket for ticket in self.tickets if not ticket.ended]
        return self.tickets


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes, state = APIRouter(prefix="/sdapi/v1", tags=["AUTOMATIC1111"]), State(engine)
    _add_images(routes, state)
    _add_lists(routes, state)
    add_upscaling(routes, engine)

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
        state.set((await read_json(request, Body)).model_extra or {})

    return routes


def _add_images(routes: APIRouter, state: State) -> None:
    """Add the routes that make images."""

    @routes.post("/txt2img", openapi_extra=OwnTxt2imgRequest.docs())
    async def txt2img(request: Request) -> dict[str, Any]:
        """Text to image."""
        return await _respond(request, state, await read_json(request, OwnTxt2imgRequest))

    @routes.post("/img2img", openapi_extra=Img2imgRequest.docs())
    async def img2img(request: Request) -> dict[str, Any]:
        """Image to image, or inpainting with a mask."""
        return await _respond(request, state, await read_json(request, Img2imgRequest))

    @routes.post("/png-info", openapi_extra=PictureRequest.docs())
    async def png_info(request: Request) -> dict[str, Any]:
        """The text of a picture."""
        given = await read_json(request, PictureRequest)
        return await run_in_threadpool(_picture_text, given.image, state.engine.limits.max_pixels)


def _add_lists(routes: APIRouter, state: State) -> None:
    """Add the routes that list what there is; some lists are empty here, but clients ask for them."""
    library = state.engine.library

    @routes.get("/samplers")
    def samplers() -> list[dict[str, Any]]:
        """The samplers of A1111."""
        return [{"name": name, "aliases": [offered.key], "options": {}} for name, offered in OFFERED.items()]

    @routes.get("/schedulers")
    def schedulers() -> list[dict[str, Any]]:
        """The schedule types of A1111."""
        names = ["Automatic", *(name for name in TYPES if name != "Turbo")]
        more = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
        return [{"name": name.lower().replace(" ", "_"), "label": name, **more} for name in names]

    @routes.get("/sd-models")
    def models() -> list[dict[str, Any]]:
        """The models that sd_model_checkpoint may name."""
        none = {"hash": None, "sha256": None, "config": None}
        return [{"title": name, "model_name": name, "filename": name, **none} for name in library.names]

    @routes.get("/loras")
    def loras() -> list[dict[str, Any]]:
        """The LoRAs that prompts may name: <lora:NAME:WEIGHT>."""
        return [{"name": name, "alias": name, "path": name, "metadata": {}} for name in library.loras]

    @routes.get("/scripts")
    def scripts() -> dict[str, list[str]]:
        """None: clients ask for them when they start."""
        return {"txt2img": [], "img2img": []}

    @routes.get("/embeddings")
    def embeddings() -> dict[str, Any]:
        """None."""
        return {"loaded": {}, "skipped": {}}

    @routes.get("/cmd-flags")
    def flags() -> dict[str, Any]:
        """None that a client needs."""
        return {}

    @routes.post("/refresh-checkpoints")
    def refresh() -> None:
        """Folders are read for every request."""

    for path in (*EMPTY, "prompt-styles"):
        routes.add_api_route(f"/{path}", lambda: [], name=path, summary="None here")


async def _respond(request: Request, state: State, given: Txt2imgRequest) -> dict[str, Any]:
    ticket = await run_in_threadpool(_submit, state, given)
    state.tickets.append(ticket)
    await ended(request, ticket, state.engine.limits.timeout)
    return await run_in_threadpool(_answer, ticket, given)


def _answer(ticket: Ticket, given: Txt2imgRequest) -> dict[str, Any]:
    results = ticket.results
    first = results[0]
    info = {
        "prompt": first.prompt,
        "all_prompts": [each.prompt for each in results],
        "negative_prompt": given.negative_prompt,
        "seed": first.seed,
        "all_seeds": [each.seed for each in results],
        "width": first.pixels.shape[2],
        "height": first.pixels.shape[1],
        "steps": ticket.num_steps,
        "batch_size": given.batch_size,
        "sd_model_name": ticket.model,
        "infotexts": [each.parameters for each in results],
        "interrupted": ticket.interrupted,
        "ignored": sorted(name for name in given.model_extra or () if name not in NEUTRAL),
    }
    images = [encoded(each.image) for each in results] if given.send_images else []
    sent = given.model_dump(exclude={"init_images", "mask"})
    return {"images": images, "parameters": sent, "info": json.dumps(info)}


def _submit(state: State, given: Txt2imgRequest) -> Ticket:
    """Queue a request.  Raises ValueError."""
    engine, settings = state.engine, dict(state.settings)
    _check_neutral(given)
    for name, value in (given.override_settings or {}).items():
        if name in settings:
            settings[name] = value
    prompt, loras = _loras(given.prompt)
    seed, subseed = (secrets.randbelow(2**32) if each == -1 else each for each in (given.seed, given.subseed))
    options: dict[str, Any] = {"prompt": prompt, "negative_prompt": given.negative_prompt, "prompt_syntax": "a1111"}
    options |= {"seed": seed, "batch_size": given.batch_size, "n_iter": given.n_iter, "steps": given.steps}
    options |= {"scale": given.cfg_scale, "width": given.width, "height": given.height}
    options |= {"clip_skip": settings["CLIP_stop_at_last_layers"], **_sampler(given)}
    if given.subseed_strength:
        options |= {"variation_seed": subseed, "variation_strength": given.subseed_strength}
    model = str(settings["sd_model_checkpoint"])
    if isinstance(given, OwnTxt2imgRequest) and given.enable_hr:
        options |= hires_options(given, engine.library)
    if not isinstance(given, Img2imgRequest):
        return engine.submit("txt2img", Txt2imgOptions(**options), model, loras)
    most = engine.limits.max_pixels
    if len(given.init_images) != 1:
        raise ValueError(f"got {len(given.init_images)} images as init_images, wanted one")
    image = open_base64(given.init_images[0], "init_images", most)
    resize = ("stretch", "crop", "fit")[given.resize_mode]
    options |= {"init_img": (image,), "strength": given.denoising_strength, "resize": resize}
    if given.mask is None:
        return engine.submit("img2img", Img2imgOptions(**options), model, loras)
    mask = open_base64(given.mask, "mask", most)
    inverted = bool(given.inpainting_mask_invert)
    more: dict[str, Any] = {"mask": (_fitting(mask, image),), "feather": given.mask_blur, "invert_mask": inverted}
    more["masked_content"] = ("fill", "original", "noise", "nothing")[given.inpainting_fill]
    more["only_masked"] = given.inpaint_full_res_padding if given.inpaint_full_res else None
    return engine.submit("inpaint", InpaintOptions(**options, **more), model, loras)


def _fitting(mask: Image.Image, image: Image.Image) -> Image.Image:
    """A mask of the image's proportions, as A1111 makes it: without regard to its own."""
    return mask if mask.size == image.size else mask.convert("L").resize(ImageOps.exif_transpose(image).size)


def _check_neutral(given: Txt2imgRequest) -> None:
    """Raises Refused for a field that would change the image and is not one of ldm_lite's."""
    for name, value in (given.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refused(422, f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}")
    for name, script in (given.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if arguments and arguments != [False]:
            raise Refused(422, f"the script {name!r:.60} is not supported: leave it out of alwayson_scripts")


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


def _sampler(given: Txt2imgRequest) -> dict[str, Any]:
    """The options for a sampler by A1111's name, or by one of ldm_lite's.  Raises ValueError."""
    name = given.sampler_name or given.sampler_index
    if not name:
        return {}
    kind = (given.scheduler or "").strip() or "Automatic"
    try:
        key, spacing = from_webui(name, VERSION | {"Schedule type": kind})
    except ValueError:
        if name in OFFERED:
            raise
        key, named = resolve(name)
        return {"sampler": key, "spacing": named}
    options: dict[str, Any] = {"sampler": key, "spacing": spacing}
    for option, value in (("eta", given.eta), ("churn", given.s_churn)):
        if value is not None and has(key, option):
            options[option] = value
    return options


def _picture_text(picture: str, most: int) -> dict[str, Any]:
    image = open_base64(picture, "image", most)
    text = text_of(image)
    if text is None:
        return {"info": "", "items": {}, "parameters": {}}
    try:
        parsed = read_parameters(image)
    except ValueError:
        return {"info": text, "items": {"parameters": text}, "parameters": {}}
    settings = {"Prompt": parsed.prompt, "Negative prompt": parsed.negative_prompt or "", **parsed.settings}
    return {"info": text, "items": {"parameters": text}, "parameters": settings}
