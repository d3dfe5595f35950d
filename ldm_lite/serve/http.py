"""What all interfaces share: reading requests, waiting for tickets, answering with images and errors."""

import asyncio
import base64
import io
import logging
import re
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse

from ldm_lite.cli.console import printable
from ldm_lite.image import decode_image
from ldm_lite.serve.queue import CANCELLED, Full, Stopping, Ticket

log = logging.getLogger("ldm_lite")

Kind = TypeVar("Kind", bound="Body")
MOST_MESSAGE = 500  # characters
MOST_READ = 16  # times the pixels that may be made may be read
STATUS = {Full: 429, Stopping: 503, TimeoutError: 504, ValueError: 422, TypeError: 422}
LOOK = 0.5  # seconds between two looks at whether the client has gone
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
    return await run_in_threadpool(validated, kind.model_validate_json, await request.body())


def validated(validate: Callable[[Any], Kind], content: Any) -> Kind:
    """Return what pydantic makes of a request.  Raises Refused (422), which names the first field that is wrong."""
    try:
        return validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise Refused(422, one_line(f"the request is not JSON: {first['msg']}")) from None
        place = ".".join(map(str, first["loc"])) or "the request"
        raise Refused(422, one_line(f"{place}: got {first['input']!r:.80}, {first['msg']}")) from None


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

    def loaded(image: Image.Image) -> Image.Image:
        image.load()
        return image

    return decode_image(io.BytesIO(content), name, loaded, MOST_READ * most)


def open_base64(text: Any, name: str, most: int) -> Image.Image:
    """Decode an image in base64, with or without "data:image/png;base64,".  Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"got {type(text).__name__} as {name}, wanted an image in base64")
    head, comma, rest = text.partition(",")
    try:
        content = base64.b64decode(rest if comma and head.startswith("data:") else text, validate=True)
    except ValueError:
        raise ValueError(f"{name} is not base64, which an image has to be in") from None
    return open_bytes(content, name, most)


# ---- answers --------------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "png", quality: int = 95) -> str:
    """Encode an image, with its text, in base64."""
    text, file = image.info.get("parameters"), io.BytesIO()
    if kind == "png":
        about = PngInfo()
        if text is not None:
            (about.add_text if text.isascii() else about.add_itxt)("parameters", text)
        image.save(file, "PNG", pnginfo=about)
    else:
        exif = Image.Exif()
        if text is not None:
            exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.encode("utf-16-be", errors="replace")
        image.save(file, kind, quality=quality, exif=exif)
    return base64.b64encode(file.getvalue()).decode()


async def ended(request: Request, ticket: Ticket, timeout: float) -> None:
    """Wait for a ticket's end; it is cancelled if the client goes.  Raises what it ended with, Refused for those."""
    try:
        async for _ in changes(ticket, LOOK):
            if await request.is_disconnected():
                raise Refused(CLOSED, "the client has gone")
            if not ticket.ended and time.monotonic() > ticket.submitted + timeout:
                raise TimeoutError(f"not finished after {timeout:g} seconds: ask for less, or again later")
    finally:
        ticket.cancel()
    check_ended(ticket)


async def changes(ticket: Ticket, silence: float) -> AsyncIterator[bool]:
    """Yield True now and after every change of a ticket until it has ended, and False after seconds of silence."""
    changed, loop, ended = asyncio.Event(), asyncio.get_running_loop(), False

    def notify() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    ticket.listen(notify)
    while not ended:
        try:
            await asyncio.wait_for(changed.wait(), silence)
        except TimeoutError:
            yield False
            continue
        changed.clear()
        ended = ticket.ended
        yield True


def check_ended(ticket: Ticket) -> None:
    """Raises what a ticket failed with, and Refused for one that was cancelled."""
    if ticket.error is not None:
        raise ticket.error
    if ticket.state == CANCELLED:
        raise Refused(409, "the request was interrupted before it began")
