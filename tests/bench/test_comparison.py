"""The comparison's order, gate, noise floor and budget, with backends that do nothing."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ldm_lite.bench import benchmark
from ldm_lite.bench.benchmark import Comparison, gate
from ldm_lite.bench.measure import alternating, calls_in_sample, spread
from ldm_lite.bench.report import AGAIN, Table, Timing
from ldm_lite.bench.work import Cell, Cost, OutOfTime, Unavailable
from ldm_lite.bench.worker import FirstCall

STEP = Cell("step", "fp32", 1)
TRUTH = torch.ones(4)


class Fake:
    """A backend that records its turns and reports a fixed time."""

    def __init__(self, name: str, turns: list[str], seconds: float = 1.0, error: float = 0.0) -> None:
        self.name, self.turns, self._seconds, self.error = name, turns, seconds, error

    compiles = False

    def begin(self, cell: Cell) -> None:
        pass

    def is_ready(self, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        pass

    def first(self, cell: Cell) -> FirstCall:
        return FirstCall(TRUTH * (1 + self.error), 3.0, 2**20)

    def seconds(self, cell: Cell, calls: int) -> float:
        self.turns.append(self.name)
        return self._seconds


class Broken(Fake):
    def first(self, cell: Cell) -> FirstCall:
        raise Unavailable("out of memory")


def cost(cell: Cell) -> Cost:
    return Cost(10_000 if cell.section == "image" else 100 * cell.batch, cell.batch)


def compare(*backends: Fake, rounds: int = 3, minutes: float = 1, repeated: str | None = None) -> Comparison:
    return Comparison(Fake("reference", []), backends, cost, rounds, time.monotonic() + 60 * minutes, repeated)


def test_rounds_go_alternating() -> None:
    turns: list[str] = []
    table = compare(Fake("a", turns), Fake("b", turns), repeated="b").measure(STEP, time.monotonic() + 60)
    there, back = ["a", "b", "b"], ["b", "b", "a"]
    assert turns == [*there, *there, *back, *there]  # the first are warm-up
    assert list(table.timings) == ["a", "b", "b" + AGAIN]
    assert all(timing.samples == [1.0] * 3 for timing in table.timings.values())
    assert alternating("abc", 0) == "abc"
    assert alternating("abc", 1) == "cba"


def test_a_wrong_result_fails_the_gate() -> None:
    turns: list[str] = []
    table = compare(Fake("right", turns), Fake("wrong", turns, error=1e-3)).measure(STEP, time.monotonic())
    assert table.timings["right"].passes
    assert table.timings["wrong"].passes is False
    assert table.timings["wrong"].error == pytest.approx(1e-3, rel=1e-3)
    assert gate(replace(STEP, dtype="fp16"), 1e-3)
    assert not gate(replace(STEP, dtype="fp16"), 2e-2)
    assert not gate(STEP, float("nan"))
    assert gate(Cell("image", "fp16", 1), 2e-2) is None
    assert gate(Cell("image", "fp32", 1), 2e-2) is False


def test_images_are_compared_with_the_first_backend() -> None:
    cell, turns = Cell("image", "fp32", 1), list[str]()
    comparison = compare(Fake("a", turns, error=1.0), Fake("b", turns, error=1.0))
    table = comparison.measure(cell, time.monotonic())
    assert [timing.error for timing in table.timings.values()] == [0.0, 0.0]
    assert table.calls == 1


def test_who_cannot_go_on_says_why_and_the_others_do() -> None:
    class Ends(Fake):
        def seconds(self, cell: Cell, calls: int) -> float:
            if len(self.turns) > 2:
                raise Unavailable("its process ended (status -9)")
            return super().seconds(cell, calls)

    table = compare(Ends("a", []), Fake("b", []), repeated="a").measure(STEP, time.monotonic() + 60)
    assert [table.timings[name].unable for name in ("a", "a" + AGAIN)] == ["its process ended (status -9)"] * 2
    assert table.timings["a"].seconds is None
    assert table.noise is None
    assert table.timings["b"].samples == [1.0] * 3


def test_who_cannot_is_left_out_and_says_why() -> None:
    table = compare(Broken("a", []), Fake("b", [])).measure(STEP, time.monotonic() + 60)
    assert table.timings["a"].unable == "out of memory"
    assert not table.timings["a"].samples
    assert table.timings["b"].samples
    assert not compare(Broken("a", [])).measure(STEP, time.monotonic()).timings["a"].samples


def test_two_rounds_are_always_done_and_no_more_after_the_deadline() -> None:
    table = compare(Fake("a", []), rounds=10).measure(STEP, time.monotonic() - 1)
    assert len(table.timings["a"].samples) == 2


def test_what_was_stopped_keeps_what_was_measured() -> None:
    """And is measured in a run that goes on."""

    class Stops(Fake):
        def first(self, cell: Cell) -> FirstCall:
            if self.name == "late":
                raise OutOfTime("--minutes are over")
            return super().first(cell)

        def seconds(self, cell: Cell, calls: int) -> float:
            if len(self.turns) > 2:
                raise OutOfTime("--minutes are over")
            return super().seconds(cell, calls)

    comparison = compare(Stops("a", []), Stops("late", []), rounds=5)
    table = comparison.measure(STEP, time.monotonic())
    assert table.timings["late"].cut == "--minutes are over"
    assert table.timings["a"].samples
    assert table.timings["a"].unable is None
    assert [backend.name for backend in replace(comparison, earlier={STEP: table})._missing(STEP)][-1] == "late"
    *_, note = compare(Stops("a", []), Stops("late", []), Fake("b", []), Broken("broken", []), rounds=5).run([STEP])
    assert note == "left out for lack of time: late in step in fp32 at batch 1 (--minutes)"


class Clock:
    """The time of a comparison, which passes while it waits and times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(benchmark.time, "monotonic", lambda: self.now)


class Slow(Fake):
    """A backend whose first call takes some seconds of a clock; None: it never ends."""

    def __init__(self, name: str, clock: Clock, ready_s: float | None, compiles: bool = True, **how: Any) -> None:
        super().__init__(name, [], **how)
        self.clock, self.ready_s, self.compiles, self.begun, self.stopped = clock, ready_s, compiles, 0.0, False

    def begin(self, cell: Cell) -> None:
        self.begun = self.clock.now

    def is_ready(self, seconds: float) -> bool:
        self.clock.now += seconds
        return self.ready_s is not None and self.clock.now >= self.begun + self.ready_s

    def stop(self) -> None:
        self.stopped = True

    def seconds(self, cell: Cell, calls: int) -> float:
        assert not self.stopped
        self.clock.now += 0.2
        return super().seconds(cell, calls)


def test_each_is_timed_as_soon_as_it_is_ready_and_all_in_turn_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles begins when the others are timed; who never ends, or fails, takes nothing from their rows."""
    clock = Clock(monkeypatch)
    seen: list[tuple[float, dict[str, int]]] = []

    def note(table: Table) -> None:
        seen.append((clock.now, {name: len(timing.samples) for name, timing in table.timings.items()}))

    class Fails(Slow):
        def first(self, cell: Cell) -> FirstCall:
            raise Unavailable("out of memory")

    quick, peer = Slow("graph", clock, 2, compiles=False), Slow("diffusers", clock, 4, compiles=False)
    step, endless, fails = Slow("compiled", clock, 60), Slow("max", clock, None), Fails("fails", clock, 20)
    backends = [quick, endless, step, peer, fails]
    comparison = replace(compare(*backends, rounds=4, minutes=4), on_change=note, most_first_s=120, deadline=240)
    table = comparison.measure(STEP, 240)
    assert {name: len(timing.samples) for name, timing in table.timings.items()} == {
        "graph": 4, "diffusers": 4, "compiled": 4, "max": 0, "fails": 0,
    }  # fmt: skip
    assert table.timings["max"].cut == "not ready after 120 s"
    assert endless.stopped
    assert table.timings["fails"].unable == "out of memory"
    assert table.timings["compiled"].first_s == 3.0
    assert 120 < clock.now < 140
    when = {
        name: next(now for now, counts in seen if counts.get(name) == 2) for name in ("graph", "diffusers", "compiled")
    }
    assert when["graph"] < 4 < when["diffusers"] <= step.begun < 10 < 60 < when["compiled"] < 70
    assert [backend.name for backend in replace(comparison, earlier={STEP: table})._missing(STEP)] == ["max"]


def test_before_the_minutes_are_over_the_last_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    quick, endless = Slow("graph", clock, 2, compiles=False), Slow("max", clock, None)
    comparison = replace(compare(quick, endless, rounds=10), deadline=100)
    *_, note = comparison.run([STEP])
    assert note == "left out for lack of time: max in step in fp32 at batch 1 (--minutes)"
    assert 92 < clock.now < 96


def test_what_does_not_fit_into_the_time_is_a_note() -> None:
    [late] = compare(Fake("a", []), minutes=-1).run([STEP])
    assert late == "left out for lack of time: step in fp32 at batch 1 (--minutes)"


def test_a_backend_joins_an_earlier_run() -> None:
    """What that run has timed is kept and not done again, but judges images."""
    image, turns = Cell("image", "fp32", 1), list[str]()
    backends = [Fake("a", turns, error=1.0), Fake("b", turns, error=1.0)]
    for cell in (STEP, image):
        earlier = {cell: compare(backends[0]).measure(cell, time.monotonic())}
        kept = list(earlier[cell].timings["a"].samples)
        turns.clear()
        note, table = replace(compare(*backends), earlier=earlier).run([cell])
        assert note == f"timed in a later run than the others, not in turn: b in {cell.section} in fp32 at batch 1"
        assert isinstance(table, Table)
        assert table is earlier[cell]
        assert set(turns) == {"b"}
        assert list(table.timings) == ["a", "b"]
        assert table.timings["a"].samples == kept
        assert table.timings["b"].error == (0.0 if cell is image else 1.0)
        assert list(replace(compare(*backends), earlier=earlier).run([cell])) == []


def test_every_first_call_and_every_round_is_told() -> None:
    """A benchmark that is killed has written what it had."""
    seen: list[list[int]] = []
    comparison = replace(
        compare(Fake("a", []), Fake("b", []), rounds=2),
        on_change=lambda table: seen.append([len(timing.samples) for timing in table.timings.values()]),
    )
    comparison.measure(STEP, time.monotonic())
    assert seen == [[0], [0, 0], [1, 1], [2, 2]]


def test_what_was_killed_in_its_first_round_is_measured_again() -> None:
    cut, done = Timing(samples=[1.0]), Timing(samples=[1.0, 1.0])
    earlier = {STEP: Table(STEP, 100, 1, 1, {"a": done, "b": cut})}
    turns: list[str] = []
    _, table = replace(compare(Fake("a", turns), Fake("b", turns)), earlier=earlier).run([STEP])
    assert set(turns) == {"b"}
    assert isinstance(table, Table)
    assert (len(table.timings["a"].samples), len(table.timings["b"].samples)) == (2, 3)


def test_without_a_reference_a_cell_is_a_note_and_the_next_goes_on() -> None:
    class Small(Fake):
        def first(self, cell: Cell) -> FirstCall:
            if cell.batch > 1:
                raise Unavailable("out of memory")
            return super().first(cell)

    large = replace(compare(Fake("a", [])), reference=Small("reference", []))
    note, table = large.run([replace(STEP, batch=2), STEP])
    assert note == "left out: step in fp32 at batch 2, whose reference cannot run: out of memory"
    assert isinstance(table, Table)


def test_the_noise_floor_is_what_differs_from_itself() -> None:
    table = Table(STEP, 1, 1, 1, {"a": Timing(samples=[1.0, 1.0]), "a" + AGAIN: Timing(samples=[1.1, 1.1])})
    assert table.noise == pytest.approx(0.1)
    table.timings["a"].samples = [0.5, 1.0, 1.5, 1.0]
    assert table.noise == pytest.approx(spread([0.5, 1.0, 1.5, 1.0]))
    assert Table(STEP, 1, 1, 1, {"a": Timing(samples=[1.0])}).noise is None


def test_samples() -> None:
    assert spread([1.0, 1.0]) == 0
    assert calls_in_sample(0.01) == 20
    assert calls_in_sample(10) == 1
    assert calls_in_sample(0) == 50
