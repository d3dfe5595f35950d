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
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint import lora
from ldm_lite.checkpoint import model as loading
from ldm_lite.checkpoint.model import with_autoencoder
from ldm_lite.checkpoint.strength import Strength, strength_of
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.conditioning.prompts import FROM_FILES, OPTIONAL, PromptOptions, count_chunks, encode_prompts
from ldm_lite.core.denoise import Conditioning, State, denoise_step
from ldm_lite.diffusion.guidance import rows_of
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.precision import short_name
from ldm_lite.runtime.tiling import out_of_memory
from ldm_lite.runtime.together import Together
from ldm_lite.tasks import batching, img2img, inpaint, txt2img, upscale
from ldm_lite.tasks.batching import ImageInputs, Later, Ready, Runner
from ldm_lite.tasks.existing import contents
from ldm_lite.tasks.job import TASKS, Job, Result
from ldm_lite.tasks.joined import are_alike, join
from ldm_lite.tasks.text_inputs import PromptEncoder, is_constant
from ldm_lite.text.tokenizer import check_length
from ldm_lite.zoo.family import text_roles

__all__ = [
    "Batch",
    "LoraWeight",
    "Result",
    "Row",
    "Sample",
    "State",
    "contents",
    "count_images",
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
]
_BY_OPTIONS: dict[type[Txt2imgOptions], Any] = {
    Txt2imgOptions: txt2img,
    Img2imgOptions: img2img,
    InpaintOptions: inpaint,
    UpscaleOptions: upscale,
}
TEXTS_AT_ONCE = 64  # prompts of rows that are encoded in one run of the text encoder
LoraWeight = float | Strength  # of a LoRA: one number, or numbers by network and block

# ---- models ---------------------------------------------------------------------------------------------------------


def load_model(options: LoadOptions) -> Pipeline:
    """Load a checkpoint, as ldm_lite.load does, from its options.

    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    return loading.load_model(options, Pipeline)


def with_exact_batches(model: Pipeline) -> Pipeline | None:
    """Return the model so that each image of a batch has the bits that it has alone, whatever is beside it.

    It patches the layers of the model's UNet, and one thread may use it at a time.  None if the steps are compiled or
    the model is offloaded, which rule that out.
    """
    if model.step is not denoise_step or model.offloader is not None:
        return None
    return replace(model, step=Together(model.unet))


def merge_loras(model: Pipeline, files: Sequence[tuple[str | os.PathLike[str], LoraWeight]]) -> Callable[[], None]:
    """Merge LoRAs, each with its weight, into the model's networks, in place; return a function that undoes it.

    Undone, the weights have the bits of before.  Raises FileNotFoundError, and ValueError, with nothing changed, for
    files that do not fit the model.
    """
    opened = [(lora.open_lora(file), weight) for file, weight in files]
    return lora.merge_lora(model.networks, opened, model.offloader).remove


def lora_weight(text: str) -> LoraWeight:
    """Read the weight of a LoRA as it stands behind its file: "0.8", "te=0.5:unet=1", "0.8:lbw=OUTD"; "" is 1.

    Raises ValueError for any other text.
    """
    return strength_of(text.split(":") if text else [])


def tasks_of(model: Pipeline) -> tuple[str, ...]:
    """Return what a model can do, of "txt2img", "img2img", "inpaint", "upscale" and "cascade"; the first is its own."""
    return TASKS[model.family.task]


def prompt_kind(model: Pipeline) -> str:
    """Return what a model's prompts are: "text" (or a class), "files" (names of files), or "none" if it reads none."""
    conditioner = model.family.conditioner
    return "none" if conditioner in OPTIONAL else "files" if conditioner in FROM_FILES else "text"


def text_length(model: Pipeline, texts: Sequence[str | None], syntax: str) -> int | None:
    """Return how long the text of an image is as the model reads it, of the longest of its prompts.

    Images of one length can share a batch; others, and those whose text changes over the steps or has parts (None),
    cannot.  syntax is "plain" or "a1111".  Raises ValueError for a text that is too long.
    """
    for text in texts:
        check_length(text or "")
    length = count_chunks(model, texts, syntax)
    return length if all(is_constant(text, syntax) for text in texts) else None


# ---- runs of a task -------------------------------------------------------------------------------------------------


def count_images(options: Txt2imgOptions) -> int:
    """The number of images of a task's options.  Raises ValueError for options that are wrong whatever the model."""
    return int(_BY_OPTIONS[type(options)].count(options))


def prepare(model: Pipeline, options: Txt2imgOptions, first: int = 0) -> "Iterator[Sample]":
    """Return the images of a task one by one, from number `first` on, each with its text encoded and its noise drawn.

    The class of the options tells the task.  Raises ValueError, one line, for options that do not fit the model; the
    iterator raises it, and OSError, for what an image starts from.
    """
    job, inputs = _BY_OPTIONS[type(options)].prepare(model, options)
    return _samples(replace(job, batch_size=1), inputs, first)


def _samples(job: Job, inputs: Sequence[ImageInputs | Later], first: int) -> "Iterator[Sample]":
    runner, number = Runner(job), 0
    for place, source in enumerate(inputs):
        images = list(batching.batches_of(job, place, source, None))
        left_out = min(max(0, first - number), len(images))
        number += left_out
        if left_out == len(images):
            continue
        image = source.make() if isinstance(source, Later) else source
        for ready in runner.prepare(image, images[left_out:]):
            yield Sample(number, job, ready.batch, image, ready)
            number += 1


class Row(NamedTuple):
    """What an image of prepare_rows has of its own."""

    prompt: str
    negative_prompt: str | None
    seed: int
    files: tuple[str, ...] = ()  # the image to start from, and the mask


def prepare_rows(model: Pipeline, options: Txt2imgOptions, rows: Sequence[Row]) -> "Iterator[Sample]":
    """Return one image for each row, all with the same options but for what a row has.

    The texts of the rows must have one text_length; only a single row may have a text without one.  Those of txt2img
    are encoded now, many at a time, those of the other tasks with the batches.  Images of one `size` can be denoised
    together, and only those; an image that starts from a file reads it when it is asked for its size.  Raises as
    prepare does.
    """
    given: dict[str, Any] = {"prompt": [row.prompt for row in rows]}
    for place, name in enumerate(("init_img", "mask")[: len(rows[0].files)]):
        given[name] = tuple(row.files[place] for row in rows)
    job, inputs = _BY_OPTIONS[type(options)].prepare(model, replace(options, **given))
    length = text_length(model, (rows[0].prompt, rows[0].negative_prompt), options.prompt_syntax)
    table = _Rows(job, rows, length)
    if not rows[0].files:
        [image] = inputs
        table = replace(table, job=table.with_text(rows, image.latent_shape))
        inputs = [image] * len(rows)
    variation = options.variation_seed or 0
    return (
        Sample(
            number,
            replace(table.job, prompts=[row.prompt], negative_prompt=row.negative_prompt),
            batching.Batch(0, [0], [row.seed], [variation], [""]),
            source,
            _rows=table,
        )
        for number, (row, source) in enumerate(zip(rows, inputs, strict=True))
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the samples of prepare_rows share."""

    job: Job
    rows: Sequence[Row]
    length: int | None  # of their texts: see text_length

    def with_text(self, rows: Sequence[Row], latent_shape: tuple[int, int, int]) -> Job:
        """Return the job with the texts of some rows as its prompts, encoded for images of a latent shape.

        A text without a length is encoded later: it is alone.
        """
        job, model = replace(self.job, prompts=[row.prompt for row in rows]), self.job.model
        if self.length is None:
            return replace(job, negative_prompt=rows[0].negative_prompt)
        encoder = PromptEncoder(model, job)
        height, width = (side * model.vae.spec.factor for side in latent_shape[1:])
        options = replace(job.text, num_chunks=self.length, size=(height, width))
        with model.phase(*text_roles(model.family.text_encoders)):
            cond = self._encoded([row.prompt for row in rows], options)
            negative = [row.negative_prompt for row in rows]
            encoder.warn_of_unused(negative)
            if not encoder.guided:
                return replace(job, cond=cond)
            negative = negative[:1] if len(set(negative)) == 1 else negative
            return replace(job, cond=cond, uncond=self._encoded(negative, replace(options, negative=True)))

    def _encoded(self, prompts: Sequence[str | None], options: PromptOptions) -> Conditioning:
        """Encode N prompts, each once and some at a time: N rows on the CPU, or one if all are the same."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        unique = list(places)
        firsts = range(0, len(unique), TEXTS_AT_ONCE)
        parts = [encode_prompts(self.job.model, unique[i : i + TEXTS_AT_ONCE], options) for i in firsts]
        cond = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
        return cond if len(unique) == 1 else rows_of(cond, [places[prompt] for prompt in prompts], len(unique))

    def ready(self, samples: "Sequence[Sample]") -> Ready:
        """Return some of the samples, of one size, as a batch that can be denoised."""
        images = [sample._inputs for sample in samples]
        image, job, numbers = images[0], self.job, [sample.number for sample in samples]
        if job.cond is None:
            names = ("init", "deviation", "mask", "hole", "concat")
            given = [name for name in names if getattr(image, name) is not None]
            tensors: dict[str, Any] = {name: torch.cat([getattr(start, name) for start in images]) for name in given}
            image = replace(image, **tensors)
            job, numbers = self.with_text([self.rows[n] for n in numbers], image.latent_shape), [*range(len(samples))]
        seeds, variations = (
            [n for sample in samples for n in getattr(sample._images, name)] for name in ("seeds", "variations")
        )
        batch = batching.Batch(0, numbers, seeds, variations, [""] * len(samples))
        return next(Runner(job).prepare(image, [batch]))


@dataclass(frozen=True, eq=False)
class Sample:
    """One image of a run, from what it starts from to its result."""

    number: int  # in its run, from 0
    _job: Job
    _images: batching.Batch  # this one
    _source: ImageInputs | Later
    _prepared: Ready | None = None  # None: with the batch that it is in
    _rows: _Rows | None = None  # of prepare_rows
    is_second: bool = False  # the second pass of an image that is enlarged

    @cached_property
    def _inputs(self) -> ImageInputs:
        """What it starts from; its files are read on first use.  Raises ValueError, OSError."""
        return self._source.make() if isinstance(self._source, Later) else self._source

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of what is denoised, in pixels.  Raises ValueError, OSError for its files."""
        _, height, width = self._inputs.latent_shape
        factor = self._job.model.vae.spec.factor
        return factor * width, factor * height

    @property
    def settings(self) -> dict[str, object]:
        """The settings in the text of its PNG, by name."""
        return {**self._job.settings, **self._settings}

    @property
    def _settings(self) -> dict[str, object]:
        """Those that other images of the run may have otherwise."""
        [variation], second = self._images.variations, self._inputs.second
        own = {**batching.noise_settings(self._job, variation), **self._inputs.settings}
        return {**own, **second.settings} if second is not None and self.is_second else own

    def goes_with(self, other: "Sample") -> bool:
        """Whether both can be in one batch: of one model, with the same steps, guidance and shapes."""
        if self._rows is not None:
            return self._rows is other._rows and self.size == other.size
        return self._prepared is not None and other._prepared is not None and are_alike(self._prepared, other._prepared)

    def second_pass(self, latents: Tensor) -> "Sample | None":
        """Return what follows the last step of an image that is to be enlarged, from its latents (1,C,h,w), else None.

        It is denoised as the first pass was, and gives the result.
        """
        second = self._inputs.second
        if second is None or self.is_second:
            return None
        runner = Runner(replace(second.job, batch_size=1))
        [prepared] = runner.prepare(second.inputs(latents), [self._images])
        return replace(self, _prepared=prepared, is_second=True)

    def finish(self, latents: Tensor) -> Result:
        """Decode latents (1,C,h,w), of the last step or x0 of an earlier one: pixels, and the text of the PNG.

        Raises ValueError, naming the cause, for latents that are not finite.
        """
        [pixels] = generate.decode(self._job.model, latents)
        [row], [seed] = self._images.rows, self._images.seeds
        return self._job.result(self._inputs.finish(pixels), row, seed, self._settings)


class Batch:
    """Samples that go together, denoised as one batch: an iterator over the states after every step.

    Leaving the loop stops it.  There are no states if no steps run, as with strength 0.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """One or more samples.  Raises ValueError, OSError for those of prepare_rows, whose text is encoded now."""
        first = samples[0]
        self._size = len(samples)
        self._ready = (
            join([sample._prepared for sample in samples if sample._prepared is not None])
            if first._rows is None
            else first._rows.ready(samples)
        )
        self.latents: Tensor = self._ready.latents  # (B,C,h,w), in the samples' order: the newest ones

    @property
    def num_steps(self) -> int:
        """The number of steps; 0 if none run."""
        return 0 if self._ready.plan is None else self._ready.plan.num_steps

    def __iter__(self) -> Iterator[State]:
        step = self._ready.model.step
        with step.images(self._size) if isinstance(step, Together) else contextlib.nullcontext():
            for state in self._ready.stream():
                self.latents = state.latents
                yield state
