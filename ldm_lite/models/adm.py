"""Layers of the UNets of Dhariwal and Nichol 2021, which latent diffusion's unconditional models and DeepFloyd IF have.

Attention without a text, and residual blocks that resample, or that the timestep scales and shifts.

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, H heads, D channels of a head, E embedding.
Source: guided-diffusion's unet.py, of which CompVis openaimodel.py is a copy.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core import unet as core
from ldm_lite.core.layers import AttentionFn, Upsample, merge_heads, sdpa, split_heads
from ldm_lite.core.unet import Downsample


class AttentionBlock(nn.Module):
    """Self-attention over all positions with a residual connection (B,C,h,w) -> (B,C,h,w), for unconditional families.

    The rows of qkv are ordered [head 0: q k v][head 1: q k v]..., the original's "legacy" order.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.attention: AttentionFn = sdpa
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.per_head(self.qkv, self.norm(x)).chunk(3, dim=-1)  # (B, H, N, D) each
        out = merge_heads(self.attention(q, *self.attended(k, v, context)))  # (B, N, C)
        out = F.linear(out, self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + out.transpose(1, 2).view_as(x)

    def per_head(self, layer: nn.Conv1d, x: Tensor) -> Tensor:
        """Apply a 1x1 convolution to (B,C,...), as a linear over N positions: (B,H,N,K/H).

        Attention kernels need the channels of a head next to each other.
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)
        return split_heads(F.linear(tokens, layer.weight[:, :, 0], layer.bias), self.num_heads)

    def attended(self, k: Tensor, v: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values that positions attend to: by default their own; other kinds of networks extend it."""
        return k, v


class ResamplingResBlock(core.ResBlock):
    """A residual block whose timestep may scale and shift in place of being added, and which may resample.

    resample "down" halves the size, "up" resizes to `size`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, emb_channels: int, scale_shift: bool, resample: str | None = None
    ) -> None:
        super().__init__(in_channels, out_channels, emb_channels)
        self.scale_shift, self.resample = scale_shift, resample
        self.emb_layers[1] = nn.Linear(emb_channels, out_channels * (1 + scale_shift))

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        # norm, activation, first convolution
        h = self.in_layers[1](self.in_layers[0](x))
        if self.resample == "down":
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)
        elif self.resample == "up":
            h, x = F.interpolate(h, size=size, mode="nearest"), F.interpolate(x, size=size, mode="nearest")
        h = self.in_layers[2](h)

        # the timestep, second convolution
        added = self.emb_layers(emb)[:, :, None, None]  # (B, C or 2C, 1, 1)
        if self.scale_shift:
            scale, shift = added.chunk(2, dim=1)
            h = self.out_layers[0](h) * (1 + scale) + shift
            h = self.out_layers[3](self.out_layers[1](h))
        else:
            h = self.out_layers(h + added)
        return self.skip_connection(x) + h


class ResamplingBlock(core.Block):
    """The core's Block, whose residual blocks may resample."""

    def forward(self, x: Tensor, emb: Tensor, context: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        for layer in self:
            if isinstance(layer, ResamplingResBlock):
                x = layer(x, emb, size)
            elif isinstance(layer, AttentionBlock):
                x = layer(x, context)
            else:
                x = core.Block.forward([layer], x, emb, context, size)  # type: ignore[arg-type]
        return x


def resample_by_residuals(unet: Any, residual: Callable[[int, str], nn.Module]) -> None:
    """Replace the convolutions that resample by residual blocks, by a number of channels and "down" or "up"."""
    kinds: dict[type[nn.Module], str] = {Downsample: "down", Upsample: "up"}

    def replaced(layer: Any) -> nn.Module:
        channels = next(layer.children()).out_channels if type(layer) in kinds else 0
        return residual(channels, kinds[type(layer)]) if channels else layer

    for blocks in (unet.input_blocks, unet.output_blocks):
        for i, block in enumerate(blocks):
            blocks[i] = ResamplingBlock(map(replaced, block))
    unet.middle_block = ResamplingBlock(unet.middle_block)
