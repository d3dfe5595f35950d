"""Text to image: `python -m ldm_lite.txt2img "a red apple"`, or txt2img(pipe, Options(...)) as a function.

Takes the flags of the original scripts/txt2img.py, so that a command line written for it runs unchanged.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import LoadOptions, SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.tasks.job import (
    JobOptions,
    OnStep,
    Result,
    check,
    check_command,
    hand_over,
    original_flags,
    read_prompts,
    sampler_of,
    serve,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline


@dataclass(frozen=True)
class Options(JobOptions):
    """What to make.  None = what the checkpoint's family has as its default."""


def txt2img(
    pipe: "Pipeline",
    options: Options,
    *,
    context: "Tensor | None" = None,
    uncond: "Tensor | None" = None,
    refiner: "Pipeline | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """Make the images that the options ask for, each as soon as it is decoded; stop by leaving the loop.

    context (N,T,D) are ready embeddings in place of N prompts, and uncond (1,T,D) or (N,T,D) those of the negative
    prompt.  refiner is a loaded one, in place of options.refiner.  on_step is called after every denoising step.
    Raises ValueError, one line, for options that do not fit.
    """
    from ldm_lite.control.control import natural_size
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.tasks.batching import Canvas, Setup, paint

    check(options)
    check_command(pipe, "txt2img")
    prompts = read_prompts(options, pipe) if context is None else [options.prompt or ""] * len(context)
    family = pipe.family
    width, height = family.resolution, family.resolution
    if options.control and options.height is None and options.width is None:
        width, height = natural_size(options.control, family.resolution)
    height = height if options.height is None else options.height
    width = width if options.width is None else options.width
    steps = family.steps if options.steps is None else options.steps
    spacing = "original" if options.compat else options.spacing
    sampler = sampler_of(pipe, options)
    plan = make_plan(sampler, pipe.schedule, steps, eta=options.eta, churn=options.churn, spacing=spacing)
    setup = Setup(
        prompts,
        plan,
        scale=family.scale if options.scale is None else options.scale,
        refiner=hand_over(pipe, options, plan, refiner),
    )
    return paint(
        pipe,
        options,
        setup,
        [Canvas(pipe.latent_shape(height, width))],
        context=context,
        uncond=uncond,
        on_step=on_step,
    )


# ---- the command ----------------------------------------------------------------------------------------------------


def _flags(parser: argparse.ArgumentParser) -> None:
    original_flags(parser)
    parser.add_argument("--laion400m", action="store_true", help="--ckpt models/ldm/text2img-large/model.ckpt")


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the images, save each when it is ready, and say where it is."""
    if "laion400m" in original:
        load = dataclasses.replace(load, ckpt="models/ldm/text2img-large/model.ckpt")
    check(options)
    saver, count = Saver(save, "txt2img"), len(read_prompts(options)) * options.repeats
    serve(
        lambda pipe, on_step: txt2img(pipe, options, on_step=on_step), count, options.batch_size, load, saver, original
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = flags.parse(argv, "txt2img", __doc__.splitlines()[0], groups, _flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


if __name__ == "__main__":
    sys.exit(main())
