"""What the network reads beside the latents, and what happens to its output before the sampler's row.

Guidance runs the network on several conditionings at once, the branches, and mixes their outputs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Conditioning(NamedTuple):
    """What the network reads beside the latents, batch first; None = it has no such input."""

    context: Tensor | None = None  # (B,T,D)
    y: Tensor | None = None  # vectors (B,V), or classes (B,) int64
    concat: Tensor | None = None  # (B,C',h,w), channels that follow the latents'
    control: tuple[Any, ...] | None = None  # models.controlnet.ControlInputs, for a ControlledUNet
    cache: tuple[Any, ...] | None = None  # keys and values of the context: models.unet.TextCache, of UNet.text_cache


@dataclass(frozen=True)
class Branches:
    """Conditionings on which the network runs at every step, and the weights of its outputs, which add up to 1.

    The last branch is the one that has all of the conditioning.
    """

    conditionings: tuple[Conditioning, ...]
    weights: tuple[float, ...]


def classifier_free(cond: Conditioning, uncond: Conditioning | None, scale: float) -> Branches:
    """uncond + scale * (cond - uncond); no uncond, or scale 1, is no guidance, and half the work.

    Ho and Salimans 2022, eq. 6, in the original scripts' convention.
    """
    if uncond is None or scale == 1:
        return Branches((cond,), (1.0,))
    return Branches((uncond, cond), (1 - scale, scale))


def instructed(
    cond: Conditioning, uncond: Conditioning | None, concat: Tensor, scale: float, image_scale: float
) -> Branches:
    """Guidance by a text and a picture: neither + image_scale * (picture - neither) + scale * (both - picture).

    concat (B,C',h,w) is the picture; uncond may be None if both scales are 1.  Branches of no weight are left out.
    Brooks et al. 2023, eq. 3.
    """
    both = cond._replace(concat=concat)
    if uncond is None:
        return Branches((both,), (1.0,))
    picture, neither = uncond._replace(concat=concat), uncond._replace(concat=torch.zeros_like(concat))
    weighted = ((neither, 1 - image_scale), (picture, image_scale - scale), (both, scale))
    used = [(branch, weight) for branch, weight in weighted if weight != 0 or branch is both]
    return Branches(*zip(*used, strict=True))


class Kept(NamedTuple):
    """What is to stay: there the prediction of x0 is replaced by the truth, so that every sampler leads to it."""

    latents: Tensor  # (B,C,h,w)
    mask: Tensor  # (B or 1,1,h,w) in [0,1]: 0 where they stay, 1 where anything may come


class Guidance(NamedTuple):
    """How outputs are mixed; values are tensors, so that a compiled step serves all of them.  None = not done."""

    weights: Tensor | None  # (K,) of K branches; None for one
    rescale: Tensor | None  # (): share of the rescaled result, in [0,1]
    percentile: Tensor | None  # (): of |x0|, in (0,1), for dynamic thresholding
    kept: Kept | None = None
    limit: Tensor | None = None  # (): of dynamic thresholding, at least 1: the most that is clamped to


def guide(guidance: Guidance, out: Tensor, x: Tensor, to_x0: Tensor) -> Tensor:
    """The network's raw output (K*B,C,h,w), branch by branch, for latents x (B,C,h,w) -> the guided output (B,C,h,w).

    to_x0 (2,) is (p, q) with x0 = p x + q out.
    """
    if guidance.weights is not None:
        outs = out.view(len(guidance.weights), *x.shape)  # (K, B, C, h, w)
        out = mixed(outs, guidance.weights)
        if guidance.rescale is not None:
            out = rescaled(out, outs[-1], guidance.rescale)
    if guidance.percentile is None and guidance.kept is None:
        return out
    p, q = to_x0[0], to_x0[1]
    x0 = p * x + q * out
    if guidance.percentile is not None:
        x0 = dynamic_threshold(x0, guidance.percentile, guidance.limit)
    if guidance.kept is not None:
        latents, mask = guidance.kept
        x0 = mask * x0 + (1 - mask) * latents
    return (x0 - p * x) / q


def mixed(outs: Tensor, weights: Tensor) -> Tensor:
    """Outputs (K,B,C,h,w) of all branches -> their weighted sum (B,C,h,w), by differences from the first.

    For two branches that is uncond + scale * (cond - uncond), as the original scripts write it, to the last bit.
    """
    differences = outs[1:] - outs[:1]
    return outs[0] + (weights[1:, None, None, None, None] * differences).sum(dim=0)


def rescaled(guided: Tensor, cond: Tensor, share: Tensor) -> Tensor:
    """The guided prediction with the standard deviation of the conditional one, per image, mixed in by `share`.

    Lin et al. 2024, eqs. 15 and 16.
    """
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    return share * guided * ratio + (1 - share) * guided


def dynamic_threshold(x0: Tensor, percentile: Tensor, limit: Tensor | None = None) -> Tensor:
    """x0 (B,C,h,w) clamped to [-s,s] and divided by s, with s the percentile of |x0| of each image, in [1,limit].

    For models of pixels in [-1,1]; a limit of 1 only clamps.  Saharia et al. 2022, sec. 2.3; the limit is DeepFloyd's.
    """
    # Not torch.quantile: torch 2.11 cannot compile it.
    sizes = x0.abs().flatten(1).sort(dim=1).values  # (B, N)
    rank = percentile * (sizes.shape[1] - 1)
    below, above = (sizes.index_select(1, each.long()[None]) for each in (rank.floor(), rank.ceil()))  # (B, 1) each
    s = torch.lerp(below, above, rank.frac()).clamp(min=1)[:, :, None, None]  # (B, 1, 1, 1)
    s = s if limit is None else torch.minimum(s, limit)
    return torch.clamp(x0, -s, s) / s
