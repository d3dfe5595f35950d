"""Whatever a row of a table holds, it ends in the manifest."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import members
from PIL import Image

import ldm_lite
from ldm_lite.batch.__main__ import main
from ldm_lite.batch.options import COLUMNS, FILES, column_type

Batch = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]
NUMBERS = [0, -1, 1, 2, 8, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, -(10**30)]
NUMBERS += [0.5, -0.5, 1.5, float("nan"), float("inf"), 1e308, 1e-320, -0.0]  # type: ignore[list-item]
TEXTS = [
    "",
    " ",
    "\ud800",
    "a\udfff b",
    "\0",
    "a\0b",
    "a" * 3000,
    "é\u2028\x85",
    "1e9",
    "nan",
    "1" * 5000,
    "5",
    "0.5",
    "-3",
]
TEXTS += ["[a:b", "(a:1.2)", "a AND b", "../../etc/passwd", "/dev/null", ".", "/", "a;b", ":::", "ok.png", "ok.png:0.5"]
TEXTS += ["auto", "karras", "euler", "32x32", "0,0", "a1111", "comfy", "{a|b}", "__x__", "crop", "Latent", "canny"]
OTHERS = [[], [1], ["a"], [["b"]], {}, {"a": 1}, True, False, None, [32, 32]]
NAMES = ["ok.png", "broken.png", ".", "/dev/zero", "pipe", "a\0", "\ud800.png", "none.png", "a" * 300]
LINES = ["{", "[]", "1", "null", '"x"', "{}", '{"prompt": "a", "prompt": 5}', "[" * 5000, "NaN", "\\ud800"]
COLUMN_NAMES = (*COLUMNS, "other", "Seed", "init-image", "\ud800")


def value(column: str, draw: random.Random) -> Any:
    """Something for a column, most often of its type."""
    name = column.replace("-", "_")
    if name not in COLUMNS or draw.random() < 0.2:
        return draw.choice([*NUMBERS, *TEXTS, *OTHERS])
    if name in FILES:
        return draw.choice(NAMES)
    return draw.choice(
        {int: NUMBERS, float: NUMBERS, bool: [True, False, "true"], str: TEXTS}.get(column_type(name), TEXTS)
    )


def line(draw: random.Random) -> str:
    """A line of a .jsonl table."""
    if draw.random() < 0.03:
        return draw.choice(LINES)
    row = {"prompt": "a cat" if draw.random() < 0.8 else value("prompt", draw)}
    return json.dumps(row | {name: value(name, draw) for name in draw.sample(COLUMN_NAMES, draw.randrange(4))})


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(16))
def test_any_row_ends_in_the_manifest(tmp_path: Path, small_path: Path, table: Write, seed: int) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "ok.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    os.mkfifo(tmp_path / "pipe")
    draw = random.Random(seed)
    rows = [line(draw) for _ in range(150)]
    argv = [table(rows), "--steps", 1, "--width", 32, "--height", 32, "--shard-size", 60, "--most-pixels", 4096]
    argv += ["--ckpt", small_path, "--device", "cpu", "--out", tmp_path / "out"]
    assert main(list(map(os.fspath, map(str, argv)))) == 0
    manifest = parquet.read_table(tmp_path / "out/manifest.parquet").to_pylist()
    assert [entry["row"] for entry in manifest] == list(range(len(rows)))
    for entry in manifest:
        assert (entry["sha256"] is None) != (entry["error"] is None)
        assert "Error: " not in (entry["error"] or ""), "an error that is not the row's"
    assert {entry["error"] is None for entry in manifest} == {True, False}


def test_seeds_of_64_bits(tmp_path: Path, small_path: Path, table: Write, batch: Batch) -> None:
    """As ComfyUI has them; rows without a seed go on from 0."""
    parquet = pytest.importorskip("pyarrow.parquet")
    most = 2**64 - 1
    rows: list[dict[str, Any]] = [
        {"prompt": "a cat", "seed": most},
        {"prompt": "a cat", "seed": str(most)},
        {"prompt": "a cat"},
        {"prompt": "a cat", "seed": most + 1},
        {
            "prompt": "a cat",
            "seed": most,
            "noise": "a1111",
            "ensd": 5,
            "variation_seed": most,
            "variation_strength": 0.5,
        },
    ]
    batch(table(rows), "--shard-size", 5, "--seed", most - 1, "--manifest", "parquet")
    manifest = parquet.read_table(tmp_path / "out/manifest.parquet").to_pylist()
    assert [entry["seed"] for entry in manifest] == [most, most, 0, None, most]
    assert manifest[3]["error"] == f"got `seed` {most + 1}, expected 0 to {most}"
    assert manifest[0]["sha256"] == manifest[1]["sha256"] != manifest[2]["sha256"]
    about = json.loads(members(tmp_path / "out/00000.tar")["000000000.json"])
    assert about["seed"] == most
    pipe = ldm_lite.load(small_path, device="cpu")
    first, second = pipe.txt2img("a cat", seed=most, steps=1, width=32, height=32, batch_size=2)
    assert "Seed: 0," in second.info["parameters"]
    assert first.info["parameters"] == about["parameters"]
    [alone] = pipe.txt2img("a cat", seed=0, steps=1, width=32, height=32)
    assert alone.tobytes() == second.tobytes()


def test_a_value_that_python_cannot_have_fails_its_row(tmp_path: Path, batch: Batch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = arrow.array([b"a cat", b"\xff\xfe", b"a dog"], arrow.binary())
    prompts = arrow.Array.from_buffers(arrow.string(), 3, texts.buffers())  # which Arrow does not check
    parquet.write_table(arrow.table({"prompt": prompts}), tmp_path / "table.parquet")
    errors = [entry["error"] for entry in batch(tmp_path / "table.parquet")]
    assert errors[0] is errors[2] is None
    assert "cannot be read" in errors[1]
