"""The noise schedule, in float64 on the CPU, and spacings: the noise levels that a sampler visits.

Latents are kept in the variance-preserving scale x = a x0 + s eps with a = sqrt(alpha_bar), s = sqrt(1 - alpha_bar).
A spacing is a function (schedule, steps) -> steps + 1 levels, the noisiest first; sampling ends at the last.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("ldm_lite")

Array = NDArray[np.float64]
Prediction = Literal["eps", "v"]


class Level(NamedTuple):
    """A noise level, x = a x0 + s eps, and the timestep t that the network is given."""

    t: float
    a: float
    s: float

    @property
    def scale(self) -> float:
        """The divisor of x in the variance-exploding scale, y = x / scale."""
        return self.a

    @property
    def sigma(self) -> float:
        """The noise's standard deviation in the variance-exploding scale, y = x0 + sigma eps."""
        return self.s / self.scale if self.scale else math.inf


CLEAN = Level(0.0, 1.0, 0.0)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule that a network was trained with: alpha_bar (1000,), falling within [0,1), and what it predicts.

    Raises ValueError for an alpha_bar that is not of this kind.
    """

    alpha_bar: Array
    prediction: Prediction
    predictions: ClassVar[tuple[str, ...]] = ("eps", "v")

    def __post_init__(self) -> None:
        if self.prediction not in self.predictions:
            raise ValueError(f"got prediction {self.prediction!r}, expected {' or '.join(self.predictions)}")
        values = np.asarray(self.alpha_bar, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            falls = values.ndim == 1 and values.size and (np.diff(values, prepend=1.0) < 0).all()
        if not falls or not values[-1] >= 0:
            raise ValueError("this is not a noise schedule: alpha_bar must fall at every timestep, from below 1 to 0")
        object.__setattr__(self, "alpha_bar", values)

    @classmethod
    def from_betas(cls, betas: Array, prediction: Any) -> Self:  # one of `predictions`
        """The schedule of betas (1000,) in (0,1]: alpha_bar = cumprod(1 - beta).  Ho et al. 2020, eq. 4."""
        return cls(np.cumprod(1.0 - betas, dtype=np.float64), prediction)

    @cached_property
    def sigmas(self) -> Array:
        """sqrt((1 - alpha_bar) / alpha_bar), (1000,), ascending; 4096 stands for infinity (zero terminal SNR)."""
        return np.sqrt((1.0 - self.alpha_bar) / np.maximum(self.alpha_bar, 2.0**-24))

    def at(self, t: int) -> Level:
        """The level of the integer timestep t in [0,1000)."""
        alpha_bar = self.alpha_bar[t]
        return Level(float(t), float(np.sqrt(alpha_bar)), float(np.sqrt(1.0 - alpha_bar)))

    def between(self, t: float) -> Level:
        """The level of a fractional timestep; log sigma is interpolated linearly, as in k-diffusion."""
        index = np.arange(len(self.alpha_bar))
        return level_of(t, float(np.exp(np.interp(t, index, np.log(self.sigmas)))))

    def at_sigma(self, sigma: float) -> Level:
        """The level of exactly this sigma.  Beyond the schedule its timestep is the last one, with a warning."""
        low, high = float(self.sigmas[0]), float(self.sigmas[-1])
        if not low * (1 - 1e-6) <= sigma <= high * (1 + 1e-6):
            log.warning("sigma %.4g is outside of the range that the network knows, %.4g to %.4g", sigma, low, high)
        index = np.arange(len(self.alpha_bar), dtype=np.float64)
        return level_of(float(np.interp(np.log(sigma), np.log(self.sigmas), index)), sigma)

    def finite(self, levels: list[Level]) -> list[Level]:
        """Levels without an infinite sigma (zero terminal SNR), which becomes 4096, as in diffusers.

        Raises ValueError for eps prediction at zero terminal SNR, from which x0 cannot be computed.
        """
        if self.prediction == "eps" and self.alpha_bar[-1] == 0:
            raise ValueError("eps prediction is undefined at zero terminal SNR: use a model with v prediction")
        return [level if level.a > 0 else level._replace(a=2.0**-12) for level in levels]

    def noised(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x = a x0 + s eps for latents and unit noise (B,C,h,w) at integer timesteps t (B,).  Ho et al. 2020, eq. 4."""
        a, s = self.levels_at(t, x0)
        return a * x0 + s * eps

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The target of the network for noised(x0, eps, t): eps, or v = a eps - s x0."""
        a, s = self.levels_at(t, x0)
        return eps if self.prediction == "eps" else a * eps - s * x0

    def coefficients(self, quantity: str, level: Level) -> tuple[float, float]:
        """Return (p, q) with quantity = p x + q out, of the latents and the network's output; it is "eps" or "x0".

        NaN where it is undefined: x0 from eps at zero terminal SNR.  Salimans and Ho 2022, sec. 4.
        """
        if quantity not in ("eps", "x0"):
            raise ValueError(f"got h={quantity!r}, expected eps or x0")
        _, a, s = level
        if self.prediction == quantity:
            return 0.0, 1.0
        if self.prediction == "v":
            return (s, a) if quantity == "eps" else (a, -s)
        return (1 / a, -s / a) if a > 0 else (np.nan, np.nan)

    def levels_at(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and s (B,1,1,1) of integer timesteps t (B,), in the dtype and on the device of another tensor."""
        key = like.device, like.dtype
        if key not in self._tables:  # copied once: training does not wait for the device
            alpha_bar = torch.from_numpy(self.alpha_bar)
            self._tables[key] = alpha_bar.sqrt().to(like), (1 - alpha_bar).sqrt().to(like)
        a, s = self._tables[key]
        t = t.to(like.device)
        return a[t][:, None, None, None], s[t][:, None, None, None]

    @cached_property
    def _tables(self) -> dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]]:
        """a and s of all timesteps, (1000,), by device and dtype."""
        return {}


def level_of(t: float, sigma: float) -> Level:
    """The variance-preserving level of a sigma, at which the network is given t."""
    a = 1.0 / np.sqrt(1.0 + sigma**2)
    return Level(t, float(a), float(sigma * a))


def scaled_linear_betas(start: float, end: float, num: int = 1000) -> Array:
    """Betas (num,) linear in sqrt(beta): "linear" in CompVis' configs, "scaled_linear" in diffusers."""
    return np.linspace(start**0.5, end**0.5, num, dtype=np.float64) ** 2


# ---- spacings -------------------------------------------------------------------------------------------------------


def leading(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps 1 + floor(i * 1000 / steps), ending at timestep 0: the original scripts', if steps divides 1000.

    1000 steps visit 999 ... 0 and end clean, since timestep 1 + 999 does not exist.
    """
    num = len(schedule.alpha_bar)
    offset = 1 if steps < num else 0
    timesteps = [i * num // steps + offset for i in reversed(range(steps))]
    return [*(schedule.at(t) for t in timesteps), schedule.at(0) if offset else CLEAN]


def trailing(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps from 999 down by 1000 / steps, halves rounded to even; then clean.  Lin et al. 2024, sec. 3.3."""
    num = len(schedule.alpha_bar)
    timesteps = np.round(np.arange(num, 0, -num / steps)[:steps]).astype(int) - 1
    return [*(schedule.at(int(t)) for t in timesteps), CLEAN]


def linspace(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps), then clean: k-diffusion's default."""
    timesteps = np.linspace(len(schedule.alpha_bar) - 1, 0, steps)
    return [*(schedule.between(float(t)) for t in timesteps), CLEAN]


def karras(schedule: Schedule, steps: int, rho: float = 7.0) -> list[Level]:
    """Sigmas evenly spaced in sigma^(1/rho) over the schedule's range, then clean.  Karras et al. 2022, eq. 5."""
    low, high = (float(schedule.sigmas[i]) ** (1 / rho) for i in (0, -1))
    sigmas = np.linspace(high, low, steps) ** rho
    return [*(schedule.at_sigma(float(sigma)) for sigma in sigmas), CLEAN]


Spacing = Callable[[Schedule, int], list[Level]]
# By name; SPACINGS["mine"] = f adds another, for every sampler and for the command line.
SPACINGS: dict[str, Spacing] = {
    "leading": leading,
    "trailing": trailing,
    "linspace": linspace,
    "karras": karras,
}


def levels_of(spacing: str | Spacing, schedule: Schedule, steps: int) -> list[Level]:
    """The levels of a spacing, named or as a function.  Raises ValueError for an unknown name."""
    if not isinstance(spacing, str):
        return spacing(schedule, steps)
    if spacing not in SPACINGS:
        raise ValueError(f"unknown spacing {spacing!r}: expected one of {', '.join(SPACINGS)}")
    return SPACINGS[spacing](schedule, steps)


def ancestral(now: float, after: float, eta: float = 1.0) -> tuple[float, float]:
    """Return the sigma to step down to on the way from `now` to `after`, and that of the noise to add.  k-diffusion."""
    up = min(after, eta * math.sqrt(max(0.0, after**2 * (now**2 - after**2) / now**2)))
    return math.sqrt(after**2 - up**2), up
