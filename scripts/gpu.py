"""Eight minutes on a GPU that may disappear at any moment: stage after stage, the most valuable first.

    python scripts/gpu.py prepare             # on a machine with a network: wheels that a bare machine lacks
    python scripts/gpu.py                     # the stages that are not done, until --minutes are over
    python scripts/gpu.py step memory         # these stages
    python scripts/gpu.py emoji               # train the bundled model anew, in all of the time
    python scripts/gpu.py --toy               # all of them with the bundled model, on a CPU if need be: a rehearsal

Each stage runs in separate processes. Their output is in OUT/report.txt and on stdout at once, and a benchmark's rows
in OUT/STAGE/results.md too.  A stage is done when its commands have ended, also if they failed; one that took too long
is killed with all of its processes, and continues where it stopped in the next run, after those that have not
begun: repeat the command until it says that all is done.  emoji cannot be continued: it takes another OUT.

The machine needs torch and numpy alone: this checkout is found where it is, and packages come from WHEELS, which
`prepare` fills for a version of Python.  emoji needs the files that weights/README.md names.
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
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "outputs" / "wheels"  # which git ignores
NEEDED = ("PIL", "numpy", "safetensors", "tokenizers", "huggingface_hub", "tqdm")  # by the package that is measured
PACKAGES = "diffusers transformers tokenizers safetensors huggingface_hub pillow pytest pytest-xdist"
GRACE_S = 10  # between the signal that asks a stage's processes to end, and the one that ends them
LEAST_S = 10  # that a stage begins with
BENCH = "-m ldm_lite.bench --dtypes {dtype} {size} --resume --minutes {minutes} --out {out}/{stage}"
STEP = f"{BENCH} --sections step --batches 1"
MEMORY = "-m ldm_lite.bench --dtypes {dtype} {size} --steps 4 --memory --modes"
PROFILE = "scripts/profiling.py operators {profile} --classes --compile"
STAGES = {  # the most seconds of each, and its commands
    "probe": (15, ["scripts/gpu.py rates"]),
    "step": (50, [f"{PROFILE} graph"]),  # in which Triton compiles some 20 kernels
    "attention": (15, ["scripts/profiling.py attention-kernels {shapes}"]),
    "compare": (  # in one run; each is timed as soon as it is ready
        240,
        [f"{STEP} --configs graph,compiled-sdpa,max --peer diffusers,diffusers-compiled --first-minutes {{first}}"],
    ),
    "batches": (  # of the larger one at first
        60,
        [f"{BENCH} --sections step --batches {batch} --configs graph,max" for batch in ("{many}", "{some}")],
    ),
    "memory": (30, [f"{MEMORY} plain,lowest"]),
    "tests": (60, ["-m pytest -m cuda -q --tb=short --no-summary -p no:cacheprovider -n {processes} tests/cuda"]),
    # The second eight minutes.
    "article": (300, [f"{BENCH} --sections image --batches 1,2,4 {{images}}"]),  # the article's five rows and chart
    "memory-rest": (100, [f"{MEMORY} others"]),
    "profile-max": (60, [f"{PROFILE} max"]),
    "training": (90, ["scripts/profiling.py training {training}"]),
    "kernels": (200, [f"{STEP} --configs max,max+pdl,max+tma,graph+cudnn"]),
    "emoji": (600, ["scripts/train_emoji.py whole --minutes {minutes} --out {out}/emoji {emoji}"]),
}
ALONE = ("emoji",)  # stages that are run only if they are named


# ---- packages -------------------------------------------------------------------------------------------------------


def prepare(python: str) -> None:
    """Fill WHEELS with what PACKAGES need for a version of Python on Linux, but numpy, which torch has with it."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    how = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms, f"--dest={WHEELS}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *how, *PACKAGES.split()], check=True)
    for path in WHEELS.glob("numpy-*"):
        path.unlink()
    size = sum(path.stat().st_size for path in WHEELS.iterdir())
    print(f"{len([*WHEELS.iterdir()])} wheels for Python {python}, {size / 2**20:.0f} MiB, in {WHEELS}")


def unpacked(wheels: Path, folder: Path) -> Path:
    """Unpack wheels into a folder, unless it has them, and return it.  Raises ValueError for those of another Python.

    Together they are versions that fit each other, so they go before those of the machine.
    """
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(wheels.glob("*.whl")):
        python, abi, _ = wheel.stem.rsplit("-", 3)[1:]
        if here not in python and not python.startswith("py") and abi != "abi3":
            version = ".".join(map(str, sys.version_info[:2]))
            raise ValueError(f"{wheel.name} is for another Python: python scripts/gpu.py prepare --python {version}")
        if not (marker := folder / f"{wheel.name}.unpacked").exists():
            zipfile.ZipFile(wheel).extractall(folder)
            marker.touch()
    return folder


def missing(names: Iterable[str], paths: list[Path]) -> list[str]:
    """Return the packages of these that are neither in the paths nor on this machine."""
    return [name for name in names if PathFinder.find_spec(name, [*map(str, paths), *sys.path]) is None]


# ---- stages ---------------------------------------------------------------------------------------------------------


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
    """Print the commit, the card and the versions."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"commit {commit or 'unknown'}, {card}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run(command: list[str], report: Path, limit_s: float) -> int:
    """Run a command for so many seconds at most, and return its exit status, 124 if it was ended.

    What it prints is added to the report.
    """
    with open(report, "ab", buffering=0) as file:
        file.write(f"\n$ python {shlex.join(command)}\n".encode())
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
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
        ended = "ended" if status == 124 else f"status {status}"
        file.write(f"{ended} after {time.monotonic() - start:.0f} s\n".encode())
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


def run_stage(stage: str, report: Path, limit_s: float, values: dict[str, object]) -> bool:
    """Run a stage's commands, and return whether it is done: all have ended, and none lacked time."""
    commands, start, is_done = STAGES[stage][1], time.monotonic(), True
    for template in commands:
        left = limit_s - (time.monotonic() - start)
        share = left if template is commands[-1] else 0.6 * left
        minutes = max(0.1, round(share / 60 - 0.1, 2))  # in which a benchmark ends by itself
        text = template.format(**values, stage=stage, minutes=minutes)
        before = report.stat().st_size
        status = run(shlex.split(text), report, share)
        results = Path(shlex.split(str(values["out"]))[0]) / stage / "results.md"
        if status == 124 and results.exists():  # which it prints at its end
            with open(report, "a") as file:
                file.write(results.read_text())
        with open(report, "rb") as file:
            file.seek(before)
            is_done &= status != 124 and b"for lack of time" not in file.read()
    return is_done


def main() -> int:
    """Run the stages that are asked for and not done; return 0 if all are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"prepare, or some of {', '.join(STAGES)}", metavar="STAGE")
    parser.add_argument("--toy", action="store_true", help="the bundled model, few steps, any device")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this command (default: 8)")
    parser.add_argument("--out", type=Path, help="default: outputs/gpu, with --toy outputs/gpu-toy")
    parser.add_argument("--python", default="3.12", help="that prepare is for (default: 3.12)")
    args = parser.parse_args()
    if args.stages == ["prepare"]:
        prepare(args.python)
        return 0
    out = (args.out or ROOT / "outputs" / ("gpu-toy" if args.toy else "gpu")).absolute()  # a rehearsal does no stage
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"unknown stage {unknown[0]}, expected some of {', '.join(STAGES)}")
    if not args.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --toy rehearses the stages without")
    if "emoji" in args.stages and not args.toy and "EMOJI_PICTURES" not in os.environ:
        parser.error("emoji needs EMOJI_PICTURES, the files that weights/README.md names")
    if not torch.cuda.is_available():
        os.environ["LDM_LITE_TEST_DEVICE"] = "cpu"
    paths = [ROOT]
    if WHEELS.is_dir():
        names = " ".join(sorted(path.name for path in WHEELS.iterdir()))
        try:
            paths.append(unpacked(WHEELS, Path(tempfile.gettempdir()) / f"wheels-{zlib.crc32(names.encode()):x}"))
        except ValueError as error:
            print(f"going on without wheels: {error}", flush=True)
    if lacking := missing(NEEDED, paths):  # else all stages would fail at once, and count as done
        version = ".".join(map(str, sys.version_info[:2]))
        parser.error(
            f"no {', '.join(lacking)}: python scripts/gpu.py prepare --python {version}, where there is a network"
        )
    if lacking := missing(("diffusers", "pytest", "xdist"), paths):
        print(f"going on without {', '.join(lacking)}: rows, or the tests, will be missing", flush=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    if importlib.util.find_spec("pytest_benchmark"):  # which warns beside xdist
        os.environ["PYTEST_ADDOPTS"] = "-p no:benchmark"
    out.mkdir(parents=True, exist_ok=True)
    deadline, report = time.monotonic() + 60 * args.minutes, out / "report.txt"
    report.touch()
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what runs is ended too
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    values: dict[str, object] = {"out": shlex.quote(os.fspath(out)), "size": "--size sd1", "dtype": "fp16"}
    values |= {"many": 16, "some": 4, "images": "", "profile": "--steps 20", "shapes": "", "first": 2.5}
    values |= {"processes": 8, "training": "", "emoji": ""}
    if args.toy:
        values |= {"dtype": "fp32", "size": "--size bundled --rounds 2", "many": 2, "some": 1, "processes": 2}
        values |= {"images": "--steps 2 --n_iter 1", "profile": "--steps 2 --size bundled", "shapes": "--toy"}
        values |= {"training": "--batch 2 --steps 2"}
        values |= {"emoji": "--batch-size 2 --scenes 8 --steps 2 --renderer-options '{\"emoji\":20}'"}
    stages = args.stages or [stage for stage in STAGES if stage not in ALONE]
    lines, undone = report.read_text().splitlines(), list[str]()
    stages.sort(key=lambda stage: f"== {stage} ==" in lines)  # what was cut goes on after what has not begun
    for stage in stages:
        limit_s = min(STAGES[stage][0] * (4 if args.toy else 1), deadline - time.monotonic())
        if f"done: {stage}" in lines:
            print(f"{stage}: done before, {report}")
        elif limit_s < (1 if args.toy else LEAST_S):
            undone.append(stage)
        else:
            with open(report, "a") as file:
                file.write(f"\n== {stage} ==\n{about()}\n")
            print(f"{stage}: ...", flush=True)
            start = time.monotonic()
            is_done = run_stage(stage, report, limit_s, values)
            words = f"done: {stage}" if is_done else f"not done: {stage}"
            with open(report, "a") as file:
                file.write(f"{words}\n")
            print(f"{words}, {time.monotonic() - start:.0f} s, {report}", flush=True)
            undone += [] if is_done else [stage]
    print(f"not done: {', '.join(undone)}" if undone else "all done")
    return 1 if undone else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["rates"]:
        rates()
    else:
        sys.exit(main())
