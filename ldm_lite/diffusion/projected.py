"""Adaptive projected guidance (APG): guidance whose part along the conditional image is weakened.

High scales then saturate less.  Sadat et al. 2025, "Eliminating oversaturation and artifacts of high guidance scales",
alg. 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.core.denoise import Outputs, weighted


@dataclass(frozen=True)
class Projection:
    """Settings of APG; the defaults with threshold 0 and parallel 1 would be classifier-free guidance.

    `parallel` is the weight of the part along the conditional x0 (eta in the paper), `threshold` the greatest norm of
    the difference of an image's two predictions (r; 0 is none), `momentum` the weight of earlier ones (beta).
    """

    parallel: float = 0.0
    threshold: float = 0.0
    momentum: float = 0.0

    def begin(self) -> "Projected":
        """Return what guides one run: it remembers the differences of the steps before."""
        return Projected(self)


class Projected:
    """APG in one run."""

    def __init__(self, settings: Projection) -> None:
        self.settings = settings
        self._average: Tensor | None = None  # (B,C,h,w)

    def __call__(self, outputs: Outputs) -> Tensor:
        """Return the guided output (B,C,h,w) of uncond and cond.  As in the paper it is x0 that is guided."""
        if len(outputs.outs) == 1:
            return weighted(outputs)
        uncond, cond = (outputs.to_x0(out) for out in outputs.outs)
        update = self._update(cond, cond - uncond)
        return outputs.from_x0(cond + (outputs.weights[-1] - 1) * update)

    def _update(self, cond: Tensor, difference: Tensor) -> Tensor:
        parallel, threshold, momentum = self.settings.parallel, self.settings.threshold, self.settings.momentum
        if momentum:
            difference = difference if self._average is None else difference + momentum * self._average
            self._average = difference
        if threshold > 0:
            norm = difference.flatten(1).norm(dim=1)[:, None, None, None]  # (B, 1, 1, 1)
            difference = difference * torch.clamp(threshold / norm, max=1)
        direction = F.normalize(cond.flatten(1), dim=1).view_as(cond)
        along = (difference * direction).sum(dim=(1, 2, 3), keepdim=True) * direction
        return difference + (parallel - 1) * along
