"""The memory table: each mode's peak, speed and image, in its own process."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ldm_lite.bench import memory
from ldm_lite.bench.memory import MemoryResult, make_image, table
from ldm_lite.bench.options import BenchOptions

OPTIONS = BenchOptions(size="bundled", device="cpu", prompt="cat", sampler="ddim", steps=2, scale=2.5)


def test_a_mode_makes_the_image_and_measures_it() -> None:
    results = [make_image(OPTIONS, mode) for mode in ("", "--storage int8")]
    assert results[0].image.shape == (3, 128, 128)
    assert 0 < np.abs(results[0].image - results[1].image).mean() < 0.2
    assert results[1].weights < 0.5 * results[0].weights
    assert all(result.step_s > 0 and result.decode_s > 0 for result in results)
    assert results[0].peak is None or results[0].peak > results[0].weights
    assert results[0].reserved is results[0].context is None, "they are a GPU's"


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        """Stands for the process: what it is told to run is made here, or fails."""

        def __init__(self, workers: int, context: object) -> None:
            assert workers == 1

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(self, work: object, options: BenchOptions, mode: str) -> "Future[Any]":
            future: Future[Any] = Future()
            if "sliced" in mode:
                future.set_exception(ValueError("no such attention\nmore"))
            else:
                image = np.full((3, 8, 8), 0.2 if "fp8" in mode else 0.0)
                future.set_result(MemoryResult(image, 3 * 2**30, None, None, 2 * 2**30, 0.5, 2.0))
            return future

    monkeypatch.setattr(memory, "ProcessPoolExecutor", Process)
    lines = list(table(OPTIONS, ("", "--attention sliced:8", "--storage fp8")))
    assert lines[0].startswith("python -m ldm_lite.bench --size bundled --device cpu")
    assert lines[3:] == [
        "| plain | 3.00 |  | 1.00 |  | 0.5 | 2 | inf |",
        "| --attention sliced:8 | no such attention | | | | | | |",
        "| --storage fp8 | 3.00 |  | 1.00 |  | 0.5 | 2 | 20.0 |",
    ]


@pytest.mark.slow
def test_each_mode_has_a_process_of_its_own() -> None:
    plain, tiled = list(table(OPTIONS, ("", "--vae-tiling")))[3:]
    assert plain.endswith("| inf |")
    assert tiled.endswith("| inf |")  # on a CPU in float32 it is always on
