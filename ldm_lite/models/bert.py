"""The text encoder that CompVis trained with its text-to-image models: a transformer in the style of x-transformers.

Shape letters: B batch, T tokens (77, or 92 for boxes), D width, H heads (8), C channels of all heads (512).
Source: Rombach et al. 2022, sec. 4.3.1; `BERTEmbedder` and `x_transformer.py` of latent-diffusion.
It attends to every token, padding included: there is no mask.  `to_logits` in the files is not used here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.models.ops import Fitted

_HEADS = 8
HEAD_DIM = 64  # for every width


@dataclass(frozen=True)
class BERTSpec(Fitted):
    """Sizes of an LDM text encoder."""

    vocab_size: int
    length: int
    width: int
    layers: int  # each has attention and a feed-forward

    @staticmethod
    def from_shapes(shapes: Shapes) -> BERTSpec:
        """Return the spec of an encoder whose weights have these shapes.  Raises ValueError if they make no sense."""
        vocab_size, width = checked_shape(shapes, "token_emb.weight", 2)
        layers = count_blocks(shapes, r"attn_layers\.layers\.(\d+)\.") // 2
        return BERTSpec(vocab_size, checked_shape(shapes, "pos_emb.emb.weight", 2)[0], width, layers)


class PositionEmbedding(nn.Module):
    """One vector for each position in the text."""

    def __init__(self, spec: BERTSpec) -> None:
        super().__init__()
        self.emb = nn.Embedding(spec.length, spec.width)

    def forward(self, num_tokens: int) -> Tensor:
        return self.emb.weight[:num_tokens]


class BERTAttention(nn.Module):
    """Self-attention over all tokens (B,T,D) -> (B,T,D); q, k and v have no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, _HEADS * HEAD_DIM, bias=False)
        self.to_k = nn.Linear(width, _HEADS * HEAD_DIM, bias=False)
        self.to_v = nn.Linear(width, _HEADS * HEAD_DIM, bias=False)
        self.to_out = nn.Linear(_HEADS * HEAD_DIM, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), _HEADS) for proj in (self.to_q, self.to_k, self.to_v))  # (B, H, T, C/H)
        return self.to_out(merge_heads(F.scaled_dot_product_attention(q, k, v)))


def feed_forward(width: int) -> nn.Sequential:
    """Linear to four times the width, exact GELU, linear back."""
    inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
    return nn.Sequential(OrderedDict(net=nn.Sequential(inner, nn.Identity(), nn.Linear(4 * width, width))))


class BERTTextEncoder(nn.Module):
    """Token ids -> one vector per token: the last layer's output, normalised."""

    def __init__(self, spec: BERTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_emb = nn.Embedding(spec.vocab_size, spec.width)
        self.pos_emb = PositionEmbedding(spec)
        layers = (
            nn.ModuleList([nn.LayerNorm(spec.width), kind(spec.width)])
            for _ in range(spec.layers)
            for kind in (BERTAttention, feed_forward)
        )
        self.attn_layers = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids (B,T), T <= length, padding included -> context (B,T,D) in the weights' dtype."""
        x = self.token_emb(token_ids) + self.pos_emb(token_ids.shape[1])
        for norm, block in cast(Any, self.attn_layers["layers"]):  # attention and feed-forward in turn
            x = x + block(norm(x))
        return self.norm(x)


# ---- released -------------------------------------------------------------------------------------------------------

BERT_LARGE = BERTSpec(vocab_size=30522, length=77, width=1280, layers=32)
