"""The command line: python -m ldm_lite.core "a red apple" --steps 20 --seed 7 --out apple.png"""

import argparse
import dataclasses
import logging
import sys
import types
import typing
from pathlib import Path
from typing import Any

from ldm_lite.core.declare import types_of
from ldm_lite.core.features import FEATURES, import_file
from ldm_lite.core.files import imported
from ldm_lite.core.options import Options
from ldm_lite.core.pipeline import load


def parser() -> argparse.ArgumentParser:
    """A flag for each option, including those of features."""
    result = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    result.add_argument("prompt", help="what to make")
    result.add_argument("--ckpt", nargs="*", default=(), help="checkpoint, and files whose networks replace its own")
    result.add_argument("--device", help="cpu, cuda, ...")
    result.add_argument("--dtype", help="fp32, fp16 or bf16")
    result.add_argument("--compile", action="store_true", help="compile the step: slow to start, then faster")
    result.add_argument("--feature", default=argparse.SUPPRESS, help="a file of your own features, with their options")
    result.add_argument("--out", default="out.png", help="file; several images get a number")
    for owner in (Options, *dict.fromkeys(map(imported, FEATURES.values()))):
        for field in dataclasses.fields(owner):
            if field.name in ("prompt", "plan"):
                continue
            value_type = _value_type(types_of(owner)[field.name])
            reading: dict[str, Any] = {"type": value_type}
            if value_type is bool:
                reading = {"action": argparse.BooleanOptionalAction}
            flags = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
            result.add_argument(*flags, default=argparse.SUPPRESS, help=field.metadata.get("help"), **reading)
    return result


def _value_type(hint: Any) -> type:
    """The type of a flag's value: the first of bool, int and float that an annotation allows, or str."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    allowed = typing.get_args(hint) if is_union else (hint,)
    return next((number for number in (bool, int, float) if number in allowed), str)


def main() -> int:
    """Run, save images, and return the exit code; prints a user's error as one line."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    while "--feature" in sys.argv[:-1]:  # read first, since the file adds flags
        at = sys.argv.index("--feature")
        import_file(Path(sys.argv[at + 1]))
        del sys.argv[at : at + 2]
    options = vars(parser().parse_args())
    out, sources = Path(options.pop("out")), options.pop("ckpt")
    loading = {name: options.pop(name) for name in ("device", "dtype", "compile")}
    try:
        for result in load(*sources, **loading).results(**options):
            number = f"-{result.item.number}" if options.get("batch_size", 1) > 1 else ""
            result.image.save(out.with_stem(out.stem + number))
    except (ValueError, TypeError, OSError, RuntimeError, AssertionError) as error:  # PyTorch's for devices too
        print(f"{__package__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
