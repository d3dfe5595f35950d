"""Compare samplers: `python -m ldm_lite.samplers` prints a table and draws a chart.

The error is that of the final latents, relative to a long run of Heun's method from the same noise.  The chart needs
matplotlib (extra "plot").
"""

import sys
from collections.abc import Sequence

from ldm_lite.cli import console
from ldm_lite.cli.command_options import CompareOptions
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import LoadOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    (options, load), _ = parse(argv, "samplers", __doc__.splitlines()[0], (CompareOptions, LoadOptions))
    return console.run(lambda: run(options, load), (options, load))


def run(options: CompareOptions, load: LoadOptions) -> None:
    """Load the checkpoint, compare, print the table and save the chart."""
    from ldm_lite.tasks.compare import run

    run(options, load)


if __name__ == "__main__":
    sys.exit(main())
