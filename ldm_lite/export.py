"""Compile ahead of time: `python -m ldm_lite.export --out unet.pt2` writes the UNet as a package for given sizes.

`ldm_lite.load(..., compiled="unet.pt2")` and `--compiled unet.pt2` then run it without compiling anything.  The package
has no weights: it runs on those of the checkpoint that is loaded.
"""

import sys
from collections.abc import Sequence

from ldm_lite.cli import console
from ldm_lite.cli.command_options import ExportOptions
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import LoadOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    (options, load), _ = parse(argv, "export", __doc__.splitlines()[0], (ExportOptions, LoadOptions))
    return console.run(lambda: run(options, load), (options,))


def run(options: ExportOptions, load: LoadOptions) -> None:
    """Load the checkpoint, and compile and check the package."""
    from ldm_lite.tasks.export import run

    run(options, load)


if __name__ == "__main__":
    sys.exit(main())
