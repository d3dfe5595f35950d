"""Noise and conditioning -> latents -> images.  The only denoising loop of the project, as a generator.

Noise depends on the seed alone: every image has its own CPU generator, which draws its first noise and all later
noise, whatever the batch size or the device.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Autoencoder, Pipeline
from ldm_lite.checkpoint.reader import broken_weights
from ldm_lite.diffusion.guidance import Branches, Conditioning, Guidance, Kept
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.step import Model, rows
from ldm_lite.models.controlnet import ControlledUNet
from ldm_lite.models.unet import TextCache, UNet
from ldm_lite.runtime.tiling import is_tiled, out_of_memory, tiled, tiled_on_cpu
from ldm_lite.runtime.tuning import unchanged

log = logging.getLogger("ldm_lite")

Draw = Callable[[], Tensor]  # -> unit noise (B,C,h,w) float32, on any device


def seeded_noise(seeds: Sequence[int], shape: tuple[int, int, int]) -> Draw:
    """A source of noise (B,C,h,w) with one CPU generator per image, B = len(seeds)."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    # Kind and place are stated, since a process may have other defaults: in float64 the same seed is another noise.
    return lambda: torch.stack(
        [torch.randn(shape, generator=generator, dtype=torch.float, device="cpu") for generator in generators]
    )


def shared_noise(generator: torch.Generator, batch: int, shape: tuple[int, int, int]) -> Draw:
    """The original scripts' source: one generator on the device for all images of a job, in the order of its calls."""
    size, device = (batch, *shape), generator.device
    return lambda: torch.randn(size, generator=generator, dtype=torch.float, device=device)


class Handover(NamedTuple):
    """From a step on, another network goes on with the same plan: SDXL's refiner."""

    pipe: Pipeline
    branches: Branches
    step: int  # its first, from 0


@torch.no_grad()
def denoise(
    pipe: Pipeline,
    noise: Tensor,
    branches: Branches,
    plan: Plan,
    *,
    rescale: float = 0.0,
    threshold: tuple[float, float] | None = None,
    draw: Draw | None = None,
    kept: Kept | None = None,
    later: Handover | None = None,
    steer: Callable[[int, Conditioning], tuple[Model, Conditioning]] | None = None,
) -> Iterator[Tensor]:
    """Yield the latents (B,C,h,w) float32 after every step of the plan, in the UNet's scale; the last are the result.

    noise is unit noise (B,C,h,w); branches are the conditionings of B images each with their weights, as
    guidance.classifier_free makes them; rescale in [0,1] and threshold, (percentile, limit), as in guidance.py.  draw
    gives the noise of stochastic samplers; kept is what is not to change; later takes over from one of the steps on;
    steer says what runs in place of pipe's own network in a step, counted from 0, and what it reads.  Raises ValueError
    for shapes that do not fit the model, and if the plan needs a draw.
    """
    stages = [Handover(pipe, branches, 0)] + ([] if later is None else [later])
    for stage in stages:
        for conditioning in stage.branches.conditionings:
            check(stage.pipe, noise, conditioning)
    if later is not None and later.pipe.family.prediction != pipe.family.prediction:
        raise ValueError(
            f"{pipe.name} predicts {pipe.family.prediction}, but {later.pipe.name} {later.pipe.family.prediction}: "
            "the second cannot go on where the first leaves off"
        )
    if draw is None and plan.draws.any():
        raise ValueError("this sampler adds noise at every step: pass draw, for instance generate.seeded_noise(...)")
    device, dtype = pipe.device, pipe.dtype

    def tensor(value: float | Sequence[float] | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=torch.float32, device=device)

    truth = None if kept is None else Kept(*(part.to(device, torch.float32) for part in kept))
    percentile, limit = (None, None) if threshold is None else map(tensor, threshold)
    inputs: list[tuple[Pipeline, Conditioning, Guidance]] = []
    for stage in stages:
        weights = stage.branches.weights if len(stage.branches.weights) > 1 else None
        guidance = Guidance(tensor(weights), tensor(rescale or None), percentile, truth, limit)
        inputs.append((stage.pipe, _stacked(stage.branches.conditionings, device, dtype), guidance))
    x = noise.to(device, torch.float32) * plan.initial
    registers = torch.cat([x[None], x.new_zeros(NUM_REGISTERS - 1, *x.shape)])  # (R, B, C, h, w)
    silence, now = torch.zeros_like(x), None
    table = rows(plan, device)
    with contextlib.ExitStack() as phase:
        for i, row in enumerate(table):
            fresh = _sent(draw(), device) if draw is not None and plan.draws[i] else silence
            computes, conditioning, guidance = inputs[-1 if plan.step[i] >= stages[-1].step else 0]
            if computes is not now:
                phase.close()
                phase.enter_context(computes.phase("unet"))
                now, text, cache = computes, conditioning.context, _text_cache(computes, conditioning.context)
            unet: Model = computes.unet
            if steer is not None and computes is pipe:
                unet, conditioning = steer(int(plan.step[i]), conditioning)
            own = unet.unet if isinstance(unet, ControlledUNet) else unet
            if own is computes.unet and conditioning.context is text:
                conditioning = conditioning._replace(cache=cache)
            registers = computes.step(unet, registers, row, fresh, conditioning, guidance, dtype)
            if i + 1 == len(plan.t) or plan.step[i + 1] != plan.step[i]:
                yield registers[0]


def _text_cache(pipe: Pipeline, context: Tensor | None) -> TextCache | None:
    """The text's keys and values for all steps, made within the UNet's phase; None if every step must make its own.

    That is so with autocast, which changes dtypes on the way, and if a part of the network was replaced or hooked: a
    hook may want to see the text, or bring the weights.
    """
    unet = pipe.unet
    as_written = getattr(type(unet), "forward", None) is UNet.forward and unchanged(unet)
    if context is None or torch.is_autocast_enabled(pipe.device.type) or not as_written:
        return None
    return unet.text_cache(context)


def _sent(noise: Tensor, device: torch.device) -> Tensor:
    """Noise on the device, as float32; from pinned memory, so that the steps before are not waited for."""
    if device.type == "cuda" and noise.device.type == "cpu":
        noise = noise.pin_memory()
    return noise.to(device, torch.float32, non_blocking=True)


def _stacked(conditionings: Sequence[Conditioning], device: torch.device, dtype: torch.dtype) -> Conditioning:
    """All branches one after the other, on the device; indices stay integers.  Raises ValueError if they are unlike."""

    def stacked(name: str) -> Tensor | None:
        values = [getattr(conditioning, name) for conditioning in conditionings]
        if all(value is None for value in values):
            return None
        if len({value.shape[1:] for value in values}) > 1:
            shapes = " and ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"got {name} of shapes {shapes}, wanted the same for all branches of the guidance")
        value = torch.cat(values)
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return Conditioning(stacked("context"), stacked("y"), stacked("concat"))


def check(pipe: Pipeline, noise: Tensor, conditioning: Conditioning) -> None:
    """Raises ValueError if noise (B,C,h,w) and a conditioning of B images do not fit the pipeline's UNet."""
    spec = pipe.family.unet
    given = 0 if conditioning.concat is None else conditioning.concat.shape[1]
    if spec.in_channels > pipe.vae.spec.embed_dim and not given:
        raise ValueError(
            f"{pipe.family.title} reads an image beside the text (its UNet has {spec.in_channels} input channels): "
            "it cannot make a picture from a prompt alone; take a checkpoint with 4"
        )
    channels = spec.in_channels - given
    if noise.ndim != 4 or noise.shape[1] != channels:
        raise ValueError(f"got noise of shape {tuple(noise.shape)}, wanted (B, {channels}, h, w)")
    context, y = conditioning.context, conditioning.y
    got = "none" if context is None else f"one of shape {tuple(context.shape)}"
    if spec.context_dim is None:
        if context is not None:
            raise ValueError(f"got as context {got}, wanted none")
    elif context is None or context.ndim != 3 or (len(context), context.shape[2]) != (len(noise), spec.context_dim):
        raise ValueError(f"got as context {got}, wanted ({len(noise)}, T, {spec.context_dim})")
    width = (spec.vector_dim or 0) + (spec.guidance_dim or 0)
    wanted = (len(noise), width) if width else None if spec.num_classes is None else (len(noise),)
    if (None if y is None else tuple(y.shape)) != wanted:
        got = "none" if y is None else f"one of shape {tuple(y.shape)}"
        raise ValueError(f"got as y {got}, wanted {'none' if wanted is None else f'one of shape {wanted}'}")


@torch.no_grad()
def encode(pipe: Pipeline, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels (B,3,H,W) in [-1,1] -> mean and standard deviation of their latents (B,C,h,w), in the UNet's scale.

    float32 on the pipeline's device; a sample is mean + deviation * noise.  An encoder that overflows in half precision
    is run again in float32, with a warning.  Raises ValueError if a side is no multiple of the autoencoder's factor.
    """
    with pipe.phase("vae"):
        vae, dtype = tiled_on_cpu(pipe.vae), next(pipe.vae.parameters()).dtype
        mean, deviation = vae.distribution(pixels.to(pipe.device, dtype))
        if not torch.isfinite(mean + deviation).all() and dtype != torch.float32:
            log.warning("the autoencoder overflows in %s: encoding in float32", str(dtype).removeprefix("torch."))
            whole = copy.deepcopy(vae).to(pipe.device, torch.float32)
            mean, deviation = whole.distribution(pixels.to(pipe.device, torch.float32))
    if not torch.isfinite(mean + deviation).all():
        raise ValueError(
            f"the picture's latents are not finite: {broken_weights(pipe.networks) or 'its pixels are not'}"
        )
    return mean.float() * pipe.family.scale_factor, deviation.float() * pipe.family.scale_factor


@torch.no_grad()
def decode(pipe: Pipeline, latents: Tensor) -> Iterator[Tensor]:
    """Latents (B,C,h,w) in the UNet's scale -> pixels (3,H,W) in [-1,1], float32 on the CPU, one image at a time.

    A result that is not finite is never handed out: a decoder that overflows in half precision is run again in
    float32, with a warning, and latents that are not finite raise a ValueError that names the cause.
    """
    if not torch.isfinite(latents).all():
        advice = "try --dtype fp32" if pipe.dtype != torch.float32 else "the checkpoint or the settings are at fault"
        raise ValueError(f"the latents are not finite: {broken_weights(pipe.networks) or advice}")
    with pipe.phase("vae"):
        vae = tiled_on_cpu(pipe.vae)
        for z in latents.to(pipe.device) / pipe.family.scale_factor:
            dtype = next(vae.parameters()).dtype
            vae, pixels = _decode(vae, z[None].to(dtype))
            if not torch.isfinite(pixels).all() and dtype != torch.float32:
                log.warning("the autoencoder overflows in %s: decoding in float32", str(dtype).removeprefix("torch."))
                vae = copy.deepcopy(vae).to(pipe.device, torch.float32)  # not in place: other threads may be decoding
                vae, pixels = _decode(vae, z[None].float())
            if not torch.isfinite(pixels).all():
                cause = broken_weights(pipe.networks) or "the latents are too large"
                raise ValueError(f"the image is not finite: {cause}")
            yield pixels.clamp(-1, 1).cpu()


def _decode(vae: Autoencoder, z: Tensor) -> tuple[Autoencoder, Tensor]:
    """z (1,C,h,w) -> pixels (3,H,W) float32; and the autoencoder to go on with, in tiles if memory has run out."""
    try:
        return vae, vae.decode(z)[0].float()
    except (RuntimeError, MemoryError) as error:
        if is_tiled(vae) or not out_of_memory(error):
            raise
        log.warning("out of memory: decoding in tiles, which --vae-tiling does from the start")
    # After the except block, which keeps what the failed attempt has left.
    vae = tiled(vae, rest="cpu")
    return vae, vae.decode(z)[0].float()
