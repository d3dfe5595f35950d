"""Image to image: `python -m ldm_lite.img2img "a red apple" --init-img sketch.png`.

Takes the flags of the original scripts/img2img.py and of InstructPix2Pix's edit_cli.py.  With an InstructPix2Pix
checkpoint the prompt says what to change.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ldm_lite.cli import console
from ldm_lite.cli.flags import edit_flags, parse
from ldm_lite.cli.options import LoadOptions, SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import Img2imgOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (Img2imgOptions, LoadOptions, SaveOptions)
    (options, load, save), original = parse(argv, "img2img", __doc__.splitlines()[0], groups, edit_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


def run(options: Img2imgOptions, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load the checkpoint, make the images and save them."""
    from ldm_lite.tasks.command import make
    from ldm_lite.tasks.img2img import count, prepare

    number, saver = count(options), Saver(save, "img2img")
    make(prepare, options, number, load, saver, original)


if __name__ == "__main__":
    sys.exit(main())
