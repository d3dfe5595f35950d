"""IP-Adapter: tokens of an image, which every cross-attention of a UNet reads besides the text, with separate keys.

Three ways lead from CLIP's image encoder to tokens: its pooled output by a linear layer (ip-adapter_sd15, _sdxl), its
hidden states by an MLP (full-face), or by a few learned queries that attend to them (plus).

Shape letters: B batch, N tokens of CLIP, T tokens of the image, E CLIP's width, D the resampler's, C the
context's.
Source: Ye et al. 2023; tencent-ailab/IP-Adapter ip_adapter.py, resampler.py and attention_processor.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.core.unet import Attention, BasicTransformerBlock
from ldm_lite.models.clip_vision import CLIPVisionEncoder
from ldm_lite.models.ops import mlp, multiple
from ldm_lite.models.unet import LDMUNet

HEAD = 64  # channels of a resampler's head
KeysValues = tuple[Tensor, Tensor]  # (B,T,C) each
Images = tuple[KeysValues, ...]  # keys and values of an image for every cross-attention, in the order of the modules


@dataclass(frozen=True)
class IPAdapterSpec:
    """Sizes of an IP-Adapter, without those of its UNet."""

    kind: str  # linear, mlp or resampler
    image_width: int  # of what it reads of the image encoder
    context_dim: int
    num_tokens: int  # 0 for an mlp: as many as CLIP has
    width: int  # of the resampler, like the three below; 0 for the other kinds
    mlp_width: int
    depth: int
    heads: int

    @staticmethod
    def from_shapes(shapes: Shapes) -> IPAdapterSpec:
        """Return the spec of an adapter whose weights have these shapes.  Raises ValueError if they make no sense."""
        if "image_proj.latents" in shapes:
            _, num_tokens, width = checked_shape(shapes, "image_proj.latents", 3)
            return IPAdapterSpec(
                kind="resampler",
                image_width=checked_shape(shapes, "image_proj.proj_in.weight", 2)[1],
                context_dim=checked_shape(shapes, "image_proj.proj_out.weight", 2)[0],
                num_tokens=num_tokens,
                width=width,
                mlp_width=checked_shape(shapes, "image_proj.layers.0.1.1.weight", 2)[0],
                depth=count_blocks(shapes, r"image_proj\.layers\.(\d+)\."),
                heads=multiple(
                    checked_shape(shapes, "image_proj.layers.0.0.to_q.weight", 2)[0], HEAD, "the resampler's width"
                ),
            )
        if "image_proj.proj.3.weight" in shapes:
            context_dim, image_width = checked_shape(shapes, "image_proj.proj.2.weight", 2)
            return IPAdapterSpec("mlp", image_width, context_dim, 0, 0, 0, 0, 0)
        (context_dim,) = checked_shape(shapes, "image_proj.norm.weight", 1)
        rows, image_width = checked_shape(shapes, "image_proj.proj.weight", 2)
        num_tokens = multiple(rows, context_dim, "the width of all tokens")
        return IPAdapterSpec("linear", image_width, context_dim, num_tokens, 0, 0, 0, 0)


class LinearProjection(nn.Module):
    """CLIP's pooled output (B,E) -> tokens (B,T,C)."""

    def __init__(self, spec: IPAdapterSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.image_width, spec.num_tokens * spec.context_dim)
        self.norm = nn.LayerNorm(spec.context_dim)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.norm(self.proj(pooled).unflatten(1, (-1, *self.norm.normalized_shape)))  # (B, T, C)


def mlp_projection(spec: IPAdapterSpec) -> nn.Module:
    """Hidden states of CLIP (B,N,E) -> as many tokens (B,N,C)."""
    layers = mlp(spec.image_width, spec.image_width, spec.context_dim, nn.GELU)
    return nn.Sequential(OrderedDict(proj=nn.Sequential(*layers, nn.LayerNorm(spec.context_dim))))


class PerceiverAttention(nn.Module):
    """Attention of queries (B,T,D) to states (B,N,D) and to themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, heads * HEAD, bias=False)
        self.to_kv = nn.Linear(width, 2 * heads * HEAD, bias=False)
        self.to_out = nn.Linear(heads * HEAD, width, bias=False)

    def forward(self, states: Tensor, queries: Tensor) -> Tensor:
        queries = self.norm2(queries)
        k, v = self.to_kv(torch.cat([self.norm1(states), queries], dim=1)).chunk(2, dim=-1)  # (B, N+T, H*64)
        q, k, v = (split_heads(part, self.heads) for part in (self.to_q(queries), k, v))
        return self.to_out(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Resampler(nn.Module):
    """Hidden states of CLIP (B,N,E) -> tokens (B,T,C)."""

    def __init__(self, spec: IPAdapterSpec) -> None:
        super().__init__()
        width = spec.width
        self.latents = nn.Parameter(torch.randn(1, spec.num_tokens, width) * width**-0.5)
        self.proj_in = nn.Linear(spec.image_width, width)
        self.layers = nn.ModuleList()
        for _ in range(spec.depth):
            feed_forward = nn.Sequential(nn.LayerNorm(width), *mlp(width, spec.mlp_width, width, nn.GELU, bias=False))
            self.layers.append(nn.ModuleList([PerceiverAttention(width, spec.heads), feed_forward]))
        self.proj_out = nn.Linear(width, spec.context_dim)
        self.norm_out = nn.LayerNorm(spec.context_dim)

    def forward(self, states: Tensor) -> Tensor:
        states, x = self.proj_in(states), self.latents.expand(len(states), -1, -1)  # (B, N, D), (B, T, D)
        for layer in self.layers:
            attention, feed_forward = cast(nn.ModuleList, layer)
            x = x + attention(states, x)
            x = x + feed_forward(x)
        return self.norm_out(self.proj_out(x))


PROJECTIONS: dict[str, Callable[[IPAdapterSpec], nn.Module]] = {
    "linear": LinearProjection,
    "mlp": mlp_projection,
    "resampler": Resampler,
}


class KeysAndValues(nn.Module):
    """The keys and values that one cross-attention reads of the image's tokens."""

    def __init__(self, context_dim: int, channels: int) -> None:
        super().__init__()
        self.to_k_ip = nn.Linear(context_dim, channels, bias=False)
        self.to_v_ip = nn.Linear(context_dim, channels, bias=False)

    def forward(self, tokens: Tensor) -> KeysValues:
        return self.to_k_ip(tokens), self.to_v_ip(tokens)


class IPAdapter(nn.Module):
    """The output of an image encoder -> keys and values for each cross-attention of a UNet."""

    def __init__(self, spec: IPAdapterSpec, unet: LDMUNet) -> None:
        super().__init__()
        self.spec = spec
        self.image_proj = PROJECTIONS[spec.kind](spec)
        # Numbers are of diffusers' attention processors: two a block, of which the second is of cross-attention.
        parts = (unet.input_blocks, unet.output_blocks, unet.middle_block)  # in the order of diffusers' modules
        layers = [layer for part in parts for layer in cross_attentions(part)]
        self._order = [layers.index(layer) for layer in cross_attentions(unet)]
        widths = [layer.to_q.out_features for layer in layers]
        self.ip_adapter = nn.ModuleDict(
            {str(2 * i + 1): KeysAndValues(spec.context_dim, width) for i, width in enumerate(widths)}
        )

    def tokens(self, vision: CLIPVisionEncoder, image: Tensor) -> tuple[Tensor, Tensor]:
        """An image (1,3,S,S) in [0,1] -> its tokens (1,T,C), and those of the negative prompt's branch.

        The latter are of a pooled output of 0, or of an image that is 0 after normalisation.
        """
        if self.spec.kind == "linear":
            pooled = vision.pooled(image)
            return self.image_proj(pooled), self.image_proj(torch.zeros_like(pooled))
        return self.image_proj(vision(image, skip=1)), self.image_proj(vision(vision.mean_like(image), skip=1))

    def forward(self, tokens: Tensor) -> Images:
        """Tokens (B,T,C) -> their keys and values for every cross-attention of the UNet."""
        keys_values = [layer(tokens) for layer in self.ip_adapter.values()]
        return tuple(keys_values[place] for place in self._order)


def cross_attentions(unet: nn.Module) -> list[Attention]:
    """Return the cross-attentions of a UNet, in the order of its modules."""
    return [block.attn2 for block in unet.modules() if isinstance(block, BasicTransformerBlock)]


# ---- a UNet that reads images ---------------------------------------------------------------------------------------


class ImageAttention(Attention):
    """A cross-attention that reads images besides the text, each by a separate attention."""

    images: tuple[KeysValues, ...]

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in (self.to_q(x), self.to_k(context), self.to_v(context)))
        out = self.attention(q, k, v)
        for image in self.images:
            out = out + self.attention(q, *(split_heads(part, self.num_heads) for part in image))
        return self.to_out(merge_heads(out))


class UNetWithImages(nn.Module):
    """A UNet of the same weights as another one, whose cross-attentions read images too."""

    def __init__(self, unet: nn.Module) -> None:
        """unet is changed: a copy of the model's, with the same weights."""
        super().__init__()
        self.unet = unet
        for layer in cross_attentions(self.unet):
            layer.__class__ = ImageAttention
            vars(layer)["images"] = ()

    def forward(self, x: Tensor, t: Tensor, images: tuple[tuple[KeysValues, ...], ...], **inputs: Any) -> Tensor:
        """Run as UNet.forward; images are the keys and values (B,T,C) of every image, layer by layer."""
        for layer, keys_values in zip(cross_attentions(self.unet), images, strict=True):
            vars(layer)["images"] = keys_values
        return self.unet(x, t, **inputs)
