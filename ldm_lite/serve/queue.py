"""Engine: one queue of requests (tickets) and one thread that denoises them, those that are alike together."""

import dataclasses
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from PIL import Image
from torch import Tensor

from ldm_lite.cli.options import names_files
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.image import to_image
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.options import LimitOptions
from ldm_lite.toolkit import Batch, Result, Sample, State, count_images, prepare

log = logging.getLogger("ldm_lite")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
# Options that may differ in a batch.
DIFFERENT = {"prompt", "negative_prompt", "seed", "variation_seed", "init_img", "mask", "batch_size", "n_iter"}
PREVIEW_SHARE = 0.2  # of the time that may go into previews


class Full(Exception):
    """The queue has no place for a request."""


class Stopping(Exception):
    """The server is being stopped, and takes no requests."""


class Ticket:
    """A request of one or more images.  Any thread may read it; the engine's thread writes it."""

    def __init__(self, engine: "Engine", task: str, options: Txt2imgOptions, model: str, loras: Loras) -> None:
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
        self.submitted = time.monotonic()
        self.newest: Image.Image | None = None  # the preview
        self.wants_preview = False
        self.samples: Iterator[Sample] | None = None  # its images from the first that is not in `prepared` on
        self.prepared: deque[Unit] = deque()  # and those that wait for a batch that they go with
        self._engine = engine
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    @property
    def position(self) -> int:
        """The number of images that come before; 0 once it runs or has ended."""
        before = takewhile(lambda earlier: earlier is not self, list(self._engine.queue))
        return sum(earlier.count - len(earlier.results) for earlier in before) if self.state == QUEUED else 0

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
        return self.newest

    def cancel(self) -> None:
        """Give the request up: it ends without a result."""
        self._engine.cancel(self)

    def interrupt(self) -> None:
        """Stop after the step that runs; the results then hold what was predicted.  A waiting request is cancelled."""
        if self.state == QUEUED:
            self.cancel()
        self.interrupted = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most so many seconds; return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, timeout)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call a function now and after every change, in the engine's thread."""
        with self._changed:
            self._listeners.append(callback)
        callback()

    def tell(self) -> None:
        """Wake those who wait: something has changed."""
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for callback in listeners:
            callback()

    def end(self, state: str, error: Exception | None = None) -> None:
        """End, once."""
        with self._changed:
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


class Engine:
    """Runs tickets in the order in which they came; images that are alike run together with the first."""

    def __init__(self, library: Library, limits: LimitOptions) -> None:
        self.library, self.limits = library, limits
        self.totals: Counter[str] = Counter()  # what has happened so far, by name
        self.running: list[Ticket] = []
        self.queue: list[Ticket] = []  # in the order of arrival, also those of which some images run
        self._changed = threading.Condition()
        self._stopping = False
        self._give_up = float("inf")  # the time at which running images are interrupted
        self._thread = threading.Thread(target=self._loop, name="denoising", daemon=True)

    # ---- for any thread ---------------------------------------------------------------------------------------------

    def start(self) -> "Engine":
        """Start the thread."""
        self._thread.start()
        return self

    def submit(
        self,
        task: str,
        options: Txt2imgOptions,
        model: str | None = None,
        loras: Loras = (),
        partials: int = 0,
    ) -> Ticket:
        """Queue a request.  Raises ValueError, TypeError (one line) for options that do not fit, Full, Stopping.

        task is "txt2img", "img2img", "inpaint" or "upscale", options are its dataclass, with images as PIL.  partials
        is the number of images on the way that are wanted of each.
        """
        ticket = Ticket(self, task, options, self.library.check(model, loras), loras)
        ticket.num_partials = partials
        self._check(ticket)
        with self._changed:
            if self._stopping:
                raise Stopping("the server is being stopped: try again later")
            waiting = self.waiting
            if waiting + ticket.count > self.limits.max_queue:
                self.totals["refused"] += 1
                raise Full(f"{waiting} images are waiting, and at most {self.limits.max_queue} may: try again later")
            self.queue.append(ticket)
            self.totals["requests"] += 1
            self._changed.notify_all()
        return ticket

    def _check(self, ticket: Ticket) -> None:
        """Count a ticket's images.

        Raises ValueError for a ticket that names files, is beyond the limits, or that its model cannot do.
        """
        options, limits = ticket.options, self.limits
        for field in filter(names_files, dataclasses.fields(options)):
            value = getattr(options, field.name)
            if any(isinstance(item, (str, os.PathLike)) for item in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(
                    f"got `{field.name}` from a request, which cannot name files of the server: leave it out"
                )
        if options.seamless is not None:
            raise ValueError("the server makes no seamless images: leave `seamless` out")
        ticket.count = count_images(options)  # which may read files: after the check that there are none
        if ticket.count > limits.max_images:
            raise ValueError(f"got {ticket.count} images, wanted at most {limits.max_images} in a request")
        for name in ("steps", "hires_steps"):
            if (getattr(options, name) or 0) > limits.max_steps:
                raise ValueError(f"got `{name}` {getattr(options, name)}, wanted at most {limits.max_steps}")
        for image in getattr(options, "init_img", ()) if ticket.task == "upscale" else ():
            width, height = to_image(image).size
            self.check_size(4 * width, 4 * height)
        side = self.library.model.family.resolution if ticket.task == "txt2img" else 1
        times = options.hires or 1
        self.check_size(int(times * (options.width or side)), int(times * (options.height or side)))
        if ticket.model == self.library.loaded and not options.control:
            prepare(self.library.model, options)

    def check_size(self, width: int, height: int) -> None:
        """Raises ValueError for an image of more pixels than requests may ask for."""
        if width * height > self.limits.max_pixels:
            raise ValueError(f"got {width} x {height} pixels, wanted at most {self.limits.max_pixels} of an image")

    @property
    def waiting(self) -> int:
        """The number of images that wait."""
        return sum(ticket.count for ticket in list(self.queue) if ticket.state == QUEUED)

    def cancel(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a ticket without a result; its images that run are dropped."""
        self._remove(ticket)
        if not ticket.ended:
            self.totals["failed" if error else "cancelled"] += 1
        ticket.end(FAILED if error else CANCELLED, error)

    def stop(self) -> None:
        """Take no more requests, refuse those that wait, and let those that run end within the seconds of grace."""
        with self._changed:
            if not self._stopping:
                self._stopping, self._give_up = True, time.monotonic() + self.limits.grace
            waiting = [ticket for ticket in self.queue if ticket.state == QUEUED]
            self._changed.notify_all()
        for ticket in waiting:
            self.cancel(ticket, Stopping("the server was stopped before this request began: try again later"))

    def close(self) -> None:
        """Stop, and wait for the end of what runs."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and run."""
        return self._thread.is_alive() and not self._stopping

    # ---- the denoising thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        """Denoise the first ticket's next images, with those of other tickets that are alike, until it is stopped."""
        units: list[Unit] = []
        while True:
            with self._changed:
                idle = not self.queue
                self._changed.wait_for(lambda: self.queue or self._stopping)
                if not self.queue:
                    return
                if idle:
                    self._changed.wait_for(lambda: self._stopping, self.limits.linger)
            try:
                units = self._gather()
                if units:
                    self._denoise(units)
            except Exception as error:  # it ends the tickets that it came from: the others go on
                for ticket in {unit.ticket for unit in units} or set(self.queue[:1]):
                    self.cancel(ticket, error)
            self.running, units = [], []

    def _gather(self) -> list[Unit]:
        """Return the images of the next batch."""
        with self._changed:
            tickets = list(self.queue)
        if not tickets or self._has_ended(tickets[0]):
            return []
        first, units = tickets[0], list[Unit]()
        if (first.model, first.loras) != (self.library.loaded, self.library.merged):
            for ticket in tickets:  # they hold the model that is to be freed
                ticket.samples = None
                ticket.prepared.clear()
            self.totals["swaps"] += first.model != self.library.loaded
            self.library.use(first.model, first.loras)
        for ticket in tickets:
            if ticket is first or _are_alike(first, ticket):
                while len(units) < self.library.most_together and (unit := self._take(ticket, units)) is not None:
                    units.append(unit)
        return units

    def _take(self, ticket: Ticket, units: list[Unit]) -> Unit | None:
        """Return a ticket's next image; None if there is none, it does not go with units, or preparing it failed."""
        if ticket.ended:
            return None
        try:
            if ticket.samples is None:
                ticket.samples = iter(prepare(self.library.model, ticket.options, first=len(ticket.results)))
            if not ticket.prepared and (sample := next(ticket.samples, None)) is not None:
                ticket.prepared.append(Unit(ticket, sample))
            if not ticket.prepared:
                return None
            self.check_size(*ticket.prepared[0].sample.size)
            if not units or units[0].sample.goes_with(ticket.prepared[0].sample):
                return ticket.prepared.popleft()
        except Exception as error:
            self.cancel(ticket, error)
        return None

    def _denoise(self, units: list[Unit]) -> None:
        self.running = list(dict.fromkeys(unit.ticket for unit in units))
        batch = Batch([unit.sample for unit in units])
        for ticket in self.running:
            if ticket.state == QUEUED:
                ticket.state = RUNNING
            ticket.step, ticket.num_steps = 0, batch.num_steps
            ticket.passes = (int(units[0].sample.is_second), 1 if ticket.options.hires is None else 2)
            ticket.tell()
        self.totals["batches"] += 1
        spent, start = 0.0, time.monotonic()  # seconds spent on previews
        for state in batch:
            self.totals["steps"] += 1
            for ticket in self.running:
                ticket.step = state.step
            for ticket in list(self.queue):
                self._has_ended(ticket)
            for place, unit in enumerate(units):
                unit.ticket.interrupted |= time.monotonic() > self._give_up
                if unit.ticket.interrupted and state.step < state.num_steps:
                    self._finish(unit, state.x0[place : place + 1])
            if all(unit.ended or unit.ticket.ended for unit in units):
                break
            before = time.monotonic()
            if self._show(units, state, previews=spent <= PREVIEW_SHARE * (before - start)):
                spent += time.monotonic() - before
            for ticket in self.running:
                ticket.tell()
        second_passes: dict[Ticket, list[Unit]] = {}
        for place, unit in enumerate(units):
            latents = batch.latents[place : place + 1]
            if unit.ended or unit.ticket.ended:
                continue
            try:
                second = unit.sample.second_pass(latents)
            except Exception as error:
                self.cancel(unit.ticket, error)
                continue
            if second is None:
                self._finish(unit, latents)
            else:
                second_passes.setdefault(unit.ticket, []).append(Unit(unit.ticket, second))
        for ticket, next_units in second_passes.items():
            ticket.prepared.extendleft(reversed(next_units))

    def _show(self, units: list[Unit], state: State, previews: bool) -> bool:
        """Decode what a step predicted, for those who want to see it; return whether there were previews.

        Partial images are wanted of each image at evenly spread steps, previews of one image of a ticket.
        """
        previewed = set[Ticket]()
        for place, unit in enumerate(units if state.step < state.num_steps else ()):
            ticket, shares = unit.ticket, unit.ticket.num_partials + 1
            partial = state.step in {round(state.num_steps * k / shares) for k in range(1, shares)}
            preview = previews and ticket.wants_preview and ticket not in previewed
            if ticket.ended or unit.ended or not (partial or preview):
                continue
            [ticket.newest] = self.library.decoder().decode(state.x0[place : place + 1])
            if partial:
                ticket.partials.append((unit.sample.number, ticket.newest))
            if preview:
                previewed.add(ticket)
        return bool(previewed)

    def _has_ended(self, ticket: Ticket) -> bool:
        """Whether a ticket has ended; one that is too old ends."""
        if not ticket.ended and time.monotonic() - ticket.submitted > self.limits.timeout:
            self.cancel(ticket, TimeoutError(f"not finished after {self.limits.timeout:g} seconds: ask for less"))
        return ticket.ended

    def _finish(self, unit: Unit, latents: Tensor) -> None:
        """Decode an image (1,C,h,w) and hand it to its ticket, once; an error is that ticket's alone."""
        ticket = unit.ticket
        if unit.ended or ticket.ended:
            return
        unit.ended = True
        try:
            ticket.results.append(unit.sample.finish(latents))
            self.totals["images"] += 1
        except Exception as error:
            self.cancel(ticket, error)
            return
        if len(ticket.results) == ticket.count or ticket.interrupted:
            self._remove(ticket)
            self.totals["done"] += 1
            ticket.end(DONE)

    def _remove(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self.queue:
                self.queue.remove(ticket)
        ticket.samples = None  # they hold the model
        ticket.prepared.clear()


def _are_alike(first: Ticket, second: Ticket) -> bool:
    """Whether two tickets ask for the same apart from prompts, seeds and images: a quick test before goes_with."""
    if (first.model, first.loras, type(first.options)) != (second.model, second.loras, type(second.options)):
        return False
    names = (field.name for field in dataclasses.fields(first.options) if field.name not in DIFFERENT)
    return all(getattr(first.options, name) == getattr(second.options, name) for name in names)
