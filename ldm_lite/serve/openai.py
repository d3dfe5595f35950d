"""OpenAI's API for images: /v1/images/generations, /v1/images/edits, /v1/models.

Its own fields are heeded where they have a meaning here.  Beside them go seed, steps, scale, sampler, negative_prompt
and strength, which its Python client sends from extra_body.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.serve.http import (
    Body,
    Changes,
    Refused,
    check_ended,
    check_name,
    encoded,
    ended,
    json_lines,
    open_bytes,
    read_form,
    read_json,
    refusal,
    validated,
)
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.queue import Ticket
from ldm_lite.toolkit import tasks_of

KEEP_ALIVE = 15  # seconds of silence after which a stream gets a comment


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
    """The fields of /v1/images/edits, besides the files `image` and `mask`."""

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
        check_name(engine.library, name)
        return about(name)

    @routes.post("/images/generations", openapi_extra=ImageRequest.docs())
    async def generations(request: Request) -> Response:
        """Text to image."""
        given = await read_json(request, ImageRequest)
        ticket = await run_in_threadpool(_generation, engine, given)
        return await _respond(request, ticket, given, "image_generation", engine.limits.timeout)

    @routes.post("/images/edits", openapi_extra=EditRequest.docs("multipart/form-data"))
    async def edits(request: Request) -> Response:
        """Image to image; with a mask, or transparency, only the transparent part is repainted."""
        fields, files = await read_form(request)
        given = validated(fields, EditRequest)
        ticket = await run_in_threadpool(_edit, engine, given, files)
        return await _respond(request, ticket, given, "image_edit", engine.limits.timeout)

    return routes


def _generation(engine: Engine, given: ImageRequest) -> Ticket:
    model = check_name(engine.library, given.model)
    partials = (given.partial_images or 0) if given.stream else 0
    return engine.submit("txt2img", Txt2imgOptions(**_options(given)), model, partials=partials)


def _edit(engine: Engine, given: EditRequest, files: dict[str, list[bytes]]) -> Ticket:
    model, most = check_name(engine.library, given.model), engine.limits.max_pixels
    contents = files.get("image", []) + files.get("image[]", [])
    if len(contents) != 1:
        raise Refused(422, f"got {len(contents)} files as image, wanted one")
    image, mask = open_bytes(contents[0], "image", most), None
    if "mask" in files:
        mask = _hole(open_bytes(files["mask"][0], "mask", most))
        if mask is None:
            raise Refused(422, "mask has no transparent part: transparent is repainted")
    elif tasks_of(engine.library.model) != ("img2img",):  # a model that follows instructions needs no mask
        mask = _hole(image)
    options = _options(given) | {"init_img": (image.convert("RGB"),), "strength": given.strength}
    partials = (given.partial_images or 0) if given.stream else 0
    if mask is None:
        return engine.submit("img2img", Img2imgOptions(**options), model, partials=partials)
    return engine.submit("inpaint", InpaintOptions(**options, mask=(mask,)), model, partials=partials)


def _hole(image: Image.Image) -> Image.Image | None:
    """Return a mask, white where an image is transparent; None if it is nowhere."""
    if not image.has_transparency_data:
        return None
    mask = ImageOps.invert(image.convert("RGBA").getchannel("A"))
    return None if mask.getbbox() is None else mask


def _options(given: ImageRequest) -> dict[str, Any]:
    size: dict[str, Any] = {}
    if given.size not in (None, "auto"):
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", given.size or "")
        if match is None:
            raise Refused(422, f"got size {given.size!r:.40}, wanted WIDTHxHEIGHT or auto")
        size = {"width": int(match[1]), "height": int(match[2])}
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    names = ("steps", "scale", "sampler", "negative_prompt")
    return (
        size
        | {"prompt": given.prompt, "seed": seed, "batch_size": given.n or 1}
        | {name: getattr(given, name) for name in names}
    )


async def _respond(request: Request, ticket: Ticket, given: ImageRequest, event: str, timeout: float) -> Response:
    if given.stream:
        return StreamingResponse(_events(ticket, given, event), media_type="text/event-stream")
    await ended(request, ticket, timeout)
    made = [await run_in_threadpool(_encoded, result.image, given) for result in ticket.results]
    about = _about(given, ticket.results[0].image)
    data = [{"b64_json": image, "seed": result.seed} for image, result in zip(made, ticket.results, strict=True)]
    ignored = {"ignored": sorted(given.model_extra)} if given.model_extra else {}
    return JSONResponse({"created": int(time.time()), "data": data, "usage": _usage(), **about, **ignored})


async def _events(ticket: Ticket, given: ImageRequest, event: str) -> AsyncIterator[str]:
    """The stream of one request; leaving it, as for a client that has gone, cancels the ticket."""
    changes, partials, results = Changes(ticket), 0, 0
    try:
        while True:
            over = ticket.ended
            for number, image in ticket.partials[partials:]:
                content = {"partial_image_index": _index(ticket, partials), "image_index": number}
                yield await _event(f"{event}.partial_image", image, given, content)
                partials += 1
            for result in ticket.results[results:]:
                about = {"usage": _usage(), "seed": result.seed, "image_index": results}
                yield await _event(f"{event}.completed", result.image, given, about)
                results += 1
            if over:
                break
            try:
                await asyncio.wait_for(changes.next(), KEEP_ALIVE)
            except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
                yield ": waiting\n\n"
        check_ended(ticket)
    except Exception as error:
        refused = refusal(error)
        error_about = {"message": refused.message, "type": "server_error", "param": None, "code": refused.code}
        yield json_lines("error", {"type": "error", "error": error_about})
    finally:
        ticket.cancel()


def _index(ticket: Ticket, place: int) -> int:
    """The number of a partial image among those of its image."""
    number = ticket.partials[place][0]
    return sum(each == number for each, _ in ticket.partials[:place])


async def _event(name: str, image: Image.Image, given: ImageRequest, more: dict[str, Any]) -> str:
    content = {"type": name, "b64_json": await run_in_threadpool(_encoded, image, given), **more}
    about = {"created_at": int(time.time()), "background": "opaque", "quality": "auto"}
    return json_lines(name, content | _about(given, image) | about)


def _about(given: ImageRequest, image: Image.Image) -> dict[str, str]:
    kind = given.output_format or "png"
    return {"output_format": kind, "size": f"{image.width}x{image.height}", "background": "opaque"}


def _encoded(image: Image.Image, given: ImageRequest) -> str:
    quality = 100 if given.output_compression is None else given.output_compression
    return encoded(image, given.output_format or "png", quality)


def _usage() -> dict[str, Any]:
    """The clients want it; nothing is charged, so there are no tokens."""
    details = {"image_tokens": 0, "text_tokens": 0}
    return {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "input_tokens_details": details}
