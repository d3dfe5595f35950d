"""A batch job, from its options to its manifest."""

import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from ldm_lite.batch.encode import EncodeWorker, count, finish
from ldm_lite.batch.images import ImageWorker
from ldm_lite.batch.options import BatchOptions, check_options
from ldm_lite.batch.places import Remote, open_place
from ldm_lite.batch.store import Report, Task, Worker, write_manifest
from ldm_lite.batch.table import Table, open_table
from ldm_lite.cli.options import CheckedOptions, LoadOptions, given
from ldm_lite.cli.progress import memory
from ldm_lite.cli.version import pip_install

log = logging.getLogger("ldm_lite")


def run_batch(options: BatchOptions, defaults: CheckedOptions, load: LoadOptions) -> str | None:
    """Make the missing shards of a job; return the path or URL of its manifest, or None while other processes work.

    Raises ValueError, one line, for unusable options or input, if the folder belongs to another job or is in use, and
    at the end if all rows failed; OSError.
    """
    check_options(options)
    which, of = options.turn
    path = Path(os.path.expanduser(str(options.prompts)))
    if options.encode:
        if unused := sorted(given(defaults)):
            raise ValueError(f"`{unused[0]}` has no effect with `encode`: leave it out")
        table = Table(path, options.shard_size, 0)
    else:
        if options.manifest == "parquet" and importlib.util.find_spec("pyarrow") is None:
            raise ValueError(f"manifest.parquet needs pyarrow: {pip_install('batch')}, or use `manifest=jsonl`")
        table = open_table(path, options.shard_size)
    place = open_place("outputs/batch" if options.out is None else options.out, Path.cwd())
    if options.encode:
        if isinstance(place, Remote):
            raise ValueError(f"{place}: training maps files into memory: give a folder as `out` of `encode`")
        table.count = count(path, place.path)
    task = Task(options, defaults, load, table, place, Path.cwd())
    with place.locked((which, of)):
        if beyond := task.store.beyond(table.shards):
            raise ValueError(
                f"{place}: holds {beyond[0]}, but {table.path} has {table.shards} shards of {table.size} rows: "
                "use another `out`, or delete that shard and its file in parts/"
            )
        task.store.clean(which, of)
        all_failed = _make(task, range(which, table.shards, of))
        missing = sum(not task.store.is_done(number) for number in range(table.shards))
        if missing:
            log.info("%d of %d shards are missing: the last process writes the manifest", missing, table.shards)
            return None
        name = "index.json" if options.encode else f"manifest.{options.manifest}"
        if name not in place.names():
            if options.encode:
                finish(task.store, table)
            else:
                write_manifest(task.store, table.shards, options.manifest)
        if all_failed:
            raise ValueError(f"{place}/{name}: is empty: all rows failed")
        return f"{place}/{name}"


def _make(task: Task, numbers: Sequence[int]) -> bool:
    """Make shards, and report progress.  Return whether there were rows and all of them failed."""
    begun, num_images, num_failed, num_there = time.perf_counter(), 0, 0, 0
    bar = tqdm(total=min(task.table.count, len(numbers) * task.table.size), unit="image", smoothing=0)
    if task.options.engine == "ray":
        from ldm_lite.batch.ray_engine import reports  # of an extra

        shards: Iterator[Report] = reports(task, worker_of, numbers)
    else:
        shards = map(worker_of(task).make, numbers)
    for report in shards:
        bar.update(report.rows)
        if not report.is_new:
            num_there += 1
            continue
        num_images, num_failed = num_images + report.rows - report.failed, num_failed + report.failed
        if report.messages:
            more = f" (and {len(report.messages) - 1} more)" if len(report.messages) > 1 else ""
            log.warning("%s: %s%s", task.store.name(report.number), report.messages[0], more)
    bar.close()
    if num_there:
        log.info("%d of %d shards were complete already", num_there, len(numbers))
    if num_failed:
        log.warning("%d rows failed: %s says why", num_failed, "parts/" if task.options.encode else "the manifest")
    log.info("%d image%s in %.1f s; %s", num_images, "s" * (num_images != 1), time.perf_counter() - begun, memory())
    return num_failed > 0 and num_images == num_there == 0


def worker_of(task: Task) -> Worker:
    """Return the worker of a task.  Raises as its class does."""
    return EncodeWorker(task) if task.options.encode else ImageWorker(task)
