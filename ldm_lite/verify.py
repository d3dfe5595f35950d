"""Check a checkpoint against published numbers: `python -m ldm_lite.verify --ckpt v1-4.ckpt`.

Runs the recipes of diffusers' own tests for this family of checkpoints, from fixed latents that need no download, in
float32, and prints expected values, values got, and the difference.  It passes if all vectors of one checkpoint agree.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ldm_lite.cli import console
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import CheckedOptions, LoadOptions, option


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to check."""

    whole: str | None = option(
        None,
        "compare whole images of 50 steps too: a folder with files of the data set diffusers/test-arrays, or hub",
        metavar="FOLDER",
        common=True,
    )
    only: str | None = option(None, "only checkpoints with this in their name, e.g. 1.4", common=True)
    debug: bool = option(False, "show the traceback of an error")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    (options, load), _ = parse(argv, "verify", __doc__.splitlines()[0], (Options, LoadOptions))
    return console.run(lambda: run(options, load), (options, load))


def run(options: Options, load: LoadOptions) -> None:
    """Load in float32 unless told otherwise, run every vector, print the comparison and the verdict."""
    from ldm_lite.checkpoint.model import Model, load_model
    from ldm_lite.tasks.verify import check, stored_image, vectors_for, verdict

    model = load_model(replace(load, dtype=load.dtype or "fp32"), Model)
    vectors = vectors_for(model, options.whole is not None)
    chosen = [each for each in vectors if options.only is None or options.only in each.checkpoint]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.checkpoint for each in vectors))
        raise ValueError(f"got `only` {options.only!r}, wanted a part of one of: {known}")
    checks = []
    for vector in chosen:
        checks.append(check(model, vector, lambda name: stored_image(options.whole or "hub", name)))
        print(f"{checks[-1]}\n", flush=True)
    print(verdict(checks, model.name))


if __name__ == "__main__":
    sys.exit(main())
