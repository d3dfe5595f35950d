"""FLUX.1 Redux: an image as tokens after the prompt's, by SigLIP's image encoder and two linears.

Shape letters: B batch, S pixels per side, N patches, D width, C width of the context.
Source: Zhai et al. 2023; transformers SiglipVisionModel; black-forest-labs/flux image_embedders.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks
from ldm_lite.models.clip_vision import PatchEmbeddings, VisionEncoder
from ldm_lite.models.ops import multiple

EPS = 1e-6  # of the norms


@dataclass(frozen=True)
class SiglipSpec:
    """Sizes of a SigLIP image encoder."""

    size: int  # of the image, pixels per side
    patch: int  # pixels per side
    width: int
    mlp_width: int
    layers: int
    heads: int  # not known from the weights

    @staticmethod
    def from_shapes(shapes: Shapes) -> SiglipSpec:
        """Return the spec of an encoder with weights of these shapes.  Raises ValueError if they make no sense."""
        width, _, patch, _ = checked_shape(shapes, "embeddings.patch_embedding.weight", 4)
        side = patch * math.isqrt(checked_shape(shapes, "embeddings.position_embedding.weight", 2)[0])
        return SiglipSpec(
            size=384 if side == 378 else side,  # of patch14-384, whose last 6 pixels are in no patch
            patch=patch,
            width=width,
            mlp_width=checked_shape(shapes, "encoder.layers.0.mlp.fc1.weight", 2)[0],
            layers=count_blocks(shapes, r"encoder\.layers\.(\d+)\."),
            heads=16 if width == 1152 else multiple(width, 64, "the width"),  # So400m; base and large
        )


class SiglipVisionEncoder(nn.Module):
    """An image -> one vector per patch; the pooling head of the files is not used."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = PatchEmbeddings(spec, class_token=False)
        self.encoder = VisionEncoder(spec, "gelu_tanh", eps=EPS)
        self.post_layernorm = nn.LayerNorm(spec.width, EPS)

    def forward(self, image: Tensor) -> Tensor:
        """The image (B,3,S,S) in [0,1] -> hidden states (B,N,D) after the last norm."""
        x: Tensor = self.embeddings(2 * image - 1)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


@dataclass(frozen=True)
class ReduxSpec:
    """Sizes of a Redux file."""

    width: int  # of the image encoder
    hidden_width: int
    context_dim: int

    @staticmethod
    def from_shapes(shapes: Shapes) -> ReduxSpec:
        """Return the spec of weights of these shapes.  Raises ValueError if they make no sense."""
        hidden_width, width = checked_shape(shapes, "redux_up.weight", 2)
        return ReduxSpec(width, hidden_width, checked_shape(shapes, "redux_down.weight", 2)[0])


class Redux(nn.Module):
    """Hidden states of SigLIP's image encoder -> tokens of FLUX.1's context."""

    def __init__(self, spec: ReduxSpec) -> None:
        super().__init__()
        self.spec = spec
        self.redux_up = nn.Linear(spec.width, spec.hidden_width)
        self.redux_down = nn.Linear(spec.hidden_width, spec.context_dim)

    def forward(self, states: Tensor) -> Tensor:
        """Hidden states (B,N,D) -> tokens (B,N,C)."""
        return self.redux_down(F.silu(self.redux_up(states)))
