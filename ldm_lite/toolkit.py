"""For tools that make images: load a model, prepare its tasks, denoise images in batches, finish each.

The folders train, batch, serve and bench use this module and networks.py, and none of the modules behind them.

    model = load_model(LoadOptions(ckpt="v1-5.safetensors"))
    for sample in prepare(model, Txt2imgOptions("a cat", seed=1)):
        batch = Batch([sample])  # or with samples of other requests that go with it
        for state in batch:  # after every step; leaving the loop stops it
            print(state.step, state.num_steps)
        sample.finish(batch.latents).image.save("cat.png")
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ldm_lite.checkpoint import loading
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.parts import with_autoencoder
from ldm_lite.checkpoint.reader import open_source
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.conditioning.prompts import PromptOptions, conditioner_of, count_chunks, encode_prompts
from ldm_lite.core.denoise import Conditioning, State
from ldm_lite.core.job import Item, Started, start
from ldm_lite.diffusion.guidance import conditioning_rows
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.precision import short_name
from ldm_lite.runtime.tiling import out_of_memory
from ldm_lite.runtime.together import Together
from ldm_lite.tasks import img2img, inpaint, txt2img, upscale
from ldm_lite.tasks.checks import TASKS, read_prompts
from ldm_lite.tasks.cost import Cost, cost_of
from ldm_lite.tasks.existing import contents
from ldm_lite.tasks.features import check_options, with_networks
from ldm_lite.tasks.image_inputs import joined
from ldm_lite.tasks.job import PromptEncoder, Task, TaskJob
from ldm_lite.tasks.joined import are_alike, join_batches
from ldm_lite.tasks.results import Result
from ldm_lite.text.prompt import BREAK
from ldm_lite.text.schedule import Calls, is_constant, parts_of, until_of
from ldm_lite.text.tokenizer import check_length

if TYPE_CHECKING:
    from ldm_lite.adapters.strength import Strength

__all__ = [
    "Batch",
    "LoraWeight",
    "PreparedRow",
    "Result",
    "Sample",
    "State",
    "check_checkpoint",
    "contents",
    "cost_of",
    "estimate_cost",
    "load_model",
    "lora_weight",
    "merge_loras",
    "out_of_memory",
    "prepare",
    "prepare_rows",
    "prompt_kind",
    "short_name",
    "tasks_of",
    "text_length",
    "with_autoencoder",
    "with_exact_batches",
    "with_networks",
]
_BY_OPTIONS: dict[type[Txt2imgOptions], Any] = {
    Txt2imgOptions: txt2img,
    Img2imgOptions: img2img,
    InpaintOptions: inpaint,
    UpscaleOptions: upscale,
}
TEXTS_AT_ONCE = 64  # prompts of rows that are encoded in one run of the text encoder
LoraWeight: TypeAlias = "float | Strength"  # of a LoRA: one number, or numbers by network and block

# ---- models ---------------------------------------------------------------------------------------------------------


def load_model(options: LoadOptions) -> Pipeline:
    """Load a checkpoint, as ldm_lite.load does, from its options.

    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    return loading.load_model(options, Pipeline)


class ModelInputs(NamedTuple):
    """What a model's network reads besides the prompt."""

    references: bool  # images
    scale: bool  # of guidance, which was distilled into it: no branches are needed


def check_checkpoint(options: LoadOptions) -> ModelInputs:
    """Read the header of a checkpoint, and return what its network reads.

    Raises FileNotFoundError, ValueError unless it is of a known family.
    """
    family, *_ = loading.recognise_file(open_source(options.ckpt), options)
    return ModelInputs(family.references is not None, family.distilled)


def with_exact_batches(model: Pipeline) -> Pipeline | None:
    """Return the model so that each image of a batch has the same bits as alone, whatever the others are.

    It patches the layers of the model's UNet, and one thread may use it at a time.  None if the steps are compiled or
    the model is offloaded, which makes that impossible.
    """
    if is_compiled(model.run_row) or model.offloader is not None:
        return None
    return replace(model, run_row=Together(model.unet, model.run_row))


def merge_loras(
    model: Pipeline, files: Sequence[str | tuple[str | os.PathLike[str], LoraWeight]]
) -> Callable[[], None]:
    """Merge LoRAs, "FILE:WEIGHT" or each with its weight, into the model's networks, in place; return what undoes it.

    Undoing restores the weights bit for bit.  Raises FileNotFoundError, and ValueError, with nothing changed, for
    files that do not fit the model.
    """
    from ldm_lite.adapters import lora
    from ldm_lite.adapters.strength import parse

    pairs = [parse(file) if isinstance(file, str) else file for file in files]
    opened = [(lora.open_lora(file), weight) for file, weight in pairs]
    for adapter, _ in opened:
        lora.check_base(adapter, model.family)
    return lora.merge_lora(model.networks, opened, model.offloader).remove


def lora_weight(text: str) -> LoraWeight:
    """Read the weight of a LoRA as it is written after its file: "0.8", "te=0.5:unet=1", "0.8:lbw=OUTD"; "" is 1.

    Raises ValueError for any other text.
    """
    from ldm_lite.adapters.strength import strength_of

    return strength_of(text.split(":") if text else [])


def tasks_of(model: Pipeline) -> tuple[str, ...]:
    """Return a model's tasks, of "txt2img", "img2img", "inpaint", "upscale" and "cascade"; the first is its own."""
    return TASKS[model.family.task]


def inputs_of(model: Pipeline) -> ModelInputs:
    """Return what a model's network reads besides the prompt."""
    return ModelInputs(model.family.references is not None, model.family.distilled)


def prompt_kind(model: Pipeline) -> str:
    """Return what a model's prompts are: "text" (or a class), "files" (names of files), or "none" if it reads none."""
    return conditioner_of(model).reads


def text_length(model: Pipeline, texts: Sequence[str | None], syntax: str) -> int | None:
    """Return the length of an image's text as the model reads it, the longest of its prompts.

    Images of one length can share a batch; others, and those whose text changes over the steps or has parts (None),
    cannot.  syntax is "plain" or "a1111".  Raises ValueError for a text that is too long.
    """
    for text in texts:
        check_length(text or "")
    length = count_chunks(model, texts, syntax)
    return length if all(is_constant(text, syntax) for text in texts) else None


# ---- runs of a task -------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """The work that options ask for."""

    images: int
    parts: int  # of a prompt, which AND joins: each is a branch of every call of the network
    longest: int  # chunks of 75 tokens that a text has, at most
    chunks: int  # maximum over all texts that are read over the steps
    texts: tuple[str, ...]  # all texts that are read
    cost: Cost  # what features add


def estimate_cost(options: Txt2imgOptions, steps: int) -> Estimate:
    """Return the work of a task's options, before anything is made; steps are the model's default.

    Raises ValueError for options that are wrong whatever the model.
    """
    images = int(_BY_OPTIONS[type(options)].count(options))
    options, _ = check_options(options)
    cost, syntax, steps = cost_of(options), options.prompt_syntax, options.steps or steps
    prompts = tuple(filter(None, (*read_prompts(options), *options.negative_prompts, *cost.texts)))
    parts = [parts_of(prompt, "a1111" if cost.joins_parts else syntax) for prompt in set(prompts)]
    texts = {until.text for part in itertools.chain(*parts) for until in until_of(part.text, syntax, Calls(steps))}
    sizes = [len(text.encode(errors="replace")) // 75 + text.count(BREAK) + 1 for text in texts if text] or [1]
    return Estimate(images, max(map(len, parts), default=1), max(sizes), sum(sizes), prompts, cost)


def prepare(model: Pipeline, options: Txt2imgOptions, first: int = 0) -> "Iterator[Sample]":
    """Return the images of a task one by one, from number `first` on, each with its text encoded and its noise drawn.

    The class of the options determines the task.  Raises ValueError, one line, for options that do not fit the model;
    the iterator raises it, and OSError, for an image's input files.
    """
    return _samples(_BY_OPTIONS[type(options)].prepare(model, options), first)


def _samples(task: Task, first: int) -> "Iterator[Sample]":
    for part in task.parts:
        if not (items := [item for item in part.items if item.number >= first]):
            continue
        job = part.make()
        job = replace(job, items=items, options=replace(job.options, batch_size=1))
        for item in items:
            yield Sample(item, lambda job=job: job, start(job, [item]))  # type: ignore[misc]


class PreparedRow(NamedTuple):
    """The settings of one image of prepare_rows."""

    prompt: str
    negative_prompt: str | None
    seed: int
    files: tuple[str, ...] = ()  # the image to start from, and the mask


def prepare_rows(model: Pipeline, options: Txt2imgOptions, rows: Sequence[PreparedRow]) -> "Iterator[Sample]":
    """Return one image for each row, all with the same options except those in the row.

    The texts of the rows must have one text_length; only a single row may have a text without one, or regions.
    txt2img's texts are encoded now, many at a time, other tasks' with the batches.  Images of one `size` can be
    denoised together, and only those; an image that starts from a file reads it when it is asked for its size.  Raises
    as prepare does.
    """
    with_files = bool(rows[0].files)
    # All rows have one variation seed: with `fixed_code` none goes up.
    changes: dict[str, Any] = {"batch_size": 1, "n_iter": 1, "fixed_code": True, "seed": rows[0].seed}
    changes["prompt"] = rows[0].prompt if with_files else [row.prompt for row in rows]
    for place, name in enumerate(("init_img", "mask")[: len(rows[0].files)]):
        changes[name] = tuple(row.files[place] for row in rows)
    task = _BY_OPTIONS[type(options)].prepare(model, replace(options, **changes))
    length = text_length(model, (rows[0].prompt, rows[0].negative_prompt), options.prompt_syntax)
    table = _Rows(rows, None if cost_of(options).joins_parts else length)
    if with_files:
        jobs = [part.make for part in task.parts]
    else:
        [part] = task.parts
        job = part.make()
        job = replace(job, texts=table.texts(job, rows))
        jobs = [lambda: job] * len(rows)
    return (
        Sample(Item(number, row.prompt, row.negative_prompt or "", row.seed), make, rows=table)
        for number, (row, make) in enumerate(zip(rows, jobs, strict=True))
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """The state that the samples of prepare_rows share."""

    rows: Sequence[PreparedRow]
    length: int | None  # of their texts: see text_length

    def texts(self, job: TaskJob, rows: Sequence[PreparedRow]) -> PromptEncoder:
        """Return the input source of some rows' texts, encoded for images of the job's size.

        A text without a length is encoded later, alone.
        """
        negative = [row.negative_prompt for row in rows]
        said = next((text for text in negative if text), negative[0])
        texts, model = replace(job.texts, prompts=[row.prompt for row in rows], negative_prompts=(said,)), job.model
        if self.length is None:
            return texts
        factor = model.vae.spec.factor
        size = job.shape[1] * factor, job.shape[2] * factor
        options = replace(texts.read_as, num_chunks=self.length, alike=False, size=size)
        with model.phase(*model.family.texts):
            cond = _encoded(model, texts.prompts, options)
            if not texts.is_guided:
                return replace(texts, cond=cond, negative_prompts=(None,))  # a message says that it is not read
            negative = negative[:1] if len(set(negative)) == 1 else negative
            return replace(texts, cond=cond, uncond=_encoded(model, negative, replace(options, negative=True)))

    def started(self, samples: "Sequence[Sample]") -> tuple[TaskJob, Started]:
        """Return the job of some of the samples, of one size, and the batch, ready to be denoised."""
        job, items = samples[0].job, [sample.item for sample in samples]
        if self.rows[0].files:
            jobs = [sample.job for sample in samples]
            names = job.channels.keys()
            channels = {name: torch.cat([member.channels[name] for member in jobs]) for name in names}
            rows = [self.rows[item.number] for item in items]
            job = replace(job, first_latents=joined([member.first_latents for member in jobs]), channels=channels)
            job = replace(job, texts=self.texts(job, rows))
            items = [item._replace(number=place) for place, item in enumerate(items)]
        return job, start(job, items)


def _encoded(model: CheckpointModel, prompts: Sequence[str | None], options: PromptOptions) -> Conditioning:
    """Encode N prompts, each once and some at a time: N rows on the CPU, or one if all are the same."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    unique = list(places)
    firsts = range(0, len(unique), TEXTS_AT_ONCE)
    parts = [encode_prompts(model, unique[i : i + TEXTS_AT_ONCE], options) for i in firsts]
    cond = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
    return cond if len(unique) == 1 else conditioning_rows(cond, [places[prompt] for prompt in prompts], len(unique))


class Sample:
    """One image of a run, from its inputs to its result."""

    def __init__(
        self,
        item: Item,
        make: Callable[[], TaskJob],
        started: Started | None = None,
        rows: _Rows | None = None,
        is_second: bool = False,
    ) -> None:
        """Without `started` its batch is prepared as a whole, as one of `rows`."""
        self.item, self.is_second = item, is_second  # is_second: the second pass of an image that is enlarged
        self._make, self._started, self._rows = make, started, rows

    @property
    def number(self) -> int:
        """The number in its run, from 0."""
        return self.item.number

    @cached_property
    def job(self) -> TaskJob:
        """The job that it is of; its files are read on first use.  Raises ValueError, OSError."""
        return self._make()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the denoised image, in pixels.  Raises ValueError, OSError for its files."""
        _, height, width = self.job.shape
        factor = self.job.model.vae.spec.factor
        return factor * width, factor * height

    @property
    def settings(self) -> dict[str, object]:
        """The settings in the text of its PNG, by name."""
        return self.job.settings_for(self.item)

    def can_batch_with(self, other: "Sample") -> bool:
        """Whether both can be in one batch: of one model, with the same steps, guidance and shapes."""
        if self._rows is not None:
            return self._rows is other._rows and self.size == other.size
        if self._started is None or other._started is None:
            return False
        return are_alike((self.job, self._started), (other.job, other._started))

    def second_pass(self, latents: Tensor) -> "Sample | None":
        """Return the second pass of an image, from its latents (1,C,h,w) after the last step, or None.

        It is denoised as the first pass was, and gives the result.
        """
        if self.job.follow is None:
            return None
        job = replace(self.job.follow(latents), items=[self.item])
        return Sample(self.item, lambda: job, start(job, [self.item]), is_second=True)

    def finish(self, latents: Tensor) -> Result:
        """Decode latents (1,C,h,w), of the last step or x0 of an earlier one: pixels, and the text of the PNG.

        Raises ValueError, naming the cause, for latents that are not finite.
        """
        [pixels] = self.job.model.decode_pixels(latents)
        return self.job.result(self.item, pixels)


class Batch:
    """Samples that go together, denoised as one batch: an iterator over the states after every step.

    Leaving the loop stops it.  There are no states if no steps run, as with strength 0.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """One or more samples.  Raises ValueError, OSError for those of prepare_rows, whose text is encoded now."""
        first = samples[0]
        self._size, rows = len(samples), first._rows
        if rows is not None:
            self._job, self._started = rows.started(samples)
        else:
            starts = [sample._started for sample in samples if sample._started is not None]
            self._job, self._started = first.job, join_batches(starts)
        self.latents: Tensor = self._started[0]  # (B,C,h,w), in the samples' order: the newest ones

    @property
    def num_steps(self) -> int:
        """The number of steps; 0 if none run."""
        return 0 if self._job.plan is None else self._job.plan.num_steps

    def __iter__(self) -> Iterator[State]:
        if self._job.plan is None:
            return
        x, *how = self._started
        step = self._job.model.run_row
        states = self._job.solve(x, self._job.plan, *how)
        while True:  # other batches of the model may run between two steps
            with step.images(self._size) if isinstance(step, Together) else contextlib.nullcontext():
                state = next(states, None)
            if state is None:
                return
            self.latents = state.latents
            yield state
