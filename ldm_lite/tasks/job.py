"""A job: the options, prompts and results that all commands that make pictures have in common, and their main part.

A command's own Options extend JobOptions; serve() loads the checkpoint, and shows and saves what the command makes.
"""

import argparse
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ldm_lite
from ldm_lite.cli.options import FINITE, MOST, MOST_PX, SEEDS, LoadOptions, Ranged, option
from ldm_lite.cli.output import Saver
from ldm_lite.cli.progress import Progress, memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.diffusion.plan import Plan

log = logging.getLogger("ldm_lite")

OnStep = Callable[[int, int, "Tensor"], None]  # (step from 1, number of steps, latents (B,C,h,w) after it)

# ---- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobOptions(Ranged):
    """What to make.  None = what the checkpoint's family has as its default."""

    original_counts: ClassVar[tuple[int, int]] = (3, 2)  # n_samples and n_iter of the original script

    prompt: str | None = option(
        None,
        "what to make an image of; for models that read no text: a class, or a file of boxes, labels or embeddings",
        *("--class", "--boxes", "--label-map", "--embeddings"),
        positional=True,
    )
    negative_prompt: str | None = option(None, "what to keep away from; to SDXL, '' is another thing than nothing")
    from_file: str | None = option(
        None, "a text file with a prompt in each line, blank ones left out, in place of a prompt"
    )
    prompt_syntax: str = option("plain", "plain, or a1111: (more), [less], (this much:1.3), BREAK, any length")
    embedding: tuple[str, ...] = option(
        (), "a file of textual inversion, which prompts then call by its name; repeatable", metavar="FILE"
    )
    clip_skip: int = option(
        1, "which of the text encoder's last layers to take; 1 is the one it was trained with", within=(1, 100)
    )
    sampler: str | None = option(
        None, "by any of its usual names, 'DPM++ 2M Karras' for instance; an unknown one lists all (for most: ddim)"
    )
    spacing: str | None = option(
        None,
        "leading, trailing, linspace, karras, exponential, sgm_uniform, beta or lcm (default: the sampler's own)",
        "--scheduler",
    )
    steps: int | None = option(None, "denoising steps, 1 to 1000", "--ddim_steps", within=(1, 1000))
    scale: float | None = option(None, "classifier-free guidance; 1 is none, and twice as fast", within=FINITE)
    guidance_rescale: float = option(0.0, "share of guidance's excess contrast taken back, 0 to 1", within=(0, 1))
    dynamic_threshold: float | None = option(
        None, "percentile of x0 to clamp to, 0 to 1, for models of pixels", within=(0, 1)
    )
    eta: float | None = option(
        None, "noise added at every step, 0 to 1, for samplers that have it", "--ddim_eta", within=(0, 1)
    )
    churn: float | None = option(
        None, "noise added and removed again over all steps, for euler, heun and dpm2", within=(0, 1000)
    )
    control: tuple[str, ...] = option(
        (),
        "steer by a picture, FILE:IMAGE[:WEIGHT][:START-END][:guess][:pool], FILE a ControlNet or T2I-Adapter, from "
        "START to END of the steps; guess: not the negative prompt; pool: for the shuffle network; repeatable",
    )
    preprocess: str | None = option(
        None, "make the pictures of --control maps: canny, canny:LOW:HIGH or inpaint; one for all, or canny,none"
    )
    refiner: str | None = option(
        None, "a checkpoint that goes on with the last steps: SDXL's refiner, or any of its kind"
    )
    refiner_start: float | None = option(
        None,
        "share of the steps that come before the refiner, 0 to 1, of all from pure noise on, run or not (default: 0.8)",
        within=(0, 1),
    )
    clip_vision: str | None = option(
        None, "CLIP ViT-L/14 as Hugging Face has it, whose image encoder style adapters look through", metavar="FILE"
    )
    depth: str | None = option(None, "a depth map, lighter = nearer, for models that read one")
    image_embedding: str | None = option(None, "a CLIP embedding of an image (.npy or .safetensors), for unCLIP")
    noise_level: int = option(0, "noise added to that embedding, 0 to 999: how freely it is followed", within=(0, 999))
    image_statistics: str | None = option(
        None, "mean and deviation of such embeddings, for unCLIP L: karlo's ViT-L-14_stats.th, or diffusers' file"
    )
    original_size: str | None = option(
        None,
        "to SDXL, the size of the picture that the image is to look scaled from (default: its own); small is blurred",
        metavar="HxW",
    )
    crop_top_left: str | None = option(
        None, "to SDXL, where in that picture the image is to look cut from (default: 0,0, nowhere)", metavar="Y,X"
    )
    target_size: str | None = option(None, "to SDXL, the image's size, if not its own", metavar="HxW")
    aesthetic_score: float | None = option(None, "to SDXL's refiner, how pretty, 1 to 10 (default: 6)", within=FINITE)
    negative_aesthetic_score: float | None = option(
        None, "how pretty is what to keep away from (default: 2.5)", within=FINITE
    )
    seed: int = option(42, "seed of the first image; image k has seed + k, whatever the batch size", within=SEEDS)
    height: int | None = option(None, "pixels, a multiple of 8", "--H", within=(1, MOST_PX))
    width: int | None = option(None, "pixels, a multiple of 8", "--W", within=(1, MOST_PX))
    n_samples: int | None = option(
        None, "images at a time; from a file: prompts at a time (default: 1)", "--batch_size", within=(1, 4096)
    )
    n_iter: int | None = option(None, "times that the job is repeated, with new seeds (default: 1)", within=(1, MOST))
    fixed_code: bool = option(False, "start every batch from the same noise")
    compat: bool = option(False, "noise, timesteps and defaults (2 x 3 images) of the original script to the letter")

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return (self.original_counts[0] if self.compat else 1) if self.n_samples is None else self.n_samples

    @property
    def repeats(self) -> int:
        """Times that the job is done."""
        return (self.original_counts[1] if self.compat else 1) if self.n_iter is None else self.n_iter


def check(options: JobOptions) -> None:
    """Raises ValueError for options that are wrong whatever the checkpoint."""
    from ldm_lite.control.control import parse
    from ldm_lite.diffusion.names import resolve

    parse(options.control, options.preprocess)
    _sizes(options)
    if options.noise_level and options.image_embedding is None:
        raise ValueError("--noise-level is of the picture that is followed: name it with --image-embedding FILE")
    if options.sampler is not None:
        sampler, _ = resolve(options.sampler)
        if options.compat and sampler not in ("ddim", "plms"):
            raise ValueError(f"--compat knows the samplers of the original script, ddim and plms, not {sampler}")


def read_prompts(options: JobOptions, pipe: "Pipeline | None" = None) -> list[str]:
    """The prompts of one repetition, empty ones if there is none.

    Raises ValueError for a file that is no list of them; with the pipeline that is to read them, also for none where
    it needs one.
    """
    if options.from_file is None:
        if options.prompt is None:
            from ldm_lite.conditioning.prompts import OPTIONAL

            if pipe is not None and pipe.family.conditioner not in OPTIONAL:
                raise ValueError('no prompt: give one, for instance "a red apple on a blue background"')
            return [""] * options.batch_size
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


COMMANDS = {
    "cascade": ("cascade",),
    "txt2img": ("txt2img", "img2img", "inpaint"),
    "inpaint": ("inpaint",),
    "instruct": ("img2img",),
    "depth": ("txt2img", "img2img"),
    "upscale": ("upscale",),
    "inpaint_ldm": ("inpaint",),
}


def check_command(pipe: "Pipeline", command: str) -> None:
    """Raises ValueError, naming the right command, if a checkpoint is not for this one."""
    able = COMMANDS[pipe.family.task]
    if command not in able:
        raise ValueError(
            f"{pipe.name} is a checkpoint of {pipe.family.title}, which {command} cannot use: "
            f"take python -m ldm_lite.{' or '.join(able)}"
        )


def sampler_of(pipe: "Pipeline", options: JobOptions) -> str:
    """The name of the sampler that the options ask for, or else the checkpoint's family."""
    return pipe.family.sampler if options.sampler is None else options.sampler


def hand_over(
    pipe: "Pipeline", options: JobOptions, plan: "Plan | None", refiner: "Pipeline | None", skipped: int = 0
) -> "tuple[Pipeline, int] | None":
    """Who goes on with a plan and from which of its steps: a refiner, given or named by the options, if there is one.

    skipped are the steps that a picture's strength leaves out before the plan's first.  Raises ValueError for a
    start without a refiner.
    """
    if refiner is None and options.refiner is None:
        if options.refiner_start is not None:
            raise ValueError("--refiner-start is where a refiner takes over: name it with --refiner FILE")
        return None
    if plan is None:
        return None
    if refiner is None:
        refiner = ldm_lite.load(options.refiner, device=pipe.device, dtype=pipe.dtype)
    start = 0.8 if options.refiner_start is None else options.refiner_start
    first = max(0, round(start * (skipped + plan.num_steps)) - skipped)
    log.info("%s: the last %d of %d steps are its", refiner.name, plan.num_steps - first, plan.num_steps)
    return refiner, first


def read_depth(pipe: "Pipeline", options: JobOptions, shape: tuple[int, int, int]) -> "Tensor | None":
    """The channel (1,1,h,w) of a model that reads depth.  Raises ValueError where there is one too many or few."""
    from ldm_lite.image import depth_latent, open_depth

    if (options.depth is not None) != (pipe.family.task == "depth"):
        got, wanted = ("no", "one: --depth FILE") if options.depth is None else ("a", "none")
        raise ValueError(f"got {got} depth map, but {pipe.family.title} wants {wanted}")
    return None if options.depth is None else depth_latent(open_depth(options.depth), shape[1:])


# Options that are two numbers: what is between them, and the least that they may be.
PAIRS = {"original_size": ("x", 1), "crop_top_left": (",", 0), "target_size": ("x", 1)}


def _sizes(options: JobOptions) -> dict[str, tuple[int, int]]:
    """SDXL's sizes as they are given, height first.  Raises ValueError for what is none."""
    sizes = {}
    for name, (between, least) in PAIRS.items():
        value = getattr(options, name)
        if value is not None:
            first, _, second = value.replace("X", "x").partition(between)
            pair = [int(side) if side.strip().isdecimal() else -1 for side in (first, second)]
            if not least <= min(pair) <= max(pair) <= MOST_PX:
                wanted = "HxW, height first, 1024x768 for instance" if between == "x" else "Y,X, 0,128 for instance"
                raise ValueError(f"got {name} {value!r}, wanted {wanted}")
            sizes[name] = pair[0], pair[1]
    return sizes


def stated(options: JobOptions) -> dict[str, Any]:
    """Fields of a conditioning.Reading that the options state and that only some families heed.  Raises ValueError."""
    from ldm_lite.conditioning.inputs import read_image_embedding, read_image_statistics

    embedding, statistics = options.image_embedding, options.image_statistics
    others = {
        "aesthetic_score": options.aesthetic_score,
        "negative_aesthetic_score": options.negative_aesthetic_score,
        "image_embedding": None if embedding is None else read_image_embedding(Path(embedding)),
        "image_statistics": None if statistics is None else read_image_statistics(Path(statistics)),
    }
    return {**_sizes(options), **{name: value for name, value in others.items() if value is not None}}


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


# ---- the command ----------------------------------------------------------------------------------------------------


def original_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the original scripts that are named otherwise here; serve() heeds them."""
    section = parser.add_argument_group("flags of the original script that are named otherwise here")
    section.add_argument("--plms", dest="sampler", action="store_const", const="plms", help="--sampler plms")
    section.add_argument(
        "--dpm_solver", dest="sampler", action="store_const", const="dpmpp_2m", help="--sampler dpmpp_2m"
    )
    section.add_argument("--precision", choices=("full", "autocast"), help="full: --dtype fp32; autocast: the default")
    section.add_argument("--config", help="not needed: the checkpoint says what it is")
    section.add_argument("--C", type=int, help="latent channels: checked against the checkpoint")
    section.add_argument("--f", type=int, help="pixels to a latent position: checked against the checkpoint")


def _heed(original: dict[str, Any], load: LoadOptions) -> LoadOptions:
    """What the original's own flags change in what is loaded."""
    if "config" in original:
        log.info("--config is not needed: the checkpoint says what it is")
    if original.get("precision") == "full" and load.dtype is None:
        return dataclasses.replace(load, dtype="fp32")
    return load


def previewed(
    pipe: "Pipeline", source: str, show: "Callable[[Image], None]", on_step: OnStep
) -> "tuple[Pipeline, OnStep]":
    """The two that show, after each step, what it foresees: the predicted x0 of a batch, by a file's autoencoder.

    In steps of a refiner, and in the last, they show the latents as they are.  Raises ValueError if the autoencoder's
    latents are not the pipeline's.
    """
    from ldm_lite import generate
    from ldm_lite.checkpoint.model import load_autoencoder
    from ldm_lite.diffusion.step import watched
    from ldm_lite.image import grid, to_pil
    from ldm_lite.zoo.detection import with_vae

    vae = load_autoencoder(source, device=pipe.device, dtype=pipe.dtype)
    quick = dataclasses.replace(pipe, vae=vae, family=with_vae(pipe.family, vae.spec, source))
    foreseen: list[Tensor] = []  # since the last step

    def shown(step: int, num_steps: int, latents: "Tensor") -> None:
        x0 = foreseen[-1] if foreseen and step < num_steps else latents
        foreseen.clear()
        pictures = [to_pil(pixels) for pixels in generate.decode(quick, x0)]
        show(grid(pictures, columns=math.ceil(len(pictures) ** 0.5)))
        on_step(step, num_steps, latents)

    return dataclasses.replace(pipe, step=watched(pipe.step, foreseen.append)), shown


MOST_IN_GRID = 100  # a grid needs all of its images in memory


def serve(
    make: "Callable[[Pipeline, OnStep], Iterator[Result]]",
    count: int,
    columns: int,
    load: LoadOptions,
    saver: Saver,
    original: dict[str, Any],
) -> None:
    """Load, make `count` images, save each when it is ready and a grid with so many columns, and say where they are."""
    from ldm_lite.image import grid

    pipe, save = ldm_lite.load(**_heed(original, load).arguments()), saver.options
    for name, value in (("C", pipe.vae.spec.embed_dim), ("f", pipe.vae.spec.factor)):
        if original.get(name, value) != value:
            raise ValueError(f"got --{name} {original[name]}, but this checkpoint has {value}: leave it out")

    with_grid = not save.skip_grid and 1 < count <= MOST_IN_GRID
    start, in_grid = time.perf_counter(), []
    progress: OnStep = Progress()
    if save.preview is not None:
        pipe, progress = previewed(pipe, save.preview, saver.preview, progress)
    for result in make(pipe, progress):
        if not save.skip_save:
            print(saver.sample(result.image, result.parameters), flush=True)
        if with_grid:
            in_grid.append(result.image)
    if len({image.size for image in in_grid}) == 1:
        print(saver.grid(grid(in_grid, columns=save.n_rows or columns), result.parameters), flush=True)
    log.info("%d image%s in %.1f s; %s", count, "s" * (count > 1), time.perf_counter() - start, memory())
