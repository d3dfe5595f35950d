"""Distillation of a diffusion model into a LoRA that makes images in a few steps: LCM-LoRA.

Luo et al. 2023a, "Latent Consistency Models", algorithm 1; Luo et al. 2023b, "LCM-LoRA".
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss, Noised

TIMESTEPS = 50  # of the teacher's DDIM: every 20th of 1000, so its steps skip 20
HUBER = 1e-3  # from squared to absolute errors


@dataclass
class ConsistencyLoss(DiffusionLoss):
    """Pseudo-Huber distance of x0 at a noise level to the average's x0, one step of the guided base model later.

    The prediction of x0 is skip x + sqrt(1 - skip) x0 with skip = 1/4 / ((10 t)^2 + 1/4), as the sampler "lcm" has it:
    at timestep 0 it is x itself.
    """

    guidance: float = 7.5  # w: that of the images, of which 0 is none (as a scale, w + 1)
    base: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # within it the model has no LoRA
    average: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # within it the LoRA is its EMA

    def _mean(self, batch: Batch, draws: Draws) -> Tensor:
        stride = len(self._a) // TIMESTEPS
        t = stride * (1 + draws.integers(TIMESTEPS)) - 1
        now = self._noised(batch, draws, (t + 0.5) / len(self._a))
        all_kept = torch.zeros(len(t), dtype=torch.bool)
        text = self._read(batch, all_kept)
        with torch.no_grad():
            with self.base():
                out = self._run(self.model, now, text, None)
                out = out + self.guidance * (out - self._run(self.model, now, self._read(batch, ~all_kept), None))
            x0 = self._x0(now, out)
            (a, s), after = self._levels(now.t), (now.t - stride).clamp(min=0)
            next_a, next_s = self._levels(after)
            later = now._replace(x=next_a * x0 + next_s * (now.x - a * x0) / s, t=after)  # DDIM
            with self.average():
                target = self._mixed(later, self._run(self.model, later, text, None))
        found = self._mixed(now, self._run(self.model, now, text, None))
        return ((found - target).square() + HUBER**2).sqrt().mean() - HUBER

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
