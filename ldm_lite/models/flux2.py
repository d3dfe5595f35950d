"""FLUX.2's transformer and autoencoder, in the sizes of [klein].

What is unusual about the transformer, beside FLUX.1's:
- all double blocks share their modulations, all single blocks theirs; MLPs are gated; no layer has a bias;
- a token is one position of the latents, which are patches of the autoencoder's;
- positions are (10 * number of the image, row, column, index of the text's token); reference images follow the noised.

The autoencoder is FLUX.1's with 32 channels; patches of 2x2 of its latents are 128 channels, normalised each by its
mean and deviation in training.

Shape letters: B batch, N image tokens, T text tokens, D width, h w latent size.
Source: black-forest-labs/flux2, model.py, autoencoder.py and sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, sinusoids
from ldm_lite.core.vae import AutoencoderKL, VAESpec
from ldm_lite.models.flux import EMBEDDER, NAMES, SINUSOIDS, FluxBlocks, FluxSpec, ModulationRows, embedder_names
from ldm_lite.models.ops import mlp, multiple, of_blocks

APART = 10  # what the numbers of images are multiplied by
EPS = 1e-4  # added to the variance of the latents' channels


@dataclass(frozen=True)
class Flux2Spec(FluxSpec):
    """Sizes of a FLUX.2 transformer."""

    patch: ClassVar[int] = 1
    theta: ClassVar[float] = 2000.0
    is_gated: ClassVar[bool] = True
    reads_pooled: ClassVar[bool] = False

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Self:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        spec = super().from_shapes(shapes)
        multiple(spec.width // spec.heads, 8, "the width of a head")
        return spec

    @property
    def other_names(self) -> dict[str, str]:
        """What diffusers calls its modules."""
        double = {
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        }
        single = {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}
        shared = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
        others = {
            **embedder_names("time_guidance_embed"),
            **of_blocks("double_blocks", "transformer_blocks", double),
            **of_blocks("single_blocks", "single_transformer_blocks", single),
            **{f"{name}.lin": f"{name}.linear" for name in shared},
        }
        return {**NAMES, **others}

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that each of the four positions rotates."""
        return (self.width // self.heads // 4,) * 4


class Shared(nn.Module):
    """The modulations of all blocks of a kind: the time (B,D), after its SiLU -> (B,rows,D)."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.lin = nn.Linear(width, rows * width, bias=False)

    def forward(self, vec: Tensor) -> Tensor:
        return self.lin(vec).unflatten(1, (self.rows, -1))


class Flux2(FluxBlocks):
    """The denoising network of FLUX.2: noised latents at time s -> the velocity eps - x0."""

    time_in: nn.Module

    def __init__(self, spec: Flux2Spec) -> None:
        time = ModulationRows(15, 1)  # itself
        super().__init__(
            spec,
            {"time_in": mlp(SINUSOIDS, spec.width, spec.width, names=EMBEDDER, bias=False)},
            double_rows=[(ModulationRows(0, 6), ModulationRows(6, 6))] * spec.depth,
            single_rows=[ModulationRows(12, 3)] * spec.single_depth,
            shift_and_scale=nn.Sequential(time, nn.Linear(spec.width, 2 * spec.width, bias=False)),
        )
        self.double_stream_modulation_img = Shared(spec.width, 6)
        self.double_stream_modulation_txt = Shared(spec.width, 6)
        self.single_stream_modulation = Shared(spec.width, 3)

    def forward(self, x: Tensor, t: Tensor, context: Tensor, y: None = None, **references: Tensor) -> Tensor:
        """Latents x (B,in_channels,h,w) at s = t (B,) in [0,1] -> velocity (B,out_channels,h,w).

        context (B,T,context_dim) are three of Qwen3's states.  References are latents (B,in_channels,h',w') of images
        of any sizes, in the order of the arguments.  context and they are in the weights' dtype; x and t may have any.
        """
        vec = F.silu(self.time_in(sinusoids(1000 * t.float(), SINUSOIDS).to(context.dtype)))  # (B, D)
        shared = self.double_stream_modulation_img, self.double_stream_modulation_txt, self.single_stream_modulation
        rows = torch.cat([*(modulations(vec) for modulations in shared), vec[:, None]], dim=1)  # (B, 16, D)
        return self.denoise([x.to(context.dtype), *references.values()], context, rows)

    def places(self, num_text: int, images: Sequence[Tensor]) -> Tensor:
        """Return the positions (4,T+N): number of the image, row, column; index of the text's token."""
        number, row, column = super().places(num_text, images)
        index = torch.arange(num_text, device=number.device)
        return torch.stack([APART * number, row, column, F.pad(index, (0, len(number) - num_text))])


# ---- the autoencoder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flux2VAESpec(VAESpec):
    """Sizes of FLUX.2's autoencoder: embed_dim counts the channels of a patch."""

    @staticmethod
    def from_shapes(shapes: Shapes) -> Flux2VAESpec:
        """Return the spec of an autoencoder with weights of these shapes.  Raises ValueError if they make no sense."""
        plain = VAESpec.from_shapes(shapes)
        return Flux2VAESpec(**{**vars(plain), "embed_dim": 4 * plain.embed_dim})

    @property
    def factor(self) -> int:
        """Pixels per position of the latents, which is a patch, along each side."""
        return 2 * super().factor


class Normalised(nn.Module):
    """Latents (B,C,h,w), normalised by channel, and back: a BatchNorm2d that has been trained."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    @property
    def deviation(self) -> Tensor:
        """The deviation of each channel, (C,1,1)."""
        return (self.running_var + EPS).sqrt()[:, None, None]

    def forward(self, z: Tensor) -> Tensor:
        return (z - self.running_mean[:, None, None]) / self.deviation

    def back(self, z: Tensor) -> Tensor:
        """Return the latents themselves."""
        return z * self.deviation + self.running_mean[:, None, None]


class Flux2VAE(AutoencoderKL):
    """Pixels <-> normalised patches of latents, for h w = H/16, W/16."""

    def __init__(self, spec: Flux2VAESpec) -> None:
        super().__init__(replace(spec, embed_dim=spec.embed_dim // 4))
        self.spec = spec
        self.bn = Normalised(spec.embed_dim)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> mean and standard deviation of the latents, (B,embed_dim,h,w)."""
        mean, deviation = (F.pixel_unshuffle(part, 2) for part in super().encode(x))
        return self.bn(mean), deviation / self.bn.deviation

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w) -> pixels (B,3,H,W) in [-1,1], unclamped."""
        return super().decode(F.pixel_shuffle(self.bn.back(z), 2))


# ---- released -------------------------------------------------------------------------------------------------------

KLEIN = Flux2Spec(
    in_channels=128,
    out_channels=128,
    context_dim=7680,
    vector_dim=0,
    width=3072,
    heads=24,
    mlp_width=9216,
    depth=5,
    single_depth=20,
    guidance=False,
)
KL_F16_128 = Flux2VAESpec(channels=128, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=32, embed_dim=128)
