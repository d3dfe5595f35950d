"""Text to image: `python -m ldm_lite.txt2img "a red apple"`, or txt2img(pipe, Options(...)) as a function.

Takes the flags of the original scripts/txt2img.py, so that a command line written for it runs unchanged.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ldm_lite
from ldm_lite import cli
from ldm_lite.cli import LoadOptions, SaveOptions, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.diffusion.plan import Plan
    from ldm_lite.generate import Draw
    from ldm_lite.pipeline import Pipeline

log = logging.getLogger("ldm_lite")

OnStep = Callable[[int, int, "Tensor"], None]  # (step from 1, number of steps, latents (B,C,h,w) after it)


@dataclass(frozen=True)
class Options:
    """What to make.  None = what the checkpoint's family has as its default."""

    prompt: str | None = option(None, "what to make an image of", positional=True)
    negative_prompt: str = option("", "what to keep away from")
    from_file: str | None = option(
        None, "a text file with a prompt in each line, blank ones left out, in place of a prompt"
    )
    prompt_syntax: str = option("plain", "plain, or a1111: (more), [less], (this much:1.3), BREAK, any length")
    clip_skip: int = option(1, "which of the text encoder's last layers to take; 1 is the last")
    sampler: str = option("ddim", "by any of its usual names, 'DPM++ 2M Karras' for instance; an unknown one lists all")
    spacing: str | None = option(
        None,
        "leading, trailing, linspace, karras, exponential, sgm_uniform, beta or lcm (default: the sampler's own)",
        "--scheduler",
    )
    steps: int | None = option(None, "denoising steps, 1 to 1000", "--ddim_steps")
    scale: float | None = option(None, "classifier-free guidance; 1 is none, and twice as fast")
    guidance_rescale: float = option(0.0, "share of guidance's excess contrast taken back, 0 to 1")
    dynamic_threshold: float | None = option(None, "percentile of x0 to clamp to, 0 to 1, for models of pixels")
    eta: float | None = option(None, "noise added at every step, 0 to 1, for samplers that have it", "--ddim_eta")
    churn: float | None = option(None, "noise added and removed again over all steps, for euler, heun and dpm2")
    seed: int = option(42, "seed of the first image; image k has seed + k, whatever the batch size")
    height: int | None = option(None, "pixels, a multiple of 8", "--H")
    width: int | None = option(None, "pixels, a multiple of 8", "--W")
    n_samples: int | None = option(
        None, "images at a time; from a file: prompts at a time (default: 1)", "--batch_size"
    )
    n_iter: int | None = option(None, "times that the job is repeated, with new seeds (default: 1)")
    fixed_code: bool = option(False, "start every batch from the same noise")
    compat: bool = option(False, "noise, timesteps and defaults (2 x 3 images) of the original script to the letter")

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return (3 if self.compat else 1) if self.n_samples is None else self.n_samples

    @property
    def repeats(self) -> int:
        """Times that the job is done."""
        return (2 if self.compat else 1) if self.n_iter is None else self.n_iter


@dataclass(frozen=True, eq=False)
class Result:
    """One image, with what it was made from."""

    pixels: "Tensor"  # (3,H,W) float32 in [-1,1], on the CPU
    prompt: str
    seed: int
    parameters: str  # the A1111 text that its PNG carries

    @property
    def image(self) -> "Image":
        """As a PIL image, RGB."""
        from ldm_lite.image import to_pil

        return to_pil(self.pixels)

    @property
    def array(self) -> "NDArray[np.uint8]":
        """As numpy, (H,W,3) in [0,255]."""
        from ldm_lite.image import to_array

        return to_array(self.pixels)


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

    check(options)
    prompts = read_prompts(options) if context is None else [options.prompt or ""] * len(context)
    family = pipe.family
    height = family.resolution if options.height is None else options.height
    width = family.resolution if options.width is None else options.width
    steps = family.steps if options.steps is None else options.steps
    spacing = "original" if options.compat else options.spacing
    plan = make_plan(options.sampler, pipe.schedule, steps, eta=options.eta, churn=options.churn, spacing=spacing)
    job = _Job(
        prompts=prompts,
        plan=plan,
        scale=family.scale if options.scale is None else options.scale,
        latent_shape=pipe.latent_shape(height, width),
    )
    return _images(pipe, options, job, context, uncond, on_step)


def check(options: Options) -> None:
    """Raises ValueError for options that are wrong whatever the checkpoint."""
    from ldm_lite.diffusion.names import resolve

    sampler, _ = resolve(options.sampler)
    if options.compat and sampler not in ("ddim", "plms"):
        raise ValueError(f"--compat knows the samplers of the original script, ddim and plms, not {sampler}")
    for name in ("guidance_rescale", "dynamic_threshold"):
        value = getattr(options, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"got {name} {value}, wanted 0 to 1")
    for name in ("n_samples", "n_iter"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"got {name} {value}, wanted 1 or more")
    if options.scale is not None and not math.isfinite(options.scale):
        raise ValueError(f"got scale {options.scale}, wanted a finite number")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"got seed {options.seed}, wanted 0 to 2^63 - 1")


def read_prompts(options: Options) -> list[str]:
    """The prompts of one repetition.  Raises ValueError if there are none, or a file that is no list of them."""
    if options.from_file is None:
        if options.prompt is None:
            raise ValueError('no prompt: give one, for instance "a red apple on a blue background"')
        return [options.prompt] * options.batch_size
    if options.prompt is not None:
        raise ValueError("got a prompt and --from-file: give one of them")
    path = Path(options.from_file)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text, wanted a prompt in each line") from error
    # To the original script a blank line is a prompt.
    prompts = lines if options.compat else [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompt, wanted one in each line")
    return prompts


@dataclass(frozen=True)
class _Job:
    """Options with nothing left open."""

    prompts: list[str]  # of one repetition
    plan: "Plan"
    scale: float
    latent_shape: tuple[int, int, int]


def _images(
    pipe: "Pipeline",
    options: Options,
    job: _Job,
    context: "Tensor | None",
    uncond: "Tensor | None",
    on_step: OnStep | None,
) -> Iterator[Result]:
    from ldm_lite import generate
    from ldm_lite.conditioning import Reading, count_chunks, encode_prompts
    from ldm_lite.diffusion.guidance import Conditioning, classifier_free

    # All prompts of a job are as long as its longest, so that no image depends on what it is batched with.
    texts = {options.negative_prompt, *(job.prompts if context is None else ())}
    num_chunks = count_chunks(pipe, texts, options.prompt_syntax)
    reading = Reading(options.prompt_syntax, options.clip_skip, num_chunks)

    @functools.lru_cache(maxsize=64)  # a repetition has the prompts of the one before
    def encode(*prompts: str) -> Conditioning:
        return encode_prompts(pipe, prompts, reading)

    plan, noise_source = job.plan, _noise_source(pipe, options, job)
    if options.compat:  # the original draws noise at every call, if only to multiply it by zero
        plan = dataclasses.replace(plan, draws=plan.draws | True)

    count = len(job.prompts)
    for repeat, first in itertools.product(range(options.repeats), range(0, count, options.batch_size)):
        rows = range(first, min(first + options.batch_size, count))
        prompts = [job.prompts[row] for row in rows]
        cond = encode(*prompts) if context is None else Conditioning(context[rows.start : rows.stop])
        if job.scale == 1:
            negative = None
        elif uncond is None:
            negative = encode(*[options.negative_prompt] * len(rows))
        else:
            negative = Conditioning(uncond.expand(count, -1, -1)[rows.start : rows.stop])
        seeds = [options.seed + (row - first if options.fixed_code else repeat * count + row) for row in rows]
        noise, draw = noise_source(seeds)

        latents = noise
        steps = generate.denoise(
            pipe,
            noise,
            classifier_free(cond, negative, job.scale),
            plan,
            rescale=options.guidance_rescale,
            percentile=options.dynamic_threshold,
            draw=draw,
        )
        for step, latents in enumerate(steps, start=1):
            if on_step is not None:
                on_step(step, plan.num_steps, latents)
        for pixels, prompt, seed in zip(generate.decode(pipe, latents), prompts, seeds, strict=True):
            yield Result(pixels, prompt, seed, _parameters(pipe, options, job, prompt, seed))


def _noise_source(pipe: "Pipeline", options: Options, job: _Job) -> "Callable[[list[int]], tuple[Tensor, Draw]]":
    """-> a function: the seeds of a batch -> its first noise, and the source of its later noise."""
    import torch

    from ldm_lite import generate

    if not options.compat:

        def seeded(seeds: list[int]) -> "tuple[Tensor, Draw]":
            draw = generate.seeded_noise(seeds, job.latent_shape)
            return draw(), draw

        return seeded

    generator = torch.Generator(pipe.device).manual_seed(options.seed)
    start = generate.shared_noise(generator, options.batch_size, job.latent_shape)() if options.fixed_code else None

    def shared(seeds: list[int]) -> "tuple[Tensor, Draw]":
        draw = generate.shared_noise(generator, len(seeds), job.latent_shape)
        return (draw() if start is None else start[: len(seeds)]), draw

    return shared


def _parameters(pipe: "Pipeline", options: Options, job: _Job, prompt: str, seed: int) -> str:
    from ldm_lite.diffusion.names import label
    from ldm_lite.image import parameters

    _, h, w = job.latent_shape
    factor = pipe.vae.spec.factor
    settings: dict[str, object] = {
        "Steps": job.plan.num_steps,
        "Sampler": label(options.sampler),
        "CFG scale": job.scale,
        "Seed": options.seed if options.compat else seed,
        "Size": f"{w * factor}x{h * factor}",
        "Model": pipe.name,
    }
    stated = {
        "Schedule type": options.spacing,
        "Eta": options.eta,
        "Sigma churn": options.churn,
        "Clip skip": options.clip_skip if options.clip_skip > 1 else None,
        "Guidance rescale": options.guidance_rescale or None,
        "Dynamic threshold": options.dynamic_threshold,
        "Prompt syntax": options.prompt_syntax if options.prompt_syntax != "plain" else None,
    }
    settings |= {key: value for key, value in stated.items() if value is not None}
    if options.compat:
        settings["Noise"] = f"original script, image {seed - options.seed}"
    settings["Version"] = f"ldm_lite {ldm_lite.__version__}"
    return parameters(prompt, options.negative_prompt, settings)


# ---- the command ----------------------------------------------------------------------------------------------------


def _original_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("flags of the original script that are named otherwise here")
    section.add_argument("--plms", dest="sampler", action="store_const", const="plms", help="--sampler plms")
    section.add_argument(
        "--dpm_solver", dest="sampler", action="store_const", const="dpmpp_2m", help="--sampler dpmpp_2m"
    )
    section.add_argument("--precision", choices=("full", "autocast"), help="full: --dtype fp32; autocast: the default")
    section.add_argument("--config", help="not needed: the checkpoint says what it is")
    section.add_argument("--C", type=int, help="latent channels: checked against the checkpoint")
    section.add_argument("--f", type=int, help="pixels to a latent position: checked against the checkpoint")
    section.add_argument("--laion400m", action="store_true", help="not supported yet")


def _heed(original: dict[str, Any], load: LoadOptions) -> LoadOptions:
    """What the original's own flags change in what is loaded.  Raises ValueError for what is not supported."""
    if "laion400m" in original:
        raise ValueError(
            "--laion400m (the BERT-conditioned LDM) is not supported yet: take a Stable Diffusion 1.x file"
        )
    if "config" in original:
        log.info("--config is not needed: the checkpoint says what it is")
    if original.get("precision") == "full" and load.dtype is None:
        return dataclasses.replace(load, dtype="fp32")
    return load


MOST_IN_GRID = 100  # a grid needs all of its images in memory


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the images, save each when it is ready, and say where it is."""
    from ldm_lite.image import grid

    load = _heed(original, load)
    check(options)
    saver, count = cli.Saver(save), len(read_prompts(options)) * options.repeats
    pipe = ldm_lite.load(**load.arguments())
    for name, value in (("C", pipe.vae.spec.embed_dim), ("f", pipe.vae.spec.factor)):
        if original.get(name, value) != value:
            raise ValueError(f"got --{name} {original[name]}, but this checkpoint has {value}: leave it out")

    with_grid = not save.skip_grid and 1 < count <= MOST_IN_GRID
    start, in_grid = time.perf_counter(), []
    for result in txt2img(pipe, options, on_step=cli.Progress()):
        if not save.skip_save:
            print(saver.sample(result.image, result.parameters), flush=True)
        if with_grid:
            in_grid.append(result.image)
    if in_grid:
        print(saver.grid(grid(in_grid, columns=save.n_rows or options.batch_size), result.parameters), flush=True)
    log.info("%d image%s in %.1f s; %s", count, "s" * (count > 1), time.perf_counter() - start, cli.memory())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = cli.parse(argv, "txt2img", __doc__.splitlines()[0], groups, _original_flags)
    return cli.run(lambda: run(options, load, save, original), debug=save.debug)


if __name__ == "__main__":
    sys.exit(main())
