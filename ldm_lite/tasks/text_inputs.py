"""The conditioning of a job's prompts, over the calls of the network."""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import count_chunks, encode_prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.diffusion.guidance import rows_of
from ldm_lite.tasks.job import Job
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


def weights_of(job: Job, row: int) -> tuple[float, ...]:
    """Return the weights of the parts of a prompt: 1.0 for one that is not of several."""
    return (1.0,) if job.cond is not None else tuple(part.weight for part in _parts_of(job, job.prompts[row]))


def _parts_of(job: Job, prompt: str) -> list[Part]:
    return _parts(prompt, "a1111" if job.regions is not None else job.text.syntax)


def is_constant(prompt: str | None, syntax: str) -> bool:
    """Whether a prompt is a single text of weight 1 from the first step to the last."""
    parts = _parts(prompt or "", syntax)
    return [part.weight for part in parts] == [1.0] and len(_schedule(parts[0].text, syntax, Calls(1000))) == 1


def _parts(prompt: str, syntax: str) -> list[Part]:
    if syntax != "a1111":
        return [Part(prompt, 1.0)]
    parts = split(prompt)  # whose spaces around AND count for Qwen3
    return parts if len(parts) == 1 else [part._replace(text=part.text.strip()) for part in parts]


def _schedule(text: str | None, syntax: str, calls: Calls) -> list[Until]:
    return [Until(calls.total, text)] if text is None or syntax != "a1111" else schedule(text, calls)


class PromptEncoder:
    """The conditioning of a job's prompts for one model, reused by later repetitions."""

    def __init__(self, model: Model, job: Job) -> None:
        self.model, self.job = model, job
        self.own = model is job.model  # the user's conditioning is for the job's model, not for its refiner
        distilled = model.family.distilled
        counts = {len(weights_of(job, row)) for row in range(len(job.prompts))}
        if job.regions is not None and (others := counts - {len(job.regions)}):
            raise ValueError(
                f"got {len(job.regions)} `regions` for a prompt of {min(others)} parts, wanted one for each; AND "
                "joins parts"
            )
        composed = any(weights_of(job, row) != (1.0,) for row in range(len(job.prompts)))
        unguided = job.guidance == 1 and job.image_scale in (None, 1) and not composed
        self.guided = not distilled and not unguided
        if self.own:
            self.warn_of_unused([job.negative_prompt], job.uncond)
        self._schedules: dict[str | None, list[Until]] = {}
        texts = set[str | None]()
        if job.cond is None or not self.own:
            texts = {part.text for prompt in set(job.prompts) for part in _parts_of(job, prompt)}
        if self.guided and (job.uncond is None or not self.own):
            texts.add(job.negative_prompt)
        # All prompts of a job are padded to its longest, so that no image depends on its batch.
        texts = {until.text for text in texts for until in self._until(text)}
        chunks = {count_chunks(model, [text], job.text.syntax) for text in texts} or {1}
        alike = len(chunks) == 1 and job.cond is None and job.uncond is None
        self.options = dataclasses.replace(job.text, num_chunks=max(chunks), alike=alike)
        self._cache: OrderedDict[object, Conditioning] = OrderedDict()

    def warn_of_unused(self, negative: Sequence[str | None], uncond: Conditioning | None = None) -> None:
        """Say that negative prompts, or conditioning in their place, are not used, if so."""
        if self.guided or (uncond is None and not any(negative)):
            return
        title, scale = self.model.family.title, self.model.family.scale
        if self.model.family.distilled:
            log.warning("%s has its guidance distilled into it: the negative prompt is not used", title)
        else:
            own = f" ({title}'s own)" if scale == 1 else ""
            log.warning("a guidance scale of 1%s uses no negative prompt: leave it out, or take a larger `scale`", own)

    def encode(self, rows: list[int], latent_shape: tuple[int, int, int]) -> list[Texts]:
        """Return the conditioning of the prompts in these rows, whose parts have the same weights, in order of use."""
        job, count = self.job, len(self.job.prompts)
        cond = rows_of(job.cond, rows, count) if job.cond is not None and self.own else None
        uncond = rows_of(job.uncond, rows, count) if job.uncond is not None and self.own and self.guided else None
        parts = [] if cond is not None else [_parts_of(job, job.prompts[row]) for row in rows]
        columns = [[self._until(part.text) for part in column] for column in zip(*parts, strict=True)]
        negative = [self._until(job.negative_prompt)] * len(rows) if self.guided and uncond is None else []
        changes = {until.last + 1 for column in (*columns, negative) for image in column for until in image[:-1]}
        weights = (1.0,) if cond is not None else tuple(part.weight for part in parts[0])
        made: list[Texts] = []
        for first in sorted({0, *changes}):
            conds = tuple(self._encode(_texts_at(column, first), latent_shape, negative=False) for column in columns)
            never = self._encode(_texts_at(negative, first), latent_shape, negative=True) if negative else uncond
            made.append(Texts(first, conds if cond is None else (cond,), weights, never))
        return made

    def encode_ahead(self, batches: Sequence[list[int]], latent_shape: tuple[int, int, int]) -> None:
        """Encode the prompts of some batches of rows, so that the text encoder comes to the device once."""
        with self.model.phase(*text_roles(self.model.family.text_encoders)):
            for rows in batches:
                self.encode(rows, latent_shape)

    def _until(self, text: str | None) -> list[Until]:
        if text not in self._schedules:
            self._schedules[text] = _schedule(text, self.job.text.syntax, self.job.calls)
        return self._schedules[text]

    def _encode(
        self, prompts: Sequence[str | None], latent_shape: tuple[int, int, int], negative: bool
    ) -> Conditioning:
        height, width = (side * self.model.vae.spec.factor for side in latent_shape[1:])
        key = height, width, negative, tuple(prompts)
        if key not in self._cache:
            options = dataclasses.replace(self.options, size=(height, width), negative=negative)
            self._cache[key] = encode_prompts(self.model, prompts, options)
            if len(self._cache) > 2 * AHEAD:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


def _texts_at(images: Sequence[list[Until]], call: int) -> list[str | None]:
    """The text of each image at a call."""
    return [next((until.text for until in image if call <= until.last), image[-1].text) for image in images]
