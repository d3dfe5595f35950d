"""What all interfaces share: reading requests, waiting for tickets, answering with images and errors."""

import asyncio
import base64
import binascii
import io
import json
import logging
import re
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse

from ldm_lite.cli.console import printable
from ldm_lite.image import decode_image
from ldm_lite.serve.library import Library
from ldm_lite.serve.queue import Full, Stopping
from ldm_lite.serve.queue import CANCELLED, Ticket

log = logging.getLogger("ldm_lite")

Kind = TypeVar("Kind", bound="Body")
MOST_MESSAGE = 500  # characters
MOST_READ = 16  # times the pixels that may be made may be read
STATUS = {Full: 429, Stopping: 503, TimeoutError: 504, ValueError: 422, TypeError: 422}
CLOSED = 499  # the client has gone: nobody reads this status
_PATH = re.compile(r"(?<![\w.:/])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",]+)+[/\\](?=[^\s/\\])")


class Body(BaseModel):
    """A request's JSON object; unknown fields are kept, so that an answer can name them."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def docs(cls, kind: str = "application/json") -> dict[str, Any]:
        """Its entry in the API's description."""
        return {"requestBody": {"required": True, "content": {kind: {"schema": cls.model_json_schema()}}}}


class Refused(Exception):
    """A request that cannot be answered: its status, and one line that says why."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


# ---- errors ---------------------------------------------------------------------------------------------------------


def one_line(message: str) -> str:
    """A message for a client: one line of limited length, without folders of the server."""
    text = _PATH.sub("", printable(" ".join(message.split())))
    for folder in (Path.cwd(), Path.home()):
        text = text.replace(str(folder), "...") if len(str(folder)) > 1 else text
    return text if len(text) <= MOST_MESSAGE else text[:MOST_MESSAGE] + " ..."


def refusal(error: BaseException) -> Refused:
    """Return the answer to an error; one that is not the client's goes to the log."""
    if isinstance(error, Refused):
        return error
    for kinds, status in STATUS.items():
        if isinstance(error, kinds):
            return Refused(status, one_line(str(error)))
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return Refused(503, "out of memory: ask for a smaller image, or again later")
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}, line {frame[0].lineno})" if frame else ""
    log.error("an error of the server: %s: %s%s", type(error).__name__, error, where)
    return Refused(500, "an error of the server: its log says more")


def answer(error: BaseException) -> JSONResponse:
    """Return the response to an error, in the forms of OpenAI and of A1111."""
    refused = refusal(error)
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    about = {"message": refused.message, "type": kind, "param": None, "code": refused.code}
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
    headers |= {"WWW-Authenticate": 'Basic realm="ldm_lite"'} if refused.status == 401 else {}
    return JSONResponse({"error": about, "detail": refused.message}, refused.status, headers)


# ---- requests -------------------------------------------------------------------------------------------------------


async def read_json(request: Request, kind: type[Kind]) -> Kind:
    """Read a request's JSON object.  Raises Refused (422) for anything else."""
    return await run_in_threadpool(_parsed, await request.body(), kind)


def _parsed(content: bytes, kind: type[Kind]) -> Kind:
    try:
        given = json.loads(content, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise Refused(422, "the request's JSON is nested too deeply") from None
    except ValueError as error:
        raise Refused(422, f"the request is not JSON: {one_line(str(error))}") from None
    return validated(given, kind)


def validated(given: Any, kind: type[Kind]) -> Kind:
    """Return an object of a request.  Raises Refused (422), which names the first field that is wrong."""
    if not isinstance(given, dict):
        raise Refused(422, f"got JSON {type(given).__name__}, wanted an object")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(422, one_line(f"{place}: got {first['input']!r:.80}, {first['msg']}")) from None
    except RecursionError:
        raise Refused(422, "the request's JSON is nested too deeply") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        _no_number(text[:40])
    return value


class _InMemory(MultiPartParser):
    spool_max_size = 0  # no limit: an upload never becomes a file; the body is limited as a whole


async def read_form(request: Request) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """Read a multipart form in memory: its fields, and the contents of its files.  Raises Refused (422)."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refused(422, "wanted a form: multipart/form-data")
    parser = _InMemory(request.headers, request.stream(), max_files=32, max_fields=100)
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError, KeyError) as error:
        raise Refused(422, f"the form cannot be read: {one_line(str(error))}") from None
    fields, files = dict[str, str](), dict[str, list[bytes]]()
    for name, value in form.multi_items():
        if isinstance(value, str):
            fields[name] = value
        else:
            files.setdefault(name, []).append(await value.read())
    await form.close()
    return fields, files


def open_bytes(content: bytes, name: str, most: int) -> Image.Image:
    """Decode an image, as it is, of at most MOST_READ * most pixels.  Raises ValueError."""
    return decode_image(io.BytesIO(content), f"{name}", _loaded, MOST_READ * most)


def _loaded(image: Image.Image) -> Image.Image:
    image.load()
    return image


def open_base64(text: Any, name: str, most: int) -> Image.Image:
    """Decode an image in base64, with or without "data:image/png;base64,".  Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"got {type(text).__name__} as {name}, wanted an image in base64")
    head, comma, rest = text.partition(",")
    try:
        content = base64.b64decode(rest if comma and head.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{name} is not base64, which an image has to be in") from None
    return open_bytes(content, name, most)


# ---- answers --------------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "png", quality: int = 95) -> str:
    """Encode an image, with its text, in base64."""
    text, file = image.info.get("parameters"), io.BytesIO()
    if kind == "png":
        about = PngInfo()
        if text is not None:
            about.add_itxt("parameters", text) if not text.isascii() else about.add_text("parameters", text)
        image.save(file, "PNG", pnginfo=about)
    else:
        exif = Image.Exif()
        if text is not None:
            exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.encode("utf-16-be", errors="replace")
        image.save(file, kind, quality=quality, exif=exif)
    return base64.b64encode(file.getvalue()).decode()


def check_name(library: Library, name: str | None) -> str | None:
    """Return a model's name for the engine.  Raises Refused (404) for one that there is not."""
    if not name or name in library.names:
        return name or None
    known = ", ".join(library.names)
    raise Refused(404, one_line(f"unknown model {name!r:.80}: wanted one of {known}"), "model_not_found")


async def ended(request: Request, ticket: Ticket, timeout: float) -> None:
    """Wait for a ticket's end; it is cancelled if the client goes.  Raises what it ended with, Refused for those."""
    changes = Changes(ticket)
    gone = asyncio.create_task(_gone(request))
    try:
        while not ticket.ended:
            waiting = asyncio.create_task(changes.next())
            left = ticket.submitted + timeout - time.monotonic()
            done, _ = await asyncio.wait({waiting, gone}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if gone in done:
                raise Refused(CLOSED, "the client has gone")
            if not done:
                raise TimeoutError(f"not finished after {timeout:g} seconds: ask for less, or again later")
    finally:
        gone.cancel()
        if not ticket.ended:
            ticket.cancel()
    check_ended(ticket)


def check_ended(ticket: Ticket) -> None:
    """Raises what a ticket failed with, and Refused for one that was cancelled."""
    if ticket.error is not None:
        raise ticket.error
    if ticket.state == CANCELLED:
        raise Refused(409, "the request was interrupted before it began")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Changes:
    """A ticket's changes, for a coroutine."""

    def __init__(self, ticket: Ticket) -> None:
        self._event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        ticket.listen(self._notify)

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def next(self) -> None:
        """Wait for the next change."""
        await self._event.wait()
        self._event.clear()


def json_lines(event: str, content: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"event: {event}\ndata: {json.dumps(content)}\n\n"
