"""Noise and guidance -> latents: the core's loop for any model."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.core.denoise import Conditioning, Constraint, Draw, InputSource, State, run_plan, unconstrained
from ldm_lite.diffusion.adaptive import AdaptivePlan, each_image
from ldm_lite.diffusion.guidance import Guidance
from ldm_lite.diffusion.learned_variance import learning_variance
from ldm_lite.diffusion.plan import Plan


def denoise(
    model: CheckpointModel,
    noise: Tensor,
    guidance: Guidance,
    plan: Plan,
    *,
    draw: Draw | None = None,
    wrap: Callable[[InputSource], InputSource] = lambda source: source,
    on_step: Callable[[State], object] = lambda state: None,
) -> Tensor:
    """Run all steps of a plan from unit noise (B,C,h,w) and return the final latents (B,C,h,w).

    draw supplies the noise of stochastic samplers, wrap changes what calls of the network read, on_step gets every
    state.  Raises ValueError for shapes that do not fit the model, and if the plan needs a draw.
    """
    model.check_plan(plan)
    for branch in guidance.branches:
        check_conditioning(model, tuple(noise.shape), branch.conditioning)
    if draw is None and plan.adds_noise.any():
        raise ValueError("this sampler adds noise at every step: pass `draw`, for instance pipe.noise_source(...)")
    latents = noise.to(model.device, torch.float32) * plan.initial
    for state in stream(model, latents, plan, wrap(guidance.source(model)), draw or (lambda: noise)):
        latents = state.latents
        on_step(state)
    return latents


def stream(
    model: CheckpointModel,
    latents: Tensor,
    plan: Plan,
    inputs_of: InputSource,
    draw: Draw,
    constrain: Constraint = unconstrained,
) -> Iterator[State]:
    """Yield the state after every step of the plan from its first latents (B,C,h,w), as the core's run_plan does.

    The UNet is on the device while it runs.  Leaving the loop stops it.
    """
    if model.family.unet.out_channels == 2 * latents.shape[1]:
        inputs_of = learning_variance(inputs_of, plan)
    x = latents.to(model.device, torch.float32)
    with model.phase("unet"):
        if not isinstance(plan, AdaptivePlan):
            yield from run_plan(x, plan, inputs_of, draw, constrain)
        elif constrain is not unconstrained:
            raise ValueError("DPM adaptive has no fixed steps for a mask or a refiner: use another sampler")
        else:
            yield from each_image(x, inputs_of, plan, draw)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_conditioning(model: CheckpointModel, shape: tuple[int, ...], conditioning: Conditioning) -> None:
    """Raises ValueError if noise of a shape (B,C,h,w) and a conditioning of B images do not fit the model's network."""
    spec, concat = model.family.unet, conditioning.get("concat")
    further = 0 if concat is None or model.family.task == "edit" else concat.shape[1]
    if spec.in_channels > model.vae.spec.embed_dim and not further:
        raise ValueError(
            f"{model.family.title} reads an image besides the text (it has {spec.in_channels} input channels): "
            f"it cannot make an image from a prompt alone; use a checkpoint with {model.vae.spec.embed_dim}"
        )
    if len(shape) != 4 or shape[1] != spec.in_channels - further or 0 in shape:
        raise ValueError(f"got noise of shape {shape}, expected (B, {spec.in_channels - further}, h, w)")
    context, y = conditioning.get("context"), conditioning.get("y")
    got = "none" if context is None else f"one of shape {tuple(context.shape)}"
    if spec.context_dim is None:
        if context is not None:
            raise ValueError(f"context: got {got}, expected none")
    elif context is None or context.ndim != 3 or (len(context), context.shape[2]) != (shape[0], spec.context_dim):
        raise ValueError(f"context: got {got}, expected ({shape[0]}, T, {spec.context_dim})")
    width = (spec.vector_dim or 0) + (spec.guidance_dim or 0)
    wanted = (shape[0], width) if width else None if spec.num_classes is None else (shape[0],)
    if (None if y is None else tuple(y.shape)) != wanted:
        got = "none" if y is None else f"one of shape {tuple(y.shape)}"
        raise ValueError(f"y: got {got}, expected {'none' if wanted is None else f'one of shape {wanted}'}")
