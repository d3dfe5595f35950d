"""The worker that makes shards of images."""

import dataclasses
import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ldm_lite.batch.images import Made, Maker
from ldm_lite.batch.rows import Failed, Item, Rows
from ldm_lite.batch.store import COLUMNS, Shard, check_job
from ldm_lite.batch.table import Row
from ldm_lite.batch.task import Report, Task, collected
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.networks import digest
from ldm_lite.toolkit import contents, load_model, prepare, short_name, tasks_of

# Options of loading that a digest of the weights stands for, or that do not change an image.
NOT_OF_THE_JOB = ("ckpt", "vae", "unet", "text_encoder", "lora", "device", "dtype", "offload", "compile", "compiled")


class ImageWorker:
    """Makes shards of images."""

    def __init__(self, task: Task) -> None:
        """Load the model.  Raises ValueError, one line, for options that fit no row, or that are not the folder's."""
        self.task, self.store = task, task.store
        self.model = load_model(task.load)
        able = tasks_of(self.model)
        if not {"txt2img", "img2img", "inpaint"} & set(able):
            raise ValueError(
                f"{self.model.name}: {self.model.family.title} cannot be used here: take {' or '.join(able)}"
            )
        folders = [(task.folder / task.table.path).parent, task.folder]
        self.rows = Rows(self.model, task.defaults, task.options.most_pixels, folders)
        if "txt2img" in able:
            self._check_defaults()
        self.maker = Maker(self.model, task.options.batch_size)
        check_job(task.out, self._job())

    def make(self, number: int) -> Report:
        """Make a shard, unless it is there and made of the same rows."""
        rows = self.task.table.rows(number)
        first, code = number * self.task.table.size, self._digest(rows)
        if self.store.is_done(number, code):
            return Report(number, len(rows), False)
        failed = 0
        with collected() as messages, self.store.writing(number, code) as shard:
            read = self.rows.read(first, rows)
            items = [each for each in read if isinstance(each, Item)]
            unread = (each for each in read if isinstance(each, Failed))
            for outcome in chain(unread, self.maker.make(items)):
                _put(shard, outcome)
                failed += isinstance(outcome, Failed)
        return Report(number, len(rows), True, failed, tuple(messages))

    def _digest(self, rows: Sequence[Row]) -> str:
        """Digest rows, with the contents of the files that they name."""
        code = hashlib.sha256()
        for row in rows:
            code.update(repr(row).encode("utf-8", "surrogatepass"))
            for path in self.rows.files(row):
                code.update(contents(path).encode("utf-8", "surrogatepass"))
        return code.hexdigest()

    def _check_defaults(self) -> None:
        """Raises ValueError for options that would make every row fail."""
        known = {each.name for each in dataclasses.fields(Txt2imgOptions)}
        values = {each.name: getattr(self.task.defaults, each.name) for each in dataclasses.fields(self.task.defaults)}
        prepare(self.model, Txt2imgOptions("", **{name: values[name] for name in values if name in known}))

    def _job(self) -> dict[str, Any]:
        """All that the images depend on besides the rows."""
        options, model = self.task.options, self.model
        given = {
            each.name: contents(getattr(group, each.name))
            for group in (self.task.defaults, self.task.load)
            for each in dataclasses.fields(group)
            if each.name not in NOT_OF_THE_JOB and getattr(group, each.name) != each.default
        }
        shape = {name: getattr(options, name) for name in ("format", "shard_size", "batch_size", "most_pixels")}
        family = f"{model.family.title}, {model.schedule.prediction}, {model.family.scale_factor:g}"
        place = {"device": model.device.type, "dtype": short_name(model.dtype)}
        versions = {"ldm_lite": __version__, "torch": torch.__version__}
        return {**given, **shape, **place, **versions, "model": family, "weights": digest(*model.networks.values())}


def _put(shard: Shard, outcome: Made | Failed) -> None:
    """Write an image, and its line or that of a failure."""
    line = dict.fromkeys(COLUMNS) | {"shard": shard.path.name}
    if isinstance(outcome, Failed):
        about = {"id": outcome.name, "row": outcome.number, "seed": outcome.seed, "error": outcome.error}
        shard.lines.append(line | about)
        return
    shard.lines.append(line | outcome.line)
    key = f"{outcome.line['row']:09}"
    shard.add(f"{key}.png", outcome.png)
    shard.add(f"{key}.json", outcome.parameters)
