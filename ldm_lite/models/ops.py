"""What several networks share beyond core/layers.py: norms, rotary positions, parts of diffusion transformers.

Shape letters: B batch, N tokens, H heads, D channels of a head, C channels of all heads.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Shapes, merge_heads

gelu_tanh = partial(nn.GELU, approximate="tanh")


class Fitted:
    """A base of specs that weights show only in part: fields in `untold` have defaults."""

    untold: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def from_shapes(shapes: Shapes) -> Any:
        """Return the spec of a network with weights of these shapes.  Raises ValueError if they make no sense."""
        raise NotImplementedError

    def fitted(self, shapes: Shapes) -> Any:
        """The same, with this spec's values for what weights do not show."""
        return replace(self.from_shapes(shapes), **{name: getattr(self, name) for name in self.untold})


def of_blocks(ours: str, theirs: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the names of modules in blocks, in our list of them -> in theirs."""
    return {
        f"{ours}.*.{name}": "~" * parts.startswith("~")
        + " ".join(f"{theirs}.*.{part}" for part in parts.removeprefix("~").split())
        for name, parts in modules.items()
    }


QKV, ADDED_QKV = "attn.to_q attn.to_k attn.to_v", "attn.add_q_proj attn.add_k_proj attn.add_v_proj"


class TransformerSpec:
    """A base of specs of diffusion transformers: what every denoising network's spec needs."""

    patch: ClassVar[int] = 2  # latent positions per token, along each side
    num_classes: ClassVar[None] = None  # what only UNets have
    guidance_dim: ClassVar[None] = None

    @property
    def other_names(self) -> Mapping[str, str]:
        """Names of modules -> what diffusers calls them; * is the number of a block, the first in a name.

        Several names, with spaces between, are rows of one module here, in this order.  A parameter has its own
        entry, if its name is not weight or bias.  ~ marks one that has the scale before the shift, unlike here;
        of blocks' modules, only the last block's does.
        """
        return {}


class TransformerBlock(nn.Module):
    """A base of the blocks of diffusion transformers, which tools take one by one, and whose layers LoRAs change."""

    is_atomic: ClassVar[bool] = False  # it calls layers of its parts


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
    """Return float32 for a dtype of lower precision, else the dtype itself: norms and rotations compute in it."""
    return torch.promote_types(dtype, torch.float32)


def unit_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least float32; x's dtype out."""
    values = x.to(wide(x.dtype))
    return (values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """unit_rms times a weight (C,), which files call "weight" or otherwise; the weight's dtype out."""

    def __init__(self, channels: int, eps: float = 1e-6, name: str = "weight") -> None:
        super().__init__()
        self.eps, self.name = eps, name
        self.register_parameter(name, nn.Parameter(torch.ones(channels)))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = getattr(self, self.name)
        return (unit_rms(x, self.eps) * weight).to(weight.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then times 1 + scale, plus shift.  Peebles and Xie 2023, sec. 3.2."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def mlp(
    in_channels: int,
    hidden: int,
    out_channels: int,
    activation: Callable[[], nn.Module] = nn.SiLU,
    names: Sequence[str] = ("0", "1", "2"),
    bias: bool = True,
) -> nn.Sequential:
    """Linear, activation, linear, by the names that files give them: of timesteps' sinusoids, pooled texts, tokens."""
    layers = nn.Linear(in_channels, hidden, bias), activation(), nn.Linear(hidden, out_channels, bias)
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def embedder(in_channels: int, hidden: int, out_channels: int) -> nn.Sequential:
    """The same under a further name."""
    return nn.Sequential(OrderedDict(mlp=mlp(in_channels, hidden, out_channels)))


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), whose layers have other names in files.  Shazeer 2020."""

    def __init__(self, width: int, hidden: int, gate: str, up: str, down: str, bias: bool = False) -> None:
        super().__init__()
        self.names = gate, up, down
        for name in (gate, up):
            self.add_module(name, nn.Linear(width, hidden, bias))
        self.add_module(down, nn.Linear(hidden, width, bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return finite_half(down(finite_half(F.silu(gate(x)) * up(x))))


def modulation(width: int, chunks: int, bias: bool = True) -> nn.Sequential:
    """Return adaLN_modulation; slot 0 held a SiLU, which networks here apply once for all blocks."""
    return nn.Sequential(nn.Identity(), nn.Linear(width, chunks * width, bias))


class LastLayer(nn.Module):
    """Norm, modulated by the conditioning vec (B,D), and a linear to the channels of a token."""

    def __init__(
        self, width: int, out_channels: int, bias: bool = True, shift_and_scale: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_channels, bias)
        self.adaLN_modulation = modulation(width, 2, bias) if shift_and_scale is None else shift_and_scale

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None, :].chunk(2, dim=2)
        return self.linear(modulate(x, shift, scale))


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


def attend(attention: AttentionFn, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q, k, v (B,H,N,D/H) -> (B,N,D).

    With a mask (B,1,1,N), False where no token attends to, PyTorch's kernel replaces `attention`.
    """
    if mask is None:
        return merge_heads(attention(q, k, v))
    return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def inside(lengths: Tensor, num_text: int) -> Tensor:
    """Return (B,T) bool: whether each of T text tokens is one of the first `lengths` (B,1) of its text."""
    return torch.arange(num_text, device=lengths.device) < lengths


def multiple(width: int, base: int, what: str) -> int:
    """Return width / base.  Raises ValueError unless it is a whole number above 0."""
    if width % base or width < base:
        raise ValueError(f"{what} is {width}, expected a multiple of {base}")
    return width // base
