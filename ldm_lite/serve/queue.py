"""Engine: one queue of requests (tickets) and one thread that denoises them, similar ones together."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from ldm_lite.cli.options import names_files
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.image import to_image
from ldm_lite.serve.ledger import Account, Full, Ledger
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.options import LimitOptions
from ldm_lite.serve.ticket import (
    CANCELLED,
    DONE,
    EXPECTED,
    FAILED,
    QUEUED,
    RUNNING,
    Made,
    Run,
    Stopping,
    Ticket,
    Unit,
    report,
)
from ldm_lite.toolkit import Batch, State, estimate_cost, prepare

log = logging.getLogger("ldm_lite")

# Options that may differ in a batch.
DIFFERENT = {"prompt", "negative_prompt", "seed", "variation_seed", "init_img", "mask", "batch_size", "n_iter"}
PLACES = 1.0  # seconds between two reports of their places to waiting tickets
PREVIEW_SHARE = 0.2  # fraction of the time that may be spent on previews
STAY = 10.0  # seconds that a model is kept for requests that name it while an earlier one waits for another
STINT = 0.25  # seconds that a run continues before another client's
MOST_CHUNKS = (300, 2000)  # of 75 tokens, in a text and in all texts of a request
MOST_PREPARED = 16  # requests that wait for another batch though their images are decoded
MOST_SIDES = 2**14  # pixels of a side
LEAST_TILE = 64  # pixels
SIDE = re.compile(r"(left|top|right|bottom)=\s*0*(\d{1,9})")  # of `extend`; reads a text once


class Engine:
    """Runs tickets, clients in turn step by step; images that are alike run together with the first.

    Turns follow start-time fair queueing, by the seconds that a client's steps have taken: the next step goes to the
    client with the fewest since it connected.  So the first image of a client waits for at most one step of
    each other client, whatever those asked for.
    """

    def __init__(self, library: Library, limits: LimitOptions) -> None:
        most = limits.max_pixels or library.most_pixels
        self.library, self.limits = library, dataclasses.replace(limits, max_pixels=most)
        self.ledger = Ledger(limits.max_memory * 2**20)
        self.totals: Counter[str] = Counter()  # counts of events, by name
        self.runs: list[Run] = []
        self.queue: list[Ticket] = []  # in the order of arrival, also those of which some images run
        self._changed = threading.Condition()
        self.clock = time.perf_counter
        self._at_work: list[Ticket] = []  # the tickets whose step or call is running
        self._taken: set[Ticket] = set()  # the tickets to which the engine's thread holds references
        self._seconds: dict[str, float] = {}  # seconds that each client has had, since it connected
        self._turn = 0.0  # the fewest seconds of waiting clients: a new client begins with as many
        self._last: Run | None = None  # the run of the last step
        self._stint = 0.0  # seconds that it has run without a break
        self._kept_since: float | None = None  # since when the loaded model has been kept though another one was next
        self._unload = False
        self._stopping = self._failed = False
        self._told = 0.0  # when waiting tickets last heard of their places
        self._give_up = float("inf")  # the time at which running images are interrupted
        self._thread = threading.Thread(target=self._loop, name="denoising", daemon=True)
        library.given_up = lambda: bool(self._at_work) and all(ticket.has_ended() for ticket in self._at_work)

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
        is the number of previews of each image.
        """
        ticket = Ticket(self, task, options, self.library.check_request(model, loras), loras)
        ticket.num_partials = partials
        self._check(ticket)
        return self._add(ticket)

    def submit_call(
        self,
        task: str,
        call: Callable[[Image.Image], Image.Image],
        images: Sequence[Image.Image],
        sizes: Sequence[tuple[int, int]],
    ) -> Ticket:
        """Queue a function of images that needs no model; sizes are those of its results, which are images, too.

        Raises ValueError, Full, Stopping.
        """
        ticket = Ticket(self, task, Txt2imgOptions(), self.library.loaded)
        ticket.call, ticket.images, ticket.count = call, images, len(sizes)
        self._check_count(ticket.count)
        ticket.work = sum(width * height for width, height in sizes) / 1e6
        ticket.pixels = max(width * height for width, height in sizes)
        return self._add(ticket)

    def _add(self, ticket: Ticket) -> Ticket:
        """Queue a ticket whose images and results have a place in memory."""
        with ticket.account as account:
            account.hold("body", 0)  # of the body only the pictures are kept
            account.hold("pictures", max(account.parts["pictures"], ticket.size))
            account.check(ticket.results_size)
            return self._queue(ticket)

    def _queue(self, ticket: Ticket) -> Ticket:
        """Give a ticket its turn.  If there is no room, the client with the most images loses its last ticket."""
        with self._changed:
            self.check_room()
            images = self.limits.max_queue
            waiting = [*(earlier for earlier in self.queue if earlier.state == QUEUED), ticket]
            dropped = []
            while sum(rival.count for rival in waiting) > images:
                held = Counter[str]()
                for rival in waiting:
                    held[rival.client] += rival.count
                greediest = max(held, key=lambda client: (held[client], client == ticket.client))
                dropped.append(next(rival for rival in reversed(waiting) if rival.client == greediest))
                waiting.remove(dropped[-1])
            full = Full(f"the queue is full: {len(waiting)} requests are waiting, at most {images} images may")
            if ticket in dropped:
                self.totals["refused"] += 1
                raise full
            for rival in dropped:
                self.queue.remove(rival)
            waits = {rival.client for rival in self.queue}
            self._seconds = {client: s for client, s in self._seconds.items() if s > self._turn or client in waits}
            self._seconds[ticket.client] = max(self._seconds.get(ticket.client, 0.0), self._turn)
            self.queue.append(ticket)
            ticket.account.__enter__()
            ticket.account.drop, ticket.is_held = functools.partial(self._drop, ticket.account), True
            self.totals["requests"] += 1
            self._changed.notify_all()
        for rival in dropped:
            self.cancel(rival, full)
        return ticket

    def _drop(self, account: Account, full: Full) -> None:
        """End the tickets of a waiting request, to make room for others."""
        for ticket in list(self.queue):
            if ticket.account is account:
                self.cancel(ticket, full)

    def check_room(self, client: str | None = None) -> None:
        """Raises Stopping if no requests are taken, Full if the queue is full and this client has most of it."""
        if self._stopping:
            raise Stopping("the device has failed" if self._failed else "the server is being stopped: try again later")
        most, mine = self.limits.max_queue, sum(t.count for t in list(self.queue) if t.client == client)
        if client is not None and self.waiting >= most and 2 * mine >= most:
            raise Full(f"the queue is full: {self.waiting} images are waiting, at most {most} may: try again later")

    def _check(self, ticket: Ticket) -> None:
        """Count a ticket's images.

        Raises ValueError for a ticket that names files, is beyond the limits, or that its model cannot do.
        """
        options, limits, facts = ticket.options, self.limits, self.library.facts(ticket.model)
        for field in filter(names_files, dataclasses.fields(options)):
            value = getattr(options, field.name)
            if any(isinstance(item, (str, os.PathLike)) for item in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(
                    f"got `{field.name}` from a request, which cannot name files of the server: leave it out"
                )
        if getattr(options, "tile", LEAST_TILE) < LEAST_TILE:
            raise ValueError(f"got `tile` {options.tile}, expected {LEAST_TILE} or more")  # type: ignore[attr-defined]
        self._check_count((options.batch_size or 1) * (options.n_iter or 1))  # before a list of so many is made
        for name, steps in (
            ("`steps`", options.steps),
            *(("steps of a later pass:", n) for _, n in ticket.cost.passes),
        ):
            if (steps or 0) > limits.max_steps:
                raise ValueError(f"got {name} {steps}, expected at most {limits.max_steps}")
        if ticket.cost.changes_networks:
            raise ValueError(f"`{ticket.cost.changes_networks}` changes networks that all requests share: leave it out")
        asked = estimate_cost(options, facts.steps)  # may read files, so the check that there are none comes first
        ticket.count = asked.images
        self._check_count(ticket.count)
        for number, most, what in zip((asked.longest, asked.chunks), MOST_CHUNKS, ("a text", "all texts"), strict=True):
            if number > most:
                raise ValueError(
                    f"got about {number} chunks of 75 tokens in {what} of the prompt, expected at most {most}"
                )
        ticket.branches = asked.parts + 1 + ticket.cost.controls
        if ticket.branches > limits.max_branches:
            raise ValueError(
                f"got {ticket.branches} branches in each step, for {asked.parts} parts of a prompt, a negative one "
                f"and {ticket.cost.controls} ControlNets, expected at most {limits.max_branches} (`max_branches`)"
            )
        self.check_work(ticket, *self._size(ticket, facts.side))
        embeddings: Any = {"embedding": self.library.embeddings_in(asked.texts, ticket.model)}
        ticket.options = dataclasses.replace(options, **embeddings) if embeddings["embedding"] else options
        if (model := self.library.ready(ticket.model)) is not None:
            if ticket.cost.references and not facts.inputs.references:
                raise ValueError(f"{ticket.model} reads no reference images: leave out `reference`")
            if not ticket.cost.controls + ticket.cost.references:
                prepare(model, ticket.options)

    def _size(self, ticket: Ticket, side: int) -> tuple[int, int]:
        """The size of a ticket's images, as far as it is known; an image without a size is reduced by its model."""
        options, images = ticket.options, getattr(ticket.options, "init_img", ())
        if not images:
            if ticket.cost.references and options.width is options.height is None:
                return 0, 0  # the size of a reference as its model fits it, measured when the image is prepared
            return options.width or side, options.height or side
        sizes = [to_image(image).size for image in images]
        width, height = max(size[0] for size in sizes), max(size[1] for size in sizes)
        for edge, pixels in SIDE.findall(getattr(options, "extend", None) or ""):
            width, height = (
                (width + int(pixels), height) if edge in ("left", "right") else (width, height + int(pixels))
            )
            self.check_size(width, height, of=16)  # before it is reduced
        if ticket.task == "upscale":
            return 4 * width, 4 * height
        if (long := getattr(options, "resolution", None)) is not None:
            return long, math.ceil(long * min(width, height) / max(width, height))
        if getattr(options, "only_masked", None) is not None:
            return options.width or side, options.height or side
        if options.width or options.height:
            by_width, by_height = (options.width or 0) / width, (options.height or 0) / height
            return options.width or round(by_height * width), options.height or round(by_width * height)
        ratio = min(1.0, 2 * side / max(width, height))
        return round(ratio * width), round(ratio * height)

    def check_work(self, ticket: Ticket, width: int, height: int) -> None:
        """Measure a ticket's work.  Raises ValueError beyond the limits of an image, and of a request's whole work."""
        steps = ticket.options.steps or self.library.facts(ticket.model).steps
        pixels, text = width * height * steps, f"{width} x {height} pixels x {steps} steps"
        # what the network reads of references in every step, each reduced to about the model's own size
        read = ticket.cost.references * self.library.facts(ticket.model).side ** 2
        if read:
            pixels += read * steps
            text += f" and {ticket.cost.references} references"
        self.check_size(width, height)
        for times, its_steps in ticket.cost.passes:
            larger = int(times * width), int(times * height)
            self.check_size(*larger)
            pixels += (math.prod(larger) + read) * (its_steps or steps)
            text += f" and {larger[0]} x {larger[1]} x {its_steps or steps}"
            ticket.pixels = max(ticket.pixels, math.prod(larger))
        ticket.pixels = max(ticket.pixels, width * height)
        ticket.work = ticket.count * ticket.branches * pixels / 1e6
        if ticket.work > self.limits.max_work:
            raise ValueError(
                f"got {ticket.count} images x {ticket.branches} branches x {text}, {ticket.work:,.0f} millions, "
                f"expected at most {self.limits.max_work:,} in a request (`max_work`): ask for less"
            )

    def _check_count(self, count: int) -> None:
        if count > self.limits.max_images:
            raise ValueError(f"got {count} images, expected at most {self.limits.max_images} in a request")

    def check_size(self, width: int, height: int, of: int = 1) -> None:
        """Raises ValueError for an image of more pixels than `of` images may have."""
        if width * height > of * self.limits.max_pixels or max(width, height) > MOST_SIDES:
            most = of * self.limits.max_pixels
            raise ValueError(f"got {width} x {height} pixels, expected at most {most} of an image, {MOST_SIDES} a side")

    @property
    def waiting(self) -> int:
        """The number of images that wait."""
        return sum(ticket.count for ticket in list(self.queue) if ticket.state == QUEUED)

    def in_turn(self) -> list[Ticket]:
        """The queue in the order in which its tickets begin: each client's first, then each one's second, ..."""
        earlier, rounds = Counter[str](), list[tuple[int, Ticket]]()
        for ticket in list(self.queue):
            rounds.append((earlier[ticket.client], ticket))
            earlier[ticket.client] += 1
        return [ticket for _, ticket in sorted(rounds, key=lambda item: item[0])]

    @property
    def running(self) -> list[Ticket]:
        """The tickets that run."""
        return list(dict.fromkeys([*self._at_work, *(unit.ticket for run in list(self.runs) for unit in run.units)]))

    def cancel(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a ticket without a result; its images that run are dropped."""
        self._remove(ticket)
        if error is not None:
            report(error)
        if not ticket.ended:
            self.totals["failed" if error else "cancelled"] += 1
        ticket.end(FAILED if error else CANCELLED, error)
        if ticket not in self._taken:
            self._let_go(ticket)

    def stop(self) -> None:
        """Take no more requests, refuse waiting ones, and let running ones end within the seconds of grace."""
        with self._changed:
            if not self._stopping:
                self._stopping, self._give_up = True, time.monotonic() + self.limits.grace
            waiting = [ticket for ticket in self.queue if ticket.state == QUEUED]
            self._changed.notify_all()
        for ticket in waiting:
            self.cancel(ticket, Stopping("the server was stopped before this request began: try again later"))

    def unload(self) -> None:
        """Free the model once no request waits; the next one loads it again."""
        with self._changed:
            self._unload = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait until running requests end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and run."""
        return self._thread.is_alive() and not self._stopping and not self._failed

    # ---- the denoising thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        """Denoise step by step, each time for the client whose turn it is, until the engine is stopped."""
        while True:
            with self._changed:
                idle = not self.queue
                self._changed.wait_for(lambda: self.queue or self._stopping or self._unload)
                if not self.queue and self._stopping:
                    return
                if not self.queue and self._unload:
                    self.library.unload()
                    self._unload = False
                    continue
                if idle:
                    self._changed.wait_for(lambda: self._stopping, self.limits.batch_wait)
            try:
                self._work()
            except Exception as error:  # it ends the tickets that caused it: the others continue
                if not isinstance(error, EXPECTED) and not self.library.works():  # as after an illegal access of CUDA
                    log.error("the device has failed, and the server accepts no more requests: restart it")
                    self._failed = True
                for ticket in self._at_work or self.in_turn()[:1]:
                    self.cancel(ticket, error)
                if self._failed:
                    self.stop()
            self._tidy()

    def _work(self) -> None:
        """Run one step."""
        run = self._next_run()
        if run is None:
            return
        self._at_work = run.tickets
        with self._charged([unit.ticket.client for unit in run.units], run):
            is_going = self._denoise(run)
            if not is_going:
                self._end(run)
        if not is_going:
            self.runs.remove(run)

    @contextlib.contextmanager
    def _charged(self, clients: Sequence[str], run: "Run | None" = None) -> Iterator[None]:
        """Charge the seconds within the block to clients, as many times as each of them is named."""
        start = self.clock()
        try:
            yield
        finally:
            if len({ticket.client for ticket in list(self.queue)}) > 1:
                self.library.wait()  # for the kernels in the device's queue
            seconds = self.clock() - start
            with self._changed:
                for client in clients:
                    self._seconds[client] = self._seconds.get(client, self._turn) + seconds / len(clients)
            if run is not None:
                self._stint = seconds + (self._stint if run is self._last else 0.0)
                self._last = run

    def _tidy(self) -> None:
        """Forget what has ended, and from time to time report their places to waiting tickets."""
        self._at_work = []
        for run in [run for run in self.runs if run.is_over]:
            self.runs.remove(run)
        for ticket in [ticket for ticket in self._taken if ticket.ended and ticket not in self.running]:
            _free(ticket)
            self._let_go(ticket)
        if time.monotonic() > self._told + PLACES:
            self._told = time.monotonic()
            for ticket in [ticket for ticket in list(self.queue) if ticket.state == QUEUED]:
                ticket.tell()

    def _next_run(self) -> "Run | None":
        """Return the run of the client with the fewest seconds, a new one if it has none.

        None if a call was made instead, or nothing can run.
        """
        tickets = [ticket for ticket in self.in_turn() if not ticket.has_ended()]
        if not tickets:
            return None
        self._turn = max(self._turn, min(self._seconds.get(ticket.client, 0.0) for ticket in tickets))
        busy = {unit.ticket.client for run in self.runs for unit in run.units}
        waiting = [ticket for ticket in tickets if ticket.client not in busy]
        run = min(self.runs, key=self._had, default=None)
        first = self._first(waiting) if len(self.runs) < self.library.most_runs else None
        if first is not None and (run is None or self._seconds.get(first.client, 0.0) <= self._had(run)):
            self._at_work = [first]
            with self._charged([first.client]):
                return self._begin(first, tickets)
        if self._last in self.runs and self._stint < STINT:
            return self._last
        return run

    def _had(self, run: "Run") -> float:
        """The seconds of the client of a run; with several clients, the fewest."""
        return min(self._seconds.get(unit.ticket.client, 0.0) for unit in run.units)

    def _first(self, waiting: list[Ticket]) -> Ticket | None:
        """Return the ticket that begins next; None if runs have to end first, since it needs other weights.

        Clients that wait for the loaded model come first for STAY seconds.
        """
        if not waiting:
            return None
        library, now = self.library, time.monotonic()
        by_turn = sorted(waiting, key=lambda ticket: self._seconds.get(ticket.client, 0.0))
        first = by_turn[0]
        if first.call is not None:
            return first
        if first.model == library.loaded:
            self._kept_since = None
        elif self.runs or any(ticket.model == library.loaded and not ticket.call for ticket in waiting):
            self._kept_since = self._kept_since or now
            if now <= self._kept_since + STAY:
                first = next((ticket for ticket in by_turn if ticket.model == library.loaded or ticket.call), first)
        ready = first.call is not None or (first.model, first.loras) == (library.loaded, library.merged)
        return first if ready or not self.runs else None

    def _begin(self, first: Ticket, tickets: list[Ticket]) -> "Run | None":
        """Begin a run of a ticket's next images; a call makes its next image at once."""
        if first.call is not None:
            self._taken.add(first)
            self._hold_results(first)
            first.state, first.account.drop = RUNNING, None
            first.results.append(first.call(first.images[len(first.results)]))
            self._done_if_whole(first)
            first.tell()
            return None
        if (first.model, first.loras) != (self.library.loaded, self.library.merged):
            for ticket in tickets:  # they hold references to the model to be freed
                _free(ticket)
            swaps = first.model != self.library.loaded
            assert first.model is not None
            self.library.use(first.model, first.loras)
            self.totals["swaps"] += swaps
            self._kept_since = None
        units = self._gather(first, tickets)
        if not units:
            return None
        run = Run(units, batch := Batch([unit.sample for unit in units]), iter(batch))
        self._at_work = run.tickets
        for ticket in run.tickets:
            if ticket.state == QUEUED:
                ticket.state = RUNNING
                ticket.account.drop = None
            ticket.step, ticket.num_steps = 0, batch.num_steps
            ticket.passes = (int(units[0].sample.is_second), 1 + len(ticket.cost.passes))
            ticket.tell()
        self.totals["batches"] += 1
        self.runs.append(run)
        return run

    def _gather(self, first: Ticket, tickets: list[Ticket]) -> list[Unit]:
        """Return a ticket's next images, with those of other tickets that can share the batch."""
        most, prepared, units = 2 * self.library.most_together, 0, list[Unit]()  # branches: an image has two
        side, running = self.library.facts(first.model).side, set(self.running)
        mates = (ticket for ticket in tickets if _are_alike(first, ticket) and ticket not in running)
        for ticket in [first, *mates]:
            branches = max(2, ticket.branches) * (1 + ticket.cost.references)
            branches *= max(1, round(ticket.pixels / side**2))  # an image of many pixels takes the memory of many
            while (
                branches * (len(units) + 1) <= max(most, branches) and (unit := self._take(ticket, units)) is not None
            ):
                units.append(unit)
            prepared += bool(ticket.prepared)  # it does not fit the first, and stays in memory
            if branches * (len(units) + 1) > most or prepared > MOST_PREPARED:
                break
        return units

    def _take(self, ticket: Ticket, units: list[Unit]) -> Unit | None:
        """Return a ticket's next image; None if there is none, it does not go with units, or preparing it failed."""
        if ticket.ended:
            return None
        self._taken.add(ticket)
        try:
            if ticket.samples is None:
                ticket.samples = iter(prepare(self.library.model, ticket.options, first=len(ticket.results)))
            if not ticket.prepared and (sample := next(ticket.samples, None)) is not None:
                ticket.prepared.append(Unit(ticket, sample))
            if not ticket.prepared:
                return None
            if not (sample := ticket.prepared[0].sample).is_second:
                self.check_work(ticket, *sample.size)
                self._hold_results(ticket)
            if not units or units[0].sample.can_batch_with(ticket.prepared[0].sample):
                return ticket.prepared.popleft()
        except Exception as error:
            self.cancel(ticket, error)
        return None

    def _denoise(self, run: "Run") -> bool:
        """Run the next step of a batch; return whether there are more."""
        state = next(run.states, None)
        if state is None:
            return False
        self.totals["steps"] += 1
        for ticket in run.tickets:
            ticket.step = state.step
        for ticket in list(self.queue):
            ticket.has_ended()
        for place, unit in enumerate(run.units):
            unit.ticket.interrupted |= time.monotonic() > self._give_up
            if unit.ticket.interrupted and state.step < state.num_steps:
                self._finish(unit, state.x0[place : place + 1])
        if run.is_over:
            return False
        before = time.monotonic()
        if self._show(run.units, state, previews=run.previewing <= PREVIEW_SHARE * (before - run.start)):
            run.previewing += time.monotonic() - before
        for ticket in run.tickets:
            ticket.tell()
        return state.step < state.num_steps

    def _end(self, run: "Run") -> None:
        """Finish the images of a run, or let their second pass follow."""
        second_passes: dict[Ticket, list[Unit]] = {}
        for place, unit in enumerate(run.units):
            latents = run.batch.latents[place : place + 1]
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
        for ticket, units in second_passes.items():
            ticket.prepared.extendleft(reversed(units))

    def _show(self, units: list[Unit], state: State, previews: bool) -> bool:
        """Decode what a step predicted, for tickets that want it; return whether there were previews.

        Partial images are made of each image at evenly spread steps, previews of one image of a ticket.
        """
        previewed = set[Ticket]()
        for place, unit in enumerate(units if state.step < state.num_steps else ()):
            ticket, num_parts = unit.ticket, unit.ticket.num_partials + 1
            partial = state.step in {round(state.num_steps * k / num_parts) for k in range(1, num_parts)}
            preview = previews and ticket.wants_preview and ticket not in previewed
            if ticket.ended or unit.ended or not (partial or preview):
                continue
            [ticket.newest] = self.library.decoder().decode(state.x0[place : place + 1])
            if partial:
                ticket.partials.append((unit.sample.number, ticket.newest))
            if preview:
                previewed.add(ticket)
        return bool(previewed)

    def _finish(self, unit: Unit, latents: Tensor) -> None:
        """Decode an image (1,C,h,w) and hand it to its ticket, once; an error affects only that ticket."""
        ticket = unit.ticket
        if unit.ended or ticket.ended:
            return
        unit.ended = True
        try:
            result = unit.sample.finish(latents)
            about = (result.prompt, result.seed, result.parameters, result.settings)
            ticket.results.append(Made(result.image, *about))
            self.totals["images"] += 1
        except Exception as error:
            self.cancel(ticket, error)
            return
        self._done_if_whole(ticket)

    def _done_if_whole(self, ticket: Ticket) -> None:
        if len(ticket.results) == ticket.count or ticket.interrupted:
            self._remove(ticket)
            self.totals["done"] += 1
            if not any(rival.account is ticket.account for rival in list(self.queue)):
                ticket.account.drop = _ignore  # its connection is closed
            ticket.end(DONE)

    def _hold_results(self, ticket: Ticket) -> None:
        """Reserve memory in a ticket's account for its results, before they are made.  Raises Full, TooLarge."""
        if not ticket.holds_results:
            ticket.account.add("results", ticket.results_size)
            ticket.holds_results = True

    def _let_go(self, ticket: Ticket) -> None:
        """Forget a ticket that has ended; its account lasts until its answer is sent."""
        with self._changed:
            if not ticket.is_held:
                return
            ticket.is_held, ticket.images, ticket.call = False, (), None
            self._taken.discard(ticket)
        ticket.account.__exit__(None, None, None)

    def _remove(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self.queue:
                self.queue.remove(ticket)


def _free(ticket: Ticket) -> None:
    """Drop the references to the model, in the engine's thread, the only one that has any."""
    ticket.samples = None
    ticket.prepared.clear()


def _ignore(full: Full) -> None:
    pass


def _are_alike(first: Ticket, second: Ticket) -> bool:
    """Whether two tickets differ only in prompts, seeds and images: a quick test before can_batch_with."""
    if first is second or second.call or type(first.options) is not type(second.options):
        return False
    if (first.model, first.loras, first.branches) != (second.model, second.loras, second.branches):
        return False
    names = (field.name for field in dataclasses.fields(first.options) if field.name not in DIFFERENT)
    return all(getattr(first.options, name) == getattr(second.options, name) for name in names)
