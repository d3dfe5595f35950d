"""Pictures four times as large: `python -m ldm_lite.upscale "a white cat" --init-img cat.png --ckpt x4-upscaler.ckpt`.

Takes Stable Diffusion's x4 upscaler, which reads a prompt too and is told how noisy the picture is, and latent
diffusion's super-resolution model (bsr_sr), which reads the picture alone.  Any size: large pictures go tile by tile.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import MOST_PX, LoadOptions, SaveOptions, option
from ldm_lite.cli.output import Saver
from ldm_lite.tasks.image_inputs import open_source, sources
from ldm_lite.tasks.job import JobOptions, OnStep, Result, check_command, original_flags, serve
from ldm_lite.tasks.job import check as check_job
from ldm_lite.tasks.upscale import MOST_NOISE, enlarge

if TYPE_CHECKING:
    from PIL.Image import Image

    from ldm_lite.checkpoint.model import Pipeline


@dataclass(frozen=True)
class Options(JobOptions):
    """What to make larger.  None = what the checkpoint's family has as its default."""

    init_img: tuple[str, ...] = option(
        (), "picture to make larger; a folder is all pictures in it; repeatable", "--input", metavar="PATH"
    )
    height: int | None = option(None, "not here: what is upscaled has four times its own size", "--H")
    width: int | None = option(None, "not here", "--W")
    noise_level: int = option(
        20, "noise added to the picture, 0 to 350: more lets the upscaler invent more", within=(0, MOST_NOISE)
    )
    tile: int = option(
        128, "pixels a side of the tiles in which pictures larger than that are denoised", within=(8, MOST_PX)
    )


def upscale(
    pipe: "Pipeline",
    options: Options,
    *,
    pictures: "Sequence[Image] | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """Each picture four times as large, as soon as it is decoded; stop by leaving the loop.

    pictures are PIL images in place of options.init_img; on_step is called after every denoising step.  Raises
    ValueError, one line, for options that do not fit.
    """
    from ldm_lite.image import to_pixels

    check(options)
    check_command(pipe, "upscale")
    found = sources(options.init_img, "init-img") if pictures is None else pictures
    repeats = options.batch_size * options.repeats
    each = (picture for picture in map(open_source, found) for _ in range(repeats))
    opened = ((picture.name, to_pixels(picture.image)) for picture in each)
    return enlarge(pipe, options, opened, noise_level=options.noise_level, tile=options.tile, on_step=on_step)


def check(options: Options) -> None:
    """Raises ValueError for options that are wrong whatever the checkpoint."""
    check_job(dataclasses.replace(options, noise_level=0))  # which is of something else there
    if options.compat or options.from_file is not None or options.fixed_code or options.control or options.refiner:
        raise ValueError("upscale has no --compat, --from-file, --fixed-code, --control or --refiner: leave them out")
    if options.height is not None or options.width is not None:
        raise ValueError("what is upscaled has four times its own size: leave out --height and --width")


# ---- the command ----------------------------------------------------------------------------------------------------


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the pictures, save each when it is ready, and say where it is."""
    check(options)
    count = len(sources(options.init_img, "init-img")) * options.batch_size * options.repeats
    saver = Saver(save, "upscale")
    serve(
        lambda pipe, on_step: upscale(pipe, options, on_step=on_step), count, options.batch_size, load, saver, original
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = flags.parse(argv, "upscale", __doc__.splitlines()[0], groups, original_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


if __name__ == "__main__":
    sys.exit(main())
