"""What every request passes first: the name it was sent to, where it comes from, its key and its size."""

import base64
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ldm_lite.serve.http import Refused, answer
from ldm_lite.serve.options import ServeOptions

Message = MutableMapping[str, Any]
OPEN = {"/healthz"}  # needs no key
SAFE = {"GET", "HEAD", "OPTIONS"}


class Guard:
    """ASGI middleware.  Refuses what it should not answer, and tells `done` of each answer."""

    def __init__(
        self, app: ASGIApp, options: ServeOptions, key: str | None, done: Callable[[Scope, int, float], None]
    ) -> None:
        """done gets the scope, the status and the seconds of a request."""
        self.app, self.key, self.done = app, key, done
        self.names = {"localhost", options.host.lower(), *(name.lower() for name in options.allow_host)}
        self.most = options.max_body * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
        except Refused as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": refused.message})
                return
            await answer(refused)(scope, receive, sending)
            self.done(scope, status, time.perf_counter() - start)
            return
        try:
            await self.app(scope, self._limited(receive), sending)
        finally:
            if scope["type"] == "http":
                self.done(scope, status, time.perf_counter() - start)

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
        foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        if (method not in SAFE or scope["type"] == "websocket") and (
            foreign or headers.get("sec-fetch-site") == "cross-site"
        ):
            raise Refused(403, f"a page of another site ({origin!r:.80}) may not use this server")
        if self.key is not None and scope["path"] not in OPEN and not self._has_key(headers.get("authorization", "")):
            raise Refused(401, "wanted the server's key: Authorization: Bearer KEY, or KEY as the password")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.most:
            raise self._too_large()

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server: an address cannot have been rebound, a name can."""
        try:
            name = (urlsplit("//" + host).hostname or "").lower()
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has_key(self, given: str) -> bool:
        kind, _, value = given.partition(" ")
        if kind.lower() == "basic":
            try:
                value = base64.b64decode(value).decode().partition(":")[2]
            except ValueError:
                return False
        assert self.key is not None
        return kind.lower() in ("bearer", "basic") and hmac.compare_digest(value.strip().encode(), self.key.encode())

    def _limited(self, receive: Receive) -> Callable[[], Awaitable[Message]]:
        """Count what is received: a body may be larger than its header says, or have none."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if received > self.most:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is too large, wanted at most {self.most // 2**20} MiB")
