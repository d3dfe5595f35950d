"""The noise schedule, in float64 on the CPU: alpha_bar, noise levels, and the spacings of a sampler's steps.

Latents are kept in the variance-preserving scale x = a x0 + s eps with a = sqrt(alpha_bar), s = sqrt(1 - alpha_bar).
A spacing is the list of levels that a sampler visits, the noisiest first.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The last two are the velocity of a rectified flow, eps - x0 or x0 - eps.
Prediction = Literal["eps", "v", "x0", "flow", "reverse_flow"]
Array = NDArray[np.float64]


class Level(NamedTuple):
    """A noise level, x = a x0 + s eps, and the timestep t passed to the network."""

    t: float
    a: float
    s: float

    @property
    def scale(self) -> float:
        """What x is divided by in the variance-exploding scale."""
        return self.a

    @property
    def sigma(self) -> float:
        """The noise's standard deviation in the variance-exploding scale, y = x / a = x0 + sigma eps."""
        return self.s / self.scale if self.scale else math.inf

    @property
    def ratio(self) -> float:
        """s / a: of noise to signal."""
        return self.s / self.a if self.a else math.inf


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

    @property
    def is_flow(self) -> bool:
        """Whether it is a rectified flow: see flow.FlowSchedule."""
        return False

    def sized(self, tokens: int) -> "Schedule":
        """The schedule of images of so many tokens: the same, but for some rectified flows."""
        return self

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest noise of the timesteps, that spacings by noise are made of: sigmas."""
        return float(self.sigmas[0]), float(self.sigmas[-1])

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

    def at_noise(self, noise: float) -> Level:
        """The level of a noise within `span`."""
        return self.at_sigma(noise)

    def finite(self, levels: list[Level], least: float = 2.0**-12) -> list[Level]:
        """Levels without an infinite sigma (zero terminal SNR), which becomes 4096, as in diffusers: an a of `least`.

        Raises ValueError for eps prediction at zero terminal SNR, from which x0 cannot be computed.
        """
        if self.prediction == "eps" and self.alpha_bar[-1] == 0:
            raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
        return [level if level.a > 0 else level._replace(a=least) for level in levels]

    def straight(self, levels: list[Level]) -> list[Level]:
        """Levels for solvers of the ODE in sigma: the finite ones."""
        return self.finite(levels)

    def beside(self, level: Level, sigma: float) -> Level:
        """The level of a sigma of the same kind as that of another level."""
        return self.at_sigma(sigma)

    def below(self, now: Level, after: Level, eta: float) -> tuple[Level, float, float]:
        """Return (level, factor, noise): step from `now` down to the level, times the factor, plus noise, is `after`.

        k-diffusion get_ancestral_step.
        """
        down, up = ancestral(now.sigma, after.sigma, eta)
        return after._replace(s=after.a * down), 1.0, after.a * up

    def time(self, level: Level) -> float:
        """What the network is given at a level: its timestep."""
        return level.t

    def check(self, spacing: str) -> None:
        """Raises ValueError for a spacing of the name that is made for another noise process."""


def _from_sigma(t: float, sigma: float) -> Level:
    a = 1.0 / np.sqrt(1.0 + sigma**2)
    return Level(t, float(a), float(sigma * a))


def ancestral(now: float, after: float, eta: float = 1.0) -> tuple[float, float]:
    """Return the sigma to step down to on the way from `now` to `after`, and that of the noise to add.  k-diffusion."""
    up = min(after, eta * np.sqrt(after**2 * (now**2 - after**2) / now**2))
    return float(np.sqrt(after**2 - up**2)), float(up)


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
    """Fractional timesteps linspace(999, 0, steps), then clean: k-diffusion's default, and "Uniform" in A1111."""
    return at_timesteps(schedule, np.linspace(len(schedule.alpha_bar) - 1, 0, steps))


def sgm_uniform(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps + 1) without the last, then clean: Stability AI's sgm."""
    low, high = (schedule.at_noise(sigma).t for sigma in sigma_range(schedule, sigma_min, sigma_max))
    return at_timesteps(schedule, np.linspace(high, low, steps + 1)[:-1])


def beta(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps dense at both ends: quantiles of the Beta(0.6, 0.6) distribution, then clean.  Lee et al. 2024.

    Not rounded, unlike in ComfyUI, so that no two are equal.
    """
    quantiles = beta_quantiles(1 - np.linspace(0, 1, steps, endpoint=False), 0.6, 0.6)
    return at_timesteps(schedule, quantiles * (len(schedule.alpha_bar) - 1))


def beta_quantiles(shares: Array, alpha: float, beta: float) -> Array:
    """The quantiles of the Beta(alpha, beta) distribution, for shares (N,) in [0,1].  Raises ValueError."""
    if not 0 < min(alpha, beta) <= max(alpha, beta) <= 100:
        raise ValueError(f"got alpha {alpha:g} and beta {beta:g}, wanted above 0 to 100")
    total = math.gamma(alpha) * math.gamma(beta) / math.gamma(alpha + beta)

    def below(u: Array, a: float, b: float) -> Array:
        """The distribution function at x = u^(1/a), x up to 1/2: x^a times a hypergeometric series."""
        x, term = u ** (1 / a), u / total
        result = term / a
        for n in range(60):
            term = term * x * (n + 1 - b) / (n + 1)
            result = result + term / (a + n + 1)
        return result

    def inverse(share: Array, a: float, b: float) -> Array:
        """By Newton's method in u, in which the function is nearly linear."""
        grid = np.linspace(0, 0.5**a, 513)
        u = np.interp(share, below(grid, a, b), grid)
        for _ in range(4):
            u = u - (below(u, a, b) - share) * a * total / (1 - u ** (1 / a)) ** (b - 1)
            u = np.clip(u, 0, 0.5**a)
        return u ** (1 / a)

    half = below(np.array(0.5**alpha), alpha, beta)
    lower, upper = (
        inverse(np.minimum(shares, half), alpha, beta),
        inverse(np.minimum(1 - shares, 1 - half), beta, alpha),
    )
    return np.where(shares <= half, lower, 1 - upper)


def karras(
    schedule: Schedule,
    steps: int,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    rho: float = 7.0,
) -> list[Level]:
    """Sigmas evenly spaced in sigma^(1/rho) over the schedule's range, then clean.  Karras et al. 2022, eq. 5."""
    low, high = (sigma ** (1 / rho) for sigma in sigma_range(schedule, sigma_min, sigma_max))
    return at_sigmas(schedule, np.linspace(high, low, steps) ** rho)


def exponential(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Sigmas evenly spaced in log sigma over the schedule's range, then clean.  k-diffusion."""
    return polyexponential(schedule, steps, sigma_min, sigma_max)


def polyexponential(
    schedule: Schedule,
    steps: int,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    rho: float = 1.0,
) -> list[Level]:
    """Log sigmas fall like a power of the steps left; rho 1 is exponential.  k-diffusion."""
    low, high = np.log(sigma_range(schedule, sigma_min, sigma_max))
    return at_sigmas(schedule, np.exp(np.linspace(1, 0, steps) ** rho * (high - low) + low))


def sigma_range(schedule: Schedule, sigma_min: float | None, sigma_max: float | None) -> tuple[float, float]:
    """The least and the largest sigma: the schedule's where none is given.  Raises ValueError if they are no range."""
    least, most = schedule.span
    low, high = least if sigma_min is None else sigma_min, most if sigma_max is None else sigma_max
    if not 0 < low < high < 1e6:
        raise ValueError(f"got sigmas from {low:g} to {high:g}, wanted a range above 0")
    return low, high


def at_timesteps(schedule: Schedule, ts: Array) -> list[Level]:
    """The levels of fractional timesteps, then clean."""
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def at_sigmas(schedule: Schedule, sigmas: Array) -> list[Level]:
    """The levels of sigmas, then clean."""
    return [*(schedule.at_noise(float(sigma)) for sigma in sigmas), CLEAN]


Spacing = Callable[[Schedule, int], list[Level]]
# By name; spacings.py adds those of other programs, SPACINGS["mine"] = f your own, for every sampler and flag.
SPACINGS: dict[str, Spacing] = {
    each.__name__: each
    for each in (
        leading,
        trailing,
        linspace,
        karras,
        exponential,
        polyexponential,
        sgm_uniform,
        beta,
        lcm,
        original,
    )
}
SPACINGS |= {"leading_clean": leading_clean, "trailing_to_0": trailing_to_0}


def levels_of(spacing: str | Spacing, schedule: Schedule, steps: int) -> list[Level]:
    """The levels of a spacing, given by name or as a function.

    A name may have settings: "karras:discard" makes one level more and leaves out the last but one, as A1111 does for
    some samplers; "karras:rho=5:sigma_min=0.1" passes numbers to the function.  Raises ValueError for an unknown name
    or setting.
    """
    if not isinstance(spacing, str):
        return spacing(schedule, steps)
    name, *settings = spacing.split(":")
    if name not in SPACINGS:
        raise ValueError(f"unknown spacing {name!r}: wanted one of {', '.join(SPACINGS)}")
    schedule.check(name)
    function, discard = SPACINGS[name], "discard" in settings
    numbers = {key: number(text) for key, _, text in (each.partition("=") for each in settings if each != "discard")}
    try:
        inspect.signature(function).bind(schedule, steps, **numbers)
    except TypeError as error:
        raise ValueError(f"spacing {spacing!r}: {error}; settings are discard, rho=, sigma_min=, sigma_max=") from error
    try:
        with np.errstate(all="ignore"):
            levels = function(schedule, steps + discard, **numbers)
            sigmas = np.array([level.sigma for level in levels if level.a > 0])
    except (ZeroDivisionError, OverflowError):
        sigmas = np.array([np.nan])
    if numbers and not (np.isfinite(sigmas).all() and (np.diff(sigmas) <= 0).all()):
        raise ValueError(f"spacing {spacing!r}: these settings give no descending noise levels")
    return [*levels[:-2], levels[-1]] if discard else levels


def number(text: str) -> float:
    """The number that a text states.  Raises ValueError for anything else, infinity included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"got {text[:50]!r}, wanted a finite number")
    return value
