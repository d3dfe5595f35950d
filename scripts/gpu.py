"""Half an hour on a GPU: stage after stage, each in processes of its own, what they print kept in a file.

    python scripts/gpu.py                     # all stages that are not done; begins none after --minutes
    python scripts/gpu.py step peers          # these stages
    python scripts/gpu.py --toy               # all of them with the bundled model, on a CPU if need be: a rehearsal

OUT/STAGE.txt is there when a stage is done, with the commit, the card, the versions and the commands; a stage that was
cut off, or left something out for lack of time, goes on where it stopped.  Give the command again until it says that
all is done.  Compiled code stays in ~/.cache/ldm_lite between the commands.  The peers need `pip install diffusers
transformers`.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

LIMIT_S = 8 * 60  # of a stage, or what is left of --minutes
BENCH = "-m ldm_lite.bench --dtypes {dtype} {size} --resume --minutes {minutes} --out {out}"
STEP = f"{BENCH}/{{stage}} --sections step"
PROFILE = "scripts/profiling.py operators --rows 60 {profile}"
STAGES = {
    "probe": ["-m ldm_lite", "scripts/gpu.py rates"],
    "profile": [f"{PROFILE} --compile graph", f"{PROFILE} --compile max", f"{PROFILE} --compile off"],
    "step": [f"{STEP} --batches 1 --configs original,efficient,graph,compiled,max"],
    "peers": [f"{STEP} --batches 1 --configs graph,max --peer diffusers,diffusers-compiled"],
    "batch16": [f"{STEP} --batches {{many}} --configs original,efficient,compiled+cudnn,compiled+flash,max"],
    "memory": ["-m ldm_lite.bench --dtypes {dtype} {size} --steps 4 --memory"],
    "article": [f"{BENCH}/{{stage}} --sections image --batches 1,2,4 {{images}}"],  # the article's five rows and chart
    "kernels": [f"{STEP} --batches 1 --configs max,max+pdl,max+tma"],
    "tests": ["-m pytest -m cuda -q tests/cuda"],  # last: no measurement waits for them
}


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
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"commit {commit or 'unknown'}, {card}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run(command: list[str], output: Path, limit_s: float) -> int:
    """Run a command, unless the file says that it is done, and return its exit status; what it prints is added there.

    It is ended after limit_s seconds.  A benchmark that lacked time, and has rows without a time, is not done.
    """
    before, done = output.read_text(), f"done: {shlex.join(command)}\n"
    if done in before:
        return 0
    with open(output, "a") as file:
        file.write(f"\n$ python {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(limit_s)
            printed = output.read_text()[len(before) :]
            status = status or int("for lack of time" in printed or "| - |" in printed)
            file.write("" if status else done)
            return status
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            file.write(f"ended after {limit_s:.0f} s\n")
            return 124


def main() -> int:
    """Run the stages that are asked for and not done; return 0 if all are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=", ".join(STAGES), metavar="STAGE")
    parser.add_argument("--toy", action="store_true", help="the bundled model, few steps, any device")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this command (default: 9.5)")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    args = parser.parse_args()
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"unknown stage {unknown[0]}, wanted some of {', '.join(STAGES)}")
    if not args.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --toy rehearses the stages without")
    if not torch.cuda.is_available():
        os.environ["LDM_LITE_TEST_DEVICE"] = "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, undone = time.monotonic() + 60 * args.minutes, list[str]()
    for stage in args.stages or STAGES:
        done, part = args.out / f"{stage}.txt", args.out / f"{stage}.part"
        if done.exists():
            print(f"{stage}: done before, {done}")
            continue
        limit_s = min(LIMIT_S, deadline - time.monotonic())
        lacks = stage == "peers" and importlib.util.find_spec("diffusers") is None
        if lacks or limit_s < (1 if args.toy else 60):
            undone.append(f"{stage} (pip install diffusers transformers)" if lacks else stage)
            continue
        minutes = max(0.2, round(limit_s / 60 - 1, 1))
        values = {"stage": stage, "out": args.out, "minutes": minutes, "size": "--size sd1"}
        values |= {"dtype": "fp16", "many": 16, "images": "", "profile": "--steps 20"}
        if args.toy:
            values |= {"dtype": "fp32", "size": "--size bundled --rounds 2", "many": 2}
            values |= {"images": "--steps 2 --n_iter 1"}
            values |= {"profile": "--steps 2 --size bundled"}
        with open(part, "a") as file:
            file.write(f"{about()}\n")
        start = time.monotonic()
        print(f"{stage}: ...", flush=True)
        commands = [shlex.split(command.format(**values)) for command in STAGES[stage]]
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
