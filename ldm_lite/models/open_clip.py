"""The CLIP text encoder with OpenCLIP's key names: ViT-H of Stable Diffusion 2.x, ViT-bigG of SDXL.

Shape letters: B batch, T tokens (77), D width.
Source: Cherti et al. 2023; FrozenOpenCLIPEmbedder of stablediffusion, FrozenOpenCLIPEmbedder2 of generative-models.
`logit_scale` in the files is not used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.models.clip import SkippingEncoder, embedded
from ldm_lite.models.ops import Fitted, mlp


@dataclass(frozen=True)
class OpenCLIPTextSpec(Fitted):
    """Sizes and settings of an OpenCLIP text encoder."""

    vocab_size: int
    length: int
    width: int
    mlp_width: int
    layers: int
    projection: bool  # has a text_projection, which the pooled output needs
    heads: int = 0  # not known from the weights
    skip: int = 1  # number of last layers that the context skips: 1 in every released family
    norm: bool = True  # apply ln_final to the context: in Stable Diffusion 2, not in SDXL
    end_id: int = 49407  # the pooled output is taken at the first token with this id

    untold: ClassVar[tuple[str, ...]] = ("heads", "skip", "norm", "end_id")

    @staticmethod
    def from_shapes(shapes: Shapes) -> OpenCLIPTextSpec:
        """Return the spec of an encoder with weights of these shapes.  Raises ValueError if they make no sense."""
        vocab_size, width = checked_shape(shapes, "token_embedding.weight", 2)
        return OpenCLIPTextSpec(
            vocab_size=vocab_size,
            length=checked_shape(shapes, "positional_embedding", 2)[0],
            width=width,
            mlp_width=checked_shape(shapes, "transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
            layers=count_blocks(shapes, r"transformer\.resblocks\.(\d+)\."),
            projection="text_projection" in shapes,
        )

    def fitted(self, shapes: Shapes) -> OpenCLIPTextSpec:
        """The same as Fitted.fitted; converted files lack the skipped layers, and sometimes the projection."""
        spec = super().fitted(shapes)
        return replace(spec, skip=0) if spec.layers == self.layers - self.skip else spec


class OpenCLIPAttention(nn.Module):
    """Multi-head self-attention (B,T,D) -> (B,T,D), causal or not; the rows of in_proj are q, k and v in this order."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(F.linear(x, self.in_proj_weight, self.in_proj_bias))

    def attend(self, qkv: Tensor) -> Tensor:
        """Return the attention of queries, keys and values (B, T, 3 * D)."""
        q, k, v = (split_heads(part, self.heads) for part in qkv.chunk(3, dim=2))  # (B, H, T, D/H)
        return self.out_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))


class ResidualAttentionBlock(nn.Module):
    """Self-attention and MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, width: int, mlp_width: int, heads: int, activation: Callable[[], nn.Module], causal: bool
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = OpenCLIPAttention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = mlp(width, mlp_width, width, activation, ("c_fc", "activation", "c_proj"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class OpenCLIPTextEncoder(SkippingEncoder):
    """The text encoder of OpenCLIP, whose pooled output is projected."""

    text_projection: nn.Parameter | None

    def __init__(self, spec: OpenCLIPTextSpec) -> None:
        super().__init__()
        self.spec = spec
        self.positional_embedding = nn.Parameter(torch.randn(spec.length, spec.width) * 0.01)
        layers = (
            ResidualAttentionBlock(spec.width, spec.mlp_width, spec.heads, activation=nn.GELU, causal=True)
            for _ in range(spec.layers)
        )
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(layers)})
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.ln_final = nn.LayerNorm(spec.width)
        projection = nn.Parameter(torch.randn(spec.width, spec.width) * spec.width**-0.5) if spec.projection else None
        self.register_parameter("text_projection", projection)

    def parts(self) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Any, nn.Module]:
        def embed(token_ids: Tensor, learned: Tensor | None) -> Tensor:
            return embedded(self.token_embedding, self.positional_embedding, token_ids, learned)

        return embed, self.transformer["resblocks"], self.ln_final

    def project(self, x: Tensor) -> Tensor:
        assert self.text_projection is not None, "this encoder has no text_projection"
        return x @ self.text_projection


# ---- released -------------------------------------------------------------------------------------------------------

OPEN_CLIP_H = OpenCLIPTextSpec(
    vocab_size=49408, length=77, width=1024, mlp_width=4096, layers=24, heads=16, projection=True
)
OPEN_CLIP_G = replace(OPEN_CLIP_H, width=1280, mlp_width=5120, layers=32, heads=20, norm=False)
