"""The T5 v1.1 encoder with Hugging Face's key names: the text encoder of DeepFloyd IF.

Shape letters: B batch, T tokens, D width, H heads, C channels of a head.
Source: Raffel et al. 2020, sec. 2.1; Shazeer 2020 (the gated feed-forward of v1.1); transformers T5EncoderModel.
Files hold the token embedding under two names; the second, `encoder.embed_tokens.weight`, is not used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.models.ops import Fitted, RMSNorm, multiple, unit_rms


@dataclass(frozen=True)
class T5Spec(Fitted):
    """Sizes of a T5 v1.1 encoder."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    head_dim: int
    buckets: int  # of relative positions
    max_distance: int = 128  # beyond it all positions share a bucket; not known from the weights

    untold: ClassVar[tuple[str, ...]] = ("max_distance",)

    @staticmethod
    def from_shapes(shapes: Shapes) -> T5Spec:
        """Return the spec of an encoder whose weights have these shapes.  Raises ValueError if they make no sense."""
        vocab_size, width = checked_shape(shapes, "shared.weight", 2)
        first = "encoder.block.0.layer"
        buckets, heads = checked_shape(shapes, f"{first}.0.SelfAttention.relative_attention_bias.weight", 2)
        return T5Spec(
            vocab_size=vocab_size,
            width=width,
            mlp_width=checked_shape(shapes, f"{first}.1.DenseReluDense.wi_0.weight", 2)[0],
            layers=count_blocks(shapes, r"encoder\.block\.(\d+)\."),
            heads=heads,
            head_dim=multiple(
                checked_shape(shapes, f"{first}.0.SelfAttention.q.weight", 2)[0], heads, "the width of attention"
            ),
            buckets=buckets,
        )


class RoundedRMSNorm(RMSNorm):
    """RMSNorm of float32, rounded to the weight's dtype before the product, as in training."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return unit_rms(x, self.eps).to(self.weight.dtype) * self.weight


def relative_buckets(length: int, buckets: int, max_distance: int) -> Tensor:
    """Return (T,T) int64: the bucket of each key's position relative to each query's.

    Half of the buckets are for keys after the query.  In each half, the first half holds one distance per bucket; the
    buckets of the second half grow by a constant factor up to max_distance.  Raffel et al. 2020, sec. 2.1.
    """
    position = torch.arange(length)
    relative = position[None, :] - position[:, None]  # (query, key)
    half = buckets // 2
    single = half // 2
    distance = relative.abs()
    growth = torch.log(distance.clamp(min=1) / single) / math.log(max_distance / single)
    far = (single + (growth * (half - single)).long()).clamp(max=half - 1)
    return torch.where(distance < single, distance, far) + (relative > 0) * half


class T5SelfAttention(nn.Module):
    """Self-attention (B,T,D) -> (B,T,D) with unscaled scores, in float32."""

    def __init__(self, spec: T5Spec, has_bias: bool) -> None:
        super().__init__()
        self.spec = spec
        inner = spec.heads * spec.head_dim
        self.q = nn.Linear(spec.width, inner, bias=False)
        self.k = nn.Linear(spec.width, inner, bias=False)
        self.v = nn.Linear(spec.width, inner, bias=False)
        self.o = nn.Linear(inner, spec.width, bias=False)
        self.relative_attention_bias = nn.Embedding(spec.buckets, spec.heads) if has_bias else None

    def forward(self, x: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B,T,D) and the bias of the scores, None for the first layer -> (B,T,D) and that bias.

        The first layer makes it for all, (1 or B,H,T,T) float32: of the relative positions, and of the mask (B,T).
        """
        if bias is None:
            assert self.relative_attention_bias is not None
            buckets = relative_buckets(x.shape[1], self.spec.buckets, self.spec.max_distance)
            bias = self.relative_attention_bias(buckets.to(self.relative_attention_bias.weight.device)).float()
            bias = bias.permute(2, 0, 1)[None]  # (1, H, T, T)
            if mask is not None:
                bias = bias.masked_fill(~mask[:, None, None, :], -torch.inf)  # (B, H, T, T)
        q, k, v = (split_heads(proj(x), self.spec.heads).float() for proj in (self.q, self.k, self.v))  # (B, H, T, C)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(merge_heads(out.to(x.dtype))), bias


class DenseReluDense(nn.Module):
    """Gated feed-forward: wo(gelu(wi_0 x) * wi_1 x), with GELU approximated by tanh.

    In float16 both the product and wo overflow (the reason why T5 in float16 is known for NaN), so they run in float32.
    """

    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(spec.width, spec.mlp_width, bias=False)
        self.wi_1 = nn.Linear(spec.width, spec.mlp_width, bias=False)
        self.wo = nn.Linear(spec.mlp_width, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = F.gelu(self.wi_0(x), approximate="tanh"), self.wi_1(x)
        if x.dtype == torch.float16:
            return F.linear(gate.float() * value.float(), self.wo.weight.float())
        return self.wo(gate * value)


class T5Block(nn.Module):
    """Attention and feed-forward with residual connections (B,T,D), which stay in float32."""

    def __init__(self, spec: T5Spec, has_bias: bool) -> None:
        super().__init__()
        attention = {"SelfAttention": T5SelfAttention(spec, has_bias), "layer_norm": RoundedRMSNorm(spec.width)}
        feed_forward = {"DenseReluDense": DenseReluDense(spec), "layer_norm": RoundedRMSNorm(spec.width)}
        self.layer = nn.ModuleList([nn.ModuleDict(attention), nn.ModuleDict(feed_forward)])

    def forward(self, x: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B,T,D); bias and mask as in SelfAttention."""
        attention, feed_forward = cast(Any, self.layer)
        out, bias = attention["SelfAttention"](attention["layer_norm"](x), bias, mask)
        x = x + out
        return x + feed_forward["DenseReluDense"](feed_forward["layer_norm"](x)), bias


class T5Layers(nn.Module):
    """The stack of blocks; the first holds the position bias for all."""

    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        self.block = nn.ModuleList(T5Block(spec, has_bias=i == 0) for i in range(spec.layers))
        self.final_layer_norm = RoundedRMSNorm(spec.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        bias: Tensor | None = None
        for block in self.block:
            x, bias = block(x, bias, mask)
        return self.final_layer_norm(x)


class T5Encoder(nn.Module):
    """Token ids -> one vector per token: the last layer's output, normalised."""

    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        self.spec = spec
        self.shared = nn.Embedding(spec.vocab_size, spec.width)
        self.encoder = T5Layers(spec)

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Token ids (B,T) -> (B,T,D) in the weights' dtype, padding included.

        mask (B,T) bool is False at padding, to which no token attends; a row must not be all padding.
        """
        return self.encoder(self.shared(token_ids).float(), mask)


# ---- released -------------------------------------------------------------------------------------------------------

T5_FILE = "comfyanonymous/flux_text_encoders/t5xxl_fp16.safetensors"  # on the hub
T5_XXL = T5Spec(vocab_size=32128, width=4096, mlp_width=10240, layers=24, heads=64, head_dim=64, buckets=32)
