"""Adjustments of the guided output, for Inputs.adjust: rescaled, clamped, or with the norms of the conditional one."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.core.denoise import Adjust, Outputs
from ldm_lite.diffusion.guidance import stateless


# The same function for the same numbers, which are tensors: one compiled step serves all, one CUDA graph each.
@functools.lru_cache(maxsize=64)
def rescaling(fraction: float, device: torch.device) -> Adjust:
    """Return a function that rescales the guided output as `rescaled` does."""
    value = torch.tensor(fraction, dtype=torch.float64, device=device)

    @stateless
    def rescale(out: Tensor, outputs: Outputs) -> Tensor:
        return out if len(outputs.outs) == 1 else rescaled(out, outputs.cond, value.to(out.dtype))

    return rescale


def rescaled(guided: Tensor, cond: Tensor, fraction: Tensor) -> Tensor:
    """Rescale the guided prediction to the conditional one's standard deviation, per image; mix it in by `fraction`.

    Lin et al. 2024, eqs. 15 and 16.
    """
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    return fraction * guided * ratio + (1 - fraction) * guided


@functools.lru_cache(maxsize=64)
def keeping_norm(patch: int) -> Adjust:
    """Return a function that gives each token of the guided output, patch x patch positions, its conditional norm."""

    def norm(x: Tensor) -> Tensor:
        of_tokens = F.pixel_unshuffle(x, patch).norm(dim=1, keepdim=True)  # (B, 1, h/patch, w/patch)
        return F.interpolate(of_tokens, scale_factor=float(patch), mode="nearest")

    @stateless
    def keep(out: Tensor, outputs: Outputs) -> Tensor:
        return out if len(outputs.outs) == 1 else out * (norm(outputs.cond) / norm(out))

    return keep


@functools.lru_cache(maxsize=64)
def thresholding(percentile: float, limit: float, device: torch.device) -> Adjust:
    """Return a function that clamps x0 as `dynamic_threshold` does; a limit of infinity is none."""
    values = torch.tensor([percentile, limit], dtype=torch.float64, device=device)

    @stateless
    def threshold(out: Tensor, outputs: Outputs) -> Tensor:
        fraction, most = values.to(out.dtype)
        return outputs.from_x0(dynamic_threshold(outputs.to_x0(out), fraction, most))

    return threshold


def dynamic_threshold(x0: Tensor, percentile: Tensor, limit: Tensor) -> Tensor:
    """Clamp x0 (B,C,h,w) to [-s,s] and divide by s, where s is each image's percentile of |x0|, in [1,limit].

    For pixel models; a limit of 1 only clamps.  Saharia et al. 2022, sec. 2.3; the limit is DeepFloyd's.
    """
    s = _quantile(x0.abs().flatten(1), percentile).clamp(min=1)[:, :, None, None]  # (B, 1, 1, 1)
    s = torch.minimum(s, limit)
    return torch.clamp(x0, -s, s) / s


def _quantile(values: Tensor, fraction: Tensor) -> Tensor:
    """The quantile (...,1) of values (...,N).  Not torch.quantile: torch 2.11 cannot compile it."""
    ordered = values.sort(dim=-1).values
    rank = fraction * (ordered.shape[-1] - 1)
    below, above = (ordered.index_select(-1, end.long()[None]) for end in (rank.floor(), rank.ceil()))
    return torch.lerp(below, above, rank.frac())


@functools.lru_cache(maxsize=64)
def mimicking(scale: float, percentile: float, device: torch.device) -> Adjust:
    """Return a function that gives the guided x0 the contrast of a lower scale, as `mimicked` does."""
    values = torch.tensor([scale, percentile], dtype=torch.float64, device=device)

    @stateless
    def mimic(out: Tensor, outputs: Outputs) -> Tensor:
        if len(outputs.outs) == 1:
            return out
        lower, fraction = values.to(out.dtype)
        uncond, cond = outputs.outs
        x0, of_lower = outputs.to_x0(out), outputs.to_x0(uncond + lower * (cond - uncond))
        return outputs.from_x0(mimicked(x0, of_lower, fraction))

    return mimic


def mimicked(x0: Tensor, of_lower: Tensor, percentile: Tensor) -> Tensor:
    """Shrink x0 (B,C,h,w) to the range that x0 of a lower guidance scale has around the mean of each channel.

    Values beyond the percentile of distances from the mean are clamped first.  mcmonkey's "Dynamic Thresholding
    (CFG scale fix)" for A1111's web UI, with its defaults: separate channels, around the mean, by absolute deviation.
    """
    mean, lower_mean = (x.mean(dim=(2, 3), keepdim=True) for x in (x0, of_lower))
    centred = x0 - mean
    most = (of_lower - lower_mean).abs().amax(dim=(2, 3), keepdim=True)  # (B, C, 1, 1)
    limit = _quantile(centred.abs().flatten(2), percentile)[..., None].maximum(most).clamp(min=1e-6)
    return mean + centred.clamp(-limit, limit) * (most / limit)
