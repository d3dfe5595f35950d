"""Noise and conditioning -> latents -> images: the only denoising loop of the project, as a generator.

Noise depends on the seed alone: every image has its own CPU generator, which draws its initial noise and that of
all later steps, whatever the batch size or the device.
"""

import contextlib
import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import broken_weights
from ldm_lite.diffusion.adaptive import AdaptivePlan, each_image
from ldm_lite.diffusion.guidance import Branches, Conditioning, Guidance
from ldm_lite.diffusion.noise import Draw
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.projected import Projection
from ldm_lite.diffusion.schedule import Level
from ldm_lite.diffusion.step import Network, denoise_step, rows
from ldm_lite.models.controlnet import ControlledUNet
from ldm_lite.models.unet import UNet
from ldm_lite.runtime.patching import runs_as_written
from ldm_lite.runtime.shortened import Call, Shortcuts, ShortenedUNet
from ldm_lite.runtime.tiling import is_tiled, out_of_memory, tiled, tiled_on_cpu
from ldm_lite.zoo.networks import Autoencoder

log = logging.getLogger("ldm_lite")

MOST_TEXTS = 8  # of a prompt that changes, kept on the device with their keys and values


class StepControl(Protocol):
    """Chooses the network that runs a step in place of the model's UNet, and its conditioning."""

    def __call__(self, step: int, conditioning: Conditioning) -> tuple[Network, Conditioning]:
        """Return both for a step, counted from 0, given the conditioning of all branches on the device."""


@dataclass(frozen=True, eq=False)
class RefinerSwitch:
    """Another model that continues the same plan from some step on: SDXL's refiner."""

    model: Model
    branches: Branches
    step: int  # its first, from 0


class InpaintMask(NamedTuple):
    """Latents to keep where the mask is 0: after every call they are put back with the noise of its level.

    At the end they have none, whatever the sampler ends at.  diffusers' StableDiffusionInpaintPipeline, for ordinary
    networks.  Without `noise` they are put back before every step, with fresh noise, and the end is the sampler's:
    `mask` and `x0` of the original samplers.
    """

    latents: Tensor  # (B,C,h,w)
    mask: Tensor  # (B or 1,1,h,w) in [0,1]: 0 keeps, 1 is free
    noise: Tensor | None  # (B,C,h,w), unit noise: that of the first latents

    def to(self, device: torch.device) -> "InpaintMask":
        """Return it on the device, as float32."""
        noise = None if self.noise is None else _sent(self.noise, device)
        return InpaintMask(_sent(self.latents, device), _sent(self.mask, device), noise)

    def blend(self, x: Tensor, level: Sequence[float] = (1.0, 0.0), noise: Tensor | float = 0.0) -> Tensor:
        """Return latents x (B,C,h,w) with what is kept at the level (a, s)."""
        a, s = (float(value) for value in level)
        return self.mask * x + (1 - self.mask) * (a * self.latents + s * noise)


class Extras(NamedTuple):
    """What else changes the steps, apart from guidance."""

    mask: InpaintMask | None = None
    control: StepControl | None = None
    refiner: RefinerSwitch | None = None
    shortcuts: Shortcuts | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, eq=False)
class DenoisingState:
    """The latents after a step, and the image that the step predicted."""

    step: int  # from 1
    num_steps: int
    latents: Tensor  # (B,C,h,w) float32, in the UNet's scale
    prediction: Tensor  # (B,C,h,w) the plan's prediction H, from the step's last call that remembers it
    before: Tensor  # (B,C,h,w) the latents that this call read
    to_x0: tuple[float, float]  # (p, q): x0 = p * before + q * prediction
    mask: InpaintMask | None = None

    @property
    def x0(self) -> Tensor:
        """The clean latents (B,C,h,w) that the step predicted, after guidance, with what is kept."""
        p, q = self.to_x0
        x0 = p * self.before + q * self.prediction
        return x0 if self.mask is None else self.mask.blend(x0)


def denoise(
    model: Model,
    noise: Tensor,
    branches: Branches,
    plan: Plan,
    *,
    draw: Draw | None = None,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Run all steps of a plan and return the final latents (B,C,h,w); arguments and errors are those of stream."""
    latents = noise
    for state in stream(model, noise, branches, plan, draw=draw, extras=extras):
        latents = state.latents
    return latents


@torch.no_grad()
def stream(
    model: Model,
    noise: Tensor,
    branches: Branches,
    plan: Plan,
    *,
    draw: Draw | None = None,
    extras: Extras = NO_EXTRAS,
) -> Iterator[DenoisingState]:
    """Yield the state after every step of the plan; the last state's latents are the result.

    noise is unit noise (B,C,h,w); branches are the conditionings of B images, as guidance.classifier_free makes them;
    draw supplies the noise of stochastic samplers.  Leaving the loop stops it.  Raises ValueError for shapes that do
    not fit the model, and if the plan needs a draw.
    """
    _check_all(model, noise, branches, plan, draw, extras.refiner)
    if isinstance(plan, AdaptivePlan):
        x = noise.to(model.device, torch.float32)
        yield from each_image(lambda *parts: stream(model, *parts), x, branches, plan, (draw, extras))
        return
    device, dtype = model.device, model.dtype
    stages = [_Stage(model, branches, 0, extras)]
    if (switch := extras.refiner) is not None:
        stages.append(_Stage(switch.model, switch.branches, switch.step, extras._replace(control=None)))
    mask = None if extras.mask is None else extras.mask.to(device)
    x = noise.to(device, torch.float32) * plan.initial
    registers = torch.cat([x[None], x.new_zeros(NUM_REGISTERS - 1, *x.shape)])  # (R, B, C, h, w)
    silence, stage, table = torch.zeros_like(x), None, rows(plan, device)
    seen = (x, x, (0.0, 1.0))
    with contextlib.ExitStack() as phase:
        for i, row in enumerate(table):
            step = int(plan.step[i])
            if mask is not None and mask.noise is None and (i == 0 or plan.step[i - 1] != step):
                assert draw is not None
                registers = _with_latents(registers, mask.blend(registers[0], plan.level[i], _sent(draw(), device)))
            fresh = _sent(draw(), device) if draw is not None and plan.adds_noise[i] else silence
            if fresh.shape != x.shape:
                raise ValueError(f"got noise of shape {tuple(fresh.shape)} from `draw`, wanted {tuple(x.shape)}")
            now = stages[-1 if step >= stages[-1].first_step else 0]
            if now is not stage:
                phase.close()
                phase.enter_context(now.model.phase("unet"))
                stage = now
                stage.read_text()
            network, conditioning = stage.inputs(Call.of(plan, i, stage.branches))
            guidance = stage.guidance(step)
            plain = guidance.combine is None and not isinstance(network, ShortenedUNet)
            run = stage.model.step if plain else denoise_step
            before = registers[0]
            registers = run(network, registers, row, fresh, conditioning, guidance, dtype)
            if mask is not None and mask.noise is not None:
                after = plan.level[i + 1] if i + 1 < len(plan.level) else (1.0, 0.0)
                registers = _with_latents(registers, mask.blend(registers[0], after, mask.noise))
            if plan.remembers[i]:
                seen = (before, registers[2], plan.x0_of_h(i))
            if i + 1 == len(plan.t) or plan.step[i + 1] != plan.step[i]:
                yield DenoisingState(step + 1, plan.num_steps, registers[0], seen[1], seen[0], seen[2], mask)


def _with_latents(registers: Tensor, latents: Tensor) -> Tensor:
    """Return registers (R,B,C,h,w) with other latents; not in place, since they may be a CUDA graph's output."""
    return torch.cat([latents[None], registers[1:]])


class _Stage:
    """A model that runs some of the steps, with its inputs on the device."""

    def __init__(self, model: Model, branches: Branches, first_step: int, extras: Extras) -> None:
        self.model, self.branches, self.first_step, self.device = model, branches, first_step, model.device
        # On the device, with the text's keys and values, by the conditionings and which of them run.
        self._ready: OrderedDict[tuple[int, tuple[int, ...]], Conditioning] = OrderedDict()
        self._caches_text, self._control = False, extras.control
        self._guidance: tuple[object, Guidance] | None = None
        self._combine = branches.combine.begin() if isinstance(branches.combine, Projection) else branches.combine
        self._shortened = None if extras.shortcuts is None else ShortenedUNet(model.unet, extras.shortcuts)

    def read_text(self) -> None:
        """Have the keys and values of the text computed once for all steps, within the UNet's phase.

        Not under autocast, nor if part of the network was replaced or hooked: it may need the text, or load weights.
        """
        unet: Any = self.model.unet
        as_written = getattr(type(unet), "forward", None) is UNet.forward and runs_as_written(unet)
        self._caches_text = as_written and not torch.is_autocast_enabled(self.device.type)
        self._ready.clear()

    def inputs(self, call: Call) -> tuple[Network, Conditioning]:
        """Return the network that runs a call, and its conditioning."""
        network: Network = self.model.unet
        ready = self._conditioning(call.texts, call.used)
        conditioning = ready._replace(cache=None)
        if self._control is not None:
            network, conditioning = self._control(call.step, conditioning)
        own = network.unet if isinstance(network, ControlledUNet) else network  # other wrappers may take no cache
        if own is self.model.unet:
            if conditioning.context is ready.context:
                conditioning = conditioning._replace(cache=ready.cache)
            if self._shortened is not None:
                network = self._shortened.at(call, network)
        return network, conditioning

    def _conditioning(self, conditionings: Sequence[Conditioning], used: tuple[int, ...]) -> Conditioning:
        key = id(conditionings), used
        if key not in self._ready:
            made = _stacked([conditionings[k] for k in used], self.device, self.model.dtype)
            unet: Any = self.model.unet
            caches = made.context is not None and self._caches_text
            self._ready[key] = made._replace(cache=unet.text_cache(made.context)) if caches else made
            if len(self._ready) > MOST_TEXTS:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return self._ready[key]

    def guidance(self, step: int) -> Guidance:
        """Return the guidance of a step, reusing the previous step's tensors if nothing changes."""
        every, used = self.branches.weights_at(step), self.branches.used_at(step)
        weights = tuple(every[k] for k in used)
        if self._guidance is None or self._guidance[0] != (weights, used):
            percentile, limit = self.branches.threshold or (None, None)
            several, maps = len(used) > 1, self.branches.maps
            made = Guidance(
                weights=self._tensor(weights if several else None),
                rescale=self._tensor(self.branches.rescale or None),
                percentile=self._tensor(percentile),
                limit=self._tensor(limit),
                combine=self._combine if several else None,
                maps=maps[list(used)].to(self.device) if several and maps is not None else None,
            )
            self._guidance = (weights, used), made
        return self._guidance[1]

    def _tensor(self, value: float | Sequence[float] | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=torch.float32, device=self.model.device)


def _sent(noise: Tensor, device: torch.device) -> Tensor:
    """Return noise on the device as float32; pinned memory lets the copy overlap earlier steps."""
    if device.type == "cuda" and noise.device.type == "cpu":
        noise = noise.pin_memory()
    return noise.to(device, torch.float32, non_blocking=True)


def _stacked(conditionings: Sequence[Conditioning], device: torch.device, dtype: torch.dtype) -> Conditioning:
    """Concatenate all branches on the device; integers stay integers.  Raises ValueError if shapes differ."""
    parts = [{**each._asdict(), **(each.inputs or {})} for each in conditionings]
    stacked: dict[str, Tensor | None] = {}
    for name in ("context", "y", "concat", *(conditionings[0].inputs or {})):
        values = [part[name] for part in parts]
        if all(value is None for value in values):
            stacked[name] = None
            continue
        if len({value.shape[1:] for value in values}) > 1:
            shapes = " and ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"got {name} of shapes {shapes}, wanted the same for all branches of the guidance")
        value = torch.cat(values)
        own = name in Conditioning._fields and value.is_floating_point()
        stacked[name] = value.to(device, dtype if own else value.dtype)
    main = Conditioning(stacked.pop("context"), stacked.pop("y"), stacked.pop("concat"))
    return main._replace(inputs={name: each for name, each in stacked.items() if each is not None} or None)


def _check_all(
    model: Model, noise: Tensor, branches: Branches, plan: Plan, draw: Draw | None, refiner: RefinerSwitch | None
) -> None:
    """Raises ValueError for inputs of stream that do not fit each other."""
    for conditionings in (branches.conditionings, *(each for _, each in branches.later)):
        for conditioning in conditionings:
            check(model, noise, conditioning)
    if refiner is not None:
        for conditioning in refiner.branches.conditionings:
            check(refiner.model, noise, conditioning)
        if refiner.model.family.prediction != model.family.prediction:
            raise ValueError(
                f"{model.name} predicts {model.family.prediction}, but {refiner.model.name} "
                f"{refiner.model.family.prediction}: the second cannot continue a run of the first"
            )
    wanted = [model.schedule.to_kept("x0", Level(0, *level)) for level in plan.level]
    if not np.allclose(plan.to_x0, wanted, equal_nan=True):
        raise ValueError(
            f"this plan is for another network: {model.name} predicts {model.schedule.prediction}; "
            "make one with its own schedule"
        )
    if draw is None and plan.adds_noise.any():
        raise ValueError(
            "this sampler adds noise at every step: pass `draw`, for instance that of pipe.noise_source(seed)"
        )


def check(model: Model, noise: Tensor, conditioning: Conditioning) -> None:
    """Raises ValueError if noise (B,C,h,w) and a conditioning of B images do not fit the model's UNet."""
    spec = model.family.unet
    given = 0 if conditioning.concat is None or model.family.task == "edit" else conditioning.concat.shape[1]
    if spec.in_channels > model.vae.spec.embed_dim and not given:
        raise ValueError(
            f"{model.family.title} reads an image besides the text (it has {spec.in_channels} input channels): "
            f"it cannot make an image from a prompt alone; take a checkpoint with {model.vae.spec.embed_dim}"
        )
    if noise.ndim != 4 or noise.shape[1] != (channels := spec.in_channels - given):
        raise ValueError(f"got noise of shape {tuple(noise.shape)}, wanted (B, {channels}, h, w)")
    context, y = conditioning.context, conditioning.y
    got = "none" if context is None else f"one of shape {tuple(context.shape)}"
    if spec.context_dim is None:
        if context is not None:
            raise ValueError(f"context: got {got}, wanted none")
    elif context is None or context.ndim != 3 or (len(context), context.shape[2]) != (len(noise), spec.context_dim):
        raise ValueError(f"context: got {got}, wanted ({len(noise)}, T, {spec.context_dim})")
    width = (spec.vector_dim or 0) + (spec.guidance_dim or 0)
    wanted = (len(noise), width) if width else None if spec.num_classes is None else (len(noise),)
    if (None if y is None else tuple(y.shape)) != wanted:
        got = "none" if y is None else f"one of shape {tuple(y.shape)}"
        raise ValueError(f"y: got {got}, wanted {'none' if wanted is None else f'one of shape {wanted}'}")


# ---- the autoencoder ------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode(model: Model, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Encode pixels (B,3,H,W) in [-1,1]; return mean and standard deviation (B,C,h,w), in the UNet's scale.

    Both are float32 on the model's device; a sample is mean + deviation * noise.  An encoder that overflows in half
    precision runs again in float32, with a warning.  Raises ValueError if a side is not a multiple of the factor.
    """
    factor = model.vae.spec.factor
    if pixels.shape[1] != 3 or pixels.shape[2] % factor or pixels.shape[3] % factor:
        raise ValueError(f"got pixels {tuple(pixels.shape)}, wanted (B, 3, H, W) with H and W multiples of {factor}")
    with model.phase("vae"):
        vae, dtype = tiled_on_cpu(model.vae), next(model.vae.parameters()).dtype
        mean, deviation = vae.encode(pixels.to(model.device, dtype))
        if not torch.isfinite(mean + deviation).all() and dtype != torch.float32:
            log.warning("the autoencoder overflows in %s: encoding in float32", str(dtype).removeprefix("torch."))
            whole = copy.deepcopy(vae).to(model.device, torch.float32)
            mean, deviation = whole.encode(pixels.to(model.device, torch.float32))
    if not torch.isfinite(mean + deviation).all():
        cause = broken_weights(model.networks) or "its pixels are not finite"
        raise ValueError(f"the image's latents are not finite: {cause}")
    family = model.family
    return (mean.float() - family.shift_factor) * family.scale_factor, deviation.float() * family.scale_factor


@torch.no_grad()
def decode(model: Model, latents: Tensor) -> Iterator[Tensor]:
    """Decode latents (B,C,h,w), in the UNet's scale, to pixels (3,H,W) in [-1,1], float32 on the CPU, image by image.

    Pixels are always finite: a decoder that overflows in half precision runs again in float32, with a warning.
    Raises ValueError for latents of other channels and, naming the cause, for those that are not finite.
    """
    if latents.shape[1] != model.vae.spec.embed_dim:
        raise ValueError(f"got latents with {latents.shape[1]} channels, wanted {model.vae.spec.embed_dim}")
    if not torch.isfinite(latents).all():
        half = model.dtype != torch.float32
        advice = '`dtype="fp32"` may help' if half else "the checkpoint or the settings are at fault"
        raise ValueError(f"the latents are not finite: {broken_weights(model.networks) or advice}")
    with model.phase("vae"):
        vae = tiled_on_cpu(model.vae)
        for z in latents.to(model.device) / model.family.scale_factor + model.family.shift_factor:
            dtype = next(vae.parameters()).dtype
            vae, pixels = _decode(vae, z[None].to(dtype))
            if not torch.isfinite(pixels).all() and dtype != torch.float32:
                log.warning("the autoencoder overflows in %s: decoding in float32", str(dtype).removeprefix("torch."))
                vae = copy.deepcopy(vae).to(model.device, torch.float32)  # a copy: other threads may be decoding
                vae, pixels = _decode(vae, z[None].float())
            if not torch.isfinite(pixels).all():
                cause = broken_weights(model.networks) or "the latents are too large"
                raise ValueError(f"the image is not finite: {cause}")
            yield pixels.clamp(-1, 1).cpu()


def _decode(vae: Autoencoder, z: Tensor) -> tuple[Autoencoder, Tensor]:
    """Decode z (1,C,h,w) to pixels (3,H,W) float32; also return the next autoencoder, tiled if memory ran out."""
    try:
        return vae, vae.decode(z)[0].float()
    except (RuntimeError, MemoryError) as error:
        if is_tiled(vae) or not out_of_memory(error):
            raise
        log.warning("out of memory: decoding in tiles, which `vae_tiling` does from the start")
    # Outside the except block, which keeps the failed attempt's tensors alive.
    vae = tiled(vae, rest="cpu")
    return vae, vae.decode(z)[0].float()
