"""What a worker of Ray's does with errors, without Ray."""

import os
from pathlib import Path
from typing import Any

import pytest

from ldm_lite.batch.options import BatchOptions, RowOptions
from ldm_lite.batch.places import Folder
from ldm_lite.batch.ray_engine import MOST_LOST, _Actor
from ldm_lite.batch.store import Report, Task
from ldm_lite.batch.table import Table
from ldm_lite.cli.options import LoadOptions


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A task of one row."""
    table = Table(tmp_path / "t.jsonl", 1, 1)
    return Task(BatchOptions(), RowOptions(), LoadOptions(), table, Folder(tmp_path), Path.cwd())


class Broken:
    """A worker that raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def make(self, number: int) -> Report:
        raise self.error


def call(actor: _Actor) -> Any:
    [report] = actor({"id": [0]})["report"]
    return report


def test_errors_are_results(task: Task) -> None:
    error = OSError("the disk is full")
    assert call(_Actor(task, lambda task: Broken(error))) is error

    def refuse(task: Task) -> Broken:
        raise ValueError("no such file")

    assert str(call(_Actor(task, refuse))) == "no such file"


def test_a_gpu_that_fails_ends_the_process_and_a_shard_that_always_does_the_job(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    for _ in range(MOST_LOST):  # Ray starts another worker each time
        with pytest.raises(SystemExit):
            call(_Actor(task, lambda task: Broken(RuntimeError("CUDA error: an illegal memory access"))))
    report = call(_Actor(task, lambda task: Broken(RuntimeError("CUDA error: an illegal memory access"))))
    assert isinstance(report, ChildProcessError)
    assert str(report) == f"00000.tar: {MOST_LOST} workers ended while they made it"
