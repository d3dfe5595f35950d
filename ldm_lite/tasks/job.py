"""From the options of a task to its images, the same way for all tasks, in the order of this file.

1. prepare() checks the options (checks.py), lets features change them and the model, and reads the prompts: a Task.
2. The task (txt2img.py, img2img.py, inpaint.py, upscale.py) adds its plan (plans.py), and a Part for each image to
   start from.
3. Task.job() makes the Job of a part, with slots that features replace: the core's Job, for models of any family.
4. run() denoises the jobs batch by batch, as the core does, and makes a Result (results.py) of each image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.core.denoise import Constraint, Draw, InputSource, State
from ldm_lite.core.features import Feature, changed_job
from ldm_lite.core.job import Item, Job, run_batches
from ldm_lite.core.tasks import from_noise, seeded_noise
from ldm_lite.diffusion.guidance import as_conditioning
from ldm_lite.diffusion.plan import Plan
from ldm_lite.tasks.checks import TASKS, check, read_prompts
from ldm_lite.tasks.features import change_options
from ldm_lite.tasks.picture_text import settings_of
from ldm_lite.tasks.plans import guidance_of
from ldm_lite.tasks.results import Result
from ldm_lite.tasks.texts import PromptEncoder
from ldm_lite.text.parameters import parameters

log = logging.getLogger("ldm_lite")

OnStep = Callable[[State], object]
Wrapper = Callable[[InputSource, Any], InputSource]  # (inputs, job) -> inputs


def prepare(model: CheckpointModel, options: Txt2imgOptions, task: str, checked: Any = check) -> Task:
    """Return a task whose options are checked, by its own check and by its features, and changed for the model.

    Raises ValueError for options that do not fit, OSError for files.
    """
    options, features = checked(options)
    if task not in (able := TASKS[model.family.task]):
        raise ValueError(
            f"{model.name} is a checkpoint of {model.family.title}, which {task} cannot use: "
            f"run python -m ldm_lite.{' or '.join(able)}"
        )
    if options.seed is None:
        raise TypeError("got `seed` None, expected a whole number or a list of them")
    prompts = read_prompts(options, model)
    return Task(*change_options(model, options, features), prompts)


# ---- jobs -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The images of a task that start from the same input."""

    items: Sequence[Item]
    make: Callable[[], TaskJob]  # reads files, and encodes an image
    sources: tuple[Any, ...] = ()  # files, or images in memory


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
        ready = as_conditioning(options.cond), as_conditioning(options.uncond)
        return PromptEncoder(self.model, self.prompts, options.negative_prompts, options, *ready, has_guidance)

    def job(
        self,
        shape: tuple[int, int, int],
        plan: Plan | None,
        texts: PromptEncoder | None = None,
        without: Feature | None = None,
        settings: Mapping[str, Any] | None = None,
        **slots: Any,
    ) -> TaskJob:
        """Return the job of images of a latent shape (C,h,w), with these slots, changed by all features but one."""
        self.warn_of_size(shape)
        texts = texts or self.texts
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
            settings={"Variation seed": None, "RNG": "CPU", **(settings or {}), **settings_of(self, plan)},
            **{"first_latents": from_noise, "noise_source": seeded_noise, **slots},
        )
        for feature in self.features:
            if feature is not without:
                job = changed_job(feature, job)
        return job


@dataclass(frozen=True, eq=False)
class TaskJob(Job):
    """The core's job, of images that start from the same input, for a model of any family."""

    model: CheckpointModel
    options: Txt2imgOptions  # type: ignore[assignment]
    input_source: Callable[[Any, Sequence[Item]], InputSource]
    first_latents: Callable[[Any, Sequence[Item], Draw], tuple[Tensor, Constraint]]
    noise_source: Callable[[Any, Sequence[Item]], Draw]
    wrappers: tuple[Wrapper, ...] = ()
    task: Task = field(kw_only=True)
    texts: PromptEncoder = field(kw_only=True)
    guidance: float | Callable[..., Any] = 1.0  # the scale, or a function
    settings: Mapping[str, Any] = field(default_factory=dict)  # for the PNG's text; or functions of the item
    channels: Mapping[str, Tensor] = field(default_factory=dict)  # of one image: concat, y, which the network reads too
    guiding: tuple[Wrapper, ...] = ()  # wrappers that change the guidance; a refiner has them too
    plain: InputSource | None = None  # for these: the inputs before the first of them
    image_scale: float | None = None  # three-way guidance, for networks that follow instructions
    skipped: int = 0  # steps before those of the plan
    follow: Callable[[Tensor], TaskJob] | None = (
        None  # latents of all steps (B,C,h,w) -> the job that continues from them
    )
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


# ---- runs -----------------------------------------------------------------------------------------------------------


def run(task: Task, existing: Any = None, decoding: bool = True) -> Iterator[State | Result]:
    """Yield the states after every step and, with `decoding`, each result as soon as it is decoded.

    Images that are `existing`, of existing.Existing, are left out; the others do not change.
    """
    for part in task.parts:
        items, keys = part.items, dict[int, str]()
        if existing is not None:
            items, keys = existing.missing(part)
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


def results(task: Task, on_step: OnStep | None = None, existing: Any = None) -> Iterator[Result]:
    """Yield the images of a task; on_step gets the state after every step."""
    for event in run(task, existing):
        if isinstance(event, Result):
            yield event
        elif on_step is not None:
            on_step(event)
