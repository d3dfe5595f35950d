"""OpenAI's API for images: /v1/images/generations, /v1/images/edits, /v1/models.

Its own fields are used where they have a meaning here.  Beside them go seed, steps, scale, sampler, negative_prompt
and strength, which its Python client sends from extra_body.
"""

import functools
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field
from starlette.responses import JSONResponse, Response

from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.image import to_rgb
from ldm_lite.serve import http
from ldm_lite.serve.http import Body, Refused, open_bytes, read_json, reading
from ldm_lite.serve.queue import Engine, Ticket

# Names that clients give by default; they are the default model, unless a file has such a name.
ALIASES = ("gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "chatgpt-image-latest", "dall-e-3", "dall-e-2")
USAGE = {  # the clients want it; nothing is charged, so there are no tokens
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class ImageRequest(Body):
    """What both requests have."""

    prompt: str
    model: str | None = None
    n: int | None = Field(None, ge=1)
    size: str | None = Field(None, description="WIDTHxHEIGHT, or auto")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of JPEG and WebP")
    background: Literal["opaque", "auto"] | None = None
    quality: str | None = Field(None, description="not used: see steps")
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=3)
    seed: int | None = Field(None, description="default: random")
    steps: int | None = None
    scale: float | None = None
    sampler: str | None = None
    negative_prompt: str | None = None


class EditRequest(ImageRequest):
    """The fields of /v1/images/edits, besides the files `image` and `mask`.

    A model that reads reference images gets all files `image` as these; without them it takes one, to start from.
    """

    strength: float | None = Field(None, description="0 keeps the image, 1 forgets it")


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])
    started = int(time.time())

    def about(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "ldm_lite"}

    @routes.get("/models")
    def models() -> dict[str, Any]:
        """List the models that requests may name; the first is the default."""
        return {"object": "list", "data": [about(name) for name in engine.library.names]}

    @routes.get("/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """Describe a model."""
        _named(engine, name)
        return about(name)

    @routes.post("/images/generations", openapi_extra=ImageRequest.docs())
    async def generations(request: Request) -> Response:
        """Text to image."""
        asked = await read_json(request, ImageRequest)
        ticket = await reading(request, _submit, engine, asked, {})
        return await _respond(request, ticket, asked, "image_generation")

    @routes.post("/images/edits", openapi_extra=EditRequest.docs("multipart/form-data"))
    async def edits(request: Request) -> Response:
        """Image to image; with a mask, or transparency, only the transparent part is repainted.

        Models that read reference images (FLUX.2, Qwen-Image-Edit) edit an image without either by the prompt, or
        combine several.
        """
        fields, files = await http.read_form(request)
        asked = http.validated(EditRequest, fields)
        ticket = await reading(request, _submit, engine, asked, files)
        del files  # which would stay in memory while it waits
        return await _respond(request, ticket, asked, "image_edit")

    return routes


def _named(engine: Engine, name: str) -> str | None:
    """Return a model's name, None for the default.  Raises Refused (404) for a name that there is not."""
    names = engine.library.names
    if (plain := engine.library.plain(name, names)) in names:
        return plain
    if name in ALIASES:
        return None
    raise Refused(
        404, http.one_line(f"unknown model {name!r:.80}: expected one of {', '.join(names)}"), "model_not_found"
    )


def _submit(engine: Engine, asked: ImageRequest, files: dict[str, list[bytes]]) -> Ticket:
    """Queue a request.  Raises Refused, ValueError."""
    model = _named(engine, asked.model) if asked.model else None
    options: dict[str, Any] = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
    options |= {"seed": -1 if asked.seed is None else asked.seed, "batch_size": asked.n or 1}
    options |= {"steps": asked.steps, "scale": asked.scale, "sampler": asked.sampler}
    if asked.size not in (None, "auto"):
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", asked.size or "")
        if match is None:
            raise Refused(422, f"got size {asked.size!r:.40}, expected WIDTHxHEIGHT or auto")
        options |= {"width": int(match[1]), "height": int(match[2])}
    submit = functools.partial(engine.submit, model=model, partials=(asked.partial_images or 0) if asked.stream else 0)
    if not isinstance(asked, EditRequest):
        return submit("txt2img", Txt2imgOptions(**options))
    most = engine.limits.max_pixels
    contents = files.get("image", []) + files.get("image[]", [])
    if contents and "mask" not in files and asked.strength is None and engine.library.reads_references(model):
        opened = [open_bytes(content, "image", most) for content in contents]
        if len(opened) > 1 or _hole(opened[0]) is None:
            return submit("txt2img", Txt2imgOptions(**options | {"reference": tuple(map(to_rgb, opened))}))
    if len(contents) != 1:
        raise Refused(
            422,
            f"got {len(contents)} files as image, expected one: several are for models that read references, without "
            "mask and strength",
        )
    image, mask = open_bytes(contents[0], "image", most), None
    if "mask" in files:
        mask = _hole(open_bytes(files["mask"][0], "mask", most))
        if mask is None:
            raise Refused(422, "mask has no transparent part: transparent is repainted")
    elif engine.library.facts(model).tasks[0] != "img2img":  # a model that follows instructions needs no mask
        mask = _hole(image)
    options |= {"init_img": (to_rgb(image),), "strength": asked.strength}
    if mask is None:
        return submit("img2img", Img2imgOptions(**options))
    return submit("inpaint", InpaintOptions(**options, mask=(mask,)))


def _hole(image: Image.Image) -> Image.Image | None:
    """Return a mask, white where an image is transparent; None if it is nowhere."""
    if not image.has_transparency_data:
        return None
    mask = ImageOps.invert(image.convert("RGBA").getchannel("A"))
    return None if mask.getbbox() is None else mask


async def _respond(request: Request, ticket: Ticket, asked: ImageRequest, event: str) -> Response:
    if asked.stream:
        return http.stream(_events(ticket, asked, event))
    await http.ended(request, ticket)
    data, about = [], dict[str, Any]()
    for result in ticket.results:
        about = await _encoded(result.image, asked)
        data.append({"b64_json": about.pop("b64_json"), "seed": result.seed})
    ignored = {"ignored": sorted(asked.model_extra)} if asked.model_extra else {}
    return JSONResponse({"created": int(time.time()), "data": data, "usage": USAGE, **about, **ignored})


async def _events(ticket: Ticket, asked: ImageRequest, event: str) -> AsyncIterator[str]:
    """The stream of one request; leaving it, as for a client that has gone, cancels the ticket."""
    partials = results = 0  # that have been sent

    async def line(kind: str, image: Image.Image, **more: Any) -> str:
        about = {"type": kind, **await _encoded(image, asked), "created_at": int(time.time()), "quality": "auto"}
        return http.event(kind, **about | more)

    try:
        async for changed in http.changes(ticket, http.KEEP_ALIVE):
            if not changed:
                yield http.WAITING
            for number, image in ticket.partials[partials:]:
                index = sum(earlier == number for earlier, _ in ticket.partials[:partials])  # of those of its image
                yield await line(f"{event}.partial_image", image, partial_image_index=index, image_index=number)
                partials += 1
            for result in ticket.results[results:]:
                more = {"usage": USAGE, "seed": result.seed, "image_index": results}
                yield await line(f"{event}.completed", result.image, **more)
                results += 1
        http.check_ended(ticket)
    except Exception as error:
        yield http.event("error", type="error", error=http.described(error)[1])
    finally:
        ticket.cancel()


async def _encoded(image: Image.Image, asked: ImageRequest) -> dict[str, str]:
    """What answers and events say of an image."""
    kind = asked.output_format or "png"
    quality = 100 if asked.output_compression is None else asked.output_compression
    content, size = await run_in_threadpool(http.encoded, image, kind, quality), f"{image.width}x{image.height}"
    return {"b64_json": content, "output_format": kind, "size": size, "background": "opaque"}
