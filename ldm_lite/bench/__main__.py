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

    def body() -> None:
        from ldm_lite.bench.command import run  # here, so that --help does not import torch

        run(options)

    return console.run(body, (options,))


if __name__ == "__main__":
    sys.exit(main())
