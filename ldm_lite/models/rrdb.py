"""RRDBNet, the generator of ESRGAN and Real-ESRGAN: an image -> the image 4, 2 or 1 times as large.

What is unusual about it:
- there are no norms; residuals are scaled by 0.2;
- the network always enlarges four times: for a factor of 2 or 1 the image is folded into channels first;
- inside, images are in [0,1]; forward() takes and returns [-1,1] as the autoencoders here do.

Attribute names are the keys of BasicSR's files (RealESRGAN_x4plus.pth); formats/esrgan.py renames ESRGAN's own.

Shape letters: B batch, C channels (64), G grown channels (32), H W image size, F factor.
Source: Wang et al. 2018, sec. 3.1 (blocks); Wang et al. 2021, sec. 3.3 (folding); BasicSR, rrdbnet_arch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks

FOLDS = {3: 1, 12: 2, 48: 4}  # channels of the first convolution -> pixels folded into one, along each side


@dataclass(frozen=True)
class RRDBSpec:
    """Sizes in which these networks differ."""

    fold: int  # 1, 2, 4: the factor is 4 / fold
    width: int
    grown: int
    blocks: int

    @staticmethod
    def from_shapes(shapes: Shapes) -> RRDBSpec:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, channels = checked_shape(shapes, "conv_first.weight", 4)[:2]
        out = checked_shape(shapes, "conv_last.weight", 4)[0]
        if channels not in FOLDS or out != 3:
            raise ValueError(f"reads {channels} channels and makes {out}, expected an upscaler of RGB images")
        grown = checked_shape(shapes, "body.0.rdb1.conv1.weight", 4)[0]
        return RRDBSpec(FOLDS[channels], width, grown, count_blocks(shapes, r"body\.(\d+)\."))

    @property
    def factor(self) -> int:
        """Pixels of the result per pixel of the image, along each side."""
        return 4 // self.fold


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


class DenseBlock(nn.Module):
    """Five convolutions, each of which reads the input and the outputs of those before it."""

    def __init__(self, width: int, grown: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, grown)
        self.conv2 = _conv(width + grown, grown)
        self.conv3 = _conv(width + 2 * grown, grown)
        self.conv4 = _conv(width + 3 * grown, grown)
        self.conv5 = _conv(width + 4 * grown, width)

    def forward(self, x: Tensor) -> Tensor:
        all_maps = x  # (B, C + iG, H, W)
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            all_maps = torch.cat([all_maps, _leaky(conv(all_maps))], dim=1)
        return x + 0.2 * self.conv5(all_maps)


class RRDB(nn.Module):
    """Three dense blocks with a residual connection around them."""

    def __init__(self, width: int, grown: int) -> None:
        super().__init__()
        self.rdb1 = DenseBlock(width, grown)
        self.rdb2 = DenseBlock(width, grown)
        self.rdb3 = DenseBlock(width, grown)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.2 * self.rdb3(self.rdb2(self.rdb1(x)))


class RRDBNet(nn.Module):
    """Pixels -> enlarged pixels, 16.7 million parameters at 23 blocks."""

    def __init__(self, spec: RRDBSpec) -> None:
        super().__init__()
        self.spec = spec
        self.conv_first = _conv(3 * spec.fold**2, spec.width)
        self.body = nn.Sequential(*(RRDB(spec.width, spec.grown) for _ in range(spec.blocks)))
        self.conv_body = _conv(spec.width, spec.width)
        self.conv_up1 = _conv(spec.width, spec.width)
        self.conv_up2 = _conv(spec.width, spec.width)
        self.conv_hr = _conv(spec.width, spec.width)
        self.conv_last = _conv(spec.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (B,3,H,W) in [-1,1], sides multiples of `fold` -> (B,3,F*H,F*W), about [-1,1], unclamped."""
        first = self.conv_first(F.pixel_unshuffle((x + 1) / 2, self.spec.fold))
        maps = first + self.conv_body(self.body(first))
        for conv in (self.conv_up1, self.conv_up2):
            maps = _leaky(conv(F.interpolate(maps, scale_factor=2.0)))
        return self.conv_last(_leaky(self.conv_hr(maps))) * 2 - 1
