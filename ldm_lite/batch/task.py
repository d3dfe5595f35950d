"""What a worker needs to know, and what it reports.

A worker holds a model and makes shards; it is told only their numbers.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ldm_lite.batch.options import BatchOptions
from ldm_lite.batch.store import Store
from ldm_lite.batch.table import Table
from ldm_lite.cli.options import CheckedOptions, LoadOptions


@dataclass(frozen=True)
class Task:
    """What a worker needs; it can be sent to another process."""

    options: BatchOptions
    defaults: CheckedOptions  # RowOptions
    load: LoadOptions
    table: Table
    out: Path
    folder: Path  # where the command was given

    @property
    def store(self) -> Store:
        """Where the shards go."""
        tars = self.options.format == "shards" and not self.options.encode
        return Store(self.out, ".tar" if tars else "")


@dataclass(frozen=True)
class Report:
    """What became of a shard."""

    number: int
    rows: int
    made: bool  # False: it was there
    failed: int = 0  # rows
    messages: tuple[str, ...] = ()


class Worker(Protocol):
    """What makes shards."""

    def make(self, number: int) -> Report:
        """Make a shard, unless it is there and made of the same rows."""


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Within the block keep messages for the report: the first warnings, each once.  A job may have millions."""
    messages: list[str] = []
    logger = logging.getLogger("ldm_lite")

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage() if record.levelno >= logging.WARNING and len(messages) < 10 else ""
        if text and text not in messages:
            messages.append(text)
        return False

    logger.addFilter(keep)
    try:
        yield messages
    finally:
        logger.removeFilter(keep)
