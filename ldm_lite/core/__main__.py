"""The command line: python -m ldm_lite.core "a red apple" --steps 20 --seed 7 --out apple.png"""

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

from ldm_lite.core.features import FEATURES, import_file
from ldm_lite.core.files import imported
from ldm_lite.core.options import Options
from ldm_lite.core.pipeline import load


def parser() -> argparse.ArgumentParser:
    """A flag for each option, those of features too."""
    result = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    result.add_argument("prompt", help="what to make")
    result.add_argument("--ckpt", nargs="*", default=(), help="checkpoint, and files whose networks replace its own")
    result.add_argument("--device", help="cpu, cuda, ...")
    result.add_argument("--dtype", help="fp32, fp16 or bf16")
    result.add_argument("--compile", action="store_true", help="compile the step: slow to start, then faster")
    result.add_argument("--feature", default=argparse.SUPPRESS, help="a file of your own features, with their options")
    result.add_argument("--out", default="out.png", help="file; several images get a number")
    for kind in (Options, *dict.fromkeys(map(imported, FEATURES.values()))):
        for field in dataclasses.fields(kind):
            if field.name not in ("prompt", "plan"):
                name, about = str(getattr(field.type, "__name__", field.type)).split(" ")[0], field.metadata.get("help")
                how: dict[str, Any] = {"type": {"int": int, "float": float}.get(name, str)}
                how = {"action": argparse.BooleanOptionalAction} if name == "bool" else how
                flags = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
                result.add_argument(*flags, default=argparse.SUPPRESS, help=about, **how)
    return result


def main() -> int:
    """Run, save images, and return the exit code: errors of users are one line."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    while "--feature" in sys.argv[:-1]:
        at = sys.argv.index("--feature")
        import_file(Path(sys.argv[at + 1]))
        del sys.argv[at : at + 2]
    options = vars(parser().parse_args())
    out, place = Path(options.pop("out")), {name: options.pop(name) for name in ("device", "dtype", "compile")}
    try:
        for result in load(*options.pop("ckpt"), **place).results(**options):
            number = f"-{result.item.number}" if options.get("batch_size", 1) > 1 else ""
            result.image.save(out.with_stem(out.stem + number))
    except (ValueError, TypeError, OSError, RuntimeError, AssertionError) as error:  # PyTorch's for devices too
        print(f"{__package__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
