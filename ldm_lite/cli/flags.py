"""Dataclasses of options to command-line flags.  Nothing here imports torch, so `--help` is instant."""

import argparse
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        if message.startswith("unrecognized") and (
            near := difflib.get_close_matches(unknown, self._option_string_actions)
        ):
            message = f"unknown flag {unknown}: the nearest is {near[0]}"
        elif message.startswith("unrecognized") and not unknown and "[PROMPT]" in (self.usage or ""):
            message = f"got words beside the prompt, {message.split(': ')[1]!r}: put it into quotes"
        self.exit(2, f"error: {message} (see --help)\n")


def parse(
    argv: Sequence[str] | None,
    command: str,
    about: str,
    groups: Sequence[type],
    extend: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> tuple[list[Any], dict[str, Any]]:
    """Flags -> one instance per dataclass of `groups`, and what else was given to flags that `extend` has added.

    A flag that is not given keeps the dataclass's default, the only one there is.
    """
    parser = _Parser(
        prog=f"python -m ldm_lite.{command}",
        usage=f"%(prog)s {'[PROMPT] ' * _has_prompt(groups)}[--flag VALUE ...]",
        description=about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    for group in groups:
        hints = typing.get_type_hints(group)
        for title, fields in _sections(group):
            section = parser.add_argument_group(title)
            for each in fields:
                _add(section, each, hints[each.name])
    extend(parser)
    given = vars(parser.parse_args(argv))
    for key in [key for key in given if key.endswith("_argument")]:
        name, value = key.removesuffix("_argument"), given.pop(key)
        if value is not None and name in given:
            parser.error(f"got a {name} both as an argument and as --{name}")
        if value is not None:
            given[name] = value
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        made = [
            group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group) if f.name in given})
            for group in groups
        ]
    except ValueError as error:
        parser.error(str(error))
    return made, given


def _has_prompt(groups: Sequence[type]) -> bool:
    return any(each.metadata["positional"] for group in groups for each in dataclasses.fields(group))


def _sections(group: type) -> list[tuple[str, "list[dataclasses.Field[Any]]"]]:
    """A dataclass's fields by the class that has defined them, its own first, each with that class's first sentence."""
    owned: dict[type, list[dataclasses.Field[Any]]] = {each: [] for each in group.__mro__}
    for each in dataclasses.fields(group):
        owned[next(owner for owner in owned if each.name in inspect.get_annotations(owner))].append(each)
    return [((owner.__doc__ or "").split(".")[0].lower(), fields) for owner, fields in owned.items() if fields]


def _add(section: Any, each: "dataclasses.Field[Any]", hint: Any) -> None:
    """One dataclass field as a flag, under all its spellings: with - and with _, as people remember either."""
    if isinstance(hint, types.UnionType):
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    names = dict.fromkeys(
        variant
        for name in (f"--{each.name}", *each.metadata["flags"])
        for variant in (name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_"))
    )
    shown = "" if each.default in (None, False, (), "") else f" (default: {each.default})"
    kwargs: dict[str, Any] = {"dest": each.name, "help": each.metadata["help"] + shown}
    if hint is bool:
        kwargs["action"] = "store_true"
    elif typing.get_origin(hint) is tuple:
        kwargs |= {"action": "append", "type": _text, "metavar": each.metadata["metavar"]}
    else:
        may_be_empty = hint is not str or each.name.endswith("prompt")
        kwargs |= {"type": hint if may_be_empty else _text, "choices": each.metadata["choices"]}
        if each.metadata["choices"] is None:
            kwargs["metavar"] = each.metadata["metavar"] or {int: "N", float: "X"}.get(hint, "TEXT")
    if each.metadata["positional"]:
        section.add_argument(f"{each.name}_argument", nargs="?", metavar=each.name.upper(), help=kwargs["help"])
    section.add_argument(*names, **kwargs)


def _text(value: str) -> str:
    """What a flag is given, of which "" is none: an unset variable of a shell, which would be a path, the folder's."""
    if not value:
        raise argparse.ArgumentTypeError("got an empty text: give a value, or leave the flag out")
    return value
