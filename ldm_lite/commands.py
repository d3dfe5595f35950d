"""The commands of the package, with their options and what they run: one table, and one way to run a row of it.

Each has a module that gives it a name, `python -m ldm_lite.txt2img`, and a docstring, whose first line is in its help.
A command's code is imported when it runs, so that `--help` is instant.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ldm_lite.cli import command_options, console, flags
from ldm_lite.cli.declared import import_features
from ldm_lite.cli.options import LoadOptions, SaveOptions, given, with_features
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions


@dataclass(frozen=True)
class Command:
    """A row of the table."""

    run: str  # MODULE.FUNCTION of ldm_lite.tasks, which takes the options and, with `extend`, the values of its flags
    groups: tuple[type, ...]  # the dataclasses of its options
    extend: Callable[[argparse.ArgumentParser], object] | None = None  # adds the flags of original scripts


_IMAGES = (LoadOptions, SaveOptions)
TABLE = {
    "txt2img": Command("command.make", (Txt2imgOptions, *_IMAGES), flags.txt2img_flags),
    "img2img": Command("command.make", (Img2imgOptions, *_IMAGES), flags.edit_flags),
    "inpaint": Command("command.make", (InpaintOptions, *_IMAGES), flags.original_flags),
    "upscale": Command("command.make", (UpscaleOptions, *_IMAGES), flags.original_flags),
    "cascade": Command(
        "command.make_cascade", (command_options.CascadeOptions, command_options.StageOptions, SaveOptions)
    ),
    "reconstruct": Command("reconstruct.reconstruct_images", (command_options.ReconstructOptions, SaveOptions)),
    "verify": Command("verify.verify_model", (command_options.VerifyOptions, LoadOptions)),
    "export": Command("export.export_unet", (command_options.ExportOptions, LoadOptions)),
}


def main_of(name: str, about: str | None, module: str = "") -> Callable[..., int]:
    """Return `main` of a command, whose module has a docstring: a function of its arguments -> exit status.

    As `python -m ldm_lite.NAME`, where the module is named __main__, run it and exit.
    """
    command = TABLE[name]

    def main(argv: Sequence[str] | None = None) -> int:
        first_line = (about or "").splitlines()[0]
        makes_images = issubclass(command.groups[0], Txt2imgOptions)
        files, rest = _feature_files(argv) if makes_images else ([], argv)
        kinds: list[Any] = []  # the features of these files, which are groups of options, too
        if status := console.run(lambda: kinds.extend(import_features(files, command.groups[0]))):
            return status
        parsed, original = flags.parse(rest, name, first_line, (*command.groups, *kinds), command.extend)
        options, features = parsed[: len(command.groups)], parsed[len(command.groups) :]
        if used := [feature for feature in features if given(feature)]:
            options[0] = with_features(options[0], used, set().union(*map(given, used)))

        def run() -> None:
            module, _, function = command.run.partition(".")
            body = getattr(importlib.import_module(f"ldm_lite.tasks.{module}"), function)
            body(*options, *([] if command.extend is None else [original]))

        kept = "finished images are saved" if SaveOptions in command.groups else "nothing is saved"
        return console.run(run, options, kept)

    if module == "__main__":
        sys.exit(main())
    return main


def _feature_files(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the files of `--feature FILE`, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--feature", action="append", default=[])
    known, rest = parser.parse_known_args(argv)
    return known.feature, rest
