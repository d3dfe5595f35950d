"""Command-line flags from dataclasses of options.  Nothing here imports torch, so `--help` is instant."""

import argparse
import dataclasses
import difflib
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from ldm_lite.cli.console import as_flags, printable

Field = dataclasses.Field[Any]


class _Help(argparse.HelpFormatter):
    """Shows one spelling of each flag in --help, and all declared ones in --help-all."""

    most = 99  # spellings

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown: Sequence[str] | None = getattr(action, "shown", None)
        if shown is None:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown[: self.most]) + value


class _ShowHelp(argparse.Action):
    """Prints a help text and exits, even if other flags are wrong."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, _Parser)
        print(parser.format_help() if self.dest == "help_all" else parser.short_help(), end="")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser with two help texts: --help shows the common flags, --help-all every flag in its group."""

    def __init__(self, command: str, about: str, positional: str) -> None:
        super().__init__(
            prog=f"python -m ldm_lite.{command}",
            usage=f"%(prog)s {positional}[--flag VALUE ...]",
            description=about,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: _Help(prog, max_help_position=34),
        )
        self.common: list[argparse.Action] = []
        section = self.add_argument_group("help")
        section.add_argument("-h", "--help", action=_ShowHelp, help="show the common options and exit")
        section.add_argument("--help-all", action=_ShowHelp, help="show all options and exit")

    def short_help(self) -> str:
        """Return the help of the common flags, one spelling each."""
        formatter = cast(_Help, self._get_formatter())
        formatter.most = 1
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("common options")
        formatter.add_arguments(self.common)
        formatter.end_section()
        formatter.add_text(f"--help-all shows all {sum(bool(each.option_strings) for each in self._actions)} options.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr, which names the nearest flag for an unknown one."""
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        if message.startswith("unrecognized") and (
            near := difflib.get_close_matches(unknown, self._option_string_actions)
        ):
            message = f"unknown flag {unknown}: the nearest is {near[0]}"
        elif message.startswith("unrecognized") and not unknown and "[PROMPT]" in (self.usage or ""):
            message = f"got words after the prompt, {message.split(': ')[1]!r}: put it in quotes"
        self.exit(2, f"error: {printable(message)} (see --help)\n")


def parse(
    argv: Sequence[str] | None,
    command: str,
    about: str,
    groups: Sequence[type],
    extend: Callable[[argparse.ArgumentParser], object] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Parse flags into one instance of each dataclass in `groups`, and the values of the flags that `extend` adds.

    A missing flag keeps the dataclass's default.  --help shows the flags marked as common, and all flags of a dataclass
    that marks none.
    """
    fields = [each for group in groups for each in dataclasses.fields(group)]
    positional = "".join(f"[{each.name.upper()}] " for each in fields if each.metadata.get("positional"))
    parser = _Parser(command, about, positional)
    for group in groups:
        hints = typing.get_type_hints(group)
        marks = any(each.metadata.get("common") for each in dataclasses.fields(group))
        for title, owned in _sections(group):
            section = parser.add_argument_group(title)
            for each in owned:
                if each.metadata["flag"]:
                    action = _add(section, each, hints[each.name])
                    if each.metadata["common"] or not marks:
                        parser.common.append(action)
    if extend is not None:
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
        parser.error(as_flags(str(error)))
    return made, given


def _sections(group: type) -> list[tuple[str, list[Field]]]:
    """Group a dataclass's fields by defining class, its own first, titled with that class's first sentence."""
    owned: dict[type, list[Field]] = {each: [] for each in group.__mro__}
    for each in dataclasses.fields(group):
        owned[next(owner for owner in owned if each.name in inspect.get_annotations(owner))].append(each)
    titles = {owner: (owner.__doc__ or "").split(".  ")[0].rstrip(".").lower() for owner in owned}
    return [(titles[owner], fields) for owner, fields in owned.items() if fields]


def _add(section: Any, each: Field, hint: Any) -> argparse.Action:
    """Add a dataclass field as a flag.  Each spelling is accepted with - and with _; help shows the declared ones."""
    if isinstance(hint, types.UnionType):
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    about = each.metadata
    shown = [f"--{each.name.replace('_', '-')}", *about["flags"]]
    spelled = [(name, f"--{name[2:].replace('_', '-')}", f"--{name[2:].replace('-', '_')}") for name in shown]
    names = dict.fromkeys(itertools.chain(*spelled))
    default = "" if each.default in (None, False, (), "") else f" (default: {each.default})"
    kwargs: dict[str, Any] = {"dest": each.name, "help": (about["help"] + default).replace("%", "%%")}
    repeatable = typing.get_origin(hint) is tuple and about["parse"] is None
    if hint is bool:
        kwargs["action"] = "store_true"
    elif repeatable:
        kwargs |= {"action": "append", "type": _text, "metavar": about["metavar"]}
    else:
        kind = hint if hint in (int, float) else str
        may_be_empty = kind is not str or each.name.endswith("prompt")
        kwargs |= {"type": kind if may_be_empty else _text, "choices": about["choices"]}
        if about["choices"] is None:
            kwargs["metavar"] = about["metavar"] or {int: "N", float: "X"}.get(kind, "TEXT")
    if about["positional"]:
        section.add_argument(f"{each.name}_argument", nargs="?", metavar=each.name.upper(), help=kwargs["help"])
    action: argparse.Action = section.add_argument(*names, **kwargs)
    action.shown = shown  # type: ignore[attr-defined]
    return action


def _text(value: str) -> str:
    """Return a flag's text.  "" is refused: it is usually an unset shell variable, and as a path the current folder."""
    if not value:
        raise argparse.ArgumentTypeError("got an empty text: give a value, or leave the flag out")
    return value


def original_flags(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of the original scripts that have other names here; return their section of the help."""
    section = parser.add_argument_group("flags of the original scripts that have other names here")
    section.add_argument("--plms", dest="sampler", action="store_const", const="plms", help="--sampler plms")
    section.add_argument(
        *("--dpm_solver", "--dpm"), dest="sampler", action="store_const", const="dpmpp_2m", help="--sampler dpmpp_2m"
    )
    section.add_argument("--precision", choices=("full", "autocast"), help="full: --dtype fp32; autocast: the default")
    section.add_argument("--config", help="not needed: the checkpoint says what it is")
    section.add_argument("--C", type=int, help="latent channels: checked against the checkpoint")
    section.add_argument("--f", type=int, help="pixels per latent position: checked against the checkpoint")
    return section


def txt2img_flags(parser: argparse.ArgumentParser) -> None:
    """Add original_flags, and the flags of the original txt2img."""
    section = original_flags(parser)
    section.add_argument("--laion400m", action="store_true", help="--ckpt models/ldm/text2img-large/model.ckpt")


def edit_flags(parser: argparse.ArgumentParser) -> None:
    """Add original_flags, and the flags of InstructPix2Pix's edit_cli.py."""
    original_flags(parser)
    section = parser.add_argument_group("flags of InstructPix2Pix's edit_cli.py that have other names here")
    section.add_argument("--edit", dest="prompt", metavar="TEXT", help="the prompt")
    section.add_argument("--output", dest="out", metavar="TEXT", help="--out")
    section.add_argument("--vae-ckpt", dest="vae", metavar="TEXT", help="--vae")
    section.add_argument("--cfg-text", dest="scale", type=float, metavar="X", help="--scale")
