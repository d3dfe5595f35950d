"""Noise schedules that the core lacks: zero terminal SNR, networks that predict x0; flow.py has rectified flows.

And spacings with settings, "karras:rho=5".
"""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from ldm_lite.core import schedule as core
from ldm_lite.core.schedule import CLEAN, SPACINGS, Array, Level, Spacing, leading, linspace, scaled_linear_betas
from ldm_lite.diffusion.webui import SCHEDULE_TYPES

__all__ = ["CLEAN", "SPACINGS", "Array", "Level", "Spacing", "leading", "linspace", "scaled_linear_betas"]

# The last two are the velocity of a rectified flow, eps - x0 or x0 - eps.
AnyPrediction = Literal["eps", "v", "x0", "flow", "reverse_flow"]


@dataclass(frozen=True, eq=False)
class NoiseSchedule(core.Schedule):
    """The schedule of a network that predicts eps, v or x0; spacing is its samplers' default.

    It replaces the general ones, `leading` and `linspace`.
    """

    prediction: AnyPrediction  # type: ignore[assignment]  # more than the core knows
    spacing: str | None = None
    predictions: ClassVar[tuple[str, ...]] = ("eps", "v", "x0")
    is_flow = False  # whether it is a rectified flow, flow.FlowSchedule

    @property
    def betas(self) -> Array:
        """1 - alpha_bar[t] / alpha_bar[t-1], (1000,): the inverse of from_betas."""
        return 1.0 - self.alpha_bar / np.concatenate([[1.0], self.alpha_bar[:-1]])

    def sized(self, tokens: int) -> "NoiseSchedule":
        """The schedule of images of so many tokens: the same, except for some rectified flows."""
        return self

    def zero_terminal_snr(self) -> "NoiseSchedule":
        """This schedule with sqrt(alpha_bar) shifted and scaled to end at exactly 0.  Lin et al. 2024, alg. 1.

        Raises ValueError for eps prediction, from which x0 cannot be computed at alpha_bar 0.
        """
        if self.prediction == "eps":
            raise ValueError("eps prediction is undefined at zero terminal SNR: use a model with v prediction")
        a = np.sqrt(self.alpha_bar)
        return replace(self, alpha_bar=((a - a[-1]) * a[0] / (a[0] - a[-1])) ** 2)

    def at_sigma(self, sigma: float) -> Level:
        """The level of a sigma, with its fractional timestep: outside of the schedule's range the nearest.

        Without the core's warning, since samplers with churn and other programs' spacings leave the range on purpose.
        """
        nearest = min(max(sigma, float(self.sigmas[0])), float(self.sigmas[-1]))
        return core.level_of(super().at_sigma(nearest).t, sigma)

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The target of the network for noised(x0, eps, t)."""
        return x0 if self.prediction == "x0" else super().target(x0, eps, t)

    def coefficients(self, quantity: str, level: Level) -> tuple[float, float]:
        """Return (p, q) with quantity = p x + q out, for the network's output; it is "eps" or "x0".

        NaN where it is undefined: eps from x0 at a level without noise, x0 from eps at one of noise alone.
        """
        if self.prediction == "x0" and quantity == "eps":
            _, a, s = level
            return (1 / s, -a / s) if s > 0 else (np.nan, np.nan)
        return super().coefficients(quantity, level)


def cosine_betas(num: int = 1000) -> Array:
    """Betas of alpha_bar = cos^2((t + 0.008) / 1.008 * pi / 2), at most 0.999.  Nichol and Dhariwal 2021, eq. 17."""
    alpha_bar = np.cos((np.arange(num + 1) / num + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


# ---- spacings with settings -----------------------------------------------------------------------------------------

# Spacings that only need a range of noise levels or of timesteps; the others are made for Stable Diffusion's betas.
GENERAL = {"flow", "flow_by_steps", "flow_sd3", "trailing", "linspace", "sgm_uniform", "normal", "simple", "beta"}
GENERAL |= {"beta_sigma", "turbo", "karras", "exponential", "polyexponential"}
MADE_FOR_BETAS: set[str] = set()  # spacings.py fills it; a spacing of your own is for any schedule


def spaced_levels(spacing: str | Spacing, schedule: core.Schedule, steps: int) -> list[Level]:
    """The levels of a spacing, given by name, optionally with settings as in spacing_of, or as a function."""
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
        theirs = {kind.lower(): spacing for kind, spacing in SCHEDULE_TYPES.items()}.get(name.lower())
        hint = f"did you mean {theirs}? " if theirs is not None else ""
        raise ValueError(f"unknown spacing {name!r}: {hint}expected one of {', '.join(SPACINGS)}")

    def levels(schedule: core.Schedule, steps: int) -> list[Level]:
        if name in MADE_FOR_BETAS and getattr(schedule, "is_flow", False):  # the core's schedules are not
            wanted = ", ".join(sorted(GENERAL))
            raise ValueError(f"the spacing {name} is not for rectified flow: use one of {wanted}")
        with np.errstate(all="ignore"):
            return _with_settings(spacing, settings, schedule, steps) if settings else SPACINGS[name](schedule, steps)

    return levels


def _with_settings(spacing: str, settings: list[str], schedule: core.Schedule, steps: int) -> list[Level]:
    """The levels of a spacing with settings, as spacing_of reads them."""
    function, discard = SPACINGS[spacing.split(":")[0]], "discard" in settings
    pairs = (setting.partition("=") for setting in settings if setting != "discard")
    parameters = inspect.signature(function).parameters
    texts = {key for key, parameter in parameters.items() if parameter.annotation is str}
    numbers: dict[str, Any] = {key: text if key in texts else number(text) for key, _, text in pairs}
    try:
        inspect.signature(function).bind("schedule", "steps", **numbers)
    except TypeError as error:
        allowed = ", ".join(["discard", *(f"{key}=" for key in [*parameters][2:])])
        raise ValueError(f"spacing {spacing!r}: {error}; its settings are {allowed}") from error
    try:
        levels = function(schedule, steps + discard, **numbers)
        sigmas = np.array([level.sigma for level in levels if level.a > 0])
    except (ZeroDivisionError, OverflowError):
        sigmas = np.array([np.nan])
    if numbers and not (np.isfinite(sigmas).all() and (np.diff(sigmas) <= 0).all()):
        raise ValueError(f"spacing {spacing!r}: these settings do not give descending noise levels")
    return [*levels[:-2], levels[-1]] if discard else levels


def number(text: str) -> float:
    """The number that a text states.  Raises ValueError for anything else, infinity included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"got {text[:50]!r}, expected a finite number")
    return value
