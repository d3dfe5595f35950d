"""The API of the page, under /api, for everybody: choices, images as a stream of events, settings.

A request's images come as server-sent events: `queued`, `progress`, `preview`, `image`, `plot`, and `done` or `error`
at the end.  docs/serve.md describes them.
"""

import asyncio
import hashlib
import secrets
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from ldm_lite.serve import form, http
from ldm_lite.serve.http import Body, PictureRequest, Refused, encoded, event, open_base64, read_json, reading
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import QUEUED, Ticket
from ldm_lite.tasks import xy

PAGE = Path(__file__).parent / "page"
HEADERS = {  # the page runs only its own files, and contacts no other host
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LOOK = 0.1  # seconds between two events of progress
MOST_SINGLE = 64  # images of a plot that are sent besides the plot
MOST_HINT = 512  # pixels on the long side of a hint: edges of 1024 x 1024 would take 160 MiB


# ---- requests -------------------------------------------------------------------------------------------------------


class Lora(Body):
    """A LoRA of the server."""

    name: str
    weight: float | str = Field(1.0, description="a number, or by part: 0.8:lbw=OUTD, te=0.5:unet=1")


class ControlNet(Body):
    """A ControlNet of the server with the image that it follows."""

    name: str
    image: str | None = Field(None, description="in base64")
    weight: float = 1.0
    start: float = Field(0.0, description="fraction of the steps from which it acts")
    end: float = 1.0
    preprocess: str = Field("none", description="makes its image first: none, canny, canny:LOW:HIGH or inpaint")


class Axis(Body):
    """An axis of a plot."""

    option: str
    values: str = Field("", description="5, 10, 20 or 1-5 or 1-10 (+3) or 0-1 [5]")


class ImagesRequest(Body):
    """It also takes the fields that GET /api/form lists; a missing or empty one is the checkpoint's default."""

    task: Literal["txt2img", "img2img", "inpaint", "upscale"] = "txt2img"
    model: str | None = None
    loras: list[Lora] = Field([], max_length=16)
    control: ControlNet | None = None
    init_img: str | None = Field(None, description="the image to start from, in base64")
    reference: list[str] = Field([], max_length=16, description="images that the model reads with the prompt")
    mask: str | None = Field(None, description="white is repainted")
    x: Axis | None = Field(None, description="makes an X/Y plot")
    y: Axis | None = None


class HintRequest(PictureRequest):
    """A ControlNet's image, and how it is prepared."""

    preprocess: str = "canny"


# ---- routes ---------------------------------------------------------------------------------------------------------


def mount(app: FastAPI, engine: Engine) -> None:
    """Add the API and the page, at "/", to an application."""
    app.include_router(router(engine))
    files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in _TYPES}
    version = hashlib.sha256(b"".join(files.values())).hexdigest()[:16]  # in the addresses: browsers keep these files
    index = files.pop("index.html").replace(b'"page/', f'"page/{version}/'.encode())

    def sent(name: str, content: bytes, kept: str) -> Response:
        return Response(content, headers=HEADERS | {"Cache-Control": kept}, media_type=_TYPES[Path(name).suffix])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return sent("index.html", index, "no-cache")

    @app.get("/page/{asked}/{name}", include_in_schema=False)
    async def file(asked: str, name: str) -> Response:
        if asked != version or name not in files:
            raise Refused(404, "there is nothing at this address")
        return sent(name, files[name], "private, max-age=31536000, immutable")


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes, running = APIRouter(prefix="/api", tags=["the page"]), dict[str, list[Ticket]]()

    @routes.get("/form")
    def describe() -> dict[str, Any]:
        """The fields of a request, and the names they may have: models, LoRAs, ControlNets, upscalers."""
        return form.described(engine)

    @routes.post("/images", openapi_extra=ImagesRequest.docs())
    async def images(request: Request) -> StreamingResponse:
        """Make images, or an X/Y plot: a stream of events.  Closing it cancels the request."""
        asked = await read_json(request, ImagesRequest)
        given_up = threading.Event()
        try:
            work, tickets = await reading(request, _submit, engine, asked, given_up)
        finally:
            given_up.set()  # if it took too long, its thread still runs
        del asked  # else its pictures stay in memory while it waits
        key = secrets.token_urlsafe()
        running[key] = tickets

        async def events() -> AsyncIterator[str]:
            try:
                yield event("queued", id=key, images=sum(ticket.count for ticket in tickets))
                async for text in _events(work, tickets):
                    yield text
            finally:
                del running[key]
                for ticket in tickets:
                    ticket.cancel()

        return http.stream(events())

    @routes.post("/images/{key}/interrupt")
    def interrupt(key: str) -> dict[str, Any]:
        """Stop a request, by the id in its first event, after the current step; its stream gets the images so far."""
        if key not in running:
            raise Refused(404, "no request of this id is running")
        for ticket in reversed(running[key]):
            if not ticket.ended:
                ticket.interrupt()
        return {}

    @routes.post("/settings", openapi_extra=PictureRequest.docs())
    async def settings(request: Request) -> dict[str, Any]:
        """The fields that a picture's text (PNG, JPEG, WebP; A1111's too) names, and the ignored settings."""
        asked = await read_json(request, PictureRequest)
        return await reading(request, _settings, engine, asked.image)

    @routes.post("/hint", openapi_extra=HintRequest.docs())
    async def hint(request: Request) -> dict[str, Any]:
        """An image as a ControlNet sees it: a PNG in base64."""
        asked = await read_json(request, HintRequest)
        return {"image": await reading(request, _hint, engine, asked)}

    return routes


def _submit(engine: Engine, asked: ImagesRequest, given_up: threading.Event) -> tuple[form.Work, list[Ticket]]:
    """Queue all requests of a form, or none."""
    work, tickets, most = form.read_form(asked.model_dump(), engine), list[Ticket](), engine.limits.max_work
    try:
        for wanted in work.requests:
            tickets.append(engine.submit(*wanted))
            if given_up.is_set():
                raise Refused(503, "the request was not read in time: try again later")
            if sum(ticket.work for ticket in tickets) > most:
                message = (
                    f"got a plot of {len(work.requests)} images, more work than {most:,} (`max_work`): ask for less"
                )
                raise Refused(422, message, param="x" if work.x is not None else "y")
    except Exception:
        for ticket in tickets:
            ticket.cancel()
        raise
    return work._replace(requests=()), tickets  # the engine frees their pictures


def _settings(engine: Engine, picture: str) -> dict[str, Any]:
    values, text, remarks = form.settings(open_base64(picture, "the picture", engine.limits.max_pixels))
    if values.get(form.MODEL) not in engine.library.names:
        values.pop(form.MODEL, None)
    return {"values": values, "text": text, "remarks": remarks}


def _hint(engine: Engine, asked: HintRequest) -> str:
    with form.about("control"):
        image = open_base64(asked.image, "the picture", engine.limits.max_pixels)
        times = min(1.0, MOST_HINT / max(image.size))
        size = max(1, round(image.width * times)), max(1, round(image.height * times))
        return http.hint(image, asked.preprocess, size)


# ---- events ---------------------------------------------------------------------------------------------------------


async def _events(work: form.Work, tickets: list[Ticket]) -> AsyncIterator[str]:
    """Everything that happens to a request's tickets until all have ended."""
    start = time.monotonic()
    shown, last, sent = None, "", [0] * len(tickets)  # images of each ticket
    try:
        async for changed in http.changes(tickets):
            ended = all(ticket.ended for ticket in tickets)
            for place, ticket in enumerate(tickets if not work.is_plot or len(tickets) <= MOST_SINGLE else ()):
                for result in ticket.results[sent[place] :]:
                    sent[place] += 1
                    yield await _image("image", result.image, result.seed)
                if not ticket.ended:  # the cells of a plot come in their order
                    break
            interrupted = any(ticket.interrupted for ticket in tickets)
            for ticket in tickets:
                if ticket.ended and (ticket.error is not None or not interrupted):
                    http.check_ended(ticket)
            if ended:
                break
            active = next((ticket for ticket in tickets if not ticket.ended and ticket.state != QUEUED), None)
            if (text := _progress(tickets, active)) != last or not changed:
                yield text if text != last else http.WAITING
                last = text
            preview = None if active is None else active.preview()
            if preview is not None and preview is not shown:
                shown = preview
                yield event("preview", image=await run_in_threadpool(encoded, preview, "jpeg", 85))
            await asyncio.sleep(LOOK)  # many steps give one event
        results = [result for ticket in tickets for result in ticket.results]
        if work.is_plot and len(results) == len(tickets):
            sheet = await run_in_threadpool(xy.draw, [result.image for result in results], work.x, work.y)
            yield await _image("plot", sheet, results[0].seed)
        seconds = round(time.monotonic() - start, 2)
        yield event("done", images=len(results), seconds=seconds, interrupted=interrupted)
    except Exception as error:
        refused, about = http.described(error)
        yield event("error", message=refused.message, param=about["param"], status=refused.status)


async def _image(kind: str, image: Image.Image, seed: int) -> str:
    content, (width, height) = await run_in_threadpool(encoded, image), image.size
    about = {"seed": str(seed), "width": width, "height": height, "parameters": image.info.get("parameters")}
    return event(kind, image=content, **about)  # the seed as a text: a browser rounds large numbers


def _progress(tickets: list[Ticket], active: Ticket | None) -> str:
    """The progress of tickets: their place in the queue, or the step."""
    if active is None and not any(ticket.results for ticket in tickets):
        return event("progress", state="queued", before=tickets[0].position)
    number = min(sum(len(ticket.results) for ticket in tickets) + 1, total := sum(ticket.count for ticket in tickets))
    share = sum(ticket.progress for ticket in tickets) / len(tickets)
    step, steps = (active.step, active.num_steps) if active is not None else (0, 0)
    about = {"image": number, "images": total, "step": step, "steps": steps}
    return event("progress", state="running", **about, share=round(share, 4))
