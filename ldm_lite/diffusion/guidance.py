"""Conditioning, and guidance: what happens to the network's output before the sampler's update.

Guidance runs the network on several conditionings (the branches) at once and mixes their outputs.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.projected import Projected, Projection


class Conditioning(NamedTuple):
    """The network's inputs besides the latents, batch first; None = no such input."""

    context: Tensor | None = None  # (B,T,D)
    y: Tensor | None = None  # vectors (B,V), or classes (B,) int64
    concat: Tensor | None = None  # (B,C',h,w), channels appended to the latents
    control: tuple[Any, ...] | None = None  # models.controlnet.ControlInputs, for a ControlledUNet
    cache: tuple[Any, ...] | None = None  # keys and values of the context: models.unet.TextCache, of UNet.text_cache
    inputs: Mapping[str, Tensor] | None = None  # what else the network takes, by the names of its parameters

    def rows(self, rows: slice | list[int], count: int) -> "Conditioning":
        """Return some rows of a conditioning of `count` images, or of a single one for all.  Raises ValueError."""
        parts = [self.context, self.y, self.concat]
        for part in parts:
            if part is not None and (part.ndim == 0 or len(part) not in (1, count)):
                raise ValueError(
                    f"got conditioning of shape {tuple(part.shape)} for {count} images, wanted 1 or {count}"
                )
        chosen = [None if part is None else part.expand(count, *part.shape[1:])[rows] for part in parts]
        more = {name: each.expand(count, *each.shape[1:])[rows] for name, each in (self.inputs or {}).items()}
        return Conditioning(chosen[0], chosen[1], chosen[2], inputs=more or None)

    def with_inputs(self, **more: Tensor) -> "Conditioning":
        """Return it with further inputs by name."""
        return self._replace(inputs={**(self.inputs or {}), **more})


def as_conditioning(value: Any) -> Conditioning | None:
    """Ready conditioning from the user: a Conditioning, or embeddings (N,T,D).  Raises TypeError for anything else."""
    if value is None or (isinstance(value, Conditioning) and any(part is not None for part in value[:3])):
        return value
    if isinstance(value, Tensor):
        return Conditioning(value)
    raise TypeError(
        f"got {type(value).__name__} as conditioning, wanted a Conditioning that holds something, or a tensor"
    )


Combine = Callable[[Tensor, Tensor], Tensor]  # the outputs (B,C,h,w) of cond and uncond -> the guided output


@dataclass(frozen=True)
class Branches:
    """The conditionings that the network runs on at every step, and how its outputs are mixed.

    The last branch has all of the conditioning.  Outputs are mixed by `weights`, which add up to 1 (or a function of
    the step, counted from 0), or by `combine`, a function of the outputs of two branches, or APG.  A branch of weight
    0 does not run, unless it is the last.  Other conditionings of the same shapes may take over from some calls of the
    network on.
    """

    conditionings: tuple[Conditioning, ...]
    weights: tuple[float, ...] | Callable[[int], tuple[float, ...]]
    rescale: float = 0.0  # as in rescaled(), in [0,1]
    threshold: tuple[float, float] | None = None  # percentile and limit, as in dynamic_threshold()
    combine: Combine | Projection | None = None
    later: tuple[tuple[int, tuple[Conditioning, ...]], ...] = ()  # (call, counted from 0, conditionings), in order
    unguided: tuple[float, ...] | None = None  # weights in steps without guidance; None: the last branch alone
    maps: Tensor | None = None  # (K,1,h,w) for K branches: their weights are multiplied by it at each position

    def weights_at(self, step: int) -> tuple[float, ...]:
        """Return the weights of a step, counted from 0."""
        return self.weights(step) if callable(self.weights) else self.weights

    def at(self, call: int) -> tuple[Conditioning, ...]:
        """Return the conditionings of a call of the network, counted from 0."""
        return next((each for first, each in reversed(self.later) if first <= call), self.conditionings)

    def from_call(self, call: int) -> "Branches":
        """Return the branches of a run that begins with this call."""
        later = tuple((first - call, each) for first, each in self.later if first > call)
        return replace(self, conditionings=self.at(call), later=later)

    def map(self, function: Callable[[Conditioning], Conditioning]) -> "Branches":
        """Return branches with each conditioning replaced by a function's; those that were the same stay the same."""
        made: dict[int, tuple[Conditioning, ...]] = {}
        for each in (self.conditionings, *(each for _, each in self.later)):
            if id(each) not in made:
                made[id(each)] = tuple(map(function, each))
        later = tuple((first, made[id(each)]) for first, each in self.later)
        return replace(self, conditionings=made[id(self.conditionings)], later=later)

    def used_at(self, step: int) -> tuple[int, ...]:
        """Return which branches run in a step."""
        weights = self.weights_at(step)
        return tuple(k for k, weight in enumerate(weights) if weight != 0 or k == len(weights) - 1)

    def count_at(self, step: int) -> int:
        """Return how many branches run in a step."""
        return len(self.used_at(step))


@dataclass(frozen=True)
class Scheduled:
    """Weights of classifier-free guidance with a scale that depends on the step."""

    scale: Callable[[int], float]
    parts: tuple[float, ...] = (1.0,)  # weights of the conditional branches

    def __call__(self, step: int) -> tuple[float, ...]:
        """The weights (uncond, *conds) of a step, counted from 0."""
        return _weights(float(self.scale(step)), self.parts)


def _weights(scale: float, parts: tuple[float, ...]) -> tuple[float, ...]:
    return 1 - scale * math.fsum(parts), *(scale * part for part in parts)


def classifier_free(
    cond: Conditioning, uncond: Conditioning | None, guidance: float | Callable[..., Any] = 7.5
) -> Branches:
    """uncond + scale * (cond - uncond); no uncond, or scale 1, means no guidance, and half the work.

    guidance is the scale, a function step -> scale (steps count from 0), or a function (cond, uncond) -> output of the
    network's raw outputs (B,C,h,w) float32.  Ho and Salimans 2022, eq. 6, in the original scripts' convention.  Raises
    TypeError for anything else, ValueError for a function without uncond.
    """
    if not callable(guidance):
        if isinstance(guidance, str):
            raise TypeError(f"got `guidance` {guidance!r}, wanted a number or a function")
        if uncond is None or guidance == 1:
            return Branches((cond,), (1.0,))
        return Branches((uncond, cond), (1 - guidance, guidance))
    if uncond is None:
        raise ValueError("got a `guidance` function, but no conditioning of the negative prompt for it to read")
    needed = [each for each in inspect.signature(guidance).parameters.values() if each.default is each.empty]
    if len(needed) >= 2:
        return Branches((uncond, cond), (0.5, 0.5), combine=guidance)  # both run; the function mixes them
    return Branches((uncond, cond), Scheduled(guidance))


def composed(
    conds: Sequence[Conditioning],
    parts: tuple[float, ...],
    uncond: Conditioning | None,
    guidance: float | Callable[..., Any],
) -> Branches:
    """uncond + scale * sum of part * (cond - uncond), for conditionings and the weights of each: a prompt with AND.

    Liu et al. 2022, eq. 11.  Raises ValueError for guidance by a function of outputs, and if there is no uncond.
    """
    if parts == (1.0,):
        return classifier_free(conds[0], uncond, guidance)
    if uncond is None:
        raise ValueError("a prompt with AND, or with a weight at its end, needs a model with classifier-free guidance")
    if not callable(guidance):
        return Branches((uncond, *conds), _weights(guidance, parts), unguided=_weights(1.0, parts))
    branches = classifier_free(conds[0], uncond, guidance)
    if not isinstance(branches.weights, Scheduled):
        raise ValueError("a prompt with AND takes a `scale`, or a `guidance` function of the step")
    return Branches((uncond, *conds), Scheduled(branches.weights.scale, parts), unguided=_weights(1.0, parts))


def regional(
    conds: Sequence[Conditioning],
    shares: Tensor,
    uncond: Conditioning | None,
    guidance: float | Callable[..., Any],
) -> Branches:
    """uncond + scale * (cond - uncond), where cond is the sum of each of P conditionings times its share (P,1,h,w).

    shares add up to 1 at each position.  No uncond means no guidance.  Raises ValueError as composed does.
    """
    count = len(conds)
    if count == 1:
        return classifier_free(conds[0], uncond, guidance)
    if uncond is None:
        return Branches(tuple(conds), (1.0,) * count, unguided=(1.0,) * count, maps=shares)
    branches = composed(conds, (1 / count,) * count, uncond, guidance)
    return replace(branches, maps=torch.cat([torch.ones_like(shares[:1]), count * shares]))


def cfg_plus_plus(plan: Plan, scale: float) -> Callable[[int], float]:
    """Return the guidance of every step, counted from 0, that makes DDIM's plan take the noise of uncond.

    With CFG++ x0 is guided by scale / 12.5, as in A1111, and the noise added back to it is not; since both are linear
    in the network's outputs, that is DDIM with a larger scale.  Chung et al. 2024, alg. 2.  Raises ValueError for a
    plan with a step from a level to itself.
    """
    after = np.append(plan.level[1:, 0], plan.end.a)
    of_x0 = plan.to_x0[:, 1] / plan.to_h[:, 1] * after  # weight of the prediction in x0's part of the step
    whole = plan.mix[:, 0, -2]
    if not (np.isfinite(of_x0).all() and abs(whole).min() > 1e-9):
        raise ValueError("CFG++ is undefined for a step that does not lower the noise: take 500 steps or less")
    scales = (scale / 12.5 * of_x0 / whole).tolist()
    return lambda step: float(scales[step])


def instructed(
    cond: Conditioning, uncond: Conditioning | None, concat: Tensor, scale: float, image_scale: float
) -> Branches:
    """Guidance by text and image: neither + image_scale * (image - neither) + scale * (both - image).

    concat (B,C',h,w) is the image; uncond may be None if both scales are 1.  Branches of weight 0 are left out.
    Brooks et al. 2023, eq. 3.
    """
    both = cond._replace(concat=concat)
    if uncond is None:
        return Branches((both,), (1.0,))
    image, neither = uncond._replace(concat=concat), uncond._replace(concat=torch.zeros_like(concat))
    weighted = ((neither, 1 - image_scale), (image, image_scale - scale), (both, scale))
    used = [(branch, weight) for branch, weight in weighted if weight != 0 or branch is both]
    return Branches(*zip(*used, strict=True))


@dataclass(frozen=True)
class SkipWeights:
    """Weights of branches, of which the first leaves blocks of the network out, for the steps in which it counts."""

    others: tuple[float, ...] | Callable[[int], tuple[float, ...]]
    scale: float
    between: tuple[float, float]  # steps from 0, both excluded

    def __call__(self, step: int) -> tuple[float, ...]:
        """The weights of a step, counted from 0."""
        *uncond, cond = self.others(step) if callable(self.others) else self.others
        scale = self.scale if self.between[0] < step < self.between[1] else 0.0
        return -scale, *uncond, cond + scale


def skipping(branches: Branches, skip: Tensor, scale: float, between: tuple[float, float]) -> Branches:
    """Return branches with skip-layer guidance: plus scale * (cond - cond without the blocks in `skip`).

    skip (depth,) bool tells which blocks are left out, `between` (both excluded) in which steps.  Raises ValueError
    for branches that a function mixes.  Stability-AI/sd3.5, SkipLayerCFGDenoiser.
    """
    if branches.combine is not None:
        raise ValueError("skip-layer guidance takes `scale` alone: leave the `guidance` function out, or the skipping")
    cond = branches.conditionings[-1]
    assert cond.context is not None
    rows = skip.expand(len(cond.context), -1)
    whole = [each.with_inputs(skip=torch.zeros_like(rows)) for each in branches.conditionings]
    return replace(
        branches,
        conditionings=(cond.with_inputs(skip=rows), *whole),
        weights=SkipWeights(branches.weights, scale, between),
    )


class Guidance(NamedTuple):
    """What a step does to the outputs, as tensors, so that one compiled step serves all values.  None = not done."""

    weights: Tensor | None  # (K,) for K branches; None for one
    rescale: Tensor | None  # (): share of the rescaled result, in [0,1]
    percentile: Tensor | None  # (): of |x0|, in (0,1), for dynamic thresholding
    limit: Tensor | None = None  # (): of dynamic thresholding, at least 1: never clamp to more
    combine: Combine | Projected | None = None  # in place of weights; steps that have one are not compiled
    maps: Tensor | None = None  # (K,1,h,w): factors of the weights at each position


def guide(guidance: Guidance, out: Tensor, x: Tensor, to_x0: Tensor) -> Tensor:
    """Return the guided output (B,C,h,w), from the network's raw output (K*B,C,h,w) for latents x (B,C,h,w).

    to_x0 (2,) is (p, q) with x0 = p x + q out.
    """
    if guidance.weights is not None:
        outs = out.view(len(guidance.weights), *x.shape)  # (K, B, C, h, w)
        if isinstance(guidance.combine, Projected):
            out = guidance.combine(outs, guidance.weights[-1], x, to_x0)
        else:
            combine, maps = guidance.combine, guidance.maps
            out = mixed(outs, guidance.weights, maps) if combine is None else _combined(combine, outs)
        if guidance.rescale is not None:
            out = rescaled(out, outs[-1], guidance.rescale)
    if guidance.percentile is None:
        return out
    p, q = to_x0[0], to_x0[1]
    x0 = dynamic_threshold(p * x + q * out, guidance.percentile, guidance.limit)
    return (x0 - p * x) / q


def _combined(combine: Combine, outs: Tensor) -> Tensor:
    """What the user's function makes of the outputs (2,B,C,h,w).  Raises ValueError unless that is (B,C,h,w)."""
    out: object = combine(outs[1], outs[0])
    if not isinstance(out, Tensor) or out.shape != outs[0].shape:
        got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"got {got} from the `guidance` function, wanted {tuple(outs[0].shape)} as it was given")
    return out


def mixed(outs: Tensor, weights: Tensor, maps: Tensor | None = None) -> Tensor:
    """Return the weighted sum (B,C,h,w) of the branches' outputs (K,B,C,h,w), by differences from the first.

    maps (K,1,h,w) are factors of the weights at each position.  For two branches without them this equals the original
    scripts' uncond + scale * (cond - uncond) to the last bit.
    """
    differences = outs[1:] - outs[:1]
    factors = weights[1:, None, None, None, None]
    if maps is not None:
        factors = factors * maps[1:, None]
    return outs[0] + (factors * differences).sum(dim=0)


def rescaled(guided: Tensor, cond: Tensor, share: Tensor) -> Tensor:
    """Rescale the guided prediction to the conditional one's standard deviation, per image, and mix it in by `share`.

    Lin et al. 2024, eqs. 15 and 16.
    """
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    return share * guided * ratio + (1 - share) * guided


def dynamic_threshold(x0: Tensor, percentile: Tensor, limit: Tensor | None = None) -> Tensor:
    """Clamp x0 (B,C,h,w) to [-s,s] and divide by s, where s is each image's percentile of |x0|, in [1,limit].

    For pixel models; a limit of 1 only clamps.  Saharia et al. 2022, sec. 2.3; the limit is DeepFloyd's.
    """
    # Not torch.quantile: torch 2.11 cannot compile it.
    sizes = x0.abs().flatten(1).sort(dim=1).values  # (B, N)
    rank = percentile * (sizes.shape[1] - 1)
    below, above = (sizes.index_select(1, each.long()[None]) for each in (rank.floor(), rank.ceil()))  # (B, 1) each
    s = torch.lerp(below, above, rank.frac()).clamp(min=1)[:, :, None, None]  # (B, 1, 1, 1)
    s = s if limit is None else torch.minimum(s, limit)
    return torch.clamp(x0, -s, s) / s
