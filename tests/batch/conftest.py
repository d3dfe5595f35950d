"""Fixtures of the tests of batch jobs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ldm_lite.batch.__main__ import main

SMALL = ["--steps", "1", "--width", "32", "--height", "32", "--shard-size", "3", "--batch-size", "2"]


@pytest.fixture
def arguments(small_path: Path) -> list[str]:
    """Of a quick job, without extras."""
    return [*SMALL, "--ckpt", os.fspath(small_path), "--device", "cpu", "--manifest", "jsonl"]


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows into a .jsonl; a number makes so many rows."""

    def write(rows: int | list[Any], name: str = "table.jsonl") -> Path:
        entries = [{"prompt": f"picture {i}"} for i in range(rows)] if isinstance(rows, int) else rows
        lines = [row if isinstance(row, str) else json.dumps(row) for row in entries]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return write


@pytest.fixture
def batch(tmp_path: Path, arguments: list[str]) -> Callable[..., list[dict[str, Any]]]:
    """Runs a job, and returns its manifest; `out` and `status` are what is wanted."""

    def run(path: Path, *more: object, out: str = "out", status: int = 0) -> list[dict[str, Any]]:
        argv = [os.fspath(path), *arguments, "--out", os.fspath(tmp_path / out), *map(str, more)]
        assert main(argv) == status
        manifest = tmp_path / out / "manifest.jsonl"
        return [json.loads(line) for line in manifest.read_text().splitlines()] if manifest.exists() else []

    return run
