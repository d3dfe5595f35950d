"""Small trained changes of a frozen layer: LoRA, DoRA, LoHa and LoKr, with the parameter names of LyCORIS's files.

A change is called with a layer's input x, its frozen weight W (out,in), its output and its bias, and returns what is to
be added to the output; it is 0 at first.  Layers are linears, x (...,in), or 1x1 convolutions, x (B,in,h,w).
Shape letters: r rank; LoKr's W is the Kronecker product of (a,c) and (b,d), out = a b, in = c d.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoRA(nn.Module):
    """alpha / r * up(down(x)).  Hu et al. 2021, eq. 3."""

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        """weight (out,in) or (out,in,1,1) of the layer."""
        super().__init__()
        out, width = weight.shape[:2]
        if weight.ndim == 2:
            self.lora_down: nn.Module = nn.Linear(width, rank, bias=False)
            self.lora_up: nn.Module = nn.Linear(rank, out, bias=False)
        else:
            self.lora_down = nn.Conv2d(width, rank, 1, bias=False)
            self.lora_up = nn.Conv2d(rank, out, 1, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.scale = alpha / rank

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        up, down = (layer.get_parameter("weight").flatten(1) for layer in (self.lora_up, self.lora_down))
        return _times(self.scale * _times(x, down), up)


class DoRA(LoRA):
    """m (W + BA) / |W + BA|, with a trained length m (out,) of each row and the norm as a constant in gradients.

    Liu et al. 2024, eq. 5 and sec. 4.3.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__(weight, rank, alpha)
        lengths = weight.detach().float().flatten(1).norm(dim=1)
        self.dora_scale = nn.Parameter(lengths.view(-1, *[1] * (weight.ndim - 1)).clone())

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        with torch.no_grad():
            up, down = (layer.get_parameter("weight").flatten(1) for layer in (self.lora_up, self.lora_down))
            norm = (weight + self.scale * up @ down).norm(dim=1)
        factor = self.dora_scale.flatten() / norm
        factor, shape = (factor[:, None, None], (-1, 1, 1)) if self.dora_scale.ndim == 4 else (factor, (-1,))
        base = out if bias is None else out - bias.view(shape)
        return (factor - 1) * base + factor * super().forward(x, weight, out, bias)


class LoHa(nn.Module):
    """alpha / r * (w1_a w1_b) * (w2_a w2_b), multiplied element by element.  Hyeon-Woo et al. 2022, eq. 2."""

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        out, width = weight.shape[:2]
        self.hada_w1_a, self.hada_w2_a = (nn.Parameter(torch.zeros(out, rank)) for _ in range(2))
        self.hada_w1_b, self.hada_w2_b = (nn.Parameter(torch.randn(rank, width)) for _ in range(2))
        nn.init.normal_(self.hada_w1_a, std=0.1)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.scale = alpha / rank

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        change = (self.hada_w1_a @ self.hada_w1_b) * (self.hada_w2_a @ self.hada_w2_b)
        return _times(x, self.scale * change)


class LoKr(nn.Module):
    """alpha / r * kron(w1, w2_a w2_b), or kron(w1, w2) if r is no less than half of w2.  Yeh et al. 2024."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, factor: int = -1) -> None:
        super().__init__()
        (a, b), (c, d) = (factorised(size, factor) for size in weight.shape[:2])
        self.lokr_w1 = nn.Parameter(torch.empty(a, c))
        nn.init.kaiming_uniform_(self.lokr_w1, a=math.sqrt(5))
        self.full = rank >= max(b, d) / 2
        if self.full:
            self.lokr_w2 = nn.Parameter(torch.zeros(b, d, *weight.shape[2:]))
        else:
            self.lokr_w2_a, self.lokr_w2_b = nn.Parameter(torch.empty(b, rank)), nn.Parameter(torch.zeros(rank, d))
            nn.init.kaiming_uniform_(self.lokr_w2_a, a=math.sqrt(5))
        self.scale = 1.0 if self.full else alpha / rank
        self.register_buffer("alpha", torch.tensor(float(rank if self.full else alpha)))  # LyCORIS reads it so

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        w2 = self.lokr_w2.flatten(1) if self.full else self.lokr_w2_a @ self.lokr_w2_b
        channels_first = x.ndim == 4
        x = x.movedim(1, -1) if channels_first else x
        rows = F.linear(x.reshape(*x.shape[:-1], -1, w2.shape[1]), w2)  # (...,c,b)
        y = self.scale * (self.lokr_w1 @ rows).flatten(-2)  # (...,a,b) -> (...,out)
        return y.movedim(-1, 1) if channels_first else y


KINDS: dict[str, type[LoRA | LoHa | LoKr]] = {"lora": LoRA, "dora": DoRA, "loha": LoHa, "lokr": LoKr}


def factorised(size: int, factor: int) -> tuple[int, int]:
    """Return (small, large) with small * large = size: small is `factor` if that divides it, else the largest below.

    -1 is as near to a square as possible.
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = math.isqrt(size) if factor < 0 else min(factor, math.isqrt(size))
    small = next(divisor for divisor in range(most, 0, -1) if size % divisor == 0)
    return small, size // small


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the channels of x (...,in) or (B,in,h,w) by a weight (out,in)."""
    return F.linear(x.movedim(1, -1), weight).movedim(-1, 1) if x.ndim == 4 else F.linear(x, weight)
