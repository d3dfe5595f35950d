"""The multimodal diffusion transformer of Stable Diffusion 3 medium, 3.5 medium and 3.5 large, from a frozen spec.

What is unusual about it:
- attribute names are the keys of Stability AI's files, so these load strictly with no renaming;
- text and image have weights of their own in every block and attend to both, the text first; nothing reads the text
  after the last attention, so the last block's text half has no projection and no MLP;
- positions are a table, of which an image takes the middle;
- 3.5 medium has a second attention in its first blocks, of the image alone.

Shape letters: B batch, C channels, h w latent size, N = h/2 * w/2 image tokens, T text tokens, D width, H heads.
Source: Esser et al. 2024, sec. 4; Peebles and Xie 2023 (adaLN); Stability-AI/sd3.5 mmditx.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import (
    AttentionFn,
    Shapes,
    checked_shape,
    count_blocks,
    merge_heads,
    sdpa,
    sinusoids,
    split_heads,
)
from ldm_lite.models.ops import (
    ADDED_QKV,
    QKV,
    LastLayer,
    RMSNorm,
    TransformerBlock,
    TransformerSpec,
    embedder,
    finite_half,
    gelu_tanh,
    mlp,
    modulate,
    modulation,
    multiple,
    of_blocks,
)

HEAD_DIM = 64
SINUSOIDS = 256
Heads = tuple[Tensor, Tensor, Tensor]  # (B,H,N,D/H) each


@dataclass(frozen=True)
class MMDiTSpec(TransformerSpec):
    """Sizes and options in which the transformers of Stable Diffusion 3 differ."""

    in_channels: int
    out_channels: int
    context_dim: int
    vector_dim: int
    width: int
    mlp_width: int
    depth: int
    side: int  # of the table of positions, in tokens
    qk_norm: bool  # not in Stable Diffusion 3 medium
    dual_depth: int  # first blocks with a second attention: 13 in 3.5 medium

    @staticmethod
    def from_shapes(shapes: Shapes) -> MMDiTSpec:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        width, in_channels = checked_shape(shapes, "x_embedder.proj.weight", 4)[:2]
        multiple(width, HEAD_DIM, "the width")
        return MMDiTSpec(
            in_channels=in_channels,
            out_channels=multiple(
                checked_shape(shapes, "final_layer.linear.weight", 2)[0], 4, "the width of an output token"
            ),
            context_dim=checked_shape(shapes, "context_embedder.weight", 2)[1],
            vector_dim=checked_shape(shapes, "y_embedder.mlp.0.weight", 2)[1],
            width=width,
            mlp_width=checked_shape(shapes, "joint_blocks.0.x_block.mlp.fc1.weight", 2)[0],
            depth=count_blocks(shapes, r"joint_blocks\.(\d+)\."),
            side=math.isqrt(checked_shape(shapes, "pos_embed", 3)[1]),
            qk_norm="joint_blocks.0.x_block.attn.ln_q.weight" in shapes,
            dual_depth=count_blocks(shapes, r"joint_blocks\.(\d+)\.x_block\.attn2\."),
        )

    @property
    def other_names(self) -> dict[str, str]:
        """What diffusers calls its modules."""
        return NAMES

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // HEAD_DIM


class MMDiTSelfAttention(nn.Module):
    """The layers around an attention, which the block computes: `qkv` before it, `proj` after it."""

    def __init__(self, spec: MMDiTSpec, has_proj: bool = True) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        if has_proj:
            self.proj = nn.Linear(spec.width, spec.width)
        self.ln_q, self.ln_k = (RMSNorm(HEAD_DIM) if spec.qk_norm else nn.Identity() for _ in range(2))

    def queries_keys_values(self, x: Tensor) -> Heads:
        """(B,N,D) -> queries and keys, normalised if the network does that, and values."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=2))  # (B, H, N, D/H)
        return self.ln_q(q), self.ln_k(k), v


class ImageAttention(MMDiTSelfAttention):
    """The second attention of 3.5 medium, of the image's tokens alone (B,N,D) -> (B,N,D)."""

    def __init__(self, spec: MMDiTSpec) -> None:
        super().__init__(spec)
        self.head_dim = HEAD_DIM
        self.attention: AttentionFn = sdpa

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(merge_heads(self.attention(*self.queries_keys_values(x))))


class DismantledBlock(nn.Module):
    """One stream's half of a block, in two parts around the joint attention."""

    def __init__(self, spec: MMDiTSpec, is_last: bool = False, dual: bool = False) -> None:
        super().__init__()
        self.is_last, self.dual = is_last, dual
        self.chunks = 2 if is_last else 9 if dual else 6
        self.attn = MMDiTSelfAttention(spec, has_proj=not is_last)
        if dual:
            self.attn2 = ImageAttention(spec)
        if not is_last:
            names = ("fc1", "activation", "fc2")
            self.mlp = mlp(spec.width, spec.mlp_width, spec.width, gelu_tanh, names)
        self.adaLN_modulation = modulation(spec.width, self.chunks)

    def modulations(self, vec: Tensor) -> tuple[Tensor, ...]:
        """The conditioning (B,D) -> shift, scale, gate of the attention, the MLP and attn2, (B,1,D) each, where any."""
        return self.adaLN_modulation(vec)[:, None, :].chunk(self.chunks, dim=2)

    def before(self, x: Tensor, mods: tuple[Tensor, ...]) -> Heads:
        """(B,N,D) -> queries, keys and values for the joint attention."""
        return self.attn.queries_keys_values(modulate(x, *mods[:2]))

    def after(self, x: Tensor, out: Tensor, mods: tuple[Tensor, ...]) -> Tensor:
        """x and its part `out` of the joint attention (B,N,D) -> the block's output (B,N,D)."""
        result = x + mods[2] * self.attn.proj(out)
        if self.dual:
            result = result + mods[8] * self.attn2(modulate(x, *mods[6:8]))
        return finite_half(result + mods[5] * self.mlp(modulate(result, *mods[3:5])))


class JointBlock(TransformerBlock):
    """Text and image, each with its own weights, attend to both; then each has its MLP."""

    is_atomic = True

    def __init__(self, spec: MMDiTSpec, index: int) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.attention: AttentionFn = sdpa
        self.is_last = index == spec.depth - 1
        self.context_block = DismantledBlock(spec, is_last=self.is_last)
        self.x_block = DismantledBlock(spec, dual=index < spec.dual_depth)

    def forward(self, context: Tensor, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
        """Text (B,T,D), image (B,N,D), conditioning vec (B,D) -> text, unchanged by the last block, and image."""
        text_mods, image_mods = self.context_block.modulations(vec), self.x_block.modulations(vec)
        text, image = self.context_block.before(context, text_mods), self.x_block.before(x, image_mods)
        q, k, v = (torch.cat(both, dim=2) for both in zip(text, image, strict=True))  # (B, H, T+N, D/H)
        out = merge_heads(self.attention(q, k, v))  # (B, T+N, D)
        from_text, from_image = torch.split(out, [context.shape[1], x.shape[1]], dim=1)
        if not self.is_last:
            context = self.context_block.after(context, from_text, text_mods)
        return context, self.x_block.after(x, from_image, image_mods)


class MMDiT(nn.Module):
    """The denoising network of Stable Diffusion 3: noised latents at time 1000 s -> the velocity eps - x0."""

    pos_embed: Tensor

    def __init__(self, spec: MMDiTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.x_embedder = nn.Sequential(OrderedDict(proj=nn.Conv2d(spec.in_channels, spec.width, 2, stride=2)))
        self.t_embedder = embedder(SINUSOIDS, spec.width, spec.width)
        self.y_embedder = embedder(spec.vector_dim, spec.width, spec.width)
        self.context_embedder = nn.Linear(spec.context_dim, spec.width)
        self.register_buffer("pos_embed", torch.zeros(1, spec.side**2, spec.width))
        self.joint_blocks = nn.ModuleList(JointBlock(spec, i) for i in range(spec.depth))
        self.final_layer = LastLayer(spec.width, 4 * spec.out_channels)

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, y: Tensor | None = None, *, skip: Tensor | None = None
    ) -> Tensor:
        """Latents x (B,in_channels,h,w) with even h and w, at 1000 s = t (B,) in [0,1000] -> velocity, the same shape.

        context (B,T,context_dim) is the text, y (B,vector_dim) the pooled text.  skip (B,depth) bool says which blocks
        are left out, for skip-layer guidance.  context and y are in the weights' dtype; x and t may have any.  Raises
        ValueError if a side of the image has more tokens than the table of positions.
        """
        assert y is not None, "Stable Diffusion 3 reads the pooled text"
        x = x.to(y.dtype)
        h, w = x.shape[2] // 2, x.shape[3] // 2
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.positions(h, w)  # (B, N, D)
        vec = F.silu(self.t_embedder(sinusoids(t, SINUSOIDS).to(y.dtype)) + self.y_embedder(y))  # (B, D)
        context = self.context_embedder(context)  # (B, T, D)
        for i, block in enumerate(self.joint_blocks):
            before, (context, x) = (context, x), block(context, x, vec)
            if skip is not None:
                pairs = zip(before, (context, x), strict=True)
                context, x = (torch.where(skip[:, i, None, None], *pair) for pair in pairs)
        # Inside of a token the channels are last.
        patches = self.final_layer(x, vec).view(*x.shape[:2], 4, -1).transpose(2, 3)  # (B, N, C, 4)
        return F.pixel_shuffle(patches.flatten(2).transpose(1, 2).unflatten(2, (h, w)), 2)

    def positions(self, h: int, w: int) -> Tensor:
        """Return the middle of the table of positions (1,h*w,D).  Raises ValueError if it is smaller."""
        side = self.spec.side
        if h > side or w > side:
            raise ValueError(f"got latents of {2 * h} by {2 * w}, expected at most {2 * side} by {2 * side}")
        top, left = (side - h) // 2, (side - w) // 2
        return self.pos_embed.view(1, side, side, -1)[:, top : top + h, left : left + w].flatten(1, 2)


# ---- diffusers' names -----------------------------------------------------------------------------------------------

JOINT = {
    "x_block.adaLN_modulation.1": "norm1.linear",
    "context_block.adaLN_modulation.1": "~norm1_context.linear",
    "x_block.attn.qkv": QKV,
    "context_block.attn.qkv": ADDED_QKV,
    "x_block.attn.ln_q": "attn.norm_q",
    "x_block.attn.ln_k": "attn.norm_k",
    "context_block.attn.ln_q": "attn.norm_added_q",
    "context_block.attn.ln_k": "attn.norm_added_k",
    "x_block.attn.proj": "attn.to_out.0",
    "context_block.attn.proj": "attn.to_add_out",
    "x_block.attn2.qkv": QKV.replace("attn", "attn2"),
    "x_block.attn2.ln_q": "attn2.norm_q",
    "x_block.attn2.ln_k": "attn2.norm_k",
    "x_block.attn2.proj": "attn2.to_out.0",
    "x_block.mlp.fc1": "ff.net.0.proj",
    "x_block.mlp.fc2": "ff.net.2",
    "context_block.mlp.fc1": "ff_context.net.0.proj",
    "context_block.mlp.fc2": "ff_context.net.2",
}
NAMES = {
    "pos_embed": "pos_embed.pos_embed",
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    **of_blocks("joint_blocks", "transformer_blocks", JOINT),
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "~norm_out.linear",
}

# ---- released -------------------------------------------------------------------------------------------------------

SD3_MEDIUM = MMDiTSpec(
    in_channels=16,
    out_channels=16,
    context_dim=4096,
    vector_dim=2048,
    width=1536,
    mlp_width=6144,
    depth=24,
    side=192,
    qk_norm=False,
    dual_depth=0,
)
SD35_MEDIUM = replace(SD3_MEDIUM, side=384, qk_norm=True, dual_depth=13)
SD35_LARGE = replace(SD3_MEDIUM, width=2432, mlp_width=9728, depth=38, qk_norm=True)
