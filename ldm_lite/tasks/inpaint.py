"""Inpainting and outpainting, with inpainting models, which see the masked image, and with ordinary ones."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageChops, ImageOps
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import MOST_PX
from ldm_lite.cli.task_options import InpaintOptions
from ldm_lite.core.features import Feature
from ldm_lite.core.job import Item
from ldm_lite.image import (
    extend,
    feathered_weights,
    list_images,
    mask_latent,
    mask_of,
    pad,
    read_mask,
    resize_image,
    to_pil,
    to_pixels,
)
from ldm_lite.tasks import job
from ldm_lite.tasks.checks import check_counts, read_prompts
from ldm_lite.tasks.features import check_options
from ldm_lite.tasks.image_inputs import (
    FromImage,
    NamedImage,
    Source,
    Start,
    begin,
    begin_at,
    open_source,
    padded,
    side_unit,
    sources,
    target_size,
)
from ldm_lite.tasks.job import OnStep, Part, Slots, Task, TaskJob, results
from ldm_lite.tasks.masked_area import Area, area_of, covering, fill, fitted
from ldm_lite.tasks.plans import plan_of_options
from ldm_lite.tasks.results import Result

log = logging.getLogger("ldm_lite")

Pair = tuple[Source, Source | None]  # an image and its mask, which is optional with `extend`


def inpaint(model: CheckpointModel, options: InpaintOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Run all prompts on each image; yield each result as soon as it is decoded.  Leaving the loop stops the job.

    Parts of a mask above middle grey are repainted.  Raises ValueError, one line, for options that do not fit.
    """
    return results(prepare(model, options), on_step)


def count(options: InpaintOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    options, _ = check(options)
    return len(pairs(options)) * len(read_prompts(options)) * options.repeats


def prepare(model: CheckpointModel, options: InpaintOptions) -> Task:
    """Return the task, whose images are read one by one.  Raises ValueError as inpaint does."""
    task = job.prepare(model, options, "inpaint", check)
    assert isinstance(task.options, InpaintOptions)
    model, options = task.model, task.options
    images = pairs(options)
    check_counts(task.options, task.prompts, len(images))
    strength = 1.0 if options.strength is None else options.strength
    if not options.compat:
        start = begin(model, options, strength)
    elif strength == 1 and model.family.task == "txt2img":
        start = Start(plan_of_options(model, options), None, 0)
    elif strength < 1:
        raise ValueError("`compat` inpaints only at strength 1: leave out `strength`, or `compat`")
    else:
        raise ValueError(f"`compat` inpaints with networks of 4 input channels, not {model.family.title}: leave it out")
    task = replace(task, plan=start.plan)
    _warn_of_idle(options)
    return replace(
        task,
        parts=(
            Part(task.items(place), partial(_job, task, options, pair, strength, start), pair)
            for place, pair in enumerate(images)
        ),
    )


def _warn_of_idle(options: InpaintOptions) -> None:
    """Log a warning for each option that has no effect with the others."""
    has_mask = bool(options.mask) or options.indir is not None
    if options.feather > 0 and options.no_paste and options.only_masked is None:
        log.warning("`feather` has no effect with `no_paste`, which keeps nothing of the image: leave one of them out")
    if options.invert_mask and not has_mask:
        log.warning("`invert_mask` has no effect without `mask`: `extend` alone repaints what it adds")
    if options.resize != "crop" and options.only_masked is not None:
        log.warning("`resize` has no effect with `only_masked`, which fits the area itself: leave it out")


def check(options: InpaintOptions) -> tuple[InpaintOptions, list[Feature]]:
    """Return the options as features read them.  Raises ValueError for those that are wrong whatever the model."""
    options, features = check_options(options)
    if isinstance(options.noise, str) and options.noise in ("diffusers", "comfy"):
        raise ValueError(f"`noise={options.noise}` is for txt2img and img2img: inpainting draws noise in another order")
    if options.compat and (options.only_masked is not None or options.masked_content != "original"):
        raise ValueError("the original code has no `only_masked` and no `masked_content`: leave them out, or `compat`")
    _sides(options)
    return options, features


def pairs(options: InpaintOptions) -> list[Pair]:
    """Return a job's images with their masks.  Raises ValueError for a missing mask, OSError for a missing file."""
    if options.indir is None:
        return _paired(options, sources(options.init_img, "init_img"), sources(options.mask, "mask", least=0))
    if options.init_img or options.mask:
        raise ValueError("got `indir` beside `init_img` or `mask`: give one of them")
    masks = [path for path in list_images(Path(options.indir)) if path.name.endswith("_mask.png")]
    if not masks:
        raise ValueError(f"{options.indir}: holds no NAME_mask.png beside a NAME.png")
    names = [str(mask.with_name(mask.name.replace("_mask.png", ".png"))) for mask in masks]
    return list(zip(sources(names, "indir"), masks, strict=True))


def _paired(options: InpaintOptions, images: Sequence[Source], masks: Sequence[Source]) -> list[Pair]:
    if not masks and options.extend is None:
        raise ValueError("no mask: give one with `mask=FILE`, white where to repaint, or `extend=left=128`")
    if len(masks) not in (0, 1, len(images)):
        raise ValueError(f"got {len(masks)} masks for {len(images)} images, expected one, or one for each")
    all_masks: Sequence[Source | None] = masks if len(masks) > 1 else [*masks, None][:1] * len(images)
    return list(zip(images, all_masks, strict=True))


def _sides(options: InpaintOptions) -> dict[str, int]:
    """The pixels of `extend` by side."""
    sides = {}
    for item in options.extend.split(",") if options.extend is not None else ():
        side, _, pixels = item.strip().partition("=")
        known = side in ("left", "top", "right", "bottom") and side not in sides and pixels.strip().isdecimal()
        if not known or not 1 <= int(pixels) <= MOST_PX:
            raise ValueError(f"got `extend` {options.extend!r}, expected left=128,top=64, or right, bottom")
        sides[side] = int(pixels)
    return sides


def _masked_channels(model: CheckpointModel, pixels: Tensor, hole: Tensor, latent_mask: Tensor) -> Tensor | None:
    """Return the further channels (1,C',h,w) that an inpainting network reads; None for an ordinary one.

    Given pixels (3,H,W); hole (1,H,W) and latent_mask (1,1,h,w) are 1 where to repaint.  Stable Diffusion: the mask,
    then latents of the image with a grey hole; latent diffusion: latents with a black hole, then the mask as 1 or -1;
    FLUX.1 Fill: latents with a grey hole, then the mask's pixels.
    """
    if model.family.task == "inpaint":
        return torch.cat([latent_mask, model.encode_pixels((pixels * (1 - hole))[None])], dim=1)
    if model.family.task == "inpaint_ldm":
        return torch.cat([model.encode_pixels((pixels * (1 - hole) - hole)[None]), 2 * latent_mask - 1], dim=1)
    if model.family.task == "inpaint_flux":
        cells = F.pixel_unshuffle(hole[None], model.vae.spec.factor)  # (1, 64, h, w): each position's own pixels
        return torch.cat([model.encode_pixels((pixels * (1 - hole))[None]), cells.to(model.device)], dim=1)
    return None


def _job(task: Task, options: InpaintOptions, pair: Pair, strength: float, start: Start) -> TaskJob:
    """Return the job of the images that start from one input image."""
    model = task.model
    name, whole, whole_mask = _opened(options, *pair)
    area = None
    if options.only_masked is None:
        size = target_size(model, options, NamedImage(name, whole))
        whole, whole_mask = resize_image(whole, size, options.resize), resize_image(whole_mask, size, options.resize)
    if whole_mask.getbbox() is None:
        raise ValueError(f"{name}: nothing to repaint, its mask is black: white is repainted (or `invert_mask`)")
    weights = feathered_weights(whole_mask, options.feather)
    weights = torch.ones_like(weights) if options.no_paste else weights
    image, mask = whole, whole_mask
    if options.only_masked is not None:
        image, mask, area = _only_masked(model, options, whole, whole_mask)
    log.info("%s: %.3g %% of it is repainted", name, 100 * float(feathered_weights(whole_mask).mean()))
    pixels, hole = padded(model, image), pad(feathered_weights(mask), side_unit(model))
    latent_mask = mask_latent(hole, model.vae.spec.factor)
    concat = _masked_channels(model, pixels, hole, latent_mask.to(model.device))
    shape = model.latent_shape(*pixels.shape[1:])
    start = begin_at(model, options, strength, shape) or start
    slots: Slots = {"channels": {} if concat is None else {"concat": concat}, "skipped": start.skipped}
    content = options.masked_content
    if concat is None or strength < 1:
        filled = pixels if content == "original" else padded(model, fill(image, mask))
        init, deviation = model.scaled_distribution(filled[None])
        if content in ("noise", "nothing"):
            kept = 1 - latent_mask.to(init.device)
            init, deviation = init * kept, deviation * kept
        slots["first_latents"] = FromImage(
            init,
            start.level,
            deviation if options.samples_posterior else None,
            mask=latent_mask if concat is None else None,
            hole=latent_mask if content == "noise" else None,
        )

    def finish(item: Item, pixels: Tensor) -> Tensor:
        """Crop the result, and put it into the original image, unless that is not kept."""
        result = pixels[:, : mask.height, : mask.width]
        if options.no_paste and area is None:
            return result
        if area is None:
            return weights * result + (1 - weights) * to_pixels(whole)
        repainted = to_pixels(whole)
        rows, columns = slice(area.top, area.bottom), slice(area.left, area.right)
        repainted[:, rows, columns] = to_pixels(covering(to_pil(result), area.size))
        return weights * repainted + (1 - weights) * to_pixels(whole)

    slots["finish"] = finish
    settings = {
        "Denoising strength": strength,
        "Init image": name,
        "Inpaint area": None if area is None else "Only masked",
    }
    return task.job(shape, start.plan, settings=settings, **slots)


def _only_masked(
    model: CheckpointModel, options: InpaintOptions, image: Image.Image, mask: Image.Image
) -> tuple[Image.Image, Image.Image, Area]:
    """Return the part of an image around its mask, and of the mask, at the size of the options, and where it is."""
    side = model.family.resolution
    size = side if options.width is None else options.width, side if options.height is None else options.height
    seen = Image.fromarray((feathered_weights(mask, options.feather)[0].numpy() * 255).astype(np.uint8))
    assert options.only_masked is not None
    area = area_of(seen, options.only_masked, size)
    part = fitted(mask.crop(area), size).point(lambda value: 255 * (value > 0))  # no pixel of it is lost
    return fitted(image.crop(area), size), part, area


def _opened(
    options: InpaintOptions, source: Source, mask_source: Source | None
) -> tuple[str, Image.Image, Image.Image]:
    """Return an image's name, and image and mask, of one size, extended.  Raises ValueError."""
    name, image = open_source(source)
    mask = Image.new("L", image.size)
    if mask_source is not None:
        drawn = read_mask(mask_source) if isinstance(mask_source, (str, os.PathLike)) else mask_of(mask_source)
        if abs(drawn.width / drawn.height * image.height / image.width - 1) > 0.01:
            raise ValueError(
                f"{name} has {image.width} x {image.height} pixels, but its mask {drawn.width} x {drawn.height}: "
                "make a mask with the image's aspect ratio"
            )
        drawn = resize_image(drawn, image.size, "stretch")
        mask = ImageOps.invert(drawn) if options.invert_mask else drawn
    if sides := _sides(options):
        image, new = extend(image, sides)
        old = Image.new("L", image.size)
        old.paste(mask, (sides.get("left", 0), sides.get("top", 0)))
        mask = ImageChops.lighter(new, old)
    return name, image, mask
