"""The server on Ray Serve: replicas of the same application, each with its own model, on the machines of a cluster.

Ray's proxy spreads requests over the replicas.  Each takes as many as its own queue holds, so any further one gets
that queue's 429.  A replica whose engine has ended is replaced.
"""

import logging
import threading
from typing import Any, ClassVar

import ray
from ray import serve
from starlette.types import ASGIApp

from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.app import make_app
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

log = logging.getLogger("ldm_lite")

NAME = "ldm_lite"
OTHERS = 64  # requests to a replica besides those that make images


class Replica:
    """One model and its application, in a separate process."""

    application: ClassVar[ASGIApp]

    def __init__(self, options: ServeOptions, load: LoadOptions, key: str | None) -> None:
        """Load the model.  Raises ValueError, OSError."""
        self.engine = Engine(Library(load, options), options).start()
        Replica.application = make_app(self.engine, options, key)

    def check_health(self) -> None:
        """Ray asks from time to time.  Raises RuntimeError if the engine has ended: the replica is then replaced."""
        if not self.engine.healthy:
            raise RuntimeError("the denoising thread has ended")


def _application() -> ASGIApp:
    """Ray calls it once the Replica exists."""
    return Replica.application


def application(options: ServeOptions, load: LoadOptions, key: str | None) -> serve.Application:
    """Return the application for serve.run: options.replicas of it, each with a share of a GPU."""
    resources = {"num_cpus": 1, "num_gpus": options.gpus_per_replica}
    most = options.max_queue + options.batch_size + OTHERS
    bounds: dict[str, Any] = {"max_ongoing_requests": most, "max_queued_requests": most}
    if hasattr(serve.config, "BackpressureConfig"):  # older versions answer 503
        bounds["backpressure_config"] = serve.config.BackpressureConfig(status_code=429, retry_after_s=1)
    deployment = serve.deployment(
        serve.ingress(_application)(Replica),
        name=NAME,
        num_replicas=options.replicas,
        ray_actor_options=resources,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=options.grace + 10,
        **bounds,
    )
    return deployment.bind(options, load, key)


def serve_on_ray(options: ServeOptions, load: LoadOptions, key: str | None) -> None:
    """Serve until a signal comes, on a running cluster or on one on this machine."""
    ray.init(address=options.address or "local", include_dashboard=False, log_to_driver=options.debug, namespace=NAME)
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        try:
            serve.run(application(options, load, key), name=NAME, route_prefix="/")
            log.info(
                "http://%s:%d: %d replicas (API: /docs; Ctrl-C stops it)", options.host, options.port, options.replicas
            )
            threading.Event().wait()
        finally:
            serve.delete(NAME)  # not serve.shutdown(): the cluster may have applications of others
    finally:
        ray.shutdown()
