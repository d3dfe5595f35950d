"""A batch job, from its options to its manifest."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ldm_lite.batch.options import BatchOptions, check
from ldm_lite.batch.store import locked, write_manifest
from ldm_lite.batch.table import extra, open_table
from ldm_lite.batch.worker import Report, Task, worker_of
from ldm_lite.cli.options import CheckedOptions, LoadOptions
from ldm_lite.cli.progress import ImagesBar, memory

log = logging.getLogger("ldm_lite")


def run(options: BatchOptions, defaults: CheckedOptions, load: LoadOptions) -> Path | None:
    """Make what is missing of a job, and return the path of its manifest, or None while other processes' shards are.

    Raises ValueError, one line, for unusable options or input, and if the folder is another job's or in use; OSError.
    """
    check(options)
    which, of = options.turn
    if options.manifest == "parquet":
        extra("pyarrow.parquet", "batch")
    table = open_table(Path(os.path.expanduser(str(options.prompts))), options.shard_size)
    out = Path("outputs/batch" if options.out is None else os.path.expanduser(options.out)).absolute()
    (out / "parts").mkdir(parents=True, exist_ok=True)
    task = Task(options, defaults, load, table, out, Path.cwd())
    with locked(out, (which, of)):
        if beyond := task.store.beyond(table.shards):
            raise ValueError(
                f"{out}: holds {beyond[0]}, but {table.path} has {table.shards} shards of {table.size} rows: "
                "take another `out`, or delete that shard and its file in parts/"
            )
        task.store.clean(lambda number: number % of == which)
        numbers = range(which, table.shards, of)
        _report(task, numbers)
        missing = sum(not task.store.is_done(number) for number in range(table.shards))
        if missing:
            log.info("%d of %d shards are missing: the last process writes the manifest", missing, table.shards)
            return None
        path = out / f"manifest.{options.manifest}"
        return path if path.exists() else write_manifest(task.store, table.shards, options.manifest)


def _report(task: Task, numbers: Sequence[int]) -> None:
    """Make shards, and say how it goes."""
    begun, made, failed, there = time.perf_counter(), 0, 0, 0
    bar = ImagesBar(min(task.table.count, len(numbers) * task.table.size))
    for report in _reports(task, numbers):
        bar(report.rows)
        if not report.made:
            there += 1
            continue
        made, failed = made + report.rows - report.failed, failed + report.failed
        if report.messages:
            more = f" (and {len(report.messages) - 1} more)" if len(report.messages) > 1 else ""
            log.warning("%s: %s%s", task.store.name(report.number), report.messages[0], more)
    bar.close()
    if there:
        log.info("%d of %d shards were there", there, len(numbers))
    if failed:
        log.warning("%d rows failed: the manifest says why", failed)
    log.info("%d image%s in %.1f s; %s", made, "s" * (made != 1), time.perf_counter() - begun, memory())


def _reports(task: Task, numbers: Sequence[int]) -> Iterator[Report]:
    if task.options.engine == "ray":
        from ldm_lite.batch.ray_engine import reports  # of an extra

        yield from reports(task, numbers)
        return
    worker = worker_of(task)
    for number in numbers:
        yield worker.make(number)
