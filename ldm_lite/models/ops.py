"""Building blocks that all networks share: attention, the timestep embedding, the gated feed-forward.

Shape letters: B batch, N tokens, H heads, D channels of a head, C channels of all heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q (B,H,N,D) and k, v (B,H,M,D) -> (B,H,N,D).

    Attention layers of UNets and autoencoders call their attribute `attention`, which is this function by default.
    Vaswani et al. 2017, eq. 1.
    """
    return F.scaled_dot_product_attention(q, k, v)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B,N,C) -> (B,H,N,C/H), a view: "b n (h d) -> b h n d"."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def embed(table: nn.Embedding, ids: Tensor, learned: Tensor | None) -> Tensor:
    """Token ids (B,T) -> vectors (B,T,D), from the table, or for ids beyond it from learned (V,D).

    learned holds the vectors of textual inversion, Gal et al. 2022.
    """
    if learned is None:
        return table(ids)
    known = table.num_embeddings
    x: Tensor = table(ids.clamp(max=known - 1))
    return torch.where((ids < known)[:, :, None], x, learned.to(x)[(ids - known).clamp(min=0)])


def merge_heads(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H*D): "b h n d -> b n (h d)"."""
    return x.transpose(1, 2).flatten(2)


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """Timesteps (B,) in [0,1000), possibly fractional -> float32 sinusoids (B,dim), the cosines first.

    Frequencies exp(-ln 10000 * i / (dim/2)); an odd dim ends in a zero.  Vaswani et al. 2017, sec. 3.5, in the
    order of the original openaimodel.py.
    """
    half = dim // 2
    freqs = torch.exp(torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(10000) / half))
    angles = t.float()[:, None] * freqs  # (B, dim/2)
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, dim % 2))


def guidance_embedding(scale: Tensor, dim: int) -> Tensor:
    """Guidance scales (B,), 1 = none, -> float32 sinusoids (B,dim) of 1000 * (scale - 1), the sines first.

    Frequencies exp(-ln 10000 * i / (dim/2 - 1)).  Luo et al. 2023, sec. 4.3.  Angles reach thousands, where float32
    rounds to 4e-4: operations are in the order of diffusers, so that rounding is the same as in training.
    """
    half = dim // 2
    step = torch.log(torch.tensor(10000.0, dtype=torch.float32, device=scale.device)) / (half - 1)
    freqs = torch.exp(torch.arange(half, dtype=torch.float32, device=scale.device) * -step)
    angles = (scale - 1).float()[:, None] * 1000 * freqs  # (B, dim/2)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim % 2))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a dtype of lower precision, else the dtype itself: what norms and rotations compute in."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least float32, then times weight (C,) in x's dtype."""
    values = x.to(wide(x.dtype))
    return (values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then times 1 + scale, plus shift.  Peebles and Xie 2023, sec. 3.2."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def finite_half(x: Tensor) -> Tensor:
    """Limit float16 to its largest numbers: transformers trained in bfloat16 exceed them in few channels."""
    return x.clamp(-65504.0, 65504.0) if x.dtype == torch.float16 else x


def axial_rotation(ids: Tensor, axes: tuple[int, ...], theta: float, dtype: torch.dtype) -> Tensor:
    """Positions ids (A,...,N) on A axes -> cosines and sines (2,...,N,sum(axes)/2) of the angles of rotary embeddings.

    An axis of d channels has the angles id * theta^(-2i/d), i < d/2.  They are in float32, or in dtype if that is
    wider.  Su et al. 2021, eq. 15.
    """
    angles = []
    for positions, channels in zip(ids.to(wide(dtype)), axes, strict=True):
        powers = torch.arange(0, channels, 2, dtype=positions.dtype, device=ids.device) / channels
        angles.append(positions[..., None] * theta**-powers)  # (..., N, channels/2)
    both = torch.cat(angles, dim=-1)  # (..., N, D/2)
    return torch.stack([both.cos(), both.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring pairs of channels of x (B,H,N,D) by the angles of rotation, (2,N,D/2) or (2,B,1,N,D/2)."""
    cos, sin = rotation
    a, b = x.to(rotation.dtype).view(*x.shape[:-1], -1, 2).unbind(-1)  # (B, H, N, D/2)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


class Conv1x1(nn.Conv2d):
    """A 1x1 convolution (B,C,h,w) -> (B,K,h,w) as a linear over positions, which copies nothing with channels last.

    Other inputs, as after a norm on CUDA, are made channels last first: otherwise the bias needs another kernel.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(channels_last(x).permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """(B,C,h,w) with channels last in memory: faster convolutions, and tokens (B,N,C) become a view."""
    return x.contiguous(memory_format=torch.channels_last)


class GEGLU(nn.Module):
    """Linear to twice the width; the first half times the exact GELU of the second.  Shazeer 2020."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, 2 * out_channels)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)
