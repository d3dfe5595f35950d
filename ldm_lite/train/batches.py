"""The batches of a run: the examples of each step, and the random numbers of each example.

Both depend only on the run's seed and on the example's number, counted over the whole run and all processes.  So they
stay the same however a step is divided into processes and batches, and a run can be resumed at any step.
"""

import atexit
import contextlib
import functools
import hashlib
import logging
import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data as torch_data

from ldm_lite.cli.signals import ignore_signals, uninterrupted
from ldm_lite.core.denoise import to_device
from ldm_lite.train.data import Buckets, Dataset, Example

log = logging.getLogger("ldm_lite")
T = TypeVar("T")

TENSORS = ("pixels", "context", "y", "sizes", "mask", "hint")  # of an example
BLOCK = 1000  # batches whose buckets are drawn together
PRIOR = 2**40  # the first number of the class images: their noise is another
MIXED = 16  # shards whose examples are shuffled together: memory and open files do not grow with the number of shards


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of one size."""

    pixels: Tensor  # (B,3,H,W) uint8; or moments (B,2C,h,w) of the latents, encoded beforehand
    captions: list[str]
    context: Tensor | None  # (B,T,D): the captions, encoded beforehand
    numbers: tuple[int, ...]  # of the examples, counted from the beginning of the run
    y: Tensor | None = None  # (B,V)
    sizes: Tensor | None = None  # (B,6) int32, as Example has them
    mask: Tensor | None = None  # (B,1,H,W) or (B,1,h,w) uint8
    hint: Tensor | None = None  # (B,3,H,W) uint8
    prior: "Batch | None" = None  # images of the class, for prior preservation

    @classmethod
    def of(cls, examples: Sequence[Example], numbers: Sequence[int]) -> "Batch":
        """Join examples."""
        tensors = {name: [getattr(example, name) for example in examples] for name in TENSORS}
        with torch.autocast("cpu", enabled=False):  # which cannot join float16, in which latents are stored
            joined = {name: None if values[0] is None else torch.stack(values) for name, values in tensors.items()}
        return cls(captions=[example.caption for example in examples], numbers=tuple(numbers), **joined)  # type: ignore[arg-type]


# SplitMix64, which hashes a counter: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", as
# signed 64-bit numbers, whose products wrap around.
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
MIXERS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)


def seed_of(seed: int, purpose: str) -> int:
    """Return the seed in [0,2^63) of a run's draws for one purpose, independent of all other draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8]) >> 1


class Draws:
    """Random numbers for the examples of a batch; those of an example depend on its number and the seed.

    Those of one purpose do not depend on other draws.  They are computed where they are needed, for all examples
    at once: on a GPU, a generator for each example on the CPU would take longer than a training step of a small
    network.  (torch's generators are one for all examples.)
    """

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        """Seed and numbers are 0 or more."""
        self.seed, self._numbers = seed, torch.tensor(numbers, dtype=torch.int64)

    def normal(self, purpose: str, shape: Sequence[int] = (), device: torch.device | str = "cpu") -> Tensor:
        """Return normal numbers (B,*shape) float32 on a device.  Box and Muller 1958."""
        bits = bits_of(to_device(self.keys(purpose), torch.device(device)), math.prod(shape))
        radius = (-2 * fraction(bits >> 32).log()).sqrt()
        return (radius * (2 * math.pi * fraction(bits)).cos()).view(-1, *shape)

    def uniform(self, purpose: str) -> Tensor:
        """Return numbers (B,) float32 in [0,1), on the CPU."""
        return self.integers(purpose, 2**24).float() / 2**24

    def integers(self, purpose: str, end: int) -> Tensor:
        """Return whole numbers (B,) in [0,end), on the CPU; end is far below 2^63."""
        return (bits_of(self.keys(purpose), 1)[:, 0] & (2**63 - 1)) % end

    def keys(self, purpose: str) -> Tensor:
        """Return the keys of examples' random numbers: (B,) int64, on the CPU."""
        return _hashed(_hashed(torch.tensor(seed_of(self.seed, purpose))) + self._numbers)


def bits_of(keys: Tensor, count: int) -> Tensor:
    """Return random integers (B,count) int64 of examples, by their keys (B,)."""
    counters = torch.arange(count, device=keys.device) + 1  # the hash of 0 is 0
    return _hashed(keys[:, None] + GOLDEN_RATIO * counters)


def _hashed(x: Tensor) -> Tensor:
    for shift, factor in MIXERS:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # >> repeats the sign
    return x


def fraction(bits: Tensor) -> Tensor:
    """Return the lower 32 bits as numbers in (0,1]."""
    return ((bits & (2**32 - 1)) + 1).float() / 2**32


class Order:
    """Which example of a dataset is the run's i-th: shuffled epochs of a finite dataset, or always a new scene.

    In each epoch the shards are shuffled, and then the examples of every MIXED of them in a row.
    """

    def __init__(self, dataset: Dataset, seed: int, *key: int) -> None:
        """key distinguishes several orders of one seed."""
        self.seed, self.key = seed, (seed, *key)
        self.ends = None if dataset.shards is None else np.cumsum(dataset.shards)
        self._epoch: tuple[int, NDArray[np.int64], NDArray[np.int64]] = (-1, np.zeros(0, int), np.zeros(0, int))
        self._group: tuple[tuple[int, int], NDArray[np.int64]] = ((-1, -1), np.zeros(0, int))

    def __getitem__(self, number: int) -> int:
        """Return the dataset's index of an example of the run."""
        if self.ends is None:
            return self.seed * 2**32 + number
        epoch, position = divmod(number, int(self.ends[-1]))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, *self._shuffled_shards(epoch))
        _, shards, group_ends = self._epoch
        group = int(np.searchsorted(group_ends, position, side="right"))
        if self._group[0] != (epoch, group):
            mixed = shards[group * MIXED : (group + 1) * MIXED]
            starts = np.concatenate([[0], self.ends])
            examples = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in mixed])
            self._group = ((epoch, group), np.random.default_rng([0, *self.key, epoch, group]).permutation(examples))
        return int(self._group[1][position - (group_ends[group - 1] if group else 0)])

    def _shuffled_shards(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards in the order of an epoch, and the end of each group of MIXED shards."""
        assert self.ends is not None
        shards = np.random.default_rng([2, *self.key, epoch]).permutation(len(self.ends))
        ends = np.cumsum(np.diff(self.ends, prepend=0)[shards])
        return shards, ends[[*range(MIXED - 1, len(ends) - 1, MIXED), len(ends) - 1]]


class BucketOrder:
    """Which example of buckets is the run's i-th, so that every batch is of one bucket.

    Each batch is of a random bucket, chosen in proportion to their sizes; the examples of a bucket come in epochs.
    """

    def __init__(self, dataset: Buckets, seed: int, batch: int) -> None:
        self.seed, self.batch = seed, batch
        self.counts, self.firsts = np.array(dataset.counts), dataset.ends - np.array(dataset.counts)
        self._orders = [Order(part, seed, bucket) for bucket, part in enumerate(dataset.parts)]
        self._starts = [np.zeros(len(self.counts), int)]  # by block of batches: how many each bucket had before
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, int))

    def _chosen(self, block: int) -> NDArray[np.int64]:
        """Return the buckets of a block of batches."""
        fractions = self.counts / self.counts.sum()
        return np.random.default_rng([3, self.seed, block]).choice(len(fractions), BLOCK, p=fractions)

    def __getitem__(self, number: int) -> int:
        """Return the dataset's index of an example of the run."""
        (block, at), place = divmod(number // self.batch, BLOCK), number % self.batch
        while len(self._starts) <= block:
            chosen = self._chosen(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + np.bincount(chosen, minlength=len(self.counts)))
        if self._block[0] != block:
            self._block = (block, self._chosen(block))
        bucket = int(self._block[1][at])
        before = self._starts[block][bucket] + int((self._block[1][:at] == bucket).sum())
        return int(self.firsts[bucket]) + self._orders[bucket][before * self.batch + place]


@dataclass(frozen=True)
class Slice:
    """Which batches a process takes: `rows` of each `batch_size` examples, from batch `first` to before batch `end`."""

    batch: int
    rows: range
    first: int
    end: int


def batches(dataset: Dataset, seed: int, part: Slice, workers: int, prior: Dataset | None = None) -> Generator[Batch]:
    """Yield the batches of a process, prefetched by worker processes, with as many images of `prior`.

    Raises the errors of `example`.
    """
    sources = [
        (source, BucketOrder(source, seed, part.batch) if isinstance(source, Buckets) else Order(source, seed))
        for source in (dataset, prior)
        if source is not None
    ]
    loader = torch_data.DataLoader(
        _Caught(functools.partial(_read_batch, sources, part)),
        batch_size=None,
        sampler=range(part.first, part.end),
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),
    )
    yield from map(_reraised, _started(loader))


def _read_batch(sources: Sequence[tuple[Dataset, Order | BucketOrder]], part: Slice, index: int) -> Batch:
    """Read a process's part of a batch of the run."""
    numbers = [index * part.batch + i for i in part.rows]
    batch, *prior = (
        Batch.of([dataset.example(order[number]) for number in numbers], [first + number for number in numbers])
        for (dataset, order), first in zip(sources, (0, PRIOR), strict=False)
    )
    return replace(batch, prior=prior[0]) if prior else batch


def in_order(
    dataset: Dataset, parts: Sequence[range], workers: int, left_out: dict[int, str] | None = None
) -> Generator[Batch | None]:
    """Yield the examples of a finite dataset in batches, one for each of some ranges.

    With left_out, which gets their errors by index, broken ones are named and left out, and a batch with only
    broken ones is None; without it, the errors of `example` are raised.
    """
    loader = torch_data.DataLoader(
        _Caught(functools.partial(_read_part, dataset, left_out is not None)),
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # or it draws its workers' seeds from torch's global one
    )
    for batch, errors in map(_reraised, _started(loader)):
        for number, error in errors.items():
            assert left_out is not None
            left_out[number] = error
            log.warning("left out: %s", error)
        yield batch


def _read_part(dataset: Dataset, leaves_out: bool, part: range) -> tuple[Batch | None, dict[int, str]]:
    """Read a batch, joined here in the worker: to send it is quicker than its examples one by one."""
    examples, errors = dict[int, Example](), dict[int, str]()
    for number in part:
        try:
            examples[number] = dataset.example(number)
        except ValueError as error:
            if not leaves_out:
                raise
            errors[number] = str(error)
    return Batch.of([*examples.values()], [*examples]) if examples else None, errors


def divided_into(examples: range, size: int) -> list[range]:
    """Divide examples into parts of a size; the last may be smaller."""
    return [examples[start : start + size] for start in range(0, len(examples), size)]


class _Caught(torch_data.Dataset[Any]):
    """A function's results, for torch's DataLoader; errors of bad files are values, or a worker would print them."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __getitem__(self, index: int) -> Any:
        try:
            return self.read(index)
        except (ValueError, OSError) as error:
            return error


def _reraised(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value


_WORKERS = weakref.WeakSet[multiprocessing.Process]()


def _started(loader: torch_data.DataLoader[Any]) -> Iterator[Any]:
    """Start the workers of a loader, and return what they read."""
    with uninterrupted():  # an exception from a signal would be ignored while processes start
        read = iter(loader)
        _WORKERS.update(getattr(read, "_workers", ()))
    return read


@atexit.register  # before multiprocessing ends them by SIGTERM, which they ignore, and waits for ever
def _end_workers() -> None:
    if hasattr(signal, "SIGCHLD") and _WORKERS:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler calls their end an error
    for process in _WORKERS:
        process.kill()


@contextlib.contextmanager
def reported_workers() -> Iterator[None]:
    """Turn torch's error for a worker that died, which comes at any place, into a ChildProcessError of one line."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ChildProcessError(
            "a process that reads images was ended from outside, usually because memory ran out: use fewer "
            "`data_workers`, or a smaller `batch_size`; the state of the last save is kept, `resume=True` continues"
        ) from error
