"""The results of a job: whole shards, a list of what is in each, and the manifest of all; and what workers receive.

A shard's list is written before the shard, which is done if its list names the right rows and all its bytes are there.
"""

import contextlib
import io
import json
import logging
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ldm_lite.batch.options import BatchOptions
from ldm_lite.batch.places import Folder, size
from ldm_lite.batch.table import Table, extra
from ldm_lite.cli.files import parse_object
from ldm_lite.cli.options import CheckedOptions, LoadOptions
from ldm_lite.cli.writing import flush

JOB = "job.json"
MOST_HEAD = 2**16  # bytes of a list's first line
COLUMNS = {  # of the manifest, with their types in Parquet
    "id": "string",
    "row": "int64",
    "shard": "string",
    "seed": "uint64",
    "sha256": "string",
    "time": "float64",
    "error": "string",
}


@dataclass
class Shard:
    """Unfinished files, beside their final place."""

    name: str
    part: Path  # where they are now
    tar: tarfile.TarFile | None  # None: in a folder
    lines: list[Mapping[str, Any]] = field(default_factory=list)  # of the manifest

    def add(self, name: str, content: bytes) -> None:
        """Write a file.  Raises OSError."""
        if self.tar is not None:
            _add(self.tar, name, content)
        else:
            (self.part / name).write_bytes(content)
            flush(self.part / name)


@dataclass(frozen=True)
class Store:
    """Shards in a place: .tar files, or folders."""

    place: Folder
    suffix: str  # of a shard's name: ".tar", or "" for folders

    def name(self, number: int) -> str:
        """The name of a shard."""
        return f"{number:05}{self.suffix}"

    def list_of(self, number: int) -> str:
        """The file that lists a shard's content: a digest of its inputs, and lines of the manifest."""
        return f"parts/{number:05}.jsonl"

    def is_done(self, number: int, rows: str | None = None) -> bool:
        """Whether a shard is whole and, unless None, made of rows with this digest."""
        try:
            line, end, _ = self.place.read(self.list_of(number), MOST_HEAD).partition(b"\n")
            head = json.loads(line)
            whole = self.place.size(self.list_of(number)) == len(line + end) + head["lines"]
            return whole and rows in (None, head["rows"]) and head["size"] == self.place.size(self.name(number))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    @contextlib.contextmanager
    def writing(self, number: int, rows: str) -> Iterator[Shard]:
        """Write a shard of the rows with this digest; it is put in its place at the end of the block, or not at all.

        An earlier one is removed.  Raises OSError, with the shard's name, if the disk is full.
        """
        for name in ("manifest.parquet", "manifest.jsonl", "index.json", self.name(number)):
            self.place.remove(name)
        with self.place.new(self.name(number)) as part, contextlib.ExitStack() as opened:
            tar = None
            if self.suffix:
                tar = opened.enter_context(tarfile.open(part, "w", format=tarfile.USTAR_FORMAT))
            else:
                part.mkdir()
            shard = Shard(self.name(number), part, tar)
            yield shard
            opened.close()  # all its bytes are there
            lines = b"".join(map(_json, sorted(shard.lines, key=lambda line: int(line["row"]))))
            head = {"rows": rows, "size": size(part), "lines": len(lines)}
            self.place.write(self.list_of(number), _json(head) + lines)

    def lines(self, number: int) -> list[dict[str, Any]]:
        """Return a shard's lines of the manifest.  Raises OSError."""
        return [json.loads(line) for line in self.place.read(self.list_of(number)).splitlines()[1:]]

    def clean(self, which: int, of: int) -> None:
        """Remove what a killed process left unfinished: its shards, and shared files if no other can be running."""
        for folder in ("", "parts/"):
            for name in self.place.names(folder):
                if name.startswith(".") and name.endswith(".part"):
                    number = name[1:].partition(".")[0]
                    if int(number) % of == which if number.isdecimal() else of == 1:
                        self.place.remove(folder + name)

    def beyond(self, count: int) -> list[str]:
        """The names of shards whose number is `count` or more."""
        numbers = [name.removesuffix(".jsonl") for name in self.place.names("parts")]
        return sorted(self.name(int(number)) for number in numbers if number.isdecimal() and int(number) >= count)


def write_manifest(store: Store, count: int, kind: str) -> None:
    """Write the manifest of all `count` shards from their lists, one shard in memory at a time.  Raises OSError."""
    with store.place.new(f"manifest.{kind}") as part:
        if kind == "jsonl":
            with open(part, "wb") as file:
                for number in range(count):
                    file.writelines(_json(line) for line in store.lines(number))
            return
        arrow, parquet = extra("pyarrow", "batch"), extra("pyarrow.parquet", "batch")
        schema = arrow.schema([(name, getattr(arrow, type)()) for name, type in COLUMNS.items()])
        with parquet.ParquetWriter(part, schema) as writer:
            for number in range(count):
                lines = [{name: _utf8(value) for name, value in line.items()} for line in store.lines(number)]
                writer.write_table(arrow.Table.from_pylist(lines, schema))


def check_job(place: Folder, job: Mapping[str, Any]) -> None:
    """Write the job's description, or compare it with that of the place's results.

    Raises ValueError, one line, if they differ; OSError.
    """
    content = json.dumps(job, indent=1, sort_keys=True).encode()
    if JOB not in place.names():
        place.write(JOB, content)
        return
    before, now = parse_object(place.read(JOB), f"{place}/{JOB}"), json.loads(content)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            a, b = (json.dumps(values.get(name), ensure_ascii=False) for values in (before, now))
            raise ValueError(
                f"{place}: was made with {name} {a:.200}, now it is {b:.200}: use the same value, or another `out`"
            )


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)  # owner 0, time 0, mode 644
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _json(line: Mapping[str, Any]) -> bytes:
    """A line of JSON; unpaired surrogates, which UTF-8 cannot encode, become JSON's escapes."""
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _utf8(value: Any) -> Any:
    """A value of the manifest; unpaired surrogates become escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


@dataclass(frozen=True)
class Task:
    """What a worker needs; it can be sent to another process."""

    options: BatchOptions
    defaults: CheckedOptions  # RowOptions
    load: LoadOptions
    table: Table
    place: Folder
    folder: Path  # where the command was given

    @property
    def store(self) -> Store:
        """Where the shards go."""
        tars = self.options.format == "shards" and not self.options.encode
        return Store(self.place, ".tar" if tars else "")


@dataclass(frozen=True)
class Report:
    """The result of a shard."""

    number: int
    rows: int
    is_new: bool  # False: it was there already
    failed: int = 0  # rows
    messages: tuple[str, ...] = ()


class Worker(Protocol):
    """A maker of shards."""

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
