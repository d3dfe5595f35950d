"""TAESD, the tiny autoencoder for the latents of Stable Diffusion: for previews, or as a fast decoder.

What is unusual about it:
- its latents have the UNet's scale: there is no scale factor to divide by;
- inside, images are in [0,1]; encode() and decode() here take and return [-1,1] as the other autoencoders do;
- TAEF2 adds a bottleneck of channels to the blocks at the lowest resolution; its latents (32,H/8,W/8) are
  those of 128 channels, whose patches are taken apart;
- encoder and decoder are plain sequences, whose indices are the keys of the original files; they come as two files,
  one of which may be missing.

Source: madebyollin/taesd, taesd.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape

POOLS = ("encoder.11.pool.0.weight", "decoder.3.pool.0.weight")
PROBES = ("encoder.1.conv.0.weight", "decoder.1.weight")  # keys that only an encoder and a decoder of this kind have


@dataclass(frozen=True)
class TAESDSpec:
    """Options in which tiny autoencoders differ."""

    embed_dim: int  # channels of a latent; of a patch of 2 x 2, if it is pooled
    encoder: bool  # has an encoder
    decoder: bool  # has a decoder
    pooled: bool = False  # TAEF2's

    @staticmethod
    def from_shapes(shapes: Shapes) -> "TAESDSpec":
        """Return the spec of a tiny autoencoder with weights of these shapes.  Raises ValueError if none has."""
        encoder, decoder = (probe in shapes for probe in PROBES)
        key, dimension = ("decoder.1.weight", 1) if decoder else ("encoder.14.weight", 0)
        pooled = any(key in shapes for key in POOLS)
        return TAESDSpec(checked_shape(shapes, key, 4)[dimension] * (4 if pooled else 1), encoder, decoder, pooled)

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return 16 if self.pooled else 8


def _conv(in_channels: int, out_channels: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=bias)


class Clamp(nn.Module):
    """A soft clamp of latents to (-3, 3)."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z / 3) * 3


class TAESDBlock(nn.Module):
    """Three 3x3 convolutions with a residual connection, at 64 channels; before them optionally a bottleneck of 256."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.pool = None
        if pooled:
            wide, narrow = nn.Conv2d(64, 256, 1, bias=False), nn.Conv2d(256, 64, 1, bias=False)
            self.pool = nn.Sequential(wide, nn.GroupNorm(4, 256), nn.ReLU(), narrow)
        self.conv = nn.Sequential(_conv(64, 64), nn.ReLU(), _conv(64, 64), nn.ReLU(), _conv(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.pool is None else x + self.pool(x)
        return F.relu(self.conv(x) + x)


class TAESD(nn.Module):
    """Pixels <-> latents in the UNet's scale, deterministic, 1.2 million parameters each way."""

    def __init__(self, spec: TAESDSpec) -> None:
        super().__init__()
        self.spec = spec
        lowest = (spec.pooled, False, False)  # of the decoder's levels; the encoder's end with it
        down = [
            part
            for pooled in reversed(lowest)
            for part in (_conv(64, 64, stride=2, bias=False), *(TAESDBlock(pooled) for _ in range(3)))
        ]
        up = [
            part
            for pooled in lowest
            for part in (
                *(TAESDBlock(pooled) for _ in range(3)),
                nn.Upsample(scale_factor=2),
                _conv(64, 64, bias=False),
            )
        ]
        self.patch = 2 if spec.pooled else 1
        channels = spec.embed_dim // self.patch**2
        if spec.encoder:
            self.encoder = nn.Sequential(_conv(3, 64), TAESDBlock(), *down, _conv(64, channels))
        if spec.decoder:
            self.decoder = nn.Sequential(Clamp(), _conv(channels, 64), nn.ReLU(), *up, TAESDBlock(), _conv(64, 3))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> latents (B,embed_dim,H/f,W/f) in the UNet's scale, and their deviation, 0.

        H and W are multiples of f, the spec's factor.  Raises ValueError if there is no encoder.
        """
        if not self.spec.encoder:
            raise ValueError(
                "this TAESD has no encoder, which is needed to encode an image: use a file with both, or put "
                "taesd_encoder.pth beside taesd_decoder.pth"
            )
        z = F.pixel_unshuffle(self.encoder((x + 1) / 2), self.patch)
        return z, torch.zeros_like(z)

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w) in the UNet's scale -> pixels (B,3,f h,f w), about [-1,1], unclamped.

        Raises ValueError if there is no decoder.
        """
        if not self.spec.decoder:
            raise ValueError(
                "this TAESD has no decoder: use a file with both, or put taesd_decoder.pth beside taesd_encoder.pth"
            )
        return self.decoder(F.pixel_shuffle(z, self.patch)) * 2 - 1
