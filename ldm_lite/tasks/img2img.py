"""Image to image, by strength or by instruction (InstructPix2Pix, FLUX.1 Kontext)."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Img2imgOptions
from ldm_lite.core.features import Feature
from ldm_lite.image import resize_image
from ldm_lite.tasks import job
from ldm_lite.tasks.checks import check_counts, read_prompts
from ldm_lite.tasks.features import check_options
from ldm_lite.tasks.image_inputs import (
    FromImage,
    Source,
    Start,
    begin,
    begin_at,
    load_img,
    open_source,
    padded,
    sources,
    target_size,
)
from ldm_lite.tasks.job import OnStep, Part, Task, TaskJob, results
from ldm_lite.tasks.results import Result

log = logging.getLogger("ldm_lite")

# A family's task -> a function of the edited image's latents that returns what its network reads.
EDITING: dict[str, Callable[[Tensor, float], Tensor]] = {
    "instruct": lambda mean, scale_factor: mean / scale_factor,  # InstructPix2Pix was trained without the scale factor
    "edit": lambda mean, scale_factor: mean,
}
KONTEXT_SIDES = ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
KONTEXT = (*KONTEXT_SIDES, (1024, 1024), *((width, height) for height, width in KONTEXT_SIDES))  # of flux/util.py


def img2img(model: CheckpointModel, options: Img2imgOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Run all prompts on each image; yield each result as soon as it is decoded.  Leaving the loop stops the job.

    A result has the size of the resized image, whatever multiples of pixels the model takes.  Strength 0 only encodes
    and decodes the image; 1 equals txt2img.  Raises ValueError, one line, for options that do not fit.
    """
    return results(prepare(model, options), on_step)


def count(options: Img2imgOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    options, _ = check(options)
    return len(sources(options.init_img, "init_img")) * len(read_prompts(options)) * options.repeats


def prepare(model: CheckpointModel, options: Img2imgOptions) -> Task:
    """Return the task, whose images are read one by one.  Raises ValueError as img2img does."""
    task = job.prepare(model, options, "img2img", check)
    assert isinstance(task.options, Img2imgOptions)
    model, options = task.model, task.options
    instructed = model.family.task == "instruct"
    if options.image_scale is not None and not instructed:
        raise ValueError(f"got `image_scale`, but {model.name} is not InstructPix2Pix: leave it out")
    if options.compat and instructed:
        raise ValueError("`compat` is the original img2img script, which has no InstructPix2Pix: leave it out")
    images = sources(options.init_img, "init_img")
    check_counts(task.options, task.prompts, len(images))
    strength = (1.0 if model.family.task in EDITING else 0.75) if options.strength is None else options.strength
    start = begin(model, options, strength)
    image_scale = (1.5 if options.image_scale is None else options.image_scale) if instructed else None
    task = replace(task, plan=start.plan, image_scale=image_scale)
    return replace(
        task,
        parts=(
            Part(task.items(place), partial(_job, task, options, source, strength, start), (source,))
            for place, source in enumerate(images)
        ),
    )


def check(options: Img2imgOptions) -> tuple[Img2imgOptions, list[Feature]]:
    """Return the options as features read them.  Raises ValueError for those that are wrong whatever the model."""
    options, features = check_options(options)
    if options.resolution is not None and (options.height is not None or options.width is not None or options.compat):
        raise ValueError("`resolution` sets both sides: leave out `height`, `width` and `compat`, or it")
    return options, features


def edit_size(size: tuple[int, int], resolution: int) -> tuple[int, int]:
    """Return the (width, height) to which InstructPix2Pix's edit_cli.py crops an image of the given size."""
    factor = resolution / max(size)
    factor = math.ceil(min(size) * factor / 64) * 64 / min(size)
    width, height = (max(64, int(side * factor // 64) * 64) for side in size)
    return width, height


def kontext_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) with the nearest aspect ratio that FLUX.1 Kontext was trained on."""
    return min(KONTEXT, key=lambda side: abs(side[0] / side[1] - size[0] / size[1]))


def _job(task: Task, options: Img2imgOptions, source: Source, strength: float, start: Start) -> TaskJob:
    """Return the job of the images that start from one input image."""
    model = task.model
    name, image = named = open_source(source, plain=options.compat)
    if options.resolution is not None:
        size = edit_size(image.size, options.resolution)
    elif model.family.task == "edit" and options.width is options.height is None:
        size = kontext_size(image.size)
        log.info("%s: is resized to %d x %d, a training size of Kontext; `width` and `height` set another", name, *size)
    else:
        size = target_size(model, options, named)
    image = resize_image(image, size, "stretch" if options.compat else options.resize)
    pixels = load_img(image) if options.compat else padded(model, image)
    mean, deviation = model.scaled_distribution(pixels[None])
    shape = model.latent_shape(*pixels.shape[1:])
    start = begin_at(model, options, strength, shape) or start
    concat = EDITING[model.family.task](mean, model.family.scale_factor) if model.family.task in EDITING else None
    return task.job(
        shape,
        start.plan,
        settings={"Denoising strength": strength, "Init image": name, "Image CFG scale": task.image_scale},
        first_latents=FromImage(mean, start.level, deviation if options.samples_posterior else None),
        channels={} if concat is None else {"concat": concat},
        finish=lambda item, pixels: pixels[:, : image.height, : image.width],
        skipped=start.skipped,
    )
