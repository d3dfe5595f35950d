"""A table of prompts becomes shards of images, row by row what a single run makes."""

import csv
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy_zoo
from batch_files import contents, members
from PIL import Image

import ldm_lite
from ldm_lite.batch import images
from ldm_lite.batch.options import RowOptions
from ldm_lite.batch.places import Folder
from ldm_lite.batch.rows import RowItem, TableRows, convert
from ldm_lite.batch.store import Store, check_job
from ldm_lite.batch.table import open_table
from ldm_lite.cli.version import pip_install
from ldm_lite.control import loading
from ldm_lite.train.additions import LoRA, control_file, kohya_file, new_control
from ldm_lite.train.state import write_tensors

Batch = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]


def pixels(out: Path, row: int, size: int = 3) -> np.ndarray:
    files = members(out / f"{row // size:05}.tar")
    return np.asarray(Image.open(io.BytesIO(files[f"{row:09}.png"]))).astype(int)


@pytest.mark.slow
def test_every_row_is_what_a_single_run_makes(tmp_path: Path, small_path: Path, table: Write, batch: Batch) -> None:
    """Also of images, masks, per-row negative prompts, long prompts; only rounding depends on the batch."""
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 48, 3), np.uint8)).save(tmp_path / "a.png")
    Image.new("L", (48, 40), 255).save(tmp_path / "m.png")
    long = " ".join(["word"] * 90)
    rows: list[dict[str, Any]] = [
        {"prompt": "a cat"},
        {"prompt": "a dog", "seed": 7, "negative_prompt": "blue", "id": "dog/1"},
        {"prompt": "a cow", "negative_prompt": "red", "sampler": "euler a", "steps": 3, "scale": 3},
        {"prompt": "a pig", "sampler": "euler a", "steps": 3, "scale": 3},
        {"prompt": long, "prompt_syntax": "a1111"},
        {"prompt": "a hen", "prompt_syntax": "a1111", "width": 64},
        {"prompt": "[a fox|a cow] AND a hat :0.5", "prompt_syntax": "a1111", "negative_prompt": "b", "steps": 3},
        {"prompt": "[a cow|a fox]", "prompt_syntax": "a1111", "negative_prompt": "c", "steps": 3},
        {"prompt": "a fox", "init_image": "a.png", "strength": 0.5, "steps": 4},
        {"prompt": "a bee", "init_image": "a.png", "strength": 0.5, "steps": 4, "width": 64, "negative_prompt": "b"},
        {"prompt": "an ant", "init_image": "a.png", "mask": "m.png", "steps": 2},
        {"prompt": "a cod", "noise": "comfy", "seed": 5},
        {"prompt": "an eel", "noise": "comfy", "seed": 9},
        {"prompt": "an owl", "variation_seed": 3, "variation_strength": 0.4},
        {"prompt": "an elk", "init_image": "a.png", "strength": 0.5, "steps": 4, "sampler": "ddim", "eta": 1},
    ]
    manifest = batch(table(rows), "--shard-size", 20, "--batch-size", 4)
    assert [(line["id"], line["row"], line["seed"], line["error"]) for line in manifest] == [
        (row.get("id", str(i)), i, row.get("seed", 42 + i), None) for i, row in enumerate(rows)
    ]
    pipe = ldm_lite.load(small_path, device="cpu")
    for i, (row, line) in enumerate(zip(rows, manifest, strict=True)):
        options = {"steps": 1, "width": 32, "height": 32, "seed": 42 + i, **row}
        options.pop("id", None)
        prompt, image, mask = options.pop("prompt"), options.pop("init_image", None), options.pop("mask", None)
        if mask is not None:
            [wanted] = pipe.inpaint(prompt, tmp_path / image, tmp_path / mask, output="numpy", **options)
        elif image is not None:
            [wanted] = pipe.img2img(prompt, tmp_path / image, output="numpy", **options)
        else:
            [wanted] = pipe.txt2img(prompt, output="numpy", **options)
        pixels_of_image = pixels(tmp_path / "out", i, 20)
        assert abs(pixels_of_image - wanted).max() <= 1
        assert line["sha256"] == hashlib.sha256(pixels_of_image.astype(np.uint8).tobytes()).hexdigest()
        assert line["shard"] == "00000.tar"
        assert line["time"] > 0


@pytest.mark.slow
def test_alone_in_its_batch_a_row_has_the_bits_of_a_single_run(
    tmp_path: Path, small_path: Path, table: Write, batch: Batch
) -> None:
    batch(table(2), "--batch-size", 1, "--shard-size", 1)
    pipe = ldm_lite.load(small_path, device="cpu")
    for i in range(2):
        [wanted] = pipe.txt2img(f"picture {i}", seed=42 + i, steps=1, width=32, height=32, output="numpy")
        np.testing.assert_array_equal(pixels(tmp_path / "out", i, 1), wanted)


def test_shards_are_webdatasets(tmp_path: Path, table: Write, batch: Batch) -> None:
    batch(table(4), "--negative-prompt", "grey")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["00000.tar", "00001.tar"]
    files = members(tmp_path / "out" / "00001.tar")
    assert list(files) == ["000000003.png", "000000003.json"]
    about = json.loads(files["000000003.json"])
    assert (about["id"], about["prompt"], about["negative_prompt"], about["seed"]) == ("3", "picture 3", "grey", 45)
    assert (about["width"], about["height"], about["settings"]["Steps"]) == (32, 32, 1)
    image = Image.open(io.BytesIO(files["000000003.png"]))
    assert image.info["parameters"] == about["parameters"]
    with tarfile.open(tmp_path / "out" / "00001.tar") as tar:
        assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in tar} == {
            (0, 0, 0, "", 0o644)
        }


@pytest.mark.slow
def test_a_folder_instead_of_shards(tmp_path: Path, table: Write, batch: Batch) -> None:
    batch(table(4))
    manifest = batch(table(4), "--format", "folder", out="folder")
    assert manifest[3]["shard"] == "00001"
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder" / "00000").iterdir()} == members(
        tmp_path / "out" / "00000.tar"
    )
    before = contents(tmp_path / "folder")
    (tmp_path / "folder" / "00000" / "000000001.png").unlink()
    batch(table(4), "--format", "folder", out="folder")
    assert contents(tmp_path / "folder") == before


BAD: dict[str, Any] = {
    "multiples of 8": {"prompt": "a", "width": 33},
    "expected at most 4194304": {"prompt": "a", "width": 8192, "height": 8192},
    "got `height` 0, expected 1 to": {"prompt": "a", "height": 0},
    "got prompt 5, expected a text": {"prompt": 5},
    "got prompt ['a', 'b'], expected a text": {"prompt": ["a", "b"]},
    "got steps 1.5, expected a whole number": {"prompt": "a", "steps": 1.5},
    "got seed True, expected a whole number": {"prompt": "a", "seed": True},
    "got `seed` -1, expected 0 to": {"prompt": "a", "seed": -1},
    "got `scale` nan, expected 0 to 100": '{"prompt": "a", "scale": NaN}',
    "got scale 'high', expected a number": {"prompt": "a", "scale": "high"},
    "got `scale` 1e+38, expected 0 to 100": {"prompt": "a", "scale": 1e38},
    "has no prompt": {"seed": 1},
    "characters, expected at most": {"prompt": "a" * 200_000},
    "unknown sampler": {"prompt": "a", "sampler": "best"},
    "none.png: No such file": {"prompt": "a", "init_image": "none.png"},
    "is not an image": {"prompt": "a", "init_image": "table.jsonl"},
    "got a mask, but no init_image": {"prompt": "a", "mask": "table.jsonl"},
    "it needs an init_image": {"prompt": "a", "strength": 0.5},
    "is not JSON": "{",
    "is not an object of JSON": "[1]",
    "got `steps` 2000": {"prompt": "a", "steps": 2000},
    "got id [1], expected a text": {"prompt": "a", "id": [1]},
}


@pytest.mark.slow
def test_bad_rows_are_lines_of_the_manifest(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for bad in BAD.values() for row in (bad, {"prompt": "good"})]
    manifest = batch(table(rows), "--shard-size", 100, "--batch-size", 8)
    assert len(manifest) == len(rows)
    for wanted, line, good in zip(BAD, manifest[::2], manifest[1::2], strict=True):
        assert wanted in (line["error"] or ""), line
        assert line["sha256"] is None
        assert good["error"] is None
        assert len(good["sha256"]) == 64
    assert f"{len(BAD)} rows failed: the manifest says why" in capsys.readouterr().err
    alone = batch(table([rows[1]] * 2, "alone.jsonl"), "--seed", manifest[1]["seed"], out="alone")
    assert abs(pixels(tmp_path / "out", 1, 100) - pixels(tmp_path / "alone", 0, 3)).max() <= 1
    assert alone[0]["error"] is None


def test_a_row_that_fails_in_its_batch_does_not_change_the_others(tmp_path: Path, table: Write, batch: Batch) -> None:
    """A batch that cannot run is run row by row: here the lengths of embeddings differ."""
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    rows = [{"prompt": "x", "init_image": name, "strength": 1} for name in ("a.png", "b.png", "a.png")]
    manifest = batch(table(rows), "--batch-size", 3)
    assert [line["error"] is None for line in manifest] == [True, False, True]
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())  # a shard is made again for other contents
    assert [line["error"] for line in batch(table(rows), "--batch-size", 3)] == [None] * 3


def test_a_programs_noise_is_that_of_a_row_alone(table: Write, batch: Batch) -> None:
    """diffusers draws the noise of a batch from one seed."""
    rows = [{"prompt": "x", "noise": "diffusers", "seed": seed} for seed in (5, 9)]
    assert batch(table(rows))[1]["sha256"] == batch(table(rows[1:]), out="alone")[0]["sha256"]


def test_a_row_fails_for_lack_of_memory_and_all_of_them_for_a_broken_gpu(
    table: Write, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(samples: object) -> None:
        raise errors.pop()

    errors: list[Exception] = [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("CUDA ...")]
    monkeypatch.setattr(images, "Batch", fail)
    assert batch(table(1), status=2)[0]["error"] == "out of memory"
    assert batch(table(1), out="broken", status=1) == []


def test_many_rows_that_fail_leave_no_trace_in_the_terminal(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(table([{"prompt": " ".join(["word"] * 90 + [str(i)])} for i in range(6)]))
    assert json.loads(members(tmp_path / "out" / "00001.tar")["000000004.json"])["dropped"].endswith(" word 4")
    errors = [line for line in capsys.readouterr().err.splitlines() if "too long" in line]
    assert [line.partition(": the prompt is")[0] for line in errors] == ["warning: 00000.tar", "warning: 00001.tar"]
    assert all("(and 2 more)" in line for line in errors)


@pytest.mark.slow
def test_every_kind_of_table(tmp_path: Path, table: Write, batch: Batch) -> None:
    batch(table([{"prompt": f"a, b {i}", "seed": i} for i in range(4)]))
    with open(tmp_path / "t.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["seed", "prompt", "scale"], *([str(i), f"a, b {i}", ""] for i in range(4))])
    batch(tmp_path / "t.csv", out="csv")
    (tmp_path / "t.txt").write_text("a, b 0\n\na, b 1\r\n a, b 2\na, b 3")
    batch(tmp_path / "t.txt", "--seed", 0, out="txt")
    tars = {name: [path.read_bytes() for path in sorted((tmp_path / name).glob("*.tar"))] for name in ("csv", "txt")}
    assert tars["csv"] == tars["txt"] == [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.tar"))]


@pytest.mark.extra
def test_parquet(tmp_path: Path, table: Write, batch: Batch) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"p {i}", "seed": i, "steps": None if i % 2 else 1, "bytes": b"x"} for i in range(8)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=5)
    batch(table([{"prompt": row["prompt"], "seed": row["seed"], "steps": 1} for row in rows]))
    batch(tmp_path / "t.parquet", "--manifest", "parquet", out="parquet")
    for path in sorted((tmp_path / "out").glob("*.tar")):
        assert path.read_bytes() == (tmp_path / "parquet" / path.name).read_bytes()
    manifest = parquet.read_table(tmp_path / "parquet" / "manifest.parquet")
    assert manifest.column_names == ["id", "row", "shard", "seed", "sha256", "time", "error"]
    assert manifest["seed"].to_pylist() == list(range(8))
    opened = open_table(tmp_path / "t.parquet", 2)
    assert opened.columns == ["prompt", "seed", "steps"]
    assert [[row["seed"] for row in opened.rows(i)] for i in (2, 0, 3, 2)] == [[4, 5], [0, 1], [6, 7], [4, 5]]  # type: ignore[index]


def test_shards_of_a_table_are_read_in_any_order(tmp_path: Path) -> None:
    lines = ["prompt,seed", *(f'"line {i}\nof two, ""quoted""",{i}' for i in range(7)), "one cell", '"é",7']
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    opened = open_table(tmp_path / "t.csv", 2)
    assert (opened.count, opened.shards) == (9, 5)
    for number in (4, 0, 2, 3, 1, 4):
        rows = opened.rows(number)
        assert len(rows) == (1 if number == 4 else 2)
        for i, row in enumerate(rows, start=2 * number):
            wanted = {7: "has 1 cells, expected 2, those of the header", 8: {"prompt": "é", "seed": "7"}}
            assert row == wanted.get(i, {"prompt": f'line {i}\nof two, "quoted"', "seed": str(i)})


def test_a_broken_field_of_a_csv_takes_no_other_row_with_it(tmp_path: Path) -> None:
    """A quote that never ends took all rows up to the next one, or 131,072 characters of them."""
    rows = [f"row {i},{i}" for i in range(9)]
    for broken in ('"never ended,1', 'a,"b"c', '"a\nb"c,1', '"' + "x" * 200_000 + '",1', 'a\0,"'):
        lines = ["prompt,seed", *rows[:4], broken, *rows[4:]]
        for end in ("", "\n", '\n"last", 1\n'):
            (tmp_path / "t.csv").write_text("\n".join(lines) + end, encoding="utf-8")
            opened = open_table(tmp_path / "t.csv", 3)
            read = [row for shard in range(opened.shards) for row in opened.rows(shard)]
            assert len(read) == opened.count
            whole = [row["prompt"] for row in read if isinstance(row, dict)]
            assert [prompt for prompt in whole if prompt.startswith("row")] == [row.split(",")[0] for row in rows]
            assert any(isinstance(row, str) for row in read), broken
            assert opened.rows(opened.shards - 1) == read[3 * (opened.shards - 1) :]
    (tmp_path / "t.csv").write_text("prompt,seed\n" + '"a\n' * 20_001, encoding="utf-8")
    start = time.process_time()
    assert open_table(tmp_path / "t.csv", 100).count >= 20_000
    assert time.process_time() - start < 3


def test_a_folder_whose_files_are_no_files_waits_for_nothing(tmp_path: Path) -> None:
    store = Store(Folder(tmp_path), ".tar")
    os.mkfifo(tmp_path / store.list_of(0))
    (tmp_path / store.list_of(1)).write_bytes(b"[" * 10**5)
    assert not store.is_done(0)
    assert not store.is_done(1)
    with pytest.raises(ValueError, match="is a pipe, expected a regular file"):
        store.lines(0)
    for content, message in ((b"[]", "holds a JSON list, expected an object"), (b"[" * 10**5, "is nested too deeply")):
        (tmp_path / "job.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"job\.json: {message}"):
            check_job(Folder(tmp_path), {"a": 1})


def test_a_job_whose_rows_all_fail_fails(table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first reason is told, and the manifest has all."""
    manifest = batch(table([{"prompt": "a", "seed": "x"}, {"prompt": "b", "steps": 0}]), status=2)
    assert [line["row"] for line in manifest] == [0, 1]
    errors = capsys.readouterr().err
    assert "row 0: " in errors
    assert "manifest.jsonl: is empty: all rows failed" in errors


def test_broken_lines_are_rows(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt": "a"}\n\xff\xfe\n' + b'{"prompt": "' + b"x" * 2**21 + b'"}\n   \n{"prompt": "b"}'
    (tmp_path / "t.jsonl").write_bytes(content)
    opened = open_table(tmp_path / "t.jsonl", 10)
    first, second, third, last = opened.rows(0)
    assert (first, last) == ({"prompt": "a"}, {"prompt": "b"})
    assert "UTF-8" in str(second)
    assert "more than 1048576 bytes" in str(third)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("t.json", "[]", "t.json: is not a table of prompts, expected .parquet, .jsonl, .csv or .txt"),
        ("t.jsonl", "\n\n", "t.jsonl: holds no prompt"),
        ("t.csv", "text,seed\na,1\n", "t.csv: has no column named prompt: rename the one with the prompts"),
        ("t.csv", "", "t.csv: holds no prompt"),
        ("t.csv", "prompt,seed,prompt\na,1,b\n", "t.csv: its first line has the column 'prompt' twice"),
        ("t.csv", "prompt\na\n".encode("utf-16"), "t.csv: its first line is not a row of a table ('utf-8' codec"),
    ],
)
def test_what_is_no_table(
    tmp_path: Path, name: str, content: str | bytes, wanted: str, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    batch(tmp_path / name, status=2)
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--shard", "3/2"], "got --shard '3/2', expected I/N with I from 1 to N"),
        (["--shard", "0/2"], "got --shard '0/2', expected I/N with I from 1 to N"),
        (["--workers", "2"], "--workers is for the engine Ray: add --engine ray"),
        (["--width", "33"], "expected multiples of 8"),
        (["--sampler", "best"], "unknown sampler 'best'"),
        (
            ["--manifest", "parquet"],
            f"manifest.parquet needs pyarrow: {pip_install('batch')}, or use --manifest jsonl",
        ),
        (["--engine", "ray"], f"ray is not installed: {pip_install('ray')}"),
        (["--engine", "ray", "--workers", "2:1"], "got --workers '2:1', expected a number from 1, or MIN:MAX"),
    ],
)
def test_bad_options_are_one_line_before_any_work(
    more: list[str],
    wanted: str,
    table: Write,
    batch: Batch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("pyarrow", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    batch(table(1), *more, status=2)
    assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_makes_no_images_of_prompts_is_refused(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    random_checkpoint.write(tmp_path / "up.safetensors", toy_zoo.small("x4"))
    batch(table(1), "--ckpt", tmp_path / "up.safetensors", status=2)
    assert "cannot be used here: use upscale" in capsys.readouterr().err


def test_unknown_columns_are_named_once(table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch(table([{"prompt": "a", "step": 1, "url": "x"}] * 3))
    errors = capsys.readouterr().err
    assert errors.count("column 'step' is ignored: did you mean steps?") == 1
    assert "and 1 more" in errors


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", "20", 20),
        ("steps", 20.0, 20),
        ("scale", "7.5", 7.5),
        ("exact_steps", "true", True),
        ("exact_steps", 0, False),
        ("id", 5, "5"),
    ],
)
def test_cells_have_the_types_of_their_columns(name: str, value: object, wanted: object) -> None:
    assert convert(name, value) == wanted
    assert type(convert(name, value)) is type(wanted)


def test_the_pixels_of_a_row_may_be_limited(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    rows = TableRows(pipe, RowOptions(), 64 * 64, [Path()])
    first, second = rows.read(0, [{"prompt": "a", "width": 64}, {"prompt": "a", "width": 72}])
    assert isinstance(first, RowItem)
    assert not isinstance(second, RowItem)
    sizes = [{"prompt": "a", "width": 2048, "height": height} for height in (2048, 2056)]
    assert [isinstance(row, RowItem) for row in TableRows(pipe, RowOptions(), None, [Path()]).read(0, sizes)] == [
        True,
        False,
    ]


def test_few_texts_are_held_at_once(
    tmp_path: Path, table: Write, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows a shard has: they are encoded, denoised and let go part by part, with the same bytes."""
    events: list[object] = []
    prepare, denoise = images.prepare_rows, images.ImageWorker._run
    monkeypatch.setattr(images, "prepare_rows", lambda m, o, rows: (events.append(len(rows)), prepare(m, o, rows))[1])
    monkeypatch.setattr(images.ImageWorker, "_run", lambda self, rows: (events.append("run"), denoise(self, rows))[1])
    batch(table(9), "--shard-size", 9, out="whole")
    assert events == [9, *["run"] * 5]
    events.clear()
    monkeypatch.setattr(images, "TEXTS", 5)  # of whole batches of two
    batch(table(9), "--shard-size", 9)
    assert events == [4, "run", "run", 4, "run", "run", 1, "run"]
    assert contents(tmp_path / "out")["00000.tar"] == contents(tmp_path / "whole")["00000.tar"]


@pytest.fixture
def adapters(tmp_path: Path, small_path: Path) -> Path:
    """A folder with two LoRAs, a ControlNet and its image, which change an image a lot."""
    pipe, folder = ldm_lite.load(small_path, device="cpu"), tmp_path / "adapters"
    folder.mkdir()
    torch.manual_seed(0)
    for name in ("a", "b"):
        lora = LoRA({"unet": pipe.unet}, 2)
        for parameter in lora.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        write_tensors(folder / f"{name}.safetensors", *kohya_file(lora, pipe))
    control = new_control(pipe)
    for part in (control.zero_convs, control.middle_block_out):
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    write_tensors(folder / "control.safetensors", *control_file(control, pipe))
    for name in ("edges", "other"):
        Image.fromarray(np.random.default_rng(len(name)).integers(0, 255, (32, 32, 3), np.uint8)).save(
            folder / f"{name}.png"
        )
    return folder


@pytest.mark.slow
def test_rows_with_loras_controls_and_second_passes(
    tmp_path: Path, small_path: Path, adapters: Path, table: Write, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is that of a single run with the same files; those of the next rows are as if there had been none."""
    second: dict[str, Any] = {"hires": 2.0, "hires_steps": 2, "hires_strength": 0.5}
    control = "adapters/control.safetensors:adapters/edges.png"
    rows: list[dict[str, Any]] = [
        {"prompt": "a cat"},
        {"prompt": "a dog", "lora": "adapters/a.safetensors:0.5"},
        {"prompt": "a cow", "lora": ["adapters/a.safetensors", "adapters/b.safetensors:0.8"]},
        {"prompt": "a pig", "lora": " adapters/a.safetensors; adapters/b.safetensors:0.8"},
        {"prompt": "a hen", "control": control},
        {"prompt": "a fox", "control": f"{control.replace('edges', 'other')}:0.5", "preprocess": "canny"},
        {"prompt": "a bee", **second},
        {"prompt": "an ant", **second, "negative_prompt": "blue"},
        {"prompt": "an owl", **second, "hires_prompt": "a large owl", "hires_upscaler": "Lanczos"},
        {"prompt": "an elk", **second, "control": control, "lora": "adapters/b.safetensors"},
        {"prompt": "a cod", "lora": "adapters/none.safetensors"},
        {"prompt": "an eel", "lora": 5},
        {"prompt": "a bat"},
    ]
    read, opened = loading._read, list[object]()
    monkeypatch.setattr(loading, "_read", lambda model, source: (opened.append(source), read(model, source))[1])
    manifest = batch(table(rows), "--shard-size", 20, "--batch-size", 2)
    assert len(opened) == 1, "a network of controls is loaded once"
    assert "none.safetensors" in manifest[10]["error"]
    assert "got lora 5, expected a text" in manifest[11]["error"]
    about = json.loads(members(tmp_path / "out" / "00000.tar")["000000001.json"])
    assert about["lora"] == [f"{adapters}/a.safetensors:0.5"]
    monkeypatch.chdir(tmp_path)
    for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
        options = {"steps": 1, "width": 32, "height": 32, **rows[i]}
        loras = options.pop("lora", ())
        loras = tuple(text.strip() for text in loras.split(";")) if isinstance(loras, str) else tuple(loras)
        pipe = ldm_lite.load(small_path, device="cpu", lora=loras)
        [wanted] = pipe.txt2img(options.pop("prompt"), seed=42 + i, output="numpy", **options)
        pixels_of_image = pixels(tmp_path / "out", i, 20)
        assert pixels_of_image.shape == wanted.shape
        assert abs(pixels_of_image - wanted).max() <= 1, rows[i]
    assert [line["error"] for i, line in enumerate(manifest) if i not in (10, 11)] == [None] * 11
    image = Image.open(adapters / "edges.png").rotate(90)
    image.save(adapters / "edges.png")
    times = (tmp_path / "out" / "00000.tar").stat().st_mtime_ns
    batch(table(rows), "--shard-size", 20, "--batch-size", 2)
    assert (tmp_path / "out" / "00000.tar").stat().st_mtime_ns != times, "the shard is made again for another image"
