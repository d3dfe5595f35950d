"""Enlarge images four times, with a model that reads them as further channels.

Stable Diffusion's x4 upscaler also reads a prompt and the noise level of the image; latent diffusion's
super-resolution model (bsr_sr) reads only the image.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import UpscaleOptions
from ldm_lite.core.features import Feature
from ldm_lite.image import to_pixels
from ldm_lite.runtime.tiled_unet import TiledUNet
from ldm_lite.tasks import job
from ldm_lite.tasks.checks import check_counts
from ldm_lite.tasks.features import check_options
from ldm_lite.tasks.image_inputs import NamedImage, Source, open_source, sources
from ldm_lite.tasks.job import OnStep, Part, Task, TaskJob, results
from ldm_lite.tasks.plans import plan_of_options
from ldm_lite.tasks.results import Result

OWN_STREAM = 2**63  # added to an image's seed for the noise on the image, which has its own generator


def upscale(model: CheckpointModel, options: UpscaleOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Yield each image four times as large, as soon as it is decoded.  Leaving the loop stops the job.

    Raises ValueError, one line, for options that do not fit.
    """
    return results(prepare(model, options), on_step)


def count(options: UpscaleOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    check(options)
    return len(sources(options.init_img, "init_img")) * options.images_at_a_time * options.repeats


def prepare(model: CheckpointModel, options: UpscaleOptions) -> Task:
    """Return the task, whose images are read one by one.  Raises ValueError as upscale does."""
    check(options)
    repeats, paths = options.images_at_a_time * options.repeats, sources(options.init_img, "init_img")
    # A tensor of the user's is an image of 8 bits like any other; enlarge takes its own as they are.
    opened = [open_source(source) if isinstance(source, Tensor) else source for source in paths]
    return enlarge(model, options, [source for source in opened for _ in range(repeats)])


def enlarge(model: CheckpointModel, options: UpscaleOptions, images: Sequence[Source]) -> Task:
    """Return the task that enlarges images, or pixels (3,H,W) in [-1,1], four times.

    Image k has the seed options.seed + k, for the noise on the image too.  Images larger than options.tile run tile by
    tile.
    """
    single = replace(options, prompt=options.prompt or "", batch_size=1, n_iter=1)
    task = job.prepare(model, single, "upscale", check)
    check_counts(task.options, task.prompts, len(images))
    levels = model.family.unet.num_classes
    if levels is not None and options.noise_level >= levels:
        raise ValueError(f"got `noise_level` {options.noise_level}, expected 0 to {levels - 1} for {model.name}")
    tiled = TiledUNet(task.model.unet, options.tile)
    task = replace(task, model=task.model.with_networks(unet=tiled), plan=plan_of_options(task.model, single))
    # One part per image, since the noise on an image comes from its own seed.
    return replace(
        task,
        parts=(
            Part(items, partial(_job, task, image, items[0].seed), (image,))
            for image, items in ((image, task.items(place)) for place, image in enumerate(images))
        ),
    )


def check(options: UpscaleOptions) -> tuple[UpscaleOptions, list[Feature]]:
    """Return the options as features read them.  Raises ValueError for those that are wrong whatever the model."""
    for name in ("compat", "from_file", "fixed_code", "control", "refiner", "seamless", "dynamic", "wildcards"):
        if getattr(options, name):
            raise ValueError(f"upscale has no `{name}`: leave it out")
    options, features = check_options(options)
    if not isinstance(options.prompt, (str, type(None))) or options.cond is not None:
        raise ValueError("upscale takes one prompt for all images: give a text")
    if options.height is not None or options.width is not None:
        raise ValueError("the result is four times the image's size: leave out `height` and `width`")
    return options, features


def _job(task: Task, image: Source, seed: int) -> TaskJob:
    """Return the job that enlarges an image."""
    model, options = task.model, task.options
    if isinstance(image, Tensor):
        name, pixels = None, image
    else:
        opened = image if isinstance(image, NamedImage) else open_source(image)
        name, pixels = opened.name, to_pixels(opened.image)
    channels: dict[str, Tensor] = {}
    if model.family.unet.num_classes is not None:  # the network reads the noise level
        generator = torch.Generator("cpu").manual_seed((seed + OWN_STREAM) % 2**64)
        noise = torch.randn(pixels.shape, generator=generator, dtype=torch.float32, device="cpu")
        pixels = noised(model, pixels, options.noise_level, noise)
        channels["y"] = torch.tensor([options.noise_level], device="cpu")
    _, height, width = pixels.shape
    channels["concat"] = pixels[None].to(model.device)
    return task.job(
        (model.vae.spec.embed_dim, height, width),
        task.plan,
        channels=channels,
        settings={"Init image": name, "Noise level": options.noise_level if "y" in channels else None},
    )


def noised(model: CheckpointModel, pixels: Tensor, level: int, noise: Tensor) -> Tensor:
    """Add the noise of a level to pixels in [-1,1], by the latents' schedule."""
    _, a, s = model.schedule.at(level)
    return a * pixels + s * noise
