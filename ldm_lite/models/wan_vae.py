"""The autoencoder of the video model Wan 2.1, for single images.

Differences from latent diffusion's: norms divide by the root mean square over the channels of each position,
upsamplers halve the channels, and latents are normalised by channel, with numbers that no file has.  Its convolutions
are causal in time: before a single frame there are zeros, so only the last slice of each kernel matters, and layers
between frames do nothing.  formats/wan_vae.py reads files that way.

Shape letters: B batch, C channels, h w latent size.
Source: Wan Team 2025 (arXiv 2503.20314), sec. 4.1; Zhang and Sennrich 2019 (the norm); Wan-Video/Wan2.1 vae.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes
from ldm_lite.core.vae import AutoencoderKL, ResnetBlock, VAESpec
from ldm_lite.models.ops import wide

# Of the latents' channels, in training.
MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
DEVIATION = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True)
class WanVAESpec(VAESpec):
    """Sizes of such an autoencoder."""

    @staticmethod
    def from_shapes(shapes: Shapes) -> WanVAESpec:
        """Return the spec of an autoencoder with weights of these shapes.  Raises ValueError if they make no sense."""
        spec = WanVAESpec(**{**vars(VAESpec.from_shapes(shapes)), "mid_attn": True})
        if spec.embed_dim != len(MEAN):
            raise ValueError(f"its latents have {spec.embed_dim} channels, expected {len(MEAN)}, as Wan 2.1's")
        return spec


class ChannelNorm(nn.Module):
    """(B,C,h,w) by the root mean square of each position's channels, times gamma (C,)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.normalize(x.to(wide(x.dtype)), dim=1).to(x.dtype) * x.shape[1] ** 0.5
        return normed * self.gamma[:, None, None]


class WanVAE(AutoencoderKL):
    """Pixels <-> normalised latents, for h w = H/8, W/8."""

    def __init__(self, spec: WanVAESpec) -> None:
        super().__init__(spec)
        network: Any = self
        for level, finer in zip(network.decoder.up[:0:-1], network.decoder.up[-2::-1], strict=True):
            channels, first = level.upsample.conv.in_channels, finer.block[0]
            level.upsample.conv = nn.Conv2d(channels, channels // 2, 3, padding=1)
            finer.block[0] = ResnetBlock(channels // 2, first.conv1.out_channels)
        for module in list(self.modules()):
            for name, norm in module.named_children():
                if isinstance(norm, nn.GroupNorm):
                    setattr(module, name, ChannelNorm(norm.num_channels))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> mean and standard deviation of the latents, (B,C,h,w)."""
        mean, deviation = super().encode(x)
        of_mean, of_deviation = (x.new_tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
        return (mean - of_mean) / of_deviation, deviation / of_deviation

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,C,h,w) -> pixels (B,3,H,W) in [-1,1], unclamped."""
        of_mean, of_deviation = (z.new_tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
        return super().decode(z * of_deviation + of_mean)


# ---- released -------------------------------------------------------------------------------------------------------

WAN_VAE = WanVAESpec(channels=96, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=16, embed_dim=16)
