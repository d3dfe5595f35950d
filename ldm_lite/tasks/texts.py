"""PromptEncoder: from the prompts of a run to the network's inputs in each of its calls."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.conditioning.prompts import PromptOptions, count_chunks, encode_prompts, guided
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.denoise import InputSource
from ldm_lite.core.job import Item, in_batches
from ldm_lite.diffusion.guidance import Guidance, conditioning_rows, instructed
from ldm_lite.generate import check_conditioning

log = logging.getLogger("ldm_lite")

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

    def encode(self, job: Any, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for some items of a job, with its guidance: Job.input_source."""
        reads = self.cond is None or (self.uncond is None and self.is_guided)
        if self.model.offloader is not None and reads and items[0].number not in self._ahead:
            self._encode_ahead(job, items)
        source = self.source(job, items)
        job = replace(job, plain=source)
        for wrap in job.guiding:
            source = wrap(source, job)
        return source

    def source(self, job: Any, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for some items, before features change the guidance."""
        prompts = [self.prompts[item.number % len(self.prompts)] for item in items]
        cond = self.encoded(job, items, prompts, negative=False)
        negative = [self.negative_of(item) for item in items]
        uncond = self.encoded(job, items, negative, negative=True) if self.is_guided else None
        return self.guided(job, items, [cond], uncond)

    def encoded(self, job: Any, items: Sequence[Item], texts: Sequence[str | None], negative: bool) -> Parts:
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

    def guided(self, job: Any, items: Sequence[Item], conds: Sequence[Parts], uncond: Parts | None) -> InputSource:
        """Return the inputs of every call for the conditionings of the parts of some items' prompts."""
        model, count = self.model, len(items)
        images = job.channels if model.family.reads_images else {}  # a refiner may not read them
        channels = {name: part.expand(count, *part.shape[1:]) for name, part in images.items()}
        if channels and job.image_scale is not None:
            guidance = self._instructed(job, conds, uncond, channels["concat"])
        else:
            uncond = None if uncond is None else {**uncond, **channels}
            guidance = self.joined(job, items, [{**cond, **channels} for cond in conds], uncond)
        for branch in guidance.branches:
            check_conditioning(model, (count, *job.shape), branch.conditioning)
        return guidance.source(model)

    def joined(self, job: Any, items: Sequence[Item], conds: Sequence[Parts], uncond: Parts | None) -> Guidance:
        """Return the guidance of prompts whose parts have these conditionings: here a single one."""
        return guided(self.model, conds[0], uncond, job.guidance)

    def _instructed(self, job: Any, conds: Sequence[Parts], uncond: Parts | None, concat: Tensor) -> Guidance:
        """Return the three-way guidance of a network that follows instructions."""
        if callable(job.guidance):
            raise ValueError("three-way guidance takes a number: leave the `guidance` function out")
        if self.has_parts:
            raise ValueError(f"{self.model.family.title} takes a prompt of one part: leave out AND, and the weight")
        return instructed(conds[0], uncond, concat, job.guidance, job.image_scale)

    def _encode_ahead(self, job: Any, items: Sequence[Item]) -> None:
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
