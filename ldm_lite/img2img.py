"""Image to image: `python -m ldm_lite.img2img "a red apple" --init-img sketch.png`, or img2img(pipe, Options(...)).

Takes the flags of the original scripts/img2img.py, and of InstructPix2Pix's edit_cli.py where the checkpoint is one:
then the prompt says what to change.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import FINITE, MOST_PX, LoadOptions, SaveOptions, option
from ldm_lite.cli.output import Saver
from ldm_lite.tasks.image_inputs import ImageOptions, as_original, begin, open_source, padded, size_of, sources
from ldm_lite.tasks.job import OnStep, Result, check_command, hand_over, original_flags, read_prompts, serve
from ldm_lite.tasks.job import check as check_job

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.tasks.batching import Canvas


@dataclass(frozen=True)
class Options(ImageOptions):
    """How to go from picture to picture.  None = what the checkpoint's family has as its default."""

    original_counts: ClassVar[tuple[int, int]] = (2, 1)

    strength: float | None = option(
        None,
        "how much of the picture is noise at first: 0 changes nothing, 1 forgets it "
        "(default: 0.75; 1 for InstructPix2Pix, which looks at it all the time)",
        within=(0, 1),
    )
    image_scale: float | None = option(
        None,
        "guidance by the picture, for InstructPix2Pix: more is nearer to it (default: 1.5)",
        "--cfg-image",
        within=FINITE,
    )
    resolution: int | None = option(
        None,
        "size as InstructPix2Pix's edit_cli.py has it: about so many pixels on the long side, multiples of 64",
        within=(64, MOST_PX),
    )
    compat: bool = option(False, "noise, timesteps and defaults (2 images) of the original script to the letter")


def img2img(
    pipe: "Pipeline",
    options: Options,
    *,
    pictures: "Sequence[Image] | None" = None,
    context: "Tensor | None" = None,
    uncond: "Tensor | None" = None,
    refiner: "Pipeline | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """All prompts of the options on each picture: images, each as soon as it is decoded; stop by leaving the loop.

    pictures are PIL images in place of options.init_img; context, uncond, refiner and on_step as in txt2img.  A result
    is as large as the picture is resized to, whatever multiples of pixels the model takes.  At strength 0 it is the
    picture through the autoencoder, at 1 it is txt2img's.  Raises ValueError, one line, for options that do not fit.
    """
    from ldm_lite.tasks.batching import Setup, paint

    check(options)
    check_command(pipe, "img2img")
    options = as_original(options, "ddim", scale=5.0)
    follows = pipe.family.task == "instruct"
    if options.image_scale is not None and not follows:
        raise ValueError(f"got image_scale, but {pipe.name} is no InstructPix2Pix: leave it out")
    if options.compat and follows:
        raise ValueError("--compat is the original img2img script, which has no InstructPix2Pix: leave it out")
    inputs = sources(options.init_img, "init-img") if pictures is None else pictures
    prompts = read_prompts(options, pipe) if context is None else [options.prompt or ""] * len(context)
    strength = (1.0 if follows else 0.75) if options.strength is None else options.strength
    plan, start, skipped = begin(pipe, options, strength)
    setup = Setup(
        prompts,
        plan,
        scale=pipe.family.scale if options.scale is None else options.scale,
        image_scale=(1.5 if options.image_scale is None else options.image_scale) if follows else None,
        start=start,
        refiner=hand_over(pipe, options, plan, refiner, skipped),
    )
    canvases = (_canvas(pipe, options, source, strength) for source in inputs)
    return paint(pipe, options, setup, canvases, context=context, uncond=uncond, on_step=on_step)


def check(options: Options) -> None:
    """Raises ValueError for options that are wrong whatever the checkpoint."""
    check_job(options)
    if options.resolution is None:
        return
    if options.height is not None or options.width is not None or options.compat:
        raise ValueError("--resolution sets both sides: leave out --height, --width and --compat, or it")


def edit_size(size: tuple[int, int], resolution: int) -> tuple[int, int]:
    """(width, height) of a picture -> those that InstructPix2Pix's edit_cli.py makes of them; the picture is cut."""
    factor = resolution / max(size)
    factor = math.ceil(min(size) * factor / 64) * 64 / min(size)
    width, height = (max(64, int(side * factor // 64) * 64) for side in size)
    return width, height


def _canvas(pipe: "Pipeline", options: Options, source: "Path | Image", strength: float) -> "Canvas":
    from ldm_lite.generate import encode
    from ldm_lite.image import resize
    from ldm_lite.tasks.batching import Canvas

    picture = open_source(source)
    how = "stretch" if options.compat else options.resize
    if options.resolution is None:
        size = size_of(pipe, options, picture)
    else:
        size = edit_size(picture.image.size, options.resolution)
    image = resize(picture.image, size, how)
    pixels = padded(pipe, image)
    mean, deviation = encode(pipe, pixels[None])
    return Canvas(
        latent_shape=pipe.latent_shape(*pixels.shape[1:]),
        init=mean,
        deviation=deviation if options.sample_posterior or options.compat else None,
        # InstructPix2Pix was trained to look at the mean without the scale factor.
        concat=mean / pipe.family.scale_factor if pipe.family.task == "instruct" else None,
        finish=lambda pixels: pixels[:, : image.height, : image.width],
        settings={"Denoising strength": strength, "Init image": picture.name},
    )


# ---- the command ----------------------------------------------------------------------------------------------------


def _flags(parser: argparse.ArgumentParser) -> None:
    original_flags(parser)
    section = parser.add_argument_group("flags of InstructPix2Pix's edit_cli.py that are named otherwise here")
    section.add_argument("--edit", dest="prompt", metavar="TEXT", help="the prompt")
    section.add_argument("--output", dest="out", metavar="TEXT", help="--out")
    section.add_argument("--vae-ckpt", dest="vae", metavar="TEXT", help="--vae")
    section.add_argument("--cfg-text", dest="scale", type=float, metavar="X", help="--scale")


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the images, save each when it is ready, and say where it is."""
    check(options)
    count = len(sources(options.init_img, "init-img")) * len(read_prompts(options)) * options.repeats
    saver = Saver(save, "img2img")
    serve(
        lambda pipe, on_step: img2img(pipe, options, on_step=on_step), count, options.batch_size, load, saver, original
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = flags.parse(argv, "img2img", __doc__.splitlines()[0], groups, _flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


if __name__ == "__main__":
    sys.exit(main())
