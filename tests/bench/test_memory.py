"""The memory table: each mode's peak, speed and image, in its own process."""

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ldm_lite.bench import memory
from ldm_lite.bench.memory import MODES, Request, Result, Row, make_image, markdown, measure
from ldm_lite.bench.workload import Setting, Target

SETTING = Setting(height=64, width=64, prompt="cat", sampler="ddim", steps=2, n_iter=1, scale=2.5, seed=1)
REQUEST = Request(Target("bundled", None, "cpu", None, SETTING), "fp32", {}, "")


def test_a_mode_makes_the_image_and_measures_it(tmp_path: Path) -> None:
    images, results = [], []
    for mode in ("plain", "--storage int8"):
        path = tmp_path / f"{len(results)}.npy"
        results.append(make_image(replace(REQUEST, runtime=MODES[mode], image=str(path))))
        images.append(np.load(path))
    assert images[0].shape == (3, 64, 64)
    assert 0 < np.abs(images[0] - images[1]).mean() < 0.2
    assert results[1].weights < 0.5 * results[0].weights
    assert all(made.step_s > 0 and made.decode_s > 0 for made in results)
    assert results[0].peak is None or results[0].peak > results[0].weights


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(*args: object, input: str, **kwargs: object) -> "subprocess.CompletedProcess[str]":
        if "sliced" in input:
            return subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no such attention")
        request = memory.json.loads(input)
        np.save(request["image"], np.full((3, 8, 8), 0.2 if "fp8" in input else 0.0))
        made = '{"peak": 3221225472, "weights": 2147483648, "step_s": 0.5, "decode_s": 2.0}'
        return subprocess.CompletedProcess([], 0, made, "")

    monkeypatch.setattr(memory.subprocess, "run", process)
    rows = list(measure(REQUEST, ["plain", "--attention sliced:8", "--storage fp8", "--vae-tiling"]))
    assert rows[0] == Row("plain", Result(3 * 2**30, 2 * 2**30, 0.5, 2.0), float("inf"))
    assert rows[1] == Row("--attention sliced:8", None, None, "ValueError: no such attention")
    assert rows[2].psnr == pytest.approx(20.0)
    table = markdown(rows, "title").splitlines()
    assert table[4] == "| plain | 3.00 | 1.00 | 0.5 | 2 | inf |"
    assert table[5] == "| --attention sliced:8 | ValueError: no such attention | | | | |"
