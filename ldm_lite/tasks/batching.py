"""Painting: prompts x canvases -> batches of noise and conditioning -> results, for every command that makes pictures.

A command says what its options come to (Setup) and what it paints on (Canvas: where a picture begins, what of it
stays, what the network reads beside the prompt); paint() does the rest.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ldm_lite
from ldm_lite.tasks.job import JobOptions, OnStep, Result, read_depth, sampler_of, stated

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.control.control import Control, Steering
    from ldm_lite.diffusion.guidance import Branches, Conditioning
    from ldm_lite.diffusion.plan import Plan
    from ldm_lite.diffusion.schedule import Level
    from ldm_lite.generate import Draw, Handover

log = logging.getLogger("ldm_lite")

AHEAD = 32  # batches whose prompts are embedded together where networks take turns on the device


@dataclass(frozen=True, eq=False)
class Canvas:
    """What a batch of pictures is painted on, and what is done with each of them then."""

    latent_shape: tuple[int, int, int]
    init: "Tensor | None" = None  # (1,C,h,w) latents of a picture to begin with, in the UNet's scale
    deviation: "Tensor | None" = None  # (1,C,h,w): init is the mean of a distribution, to be sampled for every picture
    mask: "Tensor | None" = None  # (1,1,h,w): 0 where init is to stay
    concat: "Tensor | None" = None  # (1,C',h,w): what the network reads beside the latents
    y: "Tensor | None" = None  # (1,) what it is told about that: a noise level
    finish: "Callable[[Tensor], Tensor]" = lambda pixels: pixels  # of a decoded picture (3,H,W) in [-1,1]
    settings: Mapping[str, object] = field(default_factory=dict)  # more for the PNG's text


@dataclass(frozen=True)
class Setup:
    """Options with nothing left open."""

    prompts: list[str]  # of one repetition
    plan: "Plan | None"  # None: not a single step
    scale: float
    image_scale: float | None = None  # three-way guidance, for networks that follow instructions
    start: "Level | None" = None  # where the plan begins with a canvas's init; None: it begins with noise alone
    refiner: "tuple[Pipeline, int] | None" = None  # who goes on with the plan, and from which step


def paint(
    pipe: "Pipeline",
    options: JobOptions,
    setup: Setup,
    canvases: Iterable[Canvas],
    *,
    context: "Tensor | None" = None,
    uncond: "Tensor | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """All prompts and repetitions of a setup on each canvas: the results, each as soon as it is decoded.

    context (N,T,D) are ready embeddings in place of N prompts, and uncond (1,T,D) or (N,T,D) those of the negative
    prompt.  on_step is called after every denoising step.
    """
    import torch

    from ldm_lite import generate
    from ldm_lite.conditioning.prompts import check_heeded
    from ldm_lite.conditioning.textual_inversion import with_embeddings
    from ldm_lite.control.control import load_controls, parse

    pipe = with_embeddings(pipe, options.embedding)
    if setup.refiner is not None:
        refiner, first_step = setup.refiner
        setup = dataclasses.replace(setup, refiner=(with_embeddings(refiner, options.embedding), first_step))
    check_heeded([pipe] if setup.refiner is None else [pipe, setup.refiner[0]], stated(options))
    controls = load_controls(pipe, parse(options.control, options.preprocess), options.clip_vision)
    painter, count = _Painter(pipe, options, setup, on_step), len(setup.prompts)
    embed = painter.embedder(pipe, context, uncond)
    refine = None if setup.refiner is None else painter.embedder(setup.refiner[0], None, None)
    generator = torch.Generator(pipe.device).manual_seed(options.seed) if options.compat else None
    for number, canvas in enumerate(canvases):
        if (depth := read_depth(pipe, options, canvas.latent_shape)) is not None:
            canvas = dataclasses.replace(canvas, concat=depth)
        begin, steering = painter.beginner(canvas, generator), painter.steering(canvas, controls)
        batches = (
            (repeat, first) for repeat in range(options.repeats) for first in range(0, count, options.batch_size)
        )
        for repeat, first in batches:  # not itertools.product, which lists them
            if pipe.offloader is not None and first % (AHEAD * options.batch_size) == 0:
                painter.embed_ahead(embed, canvas, first)
            rows = range(first, min(first + options.batch_size, count))
            offset = (number * options.repeats + repeat) * count
            seeds = [options.seed + (row - first if options.fixed_code else offset + row) for row in rows]
            branches = painter.branches(pipe, canvas, *embed(rows, canvas), len(rows))
            later = None
            if refine is not None and setup.refiner is not None:
                refining = painter.branches(setup.refiner[0], canvas, *refine(rows, canvas), len(rows))
                later = generate.Handover(setup.refiner[0], refining, setup.refiner[1])
            latents = painter.latents(canvas, branches, later, steering, *begin(seeds))
            for pixels, row, seed in zip(generate.decode(pipe, latents), rows, seeds, strict=True):
                pixels, prompt = canvas.finish(pixels), setup.prompts[row]
                yield Result(pixels, prompt, seed, painter.parameters(canvas, pixels, prompt, seed))


@dataclass(frozen=True, eq=False)
class _Painter:
    """The parts of paint()."""

    pipe: "Pipeline"
    options: JobOptions
    setup: Setup
    on_step: OnStep | None

    def embedder(
        self, pipe: "Pipeline", context: "Tensor | None", uncond: "Tensor | None"
    ) -> "Callable[[range, Canvas], tuple[Conditioning, Conditioning | None]]":
        """-> a function: rows of the job's prompts -> what a network reads of them, and of the negative prompt."""
        from ldm_lite.conditioning.prompts import Reading, count_chunks, encode_prompts
        from ldm_lite.diffusion.guidance import Conditioning

        options, setup, prompts = self.options, self.setup, self.setup.prompts
        distilled = pipe.family.unet.guidance_dim is not None
        guided = not distilled and (setup.scale != 1 or setup.image_scale not in (None, 1))
        if distilled and (options.negative_prompt is not None or uncond is not None):
            log.warning("%s has its guidance distilled into it: the negative prompt is not used", pipe.family.title)
        # All prompts of a job are as long as its longest, so that no image depends on what it is batched with.
        texts: set[str | None] = set(prompts if context is None else ())
        if guided and uncond is None:
            texts.add(options.negative_prompt)
        reading = Reading(
            options.prompt_syntax,
            options.clip_skip,
            count_chunks(pipe, texts, options.prompt_syntax) if texts else 1,
            noise_level=options.noise_level,
            **stated(options),
        )

        @functools.lru_cache(maxsize=2 * AHEAD)  # a repetition has the prompts of the one before
        def encode(height: int, width: int, negative: bool, *prompts: str | None) -> Conditioning:
            whole = dataclasses.replace(reading, size=(height, width), negative=negative)
            return encode_prompts(pipe, prompts, whole)

        def embed(rows: range, canvas: Canvas) -> tuple[Conditioning, Conditioning | None]:
            some = slice(rows.start, rows.stop)
            height, width = (side * pipe.vae.spec.factor for side in canvas.latent_shape[1:])
            cond = encode(height, width, False, *prompts[some]) if context is None else Conditioning(context[some])
            if not guided:
                return cond, None
            if uncond is None:
                return cond, encode(height, width, True, *[options.negative_prompt] * len(rows))
            return cond, Conditioning(uncond.expand(len(prompts), -1, -1)[some])

        return embed

    def embed_ahead(
        self, embed: "Callable[[range, Canvas], tuple[Conditioning, Conditioning | None]]", canvas: Canvas, first: int
    ) -> None:
        """Embed the prompts of the batches from row `first` on, so that the text encoder comes to the device once."""
        count, size = len(self.setup.prompts), self.options.batch_size
        with self.pipe.phase("text_encoder", "text_encoder_2"):
            for start in range(first, min(first + AHEAD * size, count), size):
                embed(range(start, min(start + size, count)), canvas)

    def beginner(
        self, canvas: Canvas, generator: "torch.Generator | None"
    ) -> "Callable[[list[int]], tuple[Tensor | None, Tensor, Draw]]":
        """-> a function: the seeds of a batch -> latents of the canvas's picture, first noise, later noise."""
        import torch

        from ldm_lite import generate

        shape, batch_size = canvas.latent_shape, self.options.batch_size

        def pictures(count: int, draw: "Draw") -> "Tensor | None":
            if canvas.init is None:
                return None
            latents = canvas.init.expand(count, -1, -1, -1)
            return latents if canvas.deviation is None else latents + canvas.deviation * draw().to(latents.device)

        def seeded(seeds: list[int]) -> "tuple[Tensor | None, Tensor, Draw]":
            draw = generate.seeded_noise(seeds, shape)
            noise = draw()
            return pictures(len(seeds), draw), noise, draw

        if generator is None:
            return seeded
        # The original samples a picture's latents once a job, with a generator on the CPU.
        on_cpu = generator if generator.device.type == "cpu" else torch.Generator("cpu").manual_seed(self.options.seed)
        init = pictures(batch_size, generate.shared_noise(on_cpu, batch_size, shape))
        fixed = self.options.fixed_code and init is None
        code = generate.shared_noise(generator, batch_size, shape)() if fixed else None

        def shared(seeds: list[int]) -> "tuple[Tensor | None, Tensor, Draw]":
            draw = generate.shared_noise(generator, len(seeds), shape)
            noise = draw() if code is None else code[: len(seeds)]
            return (None if init is None else init[: len(seeds)]), noise, draw

        return shared

    def steering(self, canvas: Canvas, controls: "Sequence[Control]") -> "Steering | None":
        """What the controls make of their pictures at a canvas's size."""
        from ldm_lite.control.control import Steering

        if not controls or self.setup.plan is None:
            return None
        _, h, w = canvas.latent_shape
        factor = self.pipe.vae.spec.factor
        return Steering(self.pipe, controls, self.setup.plan, (factor * w, factor * h))

    def latents(
        self,
        canvas: Canvas,
        branches: "Branches",
        later: "Handover | None",
        steering: "Steering | None",
        init: "Tensor | None",
        noise: "Tensor",
        draw: "Draw",
    ) -> "Tensor":
        """The last latents (B,C,h,w) of one batch."""
        from ldm_lite import generate
        from ldm_lite.diffusion.guidance import Kept

        options, plan = self.options, self.setup.plan
        x = self.begun(canvas, init, noise)
        if plan is None:
            return x
        plan = dataclasses.replace(plan, initial=1.0)
        if options.compat:  # the original draws noise at every call, if only to multiply it by zero
            plan = dataclasses.replace(plan, draws=plan.draws | True)
        steps = generate.denoise(
            self.pipe,
            x,
            branches,
            plan,
            rescale=options.guidance_rescale,
            threshold=None if options.dynamic_threshold is None else (options.dynamic_threshold, math.inf),
            draw=draw,
            kept=None if init is None or canvas.mask is None else Kept(init, canvas.mask),
            later=later,
            steer=None if steering is None else functools.partial(steering, len(branches.weights)),
        )
        for step, x in enumerate(steps, start=1):
            if self.on_step is not None:
                self.on_step(step, plan.num_steps, x)
        return x

    def begun(self, canvas: Canvas, init: "Tensor | None", noise: "Tensor") -> "Tensor":
        """The latents (B,C,h,w) that the first step sees: noise, or init with its level's noise, wholly or in part."""
        plan, start = self.setup.plan, self.setup.start
        alone = noise if plan is None else noise * plan.initial
        if init is None:
            return alone
        noise, alone = noise.to(init.device), alone.to(init.device)
        if start is not None:
            return start.a * init + start.s * noise
        if canvas.mask is None or plan is None:
            return alone
        a, s = (float(value) for value in plan.level[0])
        mask = canvas.mask.to(init.device)
        return mask * alone + (1 - mask) * (a * init + s * noise)

    def branches(
        self, pipe: "Pipeline", canvas: Canvas, cond: "Conditioning", uncond: "Conditioning | None", num: int
    ) -> "Branches":
        """The conditionings of a batch of num pictures, with what the network of pipe reads beside the latents."""
        from ldm_lite.conditioning.prompts import guided
        from ldm_lite.diffusion.guidance import instructed

        scale, image_scale = self.setup.scale, self.setup.image_scale
        if canvas.concat is None or pipe.family.unet.in_channels == pipe.vae.spec.embed_dim:  # a refiner's
            return guided(pipe, cond, uncond, scale)
        concat = canvas.concat.expand(num, -1, -1, -1)
        if canvas.y is not None:
            y = canvas.y.expand(num)
            cond, uncond = cond._replace(y=y), None if uncond is None else uncond._replace(y=y)
        if image_scale is not None:
            return instructed(cond, uncond, concat, scale, image_scale)
        uncond = None if uncond is None else uncond._replace(concat=concat)
        return guided(pipe, cond._replace(concat=concat), uncond, scale)

    def parameters(self, canvas: Canvas, pixels: "Tensor", prompt: str, seed: int) -> str:
        """The text of one picture's PNG."""
        from ldm_lite.diffusion.names import label
        from ldm_lite.image import parameters

        options, plan = self.options, self.setup.plan
        _, height, width = pixels.shape
        settings: dict[str, object] = {
            "Steps": 0 if plan is None else plan.num_steps,
            "Sampler": label(sampler_of(self.pipe, options)),
            "CFG scale": self.setup.scale,
            "Seed": options.seed if options.compat else seed,
            "Size": f"{width}x{height}",
            "Model": self.pipe.name,
        }
        stated = {
            **canvas.settings,
            "Image CFG scale": self.setup.image_scale,
            "Control": " ".join(options.control) or None,
            "Control preprocess": options.preprocess,
            "Schedule type": options.spacing,
            "Eta": options.eta,
            "Sigma churn": options.churn,
            "Clip skip": options.clip_skip if options.clip_skip > 1 else None,
            "Guidance rescale": options.guidance_rescale or None,
            "Dynamic threshold": options.dynamic_threshold,
            "Original size": options.original_size,
            "Crop top left": options.crop_top_left and f'"{options.crop_top_left}"',
            "Target size": options.target_size,
            "Aesthetic score": options.aesthetic_score,
            "Negative aesthetic score": options.negative_aesthetic_score,
            "Prompt syntax": options.prompt_syntax if options.prompt_syntax != "plain" else None,
            "Refiner": None if self.setup.refiner is None else self.setup.refiner[0].name,
            "Refiner from step": None if self.setup.refiner is None else self.setup.refiner[1] + 1,
        }
        settings |= {key: value for key, value in stated.items() if value is not None}
        if options.compat:
            settings["Noise"] = f"original script, image {seed - options.seed}"
        settings["Version"] = f"ldm_lite {ldm_lite.__version__}"
        return parameters(prompt, options.negative_prompt, settings)
