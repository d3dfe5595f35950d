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

from ldm_lite.core import unet as core
from ldm_lite.core.layers import AttentionFn, Shapes, checked_shape, merge_heads, sdpa, sinusoids, split_heads
from ldm_lite.models.adm import AttentionBlock, ResamplingResBlock, resample_by_residuals
from ldm_lite.models.ops import mlp, multiple
from ldm_lite.models.unet import LDMUNetSpec


@dataclass(frozen=True)
class IFSpec(LDMUNetSpec):
    """Sizes in which the stages differ: those of LDMUNetSpec, and two more.

    A transformer_depth of 1 means attention, context_dim is T5's width, num_classes (stage II) the number of noise
    levels of the smaller image; out_channels counts the prediction and its variance.
    """

    pool_heads: int
    super_resolution: bool  # stage II: reads the upsampled smaller image, and its noise level as y

    @staticmethod
    def from_shapes(shapes: Shapes) -> IFSpec:
        """Return the spec of a stage whose weights have these shapes.  head_dim is always 64: shapes do not show it.

        Raises ValueError if a tensor that every stage has is missing or makes no sense.
        """
        spec, second = LDMUNetSpec.from_shapes(shapes), "aug_proj.0.weight" in shapes
        text_dim = checked_shape(shapes, "encoder_pooling.1.positional_embedding", 2)[1]
        known = {field.name: getattr(spec, field.name) for field in fields(LDMUNetSpec)}
        known |= {"head_dim": 64, "context_dim": text_dim, "num_classes": 1000 if second else None}
        return IFSpec(**known, pool_heads=multiple(text_dim, 64, "the text's width"), super_resolution=second)

    @property
    def emb_channels(self) -> int:
        """Width of the timestep embedding, and of the text in the attention layers."""
        return self.model_channels * max(self.channel_mult)


class PixelResBlock(ResamplingResBlock):
    """ResBlock of unet.py with GELU, with the timestep as scale and shift; the sum is multiplied by `gain`."""

    def __init__(self, in_channels: int, out_channels: int, spec: IFSpec, resample: str | None = None) -> None:
        super().__init__(in_channels, out_channels, spec.emb_channels, scale_shift=True, resample=resample)
        self.in_layers[1], self.out_layers[1] = nn.GELU(), nn.GELU()
        self.gain = 0.7071 if spec.super_resolution else 1.0

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        return super().forward(x, emb, size) * self.gain


class TextAttention(AttentionBlock):
    """Attention of positions to the text (B,E,L) and to each other, with a residual connection (B,C,h,w) -> (B,C,h,w).

    The rows of encoder_kv are ordered [head 0: k v][head 1: k v]...
    """

    def __init__(self, channels: int, spec: IFSpec) -> None:
        super().__init__(channels, spec.heads(channels))
        self.encoder_kv = nn.Conv1d(spec.emb_channels, 2 * channels, 1)
        self.norm_encoder = nn.GroupNorm(32, spec.emb_channels)

    def attended(self, k: Tensor, v: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values of the text's tokens, then those of the positions, (B,H,L+N,D) each."""
        text_k, text_v = self.per_head(self.encoder_kv, self.norm_encoder(context)).chunk(2, dim=-1)
        return torch.cat([text_k, k], dim=2), torch.cat([text_v, v], dim=2)


class AttentionPooling(nn.Module):
    """Text (B,L,D) -> (B,D): attention with the mean of the tokens as query, over that mean and the tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attention: AttentionFn = sdpa
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


class UNetIF(core.UNet):
    """The denoising network of DeepFloyd IF: noised pixels, a timestep and T5's tokens -> eps and its variance."""

    def __init__(self, spec: IFSpec) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self.spec: IFSpec = spec  # type: ignore[assignment]
        width, emb, text_dim = spec.model_channels, spec.emb_channels, spec.context_dim
        assert text_dim is not None
        resample_by_residuals(self, lambda channels, kind: PixelResBlock(channels, channels, spec, kind))
        self.time_embed = mlp(width, emb, emb, nn.GELU)
        self.out[1] = nn.GELU()
        pooling = AttentionPooling(text_dim, spec.pool_heads)
        self.encoder_pooling = nn.Sequential(
            nn.LayerNorm(text_dim), pooling, nn.Linear(text_dim, emb), nn.LayerNorm(emb)
        )
        self.encoder_proj = nn.Linear(text_dim, emb)
        if spec.super_resolution:
            self.aug_proj = mlp(width, emb, emb, nn.GELU)

    def res_block(self, in_channels: int, channels: int) -> nn.Module:
        """A residual block."""
        return PixelResBlock(in_channels, channels, self.spec)

    def transformers(self, channels: int, level: int | None) -> list[nn.Module]:
        """The attention after a residual block of a level, or of the middle (None); nothing if it has none."""
        depth = self.spec.middle_depth if level is None else self.spec.transformer_depth[level]
        return [TextAttention(channels, self.spec)] if depth else []

    def forward(  # type: ignore[override]
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
        emb = self.time_embed(sinusoids(t, width).to(dtype)) + self.encoder_pooling(context)
        if self.spec.super_resolution:
            assert y is not None, "stage II needs y, the noise level of the smaller image"
            emb = emb + self.aug_proj(sinusoids(y, width).to(dtype))
        emb = F.gelu(emb)  # (B, E)
        return self.forward_embedded(x, emb, self.encoder_proj(context).transpose(1, 2))  # the text is (B, E, L)
