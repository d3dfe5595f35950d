"""AUTOMATIC1111's API, under /sdapi/v1: images, extras, what there is to choose from, settings, progress, interrupt.

Under /controlnet is that of its extension for ControlNets.  Settings, progress and interrupt are each client's own.
A field that would change the image and that ldm_lite does not have is refused unless it is at its neutral value; other
fields that are ignored are named in the answer's info, under "ignored".
"""

import dataclasses
import functools
import json
import math
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field

from ldm_lite import Control
from ldm_lite.cli.options import RANDOM_SEEDS
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.diffusion.names import has, resolve
from ldm_lite.diffusion.webui import OFFERED, TYPES, from_webui
from ldm_lite.image import PIXEL_UPSCALERS, to_pil, to_rgb
from ldm_lite.serve import http
from ldm_lite.serve.http import Body, PictureRequest, Refused, encoded, open_base64, read_json, reading
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.queue import CLIENT, Engine, Ticket
from ldm_lite.text.parameters import read_parameters, text_of
from ldm_lite.toolkit import lora_weight

UPSCALERS = [  # of latents
    name
    for row in dataclasses.fields(Txt2imgOptions)
    if row.name == "hires_upscaler"
    for name in row.metadata["choices"]
    if name not in PIXEL_UPSCALERS
]
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
SAME_NAMES = ("negative_prompt", "seed", "batch_size", "n_iter", "steps", "width", "height")  # in the options
EMPTY = ("sd-vae", "hypernetworks", "face-restorers", "realesrgan-models", "prompt-styles")
NOT_HERE: dict[str, object] = {  # what A1111 tells of an image that is made without it
    "restore_faces": False,
    "face_restoration_model": None,
    "sd_vae_name": None,
    "sd_vae_hash": None,
    "seed_resize_from_w": -1,
    "seed_resize_from_h": -1,
    "extra_generation_params": {},
    "index_of_first_image": 0,
    "styles": [],
}
SAME = (None, "", "Use same sampler", "Use same scheduler")  # in the second pass as in the first
FACES = ("gfpgan_visibility", "codeformer_visibility")
MULTIPLE = 8  # of the sides of an enlarged image
MOST_CLIENTS = 1000  # whose settings are kept
MODULES = {"none": "none", "canny": "canny", "inpaint": "inpaint", "inpaint_only": "inpaint"}  # of ControlNets
THRESHOLDS = {"a": 100.0, "b": 200.0}  # of canny
FITTED = {0: "stretch", "Just Resize": "stretch", 2: "pad", "Resize and Fill": "pad"}  # resize modes; others crop
MODES = {0: False, "Balanced": False, 2: True, "ControlNet is more important": True}  # whether Control guesses
_LORA = re.compile(r"<(?:lora|lyco):([^<>:]{1,200}+):?+([^<>]{0,400}+)>")

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


class Unit(Body):
    """A ControlNet of alwayson_scripts.controlnet.args."""

    enabled: bool = True
    module: str = "none"
    model: str = "None"
    weight: float = 1.0
    image: str | dict[str, Any] | None = None
    input_image: str | None = None
    mask: str | None = None
    mask_image: str | None = None
    resize_mode: int | str = 1
    threshold_a: float = -1
    threshold_b: float = -1
    guidance_start: float = 0.0
    guidance_end: float = 1.0
    control_mode: int | str = 0


class DetectRequest(Body):
    """Images to prepare for a ControlNet."""

    controlnet_module: str = "none"
    controlnet_input_images: list[str] = Field([], description="in base64")
    controlnet_images: list[str] = Field([], description="another name of the same")
    controlnet_processor_res: int = Field(512, description="pixels of the short side")
    controlnet_threshold_a: float = -1
    controlnet_threshold_b: float = -1


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


# ---- routes ---------------------------------------------------------------------------------------------------------


class State:
    """What A1111's clients have on the server, each its own: settings, and requests that run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tickets = WeakSet[Ticket]()
        self._settings: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by client

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the client that asks."""
        title, digest = self.engine.library.title("models", self.engine.library.default)
        usual = {"sd_model_checkpoint": title, "sd_checkpoint_hash": digest, "CLIP_stop_at_last_layers": 1}
        return usual | self._settings.get(CLIENT.get(), {})

    def set(self, changed: dict[str, Any]) -> None:
        """Change settings of the client that asks."""
        client = CLIENT.get()
        self._settings[client] = self._settings.pop(client, {}) | changed
        if len(self._settings) > MOST_CLIENTS:
            self._settings.popitem(last=False)

    @property
    def running(self) -> list[Ticket]:
        """The tickets of the client that asks, the oldest first."""
        queue = list(self.engine.queue)
        return [ticket for ticket in queue if ticket in self.tickets and ticket.client == CLIENT.get()]


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
        [image] = await _enlarged(request, state, asked, [asked.image])
        return {"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "image": image}

    @routes.post("/extra-batch-images", openapi_extra=SeveralRequest.docs())
    async def several(request: Request) -> dict[str, Any]:
        """Enlarge images."""
        asked = await read_json(request, SeveralRequest)
        images = await _enlarged(request, state, asked, [file.data for file in asked.imageList])
        return {"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "images": images}

    @routes.post("/png-info", openapi_extra=PictureRequest.docs())
    async def png_info(request: Request) -> dict[str, Any]:
        """The text of a picture."""
        asked = await read_json(request, PictureRequest)
        image = await reading(request, open_base64, asked.image, "image", engine.limits.max_pixels)
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
        """The progress of the client's oldest request, and its preview."""
        running = state.running
        about: dict[str, Any] = {"skipped": False, "interrupted": False, "stopping_generation": False}
        about |= {"job": "", "job_count": len(running), "job_timestamp": "0", "job_no": 0}
        about |= {"sampling_step": 0, "sampling_steps": 0}
        fraction, image = 0.0, None
        for ticket in running[:1]:
            about |= {"interrupted": ticket.interrupted, "job": ticket.task, "job_no": len(ticket.results)}
            about |= {"job_timestamp": _timestamp(ticket), "sampling_step": ticket.step}
            about["sampling_steps"] = ticket.num_steps
            fraction, image = ticket.progress, None if skip_current_image else ticket.preview()
        current = None if image is None else encoded(image)
        return {
            "progress": fraction,
            "eta_relative": 0.0,
            "state": about,
            "current_image": current,
            "textinfo": None,
        }

    @routes.post("/interrupt")
    @routes.post("/skip")
    def interrupt() -> dict[str, Any]:
        """Stop the client's oldest request after its step; its answer holds what is there."""
        for ticket in state.running[:1]:
            ticket.interrupt()
        return {}

    @routes.get("/options")
    def options() -> dict[str, Any]:
        """The settings of the client's requests."""
        return state.settings

    @routes.post("/options", openapi_extra=Body.docs())
    async def set_options(request: Request) -> None:
        """Set the model and the layer of the text encoder for the client's requests."""
        changed: dict[str, Any] = {}
        for name, value in ((await read_json(request, Body)).model_extra or {}).items():
            if name == "sd_model_checkpoint":
                title, digest = library.title("models", library.check_request(str(value), ()))
                changed |= {name: title, "sd_checkpoint_hash": digest}
            elif name == "CLIP_stop_at_last_layers":
                changed[name] = Txt2imgOptions(clip_skip=value).clip_skip
            elif name != "sd_checkpoint_hash":
                raise ValueError(f"unknown setting {name!r:.80}: expected {' or '.join(state.settings)}")
        state.set(changed)

    def refresh() -> None:
        """Folders are read for every request, and models are loaded when a request names them."""

    for path in ("refresh-checkpoints", "refresh-loras", "refresh-embeddings", "refresh-vae", "reload-checkpoint"):
        routes.add_api_route(f"/{path}", refresh, methods=["POST"], name=path)

    @routes.post("/unload-checkpoint")
    def unload() -> dict[str, Any]:
        """Free the model's memory once nothing waits; the next request loads it again."""
        engine.unload()
        return {}

    @routes.get("/memory")
    def memory() -> dict[str, Any]:
        """Bytes that the process and the device use."""
        page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        statm = Path("/proc/self/statm")
        used = int(statm.read_text().split()[1]) * page if statm.exists() else 0
        about: dict[str, Any] = {"ram": {"free": total - used, "used": used, "total": total}, "cuda": {}}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            now = torch.cuda.memory_stats()
            about["cuda"]["system"] = {"free": free, "used": total - free, "total": total}
            for kind in ("active", "allocated", "reserved"):
                peak = now.get(f"{kind}_bytes.all.peak", 0)
                about["cuda"][kind] = {"current": now.get(f"{kind}_bytes.all.current", 0), "peak": peak}
        return about

    def model(name: str) -> dict[str, Any]:
        title, digest = library.title("models", name)
        about = {"title": title, "model_name": name, "hash": digest or None, "sha256": None}
        return about | {"filename": title.rpartition(" [")[0] or name, "config": None}

    def embeddings() -> dict[str, Any]:
        about = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None}
        shapes = {name: (1, *next(iter(sizes.values()), (0,))) for name, (_, sizes) in library.embeddings().items()}
        return {name: about | {"shape": shape[-1], "vectors": shape[-2]} for name, shape in shapes.items()}

    no_path = {"model_path": None, "model_url": None}
    schedule = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    schedules = ["Automatic", *(name for name in TYPES if name != "Turbo")]
    lists: dict[str, Callable[[], Any]] = {
        "samplers": lambda: [{"name": name, "aliases": [OFFERED[name].key], "options": {}} for name in OFFERED],
        "schedulers": lambda: [
            {"name": name.lower().replace(" ", "_"), "label": name, **schedule} for name in schedules
        ],
        "sd-models": lambda: [model(name) for name in library.names],
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
        "embeddings": lambda: {"loaded": embeddings(), "skipped": {}},
        "cmd-flags": lambda: {},
        **dict.fromkeys(EMPTY, lambda: []),
    }
    for path, names in lists.items():
        routes.add_api_route(f"/{path}", names, name=path)
    every = APIRouter()
    every.include_router(routes)
    every.include_router(_controlnets(engine))
    return every


# ---- images ---------------------------------------------------------------------------------------------------------


async def _respond(request: Request, state: State, asked: ImagesRequest) -> dict[str, Any]:
    ticket, ignored = await reading(request, _submit, state, asked)
    left_out = ("init_images", "mask", "alwayson_scripts", "override_settings")
    sent = {name: getattr(asked, name) for name in type(asked).model_fields if name not in left_out}
    del asked  # whose pictures would stay in memory while it waits
    state.tickets.add(ticket)
    await http.ended(request, ticket)
    images = [await run_in_threadpool(encoded, result.image) for result in ticket.results if sent["send_images"]]
    return {"images": images, "parameters": sent, "info": json.dumps(_info(state, ticket, sent) | {"ignored": ignored})}


def _timestamp(ticket: Ticket) -> str:
    return time.strftime("%Y%m%d%H%M%S", time.localtime(time.time() - time.monotonic() + ticket.submitted))


def _info(state: State, ticket: Ticket, sent: dict[str, Any]) -> dict[str, Any]:
    """What A1111 tells of images: all fields of its Processed.js."""
    results, options, model = ticket.results, ticket.options, ticket.model or ""
    _, height, width = results[0].pixels.shape
    settings = dict(re.findall(r"([A-Z][\w ]*): ([^,]*)", results[0].parameters.rpartition("\n")[2]))
    subseed = options.variation_seed
    of_each = {  # image
        "prompt": [result.prompt for result in results],
        "negative_prompt": [sent["negative_prompt"]] * len(results),
        "seed": [result.seed for result in results],
        "subseed": [-1 if subseed is None else subseed + place for place in range(len(results))],
    }
    return {
        **{name: values[0] for name, values in of_each.items()},
        **{f"all_{name}s": values for name, values in of_each.items()},
        **NOT_HERE,
        "subseed_strength": sent["subseed_strength"],
        "width": width,
        "height": height,
        "sampler_name": sent["sampler_name"] or sent["sampler_index"] or settings.get("Sampler"),
        "cfg_scale": float(settings.get("CFG scale", 1)) if sent["cfg_scale"] is None else sent["cfg_scale"],
        "steps": ticket.num_steps,
        "batch_size": sent["batch_size"],
        "sd_model_name": model,
        "sd_model_hash": state.engine.library.title("models", model)[1],
        "denoising_strength": sent.get("denoising_strength"),
        "infotexts": [result.parameters for result in results],
        "job_timestamp": _timestamp(ticket),
        "clip_skip": options.clip_skip,
        "is_using_inpainting_conditioning": ticket.task == "inpaint",
        "version": f"ldm_lite {__version__}",
        "interrupted": ticket.interrupted,
    }


def _submit(state: State, asked: ImagesRequest) -> tuple[Ticket, list[str]]:
    """Queue a request; also return what of it is ignored.

    Raises ValueError, and Refused for a field that would change the image and is not ours.
    """
    engine, settings, most = state.engine, dict(state.settings), state.engine.limits.max_pixels
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refused(422, f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}")
    units: list[Unit] = []
    for name, script in (asked.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if name.lower() == "controlnet":
            if not isinstance(arguments or [], list):
                raise Refused(422, f"got {type(arguments).__name__} as args of {name}, expected a list of ControlNets")
            units = [http.validated(Unit, unit) for unit in arguments or () if isinstance(unit, dict)]
        elif arguments and arguments != [False]:
            raise Refused(422, f"the script {name!r:.60} is not supported: leave it out of alwayson_scripts")
    override = asked.override_settings or {}
    settings |= {name: value for name, value in override.items() if name in settings}
    ignored = [name for name in asked.model_extra or () if name not in NEUTRAL]
    ignored += [f"override_settings.{name}" for name in override if name not in settings]
    ignored = sorted(name[:80] for name in ignored)
    model = str(settings["sd_model_checkpoint"])
    prompt, loras = _loras(asked.prompt)
    options: dict[str, Any] = {name: getattr(asked, name) for name in SAME_NAMES} | _sampler(asked)
    options |= {"prompt": prompt, "prompt_syntax": "a1111", "scale": asked.cfg_scale}
    options["clip_skip"] = settings["CLIP_stop_at_last_layers"]
    if asked.subseed_strength:
        subseed = secrets.randbelow(RANDOM_SEEDS) if asked.subseed == -1 else asked.subseed
        options |= {"variation_seed": subseed, "variation_strength": asked.subseed_strength}
    if isinstance(asked, Txt2imgRequest):
        options |= _second_pass(asked, engine.library) if asked.enable_hr else {}
        options["control"] = _controls(engine, asked, units, None, None)
        return engine.submit("txt2img", Txt2imgOptions(**options), model, loras), ignored
    assert isinstance(asked, Img2imgRequest)
    if len(asked.init_images) != 1:
        raise ValueError(f"got {len(asked.init_images)} images as init_images, expected one")
    image, mask = to_rgb(open_base64(asked.init_images[0], "init_images", most)), None
    if asked.mask is not None:
        mask = open_base64(asked.mask, "mask", most).convert("L")
        if mask.size != image.size:  # it gets the image's proportions, as in A1111, without regard to its own
            mask = mask.resize(image.size)
    options["control"] = _controls(engine, asked, units, image, mask)
    resize = ("stretch", "crop", "fit")[asked.resize_mode]
    options |= {"init_img": (image,), "strength": asked.denoising_strength, "resize": resize}
    if mask is None:
        return engine.submit("img2img", Img2imgOptions(**options), model, loras), ignored
    options |= {"mask": (mask,), "feather": asked.mask_blur, "invert_mask": bool(asked.inpainting_mask_invert)}
    options["masked_content"] = ("fill", "original", "noise", "nothing")[asked.inpainting_fill]
    options["only_masked"] = asked.inpaint_full_res_padding if asked.inpaint_full_res else None
    return engine.submit("inpaint", InpaintOptions(**options), model, loras), ignored


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
    side, strength = library.facts(None).side, asked.denoising_strength
    width, height, times = asked.width or side, asked.height or side, asked.hr_scale
    wanted = [(asked.hr_resize_x, width), (asked.hr_resize_y, height)]
    if ratios := [resized / side for resized, side in wanted if resized]:
        if max(ratios) - min(ratios) > 1e-6:
            size = f"{asked.hr_resize_x}x{asked.hr_resize_y}, have not the shape of {width}x{height}"
            raise ValueError(f"hr_resize_x and hr_resize_y, {size}: give only one")
        times = ratios[0] * (1 + 1e-12)  # a product with the side is rounded down
    options: dict[str, Any] = {"hires": times, "hires_strength": 0.75 if strength is None else strength}
    options |= {"hires_steps": asked.hr_second_pass_steps or None}
    options |= {"hires_prompt": asked.hr_prompt or None, "hires_negative_prompt": asked.hr_negative_prompt or None}

    upscaler, networks, ours = asked.hr_upscaler, library.files("upscalers"), (*UPSCALERS, "None", *PIXEL_UPSCALERS)
    if upscaler in ours:
        options["hires_upscaler"] = "Lanczos" if upscaler == "None" else upscaler
    elif upscaler in networks:
        options["hires_esrgan"] = library.upscaler(upscaler)
    elif upscaler is not None:
        raise ValueError(f"unknown hr_upscaler {upscaler!r:.60}: expected one of {', '.join((*ours, *networks))}")

    if asked.hr_sampler_name not in SAME or asked.hr_scheduler not in SAME:
        first = asked.sampler_name or asked.sampler_index
        sampler = first if asked.hr_sampler_name in SAME else asked.hr_sampler_name
        kind = asked.scheduler if asked.hr_scheduler in SAME else asked.hr_scheduler
        if not sampler:
            raise ValueError("got hr_scheduler without a sampler: give sampler_name, or hr_sampler_name")
        options["hires_sampler"] = f"webui {sampler} {kind or ''}".strip()
    return options


# ---- ControlNets ----------------------------------------------------------------------------------------------------


def _preprocess(module: str, a: float, b: float) -> str:
    """The preprocessor of Control by its name in the extension.  Raises ValueError for others."""
    if module.lower() not in MODULES:
        raise ValueError(f"unknown ControlNet module {module!r:.60}: expected one of {', '.join(MODULES)}")
    low, high = (value if value >= 0 else THRESHOLDS[name] for name, value in (("a", a), ("b", b)))
    return f"canny:{low:g}:{high:g}" if module.lower() == "canny" else MODULES[module.lower()]


def _controls(
    engine: Engine, asked: ImagesRequest, units: list[Unit], init: Image.Image | None, init_mask: Image.Image | None
) -> tuple[Control, ...]:
    """The ControlNets of a request; one without an image of its own follows the request's.  Raises ValueError."""
    controls, library, most = list[Control](), engine.library, engine.limits.max_pixels
    units = [unit for unit in units if unit.enabled]
    if len(units) >= engine.limits.max_branches:  # before their images are opened, which stay in memory
        raise ValueError(
            f"got {len(units)} ControlNets, expected fewer than {engine.limits.max_branches} (`max_branches`)"
        )
    for unit in units:
        if unit.control_mode not in MODES:
            raise ValueError(f"got control_mode {unit.control_mode!r:.40}, expected {', '.join(map(str, MODES))}")
        both = unit.image if isinstance(unit.image, dict) else {"image": unit.image or unit.input_image}
        masked = both.get("mask") or unit.mask or unit.mask_image
        image = open_base64(both["image"], "the ControlNet's image", most) if both.get("image") else init
        mask = open_base64(masked, "the ControlNet's mask", most).convert("L") if masked else init_mask
        if image is None:
            raise ValueError("a ControlNet has no image: give one as image")
        if MODULES.get(unit.module.lower()) == "inpaint" and mask is not None:
            image = to_rgb(image)
            image.putalpha(ImageOps.invert(mask.resize(image.size)))
        how, side = FITTED.get(unit.resize_mode), library.facts(None).side
        if how is not None and (init is None or (asked.width and asked.height)):
            size = asked.width or side, asked.height or side
            engine.check_size(*size)
            image = image.resize(size) if how == "stretch" else ImageOps.pad(image, size)
        name = library.plain(unit.model, library.files("controlnets"))
        about: dict[str, Any] = {"weight": unit.weight, "start": unit.guidance_start, "end": unit.guidance_end}
        about |= {"guess": MODES[unit.control_mode], "name": name}
        about["preprocess"] = _preprocess(unit.module, unit.threshold_a, unit.threshold_b)
        controls.append(Control(library.file("controlnets", name), image, **about))
    return tuple(controls)


def _detected(engine: Engine, asked: DetectRequest) -> list[str]:
    """What a ControlNet sees of images.  Raises ValueError."""
    way = _preprocess(asked.controlnet_module, asked.controlnet_threshold_a, asked.controlnet_threshold_b)
    pictures = asked.controlnet_input_images or asked.controlnet_images
    if not 1 <= len(pictures) <= engine.limits.max_images:
        raise ValueError(f"got {len(pictures)} images, expected 1 to {engine.limits.max_images}")
    answers = []
    for picture in pictures:
        image = open_base64(picture, "controlnet_input_images", engine.limits.max_pixels)
        ratio = max(asked.controlnet_processor_res, 1) / min(image.size)
        ratio = min(ratio, math.sqrt(engine.limits.max_pixels / (image.width * image.height)))
        size = max(1, int(image.width * ratio)), max(1, int(image.height * ratio))
        answers.append(encoded(to_pil(Control("", image, preprocess=way).pixels(size)[0] * 2 - 1)))
    return answers


def _controlnets(engine: Engine) -> APIRouter:
    """The routes of the extension for ControlNets."""
    routes, library = APIRouter(prefix="/controlnet", tags=["ControlNet"]), engine.library

    @routes.get("/version")
    def version() -> dict[str, Any]:
        """Whose names and defaults these are."""
        return {"version": 3}

    @routes.get("/model_list")
    def model_list() -> dict[str, Any]:
        """The ControlNets that requests may name."""
        return {"model_list": [library.title("controlnets", name)[0] for name in library.files("controlnets")]}

    @routes.get("/module_list")
    def module_list() -> dict[str, Any]:
        """What makes a ControlNet's image."""
        sliders = [{"name": name, "value": THRESHOLDS[name], "min": 0, "max": 1020} for name in THRESHOLDS]
        details = {name: {"model_free": False, "sliders": sliders if name == "canny" else []} for name in MODULES}
        return {"module_list": list(MODULES), "module_detail": details}

    @routes.post("/detect", openapi_extra=DetectRequest.docs())
    async def detect(request: Request) -> dict[str, Any]:
        """What a ControlNet sees of images."""
        asked = await read_json(request, DetectRequest)
        return {"images": await reading(request, _detected, engine, asked), "info": "Success"}

    return routes


# ---- extras ---------------------------------------------------------------------------------------------------------


async def _enlarged(request: Request, state: State, asked: ExtrasRequest, pictures: list[str]) -> list[str]:
    """Enlarge images, all in base64, as A1111 does.  Raises ValueError, and Refused for what restores faces."""
    for name in FACES:
        if (asked.model_extra or {}).get(name):
            raise Refused(422, f"{name} is not supported: leave it out, or give 0")

    engine = state.engine

    def submit() -> tuple[Ticket, list[str | None]]:
        if not 1 <= len(pictures) <= engine.limits.max_images:
            raise Refused(422, f"got {len(pictures)} images, expected 1 to {engine.limits.max_images}")
        for name in {asked.upscaler_1, asked.upscaler_2} - {"None", *PIXEL_UPSCALERS}:
            engine.library.file("upscalers", name)
        opened = [open_base64(picture, "image", engine.limits.max_pixels) for picture in pictures]
        images = [to_rgb(image) for image in opened]
        sizes = [_enlarged_size(asked, image)[1] for image in images]
        for size in sizes if asked.upscaler_1 != "None" else ():
            engine.check_size(*size)
            if asked.resize_mode == 1 and asked.upscaling_crop:
                engine.check_size(asked.upscaling_resize_w, asked.upscaling_resize_h)
        ticket = engine.submit_call("extras", functools.partial(_enlarge, engine.library, asked), images, sizes)
        return ticket, [image.info.get("parameters") for image in opened]

    ticket, texts = await reading(request, submit)
    state.tickets.add(ticket)
    await http.ended(request, ticket)
    for image, text in zip(ticket.results, texts, strict=False):
        image.info = {} if text is None else {"parameters": text}
    return [await run_in_threadpool(encoded, image) for image in ticket.results]


def _enlarged_size(asked: ExtrasRequest, image: Image.Image) -> tuple[float, tuple[int, int]]:
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
    """Return an image enlarged, in the engine's thread."""
    times, size = _enlarged_size(asked, image)
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
