"""prompt_syntax: prompts that change over the steps, or have parts that AND joins, as in A1111."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.denoise import InputSource
from ldm_lite.core.features import Feature
from ldm_lite.core.job import Item
from ldm_lite.diffusion.guidance import Guidance, InTurns, composed, reads_step_alone
from ldm_lite.diffusion.names import resolve
from ldm_lite.diffusion.webui import calls_per_step
from ldm_lite.tasks.job import PromptEncoder, TaskJob
from ldm_lite.text.schedule import Calls, Part, Until, parts_of, until_of


@dataclass(frozen=True)
class EditedPrompts(Feature):
    """Encodes the prompts of a job so that they may change and have parts, if its syntax or its regions need that."""

    stage: ClassVar = "text"
    uses: ClassVar = ("prompt_syntax", "regions")

    def change_job(self, job: TaskJob) -> TaskJob:
        """Replace the encoder of the prompts, and the key by which they share a batch."""
        texts = self.once(job.texts, functools.partial(edited, job))
        return replace(job, texts=texts, key=texts.key)


def edited(job: TaskJob, texts: PromptEncoder) -> EditedTexts:
    """Return an encoder of the same prompts, edited."""
    known = {option.name: getattr(texts, option.name) for option in fields(texts) if option.init}
    return EditedTexts(**known, calls=calls_of(job))


def calls_of(job: TaskJob) -> Calls:
    """Return the number of network calls that prompts count: as in A1111 those of all steps, whatever the strength."""
    options, plan = job.options, job.plan
    if plan is None or options.plan is not None:
        return Calls(1 if plan is None else len(plan.t))
    family = job.model.family
    calls_each = calls_per_step(resolve(options.sampler or family.sampler)[0])
    return Calls((options.steps or family.steps) * (calls_each or max(1, round(len(plan.t) / plan.num_steps))))


def added(job: TaskJob, conds: Sequence[Parts], weights: tuple[float, ...], uncond: Parts | None) -> Guidance:
    """EditedTexts.compose: the predictions for the parts are added."""
    return composed(conds, weights, uncond, job.guidance)


@dataclass(frozen=True, eq=False)
class EditedTexts(PromptEncoder):
    """Encodes prompts of the a1111 syntax, whose texts may change, and prompts that have parts."""

    calls: Calls = field(kw_only=True)  # how prompts that change count the network's calls
    compose: Callable[..., Guidance] = added  # of several parts, or one with a weight
    _schedules: dict[str | None, list[Until]] = field(init=False, default_factory=dict)

    def key(self, item: Item) -> Hashable:
        """Job.key: prompts of other parts cannot go together."""
        return super().key(item), self.weights(self._prompt(item))

    def weights(self, prompt: str) -> tuple[float, ...]:
        """Return the weights of the parts of a prompt."""
        return (1.0,) if self.cond is not None else tuple(part.weight for part in parts_of(prompt, "a1111"))

    @cached_property
    def has_parts(self) -> bool:  # type: ignore[override]  # a plain prompt has none
        """Whether a prompt has several parts, or one with a weight."""
        return any(self.weights(prompt) != (1.0,) for prompt in self.prompts)

    def texts(self) -> set[str | None]:
        """Return all texts that are read over the steps."""
        prompts = set(self.prompts if self.cond is None else ())
        parts = {part.text for prompt in prompts for part in parts_of(prompt, "a1111")}
        negative = self.negative_prompts if self._reads_negative else ()
        return {until.text for text in (*parts, *negative) for until in self._until(text)}

    def source(self, job: TaskJob, items: Sequence[Item]) -> InputSource:
        """Return the inputs of every call for items whose prompts' parts have the same weights."""
        prompts = [self._prompt(item) for item in items]
        parts = [[Part("", 1.0)] if self.cond is not None else parts_of(prompt, "a1111") for prompt in prompts]
        columns = [[self._until(part.text) for part in column] for column in zip(*parts, strict=True)]
        columns.append([self._until(self.negative_of(item) if self._reads_negative else None) for item in items])
        changes = {until.last + 1 for column in columns for image in column for until in image[:-1]}
        if reads_step_alone(job.guidance):  # once per step, whatever the text is
            job = replace(job, guidance=functools.cache(job.guidance))
        sources: dict[object, InputSource] = {}  # the same texts may come back
        turns = []
        for first in sorted({0, *changes}):
            *texts, negative = key = tuple(tuple(_text_at(image, first) for image in column) for column in columns)
            if key not in sources:
                conds = [self.encoded(job, items, part, negative=False) for part in texts]
                uncond = self.encoded(job, items, negative, negative=True) if self.is_guided else None
                sources[key] = self.guided(job, items, conds, uncond)
            turns.append((first, sources[key]))
        return turns[0][1] if len(turns) == 1 else InTurns(tuple(turns))

    def joined(self, job: TaskJob, items: Sequence[Item], conds: Sequence[Parts], uncond: Parts | None) -> Guidance:
        """Return the guidance of prompts of one part or several."""
        weights = self.weights(self._prompt(items[0]))
        if weights == (1.0,):
            return super().joined(job, items, conds, uncond)
        return self.compose(replace(job, model=self.model), conds, weights, uncond)

    def _prompt(self, item: Item) -> str:
        return self.prompts[item.number % len(self.prompts)]

    @property
    def _reads_negative(self) -> bool:
        """Whether the negative prompts are read."""
        return self.is_guided and self.uncond is None

    def _until(self, text: str | None) -> list[Until]:
        if text not in self._schedules:
            self._schedules[text] = until_of(text, self.options.prompt_syntax, self.calls)
        return self._schedules[text]


def _text_at(image: Sequence[Until], call: int) -> str | None:
    """Return the text of an image at a call."""
    return next((until.text for until in image if call <= until.last), image[-1].text)
