"""Rectified flow: x = (1 - s) x0 + s eps with s from 1 to 0, for networks that predict its velocity, eps - x0.

The samplers are those of samplers.py.  One written for y = x / a and sigma = s / a reads these levels as they are.
Solvers of the ODE dx/ds = (x - x0) / s read them as `Straight`: x itself, and sigma = s.
Liu et al. 2023; Esser et al. 2024, sec. 2 and 5.3.2.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ldm_lite.diffusion import spacings  # noqa: F401  registers them
from ldm_lite.diffusion.schedule import CLEAN, SPACINGS, Array, Level, Prediction, Schedule

NUM = 1000
NOISIEST = 1e-6  # the least 1 - s of samplers in y = x / a, as in diffusers

Clock = Literal["s", "1000 s", "1 - s"]  # the time that a network is given
# Spacings that only need a range of noise levels or of timesteps; the others are made for Stable Diffusion's betas.
GENERAL = {"flow", "flow_sd3", "trailing", "linspace", "sgm_uniform", "normal", "simple", "beta", "beta_sigma", "turbo"}
GENERAL |= {"karras", "exponential", "polyexponential"}


class Straight(Level):
    """A level as the flow's own ODE sees it: x is not scaled, and sigma is s."""

    @property
    def scale(self) -> float:
        """What x is divided by."""
        return 1.0


@dataclass(frozen=True, eq=False)
class FlowSchedule(Schedule):
    """The levels of a rectified flow: timestep t in [-1,999] is s = shifted((t + 1) / 1000).

    alpha_bar is that of the variance-preserving levels with the same signal-to-noise ratios.
    """

    shift: float = 1.0  # above 1: more of the steps at high noise
    by_size: tuple[float, float] | None = None  # log of the shift for 256 and for 4096 tokens; None: `shift` for all
    clock: Clock = "s"

    @staticmethod
    def of(
        shift: float = 1.0,
        by_size: tuple[float, float] | None = None,
        clock: Clock = "s",
        prediction: Prediction = "flow",
        spacing: str = "flow",
    ) -> "FlowSchedule":
        """The schedule of a shift above 0.  Raises ValueError for any other."""
        if not 0 < shift < math.inf:
            raise ValueError(f"got shift {shift:g}, wanted a number above 0")
        s = shifted(np.arange(1, NUM + 1) / NUM, shift)
        alpha_bar = (1 - s) ** 2 / ((1 - s) ** 2 + s**2)
        return FlowSchedule(alpha_bar, prediction, spacing, shift, by_size, clock)

    def sized(self, tokens: int) -> "FlowSchedule":
        """The schedule of images of so many tokens (patches of the latents): log of the shift is linear in them."""
        if self.by_size is None:
            return self
        low, high = self.by_size
        mu = low + (high - low) * (tokens - 256) / (4096 - 256)
        return FlowSchedule.of(math.exp(mu), self.by_size, self.clock, self.prediction, self.spacing or "flow")

    @property
    def is_flow(self) -> bool:
        """True."""
        return True

    @cached_property
    def sigmas(self) -> Array:
        """s / (1 - s), (1000,), ascending, at most 1e6."""
        s = np.minimum(shifted(np.arange(1, NUM + 1) / NUM, self.shift), 1 - NOISIEST)
        return s / (1 - s)

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest s of the timesteps."""
        return float(shifted(np.array(1 / NUM), self.shift)), 1.0

    def zero_terminal_snr(self) -> Schedule:
        """Itself: the flow starts at pure noise."""
        return self

    def at(self, t: int) -> Level:
        """The level of the integer timestep t in [0,1000)."""
        return self.between(t)

    def between(self, t: float) -> Level:
        """The level of a fractional timestep."""
        s = float(shifted(np.array((t + 1) / NUM), self.shift))
        return Level(float(t), 1 - s, s)

    def at_sigma(self, sigma: float) -> Level:
        """The level of a sigma = s / (1 - s); s is 0.9999 for an infinite one, as in ComfyUI's DPM++ 2S a."""
        sigma = 9999.0 if math.isinf(sigma) else sigma
        return self.at_noise(sigma / (1 + sigma))

    def at_noise(self, noise: float) -> Level:
        """The level of s in [0,1]."""
        return Level(float(NUM * shifted(np.array(noise), 1 / self.shift)) - 1, 1 - noise, noise)

    def finite(self, levels: list[Level], least: float = NOISIEST) -> list[Level]:
        """Levels without an infinite sigma: the first has a 1 - s of `least`, or half of the second's."""
        least = min(least, levels[1].a / 2)
        return [self.at_noise(1 - least) if levels[0].a < least else levels[0], *levels[1:]]

    def straight(self, levels: list[Level]) -> list[Level]:
        """Levels for solvers of the ODE."""
        return [Straight(*level) for level in levels]

    def beside(self, level: Level, sigma: float) -> Level:
        """The level of a sigma of the same kind as that of another level."""
        return Straight(*self.at_noise(sigma)) if isinstance(level, Straight) else self.at_sigma(sigma)

    def below(self, now: Level, after: Level, eta: float) -> tuple[Level, float, float]:
        """Return (level, factor, noise): step from `now` down to the level, times the factor, plus noise, is `after`.

        ComfyUI's choice of the level, sample_euler_ancestral_RF.
        """
        s = after.s * (1 + (after.s / now.s - 1) * eta)
        factor = after.a / (1 - s)
        return Straight(after.t, 1 - s, s), factor, math.sqrt(max(0.0, after.s**2 - (factor * s) ** 2))

    def time(self, level: Level) -> float:
        """What the network is given at a level."""
        return {"s": level.s, "1000 s": 1000 * level.s, "1 - s": 1 - level.s}[self.clock]

    def check(self, spacing: str) -> None:
        """Raises ValueError for a spacing of the name that is made for another noise process."""
        if spacing in _MADE_FOR_BETAS:
            raise ValueError(
                f"the spacing {spacing} is not for rectified flow: take one of {', '.join(sorted(GENERAL))}"
            )


def shifted(t: Array, shift: float) -> Array:
    """Return s = shift t / (1 + (shift - 1) t), in [0,1] as t; 1 / shift undoes it.  Esser et al. 2024, eq. 23."""
    return shift * t / (1 + (shift - 1) * t)


def _with_shift(schedule: Schedule, shift: float | None) -> FlowSchedule:
    """The schedule with another shift, if one is given.  Raises ValueError for another noise process."""
    if not isinstance(schedule, FlowSchedule):
        raise ValueError("this spacing is for rectified flow (FLUX, Stable Diffusion 3): leave it out")
    return schedule if shift is None else replace(FlowSchedule.of(shift), clock=schedule.clock)


def flow(schedule: Schedule, steps: int, shift: float | None = None) -> list[Level]:
    """s even from 1 to 0, shifted: FLUX and Z-Image; "simple" in ComfyUI if steps divides 1000."""
    own = _with_shift(schedule, shift)
    return [own.at_noise(float(s)) for s in shifted(np.linspace(1, 0, steps + 1), own.shift)]


def flow_sd3(schedule: Schedule, steps: int, shift: float | None = None) -> list[Level]:
    """s even from 1 to the least of the shifted timesteps, shifted again, then 0: Stable Diffusion 3 and diffusers.

    stabilityai sd3_infer.py, get_sigmas.
    """
    own = _with_shift(schedule, shift)
    return [*(own.at_noise(float(s)) for s in shifted(np.linspace(1, own.span[0], steps), own.shift)), CLEAN]


_MADE_FOR_BETAS = SPACINGS.keys() - GENERAL
SPACINGS |= {"flow": flow, "flow_sd3": flow_sd3}
