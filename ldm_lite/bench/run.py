"""The run: each cell's contenders compared first, then timed in turn, there and back, within a budget of time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ldm_lite.bench.contender import Contender, Unable
from ldm_lite.bench.jobs import TRAIN, WHOLE, Cell, Work
from ldm_lite.bench.measure import calls_in_sample, median, spread, there_and_back

# The most relative error against the reference.  Whole runs amplify rounding: in half precision they are not gated.
GATES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
TRAIN_GATES = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 2e-2}  # of the losses of some steps
AGAIN = " (again)"  # a contender that is timed twice, for the noise floor


@dataclass
class Timing:
    """How a contender did in a cell."""

    error: float | None = None  # relative, against the reference
    passes: bool | None = None  # the numerics gate; None where there is none
    first_s: float | None = None
    peak: int | None = None  # bytes, beside the weights
    samples: list[float] = field(default_factory=list)  # seconds a call
    unable: str | None = None  # why it could not

    @property
    def seconds(self) -> float | None:
        """The median; None if it has no samples."""
        return median(self.samples) if self.samples else None


@dataclass
class Table:
    """A cell's results."""

    cell: Cell
    flops: int
    items: int  # steps, or images, in a call
    calls: int  # in a sample
    timings: dict[str, Timing]

    @property
    def noise(self) -> float | None:
        """The noise floor: how far the one that was timed twice is from itself, or its spread if that is more."""
        for name, timing in self.timings.items():
            other = self.timings.get(name + AGAIN)
            if other is not None and timing.seconds and other.seconds:
                return max(abs(other.seconds / timing.seconds - 1), spread(timing.samples))
        return None


def gate(cell: Cell, error: float) -> bool | None:
    """Whether a relative error passes; None where nothing is promised."""
    if cell.section in WHOLE.values() and cell.dtype != "fp32":
        return None
    return error <= (TRAIN_GATES if cell.section == TRAIN else GATES)[cell.dtype]


@dataclass(frozen=True)
class Course:
    """Who takes part, and for how long."""

    reference: Contender  # runs in float32, and is not timed
    contenders: Sequence[Contender]
    rounds: int
    deadline: float  # of time.monotonic
    again: str | None  # the contender that is timed twice in every round


def run(course: Course, cells: Sequence[Cell], work: Callable[[Cell], Work]) -> Iterator[Table | str]:
    """Yield each cell's table when it is done, or a note that says what was left out for lack of time."""
    tables: dict[Cell, Table] = {}
    for i, cell in enumerate(cells):
        now = time.monotonic()
        left = course.deadline - now
        needed = _forecast(cell, tables, work)
        if needed > left:
            about = f", needs about {needed / 60:.1f} minutes" if 0 < needed < 1e9 and left > 0 else ""
            yield f"left out for lack of time: {cell.section} in {cell.dtype} at batch {cell.batch}{about} (--minutes)"
            continue
        shares = [WEIGHTS[each.section] * each.batch for each in cells[i:]]
        tables[cell] = measure(cell, work(cell), course, now + left * shares[0] / sum(shares))
        yield tables[cell]


WEIGHTS = {
    "step": 2,
    "decode": 1,
    "text": 0.5,
    "image": 8,
    "img2img": 8,
    "inpaint": 8,
    TRAIN: 3,
}  # of the time, and it grows with the batch


def _forecast(cell: Cell, tables: Mapping[Cell, Table], work: Callable[[Cell], Work]) -> float:
    """The least seconds that a cell takes: whole images by what steps took, else by the same at the batch before.

    Once to compare, and two rounds.  0 where nothing is known.
    """
    known = tables.get(Cell("step", cell.dtype, cell.batch)) if cell.section in WHOLE.values() else None
    if known is None:
        earlier = [t for c, t in tables.items() if (c.section, c.dtype) == (cell.section, cell.dtype)]
        if not earlier:
            return 0.0
        known = earlier[-1]
    return 3 * sum(timing.seconds or 0.0 for timing in known.timings.values()) * work(cell).flops / known.flops


def measure(cell: Cell, work: Work, course: Course, deadline: float) -> Table:
    """Compare the contenders in a cell, and time them in turn.

    Two rounds are always done; others only as long as they end before the deadline.  Whole images are compared with
    the first contender's, all else with the reference.
    """
    table = Table(cell, work.flops, work.items, 1, {})
    whole = cell.section in WHOLE.values()
    truth = None if whole else course.reference.first(replace(cell, dtype="fp32")).result
    entrants: list[tuple[str, Contender]] = []
    for contender in course.contenders:
        timing = table.timings[contender.name] = Timing()
        try:
            first = contender.first(cell)
            truth = first.result if truth is None else truth
            timing.first_s, timing.peak = first.seconds, first.peak
            timing.error = float((first.result - truth).norm() / truth.norm())
            timing.passes = gate(cell, timing.error)
            entrants.append((contender.name, contender))
        except Unable as error:
            timing.unable = str(error)
    if not entrants:
        return table
    for name, contender in entrants:
        if name == course.again:
            table.timings[name + AGAIN] = Timing()
            entrants = [*entrants, (name + AGAIN, contender)]
    if not whole:  # the second call is a warm-up too, and tells how many make a sample
        seconds = [_seconds(contender, cell, 1, table.timings[name]) for name, contender in entrants]
        table.calls = calls_in_sample(min([each for each in seconds if each is not None], default=1.0))
    for number in range(course.rounds):
        start = time.monotonic()
        for name, contender in there_and_back(entrants, number):
            timing = table.timings[name]
            seconds_a_call = _seconds(contender, cell, table.calls, timing)
            timing.samples += [] if seconds_a_call is None else [seconds_a_call]
        if number >= 1 and 2 * time.monotonic() - start > deadline:
            break
    return table


def _seconds(contender: Contender, cell: Cell, calls: int, timing: Timing) -> float | None:
    """Seconds a call; None from when on a contender cannot any more, as when others have taken the memory."""
    if timing.unable is None:
        try:
            return contender.seconds(cell, calls)
        except Unable as error:
            timing.unable, timing.samples = str(error), []
    return None
