"""The CLIP text encoder with Hugging Face's key names, as in Stable Diffusion 1.x files.

Shape letters: B batch, T tokens (77), D width.
Source: Radford et al. 2021, sec. 2.4; transformers CLIPTextModel.
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
class CLIPTextSpec:
    """Sizes and settings of a CLIP text encoder."""

    vocab_size: int
    length: int
    width: int
    mlp_width: int
    layers: int
    heads: int  # not known from the weights
    activation: str  # "quick_gelu" (OpenAI) or "gelu"; not known from the weights
    skip: int  # number of last layers that the context skips: 1 in SDXL
    norm: bool  # apply final_layer_norm to the context: not in SDXL

    def fitted(self, shapes: Shapes, heads: int | None = None) -> CLIPTextSpec:
        """Return this spec with the sizes of a network whose weights have these shapes, and with `heads` if given.

        Raises ValueError if they make no sense.
        """
        vocab_size, width = size(shapes, "embeddings.token_embedding.weight", 2)
        return replace(
            self,
            vocab_size=vocab_size,
            length=size(shapes, "embeddings.position_embedding.weight", 2)[0],
            width=width,
            mlp_width=size(shapes, "encoder.layers.0.mlp.fc1.weight", 2)[0],
            layers=count(shapes, r"encoder\.layers\.(\d+)\."),
            heads=self.heads if heads is None else heads,
        )


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x): the approximation of GELU that OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
}


class Embeddings(nn.Module):
    """Token ids (B,T), and vectors for ids beyond the vocabulary -> token plus position embedding (B,T,D)."""

    def __init__(self, spec: CLIPTextSpec) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.position_embedding = nn.Embedding(spec.length, spec.width)

    def forward(self, token_ids: Tensor, learned: Tensor | None = None) -> Tensor:
        x = embed(self.token_embedding, token_ids, learned)
        return x + self.position_embedding.weight[: token_ids.shape[1]]


class SelfAttention(nn.Module):
    """Multi-head self-attention (B,T,D) -> (B,T,D): causal for text, full for images."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj))  # (B,H,T,D/H)
        return self.out_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))


class MLP(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, width: int, mlp_width: int, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, width: int, mlp_width: int, heads: int, activation: str, causal: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads, causal)
        self.layer_norm1 = nn.LayerNorm(width, eps)
        self.mlp = MLP(width, mlp_width, activation)
        self.layer_norm2 = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    """The stack of layers (B,T,D) -> (B,T,D)."""

    def __init__(self, spec: CLIPTextSpec) -> None:
        super().__init__()
        numbers = (spec.width, spec.mlp_width, spec.heads, spec.activation)
        self.layers = nn.ModuleList(EncoderLayer(*numbers, causal=True) for _ in range(spec.layers))

    def forward(self, x: Tensor, num_layers: int, first: int = 0) -> Tensor:
        for layer in self.layers[first:num_layers]:
            x = layer(x)
        return x


class CLIPTextEncoder(nn.Module):
    """Token ids -> one vector per token: the output of the last layer, or of the layer spec.skip before it."""

    def __init__(self, spec: CLIPTextSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = Embeddings(spec)
        self.encoder = Encoder(spec)
        self.final_layer_norm = nn.LayerNorm(spec.width)

    def forward(self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None) -> Tensor:
        """Token ids (B,T), T <= length, with start, end and padding -> context (B,T,D) in the weights' dtype.

        clip_skip 1 is the layer that the model was trained with (spec.skip before the last), 2 the one before it, and
        so on.  learned (V,D) holds vectors of textual inversion, for ids from vocab_size on.  Raises ValueError if
        clip_skip exceeds the number of layers.
        """
        x = self.encoder(self.embeddings(token_ids, learned), num_layers=self._depth(clip_skip))
        return self.final_layer_norm(x) if self.spec.norm else x

    def context_and_pooled(
        self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token ids (B,T) -> forward's context (B,T,D), and the last layer, normalised, at the end token (B,D).

        Raises ValueError as forward does.  Source: pooler_output of transformers' CLIPTextModel.
        """
        depth = self._depth(clip_skip)
        x = self.encoder(self.embeddings(token_ids, learned), num_layers=depth)
        last = self.final_layer_norm(self.encoder(x, first=depth, num_layers=self.spec.layers))
        end = (token_ids == self.spec.vocab_size - 1).int().argmax(dim=1)  # (B,)
        pooled = last[torch.arange(len(last), device=last.device), end]
        return self.final_layer_norm(x) if self.spec.norm else x, pooled

    def _depth(self, clip_skip: int) -> int:
        most = self.spec.layers - self.spec.skip
        if not 1 <= clip_skip <= most:
            raise ValueError(f"got clip skip {clip_skip}, wanted 1 to {most}")
        return most + 1 - clip_skip
