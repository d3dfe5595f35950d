"""Batch jobs with FLUX.1, Stable Diffusion 3 and Z-Image in miniature."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from batch_files import members
from numpy.typing import NDArray
from PIL import Image

import ldm_lite
from ldm_lite.batch.__main__ import main
from ldm_lite.conditioning.prompts import PromptOptions
from ldm_lite.train import __main__ as train

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
    table_path = table(rows(tmp_path))
    job(table_path, tmp_path / "alone", flow_path, "--batch-size", 1)
    job(table_path, tmp_path / "pairs", flow_path, "--batch-size", 2)
    pipe, red = ldm_lite.load(flow_path, device="cpu"), Image.open(tmp_path / "a.png")
    size: dict[str, Any] = {"steps": 2, "output": "numpy"}
    wanted = [
        *pipe.txt2img("a cat", seed=42, width=48, height=32, **size),
        *pipe.txt2img("a dog", seed=7, width=48, height=32, **size),
        *pipe.img2img("x", red, seed=44, strength=0.5, **size),
        *pipe.img2img("y", red, seed=45, strength=0.5, **size),
    ]
    for number, expected in enumerate(wanted):
        assert np.array_equal(image(tmp_path / "alone", number), expected)
        assert abs(image(tmp_path / "pairs", number) - expected).max() <= 1


# Of one token, of more than 32 (a chunk of Z-Image), and of more than 77 (the least of Stable Diffusion 3).
CAPTIONS = ("cat", "a dog on a red table under a tree", "a long text " * 20, "two", "words", "a")


@pytest.mark.slow
def test_captions_of_any_length_are_encoded_and_train(
    tmp_path: Path, flow_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into shards of one shape.  Training from them runs no text encoder, and has the losses of the images."""
    (tmp_path / "images").mkdir()
    for i, caption in enumerate(CAPTIONS):
        Image.fromarray(np.roll(toy.photo(64, 64), 9 * i, axis=1)).save(tmp_path / "images" / f"{i}.png")
        (tmp_path / "images" / f"{i}.txt").write_text(caption)
    ckpt = ["--ckpt", flow_path, "--device", "cpu"]
    for out, size in (("parts", 4), ("encoded", 6)):
        arguments = [tmp_path / "images", "--encode", "--out", tmp_path / out, "--shard-size", size, "--batch-size", 1]
        assert main(list(map(str, [*arguments, *ckpt]))) == 0
    about = json.loads((tmp_path / "parts" / "index.json").read_text())
    assert about["y"] is not None
    for name in ("context", "y"):
        shards = [np.load(tmp_path / "parts" / f"0000{i}" / f"{name}.npy") for i in range(2)]
        assert [list(shard.shape) for shard in shards] == [[4, *about[name]], [2, *about[name]]]
    more = [
        "--lora-rank",
        2,
        "--steps",
        3,
        "--batch-size",
        2,
        "--data-workers",
        0,
        "--caption-dropout",
        0.5,
        "--samples",
        "a",
    ]
    losses = []
    for data in ("images", "encoded"):
        monkeypatch.setattr("ldm_lite.networks.PromptOptions", PromptOptions if data == "images" else None)
        out = tmp_path / f"of-{data}"
        assert train.main(list(map(str, ["--data", tmp_path / data, "--out", out, *more, *ckpt]))) == 0
        losses.append([json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
