"""The noise schedule, in float64 on the CPU: alpha_bar, levels of noise, and the spacings of a sampler's steps.

Latents are kept in the variance-preserving scale x = a x0 + s eps with a = sqrt(alpha_bar), s = sqrt(1 - alpha_bar).
A sampler visits a descending list of such levels; a spacing makes that list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Prediction = Literal["eps", "v", "x0"]
Array = NDArray[np.float64]


class Level(NamedTuple):
    """One amount of noise: the timestep that the network is told, and x = a x0 + s eps."""

    t: float
    a: float
    s: float

    @property
    def sigma(self) -> float:
        """The same in the variance-exploding scale: y = x / a = x0 + sigma eps."""
        return self.s / self.a


CLEAN = Level(0.0, 1.0, 0.0)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What the network was trained with: alpha_bar (1000,), descending in [0,1), and what it predicts."""

    alpha_bar: Array
    prediction: Prediction

    @staticmethod
    def from_betas(betas: Array, prediction: Prediction) -> "Schedule":
        """betas (1000,) -> the schedule with alpha_bar = cumprod(1 - beta).  Ho et al. 2020, eq. 4."""
        return Schedule(np.cumprod(1.0 - betas, dtype=np.float64), prediction)

    @property
    def sigmas(self) -> Array:
        """sqrt((1 - alpha_bar) / alpha_bar), (1000,), ascending."""
        return np.sqrt((1.0 - self.alpha_bar) / self.alpha_bar)

    def at(self, t: int) -> Level:
        """The level of the integer timestep t in [0,1000)."""
        return Level(float(t), float(np.sqrt(self.alpha_bar[t])), float(np.sqrt(1.0 - self.alpha_bar[t])))

    def between(self, t: float) -> Level:
        """The level of a fractional timestep, log sigma interpolated linearly, as k-diffusion does."""
        index = np.arange(len(self.alpha_bar))
        return _from_sigma(t, float(np.exp(np.interp(t, index, np.log(self.sigmas)))))

    def at_sigma(self, sigma: float) -> Level:
        """The level of a sigma within the schedule's range, with its fractional timestep."""
        index = np.arange(len(self.alpha_bar), dtype=np.float64)
        return _from_sigma(float(np.interp(np.log(sigma), np.log(self.sigmas), index)), sigma)


def _from_sigma(t: float, sigma: float) -> Level:
    a = 1.0 / np.sqrt(1.0 + sigma**2)
    return Level(t, float(a), float(sigma * a))


def linear_betas(start: float, end: float, num: int = 1000) -> Array:
    """The betas of every LDM family, linear in their square roots: "linear" there, "scaled_linear" in diffusers."""
    return np.linspace(start**0.5, end**0.5, num, dtype=np.float64) ** 2


# ---- spacings: (schedule, steps) -> steps + 1 descending levels, the last of which is where sampling ends -----------


def leading(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps 1 + floor(i * 1000 / steps), ending at timestep 0: where steps divides 1000, the original scripts'.

    The original has exactly these for divisors of 1000; for other counts it takes another number of steps or fails.
    All 1000 timesteps (where 1 + 999 would be out of range) are 999 ... 0, ending clean.
    """
    num = len(schedule.alpha_bar)
    offset = 1 if steps < num else 0
    ts = [i * num // steps + offset for i in reversed(range(steps))]
    return [*(schedule.at(t) for t in ts), schedule.at(0) if offset else CLEAN]


def original(schedule: Schedule, steps: int) -> list[Level]:
    """The timesteps of the original scripts to the letter: range(0, 1000, 1000 // steps) + 1, whatever their number.

    Raises ValueError where the original raises IndexError.  CompVis ldm/modules/diffusionmodules/util.py.
    """
    num = len(schedule.alpha_bar)
    ts = [t + 1 for t in range(0, num, num // steps)]
    if ts[-1] >= num:
        raise ValueError(f"the original scripts fail with {steps} steps (timestep {ts[-1]}): take another number")
    return [*(schedule.at(t) for t in reversed(ts)), schedule.at(0)]


def linspace(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps), then clean: k-diffusion's default."""
    ts = np.linspace(len(schedule.alpha_bar) - 1, 0, steps)
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def karras(schedule: Schedule, steps: int, rho: float = 7.0) -> list[Level]:
    """Sigmas evenly spaced in sigma^(1/rho) over the schedule's range, then clean.  Karras et al. 2022, eq. 5."""
    low, high = schedule.sigmas[0] ** (1 / rho), schedule.sigmas[-1] ** (1 / rho)
    sigmas = np.linspace(high, low, steps) ** rho
    return [*(schedule.at_sigma(float(sigma)) for sigma in sigmas), CLEAN]


Spacing = Callable[[Schedule, int], list[Level]]
SPACINGS: dict[str, Spacing] = {"leading": leading, "original": original, "linspace": linspace, "karras": karras}
