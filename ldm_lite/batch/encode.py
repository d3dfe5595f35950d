"""Encode captioned images for training: the moments of their latents and the embeddings of their captions.

Shard K is the folder K of .npy files, which training maps into memory; train/encoded.py says what is in them.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldm_lite.batch.rows import describe
from ldm_lite.batch.store import JOB, Report, Store, Task, check_job, collected
from ldm_lite.batch.table import Table
from ldm_lite.cli.files import read_json
from ldm_lite.networks import digest, encode_captions, encode_moments
from ldm_lite.toolkit import contents, load_model, short_name
from ldm_lite.train.data import Example, ImageFolder, TarShards, open_data, to_float
from ldm_lite.train.encoded import ShardRow, encoder_digest, rows, write_index, write_shard

log = logging.getLogger("ldm_lite")

TARS = "tars.json"  # how many images each tar file holds


class EncodeWorker:
    """Makes shards of encoded images."""

    def __init__(self, task: Task) -> None:
        """Load the model.  Raises ValueError, one line, if the images cannot be opened, or belong to another job."""
        self.task, self.store, options = task, task.store, task.options
        # Training is in float32 and compares the weights: of the same type by default.
        self.model = model = load_model(replace(task.load, dtype=task.load.dtype or "fp32"))
        self.data = open_data(task.folder / task.table.path, model.family.resolution, task.place.path / TARS)
        texts = model.text_encoders
        job = {
            "shard": options.shard_size,
            "batch_size": options.batch_size,
            "device": model.device.type,
            "dtype": short_name(model.dtype),
            "resolution": model.family.resolution,
            "scale_factor": model.family.scale_factor,
            "vae": encoder_digest(model.vae),
            "text_encoder": digest(*texts) if texts else None,
        }
        check_job(task.place, job)
        self._readers = ThreadPoolExecutor(4)
        if "empty" not in task.place.names():
            with task.place.new("empty") as part:
                part.mkdir()
                write_shard(part, rows([""], self._text([""])), 1)

    def make(self, number: int) -> Report:
        """Make a shard, unless it is there and made of the same images.  A broken image is left out of it."""
        size = self.task.table.size
        indices = range(number * size, min((number + 1) * size, self.task.table.count))
        code = self._digest(indices)
        if self.store.is_done(number, code):
            return Report(number, len(indices), False)
        with collected() as messages, self.store.writing(number, code) as shard:
            write_shard(shard.part, self._rows(indices, shard.lines), len(indices))
        return Report(number, len(indices), True, len(shard.lines), tuple(messages))

    def _rows(self, indices: Sequence[int], failed: list[Mapping[str, Any]]) -> Iterator[ShardRow]:
        """Encode examples batch by batch, while the next images are read; say which have failed, and why."""
        size = self.task.options.batch_size
        groups = [indices[first : first + size] for first in range(0, len(indices), size)]
        ahead = [(index, self._readers.submit(self.data.example, index)) for index in groups[0]]
        for following in (*groups[1:], ()):
            now, examples = ahead, list[Example]()
            ahead = [(index, self._readers.submit(self.data.example, index)) for index in following]
            for index, future in now:
                try:
                    examples.append(future.result())
                except ValueError as error:  # of its content; a file system that fails ends the command
                    failed.append({"row": index, "error": describe(error)})
                    log.warning("left out: %s", describe(error))
            if not examples:
                continue
            pixels = torch.stack([example.pixels for example in examples])
            moments = encode_moments(self.model, to_float(pixels, self.model.device)).half().cpu()
            captions = [example.caption for example in examples]
            yield from rows(captions, {"moments": moments, **self._text(captions)})

    def _text(self, captions: Sequence[str]) -> dict[str, Tensor]:
        types = {"context": torch.float16, "y": torch.float32}
        text = encode_captions(self.model, captions)
        # Transformers trained in bfloat16 exceed float16 in few channels.
        most = {name: torch.finfo(kind).max for name, kind in types.items()}
        return {name: value.to(types[name]).clamp(-most[name], most[name]).cpu() for name, value in text.items()}

    def _digest(self, indices: Sequence[int]) -> str:
        """Digest images and captions, by the files' contents."""
        if isinstance(self.data, ImageFolder):
            about = [(contents(path), caption) for path, caption in (self.data.items[index] for index in indices)]
            return hashlib.sha256(repr(about).encode()).hexdigest()
        assert isinstance(self.data, TarShards)
        code = hashlib.sha256()
        for index in indices:
            for content in self.data.content(index)[1:3]:
                code.update(hashlib.sha256(content).digest())
        return code.hexdigest()


def count(path: Path, out: Path) -> int:
    """Return the number of images for a job in a folder.  Raises as the worker does."""
    return sum(open_data(path, 8, out / TARS).shards or ())


def finish(store: Store, table: Table) -> None:
    """Write the index of whole shards.  Raises ValueError if no image could be encoded."""
    job = read_json(store.place.path / JOB)
    about = {name: job[name] for name in ("resolution", "scale_factor", "vae", "text_encoder")}
    sizes = (min(table.size, table.count - number * table.size) for number in range(table.shards))
    counts = [size - len(store.lines(number)) for number, size in enumerate(sizes)]
    if not any(counts):
        raise ValueError(f"{table.path}: none of its images can be encoded: {store.lines(0)[0]['error']}")
    write_index(store.place.path, counts, job["shard"], about)
