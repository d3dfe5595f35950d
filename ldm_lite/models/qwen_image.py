"""The transformer of Qwen-Image, from a frozen spec.

What is unusual about it:
- attribute names are the keys of the makers' files, which are those of diffusers;
- all blocks are double: text and image have separate weights and attend to both, the text first;
- each token has a position (image, row, column), which rotates queries and keys; rows and columns count from the middle
  of its image, and the text continues on the diagonal from the edge of the largest image.  The noised image is number
  0; those that are edited (Qwen-Image-Edit) follow it, in Edit 2511 as at time 0.

Shape letters: B batch, h w latent size, N image tokens, T text tokens, D width, H heads.
Source: Qwen Team 2025 (arXiv 2508.02324), sec. 2; diffusers transformer_qwenimage.py, which the makers release.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Shapes, checked_shape, count_blocks, sdpa, sinusoids, split_heads
from ldm_lite.models.ops import (
    RMSNorm,
    TransformerBlock,
    TransformerSpec,
    attend,
    axial_rotation,
    finite_half,
    gelu_tanh,
    inside,
    mlp,
    modulate,
    modulation,
    multiple,
    rotate,
)

SINUSOIDS = 256
THETA = 10000.0  # the slowest rotation turns by 1/THETA a position
# The key by which ComfyUI's files of Edit 2511 say that references are at time 0.
REFERENCES_AT_ZERO = "__index_timestep_zero__"


@dataclass(frozen=True)
class QwenImageSpec(TransformerSpec):
    """Sizes of a Qwen-Image transformer; all released ones are equal."""

    in_channels: int
    out_channels: int
    context_dim: int
    width: int
    heads: int
    mlp_width: int
    depth: int
    clean_references: bool  # references are modulated as at time 0

    vector_dim: ClassVar[int] = 1  # y is the text's number of tokens

    @staticmethod
    def from_shapes(shapes: Shapes) -> QwenImageSpec:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, in_channels = checked_shape(shapes, "img_in.weight", 2)
        head_dim = checked_shape(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)[0]
        return QwenImageSpec(
            in_channels=multiple(in_channels, 4, "the width of an image token"),
            out_channels=multiple(checked_shape(shapes, "proj_out.weight", 2)[0], 4, "the width of an output token"),
            context_dim=checked_shape(shapes, "txt_in.weight", 2)[1],
            width=width,
            heads=multiple(width, head_dim, "the width"),
            mlp_width=checked_shape(shapes, "transformer_blocks.0.img_mlp.net.2.weight", 2)[1],
            depth=count_blocks(shapes, r"transformer_blocks\.(\d+)\."),
            clean_references=REFERENCES_AT_ZERO in shapes,
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        """Channels of a head that index, row and column rotate: 16, 56 and 56 of 128."""
        head_dim = self.width // self.heads
        side = head_dim * 7 // 32 * 2
        return head_dim - 2 * side, side, side


class JointAttention(nn.Module):
    """Attention of text (B,T,D) and image (B,N,D), each with its own layers, to both."""

    def __init__(self, spec: QwenImageSpec) -> None:
        super().__init__()
        self.heads, self.head_dim = spec.heads, spec.width // spec.heads
        self.attention: AttentionFn = sdpa
        self.to_q, self.to_k, self.to_v, self.add_q_proj, self.add_k_proj, self.add_v_proj, self.to_add_out = (
            nn.Linear(spec.width, spec.width) for _ in range(7)
        )
        self.to_out = nn.Sequential(nn.Linear(spec.width, spec.width))
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (RMSNorm(self.head_dim) for _ in range(4))

    def forward(self, context: Tensor, x: Tensor, rotation: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rotation is (2,T+N,D/H/2), the mask as in attend, over text and image."""
        of_text, of_image = (self.add_q_proj, self.add_k_proj, self.add_v_proj), (self.to_q, self.to_k, self.to_v)
        text = [split_heads(layer(context), self.heads) for layer in of_text]  # queries, keys, values (B, H, T, D/H)
        image = [split_heads(layer(x), self.heads) for layer in of_image]  # (B, H, N, D/H)
        q = torch.cat([self.norm_added_q(text[0]), self.norm_q(image[0])], dim=2)  # (B, H, T+N, D/H)
        k = torch.cat([self.norm_added_k(text[1]), self.norm_k(image[1])], dim=2)
        v = torch.cat([text[2], image[2]], dim=2)
        out = attend(self.attention, rotate(q, rotation), rotate(k, rotation), v, mask)  # (B, T+N, D)
        from_text, from_image = torch.split(out, [context.shape[1], x.shape[1]], dim=1)
        return self.to_add_out(from_text), self.to_out(from_image)


def token_mlp(spec: QwenImageSpec) -> nn.Sequential:
    """Return the MLP of a stream; slot 1 held a Dropout."""
    first = nn.Sequential(OrderedDict(proj=nn.Linear(spec.width, spec.mlp_width), activation=gelu_tanh()))
    net = nn.Sequential(first, nn.Identity(), nn.Linear(spec.mlp_width, spec.width))
    return nn.Sequential(OrderedDict(net=net))


class QwenImageBlock(TransformerBlock):
    """Text and image attend to both; then each has its MLP."""

    def __init__(self, spec: QwenImageSpec) -> None:
        super().__init__()
        self.img_mod = modulation(spec.width, 6)
        self.attn = JointAttention(spec)
        self.img_mlp = token_mlp(spec)
        self.txt_mod = modulation(spec.width, 6)
        self.txt_mlp = token_mlp(spec)

    def forward(
        self,
        context: Tensor,
        x: Tensor,
        vec: Tensor,
        rotation: Tensor,
        mask: Tensor | None,
        clean: tuple[Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Text (B,T,D), image (B,N,D), the time vec (B,D) -> text and image; rotation and mask as in the attention.

        `clean` is time 0 (B,D), and the number of image tokens before those that have it.
        """
        # Shift, scale and gate (B,1,D) of the attention, then of the MLP.
        text_mods, image_mods = (mod(vec)[:, None].chunk(6, dim=2) for mod in (self.txt_mod, self.img_mod))
        at_0 = None if clean is None else self.img_mod(clean[0])[:, None].chunk(6, dim=2)

        def image_mod(number: int) -> Tensor:  # (B,N,D) with two times: made when it is needed, for its size
            if at_0 is None or clean is None:
                return image_mods[number]
            first, rest = image_mods[number].expand(-1, clean[1], -1), at_0[number]
            return torch.cat([first, rest.expand(-1, x.shape[1] - clean[1], -1)], dim=1)

        from_text, from_image = self.attn(
            modulate(context, *text_mods[:2]), modulate(x, image_mod(0), image_mod(1)), rotation, mask
        )
        context, x = context + text_mods[2] * from_text, x + image_mod(2) * from_image
        context = context + text_mods[5] * self.txt_mlp(modulate(context, *text_mods[3:5]))
        x = x + image_mod(5) * self.img_mlp(modulate(x, image_mod(3), image_mod(4)))
        return finite_half(context), finite_half(x)


class QwenImage(nn.Module):
    """The denoising network of Qwen-Image: noised latents at time s -> the velocity eps - x0."""

    def __init__(self, spec: QwenImageSpec) -> None:
        super().__init__()
        self.spec = spec
        names = ("linear_1", "activation", "linear_2")
        embedder = mlp(SINUSOIDS, spec.width, spec.width, names=names)
        self.time_text_embed = nn.Sequential(OrderedDict(timestep_embedder=embedder))
        self.txt_norm = RMSNorm(spec.context_dim)
        self.img_in = nn.Linear(spec.patch**2 * spec.in_channels, spec.width)
        self.txt_in = nn.Linear(spec.context_dim, spec.width)
        self.transformer_blocks = nn.ModuleList(QwenImageBlock(spec) for _ in range(spec.depth))
        self.norm_out = nn.Sequential(OrderedDict(linear=nn.Linear(spec.width, 2 * spec.width)))
        self.proj_out = nn.Linear(spec.width, spec.patch**2 * spec.out_channels)

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, y: Tensor, *, full: Tensor | None = None, **references: Tensor
    ) -> Tensor:
        """Latents x (B,in_channels,h,w) with even h and w, at s = t (B,) in [0,1] -> velocity (B,out_channels,h,w).

        context (B,T,context_dim) is the language model's output, of which the first y (B,1) tokens are attended to.
        Pass `full` (B,), of any value, if all texts have T tokens: nothing is masked, so any attention kernel can be
        used.  References are latents (B,in_channels,h',w') of images of any sizes, in the order of the arguments.
        context and they are in the weights' dtype; x and t may have any.
        """
        images = [F.pixel_unshuffle(image, self.spec.patch) for image in (x.to(context.dtype), *references.values())]
        grids, num_text, mask, clean = [image.shape[2:] for image in images], context.shape[1], None, None
        vec, num_noised = self.embed(t, context.dtype), math.prod(grids[0])
        if references and self.spec.clean_references:
            clean = self.embed(torch.zeros_like(t), context.dtype), num_noised
        x = self.img_in(torch.cat([image.flatten(2) for image in images], dim=2).transpose(1, 2))  # (B, N, D)
        if full is None:
            mask = F.pad(inside(y, num_text), (0, x.shape[1]), value=True)[:, None, None, :]  # (B, 1, 1, T+N)
        rotation = axial_rotation(places(num_text, grids, x.device), self.spec.axes, THETA, context.dtype)
        context = self.txt_in(self.txt_norm(context))  # (B, T, D)
        for block in self.transformer_blocks:
            context, x = block(context, x, vec, rotation, mask, clean)
        scale, shift = self.norm_out(vec)[:, None].chunk(2, dim=2)
        out = self.proj_out(modulate(x[:, :num_noised], shift, scale))
        return F.pixel_shuffle(out.transpose(1, 2).unflatten(2, grids[0]), self.spec.patch)

    def embed(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed the time (B,): (B,D)."""
        return F.silu(self.time_text_embed(sinusoids(1000 * t.float(), SINUSOIDS).to(dtype)))


def places(num_text: int, grids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the positions (3,T+N) of T text tokens, then of images of so many rows and columns of tokens."""
    text = max(map(max, grids)) // 2 + torch.arange(num_text, device=device)
    positions = [text[:, None].expand(-1, 3)]
    for number, grid in enumerate(grids):
        rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in grid)
        positions.append(torch.cartesian_prod(torch.full_like(rows[:1], number), rows, columns))
    return torch.cat(positions).T


# ---- released -------------------------------------------------------------------------------------------------------

QWEN_IMAGE = QwenImageSpec(
    in_channels=16,
    out_channels=16,
    context_dim=3584,
    width=3072,
    heads=24,
    mlp_width=12288,
    depth=60,
    clean_references=False,
)
