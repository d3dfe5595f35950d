"""The FLUX.1 transformer: dev, schnell, fill, depth and canny, from a frozen spec; other networks use its parts too.

What is unusual about it:
- attribute names are the keys of Black Forest Labs' files, so these load strictly with no renaming;
- text and image are one sequence, the text first; double blocks have weights for each of them, single blocks share;
- each token has a position (0, row, column), which rotates queries and keys; text tokens are all at (0, 0, 0);
- fill, depth and canny read their condition as further channels of x.

Shape letters: B batch, C channels, h w latent size, N = h/2 * w/2 image tokens, T text tokens, D width, H heads.
Source: Esser et al. 2024, sec. 4 (double blocks); Su et al. 2021, eq. 15 (rotation); black-forest-labs/flux model.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Shapes, checked_shape, count_blocks, sdpa, sinusoids, split_heads
from ldm_lite.models.ops import (
    ADDED_QKV,
    QKV,
    LastLayer,
    RMSNorm,
    TransformerBlock,
    TransformerSpec,
    attend,
    axial_rotation,
    finite_half,
    gelu_tanh,
    mlp,
    modulate,
    multiple,
    of_blocks,
    rotate,
)

SINUSOIDS = 256


@dataclass(frozen=True)
class FluxSpec(TransformerSpec):
    """Sizes in which FLUX.1 transformers differ."""

    in_channels: int  # latents and condition: 16, with an image (depth, canny) 32, with an image and a mask (fill) 96
    out_channels: int
    context_dim: int
    vector_dim: int
    width: int
    heads: int
    mlp_width: int
    depth: int  # double blocks
    single_depth: int
    guidance: bool  # reads the guidance scale: all but schnell

    theta: ClassVar[float] = 10000.0  # the slowest rotation turns by 1/theta a position
    is_gated: ClassVar[bool] = False  # MLPs are gated by a SiLU, and no layer has a bias
    reads_pooled: ClassVar[bool] = True  # the pooled text

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Self:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, in_channels = checked_shape(shapes, "img_in.weight", 2)
        out_channels = checked_shape(shapes, "final_layer.linear.weight", 2)[0]
        head_dim, area = checked_shape(shapes, "double_blocks.0.img_attn.norm.key_norm.scale", 1)[0], cls.patch**2
        return cls(
            in_channels=multiple(in_channels, area, "the width of an image token"),
            out_channels=multiple(out_channels, area, "the width of an output token"),
            context_dim=checked_shape(shapes, "txt_in.weight", 2)[1],
            vector_dim=checked_shape(shapes, "vector_in.in_layer.weight", 2)[1] if cls.reads_pooled else 0,
            width=width,
            heads=multiple(width, head_dim, "the width"),
            mlp_width=checked_shape(shapes, "double_blocks.0.img_mlp.2.weight", 2)[1],
            depth=count_blocks(shapes, r"double_blocks\.(\d+)\."),
            single_depth=count_blocks(shapes, r"single_blocks\.(\d+)\."),
            guidance="guidance_in.in_layer.weight" in shapes,
        )

    @property
    def other_names(self) -> dict[str, str]:
        """What diffusers calls its modules."""
        return NAMES

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that index, row and column rotate: 16, 56 and 56 of 128."""
        head_dim = self.width // self.heads
        side = head_dim * 7 // 32 * 2
        return head_dim - 2 * side, side, side


class QKNorm(nn.Module):
    """Norms of the queries and the keys, per head."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = RMSNorm(head_dim, name="scale")
        self.key_norm = RMSNorm(head_dim, name="scale")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class FluxSelfAttention(nn.Module):
    """One stream's layers around the joint attention."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.norm = QKNorm(width // heads)
        self.proj = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B,N,D) -> queries, keys, values (B,H,N,D/H); the block itself calls proj, after the attention."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=2))  # (B, H, N, D/H)
        return *self.norm(q, k), v


class Modulation(nn.Module):
    """The conditioning (B,D), after its SiLU -> shift, scale and gate (B,1,D) of each of a block's branches."""

    def __init__(self, width: int, branches: int, lin: nn.Module | None = None) -> None:
        super().__init__()
        self.branches = branches
        self.lin = nn.Linear(width, 3 * branches * width) if lin is None else lin

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(vec)[:, None, :].chunk(3 * self.branches, dim=2)


class ModulationRows(nn.Module):
    """Replaces a linear of modulations: takes some rows of all modulations, vec (B,M,D) -> (B, number * D)."""

    def __init__(self, first: int, number: int) -> None:
        super().__init__()
        self.rows = slice(first, first + number)

    def forward(self, vec: Tensor) -> Tensor:
        return vec[:, self.rows].flatten(1)


class SiluGate(nn.Module):
    """(..., 2M) -> (..., M): the first half, after a SiLU, times the second.  Shazeer 2020."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


def token_mlp(spec: FluxSpec) -> nn.Sequential:
    """Return the MLP of the tokens of a double block."""
    if not spec.is_gated:
        return mlp(spec.width, spec.mlp_width, spec.width, gelu_tanh)
    first, last = nn.Linear(spec.width, 2 * spec.mlp_width, False), nn.Linear(spec.mlp_width, spec.width, False)
    return nn.Sequential(first, SiluGate(), last)


EMBEDDER = ("in_layer", "activation", "out_layer")  # names of the layers of an MLP


class DoubleStreamBlock(TransformerBlock):
    """Text and image, each with its own weights, attend to both; then each has its MLP."""

    is_atomic = True

    def __init__(
        self, spec: FluxSpec, img_rows: ModulationRows | None = None, txt_rows: ModulationRows | None = None
    ) -> None:
        super().__init__()
        self.head_dim = spec.width // spec.heads
        self.attention: AttentionFn = sdpa
        self.img_mod = Modulation(spec.width, 2, img_rows)
        self.img_attn = FluxSelfAttention(spec.width, spec.heads, not spec.is_gated)
        self.img_mlp = token_mlp(spec)
        self.txt_mod = Modulation(spec.width, 2, txt_rows)
        self.txt_attn = FluxSelfAttention(spec.width, spec.heads, not spec.is_gated)
        self.txt_mlp = token_mlp(spec)

    def forward(
        self, context: Tensor, x: Tensor, vec: Tensor, rotation: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Text (B,T,D), image (B,N,D), conditioning vec (B,D), rotation (2,T+N,D/H/2) -> text and image.

        mask is as in attend, over text and image.
        """
        text_mods, image_mods = self.txt_mod(vec), self.img_mod(vec)  # of attention, then of the MLP

        # attention over text and image
        text = self.txt_attn(modulate(context, *text_mods[:2]))
        image = self.img_attn(modulate(x, *image_mods[:2]))
        q, k, v = (torch.cat(both, dim=2) for both in zip(text, image, strict=True))  # (B, H, T+N, D/H)
        out = attend(self.attention, rotate(q, rotation), rotate(k, rotation), v, mask)  # (B, T+N, D)
        from_text, from_image = torch.split(out, [context.shape[1], x.shape[1]], dim=1)

        # projections and MLPs
        context = context + text_mods[2] * self.txt_attn.proj(from_text)
        context = context + text_mods[5] * self.txt_mlp(modulate(context, *text_mods[3:5]))
        x = x + image_mods[2] * self.img_attn.proj(from_image)
        x = x + image_mods[5] * self.img_mlp(modulate(x, *image_mods[3:5]))
        return finite_half(context), finite_half(x)


class SingleStreamBlock(TransformerBlock):
    """Attention and MLP side by side over text and image, with one linear before both and one after."""

    def __init__(self, spec: FluxSpec, rows: ModulationRows | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.head_dim = spec.width // spec.heads
        self.attention: AttentionFn = sdpa
        hidden, bias = spec.mlp_width * (2 if spec.is_gated else 1), not spec.is_gated
        self.linear1 = nn.Linear(spec.width, 3 * spec.width + hidden, bias)
        self.linear2 = nn.Linear(spec.width + spec.mlp_width, spec.width, bias)
        self.activation = SiluGate() if spec.is_gated else gelu_tanh()
        self.norm = QKNorm(self.head_dim)
        self.modulation = Modulation(spec.width, 1, rows)

    def forward(self, x: Tensor, vec: Tensor, rotation: Tensor, mask: Tensor | None = None) -> Tensor:
        """Text and image x (B,T+N,D), vec (B,D), rotation (2,T+N,D/H/2), mask as in attend -> (B,T+N,D)."""
        shift, scale, gate = self.modulation(vec)
        ends = [self.spec.width * i for i in (1, 2, 3)]
        q, k, v, hidden = torch.tensor_split(self.linear1(modulate(x, shift, scale)), ends, dim=2)
        q, k, v = (split_heads(part, self.spec.heads) for part in (q, k, v))  # (B, H, T+N, D/H)
        q, k = self.norm(q, k)
        out = attend(self.attention, rotate(q, rotation), rotate(k, rotation), v, mask)
        out = self.linear2(torch.cat([out, self.activation(hidden)], dim=2))
        return finite_half(x + gate * out)


class FluxBlocks(nn.Module):
    """FLUX.1 without its embedders of time, scale and pooled text: images and text, conditioning -> velocity."""

    def __init__(
        self,
        spec: FluxSpec,
        embedders: Mapping[str, nn.Module],
        double_rows: Sequence[tuple[ModulationRows, ModulationRows]] | None = None,
        single_rows: Sequence[ModulationRows] | None = None,
        shift_and_scale: nn.Module | None = None,
    ) -> None:
        """The rows take the places of the modulations' linears, by block: of image and text, and of both."""
        super().__init__()
        self.spec = spec
        bias, area = not spec.is_gated, spec.patch**2
        self.img_in = nn.Linear(area * spec.in_channels, spec.width, bias)
        for name, embedder in embedders.items():
            self.add_module(name, embedder)
        self.txt_in = nn.Linear(spec.context_dim, spec.width, bias)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(spec, *(double_rows[i] if double_rows else ())) for i in range(spec.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(spec, single_rows[i] if single_rows else None) for i in range(spec.single_depth)
        )
        self.final_layer = LastLayer(spec.width, area * spec.out_channels, bias, shift_and_scale)

    def denoise(self, images: Sequence[Tensor], context: Tensor, vec: Tensor, mask: Tensor | None = None) -> Tensor:
        """The noised latents and those of references, (B,in_channels,h,w) each, text, conditioning -> the velocity."""
        patch, num_text = self.spec.patch, context.shape[1]
        images = [F.pixel_unshuffle(image, patch) for image in images]
        h, w = images[0].shape[2:]
        rotation = axial_rotation(self.places(num_text, images), self.spec.axes, self.spec.theta, context.dtype)
        x = self.img_in(torch.cat([image.flatten(2) for image in images], dim=2).transpose(1, 2))  # (B, N, D)
        context = self.txt_in(context)  # (B, T, D)
        for block in self.double_blocks:
            context, x = block(context, x, vec, rotation, mask)
        x = torch.cat([context, x], dim=1)  # (B, T+N, D)
        for block in self.single_blocks:
            x = block(x, vec, rotation, mask)
        out = self.final_layer(x[:, num_text:][:, : h * w], vec)
        return F.pixel_shuffle(out.transpose(1, 2).unflatten(2, (h, w)), patch)

    def places(self, num_text: int, images: Sequence[Tensor]) -> Tensor:
        """Return the positions (3,T+N) of text tokens, all at 0, and of images' tokens: number, row, column."""
        places = []
        for number, image in enumerate(images):
            rows, columns = (torch.arange(side, device=image.device) for side in image.shape[2:])
            places.append(torch.cartesian_prod(torch.full_like(rows[:1], number), rows, columns))
        return F.pad(torch.cat(places).T, (num_text, 0))


class Flux(FluxBlocks):
    """The denoising network of FLUX.1: noised latents at time s -> the velocity eps - x0."""

    time_in: nn.Module
    vector_in: nn.Module
    guidance_in: nn.Module

    def __init__(self, spec: FluxSpec) -> None:
        embedders = {"time_in": SINUSOIDS, "vector_in": spec.vector_dim}
        embedders |= {"guidance_in": SINUSOIDS} if spec.guidance else {}
        super().__init__(
            spec,
            {name: mlp(width, spec.width, spec.width, names=EMBEDDER) for name, width in embedders.items()},
        )

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        concat: Tensor | None = None,
        *,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Latents x (B,in_channels,h,w) with even h and w, at s = t (B,) in [0,1] -> velocity (B,out_channels,h,w).

        concat has the further channels, the condition: an image's latents (depth, canny), or the masked image's latents
        and the mask's 8x8 pixels of each position as 64 channels (fill).
        context (B,T,context_dim) is T5's output, y (B,vector_dim) CLIP's pooled output, guidance (B,) the guidance
        scale, which is not read by schnell.  Beyond in_channels concat has the latents of a reference image, whose
        tokens follow those of x (Kontext).  context, y and concat are in the weights' dtype; x, t and guidance may have
        any.
        """
        assert y is not None, "FLUX reads the pooled text"
        x = x.to(context.dtype) if concat is None else torch.cat([x.to(context.dtype), concat], dim=1)
        images = torch.split(x, self.spec.in_channels, dim=1)
        return self.denoise(images, context, F.silu(self.embed(t, y, guidance)))

    def embed(self, t: Tensor, y: Tensor, guidance: Tensor | None) -> Tensor:
        """Embed the time (B,), the pooled text (B,vector_dim) and the guidance scale (B,): (B,D)."""
        vec = self.time_in(sinusoids(1000 * t.float(), SINUSOIDS).to(y.dtype))
        if self.spec.guidance:
            assert guidance is not None, "this network reads the guidance scale"
            vec = vec + self.guidance_in(sinusoids(1000 * guidance.float(), SINUSOIDS).to(y.dtype))
        return vec + self.vector_in(y)


# ---- diffusers' names -----------------------------------------------------------------------------------------------

EMBEDDERS = {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"}
DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.qkv": QKV,
    "txt_attn.qkv": ADDED_QKV,
    "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
    "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
    "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
SINGLE = {
    "modulation.lin": "norm.linear",
    "linear1": f"{QKV} proj_mlp",
    "linear2": "proj_out",
    "norm.query_norm.scale": "attn.norm_q.weight",
    "norm.key_norm.scale": "attn.norm_k.weight",
}


def embedder_names(within: str) -> dict[str, str]:
    """Return the names of the layers of embedders, which diffusers has inside of another module."""
    layers = {"in_layer": "linear_1", "out_layer": "linear_2"}
    return {
        f"{name}.{ours}": f"{within}.{embedder}.{theirs}"
        for name, embedder in EMBEDDERS.items()
        for ours, theirs in layers.items()
    }


NAMES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **embedder_names("time_text_embed"),
    **of_blocks("double_blocks", "transformer_blocks", DOUBLE),
    **of_blocks("single_blocks", "single_transformer_blocks", SINGLE),
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "~norm_out.linear",
}

# ---- released -------------------------------------------------------------------------------------------------------

FLUX_DEV = FluxSpec(
    in_channels=16,
    out_channels=16,
    context_dim=4096,
    vector_dim=768,
    width=3072,
    heads=24,
    mlp_width=12288,
    depth=19,
    single_depth=38,
    guidance=True,
)
