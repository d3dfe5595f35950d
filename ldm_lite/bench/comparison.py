"""Compare backends: in each cell, first check their results, then time them in turn."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ldm_lite.bench.backends import Backend, Unavailable
from ldm_lite.bench.measure import alternating, calls_in_sample, median, spread
from ldm_lite.bench.workload import TRAIN, Cell, Cost

# Largest relative error against the reference.  Whole runs amplify rounding, so they have no gate in half precision.
GATES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
TRAIN_GATES = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 2e-2}  # of the losses of some steps
AGAIN = " (again)"  # the backend that is timed twice, for the noise floor
SHARES = {"step": 2, "decode": 1, "text": 0.5, "image": 8, "img2img": 8, "inpaint": 8, TRAIN: 3}  # of the time


@dataclass
class Timing:
    """How a backend did in a cell."""

    error: float | None = None  # relative, against the reference
    passes: bool | None = None  # the numerics gate; None if there is none
    first_s: float | None = None
    peak: int | None = None  # bytes, without the weights
    samples: list[float] = field(default_factory=list)  # seconds per call
    unable: str | None = None  # why it could not run

    @property
    def seconds(self) -> float | None:
        """The median; None without samples."""
        return median(self.samples) if self.samples else None


@dataclass
class Table:
    """The results of a cell."""

    cell: Cell
    flops: int
    items: int  # steps or images per call
    calls: int  # per sample
    timings: dict[str, Timing]

    @property
    def noise(self) -> float | None:
        """The noise floor: the difference of two timings of one backend, or its spread if larger."""
        for name, timing in self.timings.items():
            other = self.timings.get(name + AGAIN)
            if other is not None and timing.seconds and other.seconds:
                return max(abs(other.seconds / timing.seconds - 1), spread(timing.samples))
        return None


def _words(cell: Cell) -> str:
    return f"{cell.section} in {cell.dtype} at batch {cell.batch}"


def gate(cell: Cell, error: float) -> bool | None:
    """Whether a relative error passes; None if the cell has no gate."""
    if cell.is_image and cell.dtype != "fp32":
        return None
    return error <= (TRAIN_GATES if cell.section == TRAIN else GATES)[cell.dtype]


@dataclass(frozen=True)
class Comparison:
    """The backends to compare, and for how long."""

    reference: Backend  # runs in float32 and is not timed
    backends: Sequence[Backend]
    cost: Callable[[Cell], Cost]
    rounds: int  # at most
    deadline: float  # of time.monotonic
    repeated: str | None  # the backend that is timed twice in every round
    earlier: Mapping[Cell, Table] = field(default_factory=dict)  # of a run that goes on: what it has is not done again

    def run(self, cells: Sequence[Cell]) -> Iterator[Table | str]:
        """Yield each cell's table when it is done, or a note if it was left out for lack of time.

        A cell of an earlier run yields that run's table, with the backends that it lacked, and a note that names them.
        """
        tables = dict(self.earlier)
        cells = [cell for cell in cells if self._missing(cell)]
        for i, cell in enumerate(cells):
            now = time.monotonic()
            left, needed = self.deadline - now, self._forecast(cell, tables)
            if needed > left:
                about = f", needs about {needed / 60:.1f} minutes" if 0 < needed < 1e9 and left > 0 else ""
                yield f"left out for lack of time: {_words(cell)}{about} (--minutes)"
                continue
            shares = [SHARES[each.section] * each.batch for each in cells[i:]]
            table = self.measure(cell, now + left * shares[0] / sum(shares))
            if cell in self.earlier:
                yield f"timed in a later run than the others, not in turn: {', '.join(table.timings)} in {_words(cell)}"
                self.earlier[cell].timings.update(table.timings)
                table = self.earlier[cell]
            tables[cell] = table
            yield table

    def _missing(self, cell: Cell) -> list[Backend]:
        """Return the backends that an earlier run did not time in a cell."""
        done = self.earlier[cell].timings if cell in self.earlier else {}
        return [backend for backend in self.backends if backend.name not in done]

    def _forecast(self, cell: Cell, tables: Mapping[Cell, Table]) -> float:
        """Estimate the least seconds that a cell takes: the first calls and two rounds; 0 if nothing is known.

        For images from the steps at the same batch size, whose compiled code they use, otherwise from earlier cells of
        the section, whose first calls compiled for other sizes.
        """
        known = tables.get(Cell("step", cell.dtype, cell.batch)) if cell.is_image else None
        if known is None:
            earlier = [t for c, t in tables.items() if (c.section, c.dtype) == (cell.section, cell.dtype)]
            if not earlier:
                return 0.0
            known = earlier[-1]
        ratio = self.cost(cell).flops / known.flops
        rounds = 2 * ratio * sum(timing.seconds or 0.0 for timing in known.timings.values())
        if known.cell.section != cell.section:
            return 1.5 * rounds  # a first call takes as long as another
        return rounds + sum(max(t.first_s or 0.0, ratio * (t.seconds or 0.0)) for t in known.timings.values())

    def measure(self, cell: Cell, deadline: float) -> Table:
        """Compare the backends in a cell and time them in turn.

        Two rounds always run, more only if they end before the deadline.
        """
        flops, items = self.cost(cell)
        table = Table(cell, flops, items, 1, {})
        entrants = self._compare(cell, table)
        if not entrants:
            return table
        if not cell.is_image:  # the second call is a warm-up too, and tells how many calls make a sample
            seconds = [_seconds(backend, cell, 1, table.timings[name]) for name, backend in entrants]
            table.calls = calls_in_sample(min([each for each in seconds if each is not None], default=1.0))
        for number in range(self.rounds):
            start = time.monotonic()
            for name, backend in alternating(entrants, number):
                sample = _seconds(backend, cell, table.calls, table.timings[name])
                table.timings[name].samples += [] if sample is None else [sample]
            if number >= 1 and 2 * time.monotonic() - start > deadline:
                break
        return table

    def _compare(self, cell: Cell, table: Table) -> list[tuple[str, Backend]]:
        """Run the cell once with each backend, fill in errors and gates, and return the backends to time, by name.

        Images are compared with those of the first backend, everything else with the reference.
        """
        missing = self._missing(cell)
        judge = self.reference if not cell.is_image else self.backends[0] if self.backends[0] not in missing else None
        truth = None if judge is None else judge.first(cell if cell.is_image else replace(cell, dtype="fp32")).result
        entrants: list[tuple[str, Backend]] = []
        for backend in missing:
            timing = table.timings[backend.name] = Timing()
            try:
                first = backend.first(cell)
            except Unavailable as error:
                timing.unable = str(error)
                continue
            truth = first.result if truth is None else truth
            timing.first_s, timing.peak = first.seconds, first.peak
            timing.error = float((first.result - truth).norm() / truth.norm())
            timing.passes = gate(cell, timing.error)
            entrants.append((backend.name, backend))
        for name, backend in entrants:
            if name == self.repeated:
                table.timings[name + AGAIN] = Timing()
                return [*entrants, (name + AGAIN, backend)]
        return entrants


def _seconds(backend: Backend, cell: Cell, calls: int, timing: Timing) -> float | None:
    """Return the seconds per call; None from the first failure on, for example if others have taken the memory."""
    if timing.unable is None:
        try:
            return backend.seconds(cell, calls)
        except Unavailable as error:
            timing.unable, timing.samples = str(error), []
    return None
