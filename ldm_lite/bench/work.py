"""The work that is measured: sections at a batch size, with the same inputs for every framework.

Sections: step is a guided denoising step (UNet on the doubled batch, guidance, update), decode the autoencoder's
decoder, image everything from prompts to uint8 pixels, n_iter times.

A workload is a framework with its networks in one precision.  It makes `inputs(batch)` on its networks' device, which
its methods take: `prediction` returns the guided prediction (B,C,h,w) of a step at t = 999 and scale CHECK_SCALE, by
which steps are compared; `steps` runs guided steps of DDIM; `decode` returns pixels (B,3,H,W) in [-1,1] of the
noise, on the CPU; `image` returns the pixels of the last of n_iter batches, made from prompts to uint8 pixels.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ldm_lite.bench.measure import flops
from ldm_lite.bench.options import BenchOptions
from ldm_lite.core.clip import CLIPSpec
from ldm_lite.core.tasks import noise_of
from ldm_lite.core.tokenizer import CLIPTokenizer
from ldm_lite.diffusion.names import named_plan
from ldm_lite.zoo.family import FamilyRow, build_network

CHECK_SCALE = 0.5  # guidance scale for comparisons: the mean of both predictions, which amplifies no error


@dataclass(frozen=True)
class Cell:
    """One table of the report: a section at a precision and a batch size."""

    section: str
    dtype: str
    batch: int


class Unavailable(Exception):
    """A backend cannot run a cell; the message says why, in one line."""


class OutOfTime(Unavailable):
    """The minutes of the benchmark are over: running calls were stopped."""


class BenchInputs(NamedTuple):
    """The inputs of a batch B, the same in every process and framework."""

    noise: Tensor  # (B,C,h,w)
    context: Tensor  # (B,T,D)
    uncond: Tensor  # (B,T,D)
    ids: Tensor  # (B,T) tokens of the prompt
    empty: Tensor  # (B,T) tokens of the empty prompt

    def to(self, device: torch.device, dtype: torch.dtype) -> "BenchInputs":
        """Return them on a device, all but the tokens in a dtype."""
        return BenchInputs(*(value.to(device, dtype if value.is_floating_point() else None) for value in self))


def inputs(family: FamilyRow, options: BenchOptions, batch: int) -> BenchInputs:
    """Make the inputs of a batch, float32 on the CPU, from the options' seed, height and width.

    Raises ValueError unless the model is like Stable Diffusion 1.x and the sides are multiples of its 8 pixels.
    """
    distilled = family.unet.guidance_dim is not None
    if family.conditioner != "clip" or distilled or not isinstance(family.text, CLIPSpec):
        raise ValueError(f"{family.title} cannot be benchmarked yet: use a Stable Diffusion 1.x model")
    height, width = (family.resolution if side is None else side for side in (options.height, options.width))
    if height % (factor := family.vae.factor) or width % factor:
        raise ValueError(f"got `height={height}` and `width={width}`, expected multiples of {factor}")
    assert family.unet.context_dim is not None
    generator = torch.Generator().manual_seed(options.seed)
    context, uncond = torch.randn(2, batch, family.text.length, family.unet.context_dim, generator=generator)
    shape = (family.unet.in_channels, height // factor, width // factor)
    noise = noise_of([options.seed + k for k in range(batch)], shape)()
    tokenizer = CLIPTokenizer(family.text.length)
    return BenchInputs(noise, context, uncond, tokenizer([options.prompt] * batch), tokenizer([""] * batch))


class Cost(NamedTuple):
    """The amount of work in one call of a cell."""

    flops: int
    items: int  # steps of the whole batch, or images


def cost(family: FamilyRow, options: BenchOptions, cell: Cell) -> Cost:
    """Count the work in one call of a cell.  Raises ValueError for a model, size or sampler that cannot be measured."""
    per_image = _flops_at_batch_1(family, options)[cell.section]
    items = {"step": 1, "decode": cell.batch, "image": cell.batch * options.n_iter}[cell.section]
    return Cost(cell.batch * per_image, items)


@functools.cache
def _flops_at_batch_1(family: FamilyRow, options: BenchOptions) -> dict[str, int]:
    tensors = inputs(family, options, 1).to(torch.device("meta"), torch.float32)
    num_calls = len(named_plan(options.sampler, family.noise.schedule(family.prediction), options.steps).t)
    with torch.device("meta"):
        networks: dict[str, Any] = {role: build_network(spec) for role, spec in family.specs.items()}
    step = 2 * flops(lambda: networks["unet"](tensors.noise, torch.empty(1, device="meta"), tensors.context))
    decode = flops(lambda: networks["vae"].decode(tensors.noise))
    text = flops(lambda: networks["text_encoder"](tensors.ids))
    return {"step": step, "decode": decode, "image": options.n_iter * (num_calls * step + decode + 2 * text)}
