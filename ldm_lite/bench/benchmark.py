"""The benchmark: in each cell compare the results of all backends, then time them in turn."""

import contextlib
import functools
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ldm_lite.bench.checkpoints import family_of, open_model
from ldm_lite.bench.measure import alternating, calls_in_sample, ceiling
from ldm_lite.bench.options import GATES, PEERS, BenchOptions
from ldm_lite.bench.ours import configuration
from ldm_lite.bench.report import AGAIN, RESULTS, Report, Table, Timing, describe_run, duration, from_json
from ldm_lite.bench.work import Cell, Cost, OutOfTime, Unavailable, cost
from ldm_lite.bench.worker import Backend, SubprocessBackend
from ldm_lite.cli.files import read_text
from ldm_lite.core.networks import DTYPES, pick_device

log = logging.getLogger("ldm_lite")

SHARES = {"step": 2, "decode": 1, "image": 8}  # of the time
QUICK_S = 30.0  # for which compiled backends wait, so that the first calls of others are timed alone
LAST_S = 8.0  # of the time that first calls leave, in which ready backends are timed in turn
POLL_S = 0.2


def benchmark(options: BenchOptions, on_result: Callable[[Report], None] = lambda report: None) -> Report:
    """Run the benchmark; on_result is called with the report after each new result.

    When the minutes are over, running calls are stopped, and cells that have not begun are left out with a note.
    Raises ValueError for invalid options, and if the minutes are over before anything has begun.
    """
    deadline = time.monotonic() + 60 * options.minutes
    rows = {name: configuration(name) for name in options.configs}  # raises ValueError for an unknown one
    titles = {name: f"{row.title}; attention {row.attention}" for name, row in rows.items()}
    asked, options = options, resolved(options)
    cells = [
        Cell(section, dtype, batch)
        for dtype in options.dtypes
        for batch in sorted(set(options.batches))
        for section in options.sections
    ]
    costs = functools.partial(cost, family_of(open_model(options.size, options.ckpt)), options)
    costs(cells[0])  # raises ValueError for what cannot be measured, before anything starts
    report = Report(describe_run(asked, options), titles)
    if options.resume and (path := options.folder / RESULTS).exists():
        report.tables += from_json(read_text(path, 2**28)).tables
    earlier = {table.cell: table for table in report.tables}

    backends: list[SubprocessBackend] = []

    def on_change(table: Table) -> None:
        peers = [backend for backend in backends if backend.name in options.peer and backend.description]
        report.titles.update({peer.name: f"{peer.name} ({peer.description})" for peer in peers})
        if all(table is not known for known in report.tables):
            report.tables.append(table)
        on_result(report)

    peers = [name for name in options.peer if all(map(importlib.util.find_spec, PEERS[name]))]
    for name in set(options.peer) - {*peers}:
        report.notes.append(f"{name} is not installed: pip install {' '.join(PEERS[name])}")
        log.warning("%s", report.notes[-1])
    with contextlib.ExitStack() as processes:
        loads = {"reference": "fp32"} | dict.fromkeys((*options.configs, *peers), options.dtypes[0])
        # All begin and load at the same time, before anything is timed.
        started = [
            processes.enter_context(SubprocessBackend(name, options, deadline=deadline, loads=dtype))
            for name, dtype in loads.items()
        ]
        reference, *others = started
        backends += others
        try:
            reference.wait_until_ready()
        except Unavailable as error:
            raise ValueError(f"the reference cannot run: {error}") from error
        device = torch.device(options.device)
        report.ceilings = {dtype: ceiling(device, DTYPES[dtype]) for dtype in options.dtypes}
        repeated = options.configs[-1]
        comparison = Comparison(
            reference,
            backends,
            costs,
            options.rounds,
            deadline,
            repeated,
            earlier,
            on_change,
            60 * options.first_minutes,
        )
        for result in comparison.run(cells):
            if isinstance(result, Table):
                on_change(result)
            else:
                report.notes.append(result)
                log.info("%s", result)
                on_result(report)
    return report


def resolved(options: BenchOptions) -> BenchOptions:
    """Fill in the model, the device, the precisions and the number of threads, and set the latter.

    Raises ValueError for a device.
    """
    device = pick_device(options.device or None)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size = options.size or ("sd1" if device.type == "cuda" else "bundled")
    dtypes = options.dtypes or (("fp16", "fp32") if device.type == "cuda" else ("fp32",))
    return replace(options, size=size, device=str(device), dtypes=dtypes, threads=torch.get_num_threads())


def gate(cell: Cell, error: float) -> bool | None:
    """Whether a relative error passes; None if the cell has no gate."""
    if cell.section == "image" and cell.dtype != "fp32":
        return None
    return error <= GATES[cell.dtype]


@dataclass(frozen=True)
class Comparison:
    """The backends to compare, and for how long."""

    reference: Backend  # runs in float32 and is not timed
    backends: Sequence[Backend]
    cost: Callable[[Cell], Cost]
    rounds: int  # at most
    deadline: float  # of time.monotonic
    repeated: str | None  # the backend that is timed twice in every round
    earlier: Mapping[Cell, Table] = field(default_factory=dict)  # of a resumed run: not measured again
    on_change: Callable[[Table], None] = lambda table: None  # called after each backend's first call and each round
    most_first_s: float = math.inf  # of a first call, with compilation: it is stopped then

    def run(self, cells: Sequence[Cell]) -> Iterator[Table | str]:
        """Yield each cell's table when it is done, or a note if it could not begin before the deadline.

        A cell of an earlier run yields that run's table, with the backends that it lacked, and a note that names them.
        """
        cells = [cell for cell in cells if self._missing(cell)]
        for i, cell in enumerate(cells):
            now = time.monotonic()
            left, words = self.deadline - now, _words(cell)
            if left < 0:
                yield f"left out for lack of time: {words} (--minutes)"
                continue
            if cell in self.earlier:
                late = ", ".join(backend.name for backend in self._missing(cell))
                yield f"timed in a later run than the others, not in turn: {late} in {words}"
            shares = [SHARES[later.section] * later.batch for later in cells[i:]]
            try:
                table = self.measure(cell, now + left * shares[0] / sum(shares))
                yield table
                if late := ", ".join(backend.name for backend in self.backends if self._lacks_rounds(backend, table)):
                    yield f"left out for lack of time: {late} in {words} (--minutes)"
            except Unavailable as error:
                yield f"left out: {words}, whose reference cannot run: {error}"

    def _missing(self, cell: Cell) -> list[Backend]:
        """Return the backends that an earlier run did not time in a cell, or timed in fewer than two rounds."""
        timings = self.earlier[cell].timings if cell in self.earlier else {}
        done = {name for name, timing in timings.items() if timing.unable is not None or len(timing.samples) > 1}
        return [backend for backend in self.backends if backend.name not in done]

    def _lacks_rounds(self, backend: Backend, table: Table) -> bool:
        timing = table.timings.get(backend.name)
        return timing is None or (timing.unable is None and len(timing.samples) < min(2, self.rounds))

    def measure(self, cell: Cell, deadline: float) -> Table:
        """Compare the backends in a cell and time them in turn.

        Each is timed as soon as its first call is over, in turn with those before it: one that fails, or compiles until
        it is stopped, takes no time from the others.  At the end all that are ready are timed in turn once more.  Two
        rounds run if the benchmark's minutes allow it, more only if they end before the deadline.
        """
        table = self.earlier.get(cell) or Table(cell, *self.cost(cell), 1, {})
        missing, expected = self._missing(cell), None
        if cell.section != "image":
            expected = self.reference.first(replace(cell, dtype="fp32")).result
        elif self.backends[0] not in missing:
            expected = self.backends[0].first(cell).result
        first = [missing.pop(0)] if expected is None else []  # the first image is what the others are compared with
        groups = [first, *([b for b in missing if b.compiles == compiles] for compiles in (False, True))]
        groups = [group for group in groups if group]
        runnable: list[tuple[str, Backend]] = []
        begun: dict[Backend, float] = {}  # when the unfinished first calls began
        while groups or begun:
            begun |= dict.fromkeys(groups[0] if groups else (), time.monotonic())
            for backend in groups.pop(0) if groups else ():
                backend.begin(cell)
            start, is_last = time.monotonic(), not groups
            while begun and (is_last or time.monotonic() < start + (QUICK_S if expected is not None else math.inf)):
                arrived = [backend for backend in begun if backend.is_ready(POLL_S / len(begun))]
                for backend in arrived:
                    del begun[backend]
                    expected = self._judge(cell, table, backend, expected, runnable)
                self._cut_late(table, begun)
                if arrived and (begun or groups):
                    self._time(cell, table, runnable, 2, deadline)
        self._time(cell, table, runnable, self.rounds, deadline)
        for name, timing in table.timings.items():
            if timing.seconds is not None:
                log.info("%s: %s, %s", name, duration(timing.seconds), _words(cell))
        return table

    def _cut_late(self, table: Table, begun: dict[Backend, float]) -> None:
        """End the processes whose first call takes too long; a run that goes on measures them."""
        now = time.monotonic()
        for backend, start in list(begun.items()):
            if now - start > self.most_first_s or now > self.deadline - LAST_S:
                del begun[backend]
                backend.stop()
                table.timings[backend.name] = Timing(cut=f"not ready after {duration(now - start)}")
                self.on_change(table)

    def _judge(
        self,
        cell: Cell,
        table: Table,
        backend: Backend,
        expected: torch.Tensor | None,
        runnable: list[tuple[str, Backend]],
    ) -> torch.Tensor | None:
        """Fill in the error and the gate of a backend's first call, and return the result to compare others with."""
        timing = table.timings[backend.name] = Timing()
        try:
            first = backend.first(cell)
        except OutOfTime as error:
            timing.cut = str(error)
            return expected
        except Unavailable as error:
            timing.unable = str(error)
            return expected
        expected = first.result if expected is None else expected
        timing.first_s, timing.peak = first.seconds, first.peak
        timing.error = float((first.result - expected).norm() / expected.norm())
        timing.passes = gate(cell, timing.error)
        self.on_change(table)
        log.info("%s: %s the first time, error %.1e", backend.name, duration(timing.first_s), timing.error)
        runnable.append((backend.name, backend))
        if backend.name == self.repeated:
            table.timings[backend.name + AGAIN] = Timing()
            runnable.append((backend.name + AGAIN, backend))
        return expected

    def _time(
        self, cell: Cell, table: Table, runnable: Sequence[tuple[str, Backend]], most: int, deadline: float
    ) -> None:
        """Time backends in turn.  Two new samples of each replace its earlier ones, in turn with fewer backends."""
        if cell.section != "image":  # the second call is a warm-up too, and shows how many calls make a sample
            seconds = [_seconds(backend, cell, 1, table.timings[name]) for name, backend in runnable]
            table.calls = calls_in_sample(min([s for s in seconds if s is not None], default=1.0))
        samples: dict[str, list[float]] = {name: [] for name, _ in runnable}
        for number in range(most if runnable else 0):
            start = time.monotonic()
            for name, backend in alternating(runnable, number):
                timing = table.timings[name]
                sample = _seconds(backend, cell, table.calls, timing)
                samples[name] += [] if sample is None else [sample]
                if timing.unable is None and len(samples[name]) >= min(2, len(timing.samples)):
                    timing.samples = list(samples[name])
            self.on_change(table)
            if number >= 1 and 2 * time.monotonic() - start > deadline:
                break


def _words(cell: Cell) -> str:
    return f"{cell.section} in {cell.dtype} at batch {cell.batch}"


def _seconds(backend: Backend, cell: Cell, calls: int, timing: Timing) -> float | None:
    """Return the seconds per call; None from the first failure on, for example if others have taken the memory."""
    if timing.unable is None:
        try:
            return backend.seconds(cell, calls)
        except OutOfTime:
            return None
        except Unavailable as error:
            timing.unable, timing.samples = str(error), []
    return None
