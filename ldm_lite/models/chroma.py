"""The transformer of Chroma1: FLUX.1's without the guidance scale, CLIP, and the modulations of its blocks.

What is unusual about it:
- one small network, the approximator, makes the shifts, scales and gates of all blocks, from the time and the number of
  each of them: those of the single blocks, of the double blocks' images, of their texts, and of the last layer;
- texts are padded, and nothing attends to the padding except its first token.

Shape letters: B batch, N image tokens, T text tokens, D width, M modulations of D numbers, A the approximator's width.
Source: lodestone-rock/flow, src/models/chroma.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape, count_blocks, sinusoids
from ldm_lite.models.flux import EMBEDDER, FLUX_DEV, NAMES, FluxBlocks, FluxSpec, ModulationRows
from ldm_lite.models.ops import RMSNorm, inside, mlp


@dataclass(frozen=True)
class ChromaSpec(FluxSpec):
    """Sizes of a Chroma transformer; all released ones are equal.  Its y is the text's number of tokens, 1 wide."""

    sinusoids: int  # what the approximator reads: a quarter of it for the time, a quarter for 0, half for the number
    approximator_width: int
    approximator_depth: int

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Self:
        """Return the spec of a network whose weights have these shapes.  Raises ValueError if they make no sense."""
        flux = FluxSpec.from_shapes({**shapes, "vector_in.in_layer.weight": (1, 1)})
        width, channels = checked_shape(shapes, "distilled_guidance_layer.in_proj.weight", 2)
        depth = count_blocks(shapes, r"distilled_guidance_layer\.layers\.(\d+)\.")
        return cls(**vars(flux), sinusoids=channels, approximator_width=width, approximator_depth=depth)

    @property
    def other_names(self) -> dict[str, str]:
        """What diffusers calls its modules."""
        approximator = {
            "distilled_guidance_layer.layers.*.in_layer": "distilled_guidance_layer.layers.*.linear_1",
            "distilled_guidance_layer.layers.*.out_layer": "distilled_guidance_layer.layers.*.linear_2",
            "distilled_guidance_layer.norms.*.scale": "distilled_guidance_layer.norms.*.weight",
        }
        return {**NAMES, **approximator}


class Approximator(nn.Module):
    """Sinusoids (B,M,sinusoids) -> modulations (B,M,D)."""

    def __init__(self, spec: ChromaSpec) -> None:
        super().__init__()
        width, depth = spec.approximator_width, spec.approximator_depth
        self.in_proj = nn.Linear(spec.sinusoids, width)
        self.layers = nn.ModuleList(mlp(width, width, width, names=EMBEDDER) for _ in range(depth))
        self.norms = nn.ModuleList(RMSNorm(width, name="scale") for _ in range(depth))
        self.out_proj = nn.Linear(width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.out_proj(x)


class Chroma(FluxBlocks):
    """The denoising network of Chroma1: noised latents at time s -> the velocity eps - x0."""

    spec: ChromaSpec

    def __init__(self, spec: ChromaSpec) -> None:
        singles, doubles = 3 * spec.single_depth, 6 * spec.depth
        image = [ModulationRows(singles + 6 * i, 6) for i in range(spec.depth)]
        text = [ModulationRows(singles + doubles + 6 * i, 6) for i in range(spec.depth)]
        super().__init__(
            spec,
            embedders={},
            double_rows=list(zip(image, text, strict=True)),
            single_rows=[ModulationRows(3 * i, 3) for i in range(spec.single_depth)],
            shift_and_scale=ModulationRows(singles + 2 * doubles, 2),
        )
        self.distilled_guidance_layer = Approximator(spec)
        self.num_modulations = singles + 2 * doubles + 2

    def forward(self, x: Tensor, t: Tensor, context: Tensor, y: Tensor, *, full: Tensor | None = None) -> Tensor:
        """Latents x (B,in_channels,h,w) with even h and w, at s = t (B,) in [0,1] -> velocity (B,out_channels,h,w).

        context (B,T,context_dim) is T5's output, of which the first y (B,1) tokens are attended to.  Pass `full` (B,),
        of any value, if all texts have T tokens: nothing is masked, so any attention kernel can be used.
        """
        width = self.spec.sinusoids
        times = sinusoids(1000 * t.float(), width // 4)[:, None].expand(-1, self.num_modulations, -1)
        numbers = sinusoids(1000.0 * torch.arange(self.num_modulations, device=x.device), width // 2)
        guidance = sinusoids(torch.zeros_like(t, dtype=torch.float32), width // 4)[:, None].expand_as(times)
        inputs = torch.cat([times, guidance, numbers.expand(len(t), -1, -1)], dim=2)
        mask = None
        if full is None:  # the image comes after the text
            num_image = x.shape[2] // 2 * (x.shape[3] // 2)
            mask = F.pad(inside(y, context.shape[1]), (0, num_image), value=True)[:, None, None, :]
        return self.denoise(
            [x.to(context.dtype)], context, self.distilled_guidance_layer(inputs.to(context.dtype)), mask
        )


# ---- released -------------------------------------------------------------------------------------------------------

CHROMA = ChromaSpec(
    **{**vars(FLUX_DEV), "vector_dim": 1, "guidance": False},
    sinusoids=64,
    approximator_width=5120,
    approximator_depth=5,
)
