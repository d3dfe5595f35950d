"""The command line: it makes the image, knows the options of features, and ends in one line if it cannot."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ldm_lite.core
from ldm_lite.core import Feature, Pipeline, register_feature
from ldm_lite.core.__main__ import main
from ldm_lite.core.job import Job

NAME = ldm_lite.core.__name__


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    return main()


def test_it_makes_the_image_that_python_makes(pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--steps", "2", "--seed", "7", "--negative_prompt", "blue", "--sampler", "euler", "--scale", "3"]
    out = tmp_path / "cat.png"
    assert command(monkeypatch, "a cat", *flags, "--device", "cpu", "--out", str(out)) == 0
    image = pipe.txt2img("a cat", steps=2, seed=7, negative_prompt="blue", sampler="euler", scale=3)[0]
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(image))
    more = ["--image", str(out), "--strength", "0.5", "--batch_size", "2", "--steps", "2", "--device", "cpu"]
    assert command(monkeypatch, "a dog", *more, "--out", str(tmp_path / "dog.png")) == 0
    images = pipe.img2img("a dog", out, strength=0.5, batch_size=2, steps=2)
    for number, image in enumerate(images):
        assert np.array_equal(np.asarray(Image.open(tmp_path / f"dog-{number}.png")), np.asarray(image))


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", NAME, "a red apple", "--steps", "1", "--device", "cpu"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (128, 128)
    assert "emoji.safetensors: emoji, 128 px, loaded in" in done.stderr


def test_features_have_flags(
    tables: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[object, ...]] = []

    @register_feature
    @dataclass(frozen=True)
    class Typed(Feature):
        typed: int | None = None
        share: float = 0.5
        word: str = "x"
        quick: bool = False

        def change_job(self, job: Job) -> Job:
            seen.append((self.typed, self.share, self.word, self.quick))
            return job

    run = ["a cat", "--steps", "1", "--device", "cpu", "--out", str(tmp_path / "cat.png")]
    assert command(monkeypatch, *run, "--typed", "3", "--share", "0.25", "--quick") == 0
    assert command(monkeypatch, *run, "--no-quick", "--word", "7") == 0
    assert seen == [(3, 0.25, "x", True), (None, 0.5, "7", False)]
    with pytest.raises(SystemExit):
        command(monkeypatch, *run, "--typed", "three")
    assert "argument --typed: invalid int value: 'three'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "got `steps` 0, expected 1 to 1000"),
        (["--sampler", "dimm"], "unknown sampler 'dimm': did you mean ddim"),
        (["--ckpt", "none.ckpt"], "No such file or directory: 'none.ckpt'"),
        (["--image", "none.png"], "No such file or directory: 'none.png'"),
        (["--out", "none/out.png"], "No such file or directory"),
        (["--width", "65"], "expected multiples of 8"),
        (["--dtype", "fp8"], "got dtype 'fp8', expected one of fp32, fp16, bf16"),
        (["--device", "abacus"], "abacus"),
        (["--seed", "99999999999999999999"], "99999999999999999999|[Oo]verflow"),
    ],
)
def test_errors_are_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert command(monkeypatch, "a cat", "--steps", "1", *device, *flags) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()[-1:]
    assert line.startswith(f"{NAME}: ")
    assert captured.err.count(NAME) == 1
    assert re.search(message, line)


def test_help_names_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m {NAME}")
    assert all(f"--{name}" in shown for name in ("ckpt", "device", "dtype", "compile", "out", "steps", "strength"))
