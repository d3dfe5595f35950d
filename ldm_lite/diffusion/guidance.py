"""What happens to the network's output before the sampler's row: everything that is not linear in it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Guidance(NamedTuple):
    """How the output is guided; values are tensors (), so that a compiled step serves all of them.  None = not done."""

    scale: Tensor | None  # classifier-free guidance; the batch is then doubled, the unconditional half first
    rescale: Tensor | None  # share of the rescaled result, in [0,1]
    percentile: Tensor | None  # of |x0|, in (0,1), for dynamic thresholding


def guide(guidance: Guidance, out: Tensor, x: Tensor, to_x0: Tensor) -> Tensor:
    """The network's raw output (B or 2B,C,h,w) for latents x (B,C,h,w) -> the guided output (B,C,h,w).

    to_x0 (2,) is (p, q) with x0 = p x + q out.
    """
    if guidance.scale is not None:
        uncond, cond = out.chunk(2)
        out = classifier_free(uncond, cond, guidance.scale)
        if guidance.rescale is not None:
            out = rescaled(out, cond, guidance.rescale)
    if guidance.percentile is not None:
        p, q = to_x0[0], to_x0[1]
        out = (dynamic_threshold(p * x + q * out, guidance.percentile) - p * x) / q
    return out


def classifier_free(uncond: Tensor, cond: Tensor, scale: Tensor) -> Tensor:
    """uncond + scale * (cond - uncond), for predictions (B,C,h,w); scale 1 is no guidance.

    Ho and Salimans 2022, eq. 6, in the original scripts' convention.
    """
    return uncond + scale * (cond - uncond)


def rescaled(guided: Tensor, cond: Tensor, share: Tensor) -> Tensor:
    """The guided prediction with the standard deviation of the conditional one, per image, mixed in by `share`.

    Lin et al. 2024, eqs. 15 and 16.
    """
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    return share * guided * ratio + (1 - share) * guided


def dynamic_threshold(x0: Tensor, percentile: Tensor) -> Tensor:
    """x0 (B,C,h,w) clamped to [-s,s] and divided by s, with s the percentile of |x0| of each image, at least 1.

    For models of pixels in [-1,1].  Saharia et al. 2022, sec. 2.3.
    """
    s = torch.quantile(x0.abs().flatten(1), percentile, dim=1).clamp(min=1)[:, None, None, None]  # (B, 1, 1, 1)
    return torch.clamp(x0, -s, s) / s
