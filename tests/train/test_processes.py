"""Several processes, as torchrun starts them: their steps are those of one, and a killed run goes on anywhere."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training import load_options, losses, options, train
from waiting import wait_for

from ldm_lite.train import distributed

STEPS = 6
CODE = """
import os, sys
from ldm_lite.train import __main__ as command, run, trainer
trainer.CHECK_EVERY = run.SAMPLES = 1
run.SAMPLE_STEPS = 2
class Last:
    def __del__(self, write=os.write):
        write(2, b"Python shuts down")
last = Last()
sys.exit(command.main(sys.argv[1:]))
"""
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": 3, "accumulate": 2, "warmup": 2, "save_every": 1}


def torchrun(processes: int, folder: Path, small_path: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    flags += ["--lr=1e-3", "--samples=picture 1", "--data-workers=0", "--device=cpu", "--dtype=fp32", *more]
    code = out.with_suffix(".py")
    code.write_text(CODE)
    run = [os.fspath(code), f"--data={folder}", f"--ckpt={small_path}", f"--out={out}", *flags]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*start, *run], stderr=subprocess.PIPE, text=True, env=quiet)


def state(out: Path) -> dict[str, Any]:
    """What a run goes on from, put together if it is divided."""
    content = torch.load(out / "state.pt", weights_only=True)
    if "divided" not in content:
        return content
    dcp_to_torch_save(out / content["divided"], out.with_suffix(".whole"))
    parts = torch.load(out.with_suffix(".whole"), weights_only=True)
    averages = {int(i): values for i, values in parts.pop("optimizer").items()}
    return content | parts | {"optimizer": {"state": averages}}


def gradients(out: Path) -> torch.Tensor:
    """Return all gradients of the first step, or their mean with later ones: AdamW's averages hold a tenth of it."""
    averages = state(out)["optimizer"]["state"]
    assert len(averages) > 200
    return torch.cat([10 * averages[i]["exp_avg"].flatten() for i in sorted(averages)])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_only_an_error_of_the_exchange_means_a_process_that_is_gone() -> None:
    with pytest.raises(ChildProcessError, match="process 0 of 1 lost the others"), distributed.reported_peers():
        raise RuntimeError("gloo: Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes do not fit"), distributed.reported_peers():
        raise RuntimeError("shapes do not fit")


def test_two_processes_sum_tell_and_wait(tmp_path: Path) -> None:
    """Over gloo: the second one does not pass the barrier before the first, which comes late."""

    def meet(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2)
        assert distributed.all_reduce_sum(torch.tensor(rank + 1.0)) == 3
        assert distributed.broadcast(f"process {rank}") == "process 0"
        if rank == 0:
            time.sleep(1)
            (tmp_path / "late").touch()
        distributed.barrier()
        assert (tmp_path / "late").exists()

    processes = [multiprocessing.get_context("fork").Process(target=meet, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """The first with whole weights in both; the second, resumed from one process, with divided ones."""
    alone, two = tmp_path / "one", tmp_path / "two"
    pair = torchrun(2, folder, small_path, two, "--minutes=0")
    train(options(folder, alone, **SETTINGS, minutes=0.0), load_options(small_path, dtype="fp32"))
    _, errors = pair.communicate(timeout=300)
    assert pair.returncode == 0, errors
    wanted, got = gradients(alone), gradients(two)
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert "Python shuts down" not in errors

    shutil.copytree(alone, tmp_path / "divided")
    pair = torchrun(2, folder, small_path, tmp_path / "divided", "--minutes=0", "--resume", "--fsdp")
    train(options(folder, alone, **SETTINGS, minutes=0.0, resume=True), load_options(small_path, dtype="fp32"))
    _, errors = pair.communicate(timeout=300)
    assert pair.returncode == 0, errors
    wanted, got = gradients(alone), gradients(tmp_path / "divided")
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert losses(tmp_path / "divided") == pytest.approx(losses(alone), rel=1e-6)
    path = train(
        options(folder, tmp_path / "divided", **SETTINGS, minutes=0.0, resume=True),
        load_options(small_path, dtype="fp32"),
    )
    assert state(path.parent)["step"] == 3


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_goes_on_in_one_process_or_in_three(
    tmp_path: Path, folder: Path, small_path: Path
) -> None:
    alone, two = tmp_path / "one", tmp_path / "two"
    pair = torchrun(2, folder, small_path, two, "--lora-rank=2")
    train(options(folder, alone, **SETTINGS, lora_rank=2), load_options(small_path, dtype="fp32"))
    wait_for((two / "state.pt").exists, "a first state", process=pair, seconds=300)
    os.kill(children(pair.pid)[1], signal.SIGKILL)
    _, errors = pair.communicate(timeout=300)
    assert pair.returncode != 0
    assert "a bug in ldm_lite" not in errors
    assert 1 <= state(two)["step"] < STEPS, "killed too late"

    shutil.copytree(two, tmp_path / "three")
    three = torchrun(3, folder, small_path, tmp_path / "three", "--lora-rank=2", "--resume")
    train(options(folder, two, **SETTINGS, lora_rank=2, resume=True), load_options(small_path, dtype="fp32"))
    _, errors = three.communicate(timeout=300)
    assert three.returncode == 0, errors
    for out in (two, tmp_path / "three"):
        assert state(out)["step"] == STEPS
        assert state(out)["settings"] == state(alone)["settings"]
        assert (out / "lora.safetensors").is_file()
        # Adam divides gradients near 0 by their size, so their rounding shows in the weights; losses hardly change.
        assert losses(out) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_divided_weights_are_validated_by_all_processes(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """One batch for two processes: the second computes it too, or the first would wait for it for ever."""
    out = tmp_path / "run"
    pair = torchrun(2, folder, small_path, out, "--fsdp", "--validation=0.5", "--steps=1")
    _, errors = pair.communicate(timeout=120)
    assert pair.returncode == 0, errors
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation" in row] == [0, 1]


@pytest.mark.slow
def test_a_divided_state_is_written_and_read_in_parts_by_any_number_of_processes(
    tmp_path: Path, folder: Path, small_path: Path
) -> None:
    """Written by two; read by two, three and one it holds the same, and goes on with the same losses."""
    two = tmp_path / "two"
    pair = torchrun(2, folder, small_path, two, "--fsdp", "--minutes=0", "--ema-decay=0.5")
    _, errors = pair.communicate(timeout=300)
    assert pair.returncode == 0, errors
    assert (two / "state.pt").stat().st_size < 20_000
    sizes = [path.stat().st_size for path in sorted((two / "state-0000001").glob("*.distcp"))]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * sum(sizes), "each process writes its own parts"
    checkpoint = load_file(two / "model.safetensors")
    assert all(torch.isfinite(value.float()).all() for value in checkpoint.values())

    runs = {}
    for count in (2, 3):
        shutil.copytree(two, tmp_path / f"of {count}")
        run = torchrun(count, folder, small_path, tmp_path / f"of {count}", "--fsdp", "--resume", "--ema-decay=0.5")
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
        runs[count] = tmp_path / f"of {count}"
        assert [path.name for path in runs[count].glob("state-*")] == [f"state-{STEPS:07}"], "older ones are removed"
    shutil.copytree(two, tmp_path / "of 1")
    path = train(
        options(folder, tmp_path / "of 1", **SETTINGS, ema_decay=0.5, resume=True),
        load_options(small_path, dtype="fp32"),
    )
    assert not list(path.parent.glob("state-*"))
    for out in runs.values():
        assert losses(out) == pytest.approx(losses(path.parent), rel=1e-4)
        assert load_file(out / "model.safetensors").keys() == checkpoint.keys()
        assert state(out).keys() - {"divided"} == state(path.parent).keys()
