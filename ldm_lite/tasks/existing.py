"""Which images of a job a folder holds already, so that a job that was stopped can be continued.

Every image has a key, which its PNG carries: a digest of the networks' weights, the steps, all settings, the prompt,
the seed, and the contents of the files that it starts from.  Names and numbers of files do not matter.
"""

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ldm_lite.checkpoint.digest import sampled
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.files import open_file
from ldm_lite.core.job import Item
from ldm_lite.tasks.job import Part, Task
from ldm_lite.tasks.plans import guidance_of

BLOCKS, BLOCK = 64, 2**16  # bytes that are read of a large file
# Options that determine which images are made, not their content; and those that are in a key in another form.
WHICH = {"prompt", "from_file", "dynamic", "wildcards", "seed", "batch_size", "n_iter", "fixed_code", "indir"}
RESOLVED = {"sampler", "spacing", "steps", "scale", "plan", "guidance", "cond", "uncond", "noise", "refiner", "compat"}
RESOLVED |= {"init_img", "mask", "embedding"}


class Existing:
    """The keys of a task's images, and those that a folder holds."""

    def __init__(self, task: Task, in_folder: Counter[str]) -> None:
        """in_folder counts the keys in the folder."""
        self._model, self._task = task.model, task
        models = [task.model, *(value for value in vars(task.options).values() if isinstance(value, CheckpointModel))]
        self._digest = _digest(*_settings(task), *map(_weights, models))
        self._left, self.skipped = Counter(in_folder), 0

    def missing(self, part: Part) -> tuple[list[Item], dict[int, str]]:
        """Return the images of a part that the folder lacks, and their keys by number.

        Those that it holds are counted, and are not made again.
        """
        sources, items, keys = contents(part.sources) if part.sources else "", [], {}
        for item in part.items:
            prompt = item.prompt if self._model.tokenizer is not None else contents(item.prompt)
            _, variation = self._task.options.seeds_of(item.number, len(self._task.prompts))
            key = _digest(self._digest, prompt, (item.seed, variation), sources)
            if self._left[key]:
                self._left[key] -= 1
                self.skipped += 1
            else:
                items.append(item)
                keys[item.number] = key
        return items, keys


def contents(value: object) -> str:
    """Describe a value so that paths are replaced by digests of the files, also in FILE:IMAGE:WEIGHT."""
    if isinstance(value, (tuple, list)):
        return str([contents(item) for item in value])
    if not isinstance(value, (str, os.PathLike)):
        return repr(value)
    pieces = [os.fspath(value), *os.fspath(value).split(":")]
    return str([_file(piece) if os.path.isfile(piece) else piece for piece in pieces[len(pieces) > 2 :]])


def _file(path: str) -> str:
    """Digest a file: all of a small one, else its size and blocks spread over it."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        starts = range(0, size, BLOCK) if size <= BLOCKS * BLOCK else [size * i // BLOCKS for i in range(BLOCKS)]
        code = hashlib.sha256(str(size).encode())
        for start in starts:
            file.seek(start)
            code.update(file.read(BLOCK))
    return code.hexdigest()


def _settings(task: Task) -> Sequence[object]:
    options, plan, family = task.options, task.plan, task.model.family
    fields = sorted(field.name for field in dataclasses.fields(options) if field.name not in WHICH | RESOLVED)
    columns = [getattr(plan, field.name) for field in dataclasses.fields(plan)] if plan is not None else []
    steps = [column.tobytes() if isinstance(column, np.ndarray) else column for column in columns]
    guidance: object = guidance_of(task.model, options, plan, task.image_scale)
    if callable(guidance) and plan is not None:  # DDIM CFG++'s, whose steps are those of DDIM
        guidance = [guidance(step) for step in range(plan.num_steps)]
    program = options.noise if isinstance(options.noise, str) else None
    resolved = [guidance, program, task.image_scale, family.skip_layers, family.scale_factor, family.shift_factor]
    values = {name: getattr(options, name) for name in fields}
    return [{name: contents(value) for name, value in values.items()}, steps, resolved]


def _weights(model: CheckpointModel) -> str:
    """Digest the names, shapes, types and some values of all weights: a merged LoRA changes them too.

    Textual inversions count by the names that prompts have for them, and by all their vectors.
    """
    parts: list[object] = [] if model.tokenizer is None else [model.tokenizer.added]
    parts += [(width, vectors.float().cpu().numpy().tobytes()) for width, vectors in model.learned.items()]
    for role, network in model.networks.items():
        for name, value, values in sampled(network):
            parts += [role, name, value.shape, value.dtype, values]
    return _digest(*parts)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", errors="surrogatepass")).hexdigest()[:32]
