"""What all interfaces share: reading requests, waiting for tickets, answering with images and errors."""

import asyncio
import base64
import contextlib
import contextvars
import io
import json
import math
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse

from ldm_lite import Control
from ldm_lite.cli.console import printable
from ldm_lite.cli.pictures import text_of, write_picture
from ldm_lite.image import decode_image, in_8_bits, to_pil, upright
from ldm_lite.serve import ledger
from ldm_lite.serve.ledger import ACCOUNT, CLIENT, Account, Full, Ledger, TooLarge
from ldm_lite.serve.options import LARGEST
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import BYTES, CANCELLED, Stopping, Ticket, report

BodyKind = TypeVar("BodyKind", bound="Body")
T = TypeVar("T")
MOST_MESSAGE = 500  # characters
MOST_READ = 16  # times the pixels that may be made may be read, of LARGEST if that is more
MOST_KEPT = 4  # times those pixels stay: larger pictures are reduced when they are read
DECODING = 10.0  # seconds that a picture may take
# Bytes of a pixel that decoders need, measured; other formats need what the pixels take.
DECODERS = {"WEBP": 22, "AVIF": 13, "HEIF": 13}
PROGRESSIVE = 11  # of a JPEG
BAND = 2**20  # pixels that are reduced at a time
READING = 60.0  # seconds until a body has come, and then until it is read
READERS = 4  # threads that read; a client has half of them
SMALL = 2**16  # bytes of a body that is read though the queue is full
MOST_MARKS = 2**16  # commas and brackets of a body
MOST_ITEMS = 1024  # of a list or an object
MOST_DEPTH = 32
MOST_TEXT = 2**16  # characters of a text
MOST_NAME = 200  # characters of a field's name
# The fields that hold pictures, which are longer, at any depth.
PICTURES = {"image", "images", "init_images", "init_img", "mask", "data", "input_image", "mask_image"}
PICTURES |= {"controlnet_input_images", "controlnet_images", "controlnet_masks", "reference"}
STATUS = {Full: 429, TooLarge: 413, Stopping: 503, TimeoutError: 504, ValueError: 422, TypeError: 422}
CHARSETS = (b"utf-8", b"utf8", b"us-ascii")  # charsets that a form may name
KEEP_ALIVE = 15  # seconds of silence after which a stream of events gets a comment
WAITING = ": waiting\n\n"  # the comment
CLOSED = 499  # the client has disconnected: nobody reads this status
_PATH = re.compile(r"(?<![\w.:/])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",]+)+[/\\](?=[^\s/\\])")
# The field that an error of the options is about: messages name it, except these three.
_FIELD = re.compile(r"`(?!max_)(\w+)`|(?P<prompt>no prompt)|(?P<width>pixels)|(?P<batch_size>images, expected)")


class Body(BaseModel):
    """A request's JSON object; unknown fields are kept, so that an answer can name them."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def docs(cls, kind: str = "application/json") -> dict[str, Any]:
        """Its entry in the API's description."""
        return {"requestBody": {"required": True, "content": {kind: {"schema": cls.model_json_schema()}}}}


class PictureRequest(Body):
    """A picture in base64."""

    image: str


class Refused(Exception):
    """A request that cannot be answered: its status, and one line that says why."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        """code and param, the field that is wrong, are OpenAI's."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


# ---- errors ---------------------------------------------------------------------------------------------------------


def one_line(message: str) -> str:
    """A message for a client: one line of limited length, without folders of the server."""
    text = _PATH.sub("", printable(" ".join(message[: 4 * MOST_MESSAGE].split())))
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
    report(error)
    return Refused(500, "internal error: see the server's log")


def field_of(error: BaseException) -> str | None:
    """The field of a request that an error names, or is about."""
    if (param := getattr(error, "param", None)) is not None or not isinstance(error, (Refused, ValueError, TypeError)):
        return param
    match = _FIELD.search(str(error))
    return match and (match[1] or match.lastgroup)


def described(error: BaseException) -> tuple[Refused, dict[str, Any]]:
    """Return the answer to an error, and its form for OpenAI's clients."""
    refused = refusal(error)
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return refused, {"message": refused.message, "type": kind, "param": field_of(error), "code": refused.code}


def answer(error: BaseException) -> JSONResponse:
    """Return the response to an error, in the forms of OpenAI and of A1111."""
    refused, about = described(error)
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
    headers |= {"WWW-Authenticate": 'Basic realm="ldm_lite"'} if refused.status == 401 else {}
    return JSONResponse({"error": about, "detail": refused.message}, refused.status, headers)


# ---- requests -------------------------------------------------------------------------------------------------------


class Reader:
    """Reads what clients send, for all interfaces: with limits of size and time, in a few threads.

    Clients take turns: none has more than half of the threads.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        """most: bytes of a body."""
        self.engine, self.most = engine, most
        self._threads = ThreadPoolExecutor(READERS, "reading")
        self._free = asyncio.Semaphore(READERS)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, request: Request, parse: Callable[[bytearray], T], copies: int) -> T:
        """Receive a request's body and parse it; `copies` is how often that holds the body in memory.

        parse may remove the parts of the body that it has read.  Raises Refused, Full, TooLarge, Stopping.
        """
        account, body = ledger.account(), bytearray()
        length = request.headers.get("content-length", "")
        self._check_length(int(length[:20]) if length.isdecimal() else 0)
        if not length.isdecimal() or int(length[:20]) > SMALL:
            self.engine.check_room(account.client)
        try:
            async with asyncio.timeout(READING):
                async for part in request.stream():
                    body += part
                    self._check_length(len(body))  # it may be larger than its header says, or have none
                    account.hold("body", len(body))
        except TimeoutError:
            raise Refused(408, f"the request was not received within {READING:g} seconds") from None
        except ClientDisconnect:
            raise Refused(CLOSED, "the client has disconnected") from None
        account.hold("body", copies * len(body))
        return await self.in_thread(request, parse, body)

    async def in_thread(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Call a function that reads what a client has sent, in one of the threads, if the client is still waiting.

        Raises Refused (503, CLOSED).
        """
        turn, account = self._turns.setdefault(CLIENT.get(), asyncio.Semaphore(READERS // 2)), ledger.account()

        def call() -> T:
            with account:  # it lasts as long as the thread, even if nobody waits for it any more
                return function(*args)

        try:
            async with asyncio.timeout(READING), contextlib.AsyncExitStack() as places:
                await places.enter_async_context(turn)
                await places.enter_async_context(self._free)
                if await request.is_disconnected():
                    raise Refused(CLOSED, "the client has disconnected")
                context = contextvars.copy_context()
                done = asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)
                places.pop_all()  # the thread holds them until it ends, even if nobody waits for it any more
                done.add_done_callback(lambda _: turn.release())
                done.add_done_callback(lambda _: self._free.release())
                try:
                    return await asyncio.shield(done)
                except asyncio.CancelledError:  # the thread continues
                    done.add_done_callback(_give_up)
                    raise
        except TimeoutError:
            raise Refused(503, f"the request was not read within {READING:g} seconds: try again later") from None

    def _check_length(self, length: int) -> None:
        if length > self.most:
            raise Refused(413, f"the request is too large, expected at most {self.most // 2**20} MiB")


def _give_up(done: "asyncio.Future[Any]") -> None:
    """Cancel the ticket that a function has queued and whose answer nobody waits for any more."""
    if not done.cancelled() and done.exception() is None:
        result = done.result()
        for item in result if isinstance(result, tuple) else (result,):
            if isinstance(item, Ticket):
                item.cancel()


async def reading(request: Request, function: Callable[..., T], *args: Any) -> T:
    """Call a function that reads what a client has sent, or queues it, in one of the threads for that."""
    reader: Reader = request.app.state.reader
    return await reader.in_thread(request, function, *args)


async def read_json(request: Request, kind: type[BodyKind]) -> BodyKind:
    """Read a request's JSON object.  Raises Refused (422 for anything else; 408, 413, 503), Full, Stopping."""

    def parse(body: bytearray) -> BodyKind:
        if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_MARKS:
            raise Refused(422, f"the request has more than {MOST_MARKS} commas and brackets")
        try:
            content = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise Refused(422, one_line(f"the request is not JSON: {error}")) from None
        body.clear()
        return validated(kind, content)

    reader: Reader = request.app.state.reader
    return await reader.read(request, parse, copies=2)


def validated(kind: type[BodyKind], content: Any) -> BodyKind:
    """Return a request as its kind.  Raises Refused (422), which names the first field that is wrong, not its value."""
    _check_bounds(content)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False, include_context=False)
        place = ".".join(str(part)[:40] for part in first["loc"]) or "the request"
        raise Refused(422, one_line(f"{place}: {first['msg']}"), param=place.partition(".")[0]) from None


def _check_bounds(content: Any) -> None:
    """Raises Refused (422) for a list, an object, a text or a number that no request needs."""
    left: list[tuple[Any, str, int]] = [(content, "", 0)]
    while left:
        value, name, depth = left.pop()
        if isinstance(value, str):
            wrong = len(value) > MOST_TEXT and name not in PICTURES and f"at most {MOST_TEXT} characters"
        elif isinstance(value, list | dict):
            wrong = len(value) > MOST_ITEMS and f"at most {MOST_ITEMS} values"
            wrong = wrong or (depth > MOST_DEPTH and f"at most {MOST_DEPTH} levels")
            named = value.items() if isinstance(value, dict) else [(name, item) for item in value]
            too_long = any(len(key) > MOST_NAME for key, _ in named)
            wrong = wrong or (too_long and f"names of at most {MOST_NAME} characters")
            left += [(item, key, depth + 1) for key, item in named] if not wrong else []
        else:
            wrong = isinstance(value, int) and abs(value) >= 2**64 and "a number of 64 bits"
            wrong = wrong or (isinstance(value, float) and not math.isfinite(value) and "a finite number")
        if wrong:
            raise Refused(422, one_line(f"{name[:40] or 'the request'}: expected {wrong}"), param=name[:40])


class _InMemory(MultiPartParser):
    spool_max_size = 0  # no limit: an upload never becomes a file; the body is limited as a whole


async def read_form(request: Request) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """Read a multipart form in memory: its fields, and the contents of its files.  Raises as read_json does."""
    kind, more = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise Refused(422, "expected a form: multipart/form-data")
    if more.get(b"charset", b"utf-8").lower() not in CHARSETS:  # punycode takes minutes for a megabyte
        raise Refused(422, "got a charset of the form, expected UTF-8: leave it out")

    async def parsed(body: bytearray) -> tuple[dict[str, str], dict[str, list[bytes]]]:
        end = time.monotonic() + DECODING

        async def parts() -> AsyncIterator[bytes]:
            while body:
                if time.monotonic() > end:
                    raise ValueError(f"it takes more than {DECODING:g} seconds")
                part = bytes(body[:SMALL])
                del body[:SMALL]
                yield part

        fields, files = dict[str, str](), dict[str, list[bytes]]()
        try:
            form = await _InMemory(request.headers, parts(), max_files=32, max_fields=100).parse()
        except (MultiPartException, ValueError, KeyError) as error:
            raise Refused(422, f"the form cannot be read: {one_line(str(error))}") from None
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields[name] = value
            else:
                files.setdefault(name, []).append(await value.read())
        await form.close()
        return fields, files

    reader: Reader = request.app.state.reader
    return await reader.read(request, lambda body: asyncio.run(parsed(body)), copies=3)


_LARGE = threading.Lock()  # pictures that are reduced are decoded one by one
_HINT = threading.Lock()  # edges of 512 x 512 take 40 MiB


class _Timed(io.BytesIO):
    """A picture's content, which raises an error if decoding it takes too long."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.end = time.monotonic() + DECODING

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() > self.end:
            raise ValueError(f"takes more than {DECODING:g} seconds")
        return super().read(size)


def open_bytes(content: bytes, name: str, most: int) -> Image.Image:
    """Decode an image, upright, of at most MOST_READ * most pixels; beyond MOST_KEPT * most it is reduced.

    The account of the request holds what decoding needs, then what is kept.  Raises ValueError, Full, TooLarge.
    """
    account, kept = ACCOUNT.get() or Account(Ledger(2**62), ""), MOST_KEPT * most

    def loaded(image: Image.Image) -> Image.Image:
        image.decodermaxblock = 2**12  # type: ignore[attr-defined]  # bytes between two checks of the time
        pixels = image.width * image.height
        account.add("pictures", BYTES * min(pixels, kept))
        if pixels > kept and not _LARGE.acquire(timeout=DECODING):
            raise Full("too many large pictures are being read: try again later")
        try:
            account.add("decoding", needed := pixels * _pixel_bytes(image))
            result = upright(image) if pixels <= kept else _reduced(image, kept)
            account.add("decoding", -needed)
            return result
        finally:
            if pixels > kept:
                _LARGE.release()

    try:
        return decode_image(_Timed(content), name, loaded, MOST_READ * max(most, LARGEST))
    except ValueError as error:
        raise error.__cause__ if isinstance(error.__cause__, (Full, TooLarge)) else error  # noqa: B904


def _pixel_bytes(image: Image.Image) -> int:
    """The bytes of a pixel that decoding an image needs."""
    if "progressive" in image.info:
        return PROGRESSIVE
    of_mode = 1 if image.mode in ("1", "L", "P") else BYTES
    return DECODERS.get(image.format or "", of_mode)


def _reduced(image: Image.Image, most: int) -> Image.Image:
    """Return an image upright, with 8 bits, of at most so many pixels: means of squares, in bands of little memory."""
    ratio = math.sqrt(most / (image.width * image.height))
    image.draft(image.mode, (max(1, int(ratio * image.width)), max(1, int(ratio * image.height))))  # of a JPEG
    image.load()
    (width, height), bands = image.size, list[Image.Image]()
    factor = math.ceil(math.sqrt(width * height / most))
    rows = factor * max(1, BAND // (factor * width))
    for top in range(0, height, rows):
        band = in_8_bits(image.crop((0, top, width, min(top + rows, height))))
        mode = "RGBA" if band.has_transparency_data else "L" if band.mode in ("1", "L") else "RGB"
        bands.append(band.convert(mode).reduce(factor))
    result = Image.new(bands[0].mode, (bands[0].width, sum(band.height for band in bands)))
    for number, band in enumerate(bands):
        result.paste(band, (0, number * rows // factor))
    result.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return upright(result)


def open_base64(text: Any, name: str, most: int) -> Image.Image:
    """Decode an image in base64, with or without "data:image/png;base64,".  Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"got {type(text).__name__} as {name}, expected an image in base64")
    head, comma, rest = text.partition(",")
    try:
        content = base64.b64decode(rest if comma and head.startswith("data:") else text, validate=True)
    except ValueError:
        raise ValueError(f"{name} is not valid base64") from None
    return open_bytes(content, name, most)


# ---- answers --------------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "png", quality: int = 95) -> str:
    """Encode an image, with its text, in base64."""
    file = io.BytesIO()
    write_picture(image, file, kind.upper(), text_of(image), quality=quality)
    return base64.b64encode(file.getvalue()).decode()


def hint(image: Image.Image, preprocess: str, size: tuple[int, int]) -> str:
    """Return what a ControlNet sees of an image at a size, as a PNG in base64: one at a time.  Raises ValueError."""
    with _HINT:
        pixels = Control("", image, preprocess=preprocess).pixels(size)
    return encoded(to_pil(pixels[0] * 2 - 1))


@dataclass(frozen=True)
class Encoding:
    """An image in an answer, in base64."""

    image: Image.Image
    kind: str = "png"
    quality: int = 95

    def text(self) -> str:
        """Encode it."""
        return encoded(self.image, self.kind, self.quality)


def answer_with(content: dict[str, Any]) -> StreamingResponse:
    """Return the JSON answer of an object with an Encoding in place of each image.

    Each is encoded when its client has taken what comes before it: an answer is never in memory as a whole.
    """
    images, mark = list[Encoding](), secrets.token_hex()

    def note(value: Encoding) -> str:
        images.append(value)
        return mark

    async def parts() -> AsyncIterator[bytes]:
        before, *texts = json.dumps(content, default=note).split(mark)
        yield before.encode()
        for image, text in zip(images, texts, strict=True):
            whole = await run_in_threadpool(image.text)
            for start in range(0, len(whole), SMALL):
                yield whole[start : start + SMALL].encode()
            yield text.encode()

    return StreamingResponse(parts(), media_type="application/json")


def event(kind: str, /, **content: Any) -> str:
    """One of a stream of server-sent events."""
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


def stream(events: AsyncIterator[str]) -> StreamingResponse:
    """Return the response that sends events as they are made."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx does not wait for more
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def ended(request: Request, ticket: Ticket) -> None:
    """Wait for a ticket's end; it is cancelled if the client disconnects.  Raises the ticket's error, or Refused."""

    async def wait() -> None:
        async for _ in changes([ticket]):
            pass

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.create_task(wait()), asyncio.create_task(leave())
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refused(CLOSED, "the client has disconnected")
    finally:
        waiting.cancel()
        leaving.cancel()
        ticket.cancel()
    check_ended(ticket)


async def changes(tickets: Sequence[Ticket], silence: float | None = None) -> AsyncIterator[bool]:
    """Yield True now and after changes of tickets until all have ended, and False after seconds of silence."""
    changed, loop, is_last = asyncio.Event(), asyncio.get_running_loop(), False
    silence = KEEP_ALIVE if silence is None else silence

    def notify() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    for ticket in tickets:
        ticket.listen(notify)
    while not is_last:
        deadline = min((ticket.deadline for ticket in tickets if not ticket.ended), default=0.0)
        left = max(0.0, deadline - time.monotonic()) + 0.01
        try:
            async with asyncio.timeout(min(silence, left)):
                await changed.wait()
        except TimeoutError:
            if left < silence:
                changed.set()  # some ticket is too old
            else:
                yield False
            continue
        changed.clear()
        is_last = all(ticket.has_ended() for ticket in tickets)
        yield True


def check_ended(ticket: Ticket) -> None:
    """Raises the error of a failed ticket, and Refused for a cancelled one."""
    if ticket.error is not None:
        raise ticket.error
    if ticket.state == CANCELLED:
        raise Refused(409, "the request was interrupted before it began")
