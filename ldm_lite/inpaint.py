"""Inpainting: `python -m ldm_lite.inpaint "a red apple" --init-img photo.png --mask mask.png` repaints what is white.

Takes inpainting checkpoints, which see the masked image, and ordinary ones.  `--extend left=128,top=64` paints beyond
the edges; `--indir` works as in the original scripts/inpaint.py.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ldm_lite.cli import console
from ldm_lite.cli.flags import original_flags, parse
from ldm_lite.cli.options import LoadOptions, SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import InpaintOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (InpaintOptions, LoadOptions, SaveOptions)
    (options, load, save), original = parse(argv, "inpaint", __doc__.splitlines()[0], groups, original_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


def run(options: InpaintOptions, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load the checkpoint, make the images and save them."""
    from ldm_lite.tasks.command import make
    from ldm_lite.tasks.inpaint import count, prepare

    number, saver = count(options), Saver(save, "inpaint")
    make(prepare, options, number, load, saver, original)


if __name__ == "__main__":
    sys.exit(main())
