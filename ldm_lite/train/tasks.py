"""What is trained, and against which loss: an autoencoder, or a diffusion model with its text encoder.

A task owns its networks and says what a batch costs; the loop owns all else.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ldm_lite.diffusion.schedule import Schedule
from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.unet import Block, UNet
from ldm_lite.models.vae_kl import AutoencoderKL
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.train.data import to_float


class Task(Protocol):
    """Networks and their loss."""

    networks: dict[str, nn.Module]  # those that are trained, by name

    def loss(self, pixels: Tensor, captions: list[str], random: torch.Generator) -> Tensor:
        """pixels (B,3,R,R) uint8, B captions -> the loss (); all chance comes from the CPU generator `random`."""


@dataclass
class AutoencoderTask:
    """Pixels -> latents -> pixels: L1, L2 and the L1 of neighbours' differences, and a little KL to unit noise."""

    vae: AutoencoderKL
    train_encoder: bool = True  # else the decoder alone: latents stay what they are
    kl_weight: float = 1e-4

    def __post_init__(self) -> None:
        self.networks: dict[str, nn.Module] = {"vae": self.vae}

    def loss(self, pixels: Tensor, captions: list[str], random: torch.Generator) -> Tensor:
        """The loss of one batch; captions are not used."""
        device = next(self.vae.parameters()).device
        x = to_float(pixels, device)
        with torch.set_grad_enabled(self.train_encoder and torch.is_grad_enabled()):
            mean, logvar = self.vae.encode(x)
        noise = torch.randn(mean.shape, generator=random).to(device)
        y = self.vae.decode(mean + (logvar / 2).exp() * noise)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        edges = sum(F.l1_loss(y.diff(dim=dim), x.diff(dim=dim)) for dim in (2, 3))
        return F.l1_loss(y, x) + 0.5 * F.mse_loss(y, x) + 0.5 * edges + self.kl_weight * kl


@dataclass
class DiffusionTask:
    """Noised latents and a caption -> eps or v.  Rombach et al. 2022, eq. 3; Hang et al. 2023 for min-SNR weights."""

    unet: UNet
    text_encoder: CLIPTextEncoder
    vae: AutoencoderKL  # frozen
    schedule: Schedule
    scale_factor: float
    networks: dict[str, nn.Module]  # what is trained of them, or beside them
    caption_dropout: float
    min_snr: float | None
    tokens: int  # length that captions are cut or padded to

    def __post_init__(self) -> None:
        self._tokenizer = CLIPTokenizer(self.tokens)
        device = next(self.unet.parameters()).device
        alpha_bar = torch.tensor(self.schedule.alpha_bar, dtype=torch.float64)
        self._a, self._s = (value.sqrt().float().to(device) for value in (alpha_bar, 1 - alpha_bar))

    def loss(self, pixels: Tensor, captions: list[str], random: torch.Generator) -> Tensor:
        """The loss of one batch: mean squared error of the prediction at random timesteps.

        pixels may also be an Encoded source's moments (B,2C,h,w).
        """
        device = self._a.device
        with torch.no_grad():
            ready = pixels.dtype != torch.uint8  # encoded beforehand
            mean, logvar = (
                pixels.to(device).float().chunk(2, dim=1) if ready else self.vae.encode(to_float(pixels, device))
            )
        z, noise = (torch.randn(mean.shape, generator=random).to(device) for _ in range(2))
        x0 = self.scale_factor * (mean + (logvar / 2).exp() * z)
        t = torch.randint(len(self._a), (len(x0),), generator=random).to(device)
        a, s = self._a[t][:, None, None, None], self._s[t][:, None, None, None]

        dropped = torch.rand(len(captions), generator=random) < self.caption_dropout
        ids = self._tokenizer(
            ["" if drop else caption for caption, drop in zip(captions, dropped.tolist(), strict=True)]
        )
        out = self.unet(a * x0 + s * noise, t, self.text_encoder(ids.to(device)))
        target = {"eps": noise, "v": a * noise - s * x0, "x0": x0}[self.schedule.prediction]
        errors = (out.float() - target).square().mean(dim=(1, 2, 3))
        if self.min_snr is None:
            return errors.mean()
        snr = (self._a[t] / self._s[t]).square()
        capped = snr.clamp(max=self.min_snr)
        weight = {"eps": capped / snr, "v": capped / (snr + 1), "x0": capped}[self.schedule.prediction]
        return (weight * errors).mean()


def checkpoint_activations(unet: UNet) -> None:
    """Have each block recomputed in the backward pass, in place.  Chen et al. 2016."""
    for module in unet.modules():
        if isinstance(module, Block):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


@torch.no_grad()
def measure_scale(vae: AutoencoderKL, pixels: Tensor) -> float:
    """The factor that gives the latents of pixels (B,3,R,R) uint8 unit variance.  Rombach et al. 2022, app. G."""
    mean, logvar = vae.encode(to_float(pixels, next(vae.parameters()).device))
    return float(1 / (mean.var() + logvar.exp().mean()).sqrt())
