"""OpenAI's API for images: /v1/images/generations, /v1/images/edits, /v1/images/variations, /v1/models.

OpenAI's fields are used where they have a meaning here.  There are also seed, steps, scale, sampler, negative_prompt
and strength, which OpenAI's Python client sends by extra_body.
"""

import base64
import functools
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image, ImageOps
from pydantic import Field
from starlette.responses import Response

from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.image import to_rgb
from ldm_lite.serve import http
from ldm_lite.serve.http import Body, Encoding, Refused, open_bytes, read_json, reading
from ldm_lite.serve.ledger import CLIENT, Account, Full, Ledger, TooLarge
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import Ticket

# OpenAI's own models, which clients name by default: they mean the default model, unless a file has such a name.
ALIASES = re.compile(r"(?P<dalle>dall-e-[\w.-]{1,80})|(?:chat)?gpt-image-[\w.-]{1,80}")
LIFETIME = 3600.0  # seconds that an image can be fetched by its URL
USAGE = {  # the clients want it; nothing is charged, so there are no tokens
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class ImageRequest(Body):
    """The fields of both requests."""

    prompt: str
    model: str | None = None
    n: int | None = Field(None, ge=1)
    size: str | None = Field(None, description="WIDTHxHEIGHT, or auto")
    response_format: Literal["b64_json", "url"] | None = Field(None, description="b64_json; for dall-e-* both")
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

    @property
    def fields(self) -> set[str]:
        """Which of `b64_json` and `url` an image's entry has."""
        if self.response_format is not None:
            return {self.response_format}
        alias = ALIASES.fullmatch(self.model or "")  # clients of these expect a URL
        return {"b64_json", "url"} if alias and alias["dalle"] else {"b64_json"}


class EditRequest(ImageRequest):
    """The fields of /v1/images/edits, besides the files `image` and `mask`.

    A model that reads reference images gets all files `image` as these; without them it takes one, to start from.
    """

    strength: float | None = Field(None, description="0 keeps the image, 1 forgets it")


class VariationRequest(EditRequest):
    """The fields of /v1/images/variations, besides the file `image`."""

    prompt: str = ""


class Link(NamedTuple):
    """An image that has a URL."""

    account: Account  # of the images of its answer
    until: float  # of time.monotonic()
    content: bytes


class Links:
    """Images that answers name by a URL, in memory as long as the ledger has room for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._links: dict[str, Link] = {}  # by name, the oldest first

    def add(self, contents: list[bytes], suffix: str) -> list[str]:
        """Return names for the images of an answer.  Raises Full, TooLarge."""
        now, names = time.monotonic(), [f"{secrets.token_hex(16)}.{suffix}" for _ in contents]
        for name, link in list(self._links.items()):
            if link.until < now:
                self._ledger.close(link.account)
                self._links.pop(name, None)

        def drop(full: Exception) -> None:
            for name in names:
                self._links.pop(name, None)

        account = Account(self._ledger, CLIENT.get())
        account.drop, account.is_spare = drop, True
        self._links |= zip(names, (Link(account, now + LIFETIME, content) for content in contents), strict=True)
        try:
            account.hold("linked", sum(map(len, contents)))
        except (Full, TooLarge) as error:
            drop(error)
            raise
        return names

    def read(self, name: str) -> bytes:
        """Return an image.  Raises Refused (404)."""
        link = self._links.get(name)
        if link is None or link.until < time.monotonic():
            raise Refused(404, "there is no image at this address any more")
        return link.content


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes, links = APIRouter(prefix="/v1", tags=["OpenAI"]), Links(engine.ledger)
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
        return await _respond(request, links, ticket, asked, "image_generation")

    @routes.post("/images/edits", openapi_extra=EditRequest.docs("multipart/form-data"))
    async def edits(request: Request) -> Response:
        """Image to image; with a mask, or transparency, only the transparent part is repainted.

        Without mask and transparency, models that read reference images edit them by the prompt, or combine several.
        """
        return await edit(request, EditRequest)

    @routes.post("/images/variations", openapi_extra=VariationRequest.docs("multipart/form-data"))
    async def variations(request: Request) -> Response:
        """Image to image, without a prompt."""
        return await edit(request, VariationRequest)

    async def edit(request: Request, kind: type[EditRequest]) -> Response:
        fields, files = await http.read_form(request)
        asked = http.validated(kind, fields)
        ticket = await reading(request, _submit, engine, asked, files)
        del files  # else they stay in memory while the request waits
        return await _respond(request, links, ticket, asked, "image_edit")

    @routes.get("/images/{name}")
    async def image(name: str) -> Response:
        """An image, by the URL that an answer gave for it: whoever knows it needs no key."""
        headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
        return Response(links.read(name), headers=headers, media_type=f"image/{name.rpartition('.')[2]}")

    return routes


def _named(engine: Engine, name: str) -> str | None:
    """Return a model's name, None for the default.  Raises Refused (404) for an unknown name."""
    names = engine.library.names
    if (plain := engine.library.plain(name, names)) in names:
        return plain
    if ALIASES.fullmatch(name):
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
    if contents and "mask" not in files and asked.strength is None and engine.library.inputs(model).references:
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


async def _respond(request: Request, links: Links, ticket: Ticket, asked: ImageRequest, event: str) -> Response:
    if asked.stream:
        return http.stream(_events(ticket, asked, event))
    await http.ended(request, ticket)
    images = [_encoding(result.image, asked) for result in ticket.results]
    data = [{"b64_json": image, "seed": result.seed} for image, result in zip(images, ticket.results, strict=True)]
    about = _about(ticket.results[0].image, asked)
    if "url" in asked.fields:
        contents = [base64.b64decode(await run_in_threadpool(image.text)) for image in images]
        for entry, name in zip(data, links.add(contents, asked.output_format or "png"), strict=True):
            entry["url"] = str(request.url_for("image", name=name))
            if "b64_json" not in asked.fields:
                del entry["b64_json"]
    ignored = {"ignored": sorted(asked.model_extra)} if asked.model_extra else {}
    return http.answer_with({"created": int(time.time()), "data": data, "usage": USAGE, **about, **ignored})


async def _events(ticket: Ticket, asked: ImageRequest, event: str) -> AsyncIterator[str]:
    """The stream of one request; leaving it, as when the client disconnects, cancels the ticket."""
    partials = results = 0  # numbers of images that have been sent

    async def line(kind: str, image: Image.Image, **more: Any) -> str:
        content = await run_in_threadpool(_encoding(image, asked).text)
        about = {"type": kind, "b64_json": content, **_about(image, asked), "created_at": int(time.time())}
        return http.event(kind, **about, quality="auto", **more)

    try:
        async for changed in http.changes([ticket]):
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


def _encoding(image: Image.Image, asked: ImageRequest) -> Encoding:
    quality = 100 if asked.output_compression is None else asked.output_compression
    return Encoding(image, asked.output_format or "png", quality)


def _about(image: Image.Image, asked: ImageRequest) -> dict[str, str]:
    """The fields of an image in answers and events."""
    kind = asked.output_format or "png"
    return {"output_format": kind, "size": f"{image.width}x{image.height}", "background": "opaque"}
