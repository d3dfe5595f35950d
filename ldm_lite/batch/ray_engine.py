"""Shards made by the workers of a Ray cluster: Ray Data's map_batches with a pool of actors, each with its own model.

Only numbers of shards and reports pass through Ray: workers read the table and write the shards themselves, in folders
that all machines share.  A worker that ends is replaced, and makes the shard again that it had begun.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ldm_lite.batch.table import extra
from ldm_lite.batch.worker import Report, Task, worker_of

RETRIES = 10  # of a shard whose worker was lost


class _Actor:
    """A worker in a process of Ray's.  Errors are results: Ray would show tracebacks, and try again."""

    def __init__(self, task: Task) -> None:
        os.chdir(task.folder)
        self._worker, self._error = None, None
        try:
            self._worker = worker_of(task)
        except (ValueError, TypeError, OSError) as error:
            self._error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        done: list[Any] = []
        for number in batch["id"]:
            try:
                done.append(self._error if self._worker is None else self._worker.make(int(number)))
            except (ValueError, TypeError, OSError) as error:
                done.append(error)
            except RuntimeError as error:
                if "CUDA error" in str(error):  # this process cannot use its GPU any more
                    os._exit(1)
                raise
        return {"report": done}


def reports(task: Task, numbers: Sequence[int]) -> Iterator[Report]:
    """Make shards in a cluster, and yield a report of each when it is made.

    Raises ValueError, one line, if Ray is not installed, for options that fit no row, and if there is no cluster at
    the address; ChildProcessError if workers are lost again and again.
    """
    ray, data = extra("ray", "ray"), extra("ray.data", "ray")
    least, most = task.options.pool
    gpus = task.options.gpus_per_worker
    if gpus is None:
        gpus = 0.0 if task.load.device == "cpu" else 1.0
    address = task.options.address
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=address, log_to_driver=task.options.debug, logging_level=logging.ERROR, include_dashboard=False
        )
    except ConnectionError as error:
        raise ValueError(f"got `address={address}`, where no Ray cluster answers: {error}") from error
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        shards = data.from_items([{"id": number} for number in numbers], override_num_blocks=len(numbers))
        made = shards.map_batches(
            _Actor,
            fn_constructor_args=(task,),
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=task.options.cpus_per_worker,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=RETRIES,
        )
        for row in made.iter_rows():
            if isinstance(row["report"], Exception):
                raise row["report"]
            yield row["report"]
    except ray.exceptions.RayError as error:
        line = str(error).strip().splitlines()[-1]
        raise ChildProcessError(f"workers of Ray were lost: {line}: the same command continues") from error
    finally:
        ray.shutdown()
