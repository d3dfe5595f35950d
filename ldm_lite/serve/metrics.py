"""Counts and times of the server in Prometheus' format."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from ldm_lite.serve.queue import Engine

ABOUT = {
    "requests": "requests that were queued",
    "done": "requests that were answered with images",
    "failed": "requests that ended with an error",
    "cancelled": "requests that were given up",
    "refused": "requests for which the queue had no place",
    "images": "images made",
    "steps": "steps of batches",
    "batches": "batches of images that were denoised together",
    "swaps": "models loaded in place of another",
}
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics(Collector):
    """The engine's numbers, read when they are asked for, and those of the answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.registry.register(self)
        names = ["path", "status"]
        self._answers = Counter("ldm_lite_http_requests", "answers", names, registry=self.registry)
        self._seconds = Histogram(
            "ldm_lite_http_seconds", "of an answer", names[:1], buckets=SECONDS, registry=self.registry
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's numbers."""
        for name, about in ABOUT.items():
            yield CounterMetricFamily(f"ldm_lite_{name}", about, value=self.engine.totals[name])
        yield GaugeMetricFamily("ldm_lite_waiting_images", "images that wait", value=self.engine.waiting)
        yield GaugeMetricFamily("ldm_lite_running_requests", "requests that run", value=len(self.engine.running))

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answer, by its route: paths that there are not count as one."""
        path = getattr(scope.get("route"), "path", "other")
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
