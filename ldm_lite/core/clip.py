"""The CLIP text encoder, with Hugging Face's key names, as in Stable Diffusion 1.x files.

Shape letters: B batch, T tokens (77), D width.
Source: Radford et al. 2021, sec. 2.4; transformers CLIPTextModel.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads


@dataclass(frozen=True)
class CLIPSpec:
    """Sizes of a CLIP text encoder."""

    vocab_size: int
    length: int
    width: int
    mlp_width: int
    layers: int
    heads: int | None = None  # shapes do not show it

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Self:
        """Return the spec of an encoder with weights of these shapes, heads None.  Raises ValueError if none has."""
        vocab_size, width = checked_shape(shapes, "embeddings.token_embedding.weight", 2)
        return cls(
            vocab_size=vocab_size,
            length=checked_shape(shapes, "embeddings.position_embedding.weight", 2)[0],
            width=width,
            mlp_width=checked_shape(shapes, "encoder.layers.0.mlp.fc1.weight", 2)[0],
            layers=count_blocks(shapes, r"encoder\.layers\.(\d+)\."),
        )


class Embeddings(nn.Module):
    """Token ids (B,T) -> token plus position embedding (B,T,D)."""

    def __init__(self, spec: CLIPSpec) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.position_embedding = nn.Embedding(spec.length, spec.width)

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = self.position_embedding.weight[: token_ids.shape[1]]
        return self.token_embedding(token_ids) + positions


class SelfAttention(nn.Module):
    """Multi-head self-attention (B,T,D) -> (B,T,D), causal as for text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.causal = True
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, T, D/H)
        k = split_heads(self.k_proj(x), self.heads)
        v = split_heads(self.v_proj(x), self.heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(merge_heads(out))


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x): the approximation of GELU that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, mlp_width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads)
        self.layer_norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(width, mlp_width),
                activation=QuickGELU(),
                fc2=nn.Linear(mlp_width, width),
            )
        )
        self.layer_norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class CLIPTextEncoder(nn.Module):
    """Token ids (B,T), T <= length -> one vector per token (B,T,D) in the weights' dtype."""

    def __init__(self, spec: CLIPSpec) -> None:
        super().__init__()
        if spec.heads is None:
            raise ValueError("the shapes of a text encoder do not show its heads: give replace(spec, heads=...)")
        self.spec = spec
        self.embeddings = Embeddings(spec)
        layers = (EncoderLayer(spec.width, spec.mlp_width, spec.heads) for _ in range(spec.layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.final_layer_norm = nn.LayerNorm(spec.width)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embeddings(token_ids)
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            x = layer(x)
        return self.final_layer_norm(x)
