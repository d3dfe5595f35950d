"""Runs the application with uvicorn until a signal comes."""

import logging
import socket
import threading
from types import FrameType

import uvicorn

from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.app import make_app
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

log = logging.getLogger("ldm_lite")


class _Server(uvicorn.Server):
    """Stops the engine's queue as soon as a signal comes, so that what waits is answered, too."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; the second signal ends the server at once."""
        if not self.should_exit:
            threading.Thread(target=self.engine.stop).start()  # the signal may have come where its lock is held
        super().handle_exit(sig, frame)


def serve(options: ServeOptions, load: LoadOptions, key: str | None) -> None:
    """Load the model and answer requests until a signal comes; then finish what runs.

    Raises ValueError, OSError: for a model that cannot be loaded, an address that is taken.
    """
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
        config = uvicorn.Config(
            make_app(engine, options, key),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(options.grace) + 10,
        )
        host, port = listening.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        log.info("http://%s:%d (API: /docs; Ctrl-C stops it)", place, port)
        if key is None and host not in ("127.0.0.1", "::1"):
            log.warning("anyone who reaches %s can use the server: `api_key=KEY` limits that", place)
        log.setLevel(logging.WARNING)  # what a command says about its images is in the answers
        _Server(config, engine).run(sockets=[listening])
