"""Noise schedules that the core has not: zero terminal SNR, networks that predict x0, rectified flows.

And spacings with settings, "karras:rho=5".  A rectified flow is x = (1 - s) x0 + s eps with s from 1 to 0, for networks
that predict its velocity, eps - x0.  Samplers in y = x / a and sigma = s / a read its levels as they are; solvers of
its own ODE, dx/ds = (x - x0) / s, read those of `straight`.  Liu et al. 2023; Esser et al. 2024, sec. 2 and 5.3.2.
"""

import inspect
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ldm_lite.core import schedule as core
from ldm_lite.core.schedule import CLEAN, SPACINGS, Array, Level, Spacing, leading, linspace, scaled_linear_betas

__all__ = ["CLEAN", "SPACINGS", "Array", "Level", "Spacing", "leading", "linspace", "scaled_linear_betas"]

# The last two are the velocity of a rectified flow, eps - x0 or x0 - eps.
Prediction = Literal["eps", "v", "x0", "flow", "reverse_flow"]
Clock = Literal["s", "1000 s", "1 - s"]  # what the network of a rectified flow is told of the level

NUM_TIMESTEPS = 1000  # of a rectified flow
NOISIEST = 1e-6  # the least 1 - s of samplers in y = x / a, as in diffusers


@dataclass(frozen=True, eq=False)
class Schedule(core.Schedule):
    """The schedule of a network that predicts eps, v or x0; spacing is its samplers' default.

    It takes the place of the general ones, `leading` and `linspace`.
    """

    prediction: Prediction  # type: ignore[assignment]  # more than the core knows
    spacing: str | None = None
    predictions: ClassVar[tuple[str, ...]] = ("eps", "v", "x0", "flow", "reverse_flow")
    is_flow = False  # whether it is a rectified flow, a FlowSchedule

    @property
    def betas(self) -> Array:
        """1 - alpha_bar[t] / alpha_bar[t-1], (1000,): the inverse of from_betas."""
        return 1.0 - self.alpha_bar / np.concatenate([[1.0], self.alpha_bar[:-1]])

    def sized(self, tokens: int) -> "Schedule":
        """The schedule of images of so many tokens: the same, but for some rectified flows."""
        return self

    def zero_terminal_snr(self) -> "Schedule":
        """This schedule with sqrt(alpha_bar) shifted and scaled to end at exactly 0.  Lin et al. 2024, alg. 1.

        Raises ValueError for eps prediction, from which x0 cannot be computed at alpha_bar 0.
        """
        if self.prediction == "eps":
            raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
        a = np.sqrt(self.alpha_bar)
        return replace(self, alpha_bar=((a - a[-1]) * a[0] / (a[0] - a[-1])) ** 2)

    def at_sigma(self, sigma: float) -> Level:
        """The level of a sigma, with its fractional timestep: outside of the schedule's range the nearest.

        Without the core's warning, since samplers with churn and other programs' spacings leave the range on purpose.
        """
        nearest = min(max(sigma, float(self.sigmas[0])), float(self.sigmas[-1]))
        return core.level_of(super().at_sigma(nearest).t, sigma)

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """What the network is to predict for noised(x0, eps, t)."""
        if self.prediction == "x0":
            return x0
        if self.prediction in ("flow", "reverse_flow"):
            return eps - x0 if self.prediction == "flow" else x0 - eps
        return super().target(x0, eps, t)

    def to_kept(self, keep: str, level: Level) -> tuple[float, float]:
        """Return (p, q) with kept = p x + q out, for the network's output; keep is "eps", "x0" or a flow's "flow".

        NaN where it is undefined: eps from x0 at a level without noise, x0 from eps at one of noise alone.
        """
        _, a, s = level
        if self.prediction == "x0" and keep == "eps":
            return (1 / s, -a / s) if s > 0 else (np.nan, np.nan)
        if self.prediction in ("flow", "reverse_flow"):
            p, q = {"flow": (0.0, 1.0), "eps": (1.0, 1 - s), "x0": (1.0, -s)}[keep]
            return p, q if self.prediction == "flow" else -q
        return super().to_kept(keep, level)


def cosine_betas(num: int = 1000) -> Array:
    """Betas of alpha_bar = cos^2((t + 0.008) / 1.008 * pi / 2), at most 0.999.  Nichol and Dhariwal 2021, eq. 17."""
    alpha_bar = np.cos((np.arange(num + 1) / num + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


# ---- rectified flow -------------------------------------------------------------------------------------------------


class StraightLevel(Level):
    """A level as a rectified flow's own ODE sees it: x is not scaled, and sigma is s."""

    @property
    def scale(self) -> float:
        """What x is divided by."""
        return 1.0


@dataclass(frozen=True, eq=False)
class FlowSchedule(Schedule):
    """A rectified flow: timestep t in [-1,999] has s = shifted((t + 1) / 1000); its levels' t is what `clock` says.

    alpha_bar is that of the variance-preserving levels with the same signal-to-noise ratios.
    """

    shift: float = 1.0  # above 1: more of the steps at high noise
    by_size: tuple[float, float] | None = None  # log of the shift for 256 and for 4096 tokens; None: `shift` for all
    clock: Clock = "s"
    is_flow = True

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
        """This flow as solvers of its own ODE see it."""
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

    def _of(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
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
    """The schedule that solvers of the ODE in sigma read: of a rectified flow `straight`, of others itself."""
    return schedule.straight if isinstance(schedule, FlowSchedule) else schedule


def shifted(s: Array, shift: float) -> Array:
    """Return shift s / (1 + (shift - 1) s), in [0,1] as s; 1 / shift undoes it.  Esser et al. 2024, eq. 23."""
    return shift * s / (1 + (shift - 1) * s)


# ---- spacings with settings -----------------------------------------------------------------------------------------

# Spacings that only need a range of noise levels or of timesteps; the others are made for Stable Diffusion's betas.
GENERAL = {"flow", "flow_flux2", "flow_sd3", "trailing", "linspace", "sgm_uniform", "normal", "simple", "beta"}
GENERAL |= {"beta_sigma", "turbo", "karras", "exponential", "polyexponential"}
MADE_FOR_BETAS: set[str] = set()  # spacings.py fills it; a spacing of your own is for any schedule


def levels_of(spacing: str | Spacing, schedule: core.Schedule, steps: int) -> list[Level]:
    """The levels of a spacing, given by name, perhaps with settings as in spacing_of, or as a function."""
    return spacing_of(spacing)(schedule, steps)


def spacing_of(spacing: str | Spacing) -> Spacing:
    """The function of a spacing's name, which may have settings; or the function that was given.

    "karras:discard" makes one level more and leaves out the last but one, as A1111 does for some samplers;
    "karras:rho=5:sigma_min=0.1" passes numbers to the function.  Raises ValueError for an unknown name or setting; the
    function raises it for settings that give no levels, and for a rectified flow if the spacing is not for those.
    """
    if not isinstance(spacing, str):
        return spacing
    name, *settings = spacing.split(":")
    if name not in SPACINGS:
        raise ValueError(f"unknown spacing {name!r}: wanted one of {', '.join(SPACINGS)}")

    def levels(schedule: core.Schedule, steps: int) -> list[Level]:
        if isinstance(schedule, FlowSchedule) and name in MADE_FOR_BETAS:
            wanted = ", ".join(sorted(GENERAL))
            raise ValueError(f"the spacing {name} is not for rectified flow: take one of {wanted}")
        with np.errstate(all="ignore"):
            return _with_settings(spacing, settings, schedule, steps) if settings else SPACINGS[name](schedule, steps)

    return levels


def _with_settings(spacing: str, settings: list[str], schedule: core.Schedule, steps: int) -> list[Level]:
    """The levels of a spacing with settings, as spacing_of reads them."""
    function, discard = SPACINGS[spacing.split(":")[0]], "discard" in settings
    pairs = (setting.partition("=") for setting in settings if setting != "discard")
    numbers = {key: number(text) for key, _, text in pairs}
    try:
        inspect.signature(function).bind("schedule", "steps", **numbers)
    except TypeError as error:
        raise ValueError(f"spacing {spacing!r}: {error}; settings are discard, rho=, sigma_min=, sigma_max=") from error
    try:
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
