"""Qwen2.5-VL: the language model of qwen3.py, and the vision transformer that makes tokens of images for it.

What is unusual about the vision transformer:
- images keep their size, of multiples of 28 pixels; four patches of 14x14 become one token;
- most layers attend within windows of 8x8 patches, of which those at the lower and right edge are smaller;
- patches are those of two frames of a film, which for a picture are the same.

In the language model a token of an image has a position of three numbers, its image, row and column, which rotate
different channels; text continues after the longer side of the image, with all three equal.

Shape letters: N patches, h w their rows and columns, T tokens, D width, H heads, C channels of a head.
Source: Bai et al. 2025 (arXiv 2502.13923), sec. 2.1; Wang et al. 2024 (arXiv 2409.12191), sec. 2.1, for positions;
transformers Qwen2_5_VLModel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, merge_heads, split_heads
from ldm_lite.models.clip_vision import MEAN, STD
from ldm_lite.models.ops import Fitted, GatedMLP, RMSNorm, axial_rotation, mlp, multiple, wide
from ldm_lite.models.qwen3 import QWEN25_7B, THETA, Qwen3, Qwen25Spec, rotate_halves

FRAMES = 2  # of a patch
MERGED = 2  # patches along each side of a token
VISION_THETA = 10000.0
SECTIONS = (16, 24, 24)  # angles of a head that image, row and column rotate by


@dataclass(frozen=True)
class VisionSpec(Fitted):
    """Sizes of the vision transformer."""

    patch: int  # pixels per side
    width: int
    mlp_width: int
    layers: int
    output_width: int
    heads: int = 16
    window: int = 8  # patches per side
    full_attention: tuple[int, ...] = (7, 15, 23, 31)  # layers that attend to the whole image

    untold: ClassVar[tuple[str, ...]] = ("heads", "window", "full_attention")

    @property
    def side(self) -> int:
        """Pixels of a token, along each side."""
        return MERGED * self.patch

    @staticmethod
    def from_shapes(shapes: Shapes) -> VisionSpec:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, _, _, patch, _ = checked_shape(shapes, "patch_embed.proj.weight", 5)
        return VisionSpec(
            patch=patch,
            width=width,
            mlp_width=checked_shape(shapes, "blocks.0.mlp.gate_proj.weight", 2)[0],
            layers=count_blocks(shapes, r"blocks\.(\d+)\."),
            output_width=checked_shape(shapes, "merger.mlp.2.weight", 2)[0],
        )


class Places(NamedTuple):
    """Where the patches of an image are, row by row."""

    rotation: Tensor  # (2,N,C/2)
    windows: Tensor  # (W,window^2) numbers of patches
    inside: Tensor  # the same shape, bool: False where a window is beyond the edge


def places(spec: VisionSpec, h: int, w: int, like: Tensor) -> Places:
    """Return the positions of an image's patches, in rows and columns, on a tensor's device."""
    side, device = spec.window, like.device
    ids = torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device)).T  # (2, N)
    axis = spec.width // spec.heads // 2
    numbers = F.pad(torch.arange(h * w, device=device).view(h, w), (0, -w % side, 0, -h % side), value=-1)
    down, right = (patches // side for patches in numbers.shape)
    windows = numbers.view(down, side, right, side).transpose(1, 2).reshape(down * right, side**2)
    return Places(axial_rotation(ids, (axis, axis), VISION_THETA, like.dtype), windows.clamp(min=0), windows >= 0)


class VisionAttention(nn.Module):
    """Attention (1,N,D) -> (1,N,D) of each patch to those of its window, or of the image."""

    def __init__(self, spec: VisionSpec, full_attention: bool) -> None:
        super().__init__()
        self.heads, self.full_attention = spec.heads, full_attention
        multiple(spec.width, spec.heads, "the width")
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor, at: Places) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=2))  # (1, H, N, C)
        q, k = rotate_halves(q, at.rotation), rotate_halves(k, at.rotation)
        if self.full_attention:
            return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        q, k, v = (part[0][:, at.windows].transpose(0, 1) for part in (q, k, v))  # (W, H, window^2, C)
        out = merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=at.inside[:, None, None]))
        in_place = torch.empty_like(x)
        in_place[0, at.windows[at.inside]] = out[at.inside]
        return self.proj(in_place)


class VisionBlock(nn.Module):
    """Attention and MLP with residual connections (1,N,D), which stay in float32."""

    def __init__(self, spec: VisionSpec, full_attention: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(spec.width), RMSNorm(spec.width)
        self.attn = VisionAttention(spec, full_attention)
        self.mlp = GatedMLP(spec.width, spec.mlp_width, "gate_proj", "up_proj", "down_proj", bias=True)

    def forward(self, x: Tensor, at: Places) -> Tensor:
        x = x + self.attn(self.norm1(x), at)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Patches (1,h,w,D) -> tokens (T,output_width), row by row, of 2x2 patches each."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        width = MERGED**2 * spec.width
        self.ln_q = RMSNorm(spec.width)
        self.mlp = mlp(width, width, spec.output_width, nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        _, h, w, width = x.shape
        blocks = self.ln_q(x).view(h // MERGED, MERGED, w // MERGED, MERGED, width).transpose(1, 2)
        return self.mlp(blocks.reshape(-1, MERGED**2 * width))


class Vision(nn.Module):
    """An image -> one vector per token."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.spec = spec
        kernel = (FRAMES, spec.patch, spec.patch)
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv3d(3, spec.width, kernel, kernel, bias=False)))
        self.blocks = nn.ModuleList(
            VisionBlock(spec, full_attention=i in spec.full_attention) for i in range(spec.layers)
        )
        self.merger = Merger(spec)

    def forward(self, pixels: Tensor) -> Tensor:
        """The image (3,H,W) in [0,1], with H and W multiples of 28 -> (H/28 * W/28, output_width)."""
        patch_embed: Any = self.patch_embed
        dtype = patch_embed.proj.weight.dtype
        mean, std = (torch.tensor(values).to(pixels)[:, None, None] for values in (MEAN, STD))
        frames = ((pixels - mean) / std).to(dtype)[None, :, None].expand(-1, -1, FRAMES, -1, -1)
        patches: Tensor = patch_embed(frames)[:, :, 0]  # (1, D, h, w)
        x = patches.flatten(2).transpose(1, 2).to(wide(dtype))  # (1, N, D)
        h, w = patches.shape[2:]
        at = places(self.spec, h, w, x)
        for block in self.blocks:
            x = block(x, at)
        return self.merger(x.view(1, h, w, -1))


class Qwen25VL(Qwen3):
    """The language model, with the vision transformer if its spec has one."""

    def __init__(self, spec: Qwen25Spec) -> None:
        super().__init__(spec)
        if spec.vision is not None:
            self.visual = Vision(spec.vision)

    def forward(
        self, token_ids: Tensor, mask: Tensor | None = None, images: Sequence[tuple[int, Tensor]] = ()
    ) -> Tensor:
        """Token ids (B,T) -> (B,T,output_width); images replace tokens, the same ones in all texts.

        Each is the index of its first token, and the image (3,H,W) as Vision takes it.
        """
        if not images:
            return super().forward(token_ids, mask)
        embedded = self.embed_tokens(token_ids)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).repeat(3, 1)  # image, row, column
        for first, pixels in images:
            seen = self.visual(pixels)  # (N, D)
            h, w = (side // self.visual.spec.side for side in pixels.shape[1:])
            grid = torch.cartesian_prod(*(torch.arange(side, device=positions.device) for side in (1, h, w)))
            end = first + len(seen)
            embedded[:, first:end] = seen
            positions[:, first:end] = positions[:, first, None] + grid.T
            positions[:, end:] -= len(seen) - max(h, w)
        by_position = (
            axial_rotation(position[None], (self.spec.head_dim,), THETA, wide(embedded.dtype)) for position in positions
        )
        parts = [torch.split(rotation, list(SECTIONS), dim=2)[axis] for axis, rotation in enumerate(by_position)]
        return self.read(embedded, torch.cat(parts, dim=2), mask)


# ---- released -------------------------------------------------------------------------------------------------------

VISION = VisionSpec(patch=14, width=1280, mlp_width=3420, layers=32, output_width=3584)
QWEN25_VL_7B = replace(QWEN25_7B, vision=VISION)
