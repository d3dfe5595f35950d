"""Make the images of a shard: rows with like settings and shapes run together, while earlier ones are finished.

Which rows run together depends on the shard's rows alone, so that a shard has the same bytes whenever it is made.
"""

import dataclasses
import hashlib
import io
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ldm_lite import generate
from ldm_lite.batch.rows import TASKS, Failed, Item, describe, group
from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import PromptOptions, encode_prompts
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.runtime.tiling import out_of_memory
from ldm_lite.tasks.batching import Batch, ImageInputs, Later, Runner, noise_settings
from ldm_lite.tasks.job import Job, Result
from ldm_lite.tasks.text_inputs import PromptEncoder
from ldm_lite.zoo.families import text_roles

TEXTS = 64  # prompts that are encoded in one run of the text encoder
PENDING = 4  # batches that may wait to be finished


@dataclass(frozen=True)
class Made:
    """An image: its file, its parameters as JSON, and its line of the manifest but for the shard."""

    png: bytes
    parameters: bytes
    line: dict[str, Any]


Outcome = Made | Failed | Future[Made | Failed]


@dataclass(frozen=True, eq=False)
class Group:
    """Items that share a job, and what each begins with."""

    job: Job
    items: Sequence[Item]
    inputs: Iterable[ImageInputs | Later]


class Maker:
    """Makes images of items; `batch_size` at a time."""

    def __init__(self, model: Model, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self._decoder = ThreadPoolExecutor(1, "decode")
        self._writers = ThreadPoolExecutor(2, "png")

    def make(self, items: Sequence[Item]) -> Iterator[Made | Failed]:
        """Yield the images of items, or why there is none, in an order that depends on the items alone.

        Raises what is no item's fault, such as an error of the GPU, after which nothing works.
        """
        waiting: deque[Outcome] = deque()
        try:
            for outcome in self._begun(items):
                waiting.append(outcome)
                while len(waiting) > PENDING * self.batch_size:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            for outcome in waiting:
                if isinstance(outcome, Future):
                    outcome.cancel()

    def _begun(self, items: Sequence[Item]) -> Iterator[Outcome]:
        """Denoise the items, and yield their images while these are finished.  All text is encoded first."""
        for each in [made for similar in group(items) for made in self._groups(similar)]:
            if isinstance(each, Failed):
                yield each
                continue
            for batch in self._batches(each):
                yield from [batch] if isinstance(batch, Failed) else self._run(each, *batch)

    def _groups(self, items: Sequence[Item]) -> Iterator[Group | Failed]:
        """The job of items with their text encoded; one for each if some of them cannot be in any."""
        try:
            yield self._group(items)
        except Exception as error:
            failed = _failed(items[0], error)
            if len(items) == 1:
                yield failed
            else:
                for item in items:
                    yield from self._groups([item])

    def _group(self, items: Sequence[Item]) -> Group:
        options, files = items[0].options, [item.files for item in items if item.files]
        given: dict[str, Any] = {"prompt": [item.prompt for item in items]}
        for name, place in (("init_img", 0), ("mask", 1)):
            if files and len(files[0]) > place:
                given[name] = tuple(each[place] for each in files)
        job, inputs = TASKS[type(options)](self.model, dataclasses.replace(options, **given))
        if files:
            return Group(job, items, inputs)
        image = inputs[0]
        return Group(self._with_text(job, items, image), items, [image] * len(items))

    def _with_text(self, job: Job, items: Sequence[Item], image: ImageInputs) -> Job:
        """Return the job with the text of these items, its prompts, encoded for images of this size.

        The text of an item that changes, or has parts, is encoded later: it runs alone.
        """
        if not items[0].constant:
            return dataclasses.replace(job, prompts=[items[0].prompt], negative_prompt=items[0].negative_prompt)
        model, encoder = job.model, PromptEncoder(job.model, job)
        height, width = (side * model.vae.spec.factor for side in image.latent_shape[1:])
        options = dataclasses.replace(job.text, num_chunks=items[0].chunks, size=(height, width))
        with model.phase(*text_roles(model.family.text_encoders)):
            cond = _encoded(model, [item.prompt for item in items], options)
            encoder.warn_of_unused([item.negative_prompt for item in items])
            if not encoder.guided:
                return dataclasses.replace(job, cond=cond)
            negative = dataclasses.replace(options, negative=True)
            texts = [item.negative_prompt for item in items]
            uncond = _encoded(model, texts[:1] if len(set(texts)) == 1 else texts, negative)
        return dataclasses.replace(job, cond=cond, uncond=uncond)

    def _batches(self, found: Group) -> Iterator[tuple[list[Item], list[ImageInputs]] | Failed]:
        """Yield items of one shape, as many as run together, with what each begins with."""
        shapes: dict[object, tuple[list[Item], list[ImageInputs]]] = {}
        alone = found.items[0].options.noise in ("diffusers", "comfy")  # which draw the noise of a batch from one seed
        for item, given in zip(found.items, found.inputs, strict=True):
            try:
                image = given.make() if isinstance(given, Later) else given
            except Exception as error:
                yield _failed(item, error)
                continue
            items, images = shapes.setdefault(image.latent_shape, ([], []))
            items.append(item)
            images.append(image)
            if alone or len(items) == self.batch_size:
                yield shapes.pop(image.latent_shape)
        yield from shapes.values()

    def _run(self, found: Group, items: Sequence[Item], images: Sequence[ImageInputs]) -> Iterator[Outcome]:
        """Denoise items together, or each alone if that fails, and begin to finish their images."""
        begun = time.perf_counter()
        try:
            job, latents = self._latents(found, items, images)
        except Exception as error:
            failed = _failed(items[0], error)
            if len(items) == 1:
                yield failed
                return
        else:
            seconds = (time.perf_counter() - begun) / len(items)
            for i, (item, image) in enumerate(zip(items, images, strict=True)):
                yield self._finish(job, latents[i : i + 1], item, image, seconds)
            return
        for item, image in zip(items, images, strict=True):  # here, where the error holds no memory any more
            yield from self._run(found, [item], [image])

    def _latents(self, found: Group, items: Sequence[Item], images: Sequence[ImageInputs]) -> tuple[Job, Tensor]:
        """Run items to their latents (B,C,h,w); return them and the job that they are of."""
        job, image = found.job, images[0]
        places = {item.number: place for place, item in enumerate(found.items)}
        rows = [places[item.number] for item in items]
        if job.cond is None:
            image = joined(images)
            job = self._with_text(dataclasses.replace(job, prompts=[item.prompt for item in items]), items, image)
            rows = list(range(len(items)))
        variations = [item.options.variation_seed or 0 for item in items]
        batch = Batch(0, rows, [item.seed for item in items], variations, [""] * len(items))
        *_, last = Runner(job).run(image, [batch])
        assert isinstance(last, tuple)
        return job, last[1]

    def _finish(
        self, job: Job, latents: Tensor, item: Item, image: ImageInputs, seconds: float
    ) -> Future[Made | Failed]:
        """Decode latents (1,C,h,w) and write the file, in other threads, while the next batch is denoised."""

        def decode() -> list[Tensor]:
            return [image.finish(pixels) for pixels in generate.decode(self.model, latents)]

        decoded = self._decoder.submit(decode)
        if self.model.offloader is not None:  # its networks take turns
            decoded.exception()

        def write() -> Made | Failed:
            begun = time.perf_counter()
            try:
                [pixels] = decoded.result()
                one = dataclasses.replace(job, prompts=[item.prompt], negative_prompt=item.negative_prompt)
                settings = {**noise_settings(job, item.options.variation_seed or 0), **image.settings}
                result = one.result(pixels, 0, item.seed, settings)
                return _made(item, one, result, settings, seconds + time.perf_counter() - begun)
            except Exception as error:
                return _failed(item, error)

        return self._writers.submit(write)


def _result(outcome: Outcome) -> Made | Failed:
    return outcome.result() if isinstance(outcome, Future) else outcome


def _failed(item: Item, error: Exception) -> Failed:
    """What becomes of an item with this error.  Raises the error if it is the machine's."""
    if "CUDA error" in str(error) and not out_of_memory(error):
        raise error
    if out_of_memory(error):
        return Failed(item.number, item.name, "out of memory", item.seed)
    return Failed(item.number, item.name, describe(error), item.seed)


def joined(images: Sequence[ImageInputs]) -> ImageInputs:
    """What some images of one shape begin with, as one batch: tensors (B,...) in place of (1,...)."""
    values = {
        name: [getattr(image, name) for image in images] for name in ("init", "deviation", "mask", "hole", "concat")
    }
    tensors: dict[str, Any] = {name: None if each[0] is None else torch.cat(each) for name, each in values.items()}
    return dataclasses.replace(images[0], **tensors)


def _encoded(model: Model, prompts: Sequence[str | None], options: PromptOptions) -> Conditioning:
    """Encode N prompts, each once and some at a time: N rows on the CPU, or one if all are the same."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    unique = list(places)
    parts = [encode_prompts(model, unique[i : i + TEXTS], options) for i in range(0, len(unique), TEXTS)]
    columns = zip(*[part[:3] for part in parts], strict=True)
    whole = [None if each[0] is None else torch.cat([part.cpu() for part in each]) for each in columns]
    cond = Conditioning(whole[0], whole[1], whole[2])
    return cond if len(unique) == 1 else cond.rows([places[prompt] for prompt in prompts], len(unique))


def _made(item: Item, job: Job, result: Result, settings: Mapping[str, object], seconds: float) -> Made:
    """The files of an image, and its line of the manifest."""
    info, file = PngInfo(), io.BytesIO()
    info.add_text("parameters", result.parameters)
    result.image.save(file, format="PNG", pnginfo=info)
    code = hashlib.sha256(result.array.tobytes()).hexdigest()
    height, width = result.pixels.shape[1:]
    about: dict[str, object] = {"id": item.name, "prompt": item.prompt, "negative_prompt": item.negative_prompt}
    about |= {"seed": item.seed, "width": width, "height": height, "init_image": next(iter(item.files), None)}
    about |= {"settings": {**job.settings, **settings}, "parameters": result.parameters, "sha256": code}
    tokenizer = job.model.tokenizer
    if tokenizer is not None and item.options.prompt_syntax == "plain":
        about["dropped"] = tokenizer.dropped(tokenizer.clean(item.prompt)) or None
    text = json.dumps(
        {name: value for name, value in about.items() if value is not None}, ensure_ascii=False, default=str
    )
    line = {"id": item.name, "row": item.number, "seed": item.seed, "sha256": code, "time": round(seconds, 4)}
    return Made(file.getvalue(), text.encode("utf-8", "backslashreplace"), line)
