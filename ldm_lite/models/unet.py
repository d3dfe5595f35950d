"""The LDM UNet: every latent diffusion UNet of CompVis and Stability, from a frozen spec.

What is unusual about it:
- attribute names are the checkpoint's keys, so an original file loads strictly with no renaming;
- one class covers Stable Diffusion 1.x, 2.x, XL, inpainting, the x4 upscaler, class-, BERT- and
  unconditional LDM: they differ only in the fields of `UNetSpec`;
- an upsampler resizes to the size of the next skip, so any latent size works;
- tensors in, one tensor out: nothing that changes between steps is a Python number;
- the keys and values of the text can be computed once for all steps (`text_cache`).

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, T text tokens, D context channels, E embedding.
Source: Rombach et al. 2022, sec. 3; Dhariwal and Nichol 2021; CompVis openaimodel.py and attention.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import MOST_BLOCKS, Conv1x1, Shapes, channels_last, count, size
from ldm_lite.core.layers import sinusoids as timestep_embedding
from ldm_lite.models.ops import multiple
from ldm_lite.models.transformer import AttentionBlock, SpatialTransformer, TextCache, call_cached


@dataclass(frozen=True)
class UNetSpec:
    """Sizes and options in which LDM UNets differ.  Tuples have one entry per level, the highest resolution first."""

    in_channels: int
    out_channels: int
    model_channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: tuple[int, ...]
    transformer_depth: tuple[int, ...]  # transformer blocks after each residual block; 0 = no attention
    middle_depth: int
    num_heads: int | None  # either num_heads or head_dim is given; not known from the weights
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
    def from_shapes(shapes: Shapes) -> UNetSpec:
        """Return the spec of a UNet whose weights have these shapes, with num_heads and head_dim both None.

        Raises ValueError if a tensor that every LDM UNet has is missing or makes no sense.
        """
        mc, in_channels = size(shapes, "input_blocks.0.0.weight", 4)[:2]
        num_in, num_out = (count(shapes, rf"{side}_blocks\.(\d+)\.") for side in ("input", "output"))

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
        widths = [size(shapes, f"input_blocks.{i}.0.out_layers.0.weight", 1)[0] for i in firsts]

        contexts = [size(shapes, key, 2)[1] for key in shapes if key.endswith("attn2.to_k.weight")]
        label, label_mlp, guidance = (
            size(shapes, f"{name}.weight", 2) if f"{name}.weight" in shapes else None
            for name in ("label_emb", "label_emb.0.0", "cond_proj")
        )
        depths, middle_depth = (
            tuple(_depth(shapes, f"input_blocks.{i}") for i in firsts),
            _depth(shapes, "middle_block"),
        )
        sides = 2 if num_out else 1  # a network as deep throughout as where it was read must not be far larger
        if contexts and sum(map(mul, depths, num_res_blocks)) * sides > 2 * len(contexts) + MOST_BLOCKS:
            raise ValueError(f"has {max(depths)} transformer blocks in one place, but {len(contexts)} in all")
        return UNetSpec(
            in_channels=in_channels,
            out_channels=size(shapes, "out.2.weight", 4)[0],
            model_channels=mc,
            channel_mult=tuple(multiple(width, mc, "the width of a level") for width in widths),
            num_res_blocks=num_res_blocks,
            transformer_depth=depths,
            middle_depth=middle_depth,
            num_heads=None,
            head_dim=None,
            context_dim=contexts[0] if contexts else None,
            linear_proj=len(shapes.get("middle_block.1.proj_in.weight", ())) == 2,
            cross_only=tuple(_cross_only(shapes, f"input_blocks.{i}") for i in firsts),
            vector_dim=label_mlp[1] if label_mlp else None,
            guidance_dim=guidance[1] if guidance else None,
            num_classes=label[0] if label else None,
            scale_shift=size(shapes, "input_blocks.1.0.emb_layers.1.weight", 2)[0] == 2 * widths[0],
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
    blocks = count(shapes, rf"{re.escape(block)}\.1\.transformer_blocks\.(\d+)\.")
    return blocks or int(f"{block}.1.qkv.weight" in shapes)


def _cross_only(shapes: Shapes, block: str) -> bool:
    attn1 = f"{block}.1.transformer_blocks.0.attn1"
    if f"{attn1}.to_q.weight" not in shapes:
        return False
    to_q, to_k = (size(shapes, f"{attn1}.{name}.weight", 2) for name in ("to_q", "to_k"))
    return to_q[1] != to_k[1]


class Downsample(nn.Module):
    """(B,C,h,w) -> (B,C,ceil(h/2),ceil(w/2)) by a strided convolution with symmetric padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    """(B,C,h,w) -> (B,C,*size) by nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return self.conv(F.interpolate(x, size=size, mode="nearest"))


class ResBlock(nn.Module):
    """Two 3x3 convolutions with the timestep in between and a residual connection.

    resample "down" halves the size, "up" resizes to `size`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, emb_channels: int, scale_shift: bool, resample: str | None = None
    ) -> None:
        super().__init__()
        self.scale_shift = scale_shift
        self.resample = resample
        self.in_layers = nn.Sequential(
            nn.GroupNorm(32, in_channels), nn.SiLU(inplace=True), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        )
        # Slot 0 held a SiLU: UNet.forward applies it once for all blocks.  out_layers.2 held a Dropout.
        self.emb_layers = nn.Sequential(nn.Identity(), nn.Linear(emb_channels, out_channels * (1 + scale_shift)))
        conv = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.out_layers = nn.Sequential(nn.GroupNorm(32, out_channels), nn.SiLU(inplace=True), nn.Identity(), conv)
        same = in_channels == out_channels
        self.skip_connection = nn.Identity() if same else Conv1x1(in_channels, out_channels)

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int] | None) -> Tensor:
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


class Block(nn.ModuleList):
    """The layers at one index of input_blocks, middle_block or output_blocks, each called with the inputs it needs."""

    def forward(
        self,
        x: Tensor,
        emb: Tensor,
        context: Tensor | None,
        size: tuple[int, int] | None,
        cache: TextCache | None = None,
    ) -> Tensor:
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, emb, size)
            elif isinstance(layer, SpatialTransformer):
                x = call_cached(layer, x, context, None if cache is None or layer.index is None else cache[layer.index])
            elif isinstance(layer, Upsample):
                x = layer(x, size)
            else:
                x = layer(x)
        return x


class Encoder(nn.Module):
    """A UNet's encoder half and middle: the part that a ControlNet copies."""

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__()
        self.spec = spec
        self._num_transformers = 0
        width = spec.model_channels
        emb_channels = 4 * width

        def mlp(in_channels: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(in_channels, emb_channels), nn.SiLU(), nn.Linear(emb_channels, emb_channels))

        self.time_embed = mlp(width)
        # The originals have no such layer; the name is from diffusers' time_embedding.cond_proj.
        self.cond_proj = None if spec.guidance_dim is None else nn.Linear(spec.guidance_dim, width, bias=False)
        self.label_emb: nn.Module | None = None
        if spec.num_classes is not None:
            self.label_emb = nn.Embedding(spec.num_classes, emb_channels)
        elif spec.vector_dim is not None:
            self.label_emb = nn.Sequential(mlp(spec.vector_dim))

        # down: the first convolution, then per level its residual blocks and a downsampler
        self.input_blocks = nn.ModuleList([Block([nn.Conv2d(spec.in_channels, width, 3, padding=1)])])
        channels, skips, last = width, [width], len(spec.channel_mult) - 1
        for level, mult in enumerate(spec.channel_mult):
            for _ in range(spec.num_res_blocks[level]):
                layers: list[nn.Module] = [self._res(channels, mult * width)]
                channels = mult * width
                layers += self._attend(channels, spec.transformer_depth[level], spec.cross_only[level])
                self.input_blocks.append(Block(layers))
                skips.append(channels)
            if level != last:
                down = self._res(channels, channels, "down") if spec.resblock_updown else Downsample(channels)
                self.input_blocks.append(Block([down]))
                skips.append(channels)

        # middle: always with attention
        middle = self._attend(channels, spec.middle_depth, cross_only=False)
        self.middle_block = Block([self._res(channels, channels), *middle, self._res(channels, channels)])
        self._skips = tuple(skips)  # output channels of each input block

    def _res(self, in_channels: int, out_channels: int, resample: str | None = None) -> ResBlock:
        return ResBlock(in_channels, out_channels, 4 * self.spec.model_channels, self.spec.scale_shift, resample)

    def _attend(self, channels: int, depth: int, cross_only: bool) -> list[nn.Module]:
        spec, heads = self.spec, self.spec.heads(channels)
        if depth == 0:
            return []
        if spec.context_dim is None:
            return [AttentionBlock(channels, heads)]
        layer = SpatialTransformer(channels, spec.context_dim, heads, depth, spec.linear_proj, cross_only)
        layer.index = self._num_transformers
        self._num_transformers += 1
        return [layer]

    def embed(self, t: Tensor, y: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Embed the timestep t (B,) and the label: (B,E), after the SiLU that starts every residual block."""
        sinusoids = timestep_embedding(t, self.spec.model_channels).to(dtype)
        if self.cond_proj is not None and y is not None:
            y, guidance = y.tensor_split([-self.cond_proj.in_features], dim=1)  # (B, V), (B, G)
            sinusoids = sinusoids + self.cond_proj(guidance)
        emb = self.time_embed(sinusoids)
        if self.label_emb is not None:
            emb = emb + self.label_emb(y)
        return F.silu(emb)


class UNet(Encoder):
    """The denoising network of a latent diffusion model: noised latents and a timestep -> its prediction.

    The schedule knows what is predicted (eps, v or x0).  Rombach et al. 2022, sec. 3.2.
    """

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__(spec)
        width, skips = spec.model_channels, list(self._skips)
        channels = skips[-1]

        # up: one more residual block per level; each also reads the skip of its counterpart
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(spec.channel_mult))):
            for i in range(spec.num_res_blocks[level] + 1):
                layers: list[nn.Module] = [self._res(channels + skips.pop(), mult * width)]
                channels = mult * width
                layers += self._attend(channels, spec.transformer_depth[level], spec.cross_only[level])
                if level and i == spec.num_res_blocks[level]:
                    layers.append(self._res(channels, channels, "up") if spec.resblock_updown else Upsample(channels))
                self.output_blocks.append(Block(layers))

        self.out = nn.Sequential(
            nn.GroupNorm(32, channels), nn.SiLU(inplace=True), nn.Conv2d(channels, spec.out_channels, 3, padding=1)
        )

    def text_cache(self, context: Tensor | None) -> TextCache:
        """Compute the keys and values of all layers for the text (B,T,D) in the weights' dtype: forward's `cache`.

        They depend only on the text, so they are valid for all its steps.  None gives empty entries of all layers.
        """
        layers = {layer.index: layer for layer in self.modules() if isinstance(layer, SpatialTransformer)}
        return tuple(layers[i].text_cache(context) if i in layers else None for i in range(self._num_transformers))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        *,
        cache: TextCache | None = None,
        control: tuple[Tensor, ...] | None = None,
        features: tuple[Tensor | None, ...] | None = None,
    ) -> Tensor:
        """Latents x (B,in_channels,h,w) at timesteps t (B,) in [0,1000) -> prediction (B,out_channels,h,w).

        context (B,T,D) is the text (None for unconditional models); cache is text_cache(context), or None.  y holds
        a vector (B,vector_dim), the guidance scale's embedding (B,guidance_dim), both in this order, or class indices
        (B,), as the spec says.  control and features have one entry for each input block and one for the middle:
        control (ControlNet) is added only to the skip, features (T2I-Adapter) to the feature map too.
        All are in the weights' dtype; t may have any.
        """
        x = channels_last(x)
        emb = self.embed(t, y, x.dtype)  # (B, E)
        add = features if features is not None else (None,) * (len(self.input_blocks) + 1)

        # down, keeping the skips
        skips = []
        for i, block in enumerate(self.input_blocks):
            x = plus(block(x, emb, context, None, cache), add[i])
            skips.append(x if control is None else x + control[i])

        x = plus(self.middle_block(x, emb, context, None, cache), add[-1])
        x = x if control is None else x + control[-1]

        # up, to the size of the next skip
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            size = skips[-1].shape[2:] if skips else None
            x = block(x, emb, context, size, cache)
        return self.out(x)


def plus(x: Tensor, feature: Tensor | None) -> Tensor:
    """Add a feature, if there is one."""
    return x if feature is None else x + feature
