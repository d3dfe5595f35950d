"""A run's options as a file: config.toml beside its results, from which `config=FILE` repeats the run."""

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

from ldm_lite.cli.files import read_text
from ldm_lite.cli.options import CheckedOptions, LoadOptions, given
from ldm_lite.cli.version import __version__
from ldm_lite.train.options import TrainOptions

CONFIG = "config.toml"
_OF_A_CALL = ("out", "resume", "config", "debug")  # they do not change what a run computes


def as_toml(options: TrainOptions, load: LoadOptions) -> str:
    """Return the text of a config.toml: every option of a run that has a value."""
    lines = [f"# Of a run of ldm_lite {__version__}: `python -m ldm_lite.train --config FILE --out FOLDER` repeats it."]
    for title, group in (("train", options), ("load", load)):
        lines += ["", f"[{title}]"]
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if value is not None and field.name not in _OF_A_CALL:
                lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return json.dumps(str(getattr(value, "path", value)))  # an open checkpoint has a path


def with_config(options: TrainOptions, load: LoadOptions) -> tuple[TrainOptions, LoadOptions]:
    """Return the options with those of the file `options.config`, if there is one, where none were given.

    Raises ValueError, one line, for a file that is no config.toml, and for options that do not exist; OSError.
    """
    if options.config is None:
        return options, load
    path = Path(options.config)
    try:
        tables = importlib.import_module("tomllib").loads(read_text(path))
    except ModuleNotFoundError as error:
        raise ValueError("`config` needs Python 3.11 or newer: give the options one by one") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not a config.toml ({error})") from error
    for title, table in tables.items():
        if title not in ("train", "load") or not isinstance(table, dict):
            raise ValueError(f"{path}: has {title!r:.50}, wanted the tables [train] and [load]")
    return _filled(options, tables.get("train", {}), path), _filled(load, tables.get("load", {}), path)


def _filled(options: Any, table: dict[str, Any], path: Path) -> Any:
    names = {field.name for field in dataclasses.fields(options)} - set(_OF_A_CALL)
    if unknown := sorted(table.keys() - names):
        raise ValueError(f"{path}: {unknown[0]!r:.50} is not an option of training")
    assert isinstance(options, CheckedOptions)
    explicit = {name: getattr(options, name) for name in given(options) if name != "config"}
    try:
        return type(options)(**{**table, **explicit})
    except TypeError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
