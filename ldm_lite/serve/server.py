"""Runs the application with uvicorn until a signal comes, with limits for slow and for many connections."""

import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol  # unlike httptools it limits the length of headers

from ldm_lite.cli import threads
from ldm_lite.cli.console import as_flags, printable
from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.app import PUBLIC_ROUTES, make_app
from ldm_lite.serve.http import Refused, answer
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

log = logging.getLogger("ldm_lite")

IDLE = 15.0  # seconds that a connection has for the head of a request
STALLED = 30.0  # seconds in which a client must read part of an answer
LEAST_RATE = 2**14  # bytes a second of it
MOST_PIECES = 2**10  # chunks of a body, besides one per LEAST_PIECE bytes: a chunk costs as much as 10 KiB
LEAST_PIECE = 64
MOST_AHEAD = 2**19  # bytes that are sent before the answer to an earlier request
FILES = 512  # besides connections: of models, threads and libraries
FEWEST_FILES = 32  # of these, if the system allows no more
MOST_FEW = 8  # connections, whatever the system allows
KEPT = 8  # connections for the routes that need no key, besides the others
LOOK = 1.0  # seconds between two checks of a connection
ARENA_MAX, MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h, where they begin with M_
LARGE_BLOCK = 2**23  # bytes
TRIM = 2.0  # seconds after which freed memory goes back to the system


class _TooMany(h11.RemoteProtocolError):
    """A request on a connection that is reserved for /healthz."""


class _Reading(h11.Connection):
    """h11's, which reads chunk by chunk, with a limit on chunks: endless one-byte chunks stalled the server."""

    pieces = size = 0  # of the body
    sent = 0  # bytes of answers
    is_kept = False  # for the routes that need no key

    def send(self, event: Any) -> Any:
        """Return the bytes to send for a part of an answer."""
        content = super().send(event)
        self.sent += len(content or b"")
        return content

    def next_event(self) -> Any:
        """The next part of a request.  Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.pieces = self.size = 0
            if self.is_kept and not PUBLIC_ROUTES.fullmatch(event.target.decode().partition("?")[0]):
                raise _TooMany("too many connections are open: try again later")
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding together")  # a smuggled request
        elif isinstance(event, h11.Data):
            self.pieces, self.size = self.pieces + 1, self.size + len(event.data)
            if self.pieces > MOST_PIECES + self.size // LEAST_PIECE:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class _Connection(H11Protocol):
    """uvicorn's, closed if its client is too slow, or has too many; the oldest idle one is closed for a new one."""

    most, proxy = 1024, ""  # connections, of which a client has half; only the address of a proxy may have all

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = _Reading(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        """Begin.  Close it, or an idle one, if there are too many."""
        super().connection_made(transport)
        self.since = self.read_at = time.monotonic()  # when it began to wait for a request; looked at what is unread
        self.taken = 0  # bytes of answers by then
        rivals = [rival for rival in self.connections if rival is not self and not rival.transport.is_closing()]
        same = [rival for rival in rivals if rival.address == self.address != self.proxy]
        for group, most in ((same, self.most // 2), (rivals, self.most)):
            if len(group) >= most:
                idle = [rival for rival in group if not rival.is_busy]
                if idle:
                    min(idle, key=lambda rival: rival.since).transport.abort()
                elif len(rivals) < self.most + KEPT:
                    self.conn.is_kept = True
                else:
                    self.transport.abort()
        self._look()

    @property
    def address(self) -> str:
        """The client's."""
        return self.client[0] if self.client else ""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        if self not in self.connections:
            return
        now, unread = time.monotonic(), self.transport.get_write_buffer_size()
        taken = self.conn.sent - unread
        is_slow = unread > 0 and now > self.read_at + STALLED and taken < self.taken + LEAST_RATE * STALLED
        is_dropped = (
            self.is_busy and "account" in self.scope and self.scope["account"].is_closed
        )  # others need the memory of its answer
        if is_slow or is_dropped or (not unread and not self.is_busy and now > self.since + IDLE):
            self.transport.abort()
            return
        if self.is_busy and not self.cycle.more_body:
            self.flow.resume_reading()  # to count early input and notice a disconnect
        if not unread or now > self.read_at + STALLED:
            self.read_at, self.taken = now, taken
        self.loop.call_later(LOOK, self._look)

    def data_received(self, data: bytes) -> None:
        """Read.  Keep data that come before an earlier request is answered in memory."""
        super().data_received(data)
        if self.is_busy and len(self.conn.trailing_data[0]) > MOST_AHEAD:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer data that are not HTTP, and other requests on a connection that is reserved for /healthz."""
        if isinstance(error := sys.exception(), _TooMany):
            self._refuse(503, str(error))
            return
        self._refuse(400, f"the request is not valid HTTP/1.1: {sys.exception()}".partition(": bytearray")[0])

    def shutdown(self) -> None:
        """Close it if it is idle; an answer continues, but the rest of a request is not awaited."""
        if self.is_busy and self.cycle.more_body and not self.cycle.response_started:
            self._refuse(503, "the server is being stopped: try again later")
        else:
            super().shutdown()

    def _refuse(self, status: int, message: str) -> None:
        """Answer an error, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = answer(Refused(status, message))
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (head, h11.Data(response.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None:  # the application's answer would come too late
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()


def config(app: ASGIApp, options: ServeOptions, most: int | None = None, backlog: int = FILES) -> uvicorn.Config:
    """Return uvicorn's configuration for an application, with `most` connections, accepting `backlog` at a time."""
    limits = {"most": most or options.max_connections, "proxy": options.proxy or ""}
    return uvicorn.Config(
        app,
        backlog=backlog,
        http=type("Connection", (_Connection,), limits),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=options.proxy is not None,
        forwarded_allow_ips=options.proxy,
        timeout_graceful_shutdown=int(options.grace) + 10,
    )


class _Server(uvicorn.Server):
    """Stops the engine's queue as soon as a signal comes, so that waiting requests are answered, too."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; the second signal ends the server at once."""
        if not self.should_exit:
            threading.Thread(target=self.engine.stop).start()  # the lock may be held where the signal came
        super().handle_exit(sig, frame)


class _Lines(logging.Formatter):
    """Lines with their time; unlike a command's, repeated ones are shown again."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line."""
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S%z')} {level}{as_flags(printable(record.message))}"


def log_lines() -> None:
    """From now on, log lines with their time to stderr: accesses, warnings, tracebacks of the server's own errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    log.handlers = [handler]
    log.setLevel(logging.WARNING)  # answers hold what a command says about its images
    logging.getLogger("ldm_lite.access").setLevel(logging.INFO)


def _spare_memory() -> None:
    """Keep freed memory together, so that it goes back to the system; to be called before the model is loaded.

    Threads that begin later allocate from one arena: glibc gives nothing of the ends of the others back.  Kernels of
    layers that have run lie among what images have taken.  Those of images of twelve sizes held 55 MiB, and half of
    what was freed could not be used again.
    """
    threads.keep_no_kernels()
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(ARENA_MAX, 1)


def _trim() -> None:
    """From time to time give back freed memory, which glibc would keep.

    Large blocks, as of a body that grows, are no part of the heap, where each would leave a gap as it moves; a model
    that is loaded changes that for the sake of its speed.
    """
    libc = ctypes.CDLL(None)
    while hasattr(libc, "malloc_trim"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_BLOCK)
        time.sleep(TRIM)
        gc.collect()  # an answer that is given up is a cycle, with its images
        libc.malloc_trim(0)


def allow_files(connections: int) -> tuple[int, int]:
    """Raise the limit of open files to what so many connections need, as far as the system allows.

    Many start with 1024; beyond them new connections are reset, and no model can be opened.  Returns how many
    connections that makes, and how many of them may be accepted at a time.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return connections, FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + FILES if hard == resource.RLIM_INFINITY else min(connections + FILES, hard)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return connections, FILES
    used = len(os.listdir("/dev/fd")) + KEPT
    connections = max(MOST_FEW, min(connections, soft - used - FEWEST_FILES))
    return connections, max(MOST_FEW, min(FILES, (soft - used - connections) // 2))


def serve(options: ServeOptions, load: LoadOptions, key: str | None) -> None:
    """Load the model and answer requests until a signal comes; then finish the running ones.

    Raises ValueError, OSError: for a model that cannot be loaded, an address that is taken.
    """
    _spare_memory()
    try:  # the address is taken before the model is loaded; uvicorn listens once it is
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
    except OSError as error:
        place, why = f"{options.host}:{options.port}", error.strerror or error
        raise OSError(f"cannot listen on {place}: {why}; `port=0` takes a free one") from error
    with listening:
        engine = Engine(Library(load, options), options).start()
        connections, backlog = allow_files(options.max_connections)  # once the model's files have been read
        if connections < options.max_connections:
            log.warning("the system allows %d connections, fewer than `max_connections`: see `ulimit -n`", connections)
        host, port = listening.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        log.info("http://%s:%d (API: /docs; Ctrl-C stops it)", place, port)
        if key is None and host not in ("127.0.0.1", "::1"):
            log.warning("anyone who reaches %s can use the server: `api_key=KEY` limits that", place)
        log_lines()
        gc.collect()
        gc.freeze()  # present objects are permanent: a collection then only visits requests
        threading.Thread(target=_trim, daemon=True).start()
        run = config(make_app(engine, options, key), options, connections, backlog)
        _Server(run, engine).run(sockets=[listening])
