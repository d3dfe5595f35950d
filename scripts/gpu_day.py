"""Everything that is to be measured on a GPU, as one command of stages.

    python scripts/gpu_day.py run --detach           # all stages, in a process that outlives this command
    python scripts/gpu_day.py follow --seconds 500   # print its progress until it ends
    python scripts/gpu_day.py run                    # goes on: what is done is not done again
    python scripts/gpu_day.py publish                # puts the results into docs/performance.md

Each stage is a process with a time limit, and leaves what it has when it is killed.  --out holds a folder and a log for
each stage, state.json, results.json and results.md.  diffusers is a peer: without it the stages name it as missing.
The last four (--only autoencoder,text,train,evaluate) train the bundled model anew and evaluate it, and need the emoji
font.  A stage of these that is run again goes on; OUT/train/run/model.safetensors is the file, below 40 MB.
--toy runs the same stages on a CPU in miniature.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- gpu_day.py begins -->", "<!-- gpu_day.py ends -->"
State = dict[str, dict[str, Any]]  # stage -> status, seconds, command


@dataclass(frozen=True)
class Stage:
    """A command, in which {dir} is the stage's own folder and {out} that of all, and the same at toy size."""

    name: str
    title: str
    limit_s: float
    command: str
    toy: str
    environment: Mapping[str, str] | None = None
    needed: bool = False  # the stages after it wait until it succeeds
    after: str | None = None  # it is done again when this one has run


def _bench(title: str, name: str, limit_s: float, arguments: str, toy: str, **environment: str) -> Stage:
    common = f"-m ldm_lite.bench --out {{dir}} --resume --minutes {0.85 * limit_s / 60:.1f}"
    toy = f"--size bundled --device cpu --dtypes fp32 --threads 2 --rounds 2 --steps 2 --n-iter 1 {toy}"
    return Stage(name, title, limit_s, f"{common} {arguments}", f"{common} {toy}", environment)


STEP = "--device cuda --sections step --dtypes fp16"
IMAGE = "--device cuda --sections image --dtypes fp16"
# Braces are doubled, since commands are formatted, and there are no spaces: it is one argument.
SCENES = '{{"two":0.35,"counts":0.15,"tinted":0.2,"jitter":0.2,"free":0.5,"split":"train"}}'
TRAIN = f"-m ldm_lite.train --renderer scripts/render_emoji.py --renderer-options {SCENES} --out {{dir}}/run --resume"
VAE = "--stage autoencoder --preset emoji128 --vae weights/emoji.safetensors"
TEXT = "--stage text --preset emoji128 --vae {out}/autoencoder/run/model.safetensors"
DIFFUSION = "--ckpt {out}/text/run/model.safetensors"
TINY = "--steps 1 --batch 1 --workers 0 --device cpu"
EVALUATE = "scripts/evaluate_emoji.py --ckpt {out}/train/run/model.safetensors --out {dir}/pictures"
EVALUATE += " --kinds one,tinted,two,counted --split held_out"
STAGES = (
    Stage(
        "machine",
        "The machine",
        60,
        "scripts/gpu_kernels.py {dir}/kernels.json --probe",
        "scripts/gpu_kernels.py {dir}/kernels.json --probe --device cpu",
        needed=True,
    ),
    Stage(
        "tests",
        "The tests of the GPU",
        300,
        "-m pytest -m cuda -q -p no:cacheprovider tests/cuda --deselect tests/cuda/test_cuda.py::test_kernels",
        "-m pytest -m cuda -q -p no:cacheprovider tests/cuda -k precisions",
        {"LDM_LITE_TEST_DEVICE": "{device}"},
        needed=True,
    ),
    Stage(  # a kernel that fails is no reason to stop
        "kernel-tests",
        "The tests of the kernels that can be switched",
        200,
        "-m pytest -m cuda -q -p no:cacheprovider tests/cuda -k test_kernels",
        "-m pytest -m cuda -q -p no:cacheprovider tests/cuda -k test_kernels",
        {"LDM_LITE_TEST_DEVICE": "{device}"},
    ),
    Stage(
        "kernels",
        "Kernels one by one, in microseconds",
        240,
        "scripts/gpu_kernels.py {dir}/kernels.json",
        "scripts/gpu_kernels.py {dir}/kernels.json --toy --device cpu",
    ),
    _bench(
        "A guided step, batch 1",
        "step",
        420,
        f"{STEP} --batches 1 --configs original,compiled,compiled-sdpa,max",
        "--sections step --batches 1 --configs original,efficient",
    ),
    _bench(
        "Against diffusers",
        "peers",
        480,
        f"{STEP} --batches 1 --configs max --peer diffusers,diffusers-compiled",
        "--sections step --batches 1 --configs efficient --peer diffusers",
    ),
    _bench(
        "Batch 16",
        "batch16",
        420,
        f"{STEP} --batches 16 --configs original,efficient,max",
        "--sections step --batches 2 --configs original,efficient",
    ),
    _bench(
        "Whole images: the article's table",
        "images",
        600,
        f"{IMAGE} --batches 1,2,4 --configs original,original-efficient,math,efficient,compiled",
        "--sections image --batches 1 --configs original,efficient",
    ),
    Stage(
        "memory",
        "The options that save memory",
        300,
        "-m ldm_lite.bench --memory --device cuda --dtypes fp16 --steps 4",
        "-m ldm_lite.bench --memory --size bundled --device cpu --dtypes fp32 --steps 1 --threads 2",
    ),
    _bench(
        "What each kernel earns: qkv, norm, geglu",
        "levers",
        600,
        f"{STEP} --batches 1 --configs max-none,max,max-norm,max-geglu,efficient,norm",
        "--sections step --batches 1 --configs efficient,norm",
    ),
    _bench(
        "What each kernel earns: conv, pdl, tma, all",
        "levers2",
        600,
        f"{STEP} --batches 1 --configs max,max-conv,max-pdl,max-tma,max-all",
        "--sections step --batches 1 --configs efficient",
    ),
    _bench(
        "max, tuned by coordinate descent",
        "tuned",
        600,
        f"{STEP} --batches 1 --configs original,max",
        "--sections step --batches 1 --configs efficient",
        TORCHINDUCTOR_COORDINATE_DESCENT_TUNING="1",
    ),
    Stage(
        "autoencoder",
        "The bundled model's autoencoder, at 128 pixels",
        330,
        f"{TRAIN} {VAE} --steps 5000 --batch 32 --lr 5e-4 --ema-decay 0.998 --minutes 4.5 --workers 14 --device cuda",
        f"{TRAIN} {VAE} {TINY}",
    ),
    Stage(
        "text",
        "Its text encoder, begun by guessing latents",
        330,
        f"{TRAIN} {TEXT} --scenes 60000 --steps 4000 --batch 256 --lr 2e-3 --minutes 3 --workers 14 --device cuda",
        f"{TRAIN} {TEXT} {TINY} --scenes 2",
    ),
    Stage(
        "train",
        "The bundled model",
        1000,
        f"{TRAIN} {DIFFUSION} --scenes 100000 --steps 13000 --batch 256 --lr 1e-3 --warmup 500 --ema-decay 0.9995 "
        "--save-every 1000 --minutes 13 --workers 14 --device cuda",
        f"{TRAIN} {DIFFUSION} {TINY} --scenes 2 --samples apple",
    ),
    Stage(
        "evaluate",
        "What it has learned, by held-out prompts",
        420,
        f"{EVALUATE} --count 1000 --batch 64 --device cuda",
        f"{EVALUATE} --count 4 --emoji 200 --steps 1",
        after="train",
    ),
)


# ---- running --------------------------------------------------------------------------------------------------------


def run(out: Path, stages: Sequence[Stage], toy: bool) -> State:
    """Run the stages that are not done, and return the state of all; the results are written after each."""
    out.mkdir(parents=True, exist_ok=True)
    state, ran = read_state(out), set[str | None]()
    for stage in stages:
        if state.get(stage.name, {}).get("status") == "done" and (stage.after is None or stage.after not in ran):
            continue
        ran.add(stage.name)
        state[stage.name] = {"status": "running"}
        _write(out / "state.json", json.dumps(state, indent=1))
        state[stage.name] = run_stage(stage, out, toy)
        _write(out / "state.json", json.dumps(state, indent=1))
        _write(out / "results.json", json.dumps(results(out), indent=1))
        _write(out / "results.md", markdown(out))
        status = state[stage.name]["status"]
        print(f"{stage.name}: {status} after {state[stage.name]['seconds']:.0f} s", flush=True)
        if stage.needed and status != "done":
            print(f"stopping: see {out / stage.name / 'log.txt'}", flush=True)
            break
    return state


def run_stage(stage: Stage, out: Path, toy: bool) -> dict[str, Any]:
    """Run one stage in a session of its own, kill it at its limit, and return how it ended."""
    folder = out / stage.name
    folder.mkdir(exist_ok=True)
    command = (stage.toy if toy else stage.command).format(dir=folder, out=out)
    environment = {
        key: value.format(device="cpu" if toy else "cuda") for key, value in (stage.environment or {}).items()
    }
    if "ldm_lite.bench" in command and not (folder / "results.json").exists():
        command = command.replace(" --resume", "")
    start = time.monotonic()
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *command.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "done" if process.wait(stage.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
    if status == "done" and not _trained(command, folder / "run" / "log.jsonl"):
        status = "not at its last step"
    shown = " ".join([*(f"{key}={value}" for key, value in environment.items()), "python", command])
    seconds = round(time.monotonic() - start, 1)
    return {"status": status, "seconds": seconds, "command": shown.replace(os.fspath(out), "OUT")}


def _trained(command: str, log: Path) -> bool:
    """Whether a training run has come to its last step; true of other commands."""
    wanted = re.search(r"ldm_lite\.train .*--steps (\d+)", command)
    if wanted is None:
        return True
    rows = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return bool(rows) and json.loads(rows[-1])["step"] >= int(wanted[1])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it started."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_state(out: Path) -> State:
    """Return the state of the stages so far."""
    path = out / "state.json"
    state: State = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return state


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def detach(out: Path, arguments: Sequence[str]) -> None:
    """Start this script again in a process that outlives this one, its output in --out."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "progress.txt", "a", encoding="utf-8") as progress:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=progress,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _write(out / "pid", str(process.pid))
    print(f"running as process {process.pid}; follow it with: python scripts/gpu_day.py follow --out {out}")


def follow(out: Path, seconds: float) -> bool:
    """Print the progress of a detached run until it ends or for some seconds.  Returns whether it has ended."""
    end, shown, pid = time.monotonic() + seconds, 0, int((out / "pid").read_text())
    while True:
        text = (out / "progress.txt").read_text(encoding="utf-8")
        print(text[shown:], end="", flush=True)
        shown = len(text)
        ended = not _alive(pid)
        if ended or time.monotonic() > end:
            return ended
        time.sleep(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " not in status.read_text()


# ---- results --------------------------------------------------------------------------------------------------------


def results(out: Path) -> dict[str, Any]:
    """Return the state and the measurements of all stages that have any."""
    found: dict[str, Any] = {}
    for stage, state in read_state(out).items():
        files = [path for name in ("results.json", "kernels.json") if (path := out / stage / name).exists()]
        found[stage] = {**state, "results": json.loads(files[0].read_text(encoding="utf-8")) if files else None}
    return {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "stages": found}


def commit() -> str:
    """The commit that is measured, or "no clone"."""
    command = ["git", "-C", os.fspath(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no clone"


def markdown(out: Path) -> str:
    """Format the results: a section for each stage, with its command."""
    state, lines = read_state(out), list[str]()
    for stage in STAGES:
        if stage.name not in state:
            continue
        ran = state[stage.name]
        lines += [f"### {stage.title}", "", f"`{ran.get('command', '')}`, at {commit()}: {ran['status']}.", ""]
        lines += _stage_lines(out / stage.name)
    return "\n".join(lines).rstrip() + "\n"


def _stage_lines(folder: Path) -> list[str]:
    bench, kernels, log = (folder / name for name in ("results.md", "kernels.json", "log.txt"))
    if bench.exists():
        text = bench.read_text(encoding="utf-8").removeprefix("# Benchmark\n")
        return [re.sub(r"^## ", "#### ", text.split("\noriginal: float32")[0].strip(), flags=re.M), ""]
    if kernels.exists():
        found = json.loads(kernels.read_text(encoding="utf-8"))
        lines = [f"- {key}: {value}" for key, value in found.pop("probe").items()]
        for title, rows in found.items():
            lines += kernel_table(title, rows) if isinstance(rows, dict) else [f"- {title}: {rows}"]
        return [*lines, ""]
    table = re.findall(
        r"^\|.*\|$|^\d+ passed.*$|^.*\d+ failed.*$", log.read_text(encoding="utf-8") if log.exists() else "", re.M
    )
    return [*table, ""]


def kernel_table(title: str, rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Format times with a column for each kernel."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = ["", f"#### {title}", "", "| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    return lines + [
        f"| {what} | " + " | ".join(str(row.get(name, "")) for name in names) + " |" for what, row in rows.items()
    ]


def publish(out: Path, page: Path) -> None:
    """Put the results, between two marks, and the charts into the page; those of an earlier run are replaced."""
    text = page.read_text(encoding="utf-8")
    charts = []
    for stage in STAGES:
        if (chart := out / stage.name / "results.png").exists():
            shutil.copyfile(chart, page.with_name(f"gpu-{stage.name}.png"))
            charts.append(f"![{stage.title}](gpu-{stage.name}.png)")
    made = "\n".join([BEGIN, "", "## On a GPU", "", *charts, "", (out / "results.md").read_text(encoding="utf-8"), END])
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        text = before + made + rest.partition(END)[2]
    else:
        text = text.rstrip() + "\n\n" + made + "\n"
    _write(page, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "follow", "publish"))
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_day"))
    parser.add_argument("--only", help="comma-separated stages: " + ", ".join(stage.name for stage in STAGES))
    parser.add_argument("--toy", action="store_true", help="in miniature, on a CPU")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser.parse_args(given)
    args.out = args.out.resolve()
    wanted = None if args.only is None else args.only.split(",")
    if unknown := set(wanted or ()) - {stage.name for stage in STAGES}:
        parser.error(f"no stage is named {', '.join(sorted(unknown))}")
    if args.what == "publish":
        publish(args.out, args.page)
    elif args.what == "follow":
        return 0 if follow(args.out, args.seconds) else 3
    elif args.detach:
        detach(args.out, [each for each in given if each != "--detach"])
    else:
        state = run(args.out, [stage for stage in STAGES if wanted is None or stage.name in wanted], args.toy)
        return int(any(each["status"] != "done" for each in state.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
