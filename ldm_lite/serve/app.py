"""The server as an ASGI application: the interfaces, the page, health and metrics."""

import contextlib
import importlib.util
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from ldm_lite.cli.version import __version__
from ldm_lite.serve import a1111, openai
from ldm_lite.serve.guard import Guard
from ldm_lite.serve.http import Refused, answer, one_line
from ldm_lite.serve.metrics import Metrics
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine


def make_app(engine: Engine, options: ServeOptions, key: str | None = None) -> ASGIApp:
    """Return the application of a started engine; requests need the key, if there is one.

    The end of its lifespan closes the engine.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="ldm_lite", version=__version__, lifespan=lifespan, redoc_url=None)
    metrics = Metrics(engine)
    app.include_router(openai.router(engine))
    app.include_router(a1111.router(engine))

    @app.get("/healthz", tags=["server"])
    def health() -> dict[str, str]:
        """200 while requests are taken, 503 once the server is being stopped."""
        if not engine.healthy:
            raise Refused(503, "the server is being stopped")
        return {"status": "ok"}

    @app.get("/metrics", tags=["server"])
    def numbers() -> Response:
        """Prometheus' format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Exception)
    @app.exception_handler(Refused)
    async def failed(request: Request, error: Exception) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return answer(Refused(error.status_code, one_line(str(error.detail))))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(Refused(422, one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")))

    for kind in (ValueError, TypeError, OSError, MemoryError, RuntimeError):  # before the handler that raises again
        app.add_exception_handler(kind, failed)
    _add_page(app, engine)
    return Guard(app, options, key, metrics.answered)


def _add_page(app: FastAPI, engine: Engine) -> None:
    """Mount the page at "/"; without Gradio that leads to the description of the API."""
    if importlib.util.find_spec("ldm_lite.serve.page") and importlib.util.find_spec("gradio"):
        importlib.import_module("ldm_lite.serve.page").mount(app, engine)
        return

    @app.get("/", include_in_schema=False)
    def docs() -> Response:
        return RedirectResponse("/docs")
