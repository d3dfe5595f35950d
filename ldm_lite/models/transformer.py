"""Attention over the positions of a feature map: an LDM UNet's transformers, and attention blocks without text.

A transformer can read the text's keys and values from a cache (`UNet.text_cache`).  Layers of another class, or with a
replaced forward, have the entry None and are called as `layer(x, context)`.

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, H heads, T text tokens, D context channels.
Source: Rombach et al. 2022, sec. 3.3; CompVis attention.py and openaimodel.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Conv1x1, merge_heads, split_heads
from ldm_lite.core.layers import sdpa as attention
from ldm_lite.core.unet import GEGLU

KeysValues = tuple[Tensor, Tensor]  # of the text, (B,T,C) each


class WithImages(NamedTuple):
    """An entry for attn2 that reads images beside the text, each by an attention of its own: IP-Adapter."""

    text: KeysValues | None  # None = the layer computes its own
    images: tuple[KeysValues, ...]


class Recorded:
    """An entry for attn2 that keeps the layer's result, which can be an entry itself: T-GATE, runtime/shortened.py."""

    def __init__(self, keys_values: KeysValues | WithImages | None) -> None:
        self.keys_values = keys_values
        self.out: Tensor | None = None  # (B,N,C)


CrossCache = KeysValues | WithImages | Recorded | Tensor | None
BlockCache = tuple[KeysValues | None, CrossCache]  # of attn1 and attn2; None = the layer computes its own
TransformerCache = tuple[BlockCache | None, ...]  # one entry for each block
TextCache = tuple[TransformerCache | None, ...]  # one entry for each SpatialTransformer, by its index


class AttentionBlock(nn.Module):
    """Self-attention over all positions with a residual connection (B,C,h,w) -> (B,C,h,w), for unconditional families.

    The rows of qkv are ordered [head 0: q k v][head 1: q k v]..., the original's "legacy" order.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.attention: AttentionFn = attention
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        # As linears over tokens (B, N, C): attention kernels need the channels of a head next to each other.
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # (B, N, C)
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)  # (B, N, 3C)
        q, k, v = qkv.view(*qkv.shape[:2], self.num_heads, 3, -1).transpose(1, 2).unbind(3)  # (B, H, N, D) each
        out = F.linear(merge_heads(self.attention(q, k, v)), self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + out.transpose(1, 2).view_as(x)


class CrossAttention(nn.Module):
    """Multi-head attention of x (B,N,C) to context (B,T,D), or to itself; queries, keys, values without bias.

    After `join` self-attention takes one product in place of three, with the same three parameters.
    """

    def __init__(self, channels: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.attention: AttentionFn = attention
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_dim, channels, bias=False)
        self.to_v = nn.Linear(context_dim, channels, bias=False)
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Identity())  # slot 1 held a Dropout
        self.qkv: Tensor | None = None  # (3C, C), the memory of all three weights, which are views of it

    def keys_values(self, context: Tensor) -> KeysValues:
        """Return keys and values of context (B,T,D), for all heads: (B,T,C) each."""
        return self.to_k(context), self.to_v(context)

    def forward(self, x: Tensor, context: Tensor, cache: KeysValues | WithImages | None = None) -> Tensor:
        cache, images = cache if isinstance(cache, WithImages) else (cache, ())
        if context is x and self.qkv is not None and self._uses_qkv():
            q, k, v = F.linear(x, self.qkv).chunk(3, dim=-1)  # (B, N, C)
        else:
            k, v = self.keys_values(context) if cache is None else cache
            q = self.to_q(x)
        q, k, v = (split_heads(each, self.num_heads) for each in (q, k, v))  # (B, H, N or T, D)
        out = self.attention(q, k, v)
        for image in images:
            out = out + self.attention(q, *(split_heads(each, self.num_heads) for each in image))
        return self.to_out(merge_heads(out))

    def join(self) -> None:
        """Move the weights of queries, keys and values of self-attention into one memory, for one product.

        The parameters stay, as views, so changes in place are seen.  Gradients, and weights that were moved, cast,
        copied or replaced, take three products.  Other layers are left as they are.
        """
        weights = [layer.weight for layer in (self.to_q, self.to_k, self.to_v)]
        if len({weight.shape for weight in weights}) > 1 or not all(map(_is_plain, (self.to_q, self.to_k, self.to_v))):
            return
        with torch.no_grad():
            self.qkv = torch.cat([weight.detach() for weight in weights])
        for weight, view in zip(weights, self.qkv.chunk(3), strict=True):
            weight.data = view

    def is_joined(self) -> bool:
        """Whether `qkv` still is the memory of all three weights, and nothing else is computed."""
        layers = (self.to_q, self.to_k, self.to_v)
        return self.qkv is not None and all(
            _is_plain(layer) and layer.weight.data_ptr() == rows.data_ptr() and layer.weight.dtype == rows.dtype
            for layer, rows in zip(layers, self.qkv.chunk(3), strict=True)
        )

    def _uses_qkv(self) -> bool:
        if torch.compiler.is_compiling():  # addresses are unknown here: CompiledStep looks at them before each call
            return not torch.is_grad_enabled()
        return self.is_joined() and not (torch.is_grad_enabled() and self.to_q.weight.requires_grad)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "CrossAttention":
        self.qkv = None  # the weights move apart, and their old memory must be freed
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"qkv": None}  # the weights of a copy have memory of their own


class FeedForward(nn.Module):
    """GEGLU to four times the width and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(channels, 4 * channels), nn.Identity(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, channels: int, context_dim: int, num_heads: int, cross_only: bool) -> None:
        super().__init__()
        self.cross_only = cross_only
        self.attn1 = CrossAttention(channels, context_dim if cross_only else channels, num_heads)
        self.ff = FeedForward(channels)
        self.attn2 = CrossAttention(channels, context_dim, num_heads)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)

    def text_cache(self, context: Tensor | None) -> BlockCache:
        """Return keys and values of context (B,T,D) for the layers that read it: attn2, and attn1 if `cross_only`.

        None gives entries with which the layers compute their own.
        """
        if context is None:
            return None, None
        first = self.attn1.keys_values(context) if self.cross_only and _is_own(self.attn1, CrossAttention) else None
        return first, self.attn2.keys_values(context) if _is_own(self.attn2, CrossAttention) else None

    def forward(self, x: Tensor, context: Tensor, cache: BlockCache = (None, None)) -> Tensor:
        normed = self.norm1(x)
        x = x + call_cached(self.attn1, normed, context if self.cross_only else normed, cache[0])
        x = x + self._crossed(x, context, cache[1])
        return x + self.ff(self.norm3(x))

    def _crossed(self, x: Tensor, context: Tensor, cache: CrossCache) -> Tensor:
        if isinstance(cache, Tensor):
            return cache
        if not isinstance(cache, Recorded):
            return call_cached(self.attn2, self.norm2(x), context, cache)
        cache.out = call_cached(self.attn2, self.norm2(x), context, cache.keys_values)
        return cache.out


class SpatialTransformer(nn.Module):
    """Transformer blocks over the positions of a feature map with a residual connection (B,C,h,w) -> (B,C,h,w)."""

    def __init__(
        self, channels: int, context_dim: int, num_heads: int, depth: int, linear_proj: bool, cross_only: bool
    ) -> None:
        super().__init__()
        self.linear_proj = linear_proj
        self.index: int | None = None  # of its entry in the UNet's text cache; set by the UNet
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, channels) if linear_proj else Conv1x1(channels, channels)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(channels, context_dim, num_heads, cross_only) for _ in range(depth)
        )
        self.proj_out = nn.Linear(channels, channels) if linear_proj else Conv1x1(channels, channels)

    def text_cache(self, context: Tensor | None) -> TransformerCache | None:
        """Return keys and values of context (B,T,D) for each block; None if this layer's forward was replaced."""
        if not _is_own(self, SpatialTransformer):
            return None
        return tuple(
            block.text_cache(context) if _is_own(block, BasicTransformerBlock) else None  # type: ignore[operator]
            for block in self.transformer_blocks
        )

    def forward(self, x: Tensor, context: Tensor, cache: TransformerCache | None = None) -> Tensor:
        return x + self.attend(self.norm(x), context, cache)

    def attend(self, normed: Tensor, context: Tensor, cache: TransformerCache | None) -> Tensor:
        """Return what is added to a feature map, given its norm (B,C,h,w)."""
        size = normed.shape[2:]
        if self.linear_proj:
            tokens = self.proj_in(normed.flatten(2).transpose(1, 2))  # (B, N, C)
        else:
            tokens = self.proj_in(normed).flatten(2).transpose(1, 2)  # (B, N, C)
        for i, block in enumerate(self.transformer_blocks):
            tokens = call_cached(block, tokens, context, None if cache is None else cache[i])
        if self.linear_proj:
            return self.proj_out(tokens).transpose(1, 2).unflatten(2, size)  # (B, C, h, w)
        return self.proj_out(tokens.transpose(1, 2).unflatten(2, size))  # (B, C, h, w)


def call_cached(
    layer: nn.Module,
    x: Tensor,
    context: Tensor | None,
    cache: KeysValues | WithImages | BlockCache | TransformerCache | None,
) -> Tensor:
    """Call a layer with its entry of the text cache; without one it may be any module that takes (x, context)."""
    out: Tensor = layer(x, context) if cache is None else layer(x, context, cache)
    return out


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer only multiplies by its weight."""
    changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not changed


def _is_own(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer runs the forward of exactly this class, which takes a cache."""
    return type(layer) is kind and "forward" not in vars(layer)


def with_images(cache: TextCache | None, images: tuple[tuple[tuple[KeysValues, ...], ...], ...]) -> TextCache:
    """Add the keys and values of images, by transformer and block, to a text cache, or to none."""
    texts = cache if cache is not None else (None,) * len(images)
    found: list[TransformerCache] = []
    for text, layer in zip(texts, images, strict=True):
        blocks: list[BlockCache] = []
        for i, image in enumerate(layer):
            first, own = (None, None) if text is None else text[i] or (None, None)
            assert own is None or isinstance(own, tuple)  # of keys and values
            blocks.append((first, WithImages(own, image)))  # type: ignore[arg-type]
        found.append(tuple(blocks))
    return tuple(found)
