"""What all commands share: dataclasses to flags, and messages.

Printing lives here and in the commands' main().  Nothing here imports torch, so `--help` is instant.
"""

import argparse
import dataclasses
import difflib
import errno
import inspect
import logging
import math
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from ldm_lite.progress import end_bars

T = TypeVar("T")

MOST = 10**9  # of a count that nothing else limits
MOST_PX = 2**16  # of a picture's side
SEEDS = (0, 2**63 - 1)
FINITE = (-math.inf, math.inf)


def option(
    default: T,
    help: str,
    *flags: str,
    positional: bool = False,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    within: tuple[float, float] | None = None,
) -> T:
    """A dataclass field that is also a flag: --its-name, and any further spellings in `flags`.

    A flag whose field is a tuple may be repeated.  metavar is what --help calls the value.  within are the least and
    the most that a number may be, finite in any case.
    """
    about = {"help": help, "flags": flags, "positional": positional, "choices": choices, "metavar": metavar}
    return field(default=default, metadata={**about, "within": within})


@dataclass(frozen=True)
class Ranged:
    """Options, which cannot be made with a number out of its range: that is a ValueError."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, within = getattr(self, each.name), each.metadata["within"]
            if value is None or within is None or (within[0] <= value <= within[1] and abs(value) != math.inf):
                continue
            least, most = within
            wanted = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise ValueError(f"got {each.name} {value}, wanted {'a finite number' if within == FINITE else wanted}")


@dataclass(frozen=True)
class LoadOptions(Ranged):
    """What to load, and onto what; the arguments of ldm_lite.load."""

    ckpt: str | None = option(
        None,
        "checkpoint: a file, a folder of diffusers, or owner/repository[/file] on the hub (default: the bundled model)",
    )
    vae: str | None = option(None, "take the autoencoder from this file")
    unet: str | None = option(None, "take the UNet from this file")
    text_encoder: str | None = option(None, "take the text encoder from this file")
    lora: tuple[str, ...] = option((), "merge a LoRA file; repeatable", metavar="FILE[:WEIGHT]")
    compiled: str | None = option(None, "run the UNet of this package, which `python -m ldm_lite.export` has written")
    ema: str = option("auto", "use the UNet's EMA copy, if the file has one", choices=("auto", "yes", "no"))
    prediction: str | None = option(None, "what the UNet predicts, if the file is wrong", choices=("eps", "v", "x0"))
    zero_snr: bool = option(False, "shift the noise schedule to zero terminal SNR, for v models trained so")
    metadata: tuple[str, ...] = option(
        (), "add to the file's metadata, for an unknown network; repeatable", metavar="KEY=VALUE"
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(
        None, "fp32, fp16, bf16, or with others for some networks fp16,vae=fp32 (default: fp16 on CUDA, else fp32)"
    )
    attention: str | None = option(
        None, "sdpa (PyTorch chooses), flash, efficient, cudnn, math, mha, vanilla, sliced:8 (default: sdpa)"
    )
    compile: str | None = option(None, "compile the step: off, auto, regional, step, max (default: off)")
    matmul_precision: str | None = option(
        None, "of float32 on a GPU: high is TF32 (default: highest)", choices=("highest", "high", "medium")
    )
    offload: str | None = option(None, "networks, or blocks, take turns on the device", choices=("model", "sequential"))
    storage: str | None = option(None, "keep weights in 8 bits, computing in --dtype", choices=("fp8", "int8"))
    vae_tiling: bool = option(
        False, "encode and decode strip by strip, as in fp32 on a CPU always: less memory, the same picture"
    )

    def arguments(self) -> dict[str, Any]:
        """As ldm_lite.load takes them.  Raises ValueError for metadata without a "="."""
        values = dataclasses.asdict(self)
        values["source"] = values.pop("ckpt")
        parts = {role: values.pop(role) for role in ("vae", "unet", "text_encoder")}
        values["parts"] = {role: file for role, file in parts.items() if file is not None}
        if bad := [item for item in self.metadata if "=" not in item]:
            raise ValueError(f"got --metadata {bad[0]}, wanted KEY=VALUE")
        values["metadata"] = dict(item.split("=", 1) for item in self.metadata)
        names = ("attention", "compile", "compiled", "matmul_precision", "offload", "storage", "vae_tiling")
        tuning = {name: values.pop(name) for name in names}
        values["tuning"] = {name: value for name, value in tuning.items() if value}
        return values


@dataclass(frozen=True)
class SaveOptions(Ranged):
    """Where results go."""

    out: str | None = option(
        None, "folder for the images, or the name of a .png (default: outputs/COMMAND-samples)", "--outdir"
    )
    skip_save: bool = option(False, "do not save single images")
    skip_grid: bool = option(False, "do not save a grid of all images")
    n_rows: int = option(0, "images in a row of the grid (default: the batch size)", within=(0, MOST))
    preview: str | None = option(
        None,
        "show at every step what the pictures will be, in preview.png beside the results, by this file's autoencoder: "
        "taesd, taesdxl or any that fits",
        metavar="FILE",
    )
    debug: bool = option(False, "show the traceback of an error")


# ---- flags ----------------------------------------------------------------------------------------------------------


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


def numbers(text: str, what: str) -> list[int]:
    """Whole numbers from 1 on, with commas between.  Raises ValueError, which says what they are, for anything else."""
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"got {what} {text!r}, wanted whole numbers with commas between") from error
    if min(found) < 1:
        raise ValueError(f"got {what} {text!r}, wanted 1 or more")
    return found


# ---- running a command ----------------------------------------------------------------------------------------------


class _Messages(logging.Handler):
    """Log records as single lines on stderr, each once, beside a progress bar rather than through it."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        line = ("warning: " if record.levelno >= logging.WARNING else "") + record.getMessage()
        if line not in self._shown:
            self._shown.add(line)
            tqdm.write(line, file=sys.stderr)


def run(body: Callable[[], None], options: Sequence[object] = ()) -> int:
    """Run a command's body; its exit status: 0, 1 (the machine failed), 2 (the user's input) or 130 (Ctrl-C).

    options are what the command was given.  What goes wrong is one line on stderr; if they ask for debug, a traceback,
    and the warnings of libraries.
    Where nobody reads what is printed any more, as behind `| head -1`, the command ends there, without a line: 141.
    """
    log, messages, debug = logging.getLogger("ldm_lite"), _Messages(), any(getattr(o, "debug", False) for o in options)
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    _open_streams()
    try:
        with warnings.catch_warnings():
            if not debug:  # what a user must know is said by us
                warnings.simplefilter("ignore")
            body()
        sys.stdout.flush()  # here, since at the interpreter's end it is too late for a status
        return 0
    except KeyboardInterrupt:
        end_bars()
        print("interrupted: what is finished is saved", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 141
        if debug:
            raise
        end_bars()
        message, status = _explain(error, options)
        print(f"error: {message}", file=sys.stderr)
        return status
    finally:
        log.removeHandler(messages)


def _open_streams() -> None:
    """Have a stdout and a stderr that take what is printed: all names of files, and all if they are closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  # for as long as the process lasts
        elif getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_unread() -> bool:
    """Whether the other end of stdout is closed; then what is still to be printed is dropped."""
    try:
        print(flush=True)  # an empty line, since a failed flush may have left nothing to try again
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _cheaper(options: Sequence[object], on_cpu: bool) -> str:
    """What to try next, what costs least first, when a GPU's memory, or the CPU's, is too small for what was asked."""
    given = {name: value for group in options for name, value in vars(group).items()}
    if "checkpointing" in given:  # training
        return "a smaller --batch, with --accumulate" if given["checkpointing"] else "--checkpointing"
    one_by_one = "tile" in given and "stage_3" not in given  # as pictures are upscaled
    steps = {
        "--n-samples 1": (given.get("n_samples") or 1) > 1 and not one_by_one,
        "--batches 1": given.get("batches", "1") != "1",
        "--vae-tiling": not on_cpu and not given.get("vae_tiling", True),
        "--tile 64": given.get("tile", 0) > 64 and given.get("stage_3", "") is not None,
        "--dtype fp16": given.get("dtype") in ("fp32", "float32"),
        "--offload model": not on_cpu and given.get("offload", "") is None,
        "--storage int8": given.get("storage", "") is None,
        "--offload sequential": not on_cpu and given.get("offload") == "model",
    }
    return next((step for step, remains in steps.items() if remains), "a smaller picture")


def _explain(error: Exception, options: Sequence[object]) -> tuple[str, int]:
    """An exception -> (one line, exit status)."""
    texts = ("CUDA error: out of memory", "alloc_cpu", "ALLOC_FAILED")  # the last is of cuBLAS and cuDNN
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or any(t in str(error) for t in texts):
        on_cpu = isinstance(error, MemoryError) or "alloc_cpu" in str(error)
        return f"out of memory: try {_cheaper(options, on_cpu)}", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or 'the image'} was not written; earlier images stay", 1
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        line = f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, OSError)):
        return line, 2
    return f"{type(error).__name__}: {line} (this is a fault of ldm_lite: --debug shows where)", 1
