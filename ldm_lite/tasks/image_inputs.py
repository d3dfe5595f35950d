"""What commands that begin with a picture share: which pictures, at what size, and how much of them is noise."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ldm_lite.cli.options import MOST_PX, option
from ldm_lite.tasks.job import JobOptions, sampler_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.diffusion.plan import Plan
    from ldm_lite.diffusion.schedule import Level

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class ImageOptions(JobOptions):
    """What to begin with, and how much of it is to change."""

    init_img: tuple[str, ...] = option(
        (), "picture to begin with; a folder is all pictures in it; repeatable", "--input", metavar="PATH"
    )
    strength: float | None = option(None, "how much of the picture is noise at first, 0 to 1", within=(0, 1))
    exact_steps: bool = option(False, "run all steps within the strength's noise, not the strength's share of them")
    resize: str = option(
        "crop", "how a picture gets the height and width asked for", choices=("crop", "fit", "stretch")
    )
    height: int | None = option(
        None, "pixels (default: the picture's, or as the width has it)", "--H", within=(1, MOST_PX)
    )
    width: int | None = option(
        None, "pixels (default: the picture's, or as the height has it)", "--W", within=(1, MOST_PX)
    )
    sample_posterior: bool = option(False, "sample the autoencoder's latents, not their mean")


class Picture(NamedTuple):
    """A picture with the name that messages and parameters call it by."""

    name: str
    image: "Image"


Options = TypeVar("Options", bound=ImageOptions)


def sources(paths: Sequence[str], flag: str, least: int = 1) -> list[Path]:
    """Files and folders -> files, those of a folder by name.  Raises ValueError if there are too few, OSError."""
    from ldm_lite.image import SUFFIXES, list_images

    found: list[Path] = []
    for path in map(Path, paths):
        path.stat()  # what is not there is an error before any work, not in the middle of it
        inside = list_images(path) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: holds no pictures ({', '.join(SUFFIXES)})")
        found += inside
    if len(found) < least:
        raise ValueError(f"no picture: give one with --{flag} FILE")
    return found


def open_source(source: "Path | Image") -> Picture:
    """A file, or a PIL image of any kind -> an upright, opaque RGB picture.  Raises ValueError, OSError."""
    from ldm_lite.image import open_image, to_rgb

    if isinstance(source, Path):
        return Picture(source.name, open_image(source))
    return Picture("picture", to_rgb(source))


def size_of(pipe: "Pipeline", options: ImageOptions, picture: Picture) -> tuple[int, int]:
    """(width, height) in pixels that a picture is brought to: what is asked for, or its own.

    Its own is reduced, which is said, where it is above twice what the model was trained at; the original scripts
    round it down to multiples of 32.
    """
    own_width, own_height = picture.image.size
    width, height = options.width, options.height
    if width is not None and height is not None:
        if options.resize == "crop" and abs(own_width * height / (own_height * width) - 1) > 0.02:
            log.info(
                "%s: is cut to the proportions of %d x %d; --resize fit keeps all of it", picture.name, width, height
            )
        return width, height
    if width is not None:
        return width, max(1, round(own_height * width / own_width))
    if height is not None:
        return max(1, round(own_width * height / own_height)), height
    if options.compat:
        if min(own_width, own_height) < 32:
            raise ValueError(f"{picture.name}: has {own_width} x {own_height} pixels, --compat wants 32 or more a side")
        return own_width // 32 * 32, own_height // 32 * 32
    most = 2 * pipe.family.resolution
    ratio = min(1.0, most / max(picture.image.size))
    width, height = (max(1, round(side * ratio)) for side in picture.image.size)
    if ratio < 1:
        log.info(
            "%s: %d x %d pixels are made %d x %d, twice the model's size; --width takes another",
            *(picture.name, own_width, own_height, width, height),
        )
    return width, height


def padded(pipe: "Pipeline", picture: "Image") -> "Tensor":
    """A picture of its final size -> pixels (3,H,W), its edges drawn out to sides that the autoencoder takes."""
    from ldm_lite.image import pad, to_pixels

    return pad(to_pixels(picture), pipe.vae.spec.factor)


def begin(pipe: "Pipeline", options: ImageOptions, strength: float) -> "tuple[Plan | None, Level | None, int]":
    """The plan of the steps that a strength leaves, the level of noise for the first, and how many come before it.

    No plan: not a single step.  No level: noise alone, strength 1.  Raises ValueError for options that do not fit.
    """
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.diffusion.schedule import CLEAN, Level

    if options.compat:
        return _begin_as_the_original(pipe, options, strength)
    steps = pipe.family.steps if options.steps is None else options.steps
    whole, last = share(steps, strength, options.exact_steps)
    plan = make_plan(
        sampler_of(pipe, options),
        pipe.schedule,
        whole,
        eta=options.eta,
        churn=options.churn,
        spacing=options.spacing,
        last=last,
    )
    if strength == 0:
        log.info("strength 0: no UNet call, the picture goes through the autoencoder alone")
        return None, CLEAN, 0
    log.info("strength %g: the last %d of %d steps, %d UNet calls", strength, last, whole, len(plan.t))
    if strength == 1:
        return plan, None, 0
    return plan, Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1])), whole - last


def share(steps: int, strength: float, exact: bool) -> tuple[int, int]:
    """(steps of the whole schedule, how many of them are run, the last ones) for a strength in [0,1].

    Run are strength * steps, rounded down as the original does, at least one; exact: all steps, of a finer schedule.
    Raises ValueError if that would need more than 1000.
    """
    if not exact or strength == 0:
        return steps, max(1, math.floor(round(steps * strength, 9)))
    whole = steps / strength
    if round(min(whole, 1e9)) > 1000:
        most = math.floor(1000 * strength)
        raise ValueError(
            f"got {steps} exact steps at strength {strength:g}, which are the last of {whole:.0f}, wanted at most "
            f"1000: take {f'at most {most} steps' if most else 'a higher strength'}"
        )
    return round(whole), steps


def _begin_as_the_original(
    pipe: "Pipeline", options: ImageOptions, strength: float
) -> "tuple[Plan | None, Level | None, int]":
    """The original noises one level higher than its first step is for, and fails where there is none.

    CompVis scripts/img2img.py: stochastic_encode and decode with the same t_enc.
    """
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.diffusion.schedule import original

    steps = pipe.family.steps if options.steps is None else options.steps
    last, levels = int(strength * steps), original(pipe.schedule, steps)
    if last > len(levels) - 2:
        raise ValueError(f"the original script fails at strength {strength:g}: take less, or leave --compat out")
    plan = None
    if last > 0:
        plan = make_plan(
            sampler_of(pipe, options), pipe.schedule, steps, eta=options.eta, spacing="original", last=last
        )
    log.info("strength %g: %d steps, %d UNet calls", strength, last, last)
    return plan, levels[-last - 2], steps - last


def as_original(options: Options, sampler: str, scale: float) -> Options:
    """With --compat, the defaults of an original script.  Raises ValueError for a sampler that it has not."""
    if not options.compat:
        return options
    if options.sampler not in (None, sampler):
        raise ValueError(f"--compat knows the sampler of the original script, {sampler}, not {options.sampler}")
    return dataclasses.replace(options, sampler=sampler, scale=scale if options.scale is None else options.scale)
