"""Prompts -> noise -> latents -> images.  The only denoising loop of the project, as a generator.

Noise depends on the seed alone: every image has its own CPU generator, which draws its first noise and all later
noise, whatever the batch size or the device.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ldm_lite.checkpoint import broken_weights
from ldm_lite.diffusion.guidance import Guidance
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.step import denoise_step, rows
from ldm_lite.pipeline import Pipeline
from ldm_lite.prompt import chunks, weighted

log = logging.getLogger("ldm_lite")

Draw = Callable[[], Tensor]  # -> unit noise (B,C,h,w) float32, on any device


def seeded_noise(seeds: Sequence[int], shape: tuple[int, int, int]) -> Draw:
    """A source of noise (B,C,h,w) with one CPU generator per image, B = len(seeds)."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return lambda: torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def shared_noise(generator: torch.Generator, batch: int, shape: tuple[int, int, int]) -> Draw:
    """The original scripts' source: one generator on the device for all images of a job, in the order of its calls."""
    return lambda: torch.randn((batch, *shape), generator=generator, device=generator.device)


def count_chunks(pipe: Pipeline, prompts: Iterable[str], syntax: str = "plain") -> int:
    """The most chunks that one of the prompts takes: what encode_prompts must be told for all of a job to be alike."""
    return max(len(chunks(pipe.tokenizer, prompt, syntax).ids) for prompt in prompts)


@torch.no_grad()
def encode_prompts(
    pipe: Pipeline, prompts: Sequence[str], *, syntax: str = "plain", clip_skip: int = 1, num_chunks: int = 1
) -> Tensor:
    """Prompts, B of them -> context (B,T,D), of num_chunks (or more) chunks of 77 tokens each, the last ones empty.

    syntax is one of prompt.SYNTAXES.  What does not fit into the encoder is said, once a prompt.
    """
    if syntax == "plain":
        for prompt in dict.fromkeys(prompts):
            if dropped := pipe.tokenizer.dropped(prompt):
                log.warning("prompt is too long, dropped from it: %s", dropped)
    parts = [chunks(pipe.tokenizer, prompt, syntax) for prompt in prompts]
    num_chunks = max(num_chunks, *(len(part.ids) for part in parts))
    empty = chunks(pipe.tokenizer, "")
    padded = [part for prompt in parts for part in (prompt, *[empty] * (num_chunks - len(prompt.ids)))]
    ids, weights = torch.cat([part.ids for part in padded]), torch.cat([part.weights for part in padded])
    context = weighted(pipe.text_encoder(ids.to(pipe.device), clip_skip), weights)  # (B * num_chunks, 77, D)
    return context.reshape(len(parts), -1, context.shape[2])


@torch.no_grad()
def denoise(
    pipe: Pipeline,
    noise: Tensor,
    context: Tensor,
    uncond: Tensor | None,
    plan: Plan,
    *,
    scale: float,
    rescale: float = 0.0,
    percentile: float | None = None,
    draw: Draw | None = None,
) -> Iterator[Tensor]:
    """Yield the latents (B,C,h,w) float32 after every step of the plan, in the UNet's scale; the last are the result.

    noise is unit noise (B,C,h,w); context (B,T,D) and uncond (B,T,D) are embeddings of the prompts and the negative
    prompts, uncond None (or scale 1) for no guidance; rescale in [0,1] and percentile in (0,1) as in guidance.py.
    draw gives the noise of stochastic samplers.  Raises ValueError for shapes that do not fit the model, and if the
    plan needs a draw.
    """
    _check(pipe, noise, context, uncond)
    if draw is None and plan.draws.any():
        raise ValueError("this sampler adds noise at every step: pass draw, for instance generate.seeded_noise(...)")
    device, guided = pipe.device, uncond is not None and scale != 1
    context = (torch.cat([uncond, context]) if uncond is not None and guided else context).to(device, pipe.dtype)

    def tensor(value: float | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=torch.float32, device=device)

    guidance = Guidance(tensor(scale if guided else None), tensor(rescale or None), tensor(percentile))
    x = noise.to(device, torch.float32) * plan.initial
    registers = torch.cat([x[None], x.new_zeros(NUM_REGISTERS - 1, *x.shape)])  # (R, B, C, h, w)
    silence = torch.zeros_like(x)
    for i, row in enumerate(rows(plan, device)):
        fresh = draw().to(device, torch.float32) if draw is not None and plan.draws[i] else silence
        registers = denoise_step(pipe.unet, registers, row, fresh, context, guidance)
        if i + 1 == len(plan.t) or plan.step[i + 1] != plan.step[i]:
            yield registers[0]


def _check(pipe: Pipeline, noise: Tensor, context: Tensor, uncond: Tensor | None) -> None:
    spec = pipe.family.unet
    if pipe.family.conditioning != "text":
        raise ValueError(
            f"{pipe.family.title} reads an image beside the text (its UNet has {spec.in_channels} input channels): "
            "it cannot make a picture from a prompt alone; take a checkpoint with 4"
        )
    if noise.ndim != 4 or noise.shape[1] != spec.in_channels:
        raise ValueError(f"got noise of shape {tuple(noise.shape)}, wanted (B, {spec.in_channels}, h, w)")
    for name, value in (("context", context), ("uncond", uncond)):
        if value is None:
            continue
        if value.ndim != 3 or value.shape[0] != noise.shape[0] or value.shape[2] != spec.context_dim:
            raise ValueError(
                f"got {name} of shape {tuple(value.shape)}, wanted ({noise.shape[0]}, T, {spec.context_dim})"
            )
    if uncond is not None and uncond.shape[1] != context.shape[1]:
        raise ValueError(
            f"got uncond with {uncond.shape[1]} tokens and context with {context.shape[1]}, wanted as many"
        )


@torch.no_grad()
def decode(pipe: Pipeline, latents: Tensor) -> Iterator[Tensor]:
    """Latents (B,C,h,w) in the UNet's scale -> pixels (3,H,W) in [-1,1], float32 on the CPU, one image at a time.

    A result that is not finite is never handed out: a decoder that overflows in half precision is run again in
    float32, with a warning, and latents that are not finite raise a ValueError that names the cause.
    """
    if not torch.isfinite(latents).all():
        advice = "try --dtype fp32" if pipe.dtype != torch.float32 else "the checkpoint or the settings are at fault"
        raise ValueError(f"the latents are not finite: {broken_weights(pipe.networks) or advice}")
    vae = pipe.vae
    for z in latents / pipe.family.scale_factor:
        dtype = next(vae.parameters()).dtype
        pixels = vae.decode(z[None].to(dtype))[0].float()
        if not torch.isfinite(pixels).all() and dtype != torch.float32:
            log.warning("the autoencoder overflows in %s: decoding in float32", str(dtype).removeprefix("torch."))
            vae = copy.deepcopy(vae).float()  # not in place: other threads may be decoding
            pixels = vae.decode(z[None].float())[0]
        if not torch.isfinite(pixels).all():
            raise ValueError(f"the image is not finite: {broken_weights(pipe.networks) or 'the latents are too large'}")
        yield pixels.clamp(-1, 1).cpu()
