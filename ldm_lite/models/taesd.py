"""TAESD, the tiny autoencoder for the latents of Stable Diffusion: a preview, or a fast decoder.

What is unusual about it:
- its latents are the UNet's own: there is no scale factor to divide by;
- inside, images are in [0,1]; encode() and decode() here take and give [-1,1] as the other autoencoders do;
- the two networks are plain sequences, whose indices are the original files' keys, and come as two files: one of
  them may be missing.

Source: madebyollin/taesd, taesd.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TAESDSpec:
    """The numbers in which tiny autoencoders differ, and which of the two networks there are."""

    embed_dim: int  # channels of a latent
    encoder: bool
    decoder: bool

    @property
    def factor(self) -> int:
        """Pixels to a latent position, along each side."""
        return 8


def _conv(in_channels: int, out_channels: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=bias)


class Clamp(nn.Module):
    """A soft clamp of latents to (-3, 3)."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z / 3) * 3


class Block(nn.Module):
    """Three 3x3 convolutions and a skip, at 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(64, 64), nn.ReLU(), _conv(64, 64), nn.ReLU(), _conv(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x)


def _encoder(embed_dim: int) -> nn.Sequential:
    layers: list[nn.Module] = [_conv(3, 64), Block()]
    for _ in range(3):
        layers += [_conv(64, 64, stride=2, bias=False), Block(), Block(), Block()]
    return nn.Sequential(*layers, _conv(64, embed_dim))


def _decoder(embed_dim: int) -> nn.Sequential:
    layers: list[nn.Module] = [Clamp(), _conv(embed_dim, 64), nn.ReLU()]
    for _ in range(3):
        layers += [Block(), Block(), Block(), nn.Upsample(scale_factor=2), _conv(64, 64, bias=False)]
    return nn.Sequential(*layers, Block(), _conv(64, 3))


class TAESD(nn.Module):
    """Pixels <-> latents in the UNet's scale, deterministic, 1.2 million parameters each way."""

    def __init__(self, spec: TAESDSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.encoder:
            self.encoder = _encoder(spec.embed_dim)
        if spec.decoder:
            self.decoder = _decoder(spec.embed_dim)

    def encode(self, x: Tensor) -> Tensor:
        """Pixels (B,3,H,W) in [-1,1] -> latents (B,embed_dim,H/8,W/8) in the UNet's scale.

        Raises ValueError if there is no encoder, x has not 3 channels or a side is no multiple of 8.
        """
        if not self.spec.encoder:
            raise ValueError(
                "this TAESD is a decoder alone, and an image must be encoded: take a file of both, or put "
                "taesd_encoder.pth beside taesd_decoder.pth"
            )
        if x.shape[1] != 3 or x.shape[2] % 8 or x.shape[3] % 8:
            raise ValueError(f"got pixels {tuple(x.shape)}, wanted (B, 3, H, W) with H and W multiples of 8")
        return self.encoder((x + 1) / 2)

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """encode(x), and zero: mean and standard deviation of the latents, of which an image has one here."""
        z = self.encode(x)
        return z, torch.zeros_like(z)

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w) in the UNet's scale -> pixels (B,3,8h,8w), about [-1,1], unclamped.

        Raises ValueError if there is no decoder or z has not embed_dim channels.
        """
        if not self.spec.decoder:
            raise ValueError(
                "this TAESD is an encoder alone: take a file of both, or put taesd_decoder.pth beside taesd_encoder.pth"
            )
        if z.shape[1] != self.spec.embed_dim:
            raise ValueError(f"got latents with {z.shape[1]} channels, wanted {self.spec.embed_dim}")
        return self.decoder(z) * 2 - 1

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (B,3,H,W) -> their reconstruction (B,3,H,W)."""
        return self.decode(self.encode(x))
