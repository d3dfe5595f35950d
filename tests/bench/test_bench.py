"""The benchmark's command, on a miniature."""

import json
import os
from pathlib import Path

import pytest
from runs import status_of

from ldm_lite.bench import __main__ as command

QUICK = ["--device", "cpu", "--steps", "2", "--n-iter", "1", "--rounds", "2", "--configs", "original,math"]


@pytest.mark.slow
def test_the_command(
    small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("ldm_lite.bench.measure.SAMPLE_S", 0.01)
    arguments = [*QUICK, "--ckpt", os.fspath(small_path), "--out", os.fspath(tmp_path)]
    assert command.main([*arguments, "--batches", "1", "--sections", "step,image", "--resume"]) == 0  # of nothing
    captured = capsys.readouterr()
    assert "## prompt to pixels, fp32" in captured.out
    assert "no chart without matplotlib" in captured.err
    results = json.loads((tmp_path / "results.json").read_text())
    assert [table["cell"]["section"] for table in results["tables"]] == ["step", "image"]
    for table in results["tables"]:
        assert set(table["timings"]) == {"original", "math", "math (again)"}
        assert all(len(timing["samples"]) == 2 for timing in table["timings"].values())
        assert all(timing["passes"] for name, timing in table["timings"].items() if "again" not in name)
    assert "--sections step,image --batches 1" in results["about"]["command"]

    # Resumed, it measures only what is missing.
    monkeypatch.setattr("ldm_lite.bench.benchmark.ceiling", lambda device, dtype: 1.0)
    assert command.main([*arguments, "--batches", "1", "--sections", "step,decode", "--resume"]) == 0
    resumed = json.loads((tmp_path / "results.json").read_text())
    assert [table["cell"]["section"] for table in resumed["tables"]] == ["step", "image", "decode"]
    assert resumed["tables"][:2] == results["tables"]
    capsys.readouterr()
    assert command.main([*arguments, "--batches", "1", "--sections", "step"]) == 2
    assert f"{tmp_path}: holds results already: continue with --resume, or" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--configs", "fast"], "unknown 'fast' in --configs: expected some of original, "),
        (["--sections", "all"], "got --sections 'all', expected one of step, decode, image"),
        (["--dtypes", "int8"], "got --dtypes 'int8', expected one of fp32, fp16, bf16"),
        (["--batches", "two"], "got --batches 'two', expected whole numbers separated by commas"),
        (["--batches", "0"], "got --batches 0, expected 1 to 4096"),
        (["--batches", "1,,2"], "got --batches '1,,2', expected whole numbers separated by commas"),
        (["--configs", ","], "got --configs ',', expected names separated by commas"),
        (["--size", "sd9"], "unknown size 'sd9'"),
        (["--H", "65"], "got --height 65"),
        (["--sampler", "best"], "best"),
        (["--configs", "max+fast"], "unknown 'max+fast' in --configs: expected some of original, "),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], line: str, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = [] if "--size" in arguments else ["--ckpt", os.fspath(small_path)]
    assert status_of(command.main, *QUICK, *ckpt, "--out", tmp_path, *arguments) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert line in errors[0]


def test_help_does_not_import_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    for name in ("size", "ckpt", "peer", "minutes", "rounds", "configs", "resume"):
        assert f"--{name}" in text
