"""Where noise comes from: our own generators, the original scripts', other programs', and Brownian motions.

Shape letters: B images, C channels, h, w sides of the latents.  All noise is drawn on the CPU, as float32 of unit
variance, so an image does not depend on the device.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldm_lite.core.denoise import Draw as Draw
from ldm_lite.diffusion.plan import TimedPlan

Shape = tuple[int, int, int]  # (C,h,w)

# ---- generators -----------------------------------------------------------------------------------------------------


class SharedNoise:
    """The original scripts' noise: one generator on the device, shared by all images in call order."""

    def __init__(self, generator: torch.Generator, batch: int, shape: Shape) -> None:
        self.generator, self.size = generator, (batch, *shape)

    def __call__(self) -> Tensor:
        """Return the next noise, float32 on the generator's device."""
        return torch.randn(self.size, generator=self.generator, dtype=torch.float, device=self.generator.device)


class CudaNoise:
    """The numbers of torch.randn on a CUDA device, computed on the CPU, for each of B seeds.

    Exact up to about 150,000 numbers a draw, the threads of the smallest GPU in use: above, each thread draws
    several.
    """

    def __init__(self, seeds: Sequence[int], shape: tuple[int, ...]) -> None:
        self.seeds, self.shape, self.calls = seeds, shape, 0

    def __call__(self) -> Tensor:
        """Return the next noise, float32 on the CPU."""
        count = math.prod(self.shape)
        noise = [torch.from_numpy(cuda_normal(seed, self.calls, count)).view(self.shape) for seed in self.seeds]
        self.calls += 1
        return torch.stack(noise)


def cuda_normal(seed: int, call: int, count: int) -> NDArray[np.float32]:
    """Return the `count` normal numbers of a CUDA generator's call-th draw (from 0), one for each thread.

    Philox4x32-10 of Salmon et al. 2011, with the thread in the counter's upper half and the call in its lower; then
    Box and Muller's transform as in cuRAND, which takes the sine for a thread's first number.
    """
    counter = np.zeros((4, count), np.uint64)
    counter[0], counter[2] = call, np.arange(count)
    key, low = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint64), np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        upper, lower = (second >> np.uint64(32), first >> np.uint64(32)), (second & low, first & low)
        counter = np.stack([upper[0] ^ counter[1] ^ key[0], lower[0], upper[1] ^ counter[3] ^ key[1], lower[1]])
        key = key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64) & low
    radius, angle = (counter[:2].astype(np.float64) + 0.5) * 2.0**-32
    return (np.sqrt(-2 * np.log(radius)) * np.sin(2 * np.pi * angle)).astype(np.float32)


# ---- a Brownian motion over sigma -----------------------------------------------------------------------------------
# Noise that does not depend on the steps, so more steps come nearer to the same image.  The motion is torchsde's
# BrownianTree of the same seed, from which k-diffusion, AUTOMATIC1111's web UI and ComfyUI draw the noise of stochastic
# DPM-Solver++.

DIGITS, POOL = 6, 24  # times are rounded to 1e-6; size of numpy's entropy pool: torchsde's BrownianTree
REMEMBERED = 64  # normal tensors kept for the next query, which shares most of its way down the tree

Normal = Callable[[int], Tensor]  # seed -> unit noise of one motion


@dataclass(frozen=True)
class Node:
    """A part of the tree: a time interval, its place, and by how much the motion changes in it."""

    start: float
    end: float
    key: int  # numbers the nodes of a depth from the left
    depth: int
    change: Tensor


class BrownianTree:
    """A Brownian motion from time `start` to `end`, found by halving the interval; its values follow from a seed."""

    def __init__(self, start: float, end: float, seed: int, normal: Normal) -> None:
        self.seed, self._normal = seed, functools.lru_cache(REMEMBERED)(normal)
        first = int(np.random.SeedSequence(seed, pool_size=POOL).generate_state(3)[0])
        change = normal(first) * math.sqrt(end - start)
        self._root = Node(round(start, DIGITS), round(end, DIGITS), 0, 0, change)

    def __call__(self, start: float, end: float) -> Tensor:
        """Return the change of the motion from `start` to `end` > start, clamped to the motion's own times."""
        low, high = (min(max(round(t, DIGITS), self._root.start), self._root.end) for t in (start, end))
        if low >= high:
            return torch.zeros_like(self._root.change)
        return functools.reduce(torch.add, self._within(self._root, low, high))

    def _within(self, node: Node, start: float, end: float) -> list[Tensor]:
        """The changes of the largest nodes that make up a part of a node, in order."""
        if (start, end) == (node.start, node.end):
            return [node.change]
        left, right = self._halves(node)
        parts = [] if start >= left.end else self._within(left, start, min(end, left.end))
        return parts if end <= left.end else [*parts, *self._within(right, max(start, left.end), end)]

    def _halves(self, node: Node) -> tuple[Node, Node]:
        """Split a node: the left half's change is normal, given the whole one's."""
        middle = round(0.5 * (node.end + node.start), DIGITS)
        place = np.random.SeedSequence(self.seed, spawn_key=(node.key, node.depth), pool_size=POOL)
        before, after, per_time = middle - node.start, node.end - middle, 1 / (node.end - node.start)
        noise = self._normal(int(place.generate_state(4)[0]))
        left = before * node.change * per_time + math.sqrt(before * after * per_time) * noise
        depth = node.depth + 1
        return (
            Node(node.start, middle, 2 * node.key, depth, left),
            Node(middle, node.end, 2 * node.key + 1, depth, node.change - left),
        )


class BrownianNoise:
    """The noise (B,C,h,w) of a plan's rows that draw some, in order: between their sigma and the next one's.

    Every motion has its own seed, and starts at the plan's least sigma above 0.  k-diffusion, BrownianTreeNoiseSampler.
    """

    def __init__(self, seeds: Sequence[int], normal: Normal, plan: TimedPlan) -> None:
        times = plan.times
        self._spans = [(float(times[i + 1]), float(times[i])) for i in range(len(plan.t)) if plan.adds_noise[i]]
        self._trees = [BrownianTree(*plan.motion, seed, normal) for seed in seeds]
        self._calls = 0

    def __call__(self) -> Tensor:
        """Return the next noise, float32 on the CPU, of unit variance."""
        low, high = self._spans[self._calls]
        self._calls += 1
        return -torch.stack([tree(low, high) for tree in self._trees]) / math.sqrt(high - low)


PROGRAMS = {  # -> its name in a picture's text: AUTOMATIC1111's for its own sources
    "own": "CPU",
    "a1111": "NV",
    "diffusers": "diffusers",
    "comfy": "comfy",
}


def is_brownian(sampler: str) -> bool:
    """Whether other programs draw a sampler's noise from a Brownian tree: those of stochastic DPM-Solver++."""
    return sampler.startswith("dpmpp") and "sde" in sampler


def first_then(first: Draw, later: Draw, count: int = 1) -> Draw:
    """Return a source that draws `count` times from one source, then from another."""
    sources = itertools.chain(itertools.repeat(first, count), itertools.repeat(later))
    return lambda: next(sources)()


def slerp(a: Tensor, b: Tensor, fraction: float) -> Tensor:
    """Return noise on the great circle from a (fraction 0) to b (fraction 1), both (B,C,h,w).

    As in AUTOMATIC1111's web UI, the columns, of h numbers, are interpolated.  Noise that is nearly the same is
    mixed linearly.
    """
    mixed = []
    for start, end in zip(a, b, strict=True):
        lengths = start.norm(dim=1, keepdim=True) * end.norm(dim=1, keepdim=True)
        cosine = (start * end).sum(1, keepdim=True) / lengths
        angle = cosine.clamp(-1, 1).acos()
        if cosine.mean() > 0.9995:
            mixed.append((1 - fraction) * start + fraction * end)
        else:
            of_start, of_end = torch.sin((1 - fraction) * angle), torch.sin(fraction * angle)
            mixed.append((of_start * start + of_end * end) / angle.sin())
    return torch.stack(mixed)
