"""The autoencoder of models without one: their latents are the pixels themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PixelSpec:
    """The part of an autoencoder's spec that other modules read."""

    embed_dim: int = 3
    factor: int = 1


class Pixels(nn.Module):
    """The identity on pixels (B,3,H,W) in [-1,1]."""

    def __init__(self, spec: PixelSpec) -> None:
        super().__init__()
        self.spec = spec
        # Empty: its only use is to have a device and dtype, like other networks' weights.
        self.nothing = nn.Parameter(torch.zeros(0), requires_grad=False)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents: x and 0."""
        return x, torch.zeros_like(x)

    def decode(self, z: Tensor) -> Tensor:
        """Return z."""
        return z
