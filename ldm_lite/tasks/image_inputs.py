"""Shared by img2img, inpaint and upscale: opening images, their sizes, and the noise they start with."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import ImageOptions
from ldm_lite.core.denoise import Constraint, Draw, unconstrained
from ldm_lite.core.job import Item
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import CLEAN, Level
from ldm_lite.diffusion.spacings import original
from ldm_lite.image import SUFFIXES, list_images, pad, read_image, to_image, to_pixels, to_rgb
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.tasks.job import FirstLatents, TaskJob
from ldm_lite.tasks.plans import plan_of_options

log = logging.getLogger("ldm_lite")

Source = object  # a path, or an image as image.to_image takes it


class NamedImage(NamedTuple):
    """An image with the name that messages and PNG texts use for it."""

    name: str
    image: Image.Image


def sources(items: Sequence[Source], option: str, least: int = 1) -> list[Source]:
    """Replace folders by their image files, sorted by name; keep files and images.

    Raises ValueError, naming the option, if there are fewer than `least`; OSError for a path that does not exist.
    """
    images: list[Source] = []
    for item in items:
        if not isinstance(item, (str, os.PathLike)):
            images.append(item)
            continue
        path = Path(item)
        if not os.fspath(item):
            raise ValueError(f"got `{option}` '', an empty text: give the path of an image")
        try:
            path.stat()  # a missing file is an error before any work, not in the middle of it
        except ValueError as error:  # a null character, or a surrogate
            raise ValueError(f"{item!r:.200}: is not a valid file name ({error})") from error
        inside = list_images(path) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: holds no images ({', '.join(SUFFIXES)})")
        images += inside
    if len(images) < least:
        raise ValueError(f"no image: give one with `{option}=FILE`")
    return images


def open_source(source: Source, plain: bool = False) -> NamedImage:
    """Open a file or convert an image to upright, opaque RGB; or only to RGB, as Pillow does, if `plain`.

    Raises ValueError, OSError.
    """
    convert: Callable[[Image.Image], Image.Image] = (lambda image: image.convert("RGB")) if plain else to_rgb
    if isinstance(source, (str, os.PathLike)):
        return NamedImage(Path(source).name, read_image(source, convert))
    return NamedImage("image", convert(to_image(source)))


def target_size(model: CheckpointModel, options: ImageOptions, source: NamedImage) -> tuple[int, int]:
    """Return the (width, height) in pixels to resize an image to: that of the options, or its own.

    Its own size is reduced, with a message, to twice the model's training size at most; the original scripts round it
    down to multiples of 32, or 64 for Stable Diffusion 2.
    """
    own_width, own_height = source.image.size
    width, height = options.width, options.height
    if width is not None and height is not None:
        if options.resize == "crop" and abs(own_width * height / (own_height * width) - 1) > 0.02:
            log.info("%s: is cropped to the shape of %d x %d; `resize=fit` keeps all of it", source.name, width, height)
        return width, height
    if options.resize != "crop":
        log.warning("%s: `resize` has no effect without both `width` and `height`", source.name)
    if width is not None:
        return width, max(1, round(own_height * width / own_width))
    if height is not None:
        return max(1, round(own_width * height / own_height)), height
    if options.compat:
        unit = 64 if model.family.text == OPEN_CLIP_H else 32
        if min(own_width, own_height) < unit:
            raise ValueError(
                f"{source.name}: has {own_width} x {own_height} pixels, `compat` needs {unit} or more a side"
            )
        return own_width // unit * unit, own_height // unit * unit
    most = 2 * model.family.resolution
    ratio = min(1.0, most / max(source.image.size))
    width, height = (max(1, round(side * ratio)) for side in source.image.size)
    if ratio < 1:
        log.info(
            "%s: is reduced from %d x %d pixels to %d x %d, twice the model's size; `width` sets another size",
            *(source.name, own_width, own_height, width, height),
        )
    return width, height


def padded(model: CheckpointModel, image: Image.Image) -> Tensor:
    """Convert an image of its final size to pixels (3,H,W), padded with its edges to sides the autoencoder takes."""
    return pad(to_pixels(image), side_unit(model))


def load_img(image: Image.Image) -> Tensor:
    """Convert an image to pixels (3,H,W) in [-1,1], rounded as in the original's load_img."""
    return 2 * (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255) - 1


def side_unit(model: CheckpointModel) -> int:
    """The number that divides the sides of an image in pixels."""
    return model.vae.spec.factor * model.family.unet.patch


class Start(NamedTuple):
    """Where an image's denoising starts."""

    plan: Plan | None  # of the steps that the strength leaves; None: no steps
    level: Level | None  # the noise level to start from; None: pure noise, strength 1
    skipped: int  # steps before it


def begin(model: CheckpointModel, options: ImageOptions, strength: float) -> Start:
    """Return the steps that a strength in [0,1] leaves, and the noise level to start from.

    Raises ValueError for options that do not fit.
    """
    if options.compat:
        return _begin_as_the_original(model, options, strength)
    steps = model.family.steps if options.steps is None else options.steps
    steps = steps if options.plan is None else options.plan.num_steps
    whole, last = share(steps, strength, options.exact_steps)
    plan = plan_of_options(model, options, last=last, steps=whole)
    if strength == 0:
        log.info("strength 0: no UNet call, only the autoencoder")
        return Start(None, CLEAN, 0)
    calls = "as many UNet calls as it takes" if isinstance(plan, AdaptivePlan) else f"{len(plan.t)} UNet calls"
    log.info("strength %g: the last %d of %d steps, %s", strength, last, whole, calls)
    if strength == 1:
        return Start(plan, None, 0)
    return Start(plan, Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1])), whole - last)


def begin_at(
    model: CheckpointModel, options: ImageOptions, strength: float, latent_shape: tuple[int, int, int]
) -> Start | None:
    """Return the start of an image of a latent shape, if the schedule depends on the size, else None."""
    sized = model.sized(latent_shape)
    return None if sized.schedule is model.schedule else begin(sized, options, strength)


def share(steps: int, strength: float, exact: bool) -> tuple[int, int]:
    """Return (steps of the whole schedule, how many of the last ones run) for a strength in [0,1].

    strength * steps of them run, rounded down as in the original, but at least one; with `exact`, all steps run, of a
    finer schedule.  Raises ValueError if that would need more than 1000.
    """
    if not exact or strength == 0:
        return steps, max(1, math.floor(round(steps * strength, 9)))
    whole = steps / strength
    if round(min(whole, 1e9)) > 1000:
        most = math.floor(1000 * strength)
        raise ValueError(
            f"got {steps} exact steps at strength {strength:g}, which are the last of {whole:.0f}, expected at most "
            f"1000: use {f'at most {most} steps' if most else 'a higher strength'}"
        )
    return round(whole), steps


def _begin_as_the_original(model: CheckpointModel, options: ImageOptions, strength: float) -> Start:
    """Start like the original, which adds noise of the level above its first step's, and fails if there is none.

    CompVis scripts/img2img.py: stochastic_encode and decode with the same t_enc.
    """
    steps = model.family.steps if options.steps is None else options.steps
    last, levels = int(strength * steps), original(model.schedule, steps)
    if last > len(levels) - 2:
        raise ValueError(f"the original script fails at strength {strength:g}: use less, or leave out `compat`")
    plan = plan_of_options(model, options, last=last, steps=steps) if last > 0 else None
    log.info("strength %g: %d steps, %d UNet calls", strength, last, last)
    return Start(plan, levels[-last - 2], steps - last)


@dataclass(frozen=True, eq=False)
class FromImage:
    """Job.first_latents: an image's latents with the noise of a level.

    With a mask, the latents are restored where it is 0, with the noise of its level before every call, and without
    noise after the last: diffusers' StableDiffusionInpaintPipeline, for ordinary networks.  With `fresh` noise they are
    restored before every step, and not after the last: `mask` and `x0` of the original samplers.
    """

    init: Tensor  # (1 or B,C,h,w) in the UNet's scale
    level: Level | None = None  # the noise level to start from; None: pure noise, strength 1
    deviation: Tensor | None = None  # (1,C,h,w): init is the mean of a distribution, to be sampled for every image
    mask: Tensor | None = None  # (1,1,h,w) in [0,1]: 0 keeps, 1 is free
    hole: Tensor | None = None  # (1,1,h,w): 1 where init is the image's first noise
    fresh: bool = False

    def __call__(self, job: TaskJob, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
        """Return the first latents (B,C,h,w), and the function that puts some of them back."""
        device, init = self.init.device, self.init.expand(max(len(items), len(self.init)), -1, -1, -1)[: len(items)]
        if self.deviation is None:
            noise = draw().to(device)
        elif hasattr(draw, "of_image"):  # diffusers samples an image's latents first
            init = init + self.deviation * draw.of_image().to(device)
            noise = draw().to(device)
        else:
            noise = draw().to(device)
            init = init + self.deviation * draw().to(device)
        if self.hole is not None:
            init = init + self.hole.to(device) * noise
        alone = noise if job.plan is None else noise * job.plan.initial
        x = alone if self.level is None else self.level.a * init + self.level.s * noise
        if self.mask is None or job.plan is None:
            return x, unconstrained
        plan, kept, free = job.plan, init.float(), self.mask.to(device, torch.float32)
        levels = [*plan.level.tolist(), (1.0, 0.0)]

        def constrain(number: int, latents: Tensor) -> Tensor:
            a, s = levels[number]
            if not self.fresh:
                return free * latents + (1 - free) * (a * kept + s * noise) if number else latents
            if number == len(plan.t) or (number and plan.step[number - 1] == plan.step[number]):
                return latents
            return free * latents + (1 - free) * (a * kept + s * draw().to(device, torch.float32))

        return x, constrain


def joined(functions: Sequence[FirstLatents]) -> FirstLatents:
    """Return one Job.first_latents for images of one size, from that of each."""
    first = functions[0]
    if not isinstance(first, FromImage):
        return first

    def of_all(name: str) -> Tensor | None:
        parts = [getattr(function, name) for function in functions]
        return None if parts[0] is None else torch.cat(parts)

    init = torch.cat([function.init for function in functions if isinstance(function, FromImage)])
    return replace(first, init=init, deviation=of_all("deviation"), mask=of_all("mask"), hole=of_all("hole"))
