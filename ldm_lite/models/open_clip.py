"""The CLIP text encoder with OpenCLIP's key names: ViT-H of Stable Diffusion 2.x, ViT-bigG of SDXL.

Shape letters: B batch, T tokens (77), D width.
Source: Cherti et al. 2023; FrozenOpenCLIPEmbedder of stablediffusion, FrozenOpenCLIPEmbedder2 of generative-models.
`logit_scale` in the files is not used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, count, merge_heads, size, split_heads
from ldm_lite.models.ops import embed


@dataclass(frozen=True)
class OpenCLIPTextSpec:
    """Sizes and settings of an OpenCLIP text encoder."""

    vocab_size: int
    length: int
    width: int
    mlp_width: int
    layers: int
    heads: int  # not known from the weights
    skip: int  # number of last layers that the context skips: 1 in every released family
    norm: bool  # apply ln_final to the context: in Stable Diffusion 2, not in SDXL
    end_id: int  # the pooled output is taken at the first token with this id
    projection: bool  # has a text_projection, which the pooled output needs

    def fitted(self, shapes: Shapes, heads: int | None = None) -> OpenCLIPTextSpec:
        """Return this spec with the sizes of a network whose weights have these shapes, and with `heads` if given.

        Raises ValueError if they make no sense.
        """
        vocab_size, width = size(shapes, "token_embedding.weight", 2)
        layers = count(shapes, r"transformer\.resblocks\.(\d+)\.")
        return replace(
            self,
            vocab_size=vocab_size,
            length=size(shapes, "positional_embedding", 2)[0],
            width=width,
            mlp_width=size(shapes, "transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
            layers=layers,
            heads=self.heads if heads is None else heads,
            # Converted files lack the skipped layers, and sometimes the projection.
            skip=0 if layers == self.layers - self.skip else self.skip,
            projection="text_projection" in shapes,
        )


class Attention(nn.Module):
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


class MLP(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, width: int, mlp_width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.c_fc = nn.Linear(width, mlp_width)
        self.c_proj = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class ResidualAttentionBlock(nn.Module):
    """Self-attention and MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, width: int, mlp_width: int, heads: int, activation: Callable[[Tensor], Tensor], causal: bool
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp_width, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """The stack of blocks."""

    def __init__(self, spec: OpenCLIPTextSpec) -> None:
        super().__init__()
        numbers = (spec.width, spec.mlp_width, spec.heads)
        self.resblocks = nn.ModuleList(
            ResidualAttentionBlock(*numbers, activation=F.gelu, causal=True) for _ in range(spec.layers)
        )


class OpenCLIPTextEncoder(nn.Module):
    """Token ids -> one vector per token (the context), and one for the whole text (pooled)."""

    def __init__(self, spec: OpenCLIPTextSpec) -> None:
        super().__init__()
        self.spec = spec
        self.positional_embedding = nn.Parameter(torch.randn(spec.length, spec.width) * 0.01)
        self.transformer = Transformer(spec)
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.ln_final = nn.LayerNorm(spec.width)
        projection = nn.Parameter(torch.randn(spec.width, spec.width) * spec.width**-0.5) if spec.projection else None
        self.register_parameter("text_projection", projection)

    def forward(self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None) -> Tensor:
        """Token ids (B,T), T <= length, with start, end and padding -> context (B,T,D) in the weights' dtype.

        clip_skip 1 is the layer that the model was trained with (spec.skip before the last), 2 the one before it, and
        so on.  learned (V,D) holds vectors of textual inversion, for ids from vocab_size on.  Raises ValueError if
        clip_skip exceeds the number of layers.
        """
        return self._context(self._run(self._embed(token_ids, learned), 0, self._depth(clip_skip)))

    def context_and_pooled(
        self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token ids (B,T) -> forward's context (B,T,D), and the projected last layer at the end token (B,D).

        Raises ValueError as forward does.  Source: FrozenOpenCLIPEmbedder2.
        """
        assert self.text_projection is not None, "this encoder has no text_projection"
        depth = self._depth(clip_skip)
        x = self._run(self._embed(token_ids, learned), 0, depth)
        last = self.ln_final(self._run(x, depth, self.spec.layers))
        end = (token_ids == self.spec.end_id).int().argmax(dim=1)  # (B,), 0 where there is none
        pooled = last[torch.arange(len(last), device=last.device), end] @ self.text_projection
        return self._context(x), pooled

    def _depth(self, clip_skip: int) -> int:
        most = self.spec.layers - self.spec.skip
        if not 1 <= clip_skip <= most:
            raise ValueError(f"got clip skip {clip_skip}, wanted 1 to {most}")
        return most + 1 - clip_skip

    def _embed(self, token_ids: Tensor, learned: Tensor | None) -> Tensor:
        return embed(self.token_embedding, token_ids, learned) + self.positional_embedding[: token_ids.shape[1]]

    def _run(self, x: Tensor, first: int, end: int) -> Tensor:
        for block in self.transformer.resblocks[first:end]:
            x = block(x)
        return x

    def _context(self, x: Tensor) -> Tensor:
        return self.ln_final(x) if self.spec.norm else x
