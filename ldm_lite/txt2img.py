"""Text to image: `python -m ldm_lite.txt2img "a red apple"`, or txt2img(pipe, Options(...)) as a function.

Takes the flags of the original scripts/txt2img.py, so that a command line written for it runs unchanged.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ldm_lite import cli
from ldm_lite.cli import LoadOptions, SaveOptions
from ldm_lite.job import JobOptions, OnStep, Result, check, check_command, original_flags, read_prompts, serve

if TYPE_CHECKING:
    from torch import Tensor

    from ldm_lite.pipeline import Pipeline


@dataclass(frozen=True)
class Options(JobOptions):
    """What to make.  None = what the checkpoint's family has as its default."""


def txt2img(
    pipe: "Pipeline",
    options: Options,
    *,
    context: "Tensor | None" = None,
    uncond: "Tensor | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """Make the images that the options ask for, each as soon as it is decoded; stop by leaving the loop.

    context (N,T,D) are ready embeddings in place of N prompts, and uncond (1,T,D) or (N,T,D) those of the negative
    prompt.  on_step is called after every denoising step.  Raises ValueError, one line, for options that do not fit.
    """
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.paint import Canvas, Setup, paint

    check(options)
    check_command(pipe, "txt2img")
    prompts = read_prompts(options) if context is None else [options.prompt or ""] * len(context)
    family = pipe.family
    height = family.resolution if options.height is None else options.height
    width = family.resolution if options.width is None else options.width
    steps = family.steps if options.steps is None else options.steps
    spacing = "original" if options.compat else options.spacing
    plan = make_plan(options.sampler, pipe.schedule, steps, eta=options.eta, churn=options.churn, spacing=spacing)
    setup = Setup(prompts, plan, scale=family.scale if options.scale is None else options.scale)
    canvas = Canvas(pipe.latent_shape(height, width))
    return paint(pipe, options, setup, [canvas], context=context, uncond=uncond, on_step=on_step)


# ---- the command ----------------------------------------------------------------------------------------------------


def _flags(parser: argparse.ArgumentParser) -> None:
    original_flags(parser)
    parser.add_argument("--laion400m", action="store_true", help="of the original script: not supported yet")


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the images, save each when it is ready, and say where it is."""
    if "laion400m" in original:
        raise ValueError(
            "--laion400m (the BERT-conditioned LDM) is not supported yet: take a Stable Diffusion 1.x file"
        )
    check(options)
    saver, count = cli.Saver(save, "txt2img"), len(read_prompts(options)) * options.repeats
    serve(
        lambda pipe, on_step: txt2img(pipe, options, on_step=on_step), count, options.batch_size, load, saver, original
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = cli.parse(argv, "txt2img", __doc__.splitlines()[0], groups, _flags)
    return cli.run(lambda: run(options, load, save, original), debug=save.debug)


if __name__ == "__main__":
    sys.exit(main())
