"""Captioned images are encoded into memory-mapped shards for training."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
from batch_files import contents
from PIL import Image

import ldm_lite
from ldm_lite.batch.__main__ import main
from ldm_lite.train.data import open_folder, to_float

Encode = Callable[..., int]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Seven captioned images."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(7):
        Image.fromarray(random.integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(tmp_path / "images" / f"{i}.png")
        (tmp_path / "images" / f"{i}.txt").write_text(f"picture {i}")
    return tmp_path / "images"


@pytest.fixture
def encode(tmp_path: Path, images: Path, small_path: Path) -> Encode:
    """Runs the command; `out` is its folder."""

    def run(*more: str, out: str = "out") -> int:
        argv = [os.fspath(images), "--encode", "--ckpt", os.fspath(small_path), "--device", "cpu"]
        return main([*argv, "--shard-size", "3", "--batch-size", "2", "--out", os.fspath(tmp_path / out), *more])

    return run


def test_shards_hold_what_the_networks_make(tmp_path: Path, images: Path, small_path: Path, encode: Encode) -> None:
    assert encode() == 0
    out, pipe = tmp_path / "out", ldm_lite.load(small_path, device="cpu")
    about = json.loads((out / "index.json").read_text())
    assert {name: about[name] for name in ("format", "examples", "shard", "moments", "context", "y", "resolution")} == {
        "format": "ldm_lite encoded 1",
        "examples": 7,
        "shard": 3,
        "moments": [8, 8, 8],
        "context": [77, 64],
        "y": None,
        "resolution": 64,
    }
    data = open_folder(images, 64)
    for i in range(7):
        folder = out / f"{i // 3:05}"
        pixels, caption, *_ = data.example(i)
        moments = np.load(folder / "moments.npy", mmap_mode="r")
        assert isinstance(moments, np.memmap)
        assert moments.dtype == np.float16
        with torch.no_grad():
            mean, deviation = pipe.vae.encode(to_float(pixels[None], torch.device("cpu")))
            wanted = torch.cat([mean, 2 * deviation.log()], dim=1)[0]
        np.testing.assert_allclose(moments[i % 3].astype(np.float32), wanted, rtol=2e-3, atol=2e-3)
        context = np.load(folder / "context.npy", mmap_mode="r")[i % 3]
        np.testing.assert_allclose(context, pipe.encode_prompt(caption).context[0], rtol=2e-3, atol=2e-3)
        assert json.loads((folder / "captions.jsonl").read_text().splitlines()[i % 3]) == caption == f"picture {i}"
    empty = np.load(out / "empty" / "context.npy")
    np.testing.assert_allclose(empty[0], pipe.encode_prompt("").context[0], rtol=2e-3, atol=2e-3)


def test_only_what_is_missing_is_encoded(tmp_path: Path, images: Path, encode: Encode) -> None:
    assert encode() == 0
    before = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npy")}
    (tmp_path / "out" / "00001" / "context.npy").unlink()
    (images / "6.txt").write_text("another")
    assert encode() == 0
    made = {path.parent.name for path in (tmp_path / "out").rglob("*.npy") if path.stat().st_mtime_ns != times[path]}
    assert made == {"00001", "00002"}
    changed = {name for name, code in contents(tmp_path / "out").items() if before[name] != code}
    assert changed == {"00002/context.npy", "00002/captions.jsonl", "parts/00002.jsonl"}


@pytest.mark.slow
def test_what_cannot_be_encoded_is_one_line(
    tmp_path: Path, images: Path, encode: Encode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode("--steps", "3") == 2
    assert "--steps has no effect with --encode: leave it out" in capsys.readouterr().err
    assert encode() == 0
    assert encode("--batch-size", "3") == 2
    assert "was made with batch_size 2, now it is 3" in capsys.readouterr().err
    (images / "3.png").write_bytes(b"no image")
    assert encode() == 2
    assert "3.png: is not an image that can be read" in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.json").exists()
    (images / "3.txt").unlink()
    assert encode(out="other") == 2
    assert "3.png: has no caption" in capsys.readouterr().err


@pytest.mark.slow
def test_sdxl_has_vectors_too(tmp_path: Path, images: Path, encode: Encode) -> None:
    for path in [*images.glob("[2-6].*")]:
        path.unlink()
    random_checkpoint.write(tmp_path / "xl.safetensors", random_checkpoint.small("sdxl_turbo"))
    assert encode("--ckpt", os.fspath(tmp_path / "xl.safetensors")) == 0
    about = json.loads((tmp_path / "out" / "index.json").read_text())
    pipe = ldm_lite.load(tmp_path / "xl.safetensors", device="cpu")
    side = about["resolution"]
    wanted = pipe.encode_prompt("picture 1", size=(side, side))
    y = np.load(tmp_path / "out" / "00000" / "y.npy", mmap_mode="r")
    assert about["y"] == list(y.shape[1:])
    np.testing.assert_allclose(y[1], wanted.y[0], rtol=1e-4, atol=1e-4)
