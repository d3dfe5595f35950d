"""Job: all that a run needs, in slots that features replace; run_batches() turns it into events.

Shape letters: B images of a batch, C channels, h w latent size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from PIL import Image
from torch import Tensor

from ldm_lite.core.denoise import Call, Constraint, Draw, Inputs, InputSource, State, run_plan
from ldm_lite.core.image import to_pil
from ldm_lite.core.model import Model
from ldm_lite.core.options import Options
from ldm_lite.core.plan import Plan


class Item(NamedTuple):
    """An image to make."""

    number: int  # in the job, from 0
    prompt: str
    negative: str
    seed: int


@dataclass(frozen=True, eq=False)
class Job:
    """A run of images of one size.

    Everything that differs between tasks, and what features change, is a slot.  Functions in slots whose type says
    so get the job as an argument, so they see slots that are replaced later, such as its model or plan.
    """

    model: Model
    options: Options
    shape: tuple[int, int, int]  # (C,h,w) of the latents
    plan: Plan | None  # None: no steps
    items: Iterable[Item]
    # (job, items of a batch) -> what their prompts become: the inputs of each call of the network
    input_source: Callable[[Self, Sequence[Item]], InputSource]
    # (job, items, draw) -> the batch's first latents (B,C,h,w), and what is done to latents before each call
    first_latents: Callable[[Self, Sequence[Item], Draw], tuple[Tensor, Constraint]]
    # (job, items) -> draw(): at first the noise that the batch begins with, then that of the plan's rows
    noise_source: Callable[[Self, Sequence[Item]], Draw]
    finish: Callable[[Item, Tensor], Tensor] = lambda item, pixels: pixels  # of a result's pixels (3,H,W)
    # Around what input_source returns; the last one is the outermost.
    wrappers: tuple[Callable[[InputSource, Job], InputSource], ...] = ()
    key: Callable[[Item], Hashable] = lambda item: None  # items with different keys do not share a batch
    solve: Callable[..., Iterator[State]] = run_plan

    def changing_inputs(self, change: Callable[[Inputs, Call, Job], Inputs]) -> Job:
        """Return a job with the inputs of its calls changed by `change`.

        To remember something during a run, add a wrapper to `wrappers` instead: it is called for each batch.
        """

        def wrap(inputs_of: InputSource, job: Job) -> InputSource:
            return lambda call: change(inputs_of(call), call, job)

        return replace(self, wrappers=(*self.wrappers, wrap))


class Latents(NamedTuple):
    """Event: a batch that has run all its steps."""

    job: Job
    items: Sequence[Item]
    latents: Tensor  # (B,C,h,w)


class Result(NamedTuple):
    """A finished image."""

    item: Item
    pixels: Tensor  # (3,H,W) in [-1,1], float32 on the CPU

    @property
    def image(self) -> Image.Image:
        """The image as PIL, RGB."""
        return to_pil(self.pixels)


Events = Iterator[State | Latents]


class Started(NamedTuple):
    """A batch that is ready to be denoised: what its steps read."""

    latents: Tensor  # (B,C,h,w) float32, on the model's device
    inputs_of: Any  # an InputSource; None for a job without steps
    draw: Draw
    constrain: Constraint


def in_batches(job: Job) -> Iterator[list[Item]]:
    """Yield the items of a job in batches."""
    for _, items in itertools.groupby(job.items, job.key):
        while batch := list(itertools.islice(items, job.options.batch_size)):
            yield batch


def start(job: Job, batch: Sequence[Item]) -> Started:
    """Draw the first noise of a batch, and encode its prompts, which a job without steps does not read."""
    draw = job.noise_source(job, batch)
    latents, constrain = job.first_latents(job, batch, draw)
    inputs_of: Any = None
    if job.plan is not None:
        inputs_of = job.input_source(job, batch)
        for wrap in job.wrappers:
            inputs_of = wrap(inputs_of, job)
    return Started(latents.to(job.model.device, torch.float32), inputs_of, draw, constrain)


def run_batches(job: Job) -> Events:
    """Yield the states of every batch, and its latents at the end."""
    for batch in in_batches(job):
        latents, inputs_of, draw, constrain = start(job, batch)
        if job.plan is not None:
            for state in job.solve(latents, job.plan, inputs_of, draw, constrain):
                latents = state.latents
                yield state
        yield Latents(job, batch, latents)


def results_of(events: Events) -> Iterator[Result]:
    """Yield the results of a run, each as soon as it is decoded."""
    for event in events:
        if isinstance(event, Latents):
            decoded = event.job.model.decode_pixels(event.latents)
            for item, pixels in zip(event.items, decoded, strict=True):
                yield Result(item, event.job.finish(item, pixels))
