"""Ten minutes on a GPU that may end at any moment: stage after stage, what is worth most first.

    python scripts/gpu.py                     # all stages but emoji that are not done; begins none after --minutes
    python scripts/gpu.py step peers          # these stages
    python scripts/gpu.py emoji               # the bundled model anew, in all of the time
    python scripts/gpu.py --toy               # all of them with the bundled model, on a CPU if need be: a rehearsal

Each stage has processes of its own.  What they print is in OUT/STAGE.part and on stdout at once, and a benchmark's rows
in OUT/STAGE/results.md; OUT/STAGE.txt is there when a stage is done.  A stage that takes too long is ended with all of
its processes, and one that was cut off, or left something out for lack of time, goes on where it stopped: give the
command again until it says that all is done.  emoji does not go on: it takes another OUT.  Compiled code stays in
~/.cache/ldm_lite between the commands.  The peers need `pip install diffusers transformers`, emoji the files that
weights/README.md names.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

GRACE_S = 10  # between the signal that asks a stage's processes to end, and the one that ends them
LEAST_S = 20  # that a stage begins with
BENCH = "-m ldm_lite.bench --dtypes {dtype} {size} --resume --minutes {minutes} --out {out}/{stage}"
STEP = f"{BENCH} --sections step --batches 1"
PROFILE = "scripts/profiling.py operators --rows 60 {profile}"
STAGES = {  # the most seconds of each, and its commands
    "probe": (40, ["scripts/gpu.py rates", "-m ldm_lite"]),
    "step": (75, [f"{STEP} --configs original,efficient,graph"]),  # nothing is compiled
    "tests": (170, ["-m pytest -m cuda -q --tb=short --no-summary -n {processes} tests/cuda"]),
    "peers": (75, [f"{STEP} --configs graph --peer diffusers"]),
    "compiled": (180, [f"{STEP} --configs graph,compiled"]),
    "peers-compiled": (240, [f"{STEP} --configs graph,compiled --peer diffusers-compiled"]),
    "max": (240, [f"{STEP} --configs graph,max"]),
    "batch16": (200, [f"{BENCH} --sections step --batches {{many}} --configs original,efficient,graph+cudnn,graph"]),
    "memory": (120, ["-m ldm_lite.bench --dtypes {dtype} {size} --steps 4 --memory"]),
    "profile": (120, [f"{PROFILE} --compile graph", f"{PROFILE} --compile max"]),
    "article": (300, [f"{BENCH} --sections image --batches 1,2,4 {{images}}"]),  # the article's five rows and chart
    "kernels": (240, [f"{STEP} --configs max,max+pdl,max+tma"]),
    "emoji": (600, ["scripts/train_emoji.py whole --minutes {minutes} --out {out}/emoji {emoji}"]),
}
ALONE = ("emoji",)  # stages that are run only if they are named


def rates() -> None:
    """Print the card's clocks, and the rates of large products and copies, which bound everything else."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,memory.used"
        subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], check=False)
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info()
        print(f"memory in use with a CUDA context and nothing else: {(total - free) / 2**20:.0f} MiB")
    size = 8192 if device.type == "cuda" else 512
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for what, work, amount, unit in (
            (f"{size} x {size} product", lambda a=a, b=b: a @ b, 2e-12 * size**3, "TFLOP/s"),
            ("copy", lambda a=a, b=b: b.copy_(a), 2e-9 * a.nbytes, "GB/s"),
        ):
            seconds = []
            for _ in range(10):
                start = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            print(f"{dtype}, {what}: best {amount / min(seconds):.1f} {unit}, worst {amount / max(seconds):.1f}")


def about() -> str:
    """Tell the commit, the card and the versions."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"commit {commit or 'unknown'}, {card}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run(command: list[str], output: Path, limit_s: float) -> int:
    """Run a command, unless the file says that it is done, and return its exit status; what it prints is added there.

    It is ended after limit_s seconds.  A benchmark that lacked time, and has rows without a time, is not done.
    """
    before, done = output.read_text(), f"done: {shlex.join(command)}\n"
    if done in before:
        return 0
    with open(output, "ab", buffering=0) as file:
        file.write(f"\n$ python {shlex.join(command)}\n".encode())
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

        def copy() -> None:
            assert process.stdout is not None
            with process.stdout as pipe:
                for line in pipe:
                    last = line.rstrip(b"\r\n").rpartition(b"\r")[2] + b"\n"  # state of a progress bar
                    file.write(last)
                    sys.stdout.buffer.write(last)
                    sys.stdout.buffer.flush()

        copying = threading.Thread(target=copy, daemon=True)
        copying.start()
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
            copying.join(GRACE_S)  # a process that left the group may keep the pipe open
        printed = output.read_text()[len(before) :]
        status = status or int("for lack of time" in printed or "| - |" in printed)
        file.write({0: done, 124: f"ended after {limit_s:.0f} s\n"}.get(status, f"status {status}\n").encode())
        return status


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and those that it started: it may save what it has first, unless that takes long."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lacks(stage: str) -> str:
    """Return what a stage lacks here, or ""."""
    if stage.startswith("peers") and importlib.util.find_spec("diffusers") is None:
        return "pip install diffusers transformers"
    return "EMOJI_PICTURES" if stage == "emoji" and "EMOJI_PICTURES" not in os.environ else ""


def main() -> int:
    """Run the stages that are asked for and not done; return 0 if all are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=", ".join(STAGES), metavar="STAGE")
    parser.add_argument("--toy", action="store_true", help="the bundled model, few steps, any device")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this command (default: 9.5)")
    parser.add_argument("--out", type=Path, help="default: outputs/gpu, with --toy outputs/gpu-toy")
    args = parser.parse_args()
    args.out = args.out or Path("outputs/gpu-toy" if args.toy else "outputs/gpu")  # a rehearsal does no stage
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"unknown stage {unknown[0]}, expected some of {', '.join(STAGES)}")
    if not args.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --toy rehearses the stages without")
    if not torch.cuda.is_available():
        os.environ["LDM_LITE_TEST_DEVICE"] = "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, undone = time.monotonic() + 60 * args.minutes, list[str]()
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what runs is ended too
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for stage in args.stages or [stage for stage in STAGES if stage not in ALONE]:
        done, part = args.out / f"{stage}.txt", args.out / f"{stage}.part"
        if done.exists():
            print(f"{stage}: done before, {done}")
            continue
        most_s, templates = STAGES[stage]
        limit_s = min(most_s, deadline - time.monotonic())
        lacking = "" if args.toy else lacks(stage)
        if lacking or limit_s < (1 if args.toy else LEAST_S):
            undone.append(f"{stage} ({lacking})" if lacking else stage)
            continue
        values = {"stage": stage, "out": shlex.quote(os.fspath(args.out))}
        values |= {"minutes": max(0.1, round(limit_s / 60 - 0.3, 2))}
        values |= {"size": "--size sd1", "dtype": "fp16", "many": 16, "images": "", "profile": "--steps 20"}
        values |= {"processes": 8, "emoji": ""}
        if args.toy:
            values |= {"dtype": "fp32", "size": "--size bundled --rounds 2", "many": 2, "processes": 2}
            values |= {"images": "--steps 2 --n_iter 1", "profile": "--steps 2 --size bundled"}
            values |= {"emoji": "--batch-size 2 --scenes 8 --steps 2 --renderer-options '{\"emoji\":20}'"}
        with open(part, "a") as file:
            file.write(f"{about()}\n")
        start = time.monotonic()
        print(f"{stage}: ...", flush=True)
        commands = [shlex.split(command.format(**values)) for command in templates]
        statuses = [run(command, part, limit_s - (time.monotonic() - start)) for command in commands]
        if any(statuses):
            undone.append(stage)
            print(f"{stage}: not done ({statuses}), {part}", flush=True)
        else:
            part.rename(done)
            print(f"{stage}: {time.monotonic() - start:.0f} s, {done}", flush=True)
    print(f"not done: {', '.join(undone)}" if undone else "all done")
    return 1 if undone else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["rates"]:
        rates()
    else:
        sys.exit(main())
