"""Losses of a diffusion model, with the networks that they train.

A loss owns the trained networks and computes the loss of a batch; the trainer does everything else.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ldm_lite import Pipeline
from ldm_lite.core.denoise import to_device
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.networks import blocks, encode_captions, network_inputs
from ldm_lite.train import distributed
from ldm_lite.train.additions import LoRA
from ldm_lite.train.batches import Batch, Draws, divided_into, in_order
from ldm_lite.train.data import Buckets, Dataset, to_float

# ---- weights by noise level -----------------------------------------------------------------------------------------
#
# A fixed weighting is named for the weight that it gives the error of x0.  The error of a network's own prediction is
# that of x0 times SNR (eps), SNR + 1 (v) or 1 (x0), so it is divided by these.

Weighting = Callable[[Tensor, Tensor], Tensor]  # errors (B,) and SNR (B,) -> losses (B,)

LEAST_SNR, MOST_SNR = 1e-9, 1e9  # it is 0 or infinite at the ends of some schedules


def uniform(errors: Tensor, snr: Tensor) -> Tensor:
    """The errors of the network's own prediction.  Ho et al. 2020, eq. 14."""
    return errors


def of_x0(kind: str, prediction: str, gamma: float = 5.0) -> Weighting:
    """Return a fixed weighting.

    "snr": SNR, as eps prediction has it.  Salimans and Ho 2022, sec. 4.  "min_snr": min(SNR, gamma).  Hang et al. 2023,
    sec. 3.4.  "debiased": sqrt(SNR).  Yu et al. 2023, sec. 4.
    """

    def weighted(errors: Tensor, snr: Tensor) -> Tensor:
        snr = snr.clamp(LEAST_SNR, MOST_SNR)
        weight_of_x0 = {"snr": snr, "min_snr": snr.clamp(max=gamma), "debiased": snr.sqrt()}[kind]
        weight_there_is = {"eps": snr, "v": snr + 1, "x0": torch.ones_like(snr)}[prediction]
        return weight_of_x0 / weight_there_is * errors

    return weighted


class LearnedWeighting(nn.Module):
    """errors / exp(u) + u: u follows the log of the mean error at a noise level, so all levels weigh the same.

    u is linear in Fourier features of log(noise / signal) / 4.  Karras et al. 2024 (EDM2), eq. 21 and sec. 2.3.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("frequencies", 2 * math.pi * torch.randn(channels, generator=generator))
        self.register_buffer("phases", 2 * math.pi * torch.rand(channels, generator=generator))
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, errors: Tensor, snr: Tensor) -> Tensor:
        """Return the losses (B,) of errors (B,) at SNR (B,)."""
        u = self.log_error(snr)
        return errors / u.exp() + u

    def log_error(self, snr: Tensor) -> Tensor:
        """Return u (B,)."""
        noise = -snr.clamp(LEAST_SNR, MOST_SNR).log() / 8
        features = math.sqrt(2) * torch.cos(noise[:, None] * self.frequencies + self.phases)
        return features @ self.weight / math.sqrt(len(self.weight))


# ---- losses ---------------------------------------------------------------------------------------------------------


class Loss(Protocol):
    """The networks to train, and the loss of a batch."""

    networks: dict[str, nn.Module]  # the trained networks, by name; every parameter that requires a gradient gets one

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss () of a batch: the mean of its examples' losses.

        All random numbers come from `draws`, so that they do not depend on how examples are batched.
        """


class Noised(NamedTuple):
    """A batch's latents at random noise levels."""

    x: Tensor  # (B,C,h,w)
    t: Tensor  # (B,), what the network is given
    target: Tensor  # (B,C,h,w), what it should predict
    snr: Tensor  # (B,)


class Prior(NamedTuple):
    """What a model should not forget: images of a class, or the base model's prediction for a caption."""

    weight: float
    caption: str | None  # None: batches bring images of the class
    base: Callable[[], AbstractContextManager[Pipeline]]  # gives the base model within a block


@dataclass
class DiffusionLoss:
    """Mean squared error of the prediction (eps, v, x0 or a flow's velocity) at random timesteps.

    Timesteps are uniform; of a rectified flow s is logit-normal, then shifted as in sampling.  Rombach et al. 2022,
    eq. 3; Esser et al. 2024, sec. 3.1; Ruiz et al. 2023, eq. 2 for the prior.
    """

    model: Pipeline  # with a KL autoencoder, which stays frozen
    networks: dict[str, nn.Module]  # the model's trained networks, or others that change it
    caption_dropout: float = 0.0  # fraction of captions left out
    weighting: Weighting = uniform
    empty: Mapping[str, Tensor] | None = None  # no caption, encoded: batches bring their text, no encoder runs
    prior: Prior | None = None
    control: ControlNet | None = None  # trained, with the model frozen
    noise_offset: float = 0.0  # of each channel's own noise
    timesteps: tuple[int, int] = (0, 1000)  # the first that is learned, and the first after them
    flow_sampling: str = "logit_normal"  # or "uniform"
    flow_shift: float | None = None  # in place of sampling's

    def __post_init__(self) -> None:
        assert isinstance(self.model.vae, AutoencoderKL)
        self._vae = self.model.vae
        self._device = self.model.device
        alpha_bar = torch.tensor(self.model.schedule.alpha_bar, dtype=torch.float64)
        self._a, self._s = (value.sqrt().float().to(self._device) for value in (alpha_bar, 1 - alpha_bar))

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch, with that of the prior."""
        for network in self.networks.values():
            if isinstance(network, LoRA):
                network.at_step(draws)
        loss = self._mean(batch, draws)
        if batch.prior is not None and self.prior is not None:
            loss = loss + self.prior.weight * self._mean(batch.prior, Draws(draws.seed, batch.prior.numbers))
        return loss

    def errors(self, batch: Batch, draws: Draws, quantiles: Tensor) -> Tensor:
        """Return the mean squared errors (B,), without weights, at quantiles (B,) of the noise levels."""
        noised = self._noised(batch, draws, quantiles)
        text = read(self.model, batch, torch.zeros(len(quantiles), dtype=torch.bool), self.empty)
        out = self._run(self.model, noised, text, batch.hint)
        return self._errors(out, noised.target, batch.mask)

    def _mean(self, batch: Batch, draws: Draws) -> Tensor:
        noised = self._noised(batch, draws)
        text = read(self.model, batch, draws.uniform("captions") < self.caption_dropout, self.empty)
        errors = self._errors(self._run(self.model, noised, text, batch.hint), noised.target, batch.mask)
        loss = self.weighting(errors, noised.snr).mean()
        if self.prior is not None and self.prior.caption is not None:
            # The difference to the base model's prediction for the class, at the same latents.
            of_class = replace(batch, captions=[self.prior.caption] * len(batch.captions), context=None)
            kept = torch.zeros(len(batch.captions), dtype=torch.bool)
            with torch.no_grad(), self.prior.base() as base:
                wanted = self._run(base, noised, read(base, of_class, kept), batch.hint)
            out = self._run(self.model, noised, read(self.model, of_class, kept), batch.hint)
            loss = loss + self.prior.weight * self.weighting(self._errors(out, wanted, None), noised.snr).mean()
        return loss

    def _noised(self, batch: Batch, draws: Draws, quantiles: Tensor | None = None) -> Noised:
        """Add noise to a batch's latents, at random levels or at given quantiles of them."""
        is_encoded = batch.pixels.dtype != torch.uint8
        with contextlib.nullcontext() if is_encoded else self.model.phase("vae"):
            mean, logvar = moments_of(self._vae, batch.pixels, self._device)
        z, noise = (draws.normal(purpose, mean.shape[1:], mean.device) for purpose in ("latents", "noise"))
        if self.noise_offset:
            noise = noise + self.noise_offset * draws.normal("noise offset", (noise.shape[1], 1, 1), noise.device)
        family, schedule = self.model.family, self.model.schedule
        low, high = (bound / 1000 for bound in self.timesteps)
        x0 = family.scale_factor * (mean + (logvar / 2).exp() * z - family.shift_factor)
        if schedule.is_flow:
            if self.flow_sampling == "uniform":
                places = draws.uniform("timesteps").double() if quantiles is None else quantiles.double()
            else:
                drawn = draws.normal("timesteps").double()
                places = torch.sigmoid(drawn if quantiles is None else torch.special.ndtri(quantiles.double()))
            sized: Any = self.model.sized((x0.shape[1], x0.shape[2], x0.shape[3])).schedule
            shift = self.flow_shift
            places = low + (high - low) * places
            if shift is None:
                levels = [sized.between(1000 * float(place) - 1) for place in places]
            else:
                levels = [sized.at_noise(float(s)) for s in shift * places / (1 + (shift - 1) * places)]
            times = torch.tensor([[level.t, 1 - level.s, level.s] for level in levels], dtype=torch.float32)
            t, a, s = to_device(times, self._device).unbind(1)
        else:
            first, num = round(low * len(self._a)), round((high - low) * len(self._a))
            t = draws.integers("timesteps", num) if quantiles is None else (quantiles * num).long().clamp(max=num - 1)
            t = to_device(first + t, self._device)
            a, s = self._a[t], self._s[t]
        snr, a, s = (a / s).square(), a[:, None, None, None], s[:, None, None, None]
        targets = {"eps": lambda: noise, "v": lambda: a * noise - s * x0, "x0": lambda: x0}
        targets |= {"flow": lambda: noise - x0, "reverse_flow": lambda: x0 - noise}
        return Noised(a * x0 + s * noise, t, targets[schedule.prediction](), snr)

    def _run(self, model: Pipeline, noised: Noised, text: Mapping[str, Tensor], hint: Tensor | None) -> Tensor:
        """Return the network's prediction."""
        inputs: dict[str, Any] = {name: to_device(value, self._device) for name, value in text.items()}
        if "context" in inputs:
            inputs["context"] = inputs["context"].to(model.dtype)
        if self.control is not None:
            assert hint is not None
            embedded = self.control.embed_hint(to_device(hint, self._device).float() / 255)
            inputs["residuals"] = self.control(noised.x, noised.t, inputs["context"], embedded, inputs.get("y"))
        return model.unet(noised.x.to(model.dtype), noised.t, **inputs)

    def _errors(self, out: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mean squared errors (B,), weighted by the mask at each position."""
        squares = (out.to(torch.promote_types(out.dtype, torch.float32)) - target).square()
        if mask is not None:
            squares = squares * F.adaptive_avg_pool2d(
                to_device(mask, self._device).float() / 255, (squares.shape[2], squares.shape[3])
            )
        return squares.mean(dim=(1, 2, 3))


TIMESTEPS = 50  # of the teacher's DDIM: every 20th of 1000, so its steps skip 20
HUBER = 1e-3  # where squared errors become absolute ones


@dataclass
class ConsistencyLoss(DiffusionLoss):
    """Distillation into a LoRA that makes images in a few steps: LCM-LoRA.

    Pseudo-Huber distance of x0 at a noise level to the average's x0, one step of the guided base model later.

    The prediction of x0 is skip x + sqrt(1 - skip) x0 with skip = 1/4 / ((10 t)^2 + 1/4), as the sampler "lcm" has it:
    at timestep 0 it is x itself.  Luo et al. 2023a, "Latent Consistency Models", algorithm 1; 2023b, "LCM-LoRA".
    """

    guidance: float = 7.5  # w: that of the images, of which 0 is none (as a scale, w + 1)
    base: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # within it the model has no LoRA
    average: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # within it the LoRA is its EMA

    def _mean(self, batch: Batch, draws: Draws) -> Tensor:
        stride = len(self._a) // TIMESTEPS
        t = stride * (1 + draws.integers("timesteps", TIMESTEPS)) - 1
        now = self._noised(batch, draws, (t + 0.5) / len(self._a))
        all_kept = torch.zeros(len(t), dtype=torch.bool)
        text = read(self.model, batch, all_kept, self.empty)
        with torch.no_grad():
            with self.base():
                out = self._run(self.model, now, text, None)
                unguided = self._run(self.model, now, read(self.model, batch, ~all_kept, self.empty), None)
                out = out + self.guidance * (out - unguided)
            x0 = self._x0(now, out)
            (a, s), after = self._levels(now.t), (now.t - stride).clamp(min=0)
            next_a, next_s = self._levels(after)
            later = now._replace(x=next_a * x0 + next_s * (now.x - a * x0) / s, t=after)  # DDIM
            with self.average():
                target = self._mixed(later, self._run(self.model, later, text, None))
        prediction = self._mixed(now, self._run(self.model, now, text, None))
        return ((prediction - target).square() + HUBER**2).sqrt().mean() - HUBER

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and s (B,1,1,1) of timesteps (B,)."""
        return self._a[t][:, None, None, None], self._s[t][:, None, None, None]

    def _x0(self, noised: Noised, out: Tensor) -> Tensor:
        """Return x0 of the network's output."""
        (a, s), out = self._levels(noised.t), out.float()
        kinds = {"eps": lambda: (noised.x - s * out) / a, "v": lambda: a * noised.x - s * out, "x0": lambda: out}
        return kinds[self.model.schedule.prediction]()

    def _mixed(self, noised: Noised, out: Tensor) -> Tensor:
        """Return the consistency function's x0 of the network's output."""
        skip = 0.25 / ((10 * noised.t.float()).square() + 0.25)[:, None, None, None]
        return skip * noised.x + (1 - skip).sqrt() * self._x0(noised, out)


def read(
    model: Pipeline, batch: Batch, dropped: Tensor, empty: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return a batch's encoded captions, with gradients; those that `dropped` (B,) marks are empty.

    With `empty`, the embeddings of no caption, the batch brings its own embeddings.  A network that reads the guidance
    scale is given 1, as kohya does.
    """
    if empty is not None and batch.context is not None:
        encoded = {"context": batch.context, "y": batch.y}
        text = {
            name: torch.where(dropped.view(-1, *[1] * (values.ndim - 1)), empty[name], values.float())
            for name, values in encoded.items()
            if name in empty and values is not None
        }
    else:
        captions = [None if drop else caption for caption, drop in zip(batch.captions, dropped.tolist(), strict=True)]
        with model.phase(*(role for role in model.networks if role not in ("unet", "vae"))):
            text = encode_captions(model, captions, with_gradients=True)
    return network_inputs(model, text, batch.sizes)


def checkpoint_activations(network: nn.Module) -> contextlib.ExitStack:
    """Recompute the activations of each block in the backward pass.  Chen et al. 2016.

    Changes the network in place, until close() of the result or the end of its `with` block.
    """
    undo = contextlib.ExitStack()
    for block in blocks(network):
        if "forward" in vars(block):  # patched before
            undo.callback(setattr, block, "forward", block.forward)
        else:
            undo.callback(delattr, block, "forward")
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return undo


def moments(vae: AutoencoderKL, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance (B,C,h,w) of the latents of pixels x (B,3,H,W) in [-1,1]."""
    mean, deviation = vae.encode(x)
    return mean, 2 * deviation.clamp(min=math.exp(-15)).log()


@torch.no_grad()
def moments_of(vae: AutoencoderKL, pixels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and log variance (B,C,h,w) of the latents, from a batch's pixels or moments."""
    if pixels.dtype == torch.uint8:
        return moments(vae, to_float(pixels, device))
    mean, logvar = to_device(pixels, device).float().chunk(2, dim=1)
    return mean, logvar


# ---- validation -----------------------------------------------------------------------------------------------------

LEVELS = 4  # noise levels of each example
FIRST = 2**41  # number of the first example, so that no training example has its noise
GOLDEN = 0.618034  # fractions of its multiples are spread evenly


@dataclass(frozen=True)
class Validation:
    """Measures a loss on a dataset."""

    loss: DiffusionLoss
    dataset: Dataset
    batch: int
    every: int  # steps between measurements

    @torch.no_grad()
    def __call__(self) -> float:
        """Return the mean of the squared errors, unweighted, of all examples at LEVELS noise levels each.

        Each example has one level in each quarter of the training distribution.  Raises ValueError, OSError.
        """
        sums, rank, size = torch.zeros(2, dtype=torch.float64), distributed.rank(), distributed.world_size()
        parts = self.dataset.parts if isinstance(self.dataset, Buckets) else (self.dataset,)
        ranges = [divided_into(range(sum(part.shards or ())), self.batch) for part in parts]
        num_batches = sum(map(len, ranges))
        batches = (
            batch for part, of_part in zip(parts, ranges, strict=True) for batch in in_order(part, of_part, workers=0)
        )
        first = FIRST  # their numbers go through all parts
        for turn, batch in enumerate(filter(None, batches)):
            examples = range(first, first + len(batch.numbers))
            first = examples.stop
            # A process that gets no batch in the last round computes the last one too, uncounted: with divided weights
            # each needs all others.
            is_mine = turn % size == rank
            if not is_mine and not (turn == num_batches - 1 and turn % size < rank):
                continue
            for level in range(LEVELS):
                numbers = [LEVELS * example + level for example in examples]
                places = [(level + GOLDEN * (example - FIRST) % 1) / LEVELS for example in examples]
                errors = self.loss.errors(batch, Draws(0, numbers), torch.tensor(places, dtype=torch.float64))
                sums += is_mine * torch.tensor([float(errors.double().sum()), len(errors)], dtype=torch.float64)
        total, count = distributed.all_reduce_sum(sums).tolist()
        return total / count
