"""The autoencoder of models that have none: their latents are the pixels themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PixelSpec:
    """What others ask of an autoencoder's spec."""

    embed_dim: int = 3
    factor: int = 1


class Pixels(nn.Module):
    """Pixels (B,3,H,W) in [-1,1] -> the same."""

    def __init__(self, spec: PixelSpec) -> None:
        super().__init__()
        self.spec = spec
        # Of no weights, but of a device and dtype, as others are.
        self.nothing = nn.Parameter(torch.zeros(0), requires_grad=False)

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of what pixels are encoded to: themselves, and 0."""
        return x, torch.zeros_like(x)

    def decode(self, z: Tensor) -> Tensor:
        """What it is given."""
        return z
