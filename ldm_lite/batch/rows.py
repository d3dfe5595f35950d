"""Rows of a table as options of a task."""

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ldm_lite import Pipeline
from ldm_lite.batch.options import COLUMNS, FILES, LISTS, SHARED, column_type
from ldm_lite.batch.table import TableRow, as_column
from ldm_lite.cli.declared import registered
from ldm_lite.cli.options import SEEDS, CheckedOptions, changed
from ldm_lite.cli.synonyms import advice
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.toolkit import prompt_kind, text_length, with_networks

log = logging.getLogger("ldm_lite")

_KINDS: tuple[type[Txt2imgOptions], ...] = (Txt2imgOptions, Img2imgOptions, InpaintOptions)  # by the number of files
ANYWHERE = ("clip_vision", "hires_esrgan")  # columns of files that may also be names on the hub
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class RowItem:
    """A row that can be made into an image."""

    number: int  # in the table
    name: str  # its id
    prompt: str
    negative_prompt: str | None
    seed: int
    files: tuple[str, ...]  # the image to start from, and the mask
    loras: tuple[str, ...]  # FILE[:WEIGHT]
    options: Txt2imgOptions  # everything else: equal in rows that run together
    length: int | None  # of its texts, as text_length has it: None must run alone

    @property
    def complete_options(self) -> Txt2imgOptions:
        """All options of the row, without its files."""
        return dataclasses.replace(
            self.options, prompt=self.prompt, negative_prompt=self.negative_prompt, seed=self.seed
        )


@dataclass(frozen=True)
class Failed:
    """A row that cannot, and why."""

    number: int
    name: str
    error: str
    seed: int | None = None

    @property
    def line(self) -> dict[str, Any]:
        """Its line of the manifest, without the shard."""
        return {"id": self.name, "row": self.number, "seed": self.seed, "error": self.error}


@dataclass
class TableRows:
    """Reads rows, for a model; `defaults` are RowOptions, `folders` are where files are looked for."""

    model: Pipeline
    defaults: CheckedOptions
    most_pixels: int | None
    folders: Sequence[Path]
    _ignored: set[str] = field(default_factory=set)
    _networks: dict[str, Any] = field(default_factory=dict)  # of controls, by their files: each is loaded once

    def read(self, first: int, rows: Sequence[TableRow]) -> list[RowItem | Failed]:
        """Return the rows of a shard whose first one has this number in the table."""
        return [self._read(first + i, row) for i, row in enumerate(rows)]

    def _read(self, number: int, row: TableRow) -> RowItem | Failed:
        name, seed = str(number), None
        try:
            if isinstance(row, str):
                raise ValueError(row)
            values = self._values(row)
            name, prompt = values.pop("id", name), values.pop("prompt", None)
            row_seed = values.pop("seed", (getattr(self.defaults, "seed") + number) % 2**64)  # noqa: B009
            if not SEEDS[0] <= row_seed <= SEEDS[1]:  # nor a random one: a row must be reproducible
                raise ValueError(f"got `seed` {row_seed!r:.60}, expected {SEEDS[0]} to {SEEDS[1]}")
            seed = row_seed
            if "mask" in values and "init_img" not in values:
                raise ValueError("got a mask, but no init_image")
            files = tuple(self._find(values.pop(key)) for key in ("init_img", "mask") if key in values)
            if prompt is None and prompt_kind(self.model) != "none":
                raise ValueError("has no prompt")
            loras = values.pop("lora", ())
            of_features = {name: values.pop(name) for name in registered() if name in values}
            negative = values.pop("negative_prompt", getattr(self.defaults, "negative_prompt"))  # noqa: B009
            kind = _KINDS[len(files)]
            names = {field.name for field in dataclasses.fields(kind)}
            if unused := sorted(values.keys() - names):
                task, needs = kind.__name__.removesuffix("Options").lower(), "" if files else ": it needs an init_image"
                raise ValueError(f"got {unused[0]}, which {task} does not have{needs}")
            shared = {key: getattr(self.defaults, key) for key in (*SHARED, "embedding") if key in names}
            options = changed(kind(**shared | values | {"seed": seed}), **of_features)
            options = dataclasses.replace(options, seed=0, negative_prompt=None)
            options = with_networks(options, self._networks)
            side = self.model.family.resolution
            most = max(16 * side**2, 2048**2) if self.most_pixels is None else self.most_pixels
            height = side if options.height is None else options.height
            width = side if options.width is None else options.width
            if height * width > most:
                raise ValueError(f"got {width} x {height} pixels, expected at most {most}, the limit of `most_pixels`")
            length = text_length(self.model, (prompt, negative), options.prompt_syntax)
            return RowItem(number, name, prompt or "", negative, seed, files, loras, options, length)
        except Exception as error:  # every row gets its line of the manifest, whatever it holds
            return Failed(number, name, describe(error), seed)

    def files(self, row: TableRow) -> list[str]:
        """The files that a row names, and that exist."""
        paths: list[str] = []
        values = {} if isinstance(row, str) else row
        for path in (values[name] for name in FILES if name in values):
            with contextlib.suppress(OSError, ValueError, TypeError):
                paths.append(self._find(path))
        for name in (*LISTS, *ANYWHERE):
            with contextlib.suppress(OSError, ValueError):
                cell = convert(name, values.get(name, ()))
                paths += map(self._with_paths, [cell] if isinstance(cell, str) else cell)
        return paths

    def _find(self, path: str) -> str:
        """Return the first file of this name in the folders.  Raises OSError, ValueError if there is none."""
        places = [folder / path for folder in self.folders]
        for place in places:
            if place.is_file():
                return os.fspath(place)
        if any(place.exists() for place in places):
            raise ValueError(f"{path}: is not a file, expected one image")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _with_paths(self, text: str) -> str:
        """Return FILE[:IMAGE][:WEIGHT] with the paths of those that are files in the folders."""

        def path_of(name: str) -> str:
            paths = (folder / name for folder in self.folders)
            return next((os.fspath(path) for path in paths if path.is_file()), name)

        return ":".join(map(path_of, text.split(":")))

    def _values(self, row: dict[str, Any]) -> dict[str, Any]:
        """The values of a row by option, with the types of their options."""
        values: dict[str, Any] = {}
        for column, value in row.items():
            name = as_column(column)
            if name in COLUMNS or name in registered():
                cell = convert(name, value)
                if name in LISTS:
                    cell = tuple(map(self._with_paths, cell))
                values[FILES.get(name, name)] = self._with_paths(cell) if name in ANYWHERE else cell
            elif column not in self._ignored and len(self._ignored) < 100:
                self._ignored.add(column)
                hint = advice(column, {known: known for known in COLUMNS}, "batch", elsewhere=False).replace("`", "")
                log.warning("column %r is ignored%s", column, f": {hint}" if hint else "")
        return values


def convert(name: str, value: Any) -> Any:
    """Return a cell's value with the type of its column; numbers may be texts.  Raises ValueError for another type."""
    kind = column_type(name)
    if name in LISTS:
        texts = value.split(";") if isinstance(value, str) else value
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            return tuple(text.strip() for text in texts if text.strip())
    elif name == "id":
        if isinstance(value, (str, int)):
            return str(value)
    elif kind is None or (kind is str and isinstance(value, str)):
        return value
    elif kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if (word := str(value).strip().lower()) in words:
            return words[word]
    elif kind in (int, float) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = kind(value)
            if number == value or isinstance(value, str) or kind is float:
                return number
        except (ValueError, OverflowError):
            pass
    raise ValueError(f"got {name} {value!r:.60}, expected {WANTED[str if name == 'id' else kind]}")


def group(items: Sequence[RowItem]) -> list[list[RowItem]]:
    """Items that can run together, in the order of their first ones."""
    groups: dict[object, list[RowItem]] = {}
    for item in items:
        alone = item.number if item.length is None else None
        groups.setdefault((item.loras, type(item.options), item.options, item.length, alone), []).append(item)
    return list(groups.values())


def describe(error: Exception) -> str:
    """One line about why a row failed."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    line = " ".join(str(error).split()) or type(error).__name__
    return line if isinstance(error, (ValueError, TypeError, OSError)) else f"{type(error).__name__}: {line}"
