"""Enlarge images four times: `python -m ldm_lite.upscale "a white cat" --init-img cat.png --ckpt x4-upscaler.ckpt`.

Takes Stable Diffusion's x4 upscaler, which reads a prompt and the noise level of the image, and latent diffusion's
super-resolution model (bsr_sr), which reads the image alone.  Large images go tile by tile.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ldm_lite.cli import console
from ldm_lite.cli.flags import original_flags, parse
from ldm_lite.cli.options import LoadOptions, SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import UpscaleOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (UpscaleOptions, LoadOptions, SaveOptions)
    (options, load, save), original = parse(argv, "upscale", __doc__.splitlines()[0], groups, original_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


def run(options: UpscaleOptions, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load the checkpoint, make the images and save them."""
    from ldm_lite.tasks.serve import serve
    from ldm_lite.tasks.upscale import count, prepare

    number, saver = count(options), Saver(save, "upscale")
    serve(prepare, options, number, load, saver, original)


if __name__ == "__main__":
    sys.exit(main())
