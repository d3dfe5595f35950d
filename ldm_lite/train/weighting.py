"""Weights of the loss by noise level: fixed ones, by the signal-to-noise ratio, and learned ones.

A fixed weighting is named for the weight that it gives the error of x0.  The error of a network's own prediction is
that of x0 times SNR (eps), SNR + 1 (v) or 1 (x0), so it is divided by these.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Weighting = Callable[[Tensor, Tensor], Tensor]  # errors (B,) and SNR (B,) -> losses (B,)

LEAST, MOST = 1e-9, 1e9  # of SNR, which is 0 or infinite at the ends of some schedules


def uniform(errors: Tensor, snr: Tensor) -> Tensor:
    """The errors of the network's own prediction.  Ho et al. 2020, eq. 14."""
    return errors


def of_x0(kind: str, prediction: str, gamma: float = 5.0) -> Weighting:
    """Return a fixed weighting.

    "snr": SNR, as eps prediction has it.  Salimans and Ho 2022, sec. 4.  "min_snr": min(SNR, gamma).  Hang et al. 2023,
    sec. 3.4.  "debiased": sqrt(SNR).  Yu et al. 2023, sec. 4.
    """
    return partial(_weighted, kind, prediction, gamma)


def _weighted(kind: str, prediction: str, gamma: float, errors: Tensor, snr: Tensor) -> Tensor:
    snr = snr.clamp(LEAST, MOST)
    weight_of_x0 = {"snr": snr, "min_snr": snr.clamp(max=gamma), "debiased": snr.sqrt()}[kind]
    weight_there_is = {"eps": snr, "v": snr + 1, "x0": torch.ones_like(snr)}[prediction]
    return weight_of_x0 / weight_there_is * errors


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
        noise = -snr.clamp(LEAST, MOST).log() / 8
        features = math.sqrt(2) * torch.cos(noise[:, None] * self.frequencies + self.phases)
        return features @ self.weight / math.sqrt(len(self.weight))
