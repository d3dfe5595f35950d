"""The scripts that measure and compare, as far as they run in seconds."""

import importlib

import profiling
import pytest


@pytest.mark.parametrize("name", ["parity", "fake_cuda"])
def test_scripts_import(name: str) -> None:
    """They use much of the package and have no other test here: a renamed function is found."""
    assert importlib.import_module(name).__doc__


def test_works_are_timed_in_turn() -> None:
    turns: list[str] = []
    clock = iter(range(100))
    works = {name: lambda name=name: turns.append(name) for name in "ab"}
    times = profiling.timed(works, 2, lambda: float(next(clock)))
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_the_chart_shows_the_table_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("plot_performance")
    rows = plot.rows((plot.DOCS / "performance.md").read_text(encoding="utf-8"))
    assert len(rows) == 5
    assert rows[0] == ("original", 15.1)
    assert rows[-1] == ("ours, timed again", 6.17)
