"""The benchmark: run the cells of the options with every backend and report."""

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ldm_lite.bench.backends import Backend, SubprocessBackend, Unavailable
from ldm_lite.bench.capacity import largest_batch
from ldm_lite.bench.checkpoints import open_model
from ldm_lite.bench.comparison import GATES, Comparison
from ldm_lite.bench.configurations import CONFIGURATIONS, REFERENCE, Configuration, Models
from ldm_lite.bench.measure import ceiling
from ldm_lite.bench.options import Options, names
from ldm_lite.bench.report import RESULTS, Report, describe_run, from_json
from ldm_lite.bench.training import TRAIN_CONFIGURATIONS, TrainConfiguration, train_backends
from ldm_lite.bench.worker import PEERS
from ldm_lite.bench.workload import IMAGE_SECTIONS, SECTIONS, TRAIN, Cell, Setting, Target, cost
from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.options import numbers
from ldm_lite.diffusion.names import make_plan
from ldm_lite.runtime.precision import DTYPES, pick_device

log = logging.getLogger("ldm_lite")

OnResult = Callable[[Report], None]


def benchmark(options: Options, on_result: OnResult = lambda report: None) -> Report:
    """Run the benchmark; on_result is called with the report after each new result.

    Cells that do not fit into the minutes are left out with a note.  Raises ValueError for invalid options.
    """
    deadline = time.monotonic() + 60 * options.minutes
    device, dtypes = pick_device(options.device), chosen_dtypes(options)
    table: Mapping[str, Configuration | TrainConfiguration] = TRAIN_CONFIGURATIONS if options.train else CONFIGURATIONS
    if options.max_batch and device.type != "cuda":  # elsewhere the system kills a process that takes too much memory
        raise ValueError(f"the largest batch can be found on CUDA only, not on {device}: leave out `max_batch`")
    configs = list(table) if options.configs is None else names("configs", options.configs, table)
    cells, peers = _cells(options, dtypes), names("peer", options.peer, PEERS)
    threads, size = set_threads(options), model_size(options)
    models = Models(open_model(size, options.ckpt), device)
    model = models.loaded()
    target = Target(size, options.ckpt, str(device), threads, make_setting(options, model))
    about = describe_run(options, model.description, device, threads)
    report = Report(about, {name: table[name].title for name in configs})
    report.ceilings = {dtype: ceiling(device, DTYPES[dtype]) for dtype in dtypes}
    if options.resume:
        report.tables += from_json((options.folder / RESULTS).read_text(encoding="utf-8")).tables
    if options.max_batch:
        del models, model  # their memory is for the subprocesses
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _find_largest(report, dtypes, peers, target, on_result)
        return report
    with contextlib.ExitStack() as processes:
        reference, backends = _our_backends(options.train, models, target.setting, configs)
        for peer in _start_peers(peers, report, target):
            report.titles[peer.name] = f"{peer.name} ({peer.description})"
            backends.append(processes.enter_context(peer))
        costs = functools.partial(cost, model.family, target.setting)
        repeated = "sdpa" if options.train else configs[-1]
        earlier = {table.cell: table for table in report.tables}
        comparison = Comparison(reference, backends, costs, options.rounds, deadline, repeated, earlier)
        _compare(comparison, cells, report, on_result)
    return report


def _compare(comparison: Comparison, cells: Sequence[Cell], report: Report, on_result: OnResult) -> None:
    for result in comparison.run(cells):
        if isinstance(result, str):
            report.notes.append(result)
            log.info("%s", result)
        elif result.cell not in comparison.earlier:
            report.tables.append(result)
        on_result(report)


# ---- options -> plain values ----------------------------------------------------------------------------------------


def model_size(options: Options) -> str:
    """The model: Stable Diffusion 1.x on CUDA, otherwise the bundled one, unless the options name another."""
    return options.size or ("sd1" if pick_device(options.device).type == "cuda" else "bundled")


def chosen_dtypes(options: Options) -> list[str]:
    """The short names of the precisions.  Raises ValueError for unknown ones."""
    half = "bf16" if options.train else "fp16"  # float16 gradients would need scaling
    default = f"{half},fp32" if pick_device(options.device).type == "cuda" else "fp32"
    return names("dtypes", options.dtypes or default, GATES)


def set_threads(options: Options) -> int:
    """Set the number of CPU threads and return it."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return torch.get_num_threads()


def make_setting(options: Options, model: Model) -> Setting:
    """Resolve the work.  Raises ValueError for an image size or a sampler that the model cannot use."""
    height, width = (model.family.resolution if side is None else side for side in (options.height, options.width))
    model.latent_shape(height, width)
    make_plan(options.sampler, model.schedule, options.steps)
    return Setting(
        height,
        width,
        prompt=options.prompt,
        sampler=options.sampler,
        steps=options.steps,
        n_iter=options.n_iter,
        scale=options.scale,
        seed=options.seed,
    )


def _cells(options: Options, dtypes: Sequence[str]) -> list[Cell]:
    tasks = [IMAGE_SECTIONS[task] for task in names("task", options.task, IMAGE_SECTIONS)]
    sections = names("sections", options.sections, SECTIONS)
    sections = [each for section in sections for each in (tasks if section == "image" else [section])]
    batches = sorted({*numbers(options.batches, "`batches`"), *([16] if options.full else [])})
    return [
        Cell(section, dtype, batch)
        for dtype in dtypes
        for batch in batches
        for section in ([TRAIN] if options.train else sections)
    ]


# ---- backends -------------------------------------------------------------------------------------------------------


def _our_backends(
    train: bool, models: Models, setting: Setting, configs: Sequence[str]
) -> tuple[Backend, list[Backend]]:
    """Return the reference and a backend for each configuration."""
    if train:
        return train_backends(models, setting, configs)
    reference = models.backend("reference", REFERENCE, setting)
    return reference, [models.backend(name, CONFIGURATIONS[name], setting) for name in configs]


def _start_peers(peers: Sequence[str], report: Report, target: Target) -> Iterator[SubprocessBackend]:
    """Start the peers' processes; a note names a peer that cannot run."""
    for name in peers:
        try:
            yield SubprocessBackend(name, target)
        except Unavailable as error:
            report.notes.append(f"{name} {error}")
            log.warning("%s %s", name, error)


def _find_largest(
    report: Report, dtypes: Sequence[str], peers: Sequence[str], target: Target, on_result: OnResult
) -> None:
    """Find the largest batch of each configuration that is not compiled and of each peer, on images of two steps."""
    target = replace(target, setting=replace(target.setting, steps=2, n_iter=1))
    configs = [name for name in report.titles if CONFIGURATIONS[name].compile == "off"]
    for name in (*configs, *peers):
        for dtype in dtypes:
            try:
                with SubprocessBackend(name, target) as backend:
                    report.largest.setdefault(dtype, {})[name] = largest_batch(backend, "image", dtype)
            except Unavailable as error:
                report.notes.append(f"largest batch of {name} in {dtype}: {error}")
            on_result(report)
