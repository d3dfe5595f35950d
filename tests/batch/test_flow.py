"""Batch jobs with FLUX.1 and Stable Diffusion 3 in miniature."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_files import members
from numpy.typing import NDArray
from PIL import Image

import ldm_lite
from ldm_lite.batch.__main__ import main

Write = Callable[..., Path]
SIZE: dict[str, Any] = {"steps": 2, "width": 48, "height": 32}


def job(table: Path, out: Path, ckpt: Path, *more: object) -> None:
    argv = [table, "--ckpt", ckpt, "--device", "cpu", "--manifest", "jsonl", "--shard-size", 2, "--out", out, *more]
    argv += [part for name, value in SIZE.items() for part in (f"--{name}", value)]
    assert main(list(map(str, argv))) == 0


def rows(folder: Path) -> list[dict[str, Any]]:
    """Two images from text and two from an image."""
    Image.new("RGB", (48, 32), "red").save(folder / "a.png")
    more = {"init_image": "a.png", "strength": 0.5}
    return [{"prompt": "a cat"}, {"prompt": "a dog", "seed": 7}, {"prompt": "x", **more}, {"prompt": "y", **more}]


def image(out: Path, number: int) -> NDArray[np.int64]:
    content = members(out / f"{number // 2:05}.tar")[f"{number:09}.png"]
    return np.asarray(Image.open(io.BytesIO(content)), dtype=np.int64)


@pytest.mark.slow
def test_the_images_of_a_job_are_those_of_the_tasks(tmp_path: Path, flow_path: Path, table: Write) -> None:
    """Equal alone; in batches within one of 255."""
    given = table(rows(tmp_path))
    job(given, tmp_path / "alone", flow_path, "--batch-size", 1)
    job(given, tmp_path / "pairs", flow_path, "--batch-size", 2)
    pipe, red = ldm_lite.load(flow_path, device="cpu"), Image.open(tmp_path / "a.png")
    size: dict[str, Any] = {"steps": 2, "output": "numpy"}
    wanted = [
        *pipe.txt2img("a cat", seed=42, width=48, height=32, **size),
        *pipe.txt2img("a dog", seed=7, width=48, height=32, **size),
        *pipe.img2img("x", red, seed=44, strength=0.5, **size),
        *pipe.img2img("y", red, seed=45, strength=0.5, **size),
    ]
    for number, each in enumerate(wanted):
        assert np.array_equal(image(tmp_path / "alone", number), each)
        assert abs(image(tmp_path / "pairs", number) - each).max() <= 1
