"""The comparison of samplers, on the bundled model."""

import json
import os
import sys
from pathlib import Path

import compare_samplers as command
import pytest
from compare_samplers import CompareOptions as Options
from compare_samplers import compare, table
from runs import status_of

from ldm_lite import Pipeline

FEW = Options(samplers="ddim,DPM++ 2M,heun,euler_a", steps="5,10,20", reference=60)


@pytest.mark.slow
def test_more_steps_and_higher_order_come_nearer(bundled: Pipeline) -> None:
    rows = {row.name: row for row in compare(bundled, FEW)}
    for name in ("ddim", "dpmpp_2m", "heun"):
        errors = rows[name].errors
        assert errors[5] > errors[10] > errors[20]
    assert rows["dpmpp_2m"].errors[20] < rows["ddim"].errors[20] / 2
    assert rows["heun"].calls == 39
    assert rows["euler_a"].noise
    assert not rows["euler_a"].errors
    lines = table(list(rows.values()), [5, 10, 20]).splitlines()
    start = lines[0].index("err@20")
    assert all(line[start - 1] == " " != line[start] for line in lines)  # columns


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--samplers", "ddim", "--steps", "2,3", "--reference", "5", "--device", "cpu"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main([*arguments, "--out", os.fspath(tmp_path / "s.png")]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].startswith("ddim")
    assert "no chart without matplotlib: pip install matplotlib" in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.extra
@pytest.mark.slow
def test_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--samplers", "ddim", "--steps", "2,3", "--reference", "5", "--device", "cpu"]
    assert command.main([*arguments, "--out", os.fspath(tmp_path / "s.png")]) == 0
    assert (tmp_path / "s.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments", [["--steps", "a"], ["--samplers", "x"], ["--spacing", "x"], ["--steps", "0"], ["--spacings", "x"]]
)
def test_mistakes_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(command.main, *arguments, "--device", "cpu") == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.slow
def test_quality_over_cost_is_kept_and_not_run_again(
    small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    kept = tmp_path / "q.json"
    arguments = ["--compare", "--ckpt", os.fspath(small_path), "--device", "cpu", "--reference", "8", "--seed", "1"]
    arguments += ["--results", os.fspath(kept), "--out", os.fspath(tmp_path / "q.png")]
    assert command.main([*arguments, "--steps", "4"]) == 0
    points = json.loads(kept.read_text())["points"]
    plain, half, deep, gate = (points[f"{name}/4"] for name in ("ddim", "interval -0.6", "DeepCache 3", "T-GATE half"))
    assert (plain["calls"], plain["sd1"]) == (8, 8)
    assert half["calls"] == 4 + 2  # two steps of four are guided
    assert 4 < deep["sd1"] < 5.5  # calls 0 and 3 are whole: 4, and two short ones
    assert 4 < gate["sd1"] < 6
    assert points["heun/4"]["error"] > 0
    assert {point["name"] for point in points.values()} >= {"unipc", "AYS", "APG", "FreeU", "schedule cosine"}
    # a run that was stopped goes on: what is there stays, what is missing is made again the same
    removed = dict(points)
    del removed["AYS/4"]
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"points": removed}))
    assert command.main([*arguments, "--steps", "4"]) == 0
    assert json.loads(kept.read_text())["points"] == points
    capsys.readouterr()
    assert command.main([*arguments[:-4], "--results", os.fspath(kept), "--steps", "4", "--seed", "2"]) == 2
    assert "holds the results of another comparison" in capsys.readouterr().err


def test_quality_of_some_samplers_leaves_no_file_behind(
    small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    arguments = ["--compare", "--ckpt", os.fspath(small_path), "--device", "cpu", "--reference", "3", "--steps", "2"]
    assert command.main([*arguments, "--samplers", "DDIM,unipc"]) == 0
    names = [line[:28].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["ddim", "unipc", "unipc, interval -0.6"]
    assert not list(tmp_path.iterdir())
    assert command.main([*arguments, "--samplers", "DDIM,nothing"]) == 2
    assert "unknown sampler 'nothing'" in capsys.readouterr().err
