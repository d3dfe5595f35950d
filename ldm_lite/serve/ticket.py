"""Ticket: a request as the engine sees it, from its place in the queue to its results; Run: a batch of their images."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from PIL import Image

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.serve.ledger import ACCOUNT, CLIENT, Account, Full, Ledger, TooLarge
from ldm_lite.serve.library import Loras
from ldm_lite.serve.options import LimitOptions
from ldm_lite.toolkit import Batch, Sample, State, cost_of

log = logging.getLogger("ldm_lite")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
BYTES = 4  # of a pixel of an image


class Stopping(Exception):
    """The server is stopping, or its device has failed: it takes no requests."""


EXPECTED = (Full, TooLarge, Stopping, TimeoutError, ValueError, TypeError)  # errors that are not the server's


def report(error: BaseException) -> None:
    """Write an error that is the server's own into the log, with its traceback, once."""
    if not isinstance(error, EXPECTED) and not hasattr(error, "is_reported"):
        error.is_reported = True  # type: ignore[attr-defined]
        log.error("an error of the server: %s: %s", type(error).__name__, error, exc_info=error)


class Made(NamedTuple):
    """An image of a request: a result in 8 bits, a third of the memory."""

    image: Image.Image  # with its text
    prompt: str
    seed: int
    parameters: str
    settings: Mapping[str, object]


class Queue(Protocol):
    """What a ticket needs from the engine that it is submitted to."""

    ledger: Ledger
    limits: LimitOptions

    def in_turn(self) -> list[Ticket]:
        """The waiting tickets, in the order of their turns."""

    def cancel(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a ticket without a result."""


class Ticket:
    """A request of one or more images.  Any thread may read it; the engine's thread writes it."""

    def __init__(
        self, engine: Queue, task: str, options: Txt2imgOptions, model: str | None = None, loras: Loras = ()
    ) -> None:
        self.task, self.options, self.model, self.loras = task, options, model, loras
        self.client = CLIENT.get()
        self.account = ACCOUNT.get() or Account(engine.ledger, self.client)
        self.holds_results = False  # in its account
        self.is_held = False  # by the engine
        self.count = 0  # images
        self.pixels = 0  # of an image, in its larger pass
        self.work = 0.0  # millions of pixels that the network runs over: see Engine.check_work
        self.cost = cost_of(options)  # the work that features add
        self.branches = 2  # of each step, of an image
        self.call: Callable[[Image.Image], Image.Image] | None = None  # a function of images, without the model
        self.images: Sequence[Image.Image] = ()
        self.num_partials = 0  # previews of each image
        self.state = QUEUED
        self.step = self.num_steps = 0  # of the images that run
        self.passes = (0, 1)  # steps done, and their number
        self.results: list[Any] = []  # of Made, or of images from a call
        self.partials: list[tuple[int, Image.Image]] = []  # (number of the image, what the step predicted)
        self.error: Exception | None = None
        self.interrupted = False
        self.submitted = time.monotonic()
        self.newest: Image.Image | None = None  # the preview
        self.wants_preview = False
        self.samples: Iterator[Sample] | None = None  # its images from the first that is not in `prepared` on
        self.prepared: deque[Unit] = deque()  # and those that wait for a batch that they fit
        self._engine = engine
        self._ending = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def position(self) -> int:
        """The number of images that come before; 0 once it runs or has ended."""
        before = takewhile(lambda earlier: earlier is not self, self._engine.in_turn())
        return sum(earlier.count - len(earlier.results) for earlier in before) if self.state == QUEUED else 0

    @property
    def size(self) -> int:
        """The bytes of its images while it waits."""
        values = [value for value in vars(self.options).values() if isinstance(value, tuple)]
        items = [getattr(item, "image", item) for value in (*values, self.images) for item in value]
        return sum(BYTES * item.width * item.height for item in items if isinstance(item, Image.Image))

    @property
    def results_size(self) -> int:
        """The bytes of its results, of previews, and of one image while it is sent."""
        return BYTES * self.pixels * (self.count * (1 + self.num_partials) + 1)

    @property
    def deadline(self) -> float:
        """When it times out, in time.monotonic's seconds."""
        return self.submitted + self._engine.limits.timeout

    @property
    def ended(self) -> bool:
        """Whether there will be no more changes."""
        return self.state in (DONE, FAILED, CANCELLED)

    def has_ended(self) -> bool:
        """Whether it has ended; one that has timed out ends now."""
        if not self.ended and time.monotonic() > self.deadline:
            message = f"not finished after {self._engine.limits.timeout:g} seconds: ask for less, or again later"
            self._engine.cancel(self, TimeoutError(message))
        return self.ended

    @property
    def progress(self) -> float:
        """The fraction that is done, in [0,1]."""
        if self.ended:
            return 1.0
        part = self.step / self.num_steps if self.num_steps else 0.0
        done, passes = self.passes
        return min(1.0, (len(self.results) + (done + part) / passes) / max(1, self.count))

    def preview(self) -> Image.Image | None:
        """Return the newest predicted image of a running ticket; it is decoded from the next step on."""
        self.wants_preview = True
        return self.newest

    def cancel(self) -> None:
        """Give the request up: it ends without a result."""
        self._engine.cancel(self)

    def interrupt(self) -> None:
        """Stop after the current step; the results then hold what was predicted.  A waiting request is cancelled."""
        if self.state == QUEUED:
            self.cancel()
        self.interrupted = True

    def listen(self, callback: Callable[[], None]) -> None:
        """Call a function now and after every change, in the engine's thread."""
        self._listeners.append(callback)
        callback()

    def tell(self) -> None:
        """Call the listeners: something has changed."""
        for callback in list(self._listeners):
            callback()

    def end(self, state: str, error: Exception | None = None) -> None:
        """End, once."""
        with self._ending:
            if self.ended:
                return
            self.error, self.state = error, state
        self.tell()


@dataclass(eq=False)
class Unit:
    """One image of a ticket, ready to be denoised."""

    ticket: Ticket
    sample: Sample
    ended: bool = False


@dataclass(eq=False)
class Run:
    """A batch of images being denoised, in turn with others."""

    units: list[Unit]
    batch: Batch
    states: Iterator[State]
    start: float = dataclasses.field(default_factory=time.monotonic)
    previewing: float = 0.0  # seconds spent on previews

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of its images, without those that have ended, which hear of no further step."""
        return list(dict.fromkeys(unit.ticket for unit in self.units if not unit.ticket.ended))

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(unit.ended or unit.ticket.ended for unit in self.units)
