"""The loading table: from process start to loaded networks."""

import subprocess
import time
from pathlib import Path

import pytest
import torch

from ldm_lite.bench import loading
from ldm_lite.bench.loading import Timing, markdown, measure, write
from ldm_lite.bench.loading_worker import CKPT, SAFETENSORS, load_once
from ldm_lite.checkpoint.reader import open_checkpoint

OURS = ("ours", "ours-half", "ours-ckpt", "ours-ckpt-half")


def test_each_method_loads_the_networks_of_its_file(small_path: Path, tmp_path: Path) -> None:
    write(open_checkpoint(small_path), tmp_path, OURS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([SAFETENSORS, CKPT])
    files = [open_checkpoint(tmp_path / name) for name in (SAFETENSORS, CKPT)]
    assert files[0].shapes == files[1].shapes
    key = next(iter(files[0].shapes))
    assert torch.equal(files[0].read(key), files[1].read(key))
    start = time.time()
    whole, half = (load_once(name, tmp_path, "cpu") for name in ("ours", "ours-half"))
    assert start < whole.imported < whole.ready < half.ready
    assert whole.weights == pytest.approx(2 * half.weights, rel=0.01)
    assert whole.peak is None or whole.peak > whole.weights


def test_they_take_turns_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns = []

    def process(*args: object, input: str, **kwargs: object) -> "subprocess.CompletedProcess[str]":
        name, *_ = loading.json.loads(input)
        turns.append(name)
        if name == "diffusers":
            return subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: No module named 'diffusers'")
        now = time.time() + 1
        made = f'{{"imported": {now}, "ready": {now + 2}, "peak": 3221225472, "weights": 2147483648}}'
        return subprocess.CompletedProcess([], 0, made, "")

    monkeypatch.setattr(loading.subprocess, "run", process)
    timings = measure(["imports", "ours", "diffusers"], tmp_path, "cpu", rounds=2)
    # A warm-up round, then A B C and C B A.
    assert turns == ["diffusers", "ours", "imports", "imports", "ours", "ours", "imports"]
    assert [len(timing.ready) for timing in timings.values()] == [2, 2, 0]
    assert timings["ours"].ready == pytest.approx([3.0, 3.0], abs=0.1)
    assert timings["diffusers"].error == "ModuleNotFoundError: No module named 'diffusers'"


def test_the_ratio_is_to_diffusers_in_the_same_precision() -> None:
    timings = {
        name: Timing([1.0], [ready], 3 * 2**30, 2**31)
        for name, ready in (("ours", 2.0), ("ours-half", 3.0), ("diffusers", 8.0), ("diffusers-half", 6.0))
    }
    table = markdown(timings, "title").splitlines()
    assert table[4] == "| ldm_lite, .safetensors | 2.00 | 0.0% | 1.00 | 0.25 | 3.00 | 2.00 |"
    assert table[5] == "| ldm_lite, .safetensors to fp16 | 3.00 | 0.0% | 1.00 | 0.50 | 3.00 | 2.00 |"
    assert table[6].startswith("| diffusers, its folder of .safetensors | 8.00 | 0.0% | 1.00 |  |")
