"""Make shards of images: rows with like settings and shapes run together, while earlier ones are finished.

Which rows run together depends on the shard's rows alone, so that a shard has the same bytes whenever it is made.
"""

import dataclasses
import hashlib
import io
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldm_lite.batch.rows import Failed, RowItem, TableRows, describe, group
from ldm_lite.batch.store import COLUMNS, Report, Task, check_job, collected
from ldm_lite.batch.table import TableRow
from ldm_lite.cli.declared import import_features
from ldm_lite.cli.task_options import InpaintOptions, Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.networks import digest
from ldm_lite.toolkit import (
    Batch,
    PreparedRow,
    Result,
    Sample,
    contents,
    cost_of,
    load_model,
    merge_loras,
    out_of_memory,
    prepare,
    prepare_rows,
    short_name,
    tasks_of,
)

log = logging.getLogger("ldm_lite")

PENDING = 4  # batches that may wait to be finished
TEXTS = 128  # rows whose text is encoded ahead and kept in memory: FLUX.1's takes 4 MB each
# Options of loading that a digest of the weights covers, or that do not change an image.
NOT_OF_THE_JOB = ("ckpt", "vae", "unet", "text_encoder", "lora", "device", "dtype", "offload", "compile", "compiled")


@dataclass(frozen=True)
class Made:
    """An image: its file, its parameters as JSON, and its line of the manifest, without the shard."""

    png: bytes
    parameters: bytes
    line: dict[str, Any]


Outcome = Made | Failed | Future[Made | Failed]
Prepared = tuple[RowItem, Sample]


class ImageWorker:
    """Makes shards of images."""

    def __init__(self, task: Task) -> None:
        """Load the model.  Raises ValueError, one line, for options that fit no row, or differ from the folder's."""
        self.task, self.store = task, task.store
        self.features = [task.folder / Path(file).expanduser() for file in task.options.feature]
        import_features(self.features, InpaintOptions)
        self.model = load_model(task.load)
        able = tasks_of(self.model)
        if not {"txt2img", "img2img", "inpaint"} & set(able):
            raise ValueError(
                f"{self.model.name}: {self.model.family.title} cannot be used here: use {' or '.join(able)}"
            )
        folders = [(task.folder / task.table.path).parent, task.folder]
        self.rows = TableRows(self.model, task.defaults, task.options.most_pixels, folders)
        if "txt2img" in able:  # raises ValueError for options that would make every row fail
            names = {field.name for field in dataclasses.fields(Txt2imgOptions)}
            names &= {field.name for field in dataclasses.fields(task.defaults)}
            prepare(self.model, Txt2imgOptions("", **{name: getattr(task.defaults, name) for name in names}))
        self._decoder, self._writers = ThreadPoolExecutor(1, "decode"), ThreadPoolExecutor(2, "png")
        check_job(task.place, self._job())

    def make(self, number: int) -> Report:
        """Make a shard, unless it is there and made of the same rows."""
        rows = self.task.table.rows(number)
        first, code = number * self.task.table.size, self._digest(rows)
        if self.store.is_done(number, code):
            return Report(number, len(rows), False)
        num_failed = 0
        with collected() as messages, self.store.writing(number, code) as shard:
            readings = self.rows.read(first, rows)
            items = [item for item in readings if isinstance(item, RowItem)]
            unread = (failed for failed in readings if isinstance(failed, Failed))
            for outcome in chain(unread, self._images(items)):
                line = dict.fromkeys(COLUMNS) | {"shard": shard.name} | outcome.line
                shard.lines.append(line)
                if isinstance(outcome, Made):
                    shard.add(f"{line['row']:09}.png", outcome.png)
                    shard.add(f"{line['row']:09}.json", outcome.parameters)
                else:
                    if not num_failed:
                        log.warning("row %d: %s", outcome.number, outcome.error)
                    num_failed += 1
        return Report(number, len(rows), True, num_failed, tuple(messages))

    def _digest(self, rows: Sequence[TableRow]) -> str:
        """Digest rows, with the contents of the files that they name."""
        code = hashlib.sha256()
        for row in rows:
            code.update(repr(row).encode("utf-8", "surrogatepass"))
            for path in self.rows.files(row):
                try:
                    text = contents(path)
                except OSError as error:  # then its row fails
                    text = str(error)
                code.update(text.encode("utf-8", "surrogatepass"))
        return code.hexdigest()

    def _job(self) -> dict[str, Any]:
        """All that the images depend on besides the rows."""
        options, model = self.task.options, self.model
        changed = {
            field.name: contents(getattr(options, field.name))
            for options in (self.task.defaults, self.task.load)
            for field in dataclasses.fields(options)
            if field.name not in NOT_OF_THE_JOB and getattr(options, field.name) != field.default
        }
        shape = {name: getattr(options, name) for name in ("format", "shard_size", "batch_size", "most_pixels")}
        family = f"{model.family.title}, {model.schedule.prediction}, {model.family.scale_factor:g}"
        place = {"device": model.device.type, "dtype": short_name(model.dtype)}
        versions = {"ldm_lite": __version__, "torch": torch.__version__}
        if self.features:
            changed["feature"] = contents(tuple(map(os.fspath, self.features)))
        return {**changed, **shape, **place, **versions, "model": family, "weights": digest(*model.networks.values())}

    def _images(self, items: Sequence[RowItem]) -> Iterator[Made | Failed]:
        """Yield the images of items, or why there is none, in an order that depends on the items alone.

        Raises errors that are no item's fault, such as an error of the GPU, after which nothing works.
        """
        waiting: deque[Outcome] = deque()
        try:
            for outcome in self._begun(items):
                waiting.append(outcome)
                while len(waiting) > PENDING * self.task.options.batch_size:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            for outcome in waiting:
                if isinstance(outcome, Future):
                    outcome.cancel()

    def _begun(self, items: Sequence[RowItem]) -> Iterator[Outcome]:
        """Denoise the items, and yield their images while these are finished; the text of many is encoded at once."""
        size = self.task.options.batch_size
        for similar in group(items):
            most = size if cost_of(similar[0].options).passes else max(1, TEXTS // size) * size
            try:
                undo = merge_loras(self.model, similar[0].loras) if similar[0].loras else lambda: None
            except Exception as error:
                yield from (_failed(item, error) for item in similar)
                continue
            try:
                for part in (similar[first : first + most] for first in range(0, len(similar), most)):
                    for prepared in self._groups(part):
                        for batch in [prepared] if isinstance(prepared, Failed) else self._batches(prepared):
                            yield from [batch] if isinstance(batch, Failed) else self._run(batch)
            finally:
                undo()

    def _groups(self, items: Sequence[RowItem]) -> Iterator[Iterator[Prepared] | Failed]:
        """Prepare items together, and yield them with their samples; one by one if that fails for all together."""
        try:
            if cost_of(items[0].options).passes:  # a second pass has other texts
                samples = iter([sample for item in items for sample in prepare(self.model, item.complete_options)])
            else:
                rows = [PreparedRow(item.prompt, item.negative_prompt, item.seed, item.files) for item in items]
                samples = prepare_rows(self.model, items[0].options, rows)
        except Exception as error:
            failed = _failed(items[0], error)
            if len(items) == 1:
                yield failed
            else:
                for item in items:
                    yield from self._groups([item])
        else:
            yield zip(items, samples, strict=True)

    def _batches(self, prepared: Iterator[Prepared]) -> Iterator[list[Prepared] | Failed]:
        """Yield items of one size, as many as run together, with their samples."""
        sizes: dict[tuple[int, int], list[Prepared]] = {}
        for item, sample in prepared:
            try:
                size = sample.size
            except Exception as error:
                yield _failed(item, error)
                continue
            batch = sizes.setdefault(size, [])
            batch.append((item, sample))
            alone = item.options.noise in ("diffusers", "comfy")  # these draw the noise of a batch from one seed
            if alone or len(batch) == self.task.options.batch_size:
                yield sizes.pop(size)
        yield from sizes.values()

    def _run(self, prepared: Sequence[Prepared], before: float = 0.0) -> Iterator[Outcome]:
        """Denoise items together, or each alone if that fails, and begin to finish their images, or their second pass.

        before: seconds that a first pass took for each.
        """
        begun = time.perf_counter()
        try:
            batch = Batch([sample for _, sample in prepared])
            for _ in batch:
                pass
            rows = [batch.latents[i : i + 1] for i in range(len(prepared))]
            second = [sample.second_pass(latents) for (_, sample), latents in zip(prepared, rows, strict=True)]
        except Exception as error:
            failed = _failed(prepared[0][0], error)
            if len(prepared) == 1:
                yield failed
                return
        else:
            seconds = before + (time.perf_counter() - begun) / len(prepared)
            following = [(item, sample) for (item, _), sample in zip(prepared, second, strict=True) if sample]
            if following:  # all of them: they have the same options
                yield from self._run(following, seconds)
            else:
                for (item, sample), latents in zip(prepared, rows, strict=True):
                    yield self._finish(item, sample, latents, seconds)
            return
        for item_and_sample in prepared:  # here, where the error holds no memory any more
            yield from self._run([item_and_sample], before)

    def _finish(self, item: RowItem, sample: Sample, latents: Tensor, seconds: float) -> Future[Made | Failed]:
        """Decode latents (1,C,h,w) and write the file, in other threads, while the next batch is denoised."""
        finished = self._decoder.submit(sample.finish, latents)
        if self.model.offloader is not None:  # its networks take turns
            finished.exception()

        def write() -> Made | Failed:
            begun = time.perf_counter()
            try:
                result = finished.result()
                return self._made(item, sample, result, seconds + time.perf_counter() - begun)
            except Exception as error:
                return _failed(item, error)

        return self._writers.submit(write)

    def _made(self, item: RowItem, sample: Sample, result: Result, seconds: float) -> Made:
        """The files of an image, and its line of the manifest."""
        file = io.BytesIO()
        result.image.save(file, "PNG")
        code = hashlib.sha256(result.array.tobytes()).hexdigest()
        height, width = result.pixels.shape[1:]
        about: dict[str, object] = {"id": item.name, "prompt": item.prompt, "negative_prompt": item.negative_prompt}
        about |= {"seed": item.seed, "width": width, "height": height, "init_image": next(iter(item.files), None)}
        about |= {
            "lora": item.loras or None,
            "settings": sample.settings,
            "parameters": result.parameters,
            "sha256": code,
        }
        tokenizer = self.model.tokenizer
        if tokenizer is not None and item.options.prompt_syntax == "plain":
            about["dropped"] = tokenizer.dropped(tokenizer.clean(item.prompt)) or None
        text = json.dumps(
            {name: value for name, value in about.items() if value is not None}, ensure_ascii=False, default=str
        )
        line = {"id": item.name, "row": item.number, "seed": item.seed, "sha256": code, "time": round(seconds, 4)}
        return Made(file.getvalue(), text.encode("utf-8", "backslashreplace"), line)


def _result(outcome: Outcome) -> Made | Failed:
    return outcome.result() if isinstance(outcome, Future) else outcome


def _failed(item: RowItem, error: Exception) -> Failed:
    """The result of an item that fails with this error.  Raises the error if the machine is at fault."""
    if "CUDA error" in str(error) and not out_of_memory(error):
        raise error
    if out_of_memory(error):
        return Failed(item.number, item.name, "out of memory", item.seed)
    return Failed(item.number, item.name, describe(error), item.seed)
