"""Batching: run a job's prompts and images in batches, for every task.

A task resolves its options into a job.Job and prepares each image's ImageInputs; run() does the rest.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import guided
from ldm_lite.conditioning.regions import shares
from ldm_lite.control.apply import ActiveControls
from ldm_lite.core.denoise import Constraint, InputSource, State, unconstrained
from ldm_lite.diffusion.guidance import Guidance, composed, instructed, regional, rescaling, skipping, thresholding
from ldm_lite.diffusion.noise import Draw, SharedNoise
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import Level
from ldm_lite.generate import Refiner
from ldm_lite.image import depth_latent, to_pil, to_pixels, to_rgb
from ldm_lite.runtime.shortened import ShortenedUNet
from ldm_lite.tasks.existing import Existing, contents
from ldm_lite.tasks.job import Job, Result
from ldm_lite.tasks.masked_area import Area, covering
from ldm_lite.tasks.text_inputs import AHEAD, PromptEncoder, Texts, weights_of

log = logging.getLogger("ldm_lite")

OnStep = Callable[[State], None]


@dataclass(frozen=True, eq=False)
class Second:
    """A second pass, that starts from the enlarged images of the first."""

    job: Job  # of this pass
    enlarge: Callable[[Tensor], Tensor]  # latents (B,C,h,w) -> (B,C,h',w')
    settings: Mapping[str, object]  # for the PNG's text

    def inputs(self, latents: Tensor) -> "ImageInputs":
        """Return what this pass starts from, of the latents (B,C,h,w) of the first."""
        init = self.enlarge(latents)
        _, channels, height, width = init.shape
        return ImageInputs((channels, height, width), init=init)


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """What a batch of images starts from, and how each result is finished."""

    latent_shape: tuple[int, int, int]
    init: Tensor | None = None  # (1,C,h,w) latents of an image to start from, in the UNet's scale
    deviation: Tensor | None = None  # (1,C,h,w): init is the mean of a distribution, to be sampled for every image
    mask: Tensor | None = None  # (1,1,h,w): 0 where init is kept
    hole: Tensor | None = None  # (1,1,h,w): 1 where init is the image's first noise
    concat: Tensor | None = None  # (1,C',h,w): further input channels of the network
    y: Tensor | None = None  # (1,) noise level of concat, for networks that read it
    start: tuple[Plan | None, Level | None, int] | None = None  # image_inputs.Start, if it depends on the size
    size: tuple[int, int] | None = None  # (height, width) that results are cropped to
    second: Second | None = None  # follows
    area: Area | None = None  # of the pixels of `paste`, into which a result is put
    paste: tuple[Tensor, Tensor] | None = None  # pixels (3,H,W) to put back where the weights (1,H,W) are 0
    settings: Mapping[str, object] = field(default_factory=dict)  # further settings for the PNG's text

    def finish(self, pixels: Tensor) -> Tensor:
        """Crop and paste decoded pixels (3,H',W'); return the result (3,H,W)."""
        if self.size is not None:
            pixels = pixels[:, : self.size[0], : self.size[1]]
        if self.paste is None:
            return pixels
        original, weights = self.paste
        if self.area is not None:
            whole = original.clone()
            rows, columns = slice(self.area.top, self.area.bottom), slice(self.area.left, self.area.right)
            whole[:, rows, columns] = to_pixels(covering(to_pil(pixels), self.area.size))
            pixels = whole
        return weights * pixels + (1 - weights) * original


@dataclass(frozen=True, eq=False)
class Later:
    """ImageInputs that are made when they are needed, since encoding an image takes time, and what they are made of."""

    make: Callable[[], ImageInputs]
    sources: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Images that run together."""

    first: int  # the number in the job of the image that the batch began with
    rows: list[int]  # of the prompts
    seeds: list[int]
    variations: list[int]  # variation seeds, all 0 without
    keys: list[str]


Inputs = Iterable[ImageInputs | Later]


def results(
    job: Job, inputs: Inputs, on_step: OnStep | None = None, existing: Existing | None = None
) -> Iterator[Result]:
    """Yield the images of a job, each as soon as it is decoded; on_step gets the state after every step.

    Images that are `existing` are left out; the others are the same as with them.
    """
    for event in run(job, inputs, existing):
        if isinstance(event, Result):
            yield event
        elif on_step is not None:
            on_step(event)


def run(job: Job, inputs: Inputs, existing: Existing | None = None) -> Iterator[State | Result]:
    """Run all prompts and repetitions of a job on each of the inputs; yield states after every step, and results."""
    runner = Runner(job)
    for number, given in enumerate(inputs):
        batches = list(batches_of(job, number, given, existing))
        if not batches:
            continue
        image = given.make() if isinstance(given, Later) else given
        for event in runner.run(image, batches):
            if isinstance(event, State):
                yield event
                continue
            batch, latents = event
            yield from finished(job, image, batch, latents)


def finished(job: Job, image: ImageInputs, batch: Batch, latents: Tensor) -> Iterator[Result]:
    """Yield the result of each of a batch's latents (B,C,h,w), as soon as it is decoded."""
    made = generate.decode(job.model, latents), batch.rows, batch.seeds, batch.variations, batch.keys
    for pixels, row, seed, variation, key in zip(*made, strict=True):
        more = {} if image.second is None else image.second.settings
        settings = {**noise_settings(job, variation), **image.settings, **more}
        yield dataclasses.replace(job.result(image.finish(pixels), row, seed, settings), key=key)


def noise_settings(job: Job, variation: int) -> dict[str, object]:
    """Return the settings of an image's text that concern its noise."""
    return {} if job.compat or job.noise is not None else job.noise_source.settings(variation)


class InpaintMask(NamedTuple):
    """Latents to keep where the mask is 0: they are put back before every call, with the noise of its level.

    After the last call they are restored without noise, whatever the sampler ends at.  diffusers'
    StableDiffusionInpaintPipeline, for ordinary networks.  Without `noise` they are put back before every step, with
    fresh noise, and the end is the sampler's: `mask` and `x0` of the original samplers.
    """

    latents: Tensor  # (B,C,h,w)
    mask: Tensor  # (B or 1,1,h,w) in [0,1]: 0 keeps, 1 is free
    noise: Tensor | None  # (B,C,h,w), unit noise: that of the first latents

    def constraint(self, plan: Plan, draw: Draw, device: torch.device) -> Constraint:
        """Return what puts the latents back in the calls of a plan."""
        kept, mask = self.latents.to(device, torch.float32), self.mask.to(device, torch.float32)
        noise = None if self.noise is None else self.noise.to(device, torch.float32)
        levels = [*plan.level.tolist(), (1.0, 0.0)]

        def constrain(number: int, x: Tensor) -> Tensor:
            a, s = levels[number]
            if noise is not None:
                return mask * x + (1 - mask) * (a * kept + s * noise) if number else x
            if number == len(plan.t) or (number and plan.step[number - 1] == plan.step[number]):
                return x
            return mask * x + (1 - mask) * (a * kept + s * draw().to(device, torch.float32))

        return constrain


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch with all that its denoising reads."""

    batch: Batch
    model: Model
    plan: Plan | None
    latents: Tensor  # (B,C,h,w), noised
    source: InputSource  # the inputs of every call
    draw: Draw
    mask: InpaintMask | None = None
    refiner: Refiner | None = None

    def stream(self) -> Iterator[State]:
        """Yield the state after every step, as generate.stream does; nothing if there are no steps."""
        if self.plan is None:
            return iter(())
        constrain: Constraint = unconstrained
        if self.mask is not None:
            constrain = self.mask.constraint(self.plan, self.draw, self.model.device)
        inputs = self.latents, self.source, self.plan, self.draw, constrain, self.refiner
        return generate.stream(self.model, *inputs)


class Runner:
    """Runs batches of a job's images, up to their latents."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._text = PromptEncoder(job.model, job)
        self._refining = None if job.refiner is None else PromptEncoder(job.refiner[0], job)
        self._next: Runner | None = None  # of second passes
        self._generator = torch.Generator(job.model.device).manual_seed(job.seeds.first) if job.compat else None

    def run(self, image: ImageInputs, batches: Sequence[Batch]) -> Iterator[State | tuple[Batch, Tensor]]:
        """Run batches on one input; yield states after every step, and each batch with its latents (B,C,h,w)."""
        for ready in self.prepare(image, batches):
            latents = ready.latents
            for state in ready.stream():
                latents = state.latents
                yield state
            if image.second is None:
                yield ready.batch, latents
            else:
                yield from self._second(image.second, ready.batch, latents)

    def _second(self, second: Second, batch: Batch, latents: Tensor) -> Iterator[State | tuple[Batch, Tensor]]:
        """Run the second pass of a batch."""
        if self._next is None:
            self._next = Runner(second.job)
        yield from self._next.run(second.inputs(latents), [batch])

    def prepare(self, image: ImageInputs, batches: Sequence[Batch]) -> Iterator[Ready]:
        """Yield each batch on one input with its text encoded and its first noise drawn, when it is asked for."""
        job, model = self.job, self.job.model
        if image.start is not None:
            job = dataclasses.replace(job, plan=image.start[0], start=image.start[1])
        if job.depth is not None:
            image = dataclasses.replace(image, concat=_depth_channels(job.depth, model, image.latent_shape))
        initial, controls = InitialLatents(job, image, self._generator), _controls(job, image)
        for place, batch in enumerate(batches):
            rows = batch.rows
            if model.offloader is not None and place % AHEAD == 0:
                self._text.encode_ahead([later.rows for later in batches[place : place + AHEAD]], image.latent_shape)
            texts = self._text.encode(rows, image.latent_shape)
            latents, mask, draw = initial.draw(batch)
            source = _source(job, model, image, texts, latents)
            if controls is not None:
                source = controls.wrapped(source)
            if job.tricks.shortcuts is not None and job.plan is not None:
                source = ShortenedUNet(model.unet, job.tricks.shortcuts, job.plan).wrapped(source)
            refiner = None
            if job.refiner is not None and self._refining is not None:
                other, step = job.refiner
                generate.check_refiner(model, other)
                refined = self._refining.encode(rows, image.latent_shape)
                refiner = other, _source(job, other, image, refined, latents), step
            yield Ready(batch, model, job.plan, latents, source, draw, mask, refiner)


def batches_of(job: Job, number: int, given: ImageInputs | Later, existing: Existing | None) -> Iterator[Batch]:
    """Yield the batches of the number-th input, without the images that exist."""
    count = len(job.prompts)
    sources = contents(given.sources) if existing is not None and isinstance(given, Later) else ""
    for repeat in range(job.repeats):
        offset = (number * job.repeats + repeat) * count
        for first in range(0, count, job.batch_size):
            batch = Batch(offset + first, [], [], [], [])
            for row in range(first, min(first + job.batch_size, count)):
                if batch.rows and weights_of(job, row) != weights_of(
                    job, batch.rows[0]
                ):  # parts that cannot go together
                    yield batch
                    batch = Batch(offset + row, [], [], [], [])
                seed, variation = job.seeds.of(offset + row, row - first)
                key = "" if existing is None else existing.key(job.prompts[row], (seed, variation), sources)
                if existing is None or not existing.take(key):
                    batch.rows.append(row)
                    batch.seeds.append(seed)
                    batch.variations.append(variation)
                    batch.keys.append(key)
            if batch.rows:
                yield batch


class InitialLatents:
    """The initial latents of images of one size: noise, or an image's latents with noise."""

    def __init__(self, job: Job, image: ImageInputs, generator: torch.Generator | None) -> None:
        """generator is for `compat`: as in the original script, one for the whole job."""
        self.job, self.image, self.generator = job, image, generator
        self._init: Tensor | None = None
        self._code: Tensor | None = None
        if generator is None:
            return
        # The original samples an image's latents once per job, with a generator on the CPU.
        on_cpu = generator if generator.device.type == "cpu" else torch.Generator("cpu").manual_seed(job.seeds.first)
        size, shape = job.batch_size, image.latent_shape
        self._init = self._image_latents(size, SharedNoise(on_cpu, size, shape))
        if job.seeds.fixed and self._init is None:
            self._code = SharedNoise(generator, size, shape)()

    def draw(self, batch: Batch) -> tuple[Tensor, InpaintMask | None, Draw]:
        """Return the initial latents of a batch, those to keep, and its later noise."""
        seeds, first = batch.seeds, batch.first
        draw: Draw
        if self.generator is None:
            draw = self.job.noise_source.draws(seeds, batch.variations, self.image.latent_shape)
            if isinstance(draw, SharedNoise):  # diffusers samples an image's latents first, once for all
                init = self._image_latents(len(seeds), SharedNoise(draw.generator, 1, self.image.latent_shape))
                noise = draw()
            else:
                noise = draw()
                init = self._image_latents(len(seeds), draw)
            draw = self.job.noise_source.later(draw, seeds, self.image.latent_shape, self.job.plan)
        else:
            draw = SharedNoise(self.generator, len(seeds), self.image.latent_shape)
            noise = draw() if self._code is None else self._code[: len(seeds)]
            init = None if self._init is None else self._init[: len(seeds)]
        if self.job.noise is not None:
            noise = self._own_noise(first, len(seeds))
        mask = None
        if init is not None and self.image.hole is not None:
            init = init + self.image.hole.to(init.device) * noise.to(init.device)
        if init is not None and self.image.mask is not None:
            mask = InpaintMask(init, self.image.mask, None if self.job.compat else noise)
        return self._noised(init, noise), mask, draw

    def _own_noise(self, first: int, count: int) -> Tensor:
        noise = self.job.noise
        assert noise is not None
        if noise.ndim != 4 or tuple(noise.shape[1:]) != self.image.latent_shape or len(noise) < first + count:
            wanted = f"({first + count}, {', '.join(map(str, self.image.latent_shape))}) or more images"
            raise ValueError(f"got `noise` of shape {tuple(noise.shape)}, wanted {wanted}")
        return noise[first : first + count].float()

    def _image_latents(self, count: int, draw: Draw) -> Tensor | None:
        if self.image.init is None:
            return None
        latents = self.image.init.expand(count, -1, -1, -1)
        if self.image.deviation is None:
            return latents
        return latents + self.image.deviation * draw().to(latents.device)

    def _noised(self, init: Tensor | None, noise: Tensor) -> Tensor:
        plan, start = self.job.plan, self.job.start
        alone = noise if plan is None else noise * plan.initial
        if init is None or start is None:
            return alone
        return start.a * init + start.s * noise.to(init.device)


def _depth_channels(depth: Image.Image, model: Model, latent_shape: tuple[int, int, int]) -> Tensor:
    """Return what a network reads of a depth map or edges: (1,1,h,w), or the latents of the picture (FLUX.1)."""
    _, h, w = latent_shape
    if model.family.task == "depth":
        return depth_latent(depth, (h, w))
    factor = model.vae.spec.factor
    return generate.encode(model, to_pixels(to_rgb(depth).resize((factor * w, factor * h)))[None])[0]


def _controls(job: Job, image: ImageInputs) -> ActiveControls | None:
    """Prepare the controls for images of this size."""
    if not job.controls or job.plan is None:
        return None
    factor, (_, h, w) = job.model.vae.spec.factor, image.latent_shape
    return ActiveControls(job.model, job.controls, job.plan, (factor * w, factor * h))


def _source(job: Job, model: Model, image: ImageInputs, texts: Sequence[Texts], latents: Tensor) -> InputSource:
    """Return the inputs of every call for a batch, whose first latents are (B,C,h,w), with the texts for `model`."""
    guidance = job.tricks.scaled(_guidance(job, model, image, texts, len(latents)), job.plan)
    if job.rescale:
        guidance = dataclasses.replace(guidance, adjust=(*guidance.adjust, rescaling(job.rescale, model.device)))
    if job.threshold is not None:
        threshold = thresholding(job.threshold, math.inf, model.device)
        guidance = dataclasses.replace(guidance, adjust=(*guidance.adjust, threshold))
    if job.plan is not None:
        generate.check(model, latents, guidance)
    source = guidance.on(model.device, model.dtype).source(model.unet, model.step)
    source = job.tricks.wrapped(source, job.plan, instructed=job.image_scale is not None)
    if job.skip is not None and model is job.model and job.plan is not None:
        skip = torch.tensor([block in job.skip.layers for block in range(model.family.unet.depth)])
        steps = job.plan.num_steps
        between = (job.skip.start * steps, job.skip.end * steps)
        source = skipping(source, skip.to(model.device), job.skip.scale, between)
    return source


def _guidance(job: Job, model: Model, image: ImageInputs, texts: Sequence[Texts], num: int) -> Guidance:
    """Return the guidance of a batch of num images, whose texts may change, with the conditioning for `model`."""
    made: dict[tuple[int, ...], Guidance] = {}  # the same texts may come back
    keys = [tuple(map(id, (*text.conds, text.uncond))) for text in texts]
    for key, text in zip(keys, texts, strict=True):
        made.setdefault(key, _guidance_of(job, model, image, text, num))
    changes = tuple((text.first, made[key].branches) for key, text in zip(keys[1:], texts[1:], strict=True))
    if job.plan is not None:
        job.tricks.check_changes((call for call, _ in changes), job.plan)
    return dataclasses.replace(made[keys[0]], later=changes)


def _guidance_of(job: Job, model: Model, image: ImageInputs, text: Texts, num: int) -> Guidance:
    """Return the guidance of num images with one of their texts."""
    conds, uncond, parts = text.conds, text.uncond, text.weights
    reads = model.family.unet.in_channels != model.vae.spec.embed_dim or model.family.task == "edit"  # no refiner does
    if image.concat is not None and reads:
        more = {"concat": image.concat.expand(num, -1, -1, -1)}
        if image.y is not None:
            more["y"] = image.y.expand(num)
        if job.image_scale is not None:
            if callable(job.guidance):
                raise ValueError("three-way guidance takes a number: leave the `guidance` function out")
            if parts != (1.0,):
                raise ValueError(f"{model.family.title} takes a prompt of one part: leave out AND, and the weight")
            return instructed(conds[0], uncond, more["concat"], job.guidance, job.image_scale)
        conds = tuple({**cond, **more} for cond in conds)
        uncond = None if uncond is None else {**uncond, **more}
    if parts == (1.0,):
        return guided(model, conds[0], uncond, job.guidance)
    if job.rescale or job.skip is not None:
        raise ValueError(
            "a prompt with AND, or with a weight at its end, takes no `guidance_rescale` and skips no layers: leave "
            "out the first, and give `skip_layer_scale=0` for a model that skips some"
        )
    if job.regions is None:
        return composed(conds, parts, uncond, job.guidance)
    if model.family.distilled:  # it reads the scale
        conds = tuple(guided(model, cond, None, job.guidance).branches[0].conditioning for cond in conds)
    return regional(conds, shares(job.regions, parts, image.latent_shape[1:]), uncond, job.guidance)
