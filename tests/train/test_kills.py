"""A run that is killed at any moment, and continued, ends in the same files, bit for bit, as one that never was."""

import subprocess
import sys
from pathlib import Path

import kill_runs
import pytest


@pytest.mark.slow
def test_runs_that_are_killed_at_random_end_as_one_that_never_was(tmp_path: Path) -> None:
    """A few of two kinds; `python scripts/kill_runs.py FOLDER` kills 20 runs of every kind."""
    command = [sys.executable, kill_runs.__file__, tmp_path / "runs", "--kinds", "lora,encoded", "--runs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every run ended in the files of one that was not killed" in done.stdout


def test_files_that_differ_are_found(tmp_path: Path) -> None:
    """Of whatever kind; times in the log may."""
    folders = [tmp_path / name for name in "ab"]
    for seconds, folder in enumerate(folders):
        (folder / "earlier-1").mkdir(parents=True)
        (folder / "earlier-1" / "log.jsonl").write_text(str(seconds))
        (folder / "log.jsonl").write_text(f'{{"step": 1, "loss": 0.5, "seconds": {seconds}}}\n')
        (folder / "config.toml").write_text(f'out = "{folder}"\n')
        (folder / "lora.safetensors").write_bytes(b"same")
        kill_runs.torch.save({"step": 1, "weights": kill_runs.torch.ones(2)}, folder / "state.pt")
    assert kill_runs.contents(folders[0]) == kill_runs.contents(folders[1])
    (folders[0] / "lora.safetensors").write_bytes(b"other")
    assert kill_runs.contents(folders[0]) != kill_runs.contents(folders[1])
    (folders[1] / "lora.safetensors").write_bytes(b"other")
    kill_runs.torch.save({"step": 1, "weights": kill_runs.torch.zeros(2)}, folders[1] / "state.pt")
    assert kill_runs.contents(folders[0]) != kill_runs.contents(folders[1])
