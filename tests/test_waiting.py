"""How tests wait: with an end, and without a port or a bound that a busy machine breaks."""

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import at_once, wait_for

SOURCES = {
    path: path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py") if path != Path(__file__)
}


def test_what_does_not_come_is_named() -> None:
    assert wait_for([1].pop, "a number") == 1
    with pytest.raises(TimeoutError, match=r"waited 0\.1 seconds for a light"):
        wait_for(lambda: False, "a light", seconds=0.1)
    with subprocess.Popen([sys.executable, "-c", "exit(3)"]) as process:
        with pytest.raises(TimeoutError, match="the process ended, with status 3, before there was a light"):
            wait_for(lambda: False, "a light", process=process)
        assert wait_for(lambda: "late", "what it did last", process=process) == "late"


def test_works_run_at_once_and_what_one_raises_is_raised() -> None:
    both = threading.Barrier(2)
    assert sorted(at_once(*[lambda: both.wait(60)] * 2)) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        at_once(int, lambda: 1 // 0)


def test_only_wait_for_polls() -> None:
    """No other loop sleeps until something has happened."""
    loops = [
        f"{path.name}:{node.lineno}"
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.While) and "sleep(" in ast.unparse(node) and path.name != "waiting.py"
    ]
    assert loops == []


def test_no_port_is_fixed_and_no_bound_is_below_a_second() -> None:
    """A Host header may name any port, and bounds of the processor's time do not depend on other work."""
    patterns = r"_PORT\W+\d{2,}|\bport=[1-9]\d", r"(?:monotonic|perf_counter|\btime)\(\) - \w+ <=? (?:0?\.\d|1\b)"
    for pattern in patterns:
        assert [path.name for path, text in SOURCES.items() if re.search(pattern, text)] == []
