"""Engine: one queue of requests and one thread that denoises them, those that are alike together."""

import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from ldm_lite.cli.options import names_files
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.image import to_image
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.options import LimitOptions
from ldm_lite.serve.ticket import CANCELLED, DONE, FAILED, QUEUED, RUNNING, Ticket
from ldm_lite.toolkit import Batch, Sample, State, count_images, prepare

log = logging.getLogger("ldm_lite")

# May differ in a batch.
OWN = {"prompt", "negative_prompt", "seed", "variation_seed", "init_img", "mask", "batch_size", "n_iter"}
PREVIEW_SHARE = 0.2  # of the time that may go into previews


class Full(Exception):
    """The queue has no place for a request."""


class Stopping(Exception):
    """The server is being stopped, and takes no requests."""


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
        self._queue: list[Ticket] = []  # in the order of arrival, also those of which some images run
        self._sources: dict[Ticket, Iterator[Unit]] = {}
        self._peeked: dict[Ticket, Unit] = {}
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
            waiting = sum(each.count for each in self._queue if each.state == QUEUED)
            if waiting + ticket.count > self.limits.max_queue:
                self.totals["refused"] += 1
                raise Full(f"{waiting} images are waiting, and at most {self.limits.max_queue} may: try again later")
            self._queue.append(ticket)
            self.totals["requests"] += 1
            self._changed.notify_all()
        return ticket

    def position(self, ticket: Ticket) -> int:
        """Return the number of images that come before a waiting ticket."""
        with self._changed:
            if ticket.state != QUEUED or ticket not in self._queue:
                return 0
            before = self._queue[: self._queue.index(ticket)]
            return sum(each.count - len(each.results) for each in before)

    @property
    def waiting(self) -> int:
        """The number of images that wait."""
        with self._changed:
            return sum(each.count for each in self._queue if each.state == QUEUED)

    def cancel(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a ticket without a result; its images that run are dropped."""
        with self._changed:
            self._remove(ticket)
        if not ticket.ended:
            self.totals["failed" if error else "cancelled"] += 1
        ticket.end(FAILED if error else CANCELLED, error)

    def interrupt(self, ticket: Ticket | None = None) -> None:
        """Stop a ticket after the step that runs, with what is there; by default all that run."""
        for each in list(self.running) if ticket is None else [ticket]:
            if each.state == QUEUED:
                self.cancel(each)
            each.interrupted = True

    def stop(self) -> None:
        """Take no more requests, refuse those that wait, and let those that run end within the seconds of grace."""
        with self._changed:
            if not self._stopping:
                self._stopping, self._give_up = True, time.monotonic() + self.limits.grace
            waiting = [each for each in self._queue if each.state == QUEUED]
            self._changed.notify_all()
        for each in waiting:
            self.cancel(each, Stopping("the server was stopped before this request began: try again later"))

    def close(self) -> None:
        """Stop, and wait for the end of what runs."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and run."""
        return self._thread.is_alive() and not self._stopping

    def _check(self, ticket: Ticket) -> None:
        """Count a ticket's images.  Raises ValueError for one beyond the limits, or that its model cannot do."""
        options, limits = ticket.options, self.limits
        _check_files(options)
        if options.seamless is not None:
            raise ValueError("the server makes no seamless images: leave `seamless` out")
        ticket.count = count_images(options)
        if ticket.count > limits.max_images:
            raise ValueError(f"got {ticket.count} images, wanted at most {limits.max_images} in a request")
        for name in ("steps", "hires_steps"):
            if (getattr(options, name) or 0) > limits.max_steps:
                raise ValueError(f"got `{name}` {getattr(options, name)}, wanted at most {limits.max_steps}")
        for image in getattr(options, "init_img", ()) if ticket.task == "upscale" else ():
            width, height = to_image(image).size
            self.check_size(4 * width, 4 * height)
        own = self.library.model.family.resolution if ticket.task == "txt2img" else 1
        times = options.hires or 1
        self.check_size(int(times * (options.width or own)), int(times * (options.height or own)))
        if ticket.model == self.library.loaded and not options.control:
            prepare(self.library.model, options)

    def check_size(self, width: int, height: int) -> None:
        """Raises ValueError for an image of more pixels than requests may ask for."""
        if width * height > self.limits.max_pixels:
            raise ValueError(f"got {width} x {height} pixels, wanted at most {self.limits.max_pixels} of an image")

    # ---- the denoising thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                idle = not self._queue
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                if idle:
                    self._changed.wait_for(lambda: self._stopping, self.limits.linger)
            try:
                self._round()
            except Exception:  # whatever a ticket did wrong has ended that ticket: the others go on
                log.exception("the denoising thread goes on after an error")

    def _round(self) -> None:
        """Denoise the first ticket's next images, and those of other tickets that are alike."""
        units: list[Unit] = []
        try:
            units = self._gather()
            if units:
                self._denoise(units)
        except Exception as error:
            for ticket in {unit.ticket for unit in units} or set(self._queue[:1]):
                self.cancel(ticket, error)
        finally:
            self.running = []

    def _gather(self) -> list[Unit]:
        """Return the images of the next batch."""
        first, units = self._queue[0], list[Unit]()
        if self._expired(first):
            return []
        if (first.model, first.loras) != (self.library.loaded, self.library.merged):
            self._sources.clear()  # they hold the model that is to be freed
            self._peeked.clear()
            self.totals["swaps"] += first.model != self.library.loaded
            self.library.use(first.model, first.loras)
        with self._changed:
            tickets = list(self._queue)
        for ticket in tickets:
            alike = ticket is first or _like(first, ticket)
            while alike and len(units) < self.library.most_together and (unit := self._peek(ticket)) is not None:
                if units and not units[0].sample.goes_with(unit.sample):
                    break
                units.append(self._peeked.pop(ticket))
            if len(units) >= self.library.most_together:
                break
        return units

    def _peek(self, ticket: Ticket) -> Unit | None:
        """Return a ticket's next image, without taking it; None if there is none, or preparing it failed."""
        if ticket not in self._peeked and not ticket.ended:
            try:
                if ticket not in self._sources:
                    samples = prepare(self.library.model, ticket.options, first=len(ticket.results))
                    self._sources[ticket] = (Unit(ticket, sample) for sample in samples)
                unit = next(self._sources[ticket], None)
                if unit is not None:
                    self.check_size(*unit.sample.size)
                    self._peeked[ticket] = unit
            except Exception as error:
                self.cancel(ticket, error)
        return self._peeked.get(ticket)

    def _denoise(self, units: list[Unit]) -> None:
        self.running = list(dict.fromkeys(unit.ticket for unit in units))
        batch = Batch([unit.sample for unit in units])
        for ticket in self.running:
            if ticket.state == QUEUED:
                ticket.state, ticket.started = RUNNING, time.monotonic()
            ticket.step, ticket.num_steps = 0, batch.num_steps
            ticket.passes = (int(units[0].sample.is_second), 1 if ticket.options.hires is None else 2)
            ticket.tell()
        self.totals["batches"] += 1
        spent, start = 0.0, time.monotonic()
        for state in batch:
            self.totals["steps"] += 1
            for ticket in self.running:
                ticket.step = state.step
            for ticket in list(self._queue):
                self._expired(ticket)
            if all(self._stopped(unit, place, state) for place, unit in enumerate(units)):
                break
            if spent <= PREVIEW_SHARE * (time.monotonic() - start):
                before = time.monotonic()
                self._show(units, state, partials=False)
                spent += time.monotonic() - before
            self._show(units, state, partials=True)
            for ticket in self.running:
                ticket.tell()
        seconds: dict[Ticket, list[Unit]] = {}
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
                seconds.setdefault(unit.ticket, []).append(Unit(unit.ticket, second))
        for ticket, next_units in seconds.items():
            peeked = [self._peeked.pop(ticket)] if ticket in self._peeked else []
            self._sources[ticket] = chain(next_units, peeked, self._sources.get(ticket, ()))

    def _stopped(self, unit: Unit, place: int, state: State) -> bool:
        """Whether an image needs no more steps: its ticket has ended, or was interrupted, which finishes it."""
        ticket = unit.ticket
        if time.monotonic() > self._give_up:
            ticket.interrupted = True
        if ticket.interrupted and not unit.ended and state.step < state.num_steps:
            self._finish(unit, state.x0[place : place + 1])
        return self._expired(ticket) or unit.ended

    def _expired(self, ticket: Ticket) -> bool:
        """Whether a ticket has ended; one that is too old ends."""
        if not ticket.ended and time.monotonic() - ticket.submitted > self.limits.timeout:
            self.cancel(ticket, TimeoutError(f"not finished after {self.limits.timeout:g} seconds: ask for less"))
        return ticket.ended

    def _finish(self, unit: Unit, latents: Tensor) -> None:
        """Decode an image (1,C,h,w) and hand it to its ticket; an error is that ticket's alone."""
        ticket, unit.ended = unit.ticket, True
        if ticket.ended:
            return
        try:
            ticket.results.append(unit.sample.finish(latents))
            self.totals["images"] += 1
        except Exception as error:
            self.cancel(ticket, error)
            return
        if len(ticket.results) == ticket.count or ticket.interrupted:
            with self._changed:
                self._remove(ticket)
            self.totals["done"] += 1
            ticket.end(DONE)

    def _show(self, units: list[Unit], state: State, partials: bool) -> None:
        """Decode what a step predicted, for those who want to see it."""
        if state.step == state.num_steps:
            return
        shown = set[Ticket]()
        for place, unit in enumerate(units):
            ticket = unit.ticket
            due = partials and _is_due(ticket.num_partials, state)
            if ticket.ended or unit.ended or not (due or (ticket.wants_preview and not partials)):
                continue
            if ticket in shown and not partials:
                continue
            shown.add(ticket)
            [image] = self.library.decoder().decode(state.x0[place : place + 1])
            if partials:
                ticket.partials.append((unit.sample.number, image))
            ticket.show(image)

    def _remove(self, ticket: Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
        self._sources.pop(ticket, None)
        self._peeked.pop(ticket, None)


def _check_files(options: Txt2imgOptions) -> None:
    """Raises ValueError for an option that names a file: it would be one of the server's."""
    for each in filter(names_files, dataclasses.fields(options)):
        value = getattr(options, each.name)
        if any(isinstance(item, (str, os.PathLike)) for item in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"got `{each.name}` from a request, which cannot name files of the server: leave it out")


def _like(one: Ticket, other: Ticket) -> bool:
    """Whether two tickets ask for the same apart from prompts, seeds and images: a quick test before goes_with."""
    if (one.model, one.loras, type(one.options)) != (other.model, other.loras, type(other.options)):
        return False
    names = (each.name for each in dataclasses.fields(one.options) if each.name not in OWN)
    return all(getattr(one.options, name) == getattr(other.options, name) for name in names)


def _is_due(partials: int, state: State) -> bool:
    """Whether a step is one of those, evenly spread, of which a partial image is wanted."""
    return state.step in {round(state.num_steps * (k + 1) / (partials + 1)) for k in range(partials)}
