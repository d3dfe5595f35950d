"""Shards made by the workers of a Ray cluster: Ray Data's map_batches with a pool of actors, each with its own model.

Only numbers of shards and reports pass through Ray: workers read the table and write the shards themselves, in folders
that all machines share.  A worker that ends is replaced, and makes the shard again that it had begun.
"""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ldm_lite.batch.store import Report, Task, Worker
from ldm_lite.batch.table import extra

log = logging.getLogger("ldm_lite")

MOST_LOST = 10  # workers that may end while they make a shard


class _Actor:
    """A worker in a process of Ray's.  Errors are results: Ray would show tracebacks, and try again."""

    def __init__(self, task: Task, make_worker: Callable[[Task], Worker]) -> None:
        self._store, self._worker, self._error = task.store, None, None
        try:
            os.chdir(task.folder)
            self._worker = make_worker(task)
        except (ValueError, TypeError, OSError) as error:
            self._error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        return {"report": [self._make(int(number)) for number in batch["id"]]}

    def _make(self, number: int) -> Report | Exception:
        if self._worker is None:
            return self._error or AssertionError()
        place, tries, lost = self._store.place, f".{self._store.name(number)}.tries.part", 0
        try:
            with contextlib.suppress(FileNotFoundError):
                lost = place.size(tries)
            place.write(tries, b"." * (lost + 1))
            if lost >= MOST_LOST:
                return ChildProcessError(f"{self._store.name(number)}: {lost} workers ended while they made it")
            report = self._worker.make(number)
            place.remove(tries)
            return report
        except RuntimeError as error:
            if "CUDA error" in str(error):  # this process cannot use its GPU any more: Ray starts another
                os._exit(1)
            return error
        except Exception as error:
            return error


def reports(task: Task, make_worker: Callable[[Task], Worker], numbers: Sequence[int]) -> Iterator[Report]:
    """Make shards in a cluster, and yield a report of each when it is made.

    Raises ValueError, one line, if Ray is not installed, for options that fit no row, and if there is no cluster at
    the address; ChildProcessError if workers are lost again and again.
    """
    ray, data = extra("ray", "ray"), extra("ray.data", "ray")
    least, most = task.options.pool
    address = task.options.address
    if address is not None and (match := re.fullmatch(r"([\w.-]+):(\d{1,5})", address)):
        try:  # Ray would wait for it for minutes
            socket.create_connection((match[1], int(match[2])), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"got `address={address}`, where no Ray cluster answers: {error}") from error
    try:
        ray.init(
            address=address or "local",
            log_to_driver=task.options.debug,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except ConnectionError as error:
        raise ValueError(f"got `address={address}`, where no Ray cluster answers: {error}") from error
    gpus = task.options.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if task.load.device != "cpu" and ray.cluster_resources().get("GPU") else 0.0
        if not gpus and task.load.device != "cpu":
            log.warning("the cluster has no GPU: workers run on CPUs; `gpus_per_worker=1` waits for GPUs")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = data.DataContext.get_current()
    # The pool grows when all workers are busy: each may have one task.
    context.enable_progress_bars, context.actor_pool_util_upscaling_threshold = False, 1.0
    try:
        shards = data.from_items([{"id": number} for number in numbers], override_num_blocks=len(numbers))
        reported = shards.map_batches(
            _Actor,
            fn_constructor_args=(task, make_worker),
            batch_size=1,
            # A shard that waits behind another one in a worker would not go to one that is free.
            compute=data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=1),
            num_cpus=task.options.cpus_per_worker,
            num_gpus=gpus,
        )
        for row in reported.iter_rows():
            if isinstance(row["report"], Exception):
                raise row["report"]
            yield row["report"]
    except ray.exceptions.RayError as error:
        line = str(error).strip().splitlines()[-1]
        raise ChildProcessError(f"Ray ended: {line}: the same command continues") from error
    finally:
        ray.shutdown()
