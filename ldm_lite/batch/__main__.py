"""Images of a table of prompts: `python -m ldm_lite.batch prompts.parquet --out DIR`.

Rows may have columns for everything that an image depends on.  Writes shards as WebDataset reads them, and a manifest;
the same command continues a job that was stopped.
"""

import sys
from collections.abc import Sequence

from ldm_lite.batch.options import BatchOptions, RowOptions
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import CheckedOptions, LoadOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    groups = (BatchOptions, RowOptions, LoadOptions)
    (options, defaults, load), _ = flags.parse(argv, "batch", __doc__.splitlines()[0], groups)
    kept = "finished shards are kept, the same command continues"
    return console.run(lambda: run(options, defaults, load), (options, defaults, load), kept)


def run(options: BatchOptions, defaults: CheckedOptions, load: LoadOptions) -> None:
    """Make the images, and print the path of the manifest."""
    from ldm_lite.batch.run import run_batch

    if (path := run_batch(options, defaults, load)) is not None:
        print(path)


if __name__ == "__main__":
    sys.exit(main())
