"""Attention over the positions of a feature map: the transformers of an LDM UNet, and its blocks that read no text.

Shape letters: B batch, C channels, h w latent size, N = h*w tokens, H heads, T text tokens, D context channels.
Source: Rombach et al. 2022, sec. 3.3; CompVis attention.py and openaimodel.py.
"""

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.ops import GEGLU, AttentionFn, Conv1x1, attention, merge_heads, split_heads

Text = Tensor | tuple[Tensor, ...]  # (B,T,D); or the keys and values that were made of it before, (B,T,C) each


class AttentionBlock(nn.Module):
    """Self-attention over all positions, in the unconditional families; a residual (B,C,h,w) -> (B,C,h,w).

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
        # As linears over tokens (B, N, C): attention kernels want the channels of a head next to each other.
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # (B, N, C)
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)  # (B, N, 3C)
        q, k, v = qkv.view(*qkv.shape[:2], self.num_heads, 3, -1).transpose(1, 2).unbind(3)  # (B, H, N, D) each
        out = F.linear(merge_heads(self.attention(q, k, v)), self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + out.transpose(1, 2).view_as(x)


class CrossAttention(nn.Module):
    """Multi-head attention of x (B,N,C) to context (B,T,D), or to itself; queries, keys, values without bias.

    In place of the context it takes the keys and values themselves, (B,T,C) each, made of it before.
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

    def forward(self, x: Tensor, context: Text) -> Tensor:
        k, v = (self.to_k(context), self.to_v(context)) if isinstance(context, Tensor) else context
        q, k, v = (split_heads(each, self.num_heads) for each in (self.to_q(x), k, v))  # (B, H, N or T, D)
        return self.to_out(merge_heads(self.attention(q, k, v)))


class FeedForward(nn.Module):
    """GEGLU to four times the width and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(channels, 4 * channels), nn.Identity(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each on the normalised input and added to it.

    Where both attentions read the text, keys and values made of it before are those of the first, then the second.
    """

    def __init__(self, channels: int, context_dim: int, num_heads: int, cross_only: bool) -> None:
        super().__init__()
        self.cross_only = cross_only
        self.attn1 = CrossAttention(channels, context_dim if cross_only else channels, num_heads)
        self.ff = FeedForward(channels)
        self.attn2 = CrossAttention(channels, context_dim, num_heads)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)

    def forward(self, x: Tensor, context: Text) -> Tensor:
        normed = self.norm1(x)
        first, second = (context, context) if isinstance(context, Tensor) else (context[:2], context[-2:])
        x = x + self.attn1(normed, first if self.cross_only else normed)
        x = x + self.attn2(self.norm2(x), second)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """Transformer blocks over the positions of a feature map; a residual (B,C,h,w) -> (B,C,h,w).

    In place of the context it takes what its `readers` make of it, (B,T,C) each.
    """

    def __init__(
        self, channels: int, context_dim: int, num_heads: int, depth: int, linear_proj: bool, cross_only: bool
    ) -> None:
        super().__init__()
        self.linear_proj = linear_proj
        self.columns: tuple[slice, ...] = ()  # of what is read ahead: the UNet's business
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, channels) if linear_proj else Conv1x1(channels, channels)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(channels, context_dim, num_heads, cross_only) for _ in range(depth)
        )
        self.proj_out = nn.Linear(channels, channels) if linear_proj else Conv1x1(channels, channels)

    def readers(self) -> list[nn.Linear]:
        """The linears that read the text and nothing else: keys and values, of one attention in a block or of both."""
        blocks = cast(Iterable[BasicTransformerBlock], self.transformer_blocks)
        attentions = [each for block in blocks for each in ([block.attn1] if block.cross_only else []) + [block.attn2]]
        return [linear for each in attentions for linear in (each.to_k, each.to_v)]

    def forward(self, x: Tensor, context: Text) -> Tensor:
        size = x.shape[2:]
        tokens = self.norm(x)
        if self.linear_proj:
            tokens = self.proj_in(tokens.flatten(2).transpose(1, 2))  # (B, N, C)
        else:
            tokens = self.proj_in(tokens).flatten(2).transpose(1, 2)  # (B, N, C)
        for block, text in zip(self.transformer_blocks, _shares(context, len(self.transformer_blocks)), strict=True):
            tokens = block(tokens, text)
        if self.linear_proj:
            out = self.proj_out(tokens).transpose(1, 2).unflatten(2, size)  # (B, C, h, w)
        else:
            out = self.proj_out(tokens.transpose(1, 2).unflatten(2, size))  # (B, C, h, w)
        return x + out


def _shares(context: Text, count: int) -> list[Text]:
    """What each of so many blocks is given: the context, or the keys and values that are its own."""
    if isinstance(context, Tensor):
        return [context] * count
    share = len(context) // count
    return [context[i : i + share] for i in range(0, len(context), share)]
