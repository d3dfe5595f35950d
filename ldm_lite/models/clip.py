"""The CLIP text encoder of the core with more: layers to skip, a pooled output, textual inversion, other activations.

Shape letters: B batch, T tokens (77), D width.
Source: Radford et al. 2021, sec. 2.4; transformers CLIPTextModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ldm_lite.core import clip as core
from ldm_lite.core.clip import QuickGELU
from ldm_lite.models.ops import Fitted, gelu_tanh

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "quick_gelu": QuickGELU,
    "gelu": nn.GELU,
    "gelu_tanh": gelu_tanh,
}


def num_known(vocab_size: int) -> int:
    """Return the number of tokens that prompts reach, and the id of the first textual inversion.

    It is CLIP's vocabulary, up to the end token: training may have added tokens to a network after it.
    """
    return min(49408, vocab_size)


@dataclass(frozen=True)
class CLIPTextSpec(core.CLIPSpec, Fitted):
    """Sizes and settings of a CLIP text encoder."""

    heads: int = 0  # not known from the weights
    activation: str = "quick_gelu"  # of OpenAI, or "gelu"; not known from the weights
    skip: int = 0  # number of last layers that the context skips: 1 in SDXL
    norm: bool = True  # apply final_layer_norm to the context: not in SDXL
    projection: bool = False  # the pooled output is projected

    untold: ClassVar[tuple[str, ...]] = ("heads", "activation", "skip", "norm")

    @property
    def end_id(self) -> int:
        """The token id at which the pooled output is taken."""
        return num_known(self.vocab_size) - 1


class SkippingEncoder(nn.Module):
    """Token ids -> one vector per token (the context), of the last layer or an earlier one, and one for the text.

    A subclass has a spec with layers, skip, norm and end_id, and the methods parts and project.
    """

    spec: Any

    def parts(self) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Any, nn.Module]:
        """Return the embedding of token ids (B,T), the layers, and the norm after the last."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """The last layer at the end token (B,D), normalised -> the pooled output (B,D)."""
        raise NotImplementedError

    def forward(self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None) -> Tensor:
        """Token ids (B,T), T <= length, with start, end and padding -> context (B,T,D) in the weights' dtype.

        clip_skip 1 is the layer that the model was trained with (spec.skip before the last), 2 the one before it, and
        so on.  learned (V,D) holds vectors of textual inversion, for ids from num_known on.  Raises ValueError if
        clip_skip exceeds the number of layers.
        """
        return self.context_and_pooled(token_ids, clip_skip, learned, pool=False)[0]

    def context_and_pooled(
        self, token_ids: Tensor, clip_skip: int = 1, learned: Tensor | None = None, pool: bool = True
    ) -> tuple[Tensor, Any]:
        """Token ids (B,T) -> forward's context (B,T,D), and the last layer, normalised, at the end token (B,D).

        Without `pool`, None takes its place.  Raises ValueError as forward does.  Source: pooler_output of
        transformers' CLIPTextModel; FrozenOpenCLIPEmbedder2 of generative-models.
        """
        (embed, layers, norm), most = self.parts(), self.spec.layers - self.spec.skip
        if not 1 <= clip_skip <= most:
            raise ValueError(f"got clip skip {clip_skip}, expected 1 to {most}")
        x, read = embed(token_ids, learned), most + 1 - clip_skip
        for layer in layers[:read]:
            x = layer(x)
        context = norm(x) if self.spec.norm else x
        if not pool:
            return context, None
        for layer in layers[read:]:
            x = layer(x)
        end = (token_ids == self.spec.end_id).int().argmax(dim=1)  # (B,), 0 where there is none
        return context, self.project(norm(x)[torch.arange(len(x), device=x.device), end])


def embedded(table: nn.Embedding, positions: Tensor, ids: Tensor, learned: Tensor | None) -> Tensor:
    """Token ids (B,T) -> vectors of the table, or for ids beyond it of learned (V,D), plus positions (B,T,D).

    learned holds the vectors of textual inversion, Gal et al. 2022.
    """
    known = num_known(table.num_embeddings)
    x: Tensor = table(ids if learned is None else ids.clamp(max=known - 1))
    if learned is not None:
        x = torch.where((ids < known)[:, :, None], x, learned.to(x)[(ids - known).clamp(min=0)])
    return x + positions[: ids.shape[1]]


class ExtendedEmbeddings(core.Embeddings):
    """Token ids (B,T), and vectors for ids beyond the vocabulary -> token plus position embedding (B,T,D)."""

    def forward(self, token_ids: Tensor, learned: Tensor | None = None) -> Tensor:
        return embedded(self.token_embedding, self.position_embedding.weight, token_ids, learned)


class CLIPTextModel(SkippingEncoder, core.CLIPTextEncoder):
    """The text encoder of OpenAI's CLIP, with Hugging Face's key names."""

    def __init__(self, spec: CLIPTextSpec) -> None:
        super().__init__(spec)
        self.embeddings = ExtendedEmbeddings(spec)
        layer: Any
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            layer.mlp.activation = ACTIVATIONS[spec.activation]()
        self.text_projection = nn.Linear(spec.width, spec.width, bias=False) if spec.projection else nn.Identity()

    def parts(self) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Any, nn.Module]:
        return self.embeddings, self.encoder["layers"], self.final_layer_norm

    def project(self, x: Tensor) -> Tensor:
        return self.text_projection(x)


# ---- released -------------------------------------------------------------------------------------------------------

CLIP_L = CLIPTextSpec(vocab_size=49408, length=77, width=768, mlp_width=3072, layers=12, heads=12)
