"""The noise schedule, in float64 on the CPU: alpha_bar, levels of noise, and the spacings of a sampler's steps.

Latents are kept in the variance-preserving scale x = a x0 + s eps with a = sqrt(alpha_bar), s = sqrt(1 - alpha_bar).
A sampler visits a descending list of such levels; a spacing makes that list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    def betas(self) -> Array:
        """1 - alpha_bar[t] / alpha_bar[t-1], (1000,): what from_betas would take."""
        return 1.0 - self.alpha_bar / np.concatenate([[1.0], self.alpha_bar[:-1]])

    @cached_property
    def sigmas(self) -> Array:
        """sqrt((1 - alpha_bar) / alpha_bar), (1000,), ascending, at most 4096 (zero terminal SNR has infinity)."""
        return np.sqrt((1.0 - self.alpha_bar) / np.maximum(self.alpha_bar, 2.0**-24))

    def zero_terminal_snr(self) -> "Schedule":
        """The same with sqrt(alpha_bar) shifted and scaled to end at exactly 0.  Lin et al. 2024, alg. 1.

        Raises ValueError for eps prediction, which says nothing about x0 there.
        """
        if self.prediction == "eps":
            raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
        a = np.sqrt(self.alpha_bar)
        return Schedule(((a - a[-1]) * a[0] / (a[0] - a[-1])) ** 2, self.prediction)

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


def cosine_betas(num: int = 1000) -> Array:
    """Betas of alpha_bar = cos^2((t + 0.008) / 1.008 * pi / 2), at most 0.999.  Nichol and Dhariwal 2021, eq. 17."""
    alpha_bar = np.cos((np.arange(num + 1) / num + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


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


def trailing(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps 999, ... counted down by 1000 / steps, then clean.  Lin et al. 2024, sec. 3.3.

    Halves are rounded to even, as in diffusers.
    """
    num = len(schedule.alpha_bar)
    ts = np.round(np.arange(num, 0, -num / steps)[:steps]).astype(int) - 1
    return [*(schedule.at(int(t)) for t in ts), CLEAN]


def lcm(schedule: Schedule, steps: int) -> list[Level]:
    """A choice of the 50 timesteps 999, 979, ... that LCMs were distilled at; more steps than those: trailing."""
    if steps > 50:
        return trailing(schedule, steps)
    stride = len(schedule.alpha_bar) // 50
    chosen = np.floor(np.linspace(0, 50, steps, endpoint=False)).astype(int)
    return [*(schedule.at(int(t)) for t in (50 - chosen) * stride - 1), CLEAN]


def linspace(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps), then clean: k-diffusion's default."""
    ts = np.linspace(len(schedule.alpha_bar) - 1, 0, steps)
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def sgm_uniform(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps + 1) without the last, then clean: as sgm does."""
    ts = np.linspace(len(schedule.alpha_bar) - 1, 0, steps + 1)[:-1]
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def beta(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps dense at both ends: quantiles of the Beta(0.6, 0.6) distribution, then clean.  Lee et al. 2024.

    Fractional where ComfyUI rounds, so that no two coincide.
    """
    # The distribution function by the trapezoid rule over u = x^0.6, in which the density is smooth up to 1/2.
    u = np.linspace(0, 0.5**0.6, 20001)
    x = u ** (1 / 0.6)
    density = (1 - x) ** -0.4
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    x, mass = np.concatenate([x, 1 - x[-2::-1]]), np.concatenate([mass, 2 * mass[-1] - mass[-2::-1]]) / (2 * mass[-1])
    quantiles = np.interp(1 - np.linspace(0, 1, steps, endpoint=False), mass, x)
    return [*(schedule.between(float(q * (len(schedule.alpha_bar) - 1))) for q in quantiles), CLEAN]


def karras(schedule: Schedule, steps: int, rho: float = 7.0) -> list[Level]:
    """Sigmas evenly spaced in sigma^(1/rho) over the schedule's range, then clean.  Karras et al. 2022, eq. 5."""
    low, high = schedule.sigmas[0] ** (1 / rho), schedule.sigmas[-1] ** (1 / rho)
    sigmas = np.linspace(high, low, steps) ** rho
    return [*(schedule.at_sigma(float(sigma)) for sigma in sigmas), CLEAN]


def exponential(schedule: Schedule, steps: int) -> list[Level]:
    """Sigmas evenly spaced in log sigma over the schedule's range, then clean.  k-diffusion."""
    sigmas = np.exp(np.linspace(np.log(schedule.sigmas[-1]), np.log(schedule.sigmas[0]), steps))
    return [*(schedule.at_sigma(float(sigma)) for sigma in sigmas), CLEAN]


# DeepFloyd IF's tables: how many timesteps each of as many equal parts of the schedule gives, the cleanest first.
SECTIONS = {
    "fast27": (10, 10, 3, 2, 2),
    "smart27": (7, 4, 2, 1, 2, 4, 7),
    "smart50": (10, 6, 4, 3, 2, 2, 3, 4, 6, 10),
    "smart100": (1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 10, 13),
    "smart185": (1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20),
    "super27": (1, 1, 1, 1, 1, 1, 1, 2, 5, 13),
    "super40": (2, 2, 2, 2, 2, 2, 3, 4, 6, 15),
    "super100": (4, 4, 6, 6, 8, 8, 10, 10, 14, 30),
}


def respaced(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps evenly from 999 to 0 (0 alone for one step), rounded, then clean: DeepFloyd IF's plain numbers."""
    return _in_sections(schedule, (steps,))


def _table(name: str) -> "Spacing":
    """The spacing of one of SECTIONS, which has as many steps as it has.  deepfloyd_if/model/respace.py."""
    counts = SECTIONS[name]

    def levels(schedule: Schedule, steps: int) -> list[Level]:
        if steps != sum(counts):
            raise ValueError(f"got {steps} steps, but the spacing {name} has {sum(counts)}: leave steps out")
        made = _in_sections(schedule, counts)
        # The original's own exception, against artefacts of the noisiest timestep.
        return [schedule.at(len(schedule.alpha_bar) - 3), *made[1:]] if name == "fast27" else made

    return levels


def _in_sections(schedule: Schedule, counts: Sequence[int]) -> list[Level]:
    """Parts of equal size, the first of them one longer where it does not divide, each with so many even timesteps."""
    size, longer = divmod(len(schedule.alpha_bar), len(counts))
    ts, start = [], 0
    for i, count in enumerate(counts):
        part = size + (i < longer)
        stride, at = (part - 1) / max(1, count - 1), 0.0
        for _ in range(count):
            ts.append(start + round(at))
            at += stride  # summed, as in the original: the halves round the same way
        start += part
    return [*(schedule.at(t) for t in reversed(ts)), CLEAN]


Spacing = Callable[[Schedule, int], list[Level]]
SPACINGS: dict[str, Spacing] = {
    each.__name__: each
    for each in (leading, trailing, linspace, karras, exponential, sgm_uniform, beta, lcm, original, respaced)
}
TABLES: dict[str, Spacing] = {name: _table(name) for name in SECTIONS}  # spacings of one number of steps each


def levels_of(spacing: str | Spacing, schedule: Schedule, steps: int) -> list[Level]:
    """The levels that a spacing makes, by its name or as a function of one's own."""
    return ((SPACINGS | TABLES)[spacing] if isinstance(spacing, str) else spacing)(schedule, steps)
