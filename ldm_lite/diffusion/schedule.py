"""The noise schedule, in float64 on the CPU: alpha_bar, noise levels, and the spacings of a sampler's steps.

Latents are kept in the variance-preserving scale x = a x0 + s eps with a = sqrt(alpha_bar), s = sqrt(1 - alpha_bar).
A spacing is the list of levels that a sampler visits, the noisiest first.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Prediction = Literal["eps", "v", "x0"]
Array = NDArray[np.float64]


class Level(NamedTuple):
    """A noise level, x = a x0 + s eps, and the timestep t passed to the network."""

    t: float
    a: float
    s: float

    @property
    def sigma(self) -> float:
        """The noise's standard deviation in the variance-exploding scale, y = x / a = x0 + sigma eps."""
        return self.s / self.a


CLEAN = Level(0.0, 1.0, 0.0)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The noise schedule a network was trained with: alpha_bar (1000,), descending in [0,1), and what it predicts.

    spacing, if given, takes the place of the general ones, `leading` and `linspace`, as the default of samplers.
    Raises ValueError for an alpha_bar that is not of this kind.
    """

    alpha_bar: Array
    prediction: Prediction
    spacing: str | None = None

    def __post_init__(self) -> None:
        with np.errstate(invalid="ignore"):
            falls = self.alpha_bar.ndim == 1 and self.alpha_bar[0] < 1 and (np.diff(self.alpha_bar) < 0).all()
        if not falls or not self.alpha_bar[-1] >= 0:
            raise ValueError("this is no noise schedule: alpha_bar must fall at every timestep, from below 1 to 0")

    @staticmethod
    def from_betas(betas: Array, prediction: Prediction) -> "Schedule":
        """The schedule of betas (1000,) in (0,1]: alpha_bar = cumprod(1 - beta).  Ho et al. 2020, eq. 4."""
        return Schedule(np.cumprod(1.0 - betas, dtype=np.float64), prediction)

    @property
    def betas(self) -> Array:
        """1 - alpha_bar[t] / alpha_bar[t-1], (1000,): the inverse of from_betas."""
        return 1.0 - self.alpha_bar / np.concatenate([[1.0], self.alpha_bar[:-1]])

    @cached_property
    def sigmas(self) -> Array:
        """sqrt((1 - alpha_bar) / alpha_bar), (1000,), ascending, at most 4096 (infinity at zero terminal SNR)."""
        return np.sqrt((1.0 - self.alpha_bar) / np.maximum(self.alpha_bar, 2.0**-24))

    def zero_terminal_snr(self) -> "Schedule":
        """This schedule with sqrt(alpha_bar) shifted and scaled to end at exactly 0.  Lin et al. 2024, alg. 1.

        Raises ValueError for eps prediction, from which x0 cannot be computed at alpha_bar 0.
        """
        if self.prediction == "eps":
            raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
        a = np.sqrt(self.alpha_bar)
        return replace(self, alpha_bar=((a - a[-1]) * a[0] / (a[0] - a[-1])) ** 2)

    def at(self, t: int) -> Level:
        """The level of the integer timestep t in [0,1000)."""
        return Level(float(t), float(np.sqrt(self.alpha_bar[t])), float(np.sqrt(1.0 - self.alpha_bar[t])))

    def between(self, t: float) -> Level:
        """The level of a fractional timestep; log sigma is interpolated linearly, as in k-diffusion."""
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
    """The betas of all LDM families, linear in sqrt(beta): "linear" in LDM's configs, "scaled_linear" in diffusers."""
    return np.linspace(start**0.5, end**0.5, num, dtype=np.float64) ** 2


def cosine_betas(num: int = 1000) -> Array:
    """Betas of alpha_bar = cos^2((t + 0.008) / 1.008 * pi / 2), at most 0.999.  Nichol and Dhariwal 2021, eq. 17."""
    alpha_bar = np.cos((np.arange(num + 1) / num + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


# ---- spacings: (schedule, steps) -> steps + 1 descending levels; sampling ends at the last --------------------------


def leading(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps 1 + floor(i * 1000 / steps), ending at timestep 0.

    If steps divides 1000, these are the original scripts' timesteps; for other counts the scripts take another number
    of steps or fail.  1000 steps visit 999 ... 0 and end clean, since timestep 1 + 999 does not exist.
    """
    num = len(schedule.alpha_bar)
    offset = 1 if steps < num else 0
    ts = [i * num // steps + offset for i in reversed(range(steps))]
    return [*(schedule.at(t) for t in ts), schedule.at(0) if offset else CLEAN]


def leading_clean(schedule: Schedule, steps: int) -> list[Level]:
    """The timesteps of `leading`, then clean: diffusers' DDIM with set_alpha_to_one."""
    return [*leading(schedule, steps)[:-1], CLEAN]


def original(schedule: Schedule, steps: int) -> list[Level]:
    """The original scripts' timesteps, range(0, 1000, 1000 // steps) + 1, which can be more than steps.

    Raises ValueError if the original raises IndexError.  CompVis ldm/modules/diffusionmodules/util.py.
    """
    num = len(schedule.alpha_bar)
    ts = [t + 1 for t in range(0, num, num // steps)]
    if ts[-1] >= num:
        raise ValueError(f"the original scripts fail with {steps} steps (timestep {ts[-1]}): take another number")
    return [*(schedule.at(t) for t in reversed(ts)), schedule.at(0)]


def trailing(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps from 999 down in strides of 1000 / steps, then clean.  Lin et al. 2024, sec. 3.3.

    Halves are rounded to even, as in diffusers.
    """
    num = len(schedule.alpha_bar)
    ts = np.round(np.arange(num, 0, -num / steps)[:steps]).astype(int) - 1
    return [*(schedule.at(int(t)) for t in ts), CLEAN]


def trailing_to_0(schedule: Schedule, steps: int) -> list[Level]:
    """The timesteps of `trailing`, ending at timestep 0: diffusers' DDIM without set_alpha_to_one."""
    levels = trailing(schedule, steps)[:-1]
    return [*levels, schedule.at(0) if levels[-1].t > 0 else CLEAN]


def lcm(schedule: Schedule, steps: int) -> list[Level]:
    """Some of the 50 timesteps 999, 979, ... that LCMs were distilled at; for more than 50 steps, trailing."""
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
    """Fractional timesteps linspace(999, 0, steps + 1) without the last, then clean: Stability AI's sgm."""
    ts = np.linspace(len(schedule.alpha_bar) - 1, 0, steps + 1)[:-1]
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def beta(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps dense at both ends: quantiles of the Beta(0.6, 0.6) distribution, then clean.  Lee et al. 2024.

    Not rounded, unlike in ComfyUI, so that no two are equal.
    """
    # The cumulative distribution by the trapezoid rule over u = x^0.6, in which the density is smooth up to 1/2.
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


# DeepFloyd IF's tables: timesteps per section of the schedule, which is cut into equal parts, cleanest first.
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
    """Even timesteps from 999 to 0 (only 0 for one step), rounded, then clean: DeepFloyd IF given a number of steps."""
    return _in_sections(schedule, (steps,))


def _table(name: str, schedule: Schedule, steps: int) -> list[Level]:
    """The levels of one of SECTIONS, which has a fixed number of steps.  deepfloyd_if/model/respace.py."""
    counts = SECTIONS[name]
    if steps != sum(counts):
        raise ValueError(f"got {steps} steps, but the spacing {name} has {sum(counts)}: leave steps out")
    levels = _in_sections(schedule, counts)
    # An exception in the original too, against artefacts at the noisiest timestep.
    return [schedule.at(len(schedule.alpha_bar) - 3), *levels[1:]] if name == "fast27" else levels


def _in_sections(schedule: Schedule, counts: Sequence[int]) -> list[Level]:
    """Cut the schedule into equal parts (the first may be longer by one), and take `counts` even timesteps of each."""
    size, longer = divmod(len(schedule.alpha_bar), len(counts))
    ts, start = [], 0
    for i, count in enumerate(counts):
        part = size + (i < longer)
        stride, at = (part - 1) / max(1, count - 1), 0.0
        for _ in range(count):
            ts.append(start + round(at))
            at += stride  # a running sum, as in the original, so that halves round the same way
        start += part
    return [*(schedule.at(t) for t in reversed(ts)), CLEAN]


Spacing = Callable[[Schedule, int], list[Level]]
# By name; SPACINGS["mine"] = f adds your own, for every sampler, flag and name ("Euler mine").
SPACINGS: dict[str, Spacing] = {
    each.__name__: each
    for each in (leading, trailing, linspace, karras, exponential, sgm_uniform, beta, lcm, original, respaced)
}
SPACINGS |= {"leading_clean": leading_clean, "trailing_to_0": trailing_to_0}
SPACINGS |= {name: functools.partial(_table, name) for name in SECTIONS}


def levels_of(spacing: str | Spacing, schedule: Schedule, steps: int) -> list[Level]:
    """The levels of a spacing, given by name or as a function.  Raises ValueError for an unknown name."""
    if not isinstance(spacing, str):
        return spacing(schedule, steps)
    if spacing not in SPACINGS:
        raise ValueError(f"unknown spacing {spacing!r}: wanted one of {', '.join(SPACINGS)}")
    return SPACINGS[spacing](schedule, steps)
