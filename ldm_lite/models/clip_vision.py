"""CLIP's image encoder with Hugging Face's key names: the input of T2I-Adapter's style network and of IP-Adapter.

Shape letters: B batch, S pixels per side, N patches plus the class token, D width.
Source: Radford et al. 2021, sec. 2.4; transformers CLIPVisionModel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.core.clip import EncoderLayer
from ldm_lite.core.layers import Shapes, checked_shape, count_blocks
from ldm_lite.models.clip import ACTIVATIONS
from ldm_lite.models.ops import multiple

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of pixels in [0,1], for CLIP


@dataclass(frozen=True)
class CLIPVisionSpec:
    """Sizes and settings of a CLIP image encoder."""

    size: int  # of the image, pixels per side
    patch: int  # pixels per side
    width: int
    mlp_width: int
    layers: int
    heads: int  # not known from the weights
    activation: str  # a key of models.clip.ACTIVATIONS; not known from the weights
    projection: int | None  # width of the pooled output, if it has one

    @staticmethod
    def from_shapes(shapes: Shapes) -> CLIPVisionSpec:
        """Return the spec of an encoder with weights of these shapes.  Raises ValueError if they make no sense."""
        width, _, patch, _ = checked_shape(shapes, "embeddings.patch_embedding.weight", 4)
        openai = width <= 1024  # ViT-B and L; wider ones are OpenCLIP's ViT-H, g and bigG
        projected = "visual_projection.weight" in shapes
        return CLIPVisionSpec(
            size=patch * math.isqrt(checked_shape(shapes, "embeddings.position_embedding.weight", 2)[0] - 1),
            patch=patch,
            width=width,
            mlp_width=checked_shape(shapes, "encoder.layers.0.mlp.fc1.weight", 2)[0],
            layers=count_blocks(shapes, r"encoder\.layers\.(\d+)\."),
            heads=multiple(width, 64, "the width") if openai else 16,
            activation="quick_gelu" if openai else "gelu",
            projection=checked_shape(shapes, "visual_projection.weight", 2)[0] if projected else None,
        )


class PatchEmbeddings(nn.Module):
    """Pixels (B,3,S,S) -> the patches, row-major, after a class token if there is one, with positions (B,N,D)."""

    def __init__(self, spec: Any, class_token: bool) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(spec.width)) if class_token else None
        self.patch_embedding = nn.Conv2d(3, spec.width, spec.patch, stride=spec.patch, bias=not class_token)
        self.position_embedding = nn.Embedding((spec.size // spec.patch) ** 2 + class_token, spec.width)

    def forward(self, pixels: Tensor) -> Tensor:
        x: Tensor = self.patch_embedding(pixels).flatten(2).transpose(1, 2)  # (B, N, D)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        return x + self.position_embedding.weight


class VisionEncoder(nn.Module):
    """The layers of an image encoder, with the sizes of its spec: those of the text encoder, not causal."""

    def __init__(self, spec: Any, activation: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(spec.width, spec.mlp_width, spec.heads) for _ in range(spec.layers))
        layer: Any
        for layer in self.layers:
            layer.self_attn.causal = False
            layer.mlp.activation = ACTIVATIONS[activation]()
            layer.layer_norm1.eps = layer.layer_norm2.eps = eps


class CLIPVisionEncoder(nn.Module):
    """An image -> one vector per patch."""

    def __init__(self, spec: CLIPVisionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = PatchEmbeddings(spec, class_token=True)
        self.pre_layrnorm = nn.LayerNorm(spec.width)  # sic
        self.encoder = VisionEncoder(spec, spec.activation)
        self.post_layernorm = nn.LayerNorm(spec.width)  # of the pooled output
        self.visual_projection = None if spec.projection is None else nn.Linear(spec.width, spec.projection, bias=False)

    def forward(self, image: Tensor, skip: int = 0) -> Tensor:
        """The image (B,3,S,S) in [0,1] -> hidden states (B,N,D) of the last layer, or of the `skip`-th before it."""
        mean, std = (torch.tensor(values).to(image)[:, None, None] for values in (MEAN, STD))
        x: Tensor = self.pre_layrnorm(self.embeddings((image - mean) / std))
        for layer in self.encoder.layers[: self.spec.layers - skip]:
            x = layer(x)
        return x

    def pooled(self, image: Tensor) -> Tensor:
        """The image (B,3,S,S) in [0,1] -> its embedding (B,P), of the class token; needs `projection`."""
        assert self.visual_projection is not None
        return self.visual_projection(self.post_layernorm(self(image)[:, 0]))

    def mean_like(self, image: Tensor) -> Tensor:
        """Return an image that is 0 after normalisation."""
        return torch.tensor(MEAN).to(image)[:, None, None].expand_as(image)
