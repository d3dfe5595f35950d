"""Measure: `python -m ldm_lite.bench` times text to image on this machine, in all the ways there are to run it.

The configurations (benchmark/configurations.py) are first compared with a plain float32 forward and then timed in turn,
there and back, so that a machine that slows down slows all alike.  Results are written as they come.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ldm_lite
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import FINITE, MOST, MOST_PX, SEEDS, CheckedOptions, numbers, option

if TYPE_CHECKING:
    from ldm_lite.bench.configurations import Configuration, Models
    from ldm_lite.bench.contender import Apart, Contender
    from ldm_lite.bench.jobs import Setting
    from ldm_lite.bench.report import Report
    from ldm_lite.bench.training import Way
    from ldm_lite.pipeline import Pipeline

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to measure."""

    size: str | None = option(
        None, "the model: sd1 or another, with random weights, or bundled (default: sd1 on CUDA, else bundled)"
    )
    ckpt: str | None = option(None, "measure this checkpoint")
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtypes: str | None = option(
        None, "comma-separated: fp16, bf16, fp32 (default: fp16,fp32 on CUDA, bf16,fp32 with --train, else fp32)"
    )
    configs: str | None = option(
        None,
        "comma-separated ways to run it, of which the first is what the others are compared with: original, "
        "original-efficient, math, efficient, compiled, max; with --train vanilla, sdpa, channels_last, checkpointed, "
        "compiled (default: all)",
    )
    peer: str = option("", "comma-separated: diffusers, diffusers-compiled, openvino, each in a process of its own")
    sections: str = option("step,decode,text,image", "comma-separated: step, decode, text, image")
    train: bool = option(False, "measure training steps of the UNet, in place of the sections")
    max_batch: bool = option(False, "find the largest batch that fits, in place of the sections; on CUDA")
    task: str = option("txt2img", "comma-separated, what whole images are made from: txt2img, img2img, inpaint")
    batches: str = option("1,2,4", "comma-separated batch sizes")
    full: bool = option(False, "batch 16 too")
    height: int | None = option(None, "pixels (default: the model's)", "--H", within=(1, MOST_PX))
    width: int | None = option(None, "pixels (default: the model's)", "--W", within=(1, MOST_PX))
    prompt: str = option("A photo", "of the whole images")
    sampler: str = option("plms", "of the whole images")
    steps: int = option(50, "denoising steps of the whole images", within=(1, 1000))
    n_iter: int = option(2, "batches of whole images in a sample", within=(1, MOST))
    scale: float = option(7.5, "classifier-free guidance", within=FINITE)
    seed: int = option(1, "of all inputs", within=SEEDS)
    memory: bool = option(False, "measure the ways to need less memory instead, each in a process of its own")
    loading: bool = option(False, "measure the time from the start of a process to loaded networks instead")
    rounds: int = option(10, "times that each configuration is timed in a cell, at most", within=(1, MOST))
    minutes: float = option(9.0, "end after about so many, with whatever was measured", within=(0, MOST))
    threads: int | None = option(None, "CPU threads (default: as torch chooses)", within=(1, 4096))
    out: str = option("outputs/bench", "folder for results.json, results.md and results.png")
    resume: bool = option(False, "keep the results in that folder, and measure what is not among them")
    debug: bool = option(False, "show the traceback of an error")


def bench(options: Options, on_result: "Callable[[Report], None]" = lambda report: None) -> "Report":
    """Run it -> the report; on_result is called with what there is, whenever there is more.

    Raises ValueError for options that do not fit.  What does not fit into the minutes is left out, with a note.
    """
    import torch

    from ldm_lite.bench import training
    from ldm_lite.bench.configurations import CONFIGURATIONS, Models
    from ldm_lite.bench.jobs import TRAIN, Cell, work
    from ldm_lite.bench.measure import ceiling
    from ldm_lite.bench.report import RESULTS, Report, from_json
    from ldm_lite.bench.run import GATES, Course, run
    from ldm_lite.bench.subjects import subject
    from ldm_lite.runtime.precision import DTYPES, pick_device

    deadline = time.monotonic() + 60 * options.minutes
    device = pick_device(options.device)
    on_gpu = device.type == "cuda"
    half = "bf16" if options.train else "fp16"  # gradients in float16 would have to be scaled
    dtypes = _chosen("dtypes", options.dtypes or (f"{half},fp32" if on_gpu else "fp32"), GATES)
    table: Mapping[str, Configuration | Way] = training.WAYS if options.train else CONFIGURATIONS
    configs = list(table) if options.configs is None else _chosen("configs", options.configs, table)
    sections = [TRAIN] if options.train else _sections(options)
    threads = _threads(options)
    size = ("sd1" if on_gpu else "bundled") if options.size is None else options.size
    models = Models(subject(size, options.ckpt), device)
    pipe = models.loaded(torch.float32)
    setting = _setting(options, pipe)
    where = {"size": size, "ckpt": options.ckpt, "device": str(device), "threads": threads}
    report = Report(_about(options, pipe.description, where), {name: table[name].title for name in configs})
    report.ceilings = {dtype: ceiling(device, DTYPES[dtype]) for dtype in dtypes}
    batches = sorted({*numbers(options.batches, "--batches"), *([16] if options.full else [])})
    cells = [Cell(section, dtype, batch) for dtype in dtypes for batch in batches for section in sections]
    if options.resume:
        earlier = from_json((_folder(options) / RESULTS).read_text(encoding="utf-8"))
        report.tables += earlier.tables
        cells = [cell for cell in cells if cell not in {table.cell for table in earlier.tables}]
    if options.max_batch:
        del models, pipe  # their memory is the others'
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        _find_largest(options, report, dtypes, {**where, "setting": dataclasses.asdict(setting)}, on_result)
        return report
    with contextlib.ExitStack() as processes:
        reference, contenders = _ours(options, models, setting, configs)
        for peer in _peers(options, report, {**where, "setting": dataclasses.asdict(setting)}):
            report.titles[peer.name] = f"{peer.name} ({peer.description})"
            contenders.append(processes.enter_context(peer))
        course = Course(reference, contenders, options.rounds, deadline, again="sdpa" if options.train else configs[-1])
        for result in run(course, cells, functools.partial(work, pipe.family, setting)):
            if isinstance(result, str):
                report.notes.append(result)
                log.info("%s", result)
            else:
                report.tables.append(result)
            on_result(report)
    return report


def _sections(options: Options) -> list[str]:
    """The sections, "image" in all of the tasks.  Raises ValueError for unknown ones."""
    from ldm_lite.bench.jobs import SECTIONS, WHOLE

    tasks = [WHOLE[task] for task in _chosen("task", options.task, WHOLE)]
    chosen = _chosen("sections", options.sections, SECTIONS)
    return [each for section in chosen for each in (tasks if section == "image" else [section])]


def _ours(
    options: Options, models: "Models", setting: "Setting", configs: "Sequence[str]"
) -> "tuple[Contender, list[Contender]]":
    """What all are compared with, and our own contenders."""
    from ldm_lite.bench import training
    from ldm_lite.bench.configurations import CONFIGURATIONS, REFERENCE

    if options.train:
        return training.contenders(models, setting, configs)
    reference = models.contender("reference", REFERENCE, setting)
    return reference, [models.contender(name, CONFIGURATIONS[name], setting) for name in configs]


def _find_largest(
    options: Options,
    report: "Report",
    dtypes: Sequence[str],
    about: "Mapping[str, Any]",
    on_result: "Callable[[Report], None]",
) -> None:
    """Each configuration and peer alone in a process, on whole images of two steps; those that compile are left out.

    Raises ValueError without CUDA: elsewhere the system ends a process that takes too much.
    """
    from ldm_lite.bench.capacity import largest_batch
    from ldm_lite.bench.configurations import CONFIGURATIONS
    from ldm_lite.bench.contender import Apart, Unable
    from ldm_lite.bench.worker import PEERS

    if not about["device"].startswith("cuda"):
        raise ValueError(
            f"the largest batch is looked for on CUDA, and this is {about['device']}: leave out --max-batch"
        )
    names = [name for name in report.titles if CONFIGURATIONS[name].compile == "off"]
    setting = {**about["setting"], "steps": 2, "n_iter": 1}
    for name in (*names, *_chosen("peer", options.peer, PEERS)):
        for dtype in dtypes:
            try:
                with Apart(name, {**about, "setting": setting, "framework": name}) as contender:
                    report.largest.setdefault(dtype, {})[name] = largest_batch(contender, "image", dtype)
            except Unable as error:
                report.notes.append(f"largest batch of {name} in {dtype}: {error}")
            on_result(report)


def _peers(options: Options, report: "Report", about: "Mapping[str, object]") -> "Iterable[Apart]":
    """The peers' processes; one that cannot be had is a note."""
    from ldm_lite.bench.contender import Apart, Unable
    from ldm_lite.bench.worker import PEERS

    for name in _chosen("peer", options.peer, PEERS):
        try:
            yield Apart(name, {**about, "framework": name})
        except Unable as error:
            report.notes.append(f"{name} {error}")
            log.warning("%s %s", name, error)


def _chosen(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Names with commas between.  Raises ValueError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {name!r} in --{flag}: wanted some of {', '.join(known)}")
    if text and not names:
        raise ValueError(f"got --{flag} {text!r}, wanted some of {', '.join(known)}")
    return names


def _threads(options: Options) -> int:
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return torch.get_num_threads()


def _folder(options: Options) -> Path:
    return Path(os.path.expanduser(options.out))


def _setting(options: Options, pipe: "Pipeline") -> "Setting":
    """The work, with nothing left open.  Raises ValueError for a size that the model cannot make."""
    from ldm_lite.bench.jobs import Setting
    from ldm_lite.diffusion.names import make_plan

    height, width = (pipe.family.resolution if side is None else side for side in (options.height, options.width))
    pipe.latent_shape(height, width)
    make_plan(options.sampler, pipe.schedule, options.steps)
    names = ("prompt", "sampler", "steps", "n_iter", "scale", "seed")
    return Setting(height, width, **{name: getattr(options, name) for name in names})


def _about(options: Options, model: str, where: "Mapping[str, object]") -> dict[str, object]:
    """What the report says of itself: enough to run it again."""
    import torch

    device = torch.device(str(where["device"]))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in ("out", "debug")}
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value!r}" if " " in str(value) else f" {value}")
        for name, value in given.items()
        if value != getattr(Options(), name)
    )
    return {
        "command": f"python -m ldm_lite.bench {flags}".strip(),
        "model": model,
        "device": f"{name}, {where['threads']} threads" if device.type == "cpu" else name,
        "versions": f"ldm_lite {ldm_lite.__version__} ({_commit()}), torch {torch.__version__}, "
        f"python {platform.python_version()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of a clone that this runs from, or that it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no clone"


# ---- the command ----------------------------------------------------------------------------------------------------


def memory(options: Options) -> str:
    """The table of what each way to need less memory takes, at batch 1 and in the first of the dtypes; as Markdown."""
    from ldm_lite.bench.memory import MODES, Question, markdown, measure
    from ldm_lite.bench.run import GATES
    from ldm_lite.bench.subjects import subject
    from ldm_lite.runtime.precision import pick_device

    device = pick_device(options.device)
    on_gpu = device.type == "cuda"
    size = ("sd1" if on_gpu else "bundled") if options.size is None else options.size
    dtype = _chosen("dtypes", options.dtypes or ("fp16" if on_gpu else "fp32"), GATES)[0]
    pipe = ldm_lite.load(subject(size, options.ckpt), device="cpu")
    setting, about = (
        _setting(options, pipe),
        _about(options, pipe.description, {"device": str(device), "threads": _threads(options)}),
    )
    del pipe
    question = Question(size, options.ckpt, str(device), dtype, {}, dataclasses.asdict(setting), picture="")
    rows = []
    for row in measure(question, MODES):
        log.info("%s: %s", row.mode, row.why_not or row.answer)
        rows.append(row)
    title = f"{about['command']}: {setting.width}x{setting.height}, {setting.steps} steps, {dtype}, {about['device']}"
    return markdown(rows, title)


def loading(options: Options) -> str:
    """The table of how long loading takes, in all precisions and file formats, as Markdown; the files go to --out."""
    from ldm_lite.bench.loading import PEER, PEER_BIN, WAYS, markdown, measure, write
    from ldm_lite.bench.subjects import subject
    from ldm_lite.runtime.precision import pick_device

    device = pick_device(options.device)
    size = "sd1" if options.size is None else options.size
    peers = _chosen("peer", options.peer, (PEER,))
    ways = [name for name, way in WAYS.items() if way.file not in (PEER, PEER_BIN) or peers]
    folder = _folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = subject(size, options.ckpt)
    about = _about(options, checkpoint.path.name, {"device": str(device), "threads": _threads(options)})
    with tempfile.TemporaryDirectory(dir=folder) as files:
        write(checkpoint, Path(files), ways)
        timings = measure(ways, Path(files), str(device), options.rounds)
    return markdown(timings, f"{about['command']}: {about['model']}, {about['device']}, {about['versions']}")


def run(options: Options) -> None:
    """Measure, write what there is as it comes, and print the tables."""
    from ldm_lite.bench import report as reports

    if options.memory or options.loading:
        print(memory(options) if options.memory else loading(options))
        return
    folder = _folder(options)
    if not options.resume and (folder / reports.RESULTS).exists():
        raise ValueError(f"{folder}: holds results already: go on with --resume, or take another --out")
    folder.mkdir(parents=True, exist_ok=True)  # before the minutes of measuring, if it cannot be
    report = bench(options, lambda report: reports.write(report, folder))
    print(reports.markdown(report))
    print(folder / "results.md")
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no chart without matplotlib: pip install matplotlib")
    elif report.tables:
        reports.chart(report, folder / "results.png")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    (options,), _ = flags.parse(argv, "bench", __doc__.splitlines()[0], (Options,))
    return console.run(lambda: run(options), (options,))


if __name__ == "__main__":
    sys.exit(main())
