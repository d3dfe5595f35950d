"""The CLIP text encoder of the core with more: layers to skip, a pooled output, textual inversion, other activations.

Shape letters: B batch, T tokens (77), D width.
Source: Radford et al. 2021, sec. 2.4; transformers CLIPTextModel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ldm_lite.core import clip as core
from ldm_lite.core.clip import EncoderLayer, QuickGELU
from ldm_lite.core.layers import Shapes
from ldm_lite.models.ops import Fitted

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "quick_gelu": QuickGELU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
}


@dataclass(frozen=True)
class CLIPTextSpec(core.CLIPSpec, Fitted):
    """Sizes and settings of a CLIP text encoder."""

    heads: int = 0  # not known from the weights
    activation: str = "quick_gelu"  # of OpenAI, or "gelu"; not known from the weights
    skip: int = 0  # number of last layers that the context skips: 1 in SDXL
    norm: bool = True  # apply final_layer_norm to the context: not in SDXL

    untold: ClassVar[tuple[str, ...]] = ("heads", "activation", "skip", "norm")

    @staticmethod
    def from_shapes(shapes: Shapes) -> CLIPTextSpec:
        """Return the spec of an encoder with weights of these shapes.  Raises ValueError if they make no sense."""
        return CLIPTextSpec(**{**vars(core.CLIPSpec.from_shapes(shapes)), "heads": 0})

    @property
    def end_id(self) -> int:
        """The token id at which the pooled output is taken."""
        return self.vocab_size - 1


class Encoder(nn.Module):
    """The layers of a text or image encoder, with the sizes of its spec."""

    def __init__(self, spec: Any, activation: str, causal: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(spec.width, spec.mlp_width, spec.heads) for _ in range(spec.layers))
        layer: Any
        for layer in self.layers:
            layer.self_attn.causal = causal
            layer.mlp.activation = ACTIVATIONS[activation]()
            layer.layer_norm1.eps = layer.layer_norm2.eps = eps


def embed(table: nn.Embedding, ids: Tensor, learned: Tensor | None) -> Tensor:
    """Token ids (B,T) -> vectors (B,T,D), from the table, or for ids beyond it from learned (V,D).

    learned holds the vectors of textual inversion, Gal et al. 2022.
    """
    if learned is None:
        return table(ids)
    known = table.num_embeddings
    x: Tensor = table(ids.clamp(max=known - 1))
    return torch.where((ids < known)[:, :, None], x, learned.to(x)[(ids - known).clamp(min=0)])


class Embeddings(core.Embeddings):
    """Token ids (B,T), and vectors for ids beyond the vocabulary -> token plus position embedding (B,T,D)."""

    def forward(self, token_ids: Tensor, learned: Tensor | None = None) -> Tensor:
        x = embed(self.token_embedding, token_ids, learned)
        return x + self.position_embedding.weight[: token_ids.shape[1]]


class SkippingEncoder(nn.Module):
    """Token ids -> one vector per token (the context), of the last layer or an earlier one, and one for the text.

    A subclass has a spec with layers, skip, norm and end_id, and the methods embed, parts and project.
    """

    spec: Any

    def embed(self, token_ids: Tensor, learned: Tensor | None) -> Tensor:
        """Token ids (B,T) -> token plus position embedding (B,T,D)."""
        raise NotImplementedError

    def parts(self) -> tuple[nn.ModuleList, nn.Module]:
        """Return the layers, and the norm after the last."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """The last layer at the end token (B,D), normalised -> the pooled output (B,D)."""
        return x

    def forward(self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None) -> Tensor:
        """Token ids (B,T), T <= length, with start, end and padding -> context (B,T,D) in the weights' dtype.

        clip_skip 1 is the layer that the model was trained with (spec.skip before the last), 2 the one before it, and
        so on.  learned (V,D) holds vectors of textual inversion, for ids from vocab_size on.  Raises ValueError if
        clip_skip exceeds the number of layers.
        """
        x, _ = self._run(token_ids, clip_skip, learned)
        return self.parts()[1](x) if self.spec.norm else x

    def context_and_pooled(
        self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token ids (B,T) -> forward's context (B,T,D), and the last layer, normalised, at the end token (B,D).

        Raises ValueError as forward does.  Source: pooler_output of transformers' CLIPTextModel;
        FrozenOpenCLIPEmbedder2 of generative-models.
        """
        x, rest = self._run(token_ids, clip_skip, learned)
        norm = self.parts()[1]
        last = x
        for layer in rest:
            last = layer(last)
        last = norm(last)
        end = (token_ids == self.spec.end_id).int().argmax(dim=1)  # (B,), 0 where there is none
        pooled = self.project(last[torch.arange(len(last), device=last.device), end])
        return norm(x) if self.spec.norm else x, pooled

    def _run(self, token_ids: Tensor, clip_skip: int, learned: Tensor | None) -> tuple[Tensor, Sequence[nn.Module]]:
        """Return the output (B,T,D) of the layer that makes the context, and the layers after it."""
        most = self.spec.layers - self.spec.skip
        if not 1 <= clip_skip <= most:
            raise ValueError(f"got clip skip {clip_skip}, wanted 1 to {most}")
        layers, x = list(self.parts()[0]), self.embed(token_ids, learned)
        for layer in layers[: most + 1 - clip_skip]:
            x = layer(x)
        return x, layers[most + 1 - clip_skip :]


class CLIPTextEncoder(SkippingEncoder):
    """The text encoder of OpenAI's CLIP, with Hugging Face's key names."""

    def __init__(self, spec: CLIPTextSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = Embeddings(spec)
        self.encoder = Encoder(spec, spec.activation, causal=True)
        self.final_layer_norm = nn.LayerNorm(spec.width)

    def embed(self, token_ids: Tensor, learned: Tensor | None) -> Tensor:
        return self.embeddings(token_ids, learned)

    def parts(self) -> tuple[nn.ModuleList, nn.Module]:
        return self.encoder.layers, self.final_layer_norm


# ---- released -------------------------------------------------------------------------------------------------------

PROBE = "embeddings.token_embedding.weight"  # a key that only these networks have
CLIP_L = CLIPTextSpec(vocab_size=49408, length=77, width=768, mlp_width=3072, layers=12, heads=12)
