"""Captioned images are encoded into memory-mapped shards for training."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
from batch_files import contents
from PIL import Image
from training import load_options, options, train

import ldm_lite
from ldm_lite.batch import encode as encoding
from ldm_lite.batch.__main__ import main
from ldm_lite.train import data, encoded
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


def test_embeddings_that_exceed_float16_are_finite(
    tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers that were trained in bfloat16."""
    large = torch.tensor([[[1e6, -1e6]]])
    monkeypatch.setattr(encoding, "encode_captions", lambda model, texts: {"context": large.expand(len(texts), 1, 2)})
    assert encode() == 0
    assert np.load(tmp_path / "out" / "00000" / "context.npy").tolist() == [[[65504.0, -65504.0]]] * 3


def test_only_what_is_missing_is_encoded(tmp_path: Path, images: Path, encode: Encode) -> None:
    assert encode() == 0
    before = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npy")}
    (tmp_path / "out" / "00001" / "context.npy").unlink()
    (images / "6.txt").write_text("another")
    assert encode() == 0
    written = {path.parent.name for path in (tmp_path / "out").rglob("*.npy") if path.stat().st_mtime_ns != times[path]}
    assert written == {"00001", "00002"}
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
    (images / "3.txt").unlink()
    assert encode(out="other") == 2
    assert "3.png: has no caption" in capsys.readouterr().err


@pytest.mark.parametrize("in_tars", [False, True])
def test_broken_images_are_left_out(
    tmp_path: Path, images: Path, small_path: Path, encode: Encode, in_tars: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of shards of 3, 3 and 1 two are broken in the second, and the third is no image at all; all others train."""
    for number in (3, 4, 6):
        (images / f"{number}.png").write_bytes((images / f"{number}.png").read_bytes()[: 90 if number > 3 else 0])
    if in_tars:
        with tarfile.open(images / "a.tar", "w") as tar:
            for path in sorted(images.glob("?.*")):
                tar.add(path, path.name)
    assert encode() == 0
    errors = capsys.readouterr().err
    assert "3 rows failed: parts/ says why" in errors
    data = encoded.open_encoded(tmp_path / "out")
    assert data.shards == (3, 1, 0)
    assert [data.example(i).caption for i in range(4)] == [f"picture {i}" for i in (0, 1, 2, 5)]
    lines = [
        line for path in sorted((tmp_path / "out" / "parts").glob("*.jsonl")) for line in path.read_text().split("\n")
    ]
    assert [row["row"] for row in map(json.loads, filter(None, lines)) if "error" in row] == [3, 4, 6]
    before = contents(tmp_path / "out")
    assert encode() == 0
    assert contents(tmp_path / "out") == before
    train_options = options(tmp_path / "out", tmp_path / "run", lora_rank=1, steps=5, batch_size=1, sample_every=0)
    train(train_options, load_options(small_path))
    for number in (0, 1, 2, 5):
        (images / f"{number}.png").write_bytes(b"")
    if not in_tars:
        assert encode(out="none") == 2
        assert "none of its images can be encoded: " in capsys.readouterr().err


def test_tars_are_counted_once_and_each_image_is_read_twice(
    tmp_path: Path, small_path: Path, images: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for its digest, once to be encoded, however many tars and shards there are."""
    for first in range(0, 6, 2):
        with tarfile.open(images / f"{first}.tar", "w") as tar:
            for number in (first, first + 1):
                for kind in ("png", "txt"):
                    tar.add(images / f"{number}.{kind}", f"{number}.{kind}")
    read, listed = list[int](), list[str]()
    content, members = data.TarShards.content, data._members.__wrapped__
    monkeypatch.setattr(data.TarShards, "content", lambda self, index: (read.append(index), content(self, index))[1])
    monkeypatch.setattr(data, "_members", lambda path, state: (listed.append(path.name), members(path, state))[1])
    assert encode() == 0
    assert sorted(read) == sorted(2 * [*range(6)])
    assert json.loads((tmp_path / "out" / "tars.json").read_text()).values() is not None
    listed.clear()
    assert len(data.open_data(images, 8, tmp_path / "out" / "tars.json").shards) == 3
    assert listed == [], "a further process counts no images"
    os.utime(images / "0.tar", ns=(1, 1))
    data.open_data(images, 8, tmp_path / "out" / "tars.json")
    assert listed == ["0.tar"]


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
