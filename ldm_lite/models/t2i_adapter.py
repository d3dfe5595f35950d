"""T2I-Adapter: a small network that turns an image into features for a UNet's encoder, once per job.

What is unusual about it: it reads neither the latents nor the timestep, so it costs nothing per step.

Shape letters: B batch, c channels of the image (1 or 3), C channels, h w latent size.
Source: Mou et al. 2023, sec. 3; the original ldm/modules/encoders/adapter.py, and Adapter/models/adapters.py for XL.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks
from ldm_lite.models.ops import multiple


@dataclass(frozen=True)
class AdapterSpec:
    """Sizes in which adapters differ."""

    in_channels: int  # of the image
    factor: int  # pixels per position of the first features, along each side: 8, or 16 for SDXL
    channels: tuple[int, ...]  # of the features, one entry per level of the UNet; for SDXL the last is for the middle
    num_res_blocks: int  # per level
    light: bool  # the small kind: each level is a narrow stack between two 1x1 convolutions

    @staticmethod
    def from_shapes(shapes: Shapes, num_levels: int) -> AdapterSpec:
        """Return the spec of an adapter whose weights have these shapes, for a UNet with num_levels levels.

        Raises ValueError if a tensor that every adapter has is missing or makes no sense.
        """
        light, num_blocks = "body.0.in_conv.weight" in shapes, count_blocks(shapes, r"body\.(\d+)\.")
        unshuffled = checked_shape(shapes, "body.0.in_conv.weight" if light else "conv_in.weight", 4)[1]
        factor = 16 if unshuffled % 256 == 0 else 8
        if light:
            channels = [checked_shape(shapes, f"body.{i}.out_conv.weight", 4)[0] for i in range(num_blocks)]
            num_res_blocks = count_blocks(shapes, r"body\.0\.body\.(\d+)\.")
        else:
            num_res_blocks = max(1, num_blocks // (num_levels + (factor == 16)))
            channels = [
                checked_shape(shapes, f"body.{i}.block1.weight", 4)[0] for i in range(0, num_blocks, num_res_blocks)
            ]
        return AdapterSpec(
            multiple(unshuffled, factor**2, "the input's width"), factor, tuple(channels), num_res_blocks, light
        )

    @property
    def halved(self) -> tuple[bool, ...]:
        """For each level, whether it starts by halving the size."""
        return tuple(i == 2 if self.factor == 16 else i > 0 for i in range(len(self.channels)))


class AdapterBlock(nn.Module):
    """Two convolutions around a ReLU with a residual connection, after an optional halving and change of channels."""

    def __init__(self, in_channels: int, channels: int, halved: bool = False, kernel: int = 1) -> None:
        super().__init__()
        self.halved = halved
        self.in_conv = nn.Identity() if in_channels == channels else nn.Conv2d(in_channels, channels, 1)
        self.block1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.block2 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        # Odd sizes round up, as in the UNet's strided convolutions.
        x = self.in_conv(F.avg_pool2d(x, 2, ceil_mode=True) if self.halved else x)
        return x + self.block2(F.relu(self.block1(x)))


class LightBlock(nn.Module):
    """A level of a light adapter: blocks at a quarter of the width between two 1x1 convolutions."""

    def __init__(self, in_channels: int, channels: int, halved: bool, num_res_blocks: int) -> None:
        super().__init__()
        self.halved = halved
        inner = channels // 4
        self.in_conv = nn.Conv2d(in_channels, inner, 1)
        self.body = nn.Sequential(*[AdapterBlock(inner, inner, kernel=3) for _ in range(num_res_blocks)])
        self.out_conv = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2, ceil_mode=True) if self.halved else x
        return self.out_conv(self.body(self.in_conv(x)))


class T2IAdapter(nn.Module):
    """An image -> features for each level of a UNet."""

    def __init__(self, spec: AdapterSpec) -> None:
        super().__init__()
        self.spec = spec
        channels = spec.in_channels * spec.factor**2
        if not spec.light:
            self.conv_in = nn.Conv2d(channels, spec.channels[0], 3, padding=1)
            channels = spec.channels[0]
        self.body = nn.ModuleList()
        for width, halved in zip(spec.channels, spec.halved, strict=True):
            if spec.light:
                self.body.append(LightBlock(channels, width, halved, spec.num_res_blocks))
            else:
                self.body.append(AdapterBlock(channels, width, halved))
                self.body.extend(AdapterBlock(width, width) for _ in range(spec.num_res_blocks - 1))
            channels = width

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """The image (B,c,H,W) in [0,1], H and W multiples of the factor -> features (B,C,h,w), one per level."""
        x = F.pixel_unshuffle(image, self.spec.factor)  # (B, c*f*f, H/f, W/f)
        x = x if self.spec.light else self.conv_in(x)
        features, last = [], 0 if self.spec.light else self.spec.num_res_blocks - 1
        for i, block in enumerate(self.body):
            x = block(x)
            if self.spec.light or i % self.spec.num_res_blocks == last:
                features.append(x)
        return tuple(features)

    def place(self, features: tuple[Tensor, ...], num_res_blocks: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """Arrange features as UNet.forward takes them: one entry for each input block, and one for the middle.

        num_res_blocks is the UNet's.  Features are added after the last residual block of each level; for SDXL the
        first, of half the size, after the downsampler that follows, and the last after the middle.  Raises ValueError
        if the UNet has another number of levels.
        """
        ends = [sum(num_res_blocks[: i + 1]) + i for i in range(len(num_res_blocks))]
        where = [ends[0] + 1, *ends[1:], ends[-1] + 1] if self.spec.factor == 16 else ends
        if len(where) != len(features):
            raise ValueError(f"this adapter has features for {len(features)} levels, the UNet takes {len(where)}")
        return tuple(features[where.index(i)] if i in where else None for i in range(ends[-1] + 2))
