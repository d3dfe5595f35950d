"""The server on Ray Serve: replicas of the same application, each with its own model, on the machines of a cluster.

Ray's proxy spreads requests over the replicas.  Those that reach one within WINDOW seconds go to its engine as a group
(@serve.batch), which denoises together what is alike.  A replica whose engine has ended is replaced.
"""

import asyncio
import dataclasses
import logging
import threading

import ray
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.app import make_app
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

log = logging.getLogger("ldm_lite")

WINDOW = 0.02
Call = tuple[Scope, Receive, Send]


class Replica:
    """One model and its application."""

    def __init__(self, options: ServeOptions, load: LoadOptions, key: str | None) -> None:
        """Load the model.  Raises ValueError, OSError."""
        options = dataclasses.replace(options, linger=WINDOW)
        self.engine = Engine(Library(load, options), options).start()
        self.application = make_app(self.engine, options, key)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, for Ray, as a function: uvicorn would take a method for ASGI 2."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":  # it may make images, and waits for others
                await self.together((scope, receive, send))
            else:
                await self.application(scope, receive, send)

        return application

    def check_health(self) -> None:
        """Ray asks from time to time.  Raises RuntimeError if the engine has ended: the replica is then replaced."""
        if not self.engine.healthy:
            raise RuntimeError("the denoising thread has ended")

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=WINDOW, max_concurrent_batches=10_000)
    async def together(self, calls: list[Call]) -> list[None]:
        """Answer a group of requests, each as soon as it is ready."""
        await asyncio.gather(*(self.application(*call) for call in calls), return_exceptions=True)
        return [None] * len(calls)


def application(options: ServeOptions, load: LoadOptions, key: str | None) -> serve.Application:
    """Return the application for serve.run: options.replicas of it, each with a share of a GPU."""
    resources = {"num_cpus": 1, "num_gpus": options.gpus_per_replica}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="ldm_lite",
        num_replicas=options.replicas,
        ray_actor_options=resources,
        max_ongoing_requests=options.max_queue,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=options.grace + 10,
    )
    return deployment.bind(options, load, key)


def run(options: ServeOptions, load: LoadOptions, key: str | None) -> None:
    """Serve until a signal comes, on a cluster that runs or on one of this machine."""
    ray.init(
        address=options.address or "local", include_dashboard=False, log_to_driver=options.debug, namespace="ldm_lite"
    )
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(application(options, load, key), name="ldm_lite", route_prefix="/")
        log.info(
            "http://%s:%d: %d replicas (API: /docs; Ctrl-C stops it)", options.host, options.port, options.replicas
        )
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
