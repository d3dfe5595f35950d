"""Command-line flags from dataclasses of options.  Nothing here imports torch, so `--help` is instant."""

import argparse
import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from ldm_lite.cli.console import as_flags, printable, shortened, show
from ldm_lite.core.declare import TYPES

Field = dataclasses.Field[Any]
LONGEST_CHOICES = 50  # characters of a line of help, beside the flag
FLAG = "{flag}"  # in messages of `type` functions, which do not know the flag


class _Help(argparse.HelpFormatter):
    """Shows one spelling of each flag in --help, and all declared ones in --help-all and --help TOPIC."""

    most = 99  # spellings

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown: Sequence[str] | None = getattr(action, "shown", None)
        if shown is None:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown[: self.most]) + value


class _ShowHelp(argparse.Action):
    """Prints a help text and exits, even if other flags are wrong."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, topic: Any, flag: str | None = None) -> None:
        assert isinstance(parser, _Parser)
        near = [name for name in parser.topics if topic and (name.startswith(topic) or topic.startswith(name))]
        if topic and not near:
            parser.error(f"unknown topic {topic!r:.60}: expected one of {', '.join(parser.topics)}")
        whole = self.dest == "help_all"
        parser.exit(show(parser.format_help() if whole else parser.short_help(near[0] if near else None)))


class _Parser(argparse.ArgumentParser):
    """A parser with three help texts: of the common flags, of a topic's, and of every flag in its group."""

    def __init__(self, command: str, about: str, positional: str) -> None:
        super().__init__(
            prog=f"python {command}" if command.endswith(".py") else f"python -m ldm_lite.{command}",
            usage=f"%(prog)s {positional}[--flag VALUE ...]",
            description=about,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: _Help(prog, max_help_position=34),
            exit_on_error=False,  # `parse` says in our words what is wrong
        )
        self._negative_number_matcher = re.compile(r"-[\d.].*")  # argparse's own leaves out -1e5 and -0.5-1
        self.common: list[argparse.Action] = []
        self.topics: dict[str, Any] = {}  # name -> the group of its flags
        section = self.add_argument_group("help")
        about = "show the common options, or all of a topic, and exit"
        section.add_argument("-h", "--help", action=_ShowHelp, nargs="?", metavar="TOPIC", help=about)
        section.add_argument("--help-all", action=_ShowHelp, nargs=0, help="show all options and exit")

    def short_help(self, topic: str | None) -> str:
        """Return the help of the common flags, one spelling each, with the list of topics; or that of a topic."""
        formatter = cast(_Help, self._get_formatter())
        formatter.most = 1 if topic is None else 99
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        if topic is None:
            formatter.add_text(self.description)
        formatter.start_section("common options" if topic is None else self.topics[topic].title)
        formatter.add_arguments(self.common if topic is None else self.topics[topic]._group_actions)
        formatter.end_section()
        if topic is None:
            formatter.start_section("further options, by --help TOPIC")
            for name, group in self.topics.items():
                formatter.add_argument(argparse.Action([], name, nargs=0, metavar=name, help=group.title))
            formatter.end_section()
            count = sum(bool(action.option_strings) for action in self._actions)
            formatter.add_text(f"--help-all shows all {count} options.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr."""
        self.exit(2, f"error: {printable(message)} (see --help)\n")

    def wrong(self, error: argparse.ArgumentError) -> NoReturn:
        """Exit with argparse's message about a flag, in our words."""
        flag = (error.argument_name or "").split("/")[0]
        if error.message.startswith("expected"):
            self.error(f"{flag} has no value: give one")
        if error.message.startswith("ignored explicit"):
            self.error(f"{flag} takes no value: leave out what follows it")
        self.error(error.message.replace(FLAG, flag, 1))

    def left(self, words: Sequence[str]) -> NoReturn:
        """Exit with a line about unknown flags: what to use instead."""
        if not any(self._is_flag(word) for word in words):
            advice = "put it in quotes" if "[PROMPT]" in (self.usage or "") else "leave it out"
            where = "the prompt" if "[PROMPT]" in (self.usage or "") else "the flags"
            self.error(f"got words after {where}, {' '.join(words)!r:.200}: {advice}")
        from ldm_lite.cli import synonyms  # a table that is only read here

        spellings = {
            name.lstrip("-").replace("-", "_"): action.dest
            for action in self._actions
            for name in getattr(action, "shown", action.option_strings)
        }
        place, hints = self.prog.rpartition(".")[2], []
        for flag in dict.fromkeys(word.split("=")[0] for word in words if self._is_flag(word)):
            hint = synonyms.advice(flag, spellings, place)
            hints.append(f"{flag:.60}: {as_flags(hint)}" if hint else f"{flag:.60}")
        unknown = f"unknown flag{'s' * (len(hints) > 1)} {'; '.join(hints)}"
        self.exit(2, f"error: {printable(shortened(unknown))} (see --help{'' if ':' in unknown else '-all'})\n")

    def _is_flag(self, word: str) -> bool:
        return len(word) > 1 and word[0] == "-" and not self._negative_number_matcher.fullmatch(word)


def parse(
    argv: Sequence[str] | None,
    command: str,
    about: str,
    groups: Sequence[type],
    extend: Callable[[argparse.ArgumentParser], object] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Parse flags into one instance of each dataclass in `groups`, and the values of the flags that `extend` adds.

    A missing flag keeps the dataclass's default.  --help shows the flags marked as common, and all flags of a dataclass
    that marks none.  Each dataclass is a topic of --help, under its name without "Options".
    """
    every = [field for group in groups for field in dataclasses.fields(group)]
    positional = "".join(f"[{field.name.upper()}] " for field in every if field.metadata.get("positional"))
    parser = _Parser(command, about, positional)
    for group in groups:
        hints = typing.get_type_hints(group)
        marks = any(field.metadata.get("common") for field in dataclasses.fields(group))
        for owner, fields in sections(group):
            section = parser.add_argument_group((owner.__doc__ or "").split(".  ")[0].rstrip(".").lower())
            parser.topics[owner.__name__.removesuffix("Options").lower() or command] = section
            for field in fields:
                if field.metadata["flag"]:
                    action = _add(section, field, hints[field.name])
                    if field.metadata["common"] or not marks:
                        parser.common.append(action)
    if extend is not None:
        extend(parser)
    try:
        known, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        parser.wrong(error)
    if words:
        parser.left(words)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(known).items()}
    for key in [key for key in values if key.endswith("_argument")]:
        name, value = key.removesuffix("_argument"), values.pop(key)
        if value is not None and name in values:
            parser.error(f"got a {name} both as an argument and as --{name}")
        if value is not None:
            values[name] = value
    options: list[Any] = []
    try:
        for group in groups:
            names = [field.name for field in dataclasses.fields(group) if field.name in values]
            options.append(group(**{name: values.pop(name) for name in names}))
            object.__setattr__(options[-1], "_given", {*names})  # of the user's features, too
    except (TypeError, ValueError) as error:
        parser.error(as_flags(str(error)))
    return options, values


def sections(group: type) -> list[tuple[type, list[Field]]]:
    """Group a dataclass's fields by defining class, its own first."""
    by_owner: dict[type, list[Field]] = {owner: [] for owner in group.__mro__}
    for field in dataclasses.fields(group):
        by_owner[next(owner for owner in by_owner if field.name in inspect.get_annotations(owner))].append(field)
    return [(owner, fields) for owner, fields in by_owner.items() if fields]


def _add(section: Any, field: Field, hint: Any) -> argparse.Action:
    """Add a dataclass field as a flag.  Each spelling is accepted with - and with _; help shows the declared ones."""
    if isinstance(hint, types.UnionType):
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    about = field.metadata
    shown = [f"--{field.name.replace('_', '-')}", *about["flags"]]
    spelled = [(name, f"--{name[2:].replace('_', '-')}", f"--{name[2:].replace('-', '_')}") for name in shown]
    names = dict.fromkeys(itertools.chain(*spelled))
    default = "" if field.default in (None, False, (), "") else f" (default: {field.default})"
    kwargs: dict[str, Any] = {"dest": field.name, "help": (about["help"] + default).replace("%", "%%")}
    repeatable = typing.get_origin(hint) is tuple and about["parse"] is None
    if hint is bool:
        kwargs["action"] = "store_true"
    elif repeatable:
        kwargs |= {"action": "append", "type": _text, "metavar": about["metavar"]}
    else:
        kind = hint if hint in (int, float) else str
        choices = about["choices"] and "{" + ",".join(about["choices"]) + "}"
        if choices and len(choices) > LONGEST_CHOICES:
            kwargs["help"] += ": one of " + ", ".join(about["choices"])
            choices = "NAME"
        kwargs["metavar"] = choices or about["metavar"] or {int: "N", float: "X"}.get(kind, "TEXT")
        kwargs["type"] = number(kind) if kind is not str else str if field.name.endswith("prompt") else _text
    if about["positional"]:
        section.add_argument(f"{field.name}_argument", nargs="?", metavar=field.name.upper(), help=kwargs["help"])
    action: argparse.Action = section.add_argument(*names, **kwargs)
    action.shown = shown  # type: ignore[attr-defined]
    return action


def _text(value: str) -> str:
    """Return a flag's text.  "" is refused: it is usually an unset shell variable, and as a path the current folder."""
    if not value:
        raise argparse.ArgumentTypeError(f"{FLAG}: got an empty text: give a value, or leave the flag out")
    return value


def number(kind: Any) -> Callable[[str], float]:
    """Return a parser of a flag's text as an int or a float, which refuses any other in our words."""

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {FLAG} {text[:60]!r}, expected {TYPES[kind]}") from None
        return value

    return read


def _precision(text: str) -> str:
    if text not in ("full", "autocast"):
        raise argparse.ArgumentTypeError(f"{FLAG} is full or autocast")
    return text


def original_flags(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of the original scripts that have other names here; return their section of the help."""
    section = parser.add_argument_group("flags of the original scripts that have other names here")
    section.add_argument("--plms", dest="sampler", action="store_const", const="plms", help="--sampler plms")
    section.add_argument(
        *("--dpm_solver", "--dpm"), dest="sampler", action="store_const", const="dpmpp_2m", help="--sampler dpmpp_2m"
    )
    section.add_argument(
        "--precision", type=_precision, metavar="{full,autocast}", help="full: --dtype fp32; autocast: the default"
    )
    section.add_argument("--config", help="not needed: the checkpoint says what it is")
    section.add_argument("--C", type=number(int), help="latent channels: checked against the checkpoint")
    section.add_argument("--f", type=number(int), help="pixels per latent position: checked against the checkpoint")
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
    section.add_argument("--cfg-text", dest="scale", type=number(float), metavar="X", help="--scale")
