"""From the options of a task to its images, the same way for all tasks, in the order of this file.

1. prepare() checks the options, lets features (features.py) change them and the model, and reads the prompts: a Task.
2. The task (txt2img.py, img2img.py, inpaint.py, upscale.py) adds its plan (plans.py), and a Part for each image to
   start from.
3. Task.job() makes the Job of a part, with slots that features replace: the core's Job, for models of any family.
4. A PromptEncoder makes what the network reads in each call, of the prompts of a batch.
5. run() denoises the jobs batch by batch, as the core does, and makes a Result (results.py) of each image.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple, TypedDict, Unpack

from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.conditioning.prompts import PromptOptions, count_chunks, encode_prompts, guided
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.denoise import Constraint, Draw, InputSource, State
from ldm_lite.core.features import Feature, changed_job
from ldm_lite.core.job import Item, Job, in_batches, run_batches
from ldm_lite.core.tasks import from_noise, seeded_noise
from ldm_lite.diffusion.guidance import Guidance, ScaleOrFunction, conditioning_rows, instructed
from ldm_lite.diffusion.plan import Plan
from ldm_lite.generate import check_conditioning
from ldm_lite.tasks.checks import TASKS, read_prompts
from ldm_lite.tasks.features import TaskOptions, change_options
from ldm_lite.tasks.picture_text import settings_of
from ldm_lite.tasks.plans import guidance_of
from ldm_lite.tasks.results import Result
from ldm_lite.text.parameters import parameters

log = logging.getLogger("ldm_lite")

OnStep = Callable[[State], object]
FirstLatents = Callable[["TaskJob", Sequence[Item], Draw], tuple[Tensor, Constraint]]
Wrapper = Callable[[InputSource, "TaskJob"], InputSource]  # (inputs, job) -> inputs


def prepare(
    model: CheckpointModel,
    options: TaskOptions,
    task: str,
    check: Callable[[TaskOptions], tuple[TaskOptions, list[Feature]]],
) -> Task:
    """Return a task whose options are checked, by its own check and by its features, and changed for the model.

    Raises ValueError for options that do not fit, OSError for files.
    """
    options, features = check(options)
    if task not in (able := TASKS[model.family.task]):
        raise ValueError(
            f"{model.name} is a checkpoint of {model.family.title}, which {task} cannot use: "
            f"run python -m ldm_lite.{' or '.join(able)}"
        )
    prompts = read_prompts(options, model)
    return Task(*change_options(model, options, features), prompts)


# ---- jobs -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The images of a task that start from the same input."""

    items: Sequence[Item]
    make: Callable[[], TaskJob]  # reads files, and encodes an image
    sources: tuple[object, ...] = ()  # files, or images in memory


# Which images of a part are to be made, and for each of them, by its number, Result.key.
Missing = Callable[[Part], tuple[Sequence[Item], Mapping[int, str]]]


class Slots(TypedDict, total=False):
    """The slots of a job that tasks fill in another way than text to image."""

    first_latents: FirstLatents
    finish: Callable[[Item, Tensor], Tensor]
    channels: Mapping[str, Tensor]
    skipped: int


@dataclass(frozen=True, eq=False)
class Task:
    """The options of a task, checked and changed for a model."""

    model: CheckpointModel
    options: Txt2imgOptions
    features: Sequence[Feature]  # in the order in which they are applied
    prompts: Sequence[str]  # of one repetition
    plan: Plan | None = None  # of an image of the model's own size; None: no steps
    image_scale: float | None = None
    parts: Iterable[Part] = ()
    _warned: list[bool] = field(default_factory=list)  # shared by all copies

    def items(self, place: int = 0) -> list[Item]:
        """Return the images of the place-th input, counted from 0."""
        options, count = self.options, len(self.prompts)
        size, negative = options.repeats * count, options.negative_prompts
        return [
            Item(
                number,
                self.prompts[number % count],
                negative[number % len(negative)] or "",
                options.seeds_of(number, count)[0],
            )
            for number in range(place * size, (place + 1) * size)
        ]

    def warn_of_size(self, shape: tuple[int, int, int]) -> None:
        """Warn once about sizes that a small model, such as the bundled one, was not trained on."""
        side, factor = self.model.family.resolution, self.model.vae.spec.factor
        is_other = any(abs(length * factor - side) > side / 8 for length in shape[1:])
        if self.model.family.is_small and is_other and not self._warned:
            self._warned.append(True)
            log.warning(
                "%s was trained at %d x %d pixels, and other sizes are distorted: use that size, or a larger model",
                *(self.model.name, side, side),
            )

    @cached_property
    def texts(self) -> PromptEncoder:
        """The encoder of all images' prompts, before features change it."""
        options = self.options
        guidance = guidance_of(self.model, options, self.plan, self.image_scale)
        has_guidance = guidance != 1 or self.image_scale not in (None, 1)
        return PromptEncoder(
            self.model, self.prompts, options.negative_prompts, options, options.cond, options.uncond, has_guidance
        )

    def job(
        self,
        shape: tuple[int, int, int],
        plan: Plan | None,
        texts: PromptEncoder | None = None,
        without: Feature | None = None,
        settings: Mapping[str, object] | None = None,
        **slots: Unpack[Slots],
    ) -> TaskJob:
        """Return the job of images of a latent shape (C,h,w), with these slots, changed by all features but one."""
        self.warn_of_size(shape)
        texts = texts or self.texts
        of_options = settings_of(self.model, self.options, self.features, plan)
        job = TaskJob(
            model=self.model,
            options=replace(self.options, batch_size=self.options.images_at_a_time),
            shape=shape,
            plan=plan,
            items=(),
            input_source=lambda job, items: job.texts.encode(job, items),
            key=texts.key,
            solve=partial(generate.stream, self.model),
            task=self,
            texts=texts,
            guidance=guidance_of(self.model, self.options, plan, self.image_scale),
            image_scale=self.image_scale,
            settings={"Variation seed": None, "RNG": "CPU", **(settings or {}), **of_options},
            first_latents=from_noise,
            noise_source=seeded_noise,
        )
        job = replace(job, **slots)
        for feature in self.features:
            if feature is not without:
                job = changed_job(feature, job)
        return job


@dataclass(frozen=True, eq=False)
class TaskJob(Job):
    """The core's job, of images that start from the same input, for a model of any family."""

    model: CheckpointModel
    options: Txt2imgOptions  # type: ignore[assignment]
    wrappers: tuple[Wrapper, ...] = ()  # type: ignore[assignment]
    task: Task = field(kw_only=True)
    texts: PromptEncoder = field(kw_only=True)
    guidance: ScaleOrFunction = 1.0
    settings: Mapping[str, object] = field(default_factory=dict)  # for the PNG's text; or functions of the item
    channels: Mapping[str, Tensor] = field(default_factory=dict)  # of one image: concat, y, which the network reads too
    guiding: tuple[Wrapper, ...] = ()  # wrappers that change the guidance; a refiner has them too
    plain: InputSource | None = None  # for these: the inputs before the first of them
    image_scale: float | None = None  # three-way guidance, for networks that follow instructions
    skipped: int = 0  # steps before those of the plan
    follow: Callable[[Tensor], TaskJob] | None = None  # latents after all steps (B,C,h,w) -> the job that goes on
    truncated: bool = False  # 8 bits of results are cut off, not rounded
    keys: Mapping[int, str] = field(default_factory=dict)  # number of an item -> Result.key

    def refuse_parts(self, what: str) -> None:
        """Raises ValueError if prompts have several parts, naming the option that does not go with them."""
        if self.texts.has_parts and self.plan is not None:
            raise ValueError(f"a prompt with AND, or with a weight at its end, {what}")

    def settings_for(self, item: Item) -> dict[str, object]:
        """Return the settings of an image's text, by name."""
        settings = {name: value(item) if callable(value) else value for name, value in self.settings.items()}
        return settings | {"Version": f"ldm_lite {__version__}"}

    def result(self, item: Item, pixels: Tensor) -> Result:
        """Make a result from decoded pixels (3,H,W)."""
        pixels = self.finish(item, pixels)
        _, height, width = pixels.shape
        settings = {"Seed": item.seed, "Size": f"{width}x{height}", **self.settings_for(item)}
        first = ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model")  # as in A1111
        text = {name: settings[name] for name in (*first, *settings) if settings.get(name) is not None}
        negatives = self.task.options.negative_prompts
        negative = item.negative or negatives[item.number % len(negatives)]  # an empty one is written, none is not
        key = self.keys.get(item.number, "")
        about = parameters(item.prompt, negative, text)
        return Result(pixels, item.prompt, item.seed, about, self.truncated, key, text)


# ---- texts -----------------------------------------------------------------------------------------------------------

AHEAD = 32  # batches whose prompts are encoded together if networks take turns on the device


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """Encodes the prompts of a run for one model, each once.  dataclasses.replace makes one for another model.

    All prompts are padded to the longest, so that no image depends on its batch.
    """

    model: CheckpointModel
    prompts: Sequence[str]  # of one repetition; that of an item is at its number, counted round
    negative_prompts: Sequence[str | None]  # which the items take in turn, by their numbers
    options: Txt2imgOptions
    cond: Parts | None = None  # precomputed conditioning in place of the prompts
    uncond: Parts | None = None
    has_guidance: bool = True  # the scale is not 1
    is_refiner: bool = False  # of another model than the job's: no message appears twice
    _cache: OrderedDict[object, Parts] = field(init=False, default_factory=OrderedDict)
    _ahead: set[int] = field(init=False, default_factory=set)  # numbers of items whose texts were encoded ahead

    has_parts = False  # whether a prompt has several parts, or one with a weight

    def key(self, item: Item) -> Hashable:
        """Job.key: each repetition of the prompts has batches of its own, even if the images before it are left out."""
        repetition, row = divmod(item.number, len(self.prompts))
        return repetition, row // self.options.images_at_a_time

    @cached_property
    def is_guided(self) -> bool:
        """Whether the negative prompt is read.  If one is given and not read, logs that."""
        guided = not self.model.family.distilled and (self.has_guidance or self.has_parts)
        if not guided and not self.is_refiner and (self.uncond is not None or any(self.negative_prompts)):
            warn_of_unused(self.model)
        return guided

    def texts(self) -> set[str | None]:
        """Return all texts that are read."""
        negative = self.negative_prompts if self.is_guided and self.uncond is None else ()
        return {*(self.prompts if self.cond is None else ()), *negative}

    def negative_of(self, item: Item) -> str | None:
        """Return the negative prompt of an item."""
        return self.negative_prompts[item.number % len(self.negative_prompts)]

    @cached_property
    def read_as(self) -> PromptOptions:
        """How prompts are read, padded to the longest."""
        syntax = self.options.prompt_syntax
        chunks = {count_chunks(self.model, [text], syntax) for text in self.texts()} or {1}
        alike = len(chunks) == 1 and self.cond is None and self.uncond is None
        return PromptOptions(syntax, self.options.clip_skip, max(chunks), alike=alike, extra=self.options)

    def encode(self, job: TaskJob, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for some items of a job, with its guidance: Job.input_source."""
        reads = self.cond is None or (self.uncond is None and self.is_guided)
        if self.model.offloader is not None and reads and items[0].number not in self._ahead:
            self._encode_ahead(job, items)
        source = self.source(job, items)
        job = replace(job, plain=source)
        for wrap in job.guiding:
            source = wrap(source, job)
        return source

    def source(self, job: TaskJob, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for some items, before features change the guidance."""
        prompts = [self.prompts[item.number % len(self.prompts)] for item in items]
        cond = self.encoded(job, items, prompts, negative=False)
        negative = [self.negative_of(item) for item in items]
        uncond = self.encoded(job, items, negative, negative=True) if self.is_guided else None
        return self.guided(job, items, [cond], uncond)

    def encoded(self, job: TaskJob, items: Sequence[Item], texts: Sequence[str | None], negative: bool) -> Parts:
        """Return the conditioning of the texts of some items, or the precomputed one in their place."""
        if (ready := self.uncond if negative else self.cond) is not None:
            count = len(self.prompts)
            return conditioning_rows(ready, [item.number % count for item in items], count)
        height, width = (side * self.model.vae.spec.factor for side in job.shape[1:])
        key = height, width, negative, tuple(texts)
        if key not in self._cache:
            options = replace(self.read_as, size=(height, width), negative=negative)
            self._cache[key] = encode_prompts(self.model, texts, options)
            if len(self._cache) > 2 * AHEAD:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def guided(self, job: TaskJob, items: Sequence[Item], conds: Sequence[Parts], uncond: Parts | None) -> InputSource:
        """Return the inputs of every call for the conditionings of the parts of some items' prompts."""
        model, count = self.model, len(items)
        images = job.channels if model.family.reads_images else {}  # a refiner may not read them
        channels = {name: part.expand(count, *part.shape[1:]) for name, part in images.items()}
        if channels and job.image_scale is not None:
            guidance = self._instructed(job.guidance, job.image_scale, conds, uncond, channels["concat"])
        else:
            uncond = None if uncond is None else {**uncond, **channels}
            guidance = self.joined(job, items, [{**cond, **channels} for cond in conds], uncond)
        for branch in guidance.branches:
            check_conditioning(model, (count, *job.shape), branch.conditioning)
        return guidance.source(model)

    def joined(self, job: TaskJob, items: Sequence[Item], conds: Sequence[Parts], uncond: Parts | None) -> Guidance:
        """Return the guidance of prompts whose parts have these conditionings: here a single one."""
        return guided(self.model, conds[0], uncond, job.guidance)

    def _instructed(
        self, scale: ScaleOrFunction, image_scale: float, conds: Sequence[Parts], uncond: Parts | None, concat: Tensor
    ) -> Guidance:
        """Return the three-way guidance of a network that follows instructions."""
        if callable(scale):
            raise ValueError("three-way guidance takes a number: leave the `guidance` function out")
        if self.has_parts:
            raise ValueError(f"{self.model.family.title} takes a prompt of one part: leave out AND, and the weight")
        return instructed(conds[0], uncond, concat, scale, image_scale)

    def _encode_ahead(self, job: TaskJob, items: Sequence[Item]) -> None:
        """Encode the texts of this batch and the next ones, so that the text encoder is moved to the device once."""
        later = [item for item in job.items if item.number >= items[0].number] or items
        with self.model.phase(*self.model.family.texts):
            for batch in islice(in_batches(replace(job, items=later)), AHEAD):
                self.source(job, batch)
                self._ahead.update(item.number for item in batch)


def warn_of_unused(model: CheckpointModel) -> None:
    """Log that the negative prompt, or conditioning in its place, is not used."""
    title, scale = model.family.title, model.family.scale
    if model.family.distilled:
        log.warning("%s has its guidance distilled into it: the negative prompt is not used", title)
    else:
        whose = f" ({title}'s own)" if scale == 1 else ""
        log.warning("a guidance scale of 1%s uses no negative prompt: leave it out, or use a larger `scale`", whose)


# ---- runs -----------------------------------------------------------------------------------------------------------


def run(task: Task, missing: Missing | None = None, decoding: bool = True) -> Iterator[State | Result]:
    """Yield the states after every step and, with `decoding`, each result as soon as it is decoded.

    Only images that are `missing` are made, as existing.Existing tells (default: all); they are the same as with all.
    """
    for part in task.parts:
        items, keys = (part.items, {}) if missing is None else missing(part)
        if items:
            yield from run_job(replace(part.make(), items=items, keys=keys), decoding)


def run_job(job: TaskJob, decoding: bool = True) -> Iterator[State | Result]:
    """Yield the states and, with `decoding`, the results of a job."""
    events = run_batches(job)
    for feature in job.task.features:
        events = feature.change_events(events)
    for event in events:
        if isinstance(event, State):
            yield event
        elif job.follow is not None:
            yield from run_job(replace(job.follow(event.latents), items=event.items, keys=job.keys), decoding)
        elif decoding:
            for item, pixels in zip(event.items, job.model.decode_pixels(event.latents), strict=True):
                yield job.result(item, pixels)


def results(task: Task, on_step: OnStep | None = None, missing: Missing | None = None) -> Iterator[Result]:
    """Yield the images of a task that are missing; on_step gets the state after every step."""
    for event in run(task, missing):
        if isinstance(event, Result):
            yield event
        elif on_step is not None:
            on_step(event)
