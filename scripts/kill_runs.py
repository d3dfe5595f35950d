"""Kill training runs at random moments and continue them: their files equal those of an undisturbed run, bit for bit.

    python scripts/kill_runs.py FOLDER                              # every kind of run, 20 of each
    python scripts/kill_runs.py FOLDER --kinds lora,two --runs 4

A run is killed by SIGKILL at a random moment from its start to its end, so also before its first save, and continued by
--resume to its end.  In a run of two processes, one is killed, in turns, and the other soon after, as torchrun does.
They train a miniature of Stable Diffusion 1 with random weights.  What may differ: the times in log.jsonl, and
earlier-1, the log of an attempt that ended before its first save.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: processes are forked from this one
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

import numpy as np
import random_checkpoint
import torch
from PIL import Image
from torch.utils._pytree import tree_flatten

from ldm_lite.batch import __main__ as batch
from ldm_lite.train import __main__ as command
from ldm_lite.train import run, trainer

LORA = ("--lora-rank", "2", "--lr", "1e-3")
KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("--lr", "1e-3", "--caption-dropout", "0.3", "--accumulate", "2", "--keep", "2", "--ema-lengths"),
    "text": ("--lr", "1e-3", "--train-text", "--weighting", "learned", "--validation", "0.4"),
    "lora": (*LORA, "--lora-text", "--lora-dropout", "0.3", "--checkpointing"),
    "dora": (*LORA, "--lora-kind", "dora", "--class-prompt", "a picture"),
    "loha": (*LORA, "--lora-kind", "loha", "--ema-decay", "0.9", "--shuffle-caption"),
    "lokr": (*LORA, "--lora-kind", "lokr", "--buckets", "--flip"),
    "embedding": ("--stage", "embedding", "--token", "picture", "--vectors", "2"),
    "control": ("--stage", "control", "--lr", "1e-3"),
    "lcm": (*LORA, "--lcm"),
    "encoded": (*LORA, "--validation", "0.4"),
    "two": (*LORA,),
    "divided": ("--lr", "1e-3", "--fsdp"),
}
PROCESSES = {"two": 2, "divided": 2}
ALL = ("--steps", "7", "--save-every", "2", "--batch-size", "2", "--warmup", "2", "--samples", "picture 1")
PATIENCE = 2.0  # seconds until a process whose peer was killed is killed, too


def prepare(folder: Path) -> None:
    """Write the model, six images with hints and captions, and the encoded images."""
    random_checkpoint.write(folder / "small.safetensors", random_checkpoint.SMALL)
    data, numbers = folder / "data", np.random.default_rng(0)
    data.mkdir()
    for i in range(6):
        size = (70, 90, 3) if i % 2 else (64, 64, 3)
        image = Image.fromarray(numbers.integers(0, 255, size, dtype=np.uint8))
        image.save(data / f"{i}.png")
        image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(data / f"{i}.hint.png")
        (data / f"{i}.txt").write_text(f"picture {i}, of noise\n")
    encode = ["--encode", "--out", folder / "latents", "--ckpt", folder / "small.safetensors", "--device", "cpu"]
    assert batch.main([os.fspath(word) for word in (data, *encode)]) == 0


def attempt(kind: str, folder: Path, out: Path, killed_at: float | None, victim: int = 0) -> bool:
    """Start or continue a run, kill one of its processes after some seconds, and return whether it had finished.

    Raises AssertionError if a process ends with an error that nobody caused.
    """
    data, model = folder / ("latents" if kind == "encoded" else "data"), folder / "small.safetensors"
    arguments = ["--data", data, "--ckpt", model, "--out", out, "--resume", "--device", "cpu", "--data-workers", "1"]
    count, port = PROCESSES.get(kind, 1), _free_port()
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            if count > 1:
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ |= {name: str(value) for name, value in places.items()}
            with open(out.with_suffix(".log"), "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os._exit(command.main([*map(os.fspath, arguments), *ALL, *KINDS[kind]]))
        children.append(child)
    if killed_at is not None:
        time.sleep(killed_at)
        os.kill(children[victim], signal.SIGKILL)
    statuses = [_status(child, None if killed_at is None else PATIENCE) for child in children]
    was_killed = statuses[victim] == -signal.SIGKILL
    allowed = {0, 1, 2, -signal.SIGKILL, -signal.SIGABRT} if was_killed else {0}  # what the other makes of it
    assert set(statuses) <= allowed, f"{out}: ended with {statuses}, see {out.with_suffix('.log')}"
    return not was_killed


def _status(child: int, patience: float | None) -> int:
    """Wait for the end of a process; kill it after `patience` seconds."""
    end = None if patience is None else time.monotonic() + patience
    while end is not None and time.monotonic() < end:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    if end is not None:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def contents(out: Path) -> dict[str, object]:
    """Return a run's files; of the log only steps and losses, since times differ, and not the lock's process."""
    paths = [
        path for path in out.rglob("*") if path.is_file() and not path.relative_to(out).parts[0].startswith("earl")
    ]
    files: dict[str, object] = {os.fspath(path.relative_to(out)): path.read_bytes() for path in paths}
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    # In its bytes the pickle also tells which strings were one object.
    state = tree_flatten(torch.load(out / "state.pt", weights_only=True))
    values = [value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in state[0]]
    kept = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    files |= {"log.jsonl": kept, "state.pt": (values, str(state[1])), "lock": None}
    return {name: content for name, content in files.items() if not name.endswith((".metadata", "loss.png"))} | {
        "config.toml": (out / "config.toml").read_text().replace(str(out), "")
    }


def differences(kind: str, folder: Path, runs: int, chance: random.Random) -> tuple[list[str], int, int]:
    """Return the files of killed runs that differ, how often they were killed, and how often before the first save."""
    start = time.monotonic()
    assert attempt(kind, folder, folder / kind / "whole", None)
    whole, expected = time.monotonic() - start, contents(folder / kind / "whole")
    wrong, kills, early = list[str](), 0, 0
    for number in range(runs):
        out = folder / kind / str(number)
        if not attempt(kind, folder, out, chance.uniform(0, whole), number % PROCESSES.get(kind, 1)):
            kills, early = kills + 1, early + (not (out / "state.pt").exists())
            attempt(kind, folder, out, None)
        after_kills = contents(out)
        names = sorted(name for name in expected | after_kills if after_kills.get(name, 0) != expected.get(name, 0))
        wrong += [f"{kind}/{number}/{name}" for name in names]
    return wrong, kills, early


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of %(default)s")
    parser.add_argument("--runs", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    trainer.CHECK_EVERY, run.SAMPLES, run.SAMPLE_STEPS = 3, 1, 2
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True)
    if os.fork() == 0:  # a process that has computed cannot be forked safely
        prepare(options.folder)
        os._exit(0)
    assert os.wait()[1] == 0
    all_wrong = list[str]()
    for kind in options.kinds.split(","):
        (options.folder / kind).mkdir()
        wrong, kills, early = differences(kind, options.folder, options.runs, random.Random(f"{options.seed} {kind}"))
        print(
            f"{kind}: killed {kills} times, {early} of them before the first save; {len(wrong)} files differ",
            flush=True,
        )
        all_wrong += wrong
    print("\n".join(all_wrong) or "every run ended in the files of one that was not killed")
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
