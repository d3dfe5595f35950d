"""Rows of options: everything about an option, once, as a field of a frozen dataclass.  Nothing here imports torch.

From a row come a keyword argument in Python, a flag with its help, checks, and a picture's text, written and read.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_CHARACTERS = 20_000  # limit of a text: CLIP reads about 400, and long words take quadratic time
FINITE = (-math.inf, math.inf)
# For packages around this one; nothing here reads these three constants.  OF_CLASS are the parts of a row that are
# functions of the feature's own file, and so are not known before it is imported.
SCALES = (0, 100)
WHY_SCALES = "1 is no guidance; below 0 the image follows the negative prompt, far above 30 only noise is left"
OF_CLASS = ("reads", "written", "from_text", "no_effect")


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: Sequence[str] | None = None,
    within: tuple[float, float] | None = None,
    reason: str | None = None,
    parse: Callable[[str, Any], Any] | None = None,
    excludes: tuple[str, ...] = (),
    reads: Callable[[str], Any] | None = None,
    no_effect: Callable[[Any], str | None] | None = None,
    # for packages around this one, as `flags` are
    positional: bool = False,
    common: bool = False,
    metavar: str | None = None,
    used_by: tuple[str, ...] | None = None,
    png: str | None = None,
    keys: tuple[str, ...] = (),
    restored: dict[str, Any] | None = None,
    always: bool = False,
    written: Callable[[Any], Any] | None = None,
    from_text: Callable[[Mapping[str, str], set[str]], Any] | None = None,
) -> Any:
    """Declare a dataclass field that is an option: a keyword argument of tasks, and the flag --its-name.

    `within` is the range of a number (always finite), with its `reason`; `choices` are its values; `parse` turns (name,
    text) into the value.  `excludes` are options that it does not go with.  In a feature, `reads` parses its text
    into the value of `feature.reading(name)`, or raises ValueError before a model is loaded; `no_effect` is
    a function of the job that returns why the option has no effect in it, or None.

    The rest is for packages around this one, and nothing here reads it.  Of their command lines: `flags` are further
    spellings; `positional` options may be given without one; a flag whose field is a
    tuple may be repeated; --help shows `common` flags, --help-all the rest too; `metavar` is the value's name in help;
    FILE, PATH or DIR in it marks options that name files; `used_by` names the text encoders that use the option.
    Of a picture's text: `png` is its key, `keys` are further ones that it is read from; `written` (value -> text) may
    replace the value, `restored` holds texts that mean other values, and `from_text` reads it (all
    settings, the options that the user gives -> value); with `always` the feature writes it itself.
    """
    about = {key: value for key, value in locals().items() if key != "default"}
    return dataclasses.field(default=default, metadata={**about, "flag": True})


def argument(help: str, default: Any = None) -> Any:
    """Declare a Python-only dataclass field, for an object that has no command-line form: for packages around this."""
    nothing = dict.fromkeys(("within", "parse", "png", "choices", "restored"))
    about = {"help": help, "flag": False, "excludes": (), "keys": (), "always": False, **nothing}
    return dataclasses.field(default=default, metadata=about)


def expected(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return the end of a message about a value that is not among an option's choices."""
    return f", expected one of {', '.join(choices)}"


def check_values(instance: Any, hint: Callable[[str, Any, Sequence[str]], str] = expected) -> None:
    """Check the values of a dataclass by its rows; numbers of numpy and torch become Python's.

    hint ends the message about a value that is not among its choices.

    Raises ValueError for a number out of range, or text that does not parse, TypeError for a value of another type.
    """
    types = types_of(type(instance))  # type: ignore[arg-type]
    for declared in dataclasses.fields(instance):
        name, value, about = declared.name, getattr(instance, declared.name), declared.metadata
        if "within" not in about:
            continue  # a plain field of a feature
        for text in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(text, str) and len(text) > MOST_CHARACTERS and "prompt" not in name:
                raise ValueError(f"got `{name}` of {len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
            if isinstance(text, str) and not text and declared.default != "" and "prompt" not in name:
                raise ValueError(f"got `{name}` '', an empty text: give a value, or leave it out")
        if value is not None and about["parse"] is not None:
            value = about["parse"](name, value)
        elif isinstance(declared.default, tuple) and not isinstance(value, tuple):
            value = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        kinds = typing.get_args(types[name]) or (types[name],)
        if value is not None or not {Any, type(None)} & {*kinds}:
            value = _typed(name, value, kinds)
        object.__setattr__(instance, name, value)
        for choice in value if isinstance(value, tuple) else [value]:
            if about["choices"] is not None and choice is not None and choice not in about["choices"]:
                raise ValueError(f"got `{name}` {choice!r:.60}{hint(name, choice, about['choices'])}")
        if about["within"] is not None:
            least, most = about["within"]
            for number in value if isinstance(value, tuple) else [value]:
                if number is None or (least <= number <= most and abs(number) != math.inf):
                    continue
                limits = f"{least} or more" if most == math.inf else f"{least} to {most}"
                limits = "a finite number" if about["within"] == FINITE else limits
                reason = f" ({about['reason']})" if about["reason"] else ""
                raise ValueError(f"got `{name}` {number!r:.60}, expected {limits}{reason}")


@functools.cache
def types_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, also of one whose file postpones annotations."""
    return typing.get_type_hints(kind)


TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _typed(name: str, value: Any, kinds: Sequence[Any]) -> Any:
    """An option's value as one of the types in its declaration.  Raises TypeError if it is none of them."""
    kind = next((known for known in TYPES if known in kinds), None)
    if kind is None:
        return value
    several = ... in kinds or any(typing.get_origin(hint) is Sequence for hint in kinds)
    single = isinstance(value, (str, bytes)) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0
    if several and not single:
        return tuple(_typed(name, item, (kind,)) for item in value)
    # A bool is not a number here, though it is one to Python.  Whole numbers are accepted for floats, unchanged.
    is_flag = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    with contextlib.suppress(TypeError, ValueError):
        if kind is bool and single and value in (True, False):
            return bool(value)
        if kind is int and not is_flag:
            return operator.index(value)
        if kind is float and not is_flag and not isinstance(value, str):
            return value if isinstance(value, int) else float(value)
        if kind is str and isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        if name == "spacing" and callable(value):  # a function of your own
            return value
    raise TypeError(f"got `{name}` {value!r:.50}, expected {TYPES[kind]}" + " or a list of them" * several)
