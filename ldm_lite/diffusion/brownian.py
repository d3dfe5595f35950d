"""Noise of samplers from a Brownian motion over sigma, so that it does not depend on the steps.

More steps then come nearer to the same image.  The motion is that of torchsde's BrownianTree for the same seed, with
which k-diffusion, AUTOMATIC1111's web UI and ComfyUI draw the noise of stochastic DPM-Solver++.

Shape letters: B images, C channels, h, w sides of the latents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ldm_lite.diffusion.plan import Plan

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
        self.seed, self._normal = seed, lru_cache(REMEMBERED)(normal)
        first = int(np.random.SeedSequence(seed, pool_size=POOL).generate_state(3)[0])
        change = normal(first) * math.sqrt(end - start)
        self._root = Node(round(start, DIGITS), round(end, DIGITS), 0, 0, change)

    def __call__(self, start: float, end: float) -> Tensor:
        """Return the change of the motion from `start` to `end` > start, times outside it being its ends."""
        low, high = (min(max(round(t, DIGITS), self._root.start), self._root.end) for t in (start, end))
        if low >= high:
            return torch.zeros_like(self._root.change)
        first, *more = self._within(self._root, low, high)
        for each in more:
            first = first + each
        return first

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
        before, after, share = middle - node.start, node.end - middle, 1 / (node.end - node.start)
        noise = self._normal(int(place.generate_state(4)[0]))
        left = before * node.change * share + math.sqrt(before * after * share) * noise
        depth = node.depth + 1
        return (
            Node(node.start, middle, 2 * node.key, depth, left),
            Node(middle, node.end, 2 * node.key + 1, depth, node.change - left),
        )


class BrownianNoise:
    """The noise (B,C,h,w) of a plan's rows that draw some, in order: between their sigma and the next one's.

    Every motion has its own seed, and starts at the plan's least sigma above 0.  k-diffusion, BrownianTreeNoiseSampler.
    """

    def __init__(self, seeds: Sequence[int], normal: Normal, plan: Plan) -> None:
        a, s = np.vstack([plan.level, [plan.end.a, plan.end.s]]).T
        sigmas = np.divide(s, a, out=np.full_like(s, np.inf), where=a > 0).astype(np.float32)  # theirs are float32
        self._spans = [(float(sigmas[i + 1]), float(sigmas[i])) for i in range(len(plan.t)) if plan.adds_noise[i]]
        used = [float(sigma) for sigma in sigmas if 0 < sigma < np.inf]
        self._trees = [BrownianTree(min(used), max(used), seed, normal) for seed in seeds]
        self._calls = 0

    def __call__(self) -> Tensor:
        """Return the next noise, float32 on the CPU, of unit variance."""
        low, high = self._spans[self._calls]
        self._calls += 1
        return -torch.stack([tree(low, high) for tree in self._trees]) / math.sqrt(high - low)
