"""Losses, with the networks they train: an autoencoder, or a diffusion model with its text encoder.

A loss owns the trained networks and computes the loss of a batch; the trainer does everything else.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import encode_prompts, guided
from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.unet import Block
from ldm_lite.models.vae_kl import AutoencoderKL
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.data import to_float


class Loss(Protocol):
    """The networks to train, and the loss of a batch."""

    networks: dict[str, nn.Module]  # the trained networks, by name; every parameter that requires a gradient gets one

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss () of a batch: the mean of its examples' losses.

        All random numbers come from `draws`, so that they do not depend on how examples are batched.
        """


@dataclass
class AutoencoderLoss:
    """Reconstruction: L1, 0.5 L2, 0.5 L1 of the differences of neighbouring pixels, and a small KL term."""

    vae: AutoencoderKL
    train_encoder: bool = True  # False: train only the decoder, so that latents do not change
    kl_weight: float = 1e-4

    def __post_init__(self) -> None:
        self.networks: dict[str, nn.Module] = {"vae": self.vae}
        self.vae.requires_grad_(self.train_encoder)
        for part in (self.vae.decoder, self.vae.post_quant_conv):
            part.requires_grad_(True)

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch; captions are ignored."""
        device = next(self.vae.parameters()).device
        x = to_float(batch.pixels, device)
        with torch.set_grad_enabled(self.train_encoder and torch.is_grad_enabled()):
            mean, logvar = self.vae.encode(x)
        noise = draws.normal(mean.shape[1:]).to(device)
        y = self.vae.decode(mean + (logvar / 2).exp() * noise)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        edges = sum(F.l1_loss(y.diff(dim=dim), x.diff(dim=dim)) for dim in (2, 3))
        return F.l1_loss(y, x) + 0.5 * F.mse_loss(y, x) + 0.5 * edges + self.kl_weight * kl


@dataclass
class DiffusionLoss:
    """Mean squared error of the prediction (eps, v, x0 or a flow's velocity) at random timesteps.

    Timesteps are uniform; of a rectified flow s is logit-normal, then shifted as in sampling.  Rombach et al. 2022,
    eq. 3; Hang et al. 2023 for min-SNR weights; Esser et al. 2024, sec. 3.1.
    """

    model: Model  # with a KL autoencoder, which stays frozen, and a CLIP-L text encoder
    networks: dict[str, nn.Module]  # the model's trained networks, or a LoRA attached to it
    caption_dropout: float = 0.0  # share of captions replaced by the empty one
    min_snr: float | None = None  # gamma
    tokens: int | None = None  # captions are cut or padded to this length; default: the text encoder's
    empty: Tensor | None = None  # (T,D), the empty caption: batches bring their text embeddings, no encoder runs

    def __post_init__(self) -> None:
        vae, text = self.model.vae, self.model.text_encoder
        assert isinstance(vae, AutoencoderKL)
        assert isinstance(text, CLIPTextEncoder)
        self._vae, self._text = vae, text
        self._tokenizer = CLIPTokenizer(text.spec.length if self.tokens is None else self.tokens)
        self._device = next(self.model.unet.parameters()).device
        alpha_bar = torch.tensor(self.model.schedule.alpha_bar, dtype=torch.float64)
        self._a, self._s = (value.sqrt().float().to(self._device) for value in (alpha_bar, 1 - alpha_bar))

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch."""
        mean, logvar = moments(self._vae, batch.pixels, self._device)
        z, noise = (draws.normal(mean.shape[1:]).to(mean.device) for _ in range(2))
        family = self.model.family
        x0 = family.scale_factor * (mean + (logvar / 2).exp() * z - family.shift_factor)
        if self.model.schedule.is_flow:
            return self._of_flow(x0, noise, batch, draws)
        t = draws.integers(len(self._a)).to(x0.device)
        a, s = self._a[t][:, None, None, None], self._s[t][:, None, None, None]

        context = self._context(batch, draws.uniform() < self.caption_dropout)
        out = self.model.unet(a * x0 + s * noise, t, context)
        target = {"eps": noise, "v": a * noise - s * x0, "x0": x0}[self.model.schedule.prediction]
        errors = (out.float() - target).square().mean(dim=(1, 2, 3))
        return errors.mean() if self.min_snr is None else (self._weights(t, self.min_snr) * errors).mean()

    def _context(self, batch: Batch, dropped: Tensor) -> Tensor:
        """Return the text embeddings (B,T,D) of a batch's captions, the dropped ones (B,) replaced by the empty one."""
        if self.empty is not None and batch.context is not None:
            return torch.where(dropped[:, None, None], self.empty, batch.context).to(self._device).float()
        captions = [self._tokenizer.clean(caption) for caption in _without(batch.captions, dropped)]
        return self._text(self._tokenizer(captions).to(self._device))

    def _of_flow(self, x0: Tensor, noise: Tensor, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of the velocity; a network that reads the guidance scale is given 1, as kohya does."""
        model = self.model.sized((x0.shape[1], x0.shape[2], x0.shape[3]))
        levels = [model.schedule.between(1000 * float(share) - 1) for share in torch.sigmoid(draws.normal().double())]
        captions = _without(batch.captions, draws.uniform() < self.caption_dropout)
        with torch.no_grad():
            (text,) = guided(model, encode_prompts(model, captions), None, 1.0).conditionings
        t = torch.tensor([model.schedule.time(level) for level in levels], dtype=torch.float32).to(x0.device)
        s = torch.tensor([level.s for level in levels], dtype=torch.float32).to(x0.device)[:, None, None, None]
        more = {name: value.to(x0.device) for name, value in (text.inputs or {}).items()}
        out = model.unet((1 - s) * x0 + s * noise, t, text.context, text.y, **more)
        target = {"flow": noise - x0, "reverse_flow": x0 - noise}[model.schedule.prediction]
        return (out.float() - target).square().mean()

    def _weights(self, t: Tensor, gamma: float) -> Tensor:
        """Return the min-SNR weights (B,) of timesteps (B,)."""
        snr = (self._a[t] / self._s[t]).square()
        capped = snr.clamp(max=gamma)
        return {"eps": capped / snr, "v": capped / (snr + 1), "x0": capped}[self.model.schedule.prediction]


def _without(captions: Sequence[str], dropped: Tensor) -> list[str]:
    """Return the captions, the dropped ones (B,) replaced by the empty one."""
    return ["" if drop else caption for caption, drop in zip(captions, dropped.tolist(), strict=True)]


def checkpoint_activations(unet: nn.Module) -> contextlib.ExitStack:
    """Recompute the activations of each block in the backward pass.  Chen et al. 2016.

    Changes the UNet in place, until close() of the result or the end of its `with` block.
    """
    undo = contextlib.ExitStack()
    for module in unet.modules():
        if isinstance(module, Block):
            if "forward" in vars(module):  # patched before
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return undo


@torch.no_grad()
def moments(vae: AutoencoderKL, pixels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and log variance (B,C,h,w) of the latents, from a batch's pixels or moments."""
    if pixels.dtype == torch.uint8:
        return vae.encode(to_float(pixels, device))
    mean, logvar = pixels.to(device).float().chunk(2, dim=1)
    return mean, logvar


@torch.no_grad()
def measure_scale(vae: AutoencoderKL, pixels: Tensor) -> float:
    """Return the factor that scales the latents of a batch's pixels to unit variance.  Rombach 2022, app. G."""
    mean, logvar = moments(vae, pixels, next(vae.parameters()).device)
    return float(1 / (mean.var() + logvar.exp().mean()).sqrt())
