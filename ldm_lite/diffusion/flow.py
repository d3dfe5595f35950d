"""Rectified flows: x = (1 - s) x0 + s eps with s from 1 to 0, for networks that predict the velocity, eps - x0.

Samplers in y = x / a and sigma = s / a read their levels as they are; solvers of the flow's own ODE, dx/ds = (x - x0)
/ s, read those of `straight`.  Liu et al. 2023; Esser et al. 2024, sec. 2 and 5.3.2.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ldm_lite.core import schedule as core
from ldm_lite.diffusion.schedule import AnyPrediction, Array, Level, NoiseSchedule

Clock = Literal["s", "1000 s", "1 - s"]  # what the network is given of the level

NUM_TIMESTEPS = 1000
NOISIEST = 1e-6  # the least 1 - s of samplers in y = x / a, as in diffusers


class StraightLevel(Level):
    """A level as a rectified flow's own ODE sees it: x is not scaled, and sigma is s."""

    @property
    def scale(self) -> float:
        """The divisor of x."""
        return 1.0


@dataclass(frozen=True, eq=False)
class FlowSchedule(NoiseSchedule):
    """A rectified flow: timestep t in [-1,999] has s = shifted((t + 1) / 1000); its levels' t is what `clock` says.

    alpha_bar belongs to the variance-preserving levels with the same signal-to-noise ratios.
    """

    shift: float = 1.0  # above 1: more of the steps at high noise
    by_size: tuple[float, float] | None = None  # log of the shift for 256 and for 4096 tokens; None: `shift` for all
    clock: Clock = "s"
    predictions: ClassVar[tuple[str, ...]] = ("flow", "reverse_flow")
    is_flow = True

    @staticmethod
    def of(
        shift: float = 1.0,
        by_size: tuple[float, float] | None = None,
        clock: Clock = "s",
        prediction: AnyPrediction = "flow",
        spacing: str = "flow",
    ) -> "FlowSchedule":
        """The schedule of a shift above 0.  Raises ValueError for any other."""
        if not 0 < shift < math.inf:
            raise ValueError(f"got shift {shift:g}, expected a number above 0")
        s = shifted(np.arange(1, NUM_TIMESTEPS + 1) / NUM_TIMESTEPS, shift)
        alpha_bar = (1 - s) ** 2 / ((1 - s) ** 2 + s**2)
        return FlowSchedule(alpha_bar, prediction, spacing, shift, by_size, clock)

    def sized(self, tokens: int) -> "FlowSchedule":
        """The schedule of images of so many tokens (patches of the latents): log of the shift is linear in them."""
        if self.by_size is None:
            return self
        low, high = self.by_size
        mu = low + (high - low) * (tokens - 256) / (4096 - 256)
        return FlowSchedule.of(math.exp(mu), self.by_size, self.clock, self.prediction, self.spacing or "flow")

    @cached_property
    def straight(self) -> "StraightFlow":
        """This flow for solvers of its own ODE."""
        return StraightFlow(*(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def sigmas(self) -> Array:
        """s / (1 - s), (1000,), ascending, at most 1e6."""
        s = np.minimum(self.straight.sigmas, 1 - NOISIEST)
        return s / (1 - s)

    def at(self, t: int) -> Level:
        """The level of the integer timestep t in [0,1000)."""
        return self.between(t)

    def between(self, t: float) -> Level:
        """The level of a fractional timestep."""
        return self.at_noise(float(shifted(np.array((t + 1) / NUM_TIMESTEPS), self.shift)))

    def timestep(self, s: float) -> float:
        """The fractional timestep of s in [0,1]: the inverse of `between`."""
        return float(NUM_TIMESTEPS * shifted(np.array(s), 1 / self.shift)) - 1

    def at_noise(self, s: float) -> Level:
        """The level of s in [0,1]."""
        return Level({"s": s, "1000 s": 1000 * s, "1 - s": 1 - s}[self.clock], 1 - s, s)

    def at_sigma(self, sigma: float) -> Level:
        """The level of a sigma = s / (1 - s); s is 0.9999 for an infinite one, as in ComfyUI's DPM++ 2S a."""
        sigma = 9999.0 if math.isinf(sigma) else sigma
        return self.at_noise(sigma / (1 + sigma))

    def finite(self, levels: list[Level], least: float = NOISIEST) -> list[Level]:
        """Levels without an infinite sigma: the first has a 1 - s of `least`, or half of the second's."""
        least = min(least, levels[1].a / 2)
        return [self.at_noise(1 - least) if levels[0].a < least else levels[0], *levels[1:]]

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The target of the network for noised(x0, eps, t): the velocity, or its opposite."""
        return eps - x0 if self.prediction == "flow" else x0 - eps

    def coefficients(self, quantity: str, level: Level) -> tuple[float, float]:
        """Return (p, q) with quantity = p x + q out, for the network's output; it is "flow", "eps" or "x0"."""
        p, q = {"flow": (0.0, 1.0), "eps": (1.0, 1 - level.s), "x0": (1.0, -level.s)}[quantity]
        return p, q if self.prediction == "flow" else -q

    def levels_at(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - s and s (B,1,1,1) of timesteps t (B,), in the dtype and on the device of another tensor."""
        s = np.array([self.between(step).s for step in t.tolist()])[:, None, None, None]
        return like.new_tensor(1 - s), like.new_tensor(s)


class StraightFlow(FlowSchedule):
    """A rectified flow for solvers of its own ODE, dx/ds = (x - x0) / s: x is not scaled, and sigma is s."""

    @cached_property
    def sigmas(self) -> Array:
        """The timesteps' s, (1000,), ascending, to 1."""
        return np.append(shifted(np.arange(1, NUM_TIMESTEPS) / NUM_TIMESTEPS, self.shift), 1.0)

    def at_noise(self, s: float) -> Level:
        """The level of s in [0,1]."""
        return StraightLevel(*super().at_noise(s))

    def at_sigma(self, sigma: float) -> Level:
        """The same, since sigma is s."""
        return self.at_noise(sigma)

    def finite(self, levels: list[Level], least: float = 0.0) -> list[Level]:
        """Levels for the ODE, which is defined at pure noise too."""
        return [StraightLevel(*level) for level in levels]


def straightened(schedule: core.Schedule) -> core.Schedule:
    """The schedule that solvers of the ODE in sigma read: for a rectified flow `straight`, otherwise itself."""
    return schedule.straight if isinstance(schedule, FlowSchedule) else schedule


def shifted(s: Array, shift: float) -> Array:
    """Return shift s / (1 + (shift - 1) s), in [0,1] as s; 1 / shift undoes it.  Esser et al. 2024, eq. 23."""
    return shift * s / (1 + (shift - 1) * s)
