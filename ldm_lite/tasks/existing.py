"""Which images of a job a folder holds already, so that a job that was stopped can be continued.

Every image has a key, which its PNG carries: a digest of the networks' weights, the steps, all settings, the prompt,
the seed, and the contents of the files that it starts from.  Names and numbers of files do not matter.
"""

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ldm_lite.checkpoint.digest import sampled
from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.files import open_file
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.tasks.job import Job

BLOCKS, BLOCK = 64, 2**16  # what is read of a large file
# Options that are part of a key in another form, or of none: they say which images there are, not what is in one.
OTHERS = (
    *(
        "prompt",
        "from_file",
        "dynamic",
        "wildcards",
        "seed",
        "batch_size",
        "n_iter",
        "fixed_code",
        "init_img",
        "mask",
        "indir",
    ),
    *("sampler", "spacing", "steps", "scale", "plan", "guidance", "cond", "uncond", "noise", "refiner", "compat"),
)


class Existing:
    """The keys of a job's images, and those that a folder holds."""

    def __init__(self, job: Job, options: Txt2imgOptions, found: Counter[str]) -> None:
        """found counts the keys in the folder."""
        self._text = job.model.tokenizer is not None
        self._job = _digest(*_settings(job, options), *(_weights(each) for each in _models(job)))
        self._left, self.skipped = Counter(found), 0

    def key(self, prompt: str, seeds: tuple[int, int], sources: str) -> str:
        """Return the key of an image by its seed and variation seed; `sources` is `contents` of what it starts from."""
        return _digest(self._job, prompt if self._text else contents(prompt), seeds, sources)

    def take(self, key: str) -> bool:
        """Whether the folder holds one more image with this key: it is then not made again."""
        if not self._left[key]:
            return False
        self._left[key] -= 1
        self.skipped += 1
        return True


def contents(value: Any) -> str:
    """Describe a value so that paths are replaced by digests of the files, also in FILE:IMAGE:WEIGHT."""
    if isinstance(value, (tuple, list)):
        return str([contents(each) for each in value])
    if not isinstance(value, (str, os.PathLike)):
        return repr(value)
    pieces = [os.fspath(value), *os.fspath(value).split(":")]
    return str([_file(piece) if os.path.isfile(piece) else piece for piece in pieces[len(pieces) > 2 :]])


def _file(path: str) -> str:
    """Digest a file: all of a small one, else its size and blocks from everywhere."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        starts = range(0, size, BLOCK) if size <= BLOCKS * BLOCK else [size * i // BLOCKS for i in range(BLOCKS)]
        code = hashlib.sha256(str(size).encode())
        for start in starts:
            file.seek(start)
            code.update(file.read(BLOCK))
    return code.hexdigest()


def _settings(job: Job, options: Txt2imgOptions) -> Sequence[object]:
    fields = [each.name for each in dataclasses.fields(options) if each.name not in OTHERS]
    plan = job.plan and [getattr(job.plan, each.name) for each in dataclasses.fields(job.plan)]
    steps = [each.tobytes() if isinstance(each, np.ndarray) else each for each in plan or ()]
    family, refiner = job.model.family, job.refiner and job.refiner[1]
    resolved = [job.guidance, job.image_scale, job.start, refiner, job.skip, family.scale_factor, family.shift_factor]
    return [{name: contents(getattr(options, name)) for name in fields}, steps, resolved]


def _models(job: Job) -> list[Model]:
    return [job.model] if job.refiner is None else [job.model, job.refiner[0]]


def _weights(model: Model) -> str:
    """Digest the names, shapes, types and some values of all weights: a merged LoRA changes them too."""
    parts: list[object] = []
    for role, network in model.networks.items():
        for name, value, values in sampled(network):
            parts += [role, name, value.shape, value.dtype, values]
    return _digest(*parts)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", errors="surrogatepass")).hexdigest()[:32]
