"""Ticket: a request's place in the queue, its progress and its results."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from PIL import Image

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.serve.library import Loras
from ldm_lite.toolkit import Result

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"


class Runner(Protocol):
    """What has a ticket in its queue and runs it: the Engine."""

    def position(self, ticket: "Ticket") -> int:
        """Return the number of images that come before a waiting ticket."""

    def cancel(self, ticket: "Ticket", error: Exception | None = None) -> None:
        """End a ticket without a result."""

    def interrupt(self, ticket: "Ticket") -> None:
        """Stop a ticket after the step that runs, with what is there."""


class Ticket:
    """A request of one or more images.  Any thread may read it; the engine's thread writes it."""

    def __init__(self, engine: Runner, task: str, options: Txt2imgOptions, model: str, loras: Loras) -> None:
        self.task, self.options, self.model, self.loras = task, options, model, loras
        self.count = 0  # images
        self.num_partials = 0  # of each image: shown on the way
        self.state = QUEUED
        self.step = self.num_steps = 0  # of the images that run
        self.passes = (0, 1)  # that they have behind them, of how many
        self.results: list[Result] = []
        self.partials: list[tuple[int, Image.Image]] = []  # (number of the image, what the step predicted)
        self.error: Exception | None = None
        self.interrupted = False
        self.submitted, self.started, self.finished = time.monotonic(), 0.0, 0.0
        self._engine = engine
        self._changed = threading.Condition()
        self._version = 0
        self._listeners: list[Callable[[], None]] = []
        self._preview: Image.Image | None = None
        self.wants_preview = False

    # ---- for clients ------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number of images that come before; 0 once it runs or has ended."""
        return self._engine.position(self)

    @property
    def ended(self) -> bool:
        """Whether there will be no more changes."""
        return self.state in (DONE, FAILED, CANCELLED)

    @property
    def progress(self) -> float:
        """The share that is done, in [0,1]."""
        if self.ended:
            return 1.0
        part = self.step / self.num_steps if self.num_steps else 0.0
        done, passes = self.passes
        return min(1.0, (len(self.results) + (done + part) / passes) / max(1, self.count))

    def preview(self) -> Image.Image | None:
        """Return the newest predicted image of a running ticket; it is decoded from the next step on."""
        self.wants_preview = True
        return self._preview

    def cancel(self) -> None:
        """Give the request up: it ends without a result."""
        self._engine.cancel(self)

    def interrupt(self) -> None:
        """Stop after the step that runs; the results then hold what was predicted.  A waiting request is cancelled."""
        self._engine.interrupt(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most so many seconds; return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, timeout)

    def changes(self, timeout: float = 0.5) -> Iterator["Ticket"]:
        """Yield the ticket after every change, and at least every `timeout` seconds; stop after its end."""
        seen = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._version != seen, timeout)  # type: ignore[misc]
                seen, ended = self._version, self.ended
            yield self
            if ended:
                return

    def listen(self, callback: Callable[[], None]) -> None:
        """Call a function after every change, in the engine's thread."""
        with self._changed:
            self._listeners.append(callback)
        callback()

    # ---- for the engine ---------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Wake those who wait."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()
            listeners = list(self._listeners)
        for callback in listeners:
            callback()

    def show(self, image: Image.Image) -> None:
        """Set the preview."""
        self._preview = image

    def end(self, state: str, error: Exception | None = None) -> None:
        """End, once."""
        with self._changed:
            if self.ended:
                return
            self.error, self.finished, self.state = error, time.monotonic(), state
        self.tell()
