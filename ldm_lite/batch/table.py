"""Tables of prompts, read shard by shard: .parquet, .jsonl, .csv and .txt.

No more than a shard is in memory.  A row is a dict, or a text that says why it cannot be read.  Empty lines are not
rows.
"""

import csv
import importlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ldm_lite.batch.options import COLUMNS
from ldm_lite.cli.files import open_file
from ldm_lite.cli.version import pip_install

log = logging.getLogger("ldm_lite")

MOST_LINE = 2**20  # bytes of a row
TableRow = dict[str, Any] | str


def extra(module: str, name: str) -> Any:
    """Import a module of an optional extra.  Raises ValueError, one line, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module.split('.')[0]} is not installed: {pip_install(name)}") from error


@dataclass
class Table:
    """The rows of a file in shards of `size` rows, of which the last may have fewer."""

    path: Path
    size: int
    count: int  # rows
    starts: list[int] = field(default_factory=list, repr=False)  # of text: the byte where each shard begins
    columns: list[str] = field(default_factory=list)  # of .csv and .parquet
    _open: tuple[int, Iterator[TableRow]] | None = field(default=None, repr=False)  # the next shard and its rows

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.count // self.size)

    def rows(self, shard: int) -> list[TableRow]:
        """Return the rows of a shard; reading shards in order is fastest.  Raises ValueError, OSError."""
        if self._open is None or self._open[0] != shard:
            rows = self._parquet(shard) if self.path.suffix.lower() == ".parquet" else self._text(shard)
            self._open = shard, rows
        shard_rows = list(islice(self._open[1], self.size))
        self._open = shard + 1, self._open[1]
        return shard_rows

    def _text(self, shard: int) -> Iterator[TableRow]:
        with open_file(self.path) as file:
            file.seek(self.starts[shard])
            for row, _ in _records(file, self.path.suffix.lower(), self.columns):
                yield row

    def _parquet(self, shard: int) -> Iterator[TableRow]:
        parquet, first = extra("pyarrow.parquet", "batch"), shard * self.size
        with open_file(self.path) as opened, parquet.ParquetFile(opened) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            group = 0
            while group < len(sizes) and first >= sizes[group]:
                first, group = first - sizes[group], group + 1
            for batch in file.iter_batches(self.size, row_groups=range(group, len(sizes)), columns=self.columns):
                for row in _from_arrow(batch)[first:]:
                    yield row if isinstance(row, str) else {k: value for k, value in row.items() if value is not None}
                first = max(0, first - batch.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": None}


def _from_arrow(batch: Any) -> list[TableRow]:
    """The rows of an Arrow table; one by one if Python has no value for some."""
    try:
        rows: list[TableRow] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # such as text that is not UTF-8
        if batch.num_rows == 1:
            return [f"has a value that cannot be read ({error})"]
        return [row for number in range(batch.num_rows) for row in _from_arrow(batch.slice(number, 1))]
    return rows


def as_column(name: str) -> str:
    """A column's name as an option's in Python."""
    return name.strip().replace("-", "_")


def open_table(path: Path, size: int) -> Table:
    """Count the rows of a table, and find where its shards begin.

    Raises ValueError, one line, for another kind of file, one without rows, a .csv or .parquet without a column of
    prompts, and a .parquet without pyarrow; OSError.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        parquet, arrow = extra("pyarrow.parquet", "batch"), extra("pyarrow", "batch")
        try:
            with open_file(path) as opened, parquet.ParquetFile(opened) as file:
                names = list(file.schema_arrow.names)
                known = [name for name in names if as_column(name) in COLUMNS]
                table = Table(path, size, file.metadata.num_rows, columns=known)
        except arrow.ArrowException as error:
            raise ValueError(f"{path}: is not a Parquet file that can be read ({error})") from error
        if len(known) < len(names):
            log.warning("%s: columns %s are ignored", path, ", ".join(sorted(set(names) - set(known))))
    elif kind in (".jsonl", ".csv", ".txt"):
        table = Table(path, size, 0)
        with open_file(path) as file:
            if kind == ".csv":
                header, _ = next(_records(file, kind, []), ({}, 0))
                if isinstance(header, str):
                    raise ValueError(f"{path}: its first line {header}")
                table.columns = list(header)
            position = file.tell()
            for _, after in _records(file, kind, table.columns):
                if table.count % size == 0:
                    table.starts.append(position)
                table.count, position = table.count + 1, after
    else:
        raise ValueError(f"{path}: is not a table of prompts, expected .parquet, .jsonl, .csv or .txt")
    if kind in (".csv", ".parquet") and table.count and "prompt" not in map(as_column, table.columns):
        raise ValueError(f"{path}: has no column named prompt: rename the one with the prompts")
    if not table.count:
        raise ValueError(f"{path}: holds no prompt")
    return table


def _records(file: BinaryIO, kind: str, columns: list[str]) -> Iterator[tuple[TableRow, int]]:
    """Yield the rows of a text from its position on, each with the position after it.

    Without columns the row of a .csv is its header, as a dict of the names.
    """
    lines = _lines(file)
    if kind == ".csv":
        reader = csv.reader(map(_raised, lines), strict=True)
        while True:
            start = file.tell()
            try:
                values = next(reader)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                file.seek(start)  # it may have an unclosed quote, which must not swallow the next rows
                lines = _lines(file)
                next(lines)
                reader = csv.reader(map(_raised, lines), strict=True)
                yield f"is not a row of a table ({error})", file.tell()
                continue
            if values and not columns:
                names = [name.strip() for name in values]
                twice = next((name for name in names if names.count(name) > 1), None)
                yield f"has the column {twice!r} twice" if twice else dict.fromkeys(names, ""), file.tell()
                return
            if values and len(values) != len(columns):
                yield f"has {len(values)} cells, expected {len(columns)}, those of the header", file.tell()
            elif values:  # empty cells are missing, except a prompt
                cells = zip(columns, values, strict=True)
                yield {name: value for name, value in cells if value or name == "prompt"}, file.tell()
    for line in lines:
        if isinstance(line, Exception):
            yield f"is not a line of text in UTF-8 ({line})", file.tell()
        elif line.strip():
            yield {"prompt": line.strip()} if kind == ".txt" else _as_json(line), file.tell()


def _lines(file: BinaryIO) -> Iterator[str | UnicodeDecodeError]:
    """Yield the lines of a file as text, of limited length, or why one is not; each ends where file.tell() is."""
    encoding = "utf-8-sig" if file.tell() == 0 else "utf-8"
    while line := file.readline(MOST_LINE):
        rest = line
        while len(rest) == MOST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MOST_LINE)
        try:
            if rest is not line:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, f"more than {MOST_LINE} bytes")
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            yield error
        encoding = "utf-8"


def _raised(line: str | UnicodeDecodeError) -> str:
    if isinstance(line, Exception):
        raise line
    return line


def _as_json(line: str) -> TableRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(row, dict):
        return 'is not an object of JSON, expected {"prompt": ...}'
    return {name: value for name, value in row.items() if value is not None}
