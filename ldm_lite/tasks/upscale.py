"""Enlarge images four times, with a model that reads them as further channels.

Stable Diffusion's x4 upscaler also reads a prompt and the noise level of the image; latent diffusion's
super-resolution model (bsr_sr) reads only the image.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import UpscaleOptions
from ldm_lite.image import to_pixels
from ldm_lite.runtime.tiled_unet import TiledUNet
from ldm_lite.tasks.batching import ImageInputs, Later, OnStep, results
from ldm_lite.tasks.image_inputs import NamedImage, Source, open_source, sources
from ldm_lite.tasks.job import Job, Result, check_task, plan_of, resolve
from ldm_lite.tasks.job import check as check_job

OWN_STREAM = 2**63  # added to an image's seed for the noise on the image, which has its own generator


def upscale(model: Model, options: UpscaleOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Yield each image four times as large, as soon as it is decoded.  Leaving the loop stops the job.

    Raises ValueError, one line, for options that do not fit.
    """
    return results(*prepare(model, options), on_step)


def count(options: UpscaleOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    check(options)
    return len(sources(options.init_img, "init_img")) * options.images_at_a_time * options.repeats


def prepare(model: Model, options: UpscaleOptions) -> tuple[Job, Iterator[Later]]:
    """Return the job and its inputs, which are read one by one.  Raises ValueError as upscale does."""
    check(options)
    check_task(model, "upscale")
    levels = model.family.unet.num_classes
    if levels is not None and options.noise_level >= levels:
        raise ValueError(f"got `noise_level` {options.noise_level}, wanted 0 to {levels - 1}, which {model.name} knows")
    found, repeats = sources(options.init_img, "init_img"), options.images_at_a_time * options.repeats
    # A tensor of the user's is an image of 8 bits like any other; enlarge takes its own as they are.
    given = [open_source(source) if isinstance(source, Tensor) else source for source in found]
    return enlarge(model, options, (source for source in given for _ in range(repeats)), len(found) * repeats)


def enlarge(
    model: Model, options: UpscaleOptions, images: Iterable[Source], num_images: int
) -> tuple[Job, Iterator[Later]]:
    """Return the job that enlarges images, or pixels (3,H,W) in [-1,1], four times.

    Image k has the seed options.seed + k, for the noise on the image too.  Images larger than options.tile run tile by
    tile.
    """
    tiled: Any = TiledUNet(model.unet, options.tile)
    one = dataclasses.replace(options, prompt=options.prompt or "", batch_size=1, n_iter=1)
    model = dataclasses.replace(model, unet=tiled)
    job = resolve(model, one, plan_of(model, one), num_images=num_images)
    # One input per image, since the noise on an image comes from its own seed.
    return job, (
        Later(partial(_inputs, model, options, image, job.seeds.of(k, 0)[0]), (image,))
        for k, image in enumerate(images)
    )


def check(options: UpscaleOptions) -> None:
    """Raises ValueError for options that are wrong whatever the model."""
    check_job(dataclasses.replace(options, noise_level=0))  # for this task noise_level means the noise on the image
    if options.compat or options.from_file is not None or options.fixed_code or options.control or options.refiner:
        raise ValueError("upscale has no `compat`, `from_file`, `fixed_code`, `control` or `refiner`: leave them out")
    if not isinstance(options.prompt, (str, type(None))) or options.cond is not None:
        raise ValueError("upscale takes one prompt for all images: give a text")
    if options.seamless is not None:
        raise ValueError("upscale makes no seamless images: leave out `seamless`")
    if options.dynamic is not None or options.wildcards is not None:
        raise ValueError("upscale takes one prompt as it is: leave out `dynamic` and `wildcards`")
    if options.height is not None or options.width is not None:
        raise ValueError("the result is four times the image's size: leave out `height` and `width`")


def _inputs(model: Model, options: UpscaleOptions, image: Source, seed: int) -> ImageInputs:
    """What the result for one image starts from."""
    name, pixels = None, image
    if not isinstance(image, Tensor):
        opened = image if isinstance(image, NamedImage) else open_source(image)
        name, pixels = opened.name, to_pixels(opened.image)
    level = None
    if model.family.unet.num_classes is not None:  # the network reads the noise level
        generator = torch.Generator("cpu").manual_seed((seed + OWN_STREAM) % 2**64)
        noise = torch.randn(pixels.shape, generator=generator, dtype=torch.float32, device="cpu")
        pixels = noised(model, pixels, options.noise_level, noise)
        level = torch.tensor([options.noise_level], device="cpu")
    _, height, width = pixels.shape
    return ImageInputs(
        latent_shape=(model.vae.spec.embed_dim, height, width),
        concat=pixels[None].to(model.device),
        y=level,
        settings={"Init image": name, "Noise level": None if level is None else options.noise_level},
    )


def noised(model: Model, pixels: Tensor, level: int, noise: Tensor) -> Tensor:
    """Add the noise of a level to pixels in [-1,1], by the latents' schedule."""
    _, a, s = model.schedule.at(level)
    return a * pixels + s * noise
