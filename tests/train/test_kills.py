"""A run that is killed at any moment, and continued, ends in the same files, bit for bit, as one that never was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

# Each attempt is forked from a process that has imported everything, and killed after a random time.
CODE = """
import os, random, signal, sys, time
import ldm_lite.train.run
from ldm_lite.train import __main__ as command, run, trainer

trainer.CHECK_EVERY, run.SAMPLES, run.SAMPLE_STEPS = 3, 1, 2
wanted, out, *argv = sys.argv[1:]

def attempt(folder, seconds):
    child = os.fork()
    if child == 0:
        os._exit(command.main([*argv, "--out", folder, "--resume"]))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

start = time.perf_counter()
assert attempt(out + "/whole", None) == 0
whole, kills, finished = time.perf_counter() - start, 0, 0
random.seed(0)
while kills < int(wanted):
    status = attempt(f"{out}/{finished}", random.uniform(0.02, 0.6) * whole)
    assert status in (0, -signal.SIGKILL), status
    kills += status != 0
    finished += status == 0
    assert finished < 50, "too fast to be killed"
assert attempt(f"{out}/{finished}", None) == 0
"""


def contents(folder: Path) -> dict[str, object]:
    """Return a run's files; of the log the steps and losses, as its times differ, and not the process of the lock."""
    files: dict[str, object] = {
        os.fspath(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    # In its bytes the pickle also tells which strings were one object.
    state = tree_flatten(torch.load(folder / "state.pt", weights_only=True))
    values = [value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in state[0]]
    losses = [(row["step"], row["loss"]) for row in rows]
    return files | {"log.jsonl": losses, "state.pt": (values, str(state[1])), "lock": None}


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_ends_as_one_that_never_was(
    tmp_path: Path, folder: Path, small_path: Path
) -> None:
    """`LDM_LITE_KILLS=20` kills more often."""
    kills = os.environ.get("LDM_LITE_KILLS", "4")
    argv = [
        "--data",
        folder,
        "--ckpt",
        small_path,
        "--steps",
        "7",
        "--save-every",
        "2",
        "--batch-size",
        "2",
        "--accumulate",
    ]
    argv += ["2", "--lr", "1e-3", "--warmup", "2", "--samples", "picture 1", "--data-workers", "1"]
    argv += ["--device", "cpu"]
    more = {**os.environ, "OMP_NUM_THREADS": "1"}
    driver = [sys.executable, "-c", CODE, kills, os.fspath(tmp_path), *map(os.fspath, argv)]
    subprocess.run(driver, check=True, env=more, timeout=3000)
    whole = contents(tmp_path / "whole")
    assert len(whole) > 8
    for path in tmp_path.iterdir():
        found = contents(path)
        names = sorted(name for name in whole | found if name not in found or whole.get(name, 0) != found[name])
        assert not names, f"of run {path.name} other than of the whole one: {', '.join(names)}"
