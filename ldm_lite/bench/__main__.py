"""Benchmark: `python -m ldm_lite.bench` times text to image on this machine in several configurations.

Every configuration (configurations.py) is first compared with a plain float32 forward and then timed.  The order of the
configurations is reversed in every other round, so that a machine that slows down affects all equally.  Results are
written as they come.
"""

import sys
from collections.abc import Sequence

from ldm_lite.bench.options import Options
from ldm_lite.cli import console, flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    (options,), _ = flags.parse(argv, "bench", __doc__.splitlines()[0], (Options,))

    return console.run(lambda: run(options), (options,))


def run(options: Options) -> None:
    """Measure, and print the results."""
    from ldm_lite.bench import command

    command.run(options)


if __name__ == "__main__":
    sys.exit(main())
