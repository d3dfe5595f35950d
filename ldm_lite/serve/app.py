"""The server as an ASGI application: the guard that requests pass, the interfaces, the page, health and metrics."""

import base64
import contextlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ldm_lite.cli.console import printable
from ldm_lite.cli.version import __version__
from ldm_lite.runtime.compile import compiling
from ldm_lite.serve import api, openai
from ldm_lite.serve.a1111 import routes as a1111
from ldm_lite.serve.http import Reader, Refused, answer, one_line
from ldm_lite.serve.ledger import ACCOUNT, CLIENT, Account, Full, Ledger, TooLarge
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import Stopping

access = logging.getLogger("ldm_lite.access")

PUBLIC_ROUTES = re.compile(r"/healthz|/v1/images/[0-9a-f]{32}\.[a-z]{3,4}")  # need no key
MOST_LOGGED = 200  # characters of a path
SAFE = {"GET", "HEAD", "OPTIONS"}
TOTALS = {  # of the engine, as Prometheus describes them
    "requests": "requests that were queued",
    "done": "requests that were answered with images",
    "failed": "requests that ended with an error",
    "cancelled": "requests that were cancelled",
    "refused": "requests refused because the queue was full",
    "images": "images made",
    "steps": "steps of batches",
    "batches": "batches of images that were denoised together",
    "swaps": "models loaded to replace another",
}
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


def make_app(engine: Engine, options: ServeOptions, key: str | None = None) -> ASGIApp:
    """Return the application of a started engine; requests need the key, if there is one.

    The end of its lifespan closes the engine.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="ldm_lite", version=__version__, lifespan=lifespan, redoc_url=None)
    app.state.reader = Reader(engine, options.max_body * 2**20)
    registry = CollectorRegistry()
    registry.register(_Numbers(engine))
    app.include_router(openai.router(engine))
    app.include_router(a1111.router(engine))

    @app.get("/healthz", tags=["server"])
    async def health() -> dict[str, str]:
        """200 while requests are taken, 503 once the server is stopping or its device has failed.

        `engine` is set while the first images with new settings wait: "compiling", or "capturing" a CUDA graph.
        """
        if not engine.healthy:
            raise Refused(503, "the server does not accept requests")
        return {"status": "ok"} | ({"engine": word} if (word := compiling()) else {})

    @app.get("/metrics", tags=["server"])
    async def numbers() -> Response:
        """Prometheus' format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = Refused(error.status_code, one_line(str(error.detail)))
        elif isinstance(error, RequestValidationError):
            first = error.errors()[0]
            error = Refused(422, one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))
        return answer(error)

    # The handler of Exception raises again after its answer: expected errors have their own.
    expected = (Full, TooLarge, Stopping, ValueError, TypeError, OSError, MemoryError, RuntimeError)
    for kind in (Refused, HTTPException, RequestValidationError, *expected, Exception):
        app.add_exception_handler(kind, failed)

    api.mount(app, engine)
    return _Guard(app, options, key, registry, engine.ledger)


def client_of(scope: Scope) -> str:
    """Return the key that identifies a client: its address, or the first half of an IPv6 address."""
    address: str = (scope.get("client") or ("",))[0]
    with contextlib.suppress(ValueError):
        if (number := ipaddress.ip_address(address)).version == 6:
            return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))
    return address


class _Numbers(Collector):
    """The engine's numbers, read when Prometheus asks for them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's numbers."""
        for name, about in TOTALS.items():
            yield CounterMetricFamily(f"ldm_lite_{name}", about, value=self.engine.totals[name])
        yield GaugeMetricFamily("ldm_lite_waiting_images", "images that wait", value=self.engine.waiting)
        yield GaugeMetricFamily("ldm_lite_running_requests", "requests that run", value=len(self.engine.running))


class _Guard:
    """ASGI middleware.  Refuses requests by their host name, origin and key; counts, times and logs the answers.

    Each request has an account in the ledger, until its answer is sent.  Starlette's TrustedHostMiddleware has no rule
    for IP addresses, which pass here, and a counter inside the application would not see requests refused here.
    """

    def __init__(
        self, app: ASGIApp, options: ServeOptions, key: str | None, registry: CollectorRegistry, ledger: Ledger
    ) -> None:
        self.app, self.key, self.ledger = app, key, ledger
        self.names = {"localhost", options.host.lower(), *(name.lower() for name in options.allow_host)}
        self.answers = Counter("ldm_lite_http_requests", "answers", ["path", "status"], registry=registry)
        self.seconds = Histogram("ldm_lite_http_seconds", "of an answer", ["path"], buckets=SECONDS, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        start, status, client = time.perf_counter(), 500, client_of(scope)
        account = scope["account"] = Account(self.ledger, client)
        CLIENT.set(client)
        ACCOUNT.set(account)

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            with account:
                await self.app(scope, receive, sending)
        except Refused as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": refused.message})
            else:
                await answer(refused)(scope, receive, sending)
        finally:
            if scope["type"] == "http":
                path = getattr(scope.get("route"), "path", "other")  # unknown paths count as `other`
                seconds = time.perf_counter() - start
                self.answers.labels(path, str(status)).inc()
                self.seconds.labels(path).observe(seconds)
                asked = f"{scope['method']} {scope['path']}"
                access.info("%s %s %d %.3f s", client, printable(asked[:MOST_LOGGED]), status, seconds)

    def _check(self, scope: Scope) -> None:
        """Raises Refused."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            what = f"got the host name {host!r:.80}, which is not this server's"
            raise Refused(
                403, f"{what}: its owner allows it with `allow_host=NAME`; localhost and addresses always work"
            )
        origin, method = headers.get("origin"), scope.get("method", "GET")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if (method not in SAFE or scope["type"] == "websocket") and (
            foreign or headers.get("sec-fetch-site") == "cross-site"
        ):
            raise Refused(403, f"a page of another site ({origin!r:.80}) may not use this server")
        if not PUBLIC_ROUTES.fullmatch(scope["path"]) and not self._has_key(headers.get("authorization", "")):
            raise Refused(401, "expected the server's key: Authorization: Bearer KEY, or KEY as the password")

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server: an address cannot have been rebound, a name can."""
        try:
            name = (urlsplit("//" + host).hostname or "").lower()
            if name not in self.names:
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has_key(self, authorization: str) -> bool:
        if self.key is None:
            return True
        kind, _, value = authorization.partition(" ")
        if kind.lower() == "basic":
            try:
                value = base64.b64decode(value).decode().partition(":")[2]
            except ValueError:
                return False
        return kind.lower() in ("bearer", "basic") and hmac.compare_digest(value.strip().encode(), self.key.encode())
