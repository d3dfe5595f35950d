"""The routes of AUTOMATIC1111's API, and its answers.  Each client has its own settings, progress and interrupt."""

import contextlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from ldm_lite.cli.version import __version__
from ldm_lite.diffusion.webui import OFFERED, SCHEDULE_TYPES
from ldm_lite.image import PIXEL_UPSCALERS
from ldm_lite.serve import http
from ldm_lite.serve.a1111 import controlnet, extras, translation
from ldm_lite.serve.a1111.extras import ExtrasRequest, SeveralRequest, SingleRequest
from ldm_lite.serve.a1111.translation import (
    LATENT_UPSCALERS,
    ImagesRequest,
    Img2imgRequest,
    Txt2imgRequest,
    WebuiSettings,
)
from ldm_lite.serve.http import Encoding, PictureRequest, Refused, answer_with, encoded, open_base64, read_json, reading
from ldm_lite.serve.ledger import CLIENT
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import Ticket
from ldm_lite.text.parameters import read_parameters, text_of

EMPTY = (
    "sd-vae",
    "sd-modules",
    "hypernetworks",
    "face-restorers",
    "realesrgan-models",
    "prompt-styles",
    "script-info",
)
NOT_HERE: dict[str, object] = {  # what A1111 says about an image made without it
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
MOST_CLIENTS = 1000  # clients whose settings are kept


class Interface:
    """What the server keeps for each of A1111's clients: settings, and running requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tickets = WeakSet[Ticket]()
        self._settings: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by client

    @property
    def settings(self) -> WebuiSettings:
        """The settings of the client that asks."""
        return WebuiSettings(**self._settings.get(CLIENT.get(), {}))

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
    routes, state, library = APIRouter(prefix="/sdapi/v1", tags=["AUTOMATIC1111"]), Interface(engine), engine.library

    @routes.post("/txt2img", openapi_extra=Txt2imgRequest.docs())
    async def txt2img(request: Request) -> Response:
        """Text to image."""
        return await _respond(request, state, await read_json(request, Txt2imgRequest))

    @routes.post("/img2img", openapi_extra=Img2imgRequest.docs())
    async def img2img(request: Request) -> Response:
        """Image to image, or inpainting with a mask."""
        return await _respond(request, state, await read_json(request, Img2imgRequest))

    @routes.post("/extra-single-image", openapi_extra=SingleRequest.docs())
    async def single(request: Request) -> Response:
        """Enlarge an image."""
        asked = await read_json(request, SingleRequest)
        [image] = await _enlarged(request, state, asked, [asked.image])
        return answer_with({"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "image": image})

    @routes.post("/extra-batch-images", openapi_extra=SeveralRequest.docs())
    async def several(request: Request) -> Response:
        """Enlarge images."""
        asked = await read_json(request, SeveralRequest)
        images = await _enlarged(request, state, asked, [file.data for file in asked.imageList])
        return answer_with({"html_info": json.dumps({"Postprocess upscaler": asked.upscaler_1}), "images": images})

    @routes.post("/png-info", openapi_extra=PictureRequest.docs())
    async def png_info(request: Request) -> dict[str, Any]:
        """The text of a picture."""
        asked = await read_json(request, PictureRequest)
        return await reading(request, _png_info, asked.image, engine.limits.max_pixels)

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
        """Stop the client's oldest request after its step; its answer holds the images so far."""
        for ticket in state.running[:1]:
            ticket.interrupt()
        return {}

    @routes.get("/options")
    def options() -> dict[str, Any]:
        """The settings of the client's requests."""
        settings = state.settings.model_dump()
        name = library.plain(settings["sd_model_checkpoint"], library.names) or library.default
        title, digest = library.title("models", name)
        return settings | {"sd_model_checkpoint": title, "sd_checkpoint_hash": digest}

    @routes.post("/options", openapi_extra=WebuiSettings.docs())
    async def set_options(request: Request) -> dict[str, Any] | None:
        """Set the model and other settings for the client's requests; the answer names those that are ignored."""
        asked = await read_json(request, WebuiSettings)
        ignored, changed = asked.ignored(), asked.changed
        if asked.sd_model_checkpoint:
            check = library.check_request  # which reads the folders
            changed["sd_model_checkpoint"] = await reading(request, check, asked.sd_model_checkpoint, ())
        state.set(changed)
        ignored = [name for name in ignored if name != "sd_checkpoint_hash"]  # GET returns it
        return {"ignored": ignored} if ignored else None

    def refresh() -> None:
        """Folders are read for every request, and models are loaded when a request names them."""

    for path in ("refresh-checkpoints", "refresh-loras", "refresh-embeddings", "refresh-vae", "reload-checkpoint"):
        routes.add_api_route(f"/{path}", refresh, methods=["POST"], name=path)

    @routes.post("/unload-checkpoint")
    def unload() -> dict[str, Any]:
        """Free the model's memory once nothing waits; the next request loads it again."""
        engine.unload()
        return {}

    @routes.post("/interrogate", openapi_extra=PictureRequest.docs())
    async def interrogate(request: Request) -> None:
        """Refuse: captions need a model that ldm_lite does not have."""
        raise Refused(501, "captions of images (interrogate) are not supported: there is no model for them here")

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
    schedules = ["Automatic", *(name for name in SCHEDULE_TYPES if name != "Turbo")]
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
        "latent-upscale-modes": lambda: [{"name": name} for name in LATENT_UPSCALERS],
        # empty here, but clients ask for them when they start
        "scripts": lambda: {"txt2img": [], "img2img": []},
        "extensions": lambda: [controlnet.EXTENSION],
        "embeddings": lambda: {"loaded": embeddings(), "skipped": {}},
        "cmd-flags": lambda: {},
        **dict.fromkeys(EMPTY, lambda: []),
    }
    for path, names in lists.items():
        routes.add_api_route(f"/{path}", names, name=path)
    every = APIRouter()
    every.include_router(routes)
    every.include_router(controlnet.router(engine))
    return every


# ---- images ---------------------------------------------------------------------------------------------------------


async def _enlarged(request: Request, state: Interface, asked: ExtrasRequest, pictures: list[str]) -> list[Encoding]:
    """Enlarge images in base64."""
    ticket, texts = await reading(request, extras.submit, state.engine, asked, pictures)
    state.tickets.add(ticket)
    await http.ended(request, ticket)
    for image, text in zip(ticket.results, texts, strict=False):
        image.info = {} if text is None else {"parameters": text}
    return [Encoding(image) for image in ticket.results]


async def _respond(request: Request, state: Interface, asked: ImagesRequest) -> Response:
    settings = await run_in_threadpool(lambda: state.settings)  # which reads the folders
    ticket, ignored = await reading(request, translation.submit, state.engine, settings, asked)
    left_out = ("init_images", "mask", "alwayson_scripts", "override_settings")
    sent = {name: getattr(asked, name) for name in type(asked).model_fields if name not in left_out}
    del asked  # else its pictures stay in memory while it waits
    state.tickets.add(ticket)
    await http.ended(request, ticket)
    images = [Encoding(result.image) for result in ticket.results if sent["send_images"]]
    info = await run_in_threadpool(_info, state, ticket, sent)
    return answer_with({"images": images, "parameters": sent, "info": json.dumps(info | {"ignored": ignored})})


def _png_info(picture: str, most: int) -> dict[str, Any]:
    image, settings = open_base64(picture, "image", most), {}
    if (text := text_of(image)) is None:
        return {"info": "", "items": {}, "parameters": {}}
    with contextlib.suppress(ValueError):
        parsed = read_parameters(image)
        settings = {"Prompt": parsed.prompt, "Negative prompt": parsed.negative_prompt or "", **parsed.settings}
    return {"info": text, "items": {"parameters": text}, "parameters": settings}


def _timestamp(ticket: Ticket) -> str:
    return time.strftime("%Y%m%d%H%M%S", time.localtime(time.time() - time.monotonic() + ticket.submitted))


def _info(state: Interface, ticket: Ticket, sent: dict[str, Any]) -> dict[str, Any]:
    """What A1111 says about images: all fields of its Processed.js."""
    results, options, model = ticket.results, ticket.options, ticket.model or ""
    width, height = results[0].image.size
    settings = results[0].settings
    subseed = options.variation_seed
    of_each = {  # image
        "prompt": [result.prompt for result in results],
        "negative_prompt": [sent["negative_prompt"]] * len(results),
        "seed": [result.seed for result in results],
        "subseed": [-1 if subseed is None else (subseed + place) % 2**64 for place in range(len(results))],
    }
    return {
        **{name: values[0] for name, values in of_each.items()},
        **{f"all_{name}s": values for name, values in of_each.items()},
        **NOT_HERE,
        "subseed_strength": sent["subseed_strength"],
        "width": width,
        "height": height,
        "sampler_name": sent["sampler_name"] or sent["sampler_index"] or settings.get("Sampler"),
        "cfg_scale": settings.get("CFG scale", 1.0) if sent["cfg_scale"] is None else sent["cfg_scale"],
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
