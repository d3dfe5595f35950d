"""The driver of the measurements on a GPU: its stages end in time, go on, and are published; in miniature on a CPU."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import gpu_day
import pytest
import render_emoji
from gpu_day import STAGES, Stage

from ldm_lite.cli import flags
from ldm_lite.cli.options import LoadOptions
from ldm_lite.train.options import TrainOptions, check

SCRIPT = """
import os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
(out / "runs").write_text((out / "runs").read_text() + "x" if (out / "runs").exists() else "x")
if sys.argv[2] == "sleep":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (out / "child").write_text(str(child.pid))
    time.sleep(60)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def stage(name: str, script: Path, what: str, limit_s: float = 60, needed: bool = False) -> Stage:
    return Stage(name, name, limit_s, "nothing", f"{script} {{dir}} {what}", needed=needed)


@pytest.mark.slow
def test_a_stage_ends_at_its_limit_with_all_its_processes(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = gpu_day.run(out, [stage("slow", script, "sleep", limit_s=3), stage("next", script, "0")], toy=True)
    assert [each["status"] for each in state.values()] == ["out of time", "done"]
    child = int((out / "slow" / "child").read_text())
    for _ in range(100):
        if not gpu_day._alive(child):
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("a process that the stage started is still running")


def test_what_is_done_is_not_done_again(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = [stage("one", script, "0"), stage("two", script, "1", needed=True), stage("three", script, "0")]
    for _ in range(2):
        state = gpu_day.run(out, stages, toy=True)
    assert {name: each["status"] for name, each in state.items()} == {"one": "done", "two": "failed"}
    assert [len((out / name / "runs").read_text()) for name in ("one", "two")] == [1, 2]
    written = json.loads((out / "results.json").read_text())
    assert written["stages"]["one"]["command"] == f"python {script} OUT/one 0"
    assert written["commit"]


def test_training_that_is_not_at_its_last_step_goes_on_and_is_evaluated_again(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert gpu_day._trained("-m ldm_lite.bench", log)
    assert not gpu_day._trained("-m ldm_lite.train --steps 30", log)
    log.write_text('{"step": 20}\n')
    assert not gpu_day._trained("-m ldm_lite.train --steps 30", log)
    log.write_text('{"step": 20}\n{"step": 30}\n')
    assert gpu_day._trained("-m ldm_lite.train --steps 30", log)
    out = tmp_path / "out"
    failing = [stage("one", script, "1"), replace(stage("two", script, "0"), after="one")]
    for _ in range(2):
        gpu_day.run(out, failing, toy=True)
    assert [len((out / name / "runs").read_text()) for name in ("one", "two")] == [2, 2]


def test_publishing_replaces_the_results_of_an_earlier_run(tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    (out / "kernels").mkdir(parents=True)
    page.write_text("# Performance\n\nText.\n")
    for microseconds in (3.0, 4.0):
        kernels = {"probe": {"device": "X"}, "dtype": "fp16", "attention, batch 1": {"8 to 8": {"sdpa": microseconds}}}
        (out / "kernels" / "kernels.json").write_text(json.dumps(kernels))
        (out / "kernels" / "results.png").write_bytes(b"chart")
        (out / "state.json").write_text(
            json.dumps({"kernels": {"status": "done", "command": "python x", "seconds": 1}})
        )
        (out / "results.md").write_text(gpu_day.markdown(out))
        assert gpu_day.main(["publish", "--out", str(out), "--page", str(page)]) == 0
        page.write_text(page.read_text() + "\nMore.\n" if microseconds == 3.0 else page.read_text())
    text = page.read_text()
    assert text.startswith("# Performance\n\nText.\n")
    assert text.endswith("More.\n")
    assert text.count("## On a GPU") == text.count("![Kernels one by one") == 1
    assert "| 8 to 8 | 4.0 |" in text
    assert "3.0" not in text
    assert (tmp_path / "gpu-kernels.png").read_bytes() == b"chart"


def test_an_unknown_stage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.main(["run", "--only", "steps"])
    assert "no stage is named steps" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["autoencoder", "text", "train"])
def test_the_options_of_training_stages_are_valid(name: str) -> None:
    (found,) = (each for each in STAGES if each.name == name)
    for command in (found.command, found.toy):
        words = command.format(dir="here", out="out").split()
        (options, load), _ = flags.parse(words[2:], "train", "", (TrainOptions, LoadOptions))
        check(options, load)
        scenes = json.loads(options.renderer_options)
        assert words[:2] == ["-m", "ldm_lite.train"]
        assert render_emoji.Scenes(128, (), jitter=scenes.pop("jitter"), font=None, **scenes).split == "train"
        assert options.resume


LEFT_OUT = ("memory", "tuned", "autoencoder", "text", "train", "evaluate")


@pytest.mark.slow
def test_the_stages_run_in_miniature(tmp_path: Path) -> None:
    """Detached, followed to their end, and formatted; those left out take minutes on a CPU."""
    names = [each.name for each in STAGES if each.name not in LEFT_OUT]
    out = tmp_path / "out"
    assert gpu_day.main(["run", "--toy", "--detach", "--out", str(out), "--only", ",".join(names)]) == 0
    assert gpu_day.main(["follow", "--seconds", "900", "--out", str(out)]) == 0
    state = gpu_day.read_state(out)
    assert {name: each["status"] for name, each in state.items()} == dict.fromkeys(names, "done")
    page = (out / "results.md").read_text()
    assert all(f"### {each.title}" in page for each in STAGES if each.name in names)
    assert "| 1 | original |" in page
    assert "3 passed" in page
