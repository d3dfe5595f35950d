"""PromptEncoder: from the prompts of a run to what the network reads in each of its calls."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from ldm_lite import generate
from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.conditioning.prompts import PromptOptions, count_chunks, encode_prompts, guided
from ldm_lite.core.denoise import Conditioning, InputSource
from ldm_lite.core.job import Item, batches
from ldm_lite.diffusion.guidance import Guidance, composed, instructed, rows_of
from ldm_lite.text.schedule import Calls, Part, Until, schedule, split
from ldm_lite.zoo.family import text_roles

log = logging.getLogger("ldm_lite")

AHEAD = 32  # batches whose prompts are encoded together if networks take turns on the device


@dataclass(frozen=True, eq=False)
class Texts:
    """What the network reads of some prompts, from a call on."""

    first: int  # the call, counted from 0
    conds: tuple[Conditioning, ...]  # of the parts of the prompts
    weights: tuple[float, ...]  # of the parts
    uncond: Conditioning | None


def parts_of(prompt: str, syntax: str) -> list[Part]:
    """Return the parts of a prompt, which AND joins in the a1111 syntax."""
    if syntax != "a1111":
        return [Part(prompt, 1.0)]
    parts = split(prompt)  # whose spaces around AND count for Qwen3
    return parts if len(parts) == 1 else [part._replace(text=part.text.strip()) for part in parts]


def until_of(text: str | None, syntax: str, calls: Calls) -> list[Until]:
    """Return the texts that a text is over the calls of the network."""
    return [Until(calls.total, text)] if text is None or syntax != "a1111" else schedule(text, calls)


def is_constant(prompt: str | None, syntax: str) -> bool:
    """Whether a prompt is a single text of weight 1 from the first step to the last."""
    parts = parts_of(prompt or "", syntax)
    return [part.weight for part in parts] == [1.0] and len(until_of(parts[0].text, syntax, Calls(1000))) == 1


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """Encodes the prompts of a run for one model, each once.  dataclasses.replace makes one for another model.

    All prompts are padded to the longest, so that no image depends on its batch.
    """

    model: Model
    prompts: Sequence[str]  # of one repetition; that of an item is at its number, counted round
    negative_prompt: str | None
    options: Txt2imgOptions
    calls: Calls  # how prompts that change count the network's calls
    cond: Conditioning | None = None  # precomputed conditioning in place of the prompts
    uncond: Conditioning | None = None
    has_guidance: bool = True  # the scale is not 1
    is_refiner: bool = False  # of another model than the job's: nothing is said twice
    _schedules: dict[str | None, list[Until]] = field(init=False, default_factory=dict)
    _cache: OrderedDict[object, Conditioning] = field(init=False, default_factory=OrderedDict)
    _ahead: set[int] = field(init=False, default_factory=set)  # numbers of items whose texts were encoded ahead

    def weights(self, item: Item) -> tuple[float, ...]:
        """Return the weights of the parts of an item's prompt: prompts of other parts cannot go together."""
        return self._weights(item.number % len(self.prompts))

    @cached_property
    def has_parts(self) -> bool:
        """Whether a prompt has several parts, or one with a weight."""
        return any(self._weights(row) != (1.0,) for row in range(len(self.prompts)))

    @cached_property
    def is_guided(self) -> bool:
        """Whether the negative prompt is read.  Logs that a given one is not."""
        guided = not self.model.family.distilled and (self.has_guidance or self.has_parts)
        if not guided and not self.is_refiner and (self.uncond is not None or self.negative_prompt):
            warn_of_unused(self.model)
        return guided

    def encode(self, job: Any, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for some items of a job, with its guidance: Job.encode."""
        model = self.model
        if model.offloader is not None and items[0].number not in self._ahead:
            # So that the text encoder comes to the device once.
            later = [item for item in job.items if item.number >= items[0].number] or items
            with model.phase(*text_roles(model.family.text_encoders)):
                for batch in islice(batches(replace(job, items=later)), AHEAD):
                    self._texts(job, batch)
                    self._ahead.update(item.number for item in batch)
        texts = self._texts(job, items)
        keys = [tuple(map(id, (*text.conds, text.uncond))) for text in texts]
        kinds: dict[tuple[int, ...], Guidance] = {}  # the same texts may come back
        for key, text in zip(keys, texts, strict=True):
            if key not in kinds:
                kinds[key] = self._guidance(job, text, len(items))
        changes = tuple((text.first, kinds[key].branches) for key, text in zip(keys[1:], texts[1:], strict=True))
        guidance = replace(kinds[keys[0]], later=changes)
        generate.check(model, (len(items), *job.shape), guidance)
        source = guidance.on(model.device, model.dtype).source(model.unet, model.step)
        job = replace(job, plain=source)
        for wrap in job.guiding:
            source = wrap(source, job)
        return source

    def _texts(self, job: Any, items: Sequence[Item]) -> list[Texts]:
        """Return the conditioning of the prompts of items, whose parts have the same weights, in order of use."""
        count, rows = len(self.prompts), [item.number % len(self.prompts) for item in items]
        guided = self.is_guided
        cond = None if self.cond is None else rows_of(self.cond, rows, count)
        uncond = None if self.uncond is None or not guided else rows_of(self.uncond, rows, count)
        parts = [] if cond is not None else [self._parts(self.prompts[row]) for row in rows]
        columns = [[self._until(part.text) for part in column] for column in zip(*parts, strict=True)]
        negative = [self._until(self.negative_prompt)] * len(rows) if guided and uncond is None else []
        changes = {until.last + 1 for column in (*columns, negative) for image in column for until in image[:-1]}
        texts: list[Texts] = []
        for first in sorted({0, *changes}):
            conds = tuple(self._encode(job, _texts_at(column, first), negative=False) for column in columns)
            of_negative = self._encode(job, _texts_at(negative, first), negative=True) if negative else uncond
            texts.append(Texts(first, conds if cond is None else (cond,), self._weights(rows[0]), of_negative))
        return texts

    def _guidance(self, job: Any, text: Texts, count: int) -> Guidance:
        """Return the guidance of `count` images with one of their texts."""
        model, conds, uncond = self.model, text.conds, text.uncond
        images = job.channels if model.family.reads_images else {}  # which a refiner may not read
        channels = {name: part.expand(count, *part.shape[1:]) for name, part in images.items()}
        if channels and job.image_scale is not None:
            if callable(job.guidance):
                raise ValueError("three-way guidance takes a number: leave the `guidance` function out")
            if text.weights != (1.0,):
                raise ValueError(f"{model.family.title} takes a prompt of one part: leave out AND, and the weight")
            return instructed(conds[0], uncond, channels["concat"], job.guidance, job.image_scale)
        conds = tuple({**cond, **channels} for cond in conds)
        uncond = None if uncond is None else {**uncond, **channels}
        if text.weights == (1.0,):
            return guided(model, conds[0], uncond, job.guidance)
        return self._joined(job, conds, text.weights, uncond)

    def _joined(
        self, job: Any, conds: Sequence[Conditioning], weights: tuple[float, ...], uncond: Conditioning | None
    ) -> Guidance:
        """Return the guidance of prompts of several parts."""
        return composed(conds, weights, uncond, job.guidance)

    def _weights(self, row: int) -> tuple[float, ...]:
        return (1.0,) if self.cond is not None else tuple(part.weight for part in self._parts(self.prompts[row]))

    def _parts(self, prompt: str) -> list[Part]:
        return parts_of(prompt, self.options.prompt_syntax)

    def _until(self, text: str | None) -> list[Until]:
        if text not in self._schedules:
            self._schedules[text] = until_of(text, self.options.prompt_syntax, self.calls)
        return self._schedules[text]

    @cached_property
    def read_as(self) -> PromptOptions:
        """How prompts are read, padded to the longest."""
        texts: set[str | None] = set()
        if self.cond is None:
            texts = {part.text for prompt in set(self.prompts) for part in self._parts(prompt)}
        if self.is_guided and self.uncond is None:
            texts.add(self.negative_prompt)
        texts = {until.text for text in texts for until in self._until(text)}
        syntax, extra = self.options.prompt_syntax, self.options
        chunks = {count_chunks(self.model, [text], syntax) for text in texts} or {1}
        alike = len(chunks) == 1 and self.cond is None and self.uncond is None
        return PromptOptions(syntax, self.options.clip_skip, max(chunks), alike=alike, extra=extra)

    def _encode(self, job: Any, prompts: Sequence[str | None], negative: bool) -> Conditioning:
        height, width = (side * self.model.vae.spec.factor for side in job.shape[1:])
        key = height, width, negative, tuple(prompts)
        if key not in self._cache:
            options = replace(self.read_as, size=(height, width), negative=negative)
            self._cache[key] = encode_prompts(self.model, prompts, options)
            if len(self._cache) > 2 * AHEAD:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


def warn_of_unused(model: Model) -> None:
    """Log that the negative prompt, or conditioning in its place, is not used."""
    title, scale = model.family.title, model.family.scale
    if model.family.distilled:
        log.warning("%s has its guidance distilled into it: the negative prompt is not used", title)
    else:
        whose = f" ({title}'s own)" if scale == 1 else ""
        log.warning("a guidance scale of 1%s uses no negative prompt: leave it out, or take a larger `scale`", whose)


def _texts_at(images: Sequence[list[Until]], call: int) -> list[str | None]:
    """Return the text of each image at a call."""
    return [next((until.text for until in image if call <= until.last), image[-1].text) for image in images]
