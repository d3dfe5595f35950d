"""The tasks: options and a model -> a Job.  Shape letters: B images of a batch, C channels, h w latent size."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ldm_lite.core.denoise import Branch, Constraint, Draw, Inputs, InputSource, unconstrained
from ldm_lite.core.image import mask_latent, mask_weights, open_image, open_mask, pad, resize, stretch, to_pixels
from ldm_lite.core.job import Item, Job
from ldm_lite.core.model import Model
from ldm_lite.core.options import Options
from ldm_lite.core.plan import Plan
from ldm_lite.core.samplers import make_plan

log = logging.getLogger("ldm_lite")


def make_job(model: Model, options: Options) -> Job:
    """Return the job of the options.  Raises ValueError, one line, for options that do not fit the model."""
    if options.mask is not None:
        return inpaint(model, options)
    if options.image is not None:
        return image_to_image(model, options)
    return text_to_image(model, options)


def text_to_image(model: Model, options: Options) -> Job:
    """From noise to an image of the options' size, or the family's."""
    side = model.family.resolution
    shape = model.latent_shape(options.height or side, options.width or side)
    items = []
    for number, (prompt, seed) in enumerate(zip(options.prompts, options.seeds, strict=True)):
        items.append(Item(number, prompt, options.negative_prompt, seed))
    return Job(
        model=model,
        options=options,
        shape=shape,
        plan=plan_of(model, options),
        items=items,
        input_source=guided_text,
        first_latents=from_noise,
        noise_source=seeded_noise,
    )


def image_to_image(model: Model, options: Options) -> Job:
    """From an image with the noise that the strength says; 0 only encodes and decodes it, 1 is text to image.

    Results have the size of the resized image, whatever multiples of pixels the model takes.
    """
    image = open_image(options.image)
    image = resize(image, size_of(model, options, image))
    strength = 0.75 if options.strength is None else options.strength
    return _from_image(model, options, image, strength)[0]


def inpaint(model: Model, options: Options) -> Job:
    """Image to image where the mask is white; latents elsewhere are put back before every call, pixels at the end."""
    image = open_image(options.image)
    mask = stretch(open_mask(options.mask), image.size)
    size = size_of(model, options, image)
    image, mask = resize(image, size), resize(mask, size)
    if mask.getbbox() is None:
        raise ValueError("nothing to repaint, the mask is black: white is repainted")
    strength = 1.0 if options.strength is None else options.strength
    plain, init = _from_image(model, options, image, strength)
    factor = model.vae.spec.factor
    weights = mask_weights(mask)  # (1, H, W): 1 where pixels are repainted
    free = mask_latent(pad(weights, factor), factor).to(init.device)  # (1, 1, h, w): 1 where latents are

    def first_latents(job: Job, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
        noise = draw().to(init.device)
        clean = (1.0, 0.0)
        levels = [] if job.plan is None else [*job.plan.level.tolist(), clean]  # before each call, and after the last

        def constrain(number: int, x: Tensor) -> Tensor:
            if number == 0:  # the first latents have this level already
                return x
            a, s = levels[number]
            return free * x + (1 - free) * (a * init + s * noise)

        return noised_image(init, job.plan, strength, noise), constrain

    def finish(item: Item, pixels: Tensor) -> Tensor:
        return weights * plain.finish(item, pixels) + (1 - weights) * to_pixels(image)

    return replace(plain, first_latents=first_latents, finish=finish)


def _from_image(model: Model, options: Options, image: Image.Image, strength: float) -> tuple[Job, Tensor]:
    """Return the job of image to image, and the image's latents (1,C,h,w)."""
    pixels = pad(to_pixels(image), model.vae.spec.factor)
    init = model.encode_pixels(pixels[None])

    def first_latents(job: Job, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
        return noised_image(init, job.plan, strength, draw().to(init.device)), unconstrained

    def finish(item: Item, pixels: Tensor) -> Tensor:
        return pixels[:, : image.height, : image.width]  # without the padding

    job = text_to_image(model, replace(options, height=pixels.shape[1], width=pixels.shape[2]))
    plan = plan_of(model, options, strength)
    return replace(job, plan=plan, first_latents=first_latents, finish=finish), init


# ---- parts of all tasks ---------------------------------------------------------------------------------------------


def guided_text(job: Job, items: Sequence[Item]) -> InputSource:
    """Job.input_source: the prompts of a batch with classifier-free guidance; scale 1 means none, and half the work."""
    model = job.model
    scale = model.family.scale if job.options.scale is None else job.options.scale
    branches: tuple[Branch, ...] = (Branch(model.encode_prompt([item.prompt for item in items])),)
    if scale != 1:
        negative = model.encode_prompt([item.negative for item in items])
        branches = Branch(negative, positive=False), *branches
    return lambda call: Inputs(model.unet, branches, scale, run_row=model.run_row)


def from_noise(job: Job, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
    """Job.first_latents: noise alone."""
    assert job.plan is not None, "the sampler returned no plan"
    return draw() * job.plan.initial, unconstrained


def seeded_noise(job: Job, items: Sequence[Item]) -> Draw:
    """Job.noise_source: that of each image's seed."""
    return noise_of([item.seed for item in items], job.shape)


def noise_of(seeds: Sequence[int], shape: tuple[int, int, int]) -> Draw:
    """Return a function that draws unit noise (B,C,h,w), by a CPU generator per seed, on any device."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

    def draw() -> Tensor:
        images = [torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for g in generators]
        return torch.stack(images)

    return draw


def plan_of(model: Model, options: Options, strength: float = 1.0) -> Plan | None:
    """Return the plan of the options, or the last steps of it that a strength leaves; None at strength 0.

    strength * steps run, rounded down as in the original script, but at least one.
    """
    if strength == 0:
        return None
    if options.plan is not None:
        if strength < 1:
            raise ValueError("got a `plan` of your own and a `strength` that leaves some of its steps out: use 1")
        model.check_plan(options.plan)
        return options.plan
    steps = model.family.steps if options.steps is None else options.steps
    last = None
    if strength < 1:
        product = round(steps * strength, 9)  # 100 * 0.29 is 28.999999999999996
        last = max(1, math.floor(product))
    name = options.sampler or model.family.sampler
    return make_plan(name, model.schedule, steps, spacing=options.spacing, eta=options.eta, last=last)


def noised_image(init: Tensor, plan: Plan | None, strength: float, noise: Tensor) -> Tensor:
    """Return the first latents (B,C,h,w): those of the image (1,C,h,w) at the plan's first level, or noise."""
    if plan is None:  # no steps, at strength 0
        return init.expand(len(noise), -1, -1, -1)
    if strength == 1:
        return noise * plan.initial
    a, s = plan.level[0].tolist()
    return a * init + s * noise


def size_of(model: Model, options: Options, image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) in pixels to resize an image to: that of the options, or its own.

    Its own is reduced, with a message, to twice the model's training size at most.
    """
    if options.width is not None and options.height is not None:
        return options.width, options.height
    if options.width is not None:
        return options.width, max(1, round(image.height * options.width / image.width))
    if options.height is not None:
        return max(1, round(image.width * options.height / image.height)), options.height
    ratio = min(1.0, 2 * model.family.resolution / max(image.size))
    if ratio < 1:
        log.info("the image is reduced to twice the model's size: `width` and `height` set another")
    width, height = (max(1, round(side * ratio)) for side in image.size)
    return width, height
