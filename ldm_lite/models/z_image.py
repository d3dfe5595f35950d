"""The transformer of Z-Image, Turbo or not, from a frozen spec.

What is unusual about it:
- attribute names are the keys of ComfyUI's files; those of Tongyi-MAI's and diffusers' hold queries, keys and values
  separately (NAMES);
- image and text are one sequence, the image first, after separate blocks for each of them: the refiners;
- both are padded to multiples of 32 with learned tokens, which are attended to like others;
- each token has a position (index, row, column): a text counts along the first, the image follows it there;
- the time scales what enters attention and MLP, without shift; their outputs are normalised, then gated by a tanh;
- the network predicts x0 - eps, from 1 - s.

Shape letters: B batch, C channels, h w latent size, N image tokens and T text tokens with padding, D width, H heads,
M width of the embedded time.
Source: Z-Image Team 2025 (arXiv 2511.22699); Tongyi-MAI/Z-Image transformer.py; Su et al. 2021, eq. 15 (rotation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Shapes, checked_shape, count_blocks, sdpa, sinusoids, split_heads
from ldm_lite.models.ops import (
    GatedMLP,
    RMSNorm,
    TransformerBlock,
    TransformerSpec,
    attend,
    axial_rotation,
    embedder,
    finite_half,
    inside,
    multiple,
    of_blocks,
    rotate,
)

MULTIPLE = 32  # of tokens, to which image and text are padded
THETA = 256.0  # the slowest rotation turns by 1/THETA a position
SINUSOIDS = 256
EPS = 1e-5  # of the norms


@dataclass(frozen=True)
class ZImageSpec(TransformerSpec):
    """Sizes of a Z-Image transformer; all released ones are equal."""

    in_channels: int
    out_channels: int
    context_dim: int
    width: int
    heads: int
    mlp_width: int
    time_width: int  # of the embedded time's hidden layer
    modulation_dim: int
    depth: int
    refiner_depth: int  # blocks of the image alone, and as many of the text alone

    vector_dim: ClassVar[int] = 1  # y is the text's number of tokens

    @staticmethod
    def from_shapes(shapes: Shapes) -> ZImageSpec:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, in_channels = checked_shape(shapes, "x_embedder.weight", 2)
        time_width = checked_shape(shapes, "t_embedder.mlp.0.weight", 2)[0]
        head_dim = checked_shape(shapes, "layers.0.attention.q_norm.weight", 1)[0]
        return ZImageSpec(
            in_channels=multiple(in_channels, 4, "the width of an image token"),
            out_channels=multiple(
                checked_shape(shapes, "final_layer.linear.weight", 2)[0], 4, "the width of an output token"
            ),
            context_dim=checked_shape(shapes, "cap_embedder.1.weight", 2)[1],
            width=width,
            heads=multiple(width, head_dim, "the width"),
            mlp_width=checked_shape(shapes, "layers.0.feed_forward.w1.weight", 2)[0],
            time_width=time_width,
            modulation_dim=checked_shape(shapes, "t_embedder.mlp.2.weight", 2)[0],
            depth=count_blocks(shapes, r"layers\.(\d+)\."),
            refiner_depth=count_blocks(shapes, r"noise_refiner\.(\d+)\."),
        )

    @property
    def other_names(self) -> dict[str, str]:
        """What diffusers calls its modules."""
        return NAMES

    @property
    def axes(self) -> tuple[int, int, int]:
        """Channels of a head that index, row and column rotate: 32, 48 and 48 of 128."""
        head_dim = self.width // self.heads
        side = head_dim * 3 // 16 * 2
        return head_dim - 2 * side, side, side


class ZImageAttention(nn.Module):
    """Self-attention (B,N,D) -> (B,N,D) with normalised and rotated queries and keys."""

    def __init__(self, spec: ZImageSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.head_dim = spec.width // spec.heads
        self.attention: AttentionFn = sdpa
        self.qkv = nn.Linear(spec.width, 3 * spec.width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, EPS)
        self.k_norm = RMSNorm(self.head_dim, EPS)
        self.out = nn.Linear(spec.width, spec.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        """The mask is as in attend."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=2))  # (B, H, N, D/H)
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        return finite_half(self.out(attend(self.attention, q, k, v, mask)))


class ZImageBlock(TransformerBlock):
    """Attention and MLP between norms, and in all but the text's refiners scaled and gated by the time."""

    def __init__(self, spec: ZImageSpec, is_modulated: bool = True) -> None:
        super().__init__()
        self.attention = ZImageAttention(spec)
        self.feed_forward = GatedMLP(spec.width, spec.mlp_width, gate="w1", up="w3", down="w2")
        self.attention_norm1 = RMSNorm(spec.width, EPS)
        self.ffn_norm1 = RMSNorm(spec.width, EPS)
        self.attention_norm2 = RMSNorm(spec.width, EPS)
        self.ffn_norm2 = RMSNorm(spec.width, EPS)
        if is_modulated:
            self.adaLN_modulation = nn.Sequential(nn.Linear(spec.modulation_dim, 4 * spec.width))

    def forward(self, x: Tensor, vec: Tensor | None, rotation: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens x (B,N,D), the time vec (B,M) or None, rotation (2,B,1,N,D/H/2), mask as in Attention -> (B,N,D)."""
        if vec is None:
            x = x + self.attention_norm2(self.attention(self.attention_norm1(x), rotation, mask))
            return finite_half(x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x))))
        scale, gate, mlp_scale, mlp_gate = self.adaLN_modulation(vec)[:, None, :].chunk(4, dim=2)  # (B, 1, D) each
        out = self.attention(self.attention_norm1(x) * (1 + scale), rotation, mask)
        x = x + gate.tanh() * self.attention_norm2(out)
        out = self.feed_forward(self.ffn_norm1(x) * (1 + mlp_scale))
        return finite_half(x + mlp_gate.tanh() * self.ffn_norm2(out))


class FinalLayer(nn.Module):
    """Norm, scaled by the time, and a linear to the channels of a token."""

    def __init__(self, spec: ZImageSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.width, 4 * spec.out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(spec.modulation_dim, spec.width))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        scale = self.adaLN_modulation(vec)[:, None, :]
        return self.linear(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale))


class ZImage(nn.Module):
    """The denoising network of Z-Image: noised latents at time 1 - s -> the reversed velocity x0 - eps."""

    def __init__(self, spec: ZImageSpec) -> None:
        super().__init__()
        self.spec = spec
        self.x_embedder = nn.Linear(4 * spec.in_channels, spec.width)
        self.noise_refiner = nn.ModuleList(ZImageBlock(spec) for _ in range(spec.refiner_depth))
        self.context_refiner = nn.ModuleList(ZImageBlock(spec, is_modulated=False) for _ in range(spec.refiner_depth))
        self.t_embedder = embedder(SINUSOIDS, spec.time_width, spec.modulation_dim)
        self.cap_embedder = nn.Sequential(RMSNorm(spec.context_dim, EPS), nn.Linear(spec.context_dim, spec.width))
        self.layers = nn.ModuleList(ZImageBlock(spec) for _ in range(spec.depth))
        self.final_layer = FinalLayer(spec)
        self.x_pad_token = nn.Parameter(torch.zeros(1, spec.width))
        self.cap_pad_token = nn.Parameter(torch.zeros(1, spec.width))

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, y: Tensor | None = None, *, full: Tensor | None = None
    ) -> Tensor:
        """Latents x (B,in_channels,h,w) with even h and w, at 1 - s = t (B,) in [0,1] -> (B,out_channels,h,w).

        context (B,T,context_dim) is Qwen3's output, of which the first y (B,1) tokens are each text's, at least 1.
        Pass `full` (B,), of any value, if all texts reach into the last 32 of T: nothing is masked, so any attention
        kernel can be used.  context is in the weights' dtype; x, t and y may have any.
        """
        assert y is not None, "Z-Image reads the number of a text's tokens"
        x = x.to(context.dtype)
        h, w = x.shape[2] // 2, x.shape[3] // 2
        vec = self.t_embedder(sinusoids(1000 * t.float(), SINUSOIDS).to(x.dtype))  # (B, M)
        x, context = self.embed(x, context, y)  # (B, N, D), (B, T, D)
        num_image, num_text = x.shape[1], context.shape[1]
        lengths = -(-y.long() // MULTIPLE) * MULTIPLE  # (B, 1)
        rotation = self.rotation(lengths, (h, w), num_image, context)
        of_image, of_text = torch.split(rotation, [num_image, num_text], dim=3)
        text_mask = mask = None
        if full is None:
            text_mask = inside(lengths, num_text)[:, None, None, :]  # (B, 1, 1, T)
            mask = F.pad(text_mask, (num_image, 0), value=True)  # (B, 1, 1, N+T)

        for block in self.noise_refiner:
            x = block(x, vec, of_image, None)
        for block in self.context_refiner:
            context = block(context, None, of_text, text_mask)
        x = torch.cat([x, context], dim=1)  # (B, N+T, D)
        for block in self.layers:
            x = block(x, vec, rotation, mask)
        out = self.final_layer(x[:, : h * w], vec)
        out = out.view(len(x), h, w, 2, 2, -1).permute(0, 5, 1, 3, 2, 4)  # (B, C, h/2, 2, w/2, 2)
        return out.flatten(4, 5).flatten(2, 3)

    def embed(self, x: Tensor, context: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of latents (B,C,h,w) and of texts (B,T,context_dim) of y (B,1) tokens, both padded."""
        patches = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).permute(0, 2, 4, 3, 5, 1)
        image = self.x_embedder(patches.flatten(3).flatten(1, 2))  # channels as (row, column, C)
        padding = self.x_pad_token.expand(len(x), -image.shape[1] % MULTIPLE, -1)
        context = F.pad(context, (0, 0, 0, -context.shape[1] % MULTIPLE))
        is_word = inside(y, context.shape[1])  # (B, T)
        context = torch.where(is_word[:, :, None], self.cap_embedder(context), self.cap_pad_token)
        return torch.cat([image, padding], dim=1), context

    def rotation(self, lengths: Tensor, grid: tuple[int, int], num_image: int, context: Tensor) -> Tensor:
        """Return cosines and sines (2,B,1,N+T,D/H/2) of images of h by w tokens after texts of lengths (B,1)."""
        (h, w), (batch, num_text, _), device = grid, context.shape, context.device
        places = torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device))  # (h*w, 2)
        after = (1 + lengths).expand(-1, h * w)
        image = torch.stack([after, *(side.expand(batch, -1) for side in places.unbind(1))])  # (3, B, h*w)
        image = F.pad(image, (0, num_image - h * w))  # padding is at (0, 0, 0)
        index = torch.arange(1, 1 + num_text, device=device).expand(1, batch, -1)
        text = F.pad(index, (0, 0, 0, 0, 0, 2))  # (3, B, T)
        ids = torch.cat([image, text], dim=2)
        return axial_rotation(ids, self.spec.axes, THETA, context.dtype)[:, :, None]


# ---- diffusers' names -----------------------------------------------------------------------------------------------

ATTENTION = {
    "attention.qkv": "attention.to_q attention.to_k attention.to_v",
    "attention.out": "attention.to_out.0",
    "attention.q_norm": "attention.norm_q",
    "attention.k_norm": "attention.norm_k",
}
NAMES = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    **of_blocks("layers", "layers", ATTENTION),
    **of_blocks("noise_refiner", "noise_refiner", ATTENTION),
    **of_blocks("context_refiner", "context_refiner", ATTENTION),
}

# ---- released -------------------------------------------------------------------------------------------------------

Z_IMAGE = ZImageSpec(
    in_channels=16,
    out_channels=16,
    context_dim=2560,
    width=3840,
    heads=30,
    mlp_width=10240,
    time_width=1024,
    modulation_dim=256,
    depth=30,
    refiner_depth=2,
)
