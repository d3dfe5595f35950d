"""TAESD, the tiny autoencoder for the latents of Stable Diffusion: for previews, or as a fast decoder.

What is unusual about it:
- its latents have the UNet's scale: there is no scale factor to divide by;
- inside, images are in [0,1]; encode() and decode() here take and return [-1,1] as the other autoencoders do;
- encoder and decoder are plain sequences, whose indices are the keys of the original files; they come as two files,
  one of which may be missing.

Source: madebyollin/taesd, taesd.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, size

PROBES = ("encoder.1.conv.0.weight", "decoder.1.weight")  # keys that only an encoder and a decoder of this kind have


@dataclass(frozen=True)
class TAESDSpec:
    """Options in which tiny autoencoders differ."""

    embed_dim: int  # channels of a latent
    encoder: bool  # has an encoder
    decoder: bool  # has a decoder

    @staticmethod
    def from_shapes(shapes: Shapes) -> "TAESDSpec":
        """Return the spec of a tiny autoencoder with weights of these shapes.  Raises ValueError for nonsense."""
        encoder, decoder = (probe in shapes for probe in PROBES)
        key, dimension = ("decoder.1.weight", 1) if decoder else ("encoder.14.weight", 0)
        return TAESDSpec(size(shapes, key, 4)[dimension], encoder, decoder)

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return 8


def _conv(in_channels: int, out_channels: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=bias)


class Clamp(nn.Module):
    """A soft clamp of latents to (-3, 3)."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z / 3) * 3


class Block(nn.Module):
    """Three 3x3 convolutions with a residual connection, at 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(64, 64), nn.ReLU(), _conv(64, 64), nn.ReLU(), _conv(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x)


class TAESD(nn.Module):
    """Pixels <-> latents in the UNet's scale, deterministic, 1.2 million parameters each way."""

    def __init__(self, spec: TAESDSpec) -> None:
        super().__init__()
        self.spec = spec
        down = [part for _ in range(3) for part in (_conv(64, 64, stride=2, bias=False), Block(), Block(), Block())]
        up = [
            part
            for _ in range(3)
            for part in (Block(), Block(), Block(), nn.Upsample(scale_factor=2), _conv(64, 64, bias=False))
        ]
        if spec.encoder:
            self.encoder = nn.Sequential(_conv(3, 64), Block(), *down, _conv(64, spec.embed_dim))
        if spec.decoder:
            self.decoder = nn.Sequential(Clamp(), _conv(spec.embed_dim, 64), nn.ReLU(), *up, Block(), _conv(64, 3))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> latents (B,embed_dim,H/8,W/8) in the UNet's scale, and their deviation, 0.

        H and W are multiples of 8.  Raises ValueError if there is no encoder.
        """
        if not self.spec.encoder:
            raise ValueError(
                "this TAESD has no encoder, which is needed to encode an image: take a file with both, or put "
                "taesd_encoder.pth beside taesd_decoder.pth"
            )
        z = self.encoder((x + 1) / 2)
        return z, torch.zeros_like(z)

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w) in the UNet's scale -> pixels (B,3,8h,8w), about [-1,1], unclamped.

        Raises ValueError if there is no decoder.
        """
        if not self.spec.decoder:
            raise ValueError(
                "this TAESD has no decoder: take a file with both, or put taesd_decoder.pth beside taesd_encoder.pth"
            )
        return self.decoder(z) * 2 - 1
