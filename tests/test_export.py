"""The export command without the compiler, which tests/runtime/test_aot.py runs."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs import status_of
from torch import nn

import ldm_lite
from ldm_lite import export as command
from ldm_lite.runtime import aot


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The compiler writes down the shapes of the latents that it is given, and leaves a file."""
    shapes: list[tuple[int, ...]] = []

    def write(network: nn.Module, examples: Sequence[aot.ExportInputs], path: Path) -> None:
        shapes.extend(tuple(inputs[0].shape) for inputs in examples if inputs[0] is not None)
        path.write_bytes(b"compiled")
        for inputs in examples:
            network(*inputs)

    monkeypatch.setattr(aot, "export", write)
    monkeypatch.setattr(aot, "use", lambda network, path: None)
    return shapes


def test_the_command(
    exported: list[tuple[int, ...]], small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "unet.pt2"
    arguments = ["--ckpt", os.fspath(small_path), "--device", "cpu", "--out", os.fspath(out)]
    assert command.main([*arguments, "--sizes", "64x64,128x64", "--batches", "1,2", "--chunks", "2"]) == 0
    assert exported == [(2, 4, 8, 8), (4, 4, 8, 8), (2, 4, 8, 16), (4, 4, 8, 16)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latents 2x4x8x8: differs from the network by 0.0e+00, relative"
    assert lines[-1].startswith(str(out))
    exported.clear()
    assert command.main([*arguments, "--branches", "1"]) == 0
    assert exported == [(1, 4, 8, 8)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--sizes", "64"], "got --sizes 64, expected WIDTHxHEIGHT"),
        (["--sizes", "65x64"], "expected multiples of 8"),
        (["--batches", "0"], "got --batches 0, expected 1 to 4096"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], line: str, exported: list[object], small_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(command.main, "--ckpt", small_path, "--device", "cpu", *arguments) == 2
    assert line in (shown := capsys.readouterr().err)
    assert "loaded in" not in shown  # it is known before the weights are read
    assert not exported


def test_no_file_but_a_package_is_replaced(
    exported: list[object], small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"a photo")
    assert status_of(command.main, "--ckpt", small_path, "--device", "cpu", "--out", photo) == 2
    assert f"{photo}: exists, and is not a package of ldm_lite.export" in capsys.readouterr().err
    assert photo.read_bytes() == b"a photo"


def test_load_runs_the_package(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[nn.Module, Path]] = []
    monkeypatch.setattr(aot, "use", lambda network, path: used.append((network, path)))
    pipe = ldm_lite.load(small_path, device="cpu", compiled="unet.pt2")
    assert used == [(pipe.unet, Path("unet.pt2"))]
