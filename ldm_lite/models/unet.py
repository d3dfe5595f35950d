"""The UNets of latent diffusion: every one of CompVis and Stability, from a frozen spec.

They extend the core's UNet, with other kinds of layers where the spec says so: Stable Diffusion 2 and XL project by
linears, XL and unCLIP read a vector, the x4 upscaler classes; unconditional models use adm.py's layers.
Attribute names are the checkpoint's keys, so an original file loads strictly with no renaming.

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, T text tokens, D context channels, E embedding.
Source: Rombach et al. 2022, sec. 3; Dhariwal and Nichol 2021; CompVis openaimodel.py and attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core import unet as core
from ldm_lite.core.layers import MOST_BLOCKS, Shapes, Upsample, channels_last, checked_shape, count_blocks, sinusoids
from ldm_lite.core.unet import Attention, BasicTransformerBlock, Downsample, SpatialTransformer
from ldm_lite.models.adm import AttentionBlock, ResamplingResBlock, resample_by_residuals
from ldm_lite.models.ops import mlp, multiple

__all__ = [
    "AttentionBlock",
    "Downsample",
    "LDMUNet",
    "LDMUNetSpec",
    "ResamplingResBlock",
    "SpatialTransformer",
    "Upsample",
]


@dataclass(frozen=True)
class LDMUNetSpec:
    """Sizes and options in which LDM UNets differ.  Tuples have one entry per level, the highest resolution first."""

    in_channels: int
    out_channels: int
    model_channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: tuple[int, ...]
    transformer_depth: tuple[int, ...]  # transformer blocks after each residual block; 0 = no attention
    middle_depth: int
    num_heads: int | None  # either num_heads or head_dim is set; weights do not show it
    head_dim: int | None
    context_dim: int | None  # None = unconditional: qkv attention blocks instead of transformers
    linear_proj: bool  # proj_in and proj_out of a transformer are linears, not 1x1 convolutions
    cross_only: tuple[bool, ...]  # attn1 attends to the context too (x4 upscaler)
    vector_dim: int | None  # width of y for the label_emb MLP (SDXL, unCLIP)
    guidance_dim: int | None  # width of the guidance scale's sinusoids, at the end of y (LCM)
    num_classes: int | None  # size of the label_emb table (x4 upscaler: noise levels)
    scale_shift: bool  # the timestep scales and shifts the normalised features instead of being added
    resblock_updown: bool  # resampling by residual blocks instead of convolutions

    patch: ClassVar[int] = 1  # sides of the latents are multiples of it

    @staticmethod
    def from_shapes(shapes: Shapes) -> LDMUNetSpec:
        """Return the spec of a UNet whose weights have these shapes, with num_heads and head_dim both None.

        Raises ValueError if a tensor that every LDM UNet has is missing or makes no sense.
        """
        mc, in_channels = checked_shape(shapes, "input_blocks.0.0.weight", 4)[:2]
        num_in, num_out = (count_blocks(shapes, rf"{side}_blocks\.(\d+)\.") for side in ("input", "output"))

        # levels end in strided convolutions, or else (seen from the deepest) in residual blocks that upsample
        ends = [i for i in range(num_in) if f"input_blocks.{i}.0.op.weight" in shapes]
        ups = [i for i in range(num_out) for j in (1, 2) if f"output_blocks.{i}.{j}.in_layers.0.weight" in shapes]
        if ends or not num_out:
            bounds = [0, *ends, num_in]
            num_res_blocks = tuple(after - before - 1 for before, after in pairwise(bounds))
        else:
            bounds = [-1, *ups, num_out - 1]
            num_res_blocks = tuple(after - before - 1 for before, after in pairwise(bounds))[::-1]

        # widths and attention: read at the first residual block of each level
        firsts = [1 + sum(num_res_blocks[:level]) + level for level in range(len(num_res_blocks))]
        widths = [checked_shape(shapes, f"input_blocks.{i}.0.out_layers.0.weight", 1)[0] for i in firsts]

        contexts = [checked_shape(shapes, key, 2)[1] for key in shapes if key.endswith("attn2.to_k.weight")]
        label, label_mlp, guidance = (
            checked_shape(shapes, f"{name}.weight", 2) if f"{name}.weight" in shapes else None
            for name in ("label_emb", "label_emb.0.0", "cond_proj")
        )
        depths = tuple(_depth(shapes, f"input_blocks.{i}") for i in firsts)
        sides = 2 if num_out else 1  # the depth is read in one place: throughout, it must not give a far larger network
        if contexts and sum(map(mul, depths, num_res_blocks)) * sides > 2 * len(contexts) + MOST_BLOCKS:
            raise ValueError(f"has {max(depths)} transformer blocks in one place, but {len(contexts)} in all")
        attn1 = (f"input_blocks.{i}.1.transformer_blocks.0.attn1" for i in firsts)
        projections = [[shapes.get(f"{layer}.{name}.weight", ()) for name in ("to_q", "to_k")] for layer in attn1]
        return LDMUNetSpec(
            in_channels=in_channels,
            out_channels=checked_shape(shapes, "out.2.weight", 4)[0],
            model_channels=mc,
            channel_mult=tuple(multiple(width, mc, "the width of a level") for width in widths),
            num_res_blocks=num_res_blocks,
            transformer_depth=depths,
            middle_depth=_depth(shapes, "middle_block"),
            num_heads=None,
            head_dim=None,
            context_dim=contexts[0] if contexts else None,
            linear_proj=len(shapes.get("middle_block.1.proj_in.weight", ())) == 2,
            cross_only=tuple(q[1:] != k[1:] for q, k in projections),
            vector_dim=label_mlp[1] if label_mlp else None,
            guidance_dim=guidance[1] if guidance else None,
            num_classes=label[0] if label else None,
            scale_shift=checked_shape(shapes, "input_blocks.1.0.emb_layers.1.weight", 2)[0] == 2 * widths[0],
            resblock_updown=bool(ups),
        )

    def heads(self, channels: int) -> int:
        """Number of attention heads of a layer with `channels` channels."""
        if self.num_heads is not None:
            return self.num_heads
        assert self.head_dim is not None
        return channels // self.head_dim


def _depth(shapes: Shapes, block: str) -> int:
    """Count the transformer blocks in an input block or the middle; 1 for an attention block."""
    blocks = count_blocks(shapes, rf"{re.escape(block)}\.1\.transformer_blocks\.(\d+)\.")
    return blocks or int(f"{block}.1.qkv.weight" in shapes)


# ---- transformers ---------------------------------------------------------------------------------------------------


class CrossOnlyBlock(BasicTransformerBlock):
    """A transformer block whose first attention reads the context too (x4 upscaler)."""

    def __init__(self, channels: int, context_dim: int, num_heads: int) -> None:
        super().__init__(channels, context_dim, num_heads)
        self.attn1 = Attention(channels, context_dim, num_heads)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), context)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class LinearTransformer(SpatialTransformer):
    """A transformer with linears around it in place of 1x1 convolutions."""

    def __init__(self, channels: int, context_dim: int, num_heads: int, depth: int) -> None:
        super().__init__(channels, context_dim, num_heads, depth)
        self.proj_in, self.proj_out = nn.Linear(channels, channels), nn.Linear(channels, channels)  # type: ignore[assignment]

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))  # (B, N, C)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        return x + self.proj_out(tokens).transpose(1, 2).unflatten(2, x.shape[2:])


# ---- the network ----------------------------------------------------------------------------------------------------


class LDMUNet(core.UNet):
    """The denoising network of a latent diffusion model: noised latents and a timestep -> its prediction.

    The schedule knows what is predicted (eps, v or x0).  Rombach et al. 2022, sec. 3.2.
    """

    def __init__(self, spec: LDMUNetSpec) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self.spec: LDMUNetSpec = spec  # type: ignore[assignment]
        width = spec.model_channels
        # The originals have no such layer; the name is from diffusers' time_embedding.cond_proj.
        self.cond_proj = None if spec.guidance_dim is None else nn.Linear(spec.guidance_dim, width, bias=False)
        self.label_emb: nn.Module | None = None
        if spec.num_classes is not None:
            self.label_emb = nn.Embedding(spec.num_classes, 4 * width)
        elif spec.vector_dim is not None:
            self.label_emb = nn.Sequential(mlp(spec.vector_dim, 4 * width, 4 * width))
        if spec.resblock_updown:
            emb = 4 * width
            resample_by_residuals(
                self, lambda channels, kind: ResamplingResBlock(channels, channels, emb, spec.scale_shift, kind)
            )

    def res_block(self, in_channels: int, channels: int) -> nn.Module:
        """A residual block."""
        if not self.spec.scale_shift:
            return super().res_block(in_channels, channels)
        return ResamplingResBlock(in_channels, channels, 4 * self.spec.model_channels, scale_shift=True)

    def transformers(self, channels: int, level: int | None) -> list[nn.Module]:
        """The transformer after a residual block of a level, or of the middle (None); nothing if it has none."""
        spec = self.spec
        depth, heads = spec.middle_depth if level is None else spec.transformer_depth[level], spec.heads(channels)
        if depth == 0:
            return []
        if spec.context_dim is None:
            return [AttentionBlock(channels, heads)]
        kind = LinearTransformer if spec.linear_proj else SpatialTransformer
        transformer = kind(channels, spec.context_dim, heads, depth)
        if level is not None and spec.cross_only[level]:
            blocks = (CrossOnlyBlock(channels, spec.context_dim, heads) for _ in range(depth))
            transformer.transformer_blocks = nn.ModuleList(blocks)
        return [transformer]

    def embed(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Embed the timestep t (B,) and the label: (B,E), after the SiLU that starts every residual block."""
        dtype = self.time_embed[0].bias.dtype
        waves = sinusoids(t, self.spec.model_channels).to(dtype)  # type: ignore[arg-type]
        if self.cond_proj is not None and y is not None:
            y, guidance = y.tensor_split([-self.cond_proj.in_features], dim=1)  # (B, V), (B, G)
            waves = waves + self.cond_proj(guidance.to(waves.dtype))
        emb = self.time_embed(waves)
        if self.label_emb is not None:
            assert y is not None
            emb = emb + self.label_emb(y.to(emb.dtype) if y.is_floating_point() else y)
        return F.silu(emb)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        concat: Tensor | None = None,
        residuals: Sequence[Tensor] | None = None,
        features: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Latents x (B,C,h,w) at timesteps t (B,) in [0,1000) -> prediction (B,out_channels,h,w).

        context (B,T,D) is the text (None for unconditional models); concat (B,C',h,w) are the input channels after
        those of the latents.  y holds a vector (B,vector_dim), the guidance scale's embedding (B,guidance_dim), both in
        this order, or class indices (B,), as the spec says.  residuals and features have one entry for each input block
        and one for the middle: residuals (ControlNet) are added only to the skips, features (T2I-Adapter) to the
        feature maps too.  Inputs may have any dtype; it computes in that of the weights.
        """
        emb = self.embed(t, y)  # (B, E)
        x = x if concat is None else torch.cat([x, concat.to(x.dtype)], dim=1)
        # Networks without text ignore the context.
        context = cast(Tensor, context if context is None else context.to(emb.dtype))
        if features is None:
            return self.forward_embedded(channels_last(x.to(emb.dtype)), emb, context, residuals)
        *skips, x = self.down(x, emb, context, features)
        if residuals is not None:
            *skips, x = (tensor + more for tensor, more in zip([*skips, x], residuals, strict=True))
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, emb, context, skips[-1].shape[2:] if skips else None)
        return self.out(x)

    def down(self, x: Tensor, emb: Tensor, context: Tensor, features: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the outputs of the input blocks and of the middle, each plus its feature, if there is one."""
        x, outputs = channels_last(x.to(emb.dtype)), []
        for block, feature in zip([*self.input_blocks, self.middle_block], features, strict=True):
            x = plus(block(x, emb, context), feature)
            outputs.append(x)
        return outputs


def plus(x: Tensor, feature: Tensor | None) -> Tensor:
    """Add a feature, if there is one."""
    return x if feature is None else x + feature
