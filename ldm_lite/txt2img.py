"""Text to image: `python -m ldm_lite.txt2img "a red apple"`.

Takes the flags of the original scripts/txt2img.py, so that a command line written for it runs unchanged.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ldm_lite.cli import console
from ldm_lite.cli.flags import parse, txt2img_flags
from ldm_lite.cli.options import LoadOptions, SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import Txt2imgOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (Txt2imgOptions, LoadOptions, SaveOptions)
    (options, load, save), original = parse(argv, "txt2img", __doc__.splitlines()[0], groups, txt2img_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


def run(options: Txt2imgOptions, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load the checkpoint, make the images and save them."""
    from ldm_lite.tasks.command import make
    from ldm_lite.tasks.txt2img import count, prepare

    number, saver = count(options), Saver(save, "txt2img")
    make(prepare, options, number, load, saver, original)


if __name__ == "__main__":
    sys.exit(main())
