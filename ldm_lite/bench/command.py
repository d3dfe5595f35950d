"""Run one of the command's three measurements, write the results and print the tables."""

import importlib.util
import logging
import tempfile
from pathlib import Path

from ldm_lite.bench import loading, memory, report
from ldm_lite.bench.benchmark import benchmark, chosen_dtypes, make_setting, model_size, set_threads
from ldm_lite.bench.checkpoints import load, open_model
from ldm_lite.bench.loading_worker import METHODS, PEER, PEER_BIN
from ldm_lite.bench.options import Options, names
from ldm_lite.bench.workload import Target
from ldm_lite.runtime.precision import pick_device

log = logging.getLogger("ldm_lite")


def run(options: Options) -> None:
    """Measure, write results as they come, and print the tables.  Raises ValueError for invalid options."""
    if options.memory:
        print(memory_table(options))
    elif options.loading:
        print(loading_table(options))
    else:
        _run_benchmark(options)


def _run_benchmark(options: Options) -> None:
    folder = options.folder
    if not options.resume and (folder / report.RESULTS).exists():
        raise ValueError(f"{folder}: holds results already: go on with `resume`, or take another `out`")
    folder.mkdir(parents=True, exist_ok=True)  # now, so that minutes of measuring are not lost if it fails
    made = benchmark(options, lambda partial: report.write(partial, folder))
    print(report.markdown(made))
    print(folder / "results.md")
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no chart without matplotlib: pip install matplotlib")
    elif made.tables:
        report.chart(made, folder / "results.png")


def memory_table(options: Options) -> str:
    """Measure the peak memory of the options that save memory, at batch 1 and in the first dtype, as Markdown."""
    dtype, device, size = chosen_dtypes(options)[0], pick_device(options.device), model_size(options)
    model = load(open_model(size, options.ckpt), "cpu", "fp32")
    setting = make_setting(options, model)
    threads = set_threads(options)
    target = Target(size, options.ckpt, str(device), threads, setting)
    about = report.describe_run(options, model.description, device, threads)
    del model
    rows = []
    for row in memory.measure(memory.Request(target, dtype, {}, image=""), memory.MODES):
        log.info("%s: %s", row.mode, row.error or row.result)
        rows.append(row)
    return memory.markdown(
        rows,
        f"{about['command']}: {setting.width}x{setting.height}, {setting.steps} steps, {dtype}, {about['device']}",
    )


def loading_table(options: Options) -> str:
    """Measure how long loading takes in all precisions and file formats, as Markdown; the files go to --out."""
    device, size = pick_device(options.device), options.size or "sd1"
    peers = names("peer", options.peer, (PEER,))
    methods = [name for name, method in METHODS.items() if method.file not in (PEER, PEER_BIN) or peers]
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_model(size, options.ckpt)
    about = report.describe_run(options, checkpoint.path.name, device, set_threads(options))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        loading.write(checkpoint, Path(folder), methods)
        timings = loading.measure(methods, Path(folder), str(device), options.rounds)
    return loading.markdown(timings, f"{about['command']}: {about['model']}, {about['device']}, {about['versions']}")
