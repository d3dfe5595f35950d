"""apg: adaptive projected guidance, whose part along the conditional image is weakened.

High scales then saturate less.  Sadat et al. 2025, "Eliminating oversaturation and artifacts of high guidance scales",
alg. 1.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.core.denoise import Combine, InputSource, Outputs, weighted
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import check_classifier_free, stateless
from ldm_lite.diffusion.schedule import number
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class AdaptiveProjectedGuidance(Feature):
    """Replaces the guidance."""

    stage: ClassVar = "guidance"
    topic: ClassVar = "guidance"
    excludes: ClassVar = ("compat",)
    apg: str | None = option(
        None,
        "adaptive projected guidance, against saturation at high scales: parallel=0[:threshold=15][:momentum=-0.5]",
        metavar="SETTINGS",
        png="APG",
        reads=lambda text: read_projection(text),
    )

    def change_job(self, job: TaskJob) -> TaskJob:
        """Raises ValueError for an adaptive sampler."""
        if isinstance(job.plan, AdaptivePlan):
            raise ValueError("DPM adaptive tries steps again, which `apg` would remember: use another sampler")

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            check_classifier_free(job, "apg")
            combine = self.reading("apg").begin(job.model.device)
            return lambda call: source(call).combined_by(combine)

        return dataclasses.replace(job, guiding=(*job.guiding, wrap))


@dataclass(frozen=True)
class Projection:
    """Settings of APG; the defaults with threshold 0 and parallel 1 would be classifier-free guidance.

    `parallel` is the weight of the part along the conditional x0 (eta in the paper), `threshold` the maximum norm of
    the difference of an image's two predictions (r; 0 is none), `momentum` the weight of earlier ones (beta).
    """

    parallel: float = 0.0
    threshold: float = 0.0
    momentum: float = 0.0

    def begin(self, device: torch.device | None = None) -> Combine:
        """Return the guidance of one run; with momentum it remembers the differences of the steps before."""
        settings = self.parallel, self.threshold or math.inf
        return projecting(*settings, device) if self.momentum == 0 else Remembering(*settings, self.momentum)


# The same function for the same numbers, which are tensors: one compiled step serves all.
@functools.lru_cache(maxsize=64)
def projecting(parallel: float, threshold: float, device: torch.device | None) -> Combine:
    """Return APG without momentum, whose result depends on the outputs alone."""
    values = torch.tensor([parallel, threshold], device=device)  # float32, like the outputs: MPS has no float64

    @stateless
    def project(outputs: Outputs) -> Tensor:
        return projected(outputs, lambda difference: difference, *values.to(outputs.outs.dtype))

    return project


class Remembering:
    """APG with momentum, in one run."""

    def __init__(self, parallel: float, threshold: float, momentum: float) -> None:
        self._settings, self._momentum = (parallel, threshold), momentum
        self._average: Tensor | None = None  # (B,C,h,w)

    def __call__(self, outputs: Outputs) -> Tensor:
        """Return the guided output, as `projected` does."""
        return projected(outputs, self._averaged, *self._settings)

    def _averaged(self, difference: Tensor) -> Tensor:
        earlier = 0 if self._average is None else self._momentum * self._average
        self._average = difference + earlier
        return self._average


def projected(
    outputs: Outputs, averaged: Callable[[Tensor], Tensor], parallel: float | Tensor, threshold: float | Tensor
) -> Tensor:
    """Return the guided output (B,C,h,w) of uncond and cond.  As in the paper it is x0 that is guided."""
    if len(outputs.outs) == 1:
        return weighted(outputs)
    uncond, cond = (outputs.to_x0(out) for out in outputs.outs)
    difference = averaged(cond - uncond)
    norm = difference.flatten(1).norm(dim=1)[:, None, None, None]  # (B, 1, 1, 1)
    difference = difference * torch.clamp(threshold / norm, max=1)
    direction = F.normalize(cond.flatten(1), dim=1).view_as(cond)
    along = (difference * direction).sum(dim=(1, 2, 3), keepdim=True) * direction
    update = difference + (parallel - 1) * along
    return outputs.from_x0(cond + (outputs.weights[-1] - 1) * update)


def read_projection(text: str) -> Projection:
    """Read "parallel=0:threshold=15:momentum=-0.5".  Raises ValueError for other text."""
    known = {setting.name for setting in dataclasses.fields(Projection)}
    settings: dict[str, float] = {}
    for part in text.split(":"):
        name, _, value = part.partition("=")
        try:
            settings[name] = number(value)
        except ValueError:
            settings[""] = math.nan
    if not set(settings) <= known or settings.get("threshold", 0) < 0 or abs(settings.get("momentum", 0)) >= 1:
        raise ValueError(
            f"got `apg` {text!r:.60}, expected parallel=0, with :threshold=NUMBER, 0 or more, and "
            ":momentum=NUMBER between -1 and 1"
        )
    return Projection(**settings)
