"""The language models Qwen3 and Qwen2.5 with Hugging Face's key names, up to the last state read: text encoders.

Shape letters: B batch, T tokens, D width, H heads of the queries, G of keys and values, C channels of a head.
Source: Qwen Team 2025 (arXiv 2505.09388), sec. 2; Ainslie et al. 2023 (shared keys and values); Su et al. 2021, eq. 34;
transformers Qwen3Model; Qwen Team 2024 (arXiv 2412.15115), sec. 2, for Qwen2.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.models.ops import Fitted, GatedMLP, RMSNorm, axial_rotation, multiple, wide

THETA = 1e6  # the slowest rotation turns by 1/THETA a position
VISION = "visual."  # of the keys of Qwen2.5-VL's vision transformer


@dataclass(frozen=True)
class Qwen3Spec(Fitted):
    """Sizes of a Qwen3."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    states: tuple[int, ...] = (-2,)  # those read, as transformers counts hidden_states: 0 enters the first layer

    untold: ClassVar[tuple[str, ...]] = ("states",)
    is_biased: ClassVar[bool] = False  # of Qwen2.5: queries, keys and values have biases, and no norms

    @staticmethod
    def from_shapes(shapes: Shapes) -> Qwen3Spec:
        """Return the spec of a model whose weights have these shapes.  Raises ValueError if they make no sense."""
        return Qwen3Spec(**Qwen3Spec.sizes(shapes, checked_shape(shapes, "layers.0.self_attn.q_norm.weight", 1)[0]))

    @staticmethod
    def sizes(shapes: Shapes, head_dim: int) -> dict[str, Any]:
        """Return the sizes that shapes show, if a head has so many channels."""
        vocab_size, width = checked_shape(shapes, "embed_tokens.weight", 2)
        queries, keys = (checked_shape(shapes, f"layers.0.self_attn.{name}_proj.weight", 2)[0] for name in "qk")
        kv_heads = multiple(keys, head_dim, "the width of the keys")
        heads = multiple(queries, head_dim, "the width of the queries")
        multiple(heads, kv_heads, "the number of heads")
        return {
            "vocab_size": vocab_size,
            "width": width,
            "mlp_width": checked_shape(shapes, "layers.0.mlp.gate_proj.weight", 2)[0],
            "layers": count_blocks(shapes, r"layers\.(\d+)\."),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }

    @property
    def output_width(self) -> int:
        """Channels of all states that are read."""
        return self.width * len(self.states)


@dataclass(frozen=True)
class Qwen25Spec(Qwen3Spec):
    """Sizes of a Qwen2.5, whose heads' width weights do not show, and of its vision transformer, a VisionSpec."""

    vision: Any = None

    is_biased: ClassVar[bool] = True

    def fitted(self, shapes: Shapes) -> Qwen25Spec:
        """The same, with this spec's values for what weights do not show."""
        seeing = {key.removeprefix(VISION): shape for key, shape in shapes.items() if key.startswith(VISION)}
        vision = None if self.vision is None else self.vision.fitted(seeing)
        return replace(self, vision=vision, **Qwen3Spec.sizes(shapes, self.head_dim))


def rotate_halves(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate channels i and i + C/2 of x (B,H,T,C) together by the angles of rotation (2,T,C/2)."""
    cos, sin = rotation
    a, b = x.to(rotation.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Qwen3SelfAttention(nn.Module):
    """Attention (B,T,D) -> (B,T,D) of each token to those before it and itself."""

    def __init__(self, spec: Qwen3Spec) -> None:
        super().__init__()
        self.spec = spec
        inner, shared = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.width, inner, spec.is_biased)
        self.k_proj = nn.Linear(spec.width, shared, spec.is_biased)
        self.v_proj = nn.Linear(spec.width, shared, spec.is_biased)
        self.o_proj = nn.Linear(inner, spec.width, bias=False)
        self.q_norm = nn.Identity() if spec.is_biased else RMSNorm(spec.head_dim)
        self.k_norm = nn.Identity() if spec.is_biased else RMSNorm(spec.head_dim)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        q = split_heads(self.q_proj(x), self.spec.heads)  # (B, H, T, C)
        k, v = (split_heads(proj(x), self.spec.kv_heads) for proj in (self.k_proj, self.v_proj))  # (B, G, T, C)
        q, k = rotate_halves(self.q_norm(q), rotation), rotate_halves(self.k_norm(k), rotation)
        k, v = (part.repeat_interleave(self.spec.heads // self.spec.kv_heads, dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(merge_heads(out))


class Layer(nn.Module):
    """Attention and MLP with residual connections (B,T,D), which stay in float32."""

    def __init__(self, spec: Qwen3Spec) -> None:
        super().__init__()
        self.self_attn = Qwen3SelfAttention(spec)
        self.mlp = GatedMLP(spec.width, spec.mlp_width, "gate_proj", "up_proj", "down_proj")
        self.input_layernorm = RMSNorm(spec.width)
        self.post_attention_layernorm = RMSNorm(spec.width)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Token ids -> one vector per token: the states that the spec names, side by side.

    The last of all is normalised, as transformers has it.  The layers after those read are in files, and are not run.
    """

    def __init__(self, spec: Qwen3Spec) -> None:
        super().__init__()
        if max(spec.states) >= spec.layers:
            raise ValueError(f"this Qwen3 has {spec.layers} layers, expected more than {max(spec.states)}")
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.width)

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Token ids (B,T) -> (B,T,output_width) in the weights' dtype.

        Tokens see only those before them, so padding at the end changes nothing before it.  A mask (B,T) bool is False
        at padding, which padding then does not see either.
        """
        embedded = self.embed_tokens(token_ids)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        return self.read(embedded, axial_rotation(positions, (self.spec.head_dim,), THETA, wide(embedded.dtype)), mask)

    def read(self, embedded: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        """The same of embedded tokens (B,T,D), whose positions rotate by rotation (2,T,C/2)."""
        x = embedded.to(rotation.dtype)
        if mask is not None:
            places = torch.arange(x.shape[1], device=x.device)
            mask = mask[:, None, None, :] & (places <= places[:, None])  # (B, 1, T, T)
        wanted = [state if state >= 0 else len(self.layers) + 1 + state for state in self.spec.states]
        states = {0: x}
        for i, layer in enumerate(self.layers[: max(wanted)], 1):
            x = layer(x, rotation, mask)
            x = self.norm(x) if i == len(self.layers) else x
            states |= {i: x} if i in wanted else {}
        return torch.cat([states[i] for i in wanted], dim=2).to(embedded.dtype)


# ---- released -------------------------------------------------------------------------------------------------------

QWEN3_4B = Qwen3Spec(vocab_size=151936, width=2560, mlp_width=9728, layers=36, heads=32, kv_heads=8, head_dim=128)
QWEN25_7B = Qwen25Spec(
    vocab_size=152064, width=3584, mlp_width=18944, layers=28, heads=28, kv_heads=4, head_dim=128, states=(-1,)
)
