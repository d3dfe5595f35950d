"""The DeepFloyd IF UNet: stages I (64 px) and II (256 px) of the pixel diffusion cascade, from a frozen spec.

How it differs from the LDM UNet (unet.py), whose residual blocks it uses:
- it works on pixels, and outputs a variance as well as a prediction;
- attention is over T5's tokens and the image's positions together; pooled tokens join the timestep embedding;
- exact GELU instead of SiLU; in stage II residual sums are multiplied by 0.7071, which halves their variance;
- stage II also reads the upsampled image, in channels after the noised ones, and the noise level of that image.

Shape letters: B batch, C channels, h w image size, N = h*w tokens, L text tokens, D their width, E embedding.
Source: Saharia et al. 2022, app. B; the original deepfloyd_if/model/unet.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Shapes, merge_heads, size, split_heads
from ldm_lite.core.layers import sdpa as attention
from ldm_lite.core.layers import sinusoids as timestep_embedding
from ldm_lite.models.ops import multiple
from ldm_lite.models.unet import ResBlock, UNetSpec


@dataclass(frozen=True)
class IFSpec(UNetSpec):
    """Sizes in which the stages differ: those of UNetSpec, and two more.

    A transformer_depth of 1 means attention, context_dim is T5's width, num_classes (stage II) the number of noise
    levels of the smaller image; out_channels counts the prediction and its variance.
    """

    pool_heads: int
    super_resolution: bool  # stage II: reads the upsampled smaller image, and its noise level as y

    @staticmethod
    def from_shapes(shapes: Shapes) -> IFSpec:
        """Return the spec of a stage whose weights have these shapes.  head_dim is always 64: shapes do not tell it.

        Raises ValueError if a tensor that every stage has is missing or makes no sense.
        """
        spec, second = UNetSpec.from_shapes(shapes), "aug_proj.0.weight" in shapes
        text_dim = size(shapes, "encoder_pooling.1.positional_embedding", 2)[1]
        known = {field.name: getattr(spec, field.name) for field in fields(UNetSpec)}
        known |= {"head_dim": 64, "context_dim": text_dim, "num_classes": 1000 if second else None}
        return IFSpec(**known, pool_heads=multiple(text_dim, 64, "the text's width"), super_resolution=second)

    @property
    def emb_channels(self) -> int:
        """Width of the timestep embedding, and of the text in the attention layers."""
        return self.model_channels * max(self.channel_mult)


class PixelResBlock(ResBlock):
    """ResBlock of unet.py with GELU, with the timestep as scale and shift; the sum is multiplied by `gain`."""

    def __init__(self, in_channels: int, out_channels: int, spec: IFSpec, resample: str | None = None) -> None:
        super().__init__(in_channels, out_channels, spec.emb_channels, scale_shift=True, resample=resample)
        self.in_layers[1], self.out_layers[1] = nn.GELU(), nn.GELU()
        self.gain = 0.7071 if spec.super_resolution else 1.0

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        return super().forward(x, emb, size) * self.gain


class TextAttention(nn.Module):
    """Attention of positions to the text and to each other, with a residual connection (B,C,h,w) -> (B,C,h,w).

    The rows of qkv are ordered [head 0: q k v][head 1: q k v]..., those of encoder_kv [head 0: k v]...
    """

    def __init__(self, channels: int, spec: IFSpec) -> None:
        super().__init__()
        self.num_heads = spec.heads(channels)
        self.head_dim = channels // self.num_heads
        self.attention: AttentionFn = attention
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.encoder_kv = nn.Conv1d(spec.emb_channels, 2 * channels, 1)
        self.norm_encoder = nn.GroupNorm(32, spec.emb_channels)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        image = self._heads(self.qkv, self.norm(x).flatten(2))  # (B, H, N, 3D)
        words = self._heads(self.encoder_kv, self.norm_encoder(text))  # (B, H, L, 2D)
        q, k, v = image.chunk(3, dim=-1)
        text_k, text_v = words.chunk(2, dim=-1)
        out = self.attention(q, torch.cat([text_k, k], dim=2), torch.cat([text_v, v], dim=2))
        out = F.linear(merge_heads(out), self.proj_out.weight[:, :, 0], self.proj_out.bias)  # (B, N, C)
        return x + out.transpose(1, 2).view_as(x)

    def _heads(self, layer: nn.Conv1d, x: Tensor) -> Tensor:
        """Apply a 1x1 convolution to (B,C,N), as a linear over tokens: (B,H,N,C'/H)."""
        return split_heads(F.linear(x.transpose(1, 2), layer.weight[:, :, 0], layer.bias), self.num_heads)


class AttentionPooling(nn.Module):
    """Text (B,L,D) -> (B,D): attention with the mean of the tokens as query, over that mean and the tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attention: AttentionFn = attention
        self.positional_embedding = nn.Parameter(torch.empty(1, dim))
        self.k_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)

    def forward(self, text: Tensor) -> Tensor:
        summary = text.mean(dim=1, keepdim=True) + self.positional_embedding  # (B, 1, D)
        tokens = torch.cat([summary, text], dim=1)  # (B, 1+L, D)
        q = split_heads(self.q_proj(summary), self.num_heads)
        k, v = split_heads(self.k_proj(tokens), self.num_heads), split_heads(self.v_proj(tokens), self.num_heads)
        return merge_heads(self.attention(q, k, v))[:, 0]  # (B, D)


class Block(nn.ModuleList):
    """The layers at one index of input_blocks, middle_block or output_blocks, each called with the inputs it needs."""

    def forward(self, x: Tensor, emb: Tensor, text: Tensor, size: tuple[int, int] | None) -> Tensor:
        for layer in self:
            if isinstance(layer, PixelResBlock):
                x = layer(x, emb, size)
            elif isinstance(layer, TextAttention):
                x = layer(x, text)
            else:
                x = layer(x)
        return x


class UNetIF(nn.Module):
    """The denoising network of DeepFloyd IF: noised pixels, a timestep and T5's tokens -> eps and its variance."""

    def __init__(self, spec: IFSpec) -> None:
        super().__init__()
        self.spec = spec
        width, emb, text_dim = spec.model_channels, spec.emb_channels, spec.context_dim
        assert text_dim is not None

        def mlp() -> nn.Sequential:
            return nn.Sequential(nn.Linear(width, emb), nn.GELU(), nn.Linear(emb, emb))

        def layers(in_channels: int, out_channels: int, attends: int) -> list[nn.Module]:
            after: list[nn.Module] = [TextAttention(out_channels, spec)] if attends else []
            return [PixelResBlock(in_channels, out_channels, spec), *after]

        self.time_embed = mlp()

        # down: the first convolution, then per level its residual blocks and one that halves the size
        self.input_blocks = nn.ModuleList([Block([nn.Conv2d(spec.in_channels, width, 3, padding=1)])])
        channels, skips, last = width, [width], len(spec.channel_mult) - 1
        for level, mult in enumerate(spec.channel_mult):
            for _ in range(spec.num_res_blocks[level]):
                self.input_blocks.append(Block(layers(channels, mult * width, spec.transformer_depth[level])))
                channels = mult * width
                skips.append(channels)
            if level != last:
                self.input_blocks.append(Block([PixelResBlock(channels, channels, spec, "down")]))
                skips.append(channels)

        middle = layers(channels, channels, spec.middle_depth)
        self.middle_block = Block([*middle, PixelResBlock(channels, channels, spec)])

        # up: one more residual block per level; each also reads the skip of its counterpart
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(spec.channel_mult))):
            for i in range(spec.num_res_blocks[level] + 1):
                block = layers(channels + skips.pop(), mult * width, spec.transformer_depth[level])
                channels = mult * width
                if level and i == spec.num_res_blocks[level]:
                    block.append(PixelResBlock(channels, channels, spec, "up"))
                self.output_blocks.append(Block(block))

        out = nn.Conv2d(channels, spec.out_channels, 3, padding=1)
        self.out = nn.Sequential(nn.GroupNorm(32, channels), nn.GELU(), out)
        pooling = AttentionPooling(text_dim, spec.pool_heads)
        self.encoder_pooling = nn.Sequential(
            nn.LayerNorm(text_dim), pooling, nn.Linear(text_dim, emb), nn.LayerNorm(emb)
        )
        self.encoder_proj = nn.Linear(text_dim, emb)
        if spec.super_resolution:
            self.aug_proj = mlp()

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, y: Tensor | None = None, concat: Tensor | None = None
    ) -> Tensor:
        """Pixels x (B,3,h,w) at timesteps t (B,) in [0,1000) -> (B,out_channels,h,w), eps then variance.

        context (B,L,context_dim) is T5's output.  In stage II concat (B,3,h,w) is the upsampled image, and y (B,) the
        timestep in [0,1000) of the noise added to it.  The variance output, in [-1,1], interpolates its logarithm
        between the schedule's limits.  Inputs may have any dtype; it computes in that of the weights.
        """
        dtype = self.encoder_proj.bias.dtype
        x, context = x.to(dtype), context.to(dtype)
        x = x if concat is None else torch.cat([x, concat.to(dtype)], dim=1)
        # timestep, pooled text and noise level, after the GELU that starts every residual block
        width = self.spec.model_channels
        emb = self.time_embed(timestep_embedding(t, width).to(x.dtype)) + self.encoder_pooling(context)
        if self.spec.super_resolution:
            assert y is not None, "stage II needs y, the noise level of the smaller image"
            emb = emb + self.aug_proj(timestep_embedding(y, width).to(x.dtype))
        emb = F.gelu(emb)  # (B, E)
        text = self.encoder_proj(context).transpose(1, 2)  # (B, E, L)

        # down, keeping the skips
        skips = []
        for block in self.input_blocks:
            x = block(x, emb, text, None)
            skips.append(x)

        x = self.middle_block(x, emb, text, None)

        # up, to the size of the next skip
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            size = skips[-1].shape[2:] if skips else None
            x = block(x, emb, text, size)
        return self.out(x)
