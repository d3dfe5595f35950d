"""T2I-Adapter's style network: turns CLIP's image features into a few tokens to append to the prompt's.

Shape letters: B batch, N patches of CLIP, T tokens, D CLIP's width, C of the context.
Source: Mou et al. 2023; StyleAdapter of the original ldm/modules/encoders/adapter.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldm_lite.core.clip import QuickGELU
from ldm_lite.core.layers import Shapes, checked_shape, count_blocks
from ldm_lite.models.open_clip import ResidualAttentionBlock
from ldm_lite.models.ops import multiple


@dataclass(frozen=True)
class StyleAdapterSpec:
    """Sizes of a style adapter."""

    num_tokens: int
    width: int
    context_dim: int
    layers: int
    heads: int  # not known from the weights

    @staticmethod
    def from_shapes(shapes: Shapes) -> StyleAdapterSpec:
        """Return the spec of an adapter whose weights have these shapes.  Raises ValueError if they make no sense."""
        _, num_tokens, width = checked_shape(shapes, "style_embedding", 3)
        layers = count_blocks(shapes, r"transformer_layes\.(\d+)\.")
        multiple(width, 8, "the width")  # of 8 heads
        return StyleAdapterSpec(num_tokens, width, checked_shape(shapes, "proj", 2)[1], layers, heads=8)


class StyleAdapter(nn.Module):
    """Hidden states of CLIP's image encoder -> tokens of the UNet's context."""

    def __init__(self, spec: StyleAdapterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.style_embedding = nn.Parameter(torch.randn(1, spec.num_tokens, spec.width) * spec.width**-0.5)
        self.transformer_layes = nn.Sequential(  # sic
            *(
                ResidualAttentionBlock(spec.width, 4 * spec.width, spec.heads, activation=QuickGELU, causal=False)
                for _ in range(spec.layers)
            )
        )
        self.ln_pre = nn.LayerNorm(spec.width)
        self.ln_post = nn.LayerNorm(spec.width)
        self.proj = nn.Parameter(torch.randn(spec.width, spec.context_dim) * spec.width**-0.5)

    def forward(self, states: Tensor) -> Tensor:
        """Hidden states (B,N,D) -> tokens (B,T,C)."""
        x = torch.cat([states, self.style_embedding.expand(len(states), -1, -1)], dim=1)  # (B, N+T, D)
        x = self.transformer_layes(self.ln_pre(x))
        return self.ln_post(x[:, -self.spec.num_tokens :]) @ self.proj


def styled(context: Tensor, tokens: Tensor, positive: bool) -> Tensor:
    """Append tokens (1,T',C) to a context (B,T,C): (B,T+T',C).

    A negative prompt repeats its own last T' tokens, as in the original's ddim.py.
    """
    if positive:
        return torch.cat([context, tokens.to(context).expand(len(context), -1, -1)], dim=1)
    last = torch.arange(-tokens.shape[1], 0, device=context.device) % context.shape[1]
    return torch.cat([context, context[:, last]], dim=1)
