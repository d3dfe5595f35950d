"""The UNet of Stable Diffusion: noised latents, a timestep and a text -> the prediction.

Attribute names are the checkpoint's keys, so an original file loads strictly, with no renaming.  An upsampler resizes
to the size of the next skip, so any latent size works.

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, T text tokens, D context channels, E embedding.
Source: Rombach et al. 2022, sec. 3; CompVis openaimodel.py and attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import (
    AttentionFn,
    Conv1x1,
    Shapes,
    Upsample,
    channels_last,
    checked_shape,
    count_blocks,
    merge_heads,
    sdpa,
    sinusoids,
    split_heads,
)


@dataclass(frozen=True)
class UNetSpec:
    """Sizes of a UNet.  Tuples have one entry per level, the highest resolution first."""

    in_channels: int
    out_channels: int
    model_channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: tuple[int, ...]
    transformer_depth: tuple[int, ...]  # transformer blocks after each residual block; 0 = no attention
    middle_depth: int
    context_dim: int
    heads: int | None = None  # of each attention layer; shapes do not show it

    @staticmethod
    def from_shapes(shapes: Shapes) -> UNetSpec:
        """Return the spec of a UNet with weights of these shapes, heads None.

        Raises ValueError if a tensor that every such UNet has is missing or makes no sense.
        """
        width, in_channels = checked_shape(shapes, "input_blocks.0.0.weight", 4)[:2]
        num_blocks = count_blocks(shapes, r"input_blocks\.(\d+)\.")
        downsamplers = [i for i in range(num_blocks) if f"input_blocks.{i}.0.op.weight" in shapes]
        bounds = [0, *downsamplers, num_blocks]  # a level's residual blocks are between two of these
        blocks = tuple(after - before - 1 for before, after in pairwise(bounds))
        firsts = [1 + before for before in (0, *downsamplers)]  # the first residual block of each level
        widths = [checked_shape(shapes, f"input_blocks.{i}.0.out_layers.0.weight", 1)[0] for i in firsts]
        contexts = [checked_shape(shapes, key, 2)[1] for key in shapes if key.endswith("attn2.to_k.weight")]
        if not contexts:
            raise ValueError("this UNet reads no text")
        return UNetSpec(
            in_channels=in_channels,
            out_channels=checked_shape(shapes, "out.2.weight", 4)[0],
            model_channels=width,
            channel_mult=tuple(channels // width for channels in widths),
            num_res_blocks=blocks,
            transformer_depth=tuple(_depth(shapes, f"input_blocks.{i}") for i in firsts),
            middle_depth=_depth(shapes, "middle_block"),
            context_dim=contexts[0],
        )


def _depth(shapes: Shapes, block: str) -> int:
    return count_blocks(shapes, rf"{re.escape(block)}\.1\.transformer_blocks\.(\d+)\.")


# ---- transformers ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention of x (B,N,C) to a context (B,T,D), which may be x itself.  Vaswani et al. 2017, sec. 3.2."""

    def __init__(self, channels: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention: AttentionFn = sdpa  # see layers.use_attention
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_dim, channels, bias=False)
        self.to_v = nn.Linear(context_dim, channels, bias=False)
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Identity())  # slot 1 held a Dropout

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = split_heads(self.to_q(x), self.num_heads)  # (B, H, N, D)
        k = split_heads(self.to_k(context), self.num_heads)  # (B, H, T, D)
        v = split_heads(self.to_v(context), self.num_heads)  # (B, H, T, D)
        out = self.attention(q, k, v)  # (B, H, N, D)
        return self.to_out(merge_heads(out))


class GEGLU(nn.Module):
    """Linear to twice the width; the first half times the GELU of the second.  Shazeer 2020."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, 2 * out_channels)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    """GEGLU to four times the width and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.net = nn.Sequential(GEGLU(channels, wide), nn.Identity(), nn.Linear(wide, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, channels: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attn1 = Attention(channels, channels, num_heads)
        self.ff = FeedForward(channels)
        self.attn2 = Attention(channels, context_dim, num_heads)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """Transformer blocks over the positions of a feature map with a residual connection (B,C,h,w) -> (B,C,h,w)."""

    def __init__(self, channels: int, context_dim: int, num_heads: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.proj_in = Conv1x1(channels, channels)
        blocks = (BasicTransformerBlock(channels, context_dim, num_heads) for _ in range(depth))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.proj_out = Conv1x1(channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)  # (B, N, C)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        return x + self.proj_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


# ---- residual blocks ------------------------------------------------------------------------------------------------


class Downsample(nn.Module):
    """(B,C,h,w) -> (B,C,ceil(h/2),ceil(w/2)) by a strided convolution with symmetric padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class ResBlock(nn.Module):
    """Two 3x3 convolutions with the timestep in between and a residual connection."""

    def __init__(self, in_channels: int, out_channels: int, emb_channels: int) -> None:
        super().__init__()
        # Made in this order, in which a seed draws their first weights.
        conv_in = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        conv_out = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.in_layers = nn.Sequential(
            nn.GroupNorm(32, in_channels),
            nn.SiLU(inplace=True),
            conv_in,
        )
        self.emb_layers = nn.Sequential(
            nn.Identity(),  # in place of a SiLU, which UNet.embed applies once for all blocks
            nn.Linear(emb_channels, out_channels),
        )
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, out_channels),
            nn.SiLU(inplace=True),
            nn.Identity(),  # in place of a Dropout
            conv_out,
        )
        is_same = in_channels == out_channels
        self.skip_connection = nn.Identity() if is_same else Conv1x1(in_channels, out_channels)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class Block(nn.ModuleList):
    """The layers at one index of input_blocks, middle_block or output_blocks, each called with the inputs it needs."""

    def forward(self, x: Tensor, emb: Tensor, context: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, emb)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            elif isinstance(layer, Upsample):
                x = layer(x, size)
            else:
                x = layer(x)
        return x


# ---- the network ----------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """The denoising network; the schedule knows what it predicts (eps or v).  Rombach et al. 2022, sec. 3.2."""

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.model_channels
        lowest = len(spec.channel_mult) - 1
        emb = 4 * width
        self.time_embed = nn.Sequential(nn.Linear(width, emb), nn.SiLU(), nn.Linear(emb, emb))

        # down: the first convolution, then per level its residual blocks and a downsampler
        first = nn.Conv2d(spec.in_channels, width, 3, padding=1)
        self.input_blocks = nn.ModuleList([Block([first])])
        channels = width
        skips = [width]  # output channels of each input block
        for level, mult in enumerate(spec.channel_mult):
            for _ in range(spec.num_res_blocks[level]):
                layers = [self.res_block(channels, mult * width)]
                layers += self.transformers(mult * width, level)
                self.input_blocks.append(Block(layers))
                channels = mult * width
                skips.append(channels)
            if level != lowest:
                self.input_blocks.append(Block([Downsample(channels)]))
                skips.append(channels)

        # middle
        layers = [self.res_block(channels, channels)]
        second = self.res_block(channels, channels)  # made before what it follows, as a seed draws their first weights
        layers += self.transformers(channels, None)
        self.middle_block = Block([*layers, second])
        self.skip_channels = tuple(skips)

        # up: one more residual block per level; each also reads the skip of its counterpart
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(spec.channel_mult))):
            last_block = spec.num_res_blocks[level]
            for i in range(last_block + 1):
                layers = [self.res_block(channels + skips.pop(), mult * width)]
                layers += self.transformers(mult * width, level)
                channels = mult * width
                if level > 0 and i == last_block:
                    layers.append(Upsample(channels))
                self.output_blocks.append(Block(layers))
        self.out = nn.Sequential(
            nn.GroupNorm(32, channels),
            nn.SiLU(inplace=True),
            nn.Conv2d(channels, spec.out_channels, 3, padding=1),
        )

    # Methods, so that a subclass can be made of other layers.

    def res_block(self, in_channels: int, channels: int) -> nn.Module:
        """A residual block."""
        return ResBlock(in_channels, channels, 4 * self.spec.model_channels)

    def transformers(self, channels: int, level: int | None) -> list[nn.Module]:
        """The transformer after a residual block of a level, or of the middle (None); nothing if it has none."""
        depth = self.spec.middle_depth if level is None else self.spec.transformer_depth[level]
        if depth == 0:
            return []
        if self.spec.heads is None:
            raise ValueError("the shapes of a UNet do not show its heads: give replace(spec, heads=...)")
        return [SpatialTransformer(channels, self.spec.context_dim, self.spec.heads, depth)]

    def embed(self, t: Tensor) -> Tensor:
        """Embed the timestep t (B,): (B,E) in the weights' dtype, after the SiLU that starts every residual block."""
        dtype: Any = self.time_embed[0].bias.dtype  # the dtype that the network computes in
        return F.silu(self.time_embed(sinusoids(t, self.spec.model_channels).to(dtype)))

    def forward(self, x: Tensor, t: Tensor, context: Tensor, residuals: Sequence[Tensor] | None = None) -> Tensor:
        """Latents x (B,in_channels,h,w) at timesteps t (B,) in [0,1000), text (B,T,D) -> (B,out_channels,h,w).

        residuals are added to every skip, and the last one to the middle's output.  Inputs may have any dtype; it
        computes in that of the weights.
        """
        emb = self.embed(t)
        return self.forward_embedded(channels_last(x.to(emb.dtype)), emb, context.to(emb.dtype), residuals)

    def forward_embedded(
        self, x: Tensor, emb: Tensor, context: Tensor, residuals: Sequence[Tensor] | None = None
    ) -> Tensor:
        """As forward, for a timestep that is embedded already (B,E); all are in the weights' dtype."""
        skips = []
        for block in self.input_blocks:
            x = block(x, emb, context)
            skips.append(x)
        x = self.middle_block(x, emb, context)
        if residuals is not None:
            *for_skips, for_middle = residuals
            skips = [skip + residual for skip, residual in zip(skips, for_skips, strict=True)]
            x = x + for_middle
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            next_size = skips[-1].shape[2:] if skips else None  # what an upsampler resizes to
            x = block(x, emb, context, next_size)
        return self.out(x)
