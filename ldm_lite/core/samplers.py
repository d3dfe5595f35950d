"""Samplers: each is one function that writes its paper's update as the rows of a Plan.

Latents are X = a x0 + s eps.  A sampler written for the variance-exploding scale y = x0 + sigma eps uses y = X / scale
and X = scale y; scale is a.  H is the network's eps or x0.  A sampler of your own joins them by @sampler.
"""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ldm_lite.core.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.core.schedule import SPACINGS, Array, Level, Schedule, Spacing, ancestral, levels_of

Sampler = Callable[..., Plan]  # (schedule, steps, spacing="...") and, where it has one, eta=...
SAMPLERS: dict[str, Sampler] = {}


def sampler(function: Sampler) -> Sampler:
    """Add a function to SAMPLERS.  Raises ValueError unless make_plan can call it: (schedule, steps, spacing=...).

    `eta` is passed on to a function that has it.  Other parameters keep their defaults in a task: to set them, call the
    function yourself, and give the task its plan, `plan=`.
    """
    parameters_of(function)
    SAMPLERS[function.__name__.lower()] = function  # as names are looked up
    return function


@functools.cache
def parameters_of(function: Sampler) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a sampler.  Raises ValueError unless make_plan can call it."""
    signature, problem = inspect.signature(function), ""
    try:
        signature.bind("schedule", "steps", spacing="linspace")
    except TypeError as error:
        problem = str(error)
    spacing = signature.parameters.get("spacing")
    if not problem and (spacing is None or spacing.default is spacing.empty):
        problem = "`spacing` has no default"
    if problem:
        name = getattr(function, "__name__", "of yours")
        raise ValueError(
            f"sampler {name}({', '.join(signature.parameters)}): {problem}; expected (schedule, steps, "
            'spacing="karras"), and a default for every other parameter'
        )
    return signature.parameters


def make_plan(
    name: str,
    schedule: Schedule,
    steps: int,
    *,
    spacing: str | Spacing | None = None,
    eta: float | None = None,
    last: int | None = None,
) -> Plan:
    """Make the plan of a sampler, "ddim", "euler_a_karras" or "DPM++ 2M Karras"; options default to the sampler's own.

    With `last`, only that many final steps run; a multistep sampler starts them without a history.  Raises ValueError
    for an unknown name or spacing, steps outside 1..1000, and an eta that the sampler does not take.
    """
    key, named_spacing = _resolve(name)
    parameters = parameters_of(SAMPLERS[key])
    most = len(schedule.alpha_bar)
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or not 1 <= steps <= most:
        raise ValueError(f"got {steps} steps, expected 1 to {most}")
    if last is not None and not 1 <= last <= steps:
        raise ValueError(f"got the last {last} of {steps} steps, expected 1 to {steps}")
    if spacing is None:
        spacing = parameters["spacing"].default if named_spacing is None else named_spacing
    levels = levels_of(spacing, schedule, steps)
    sigmas = [level.sigma if isinstance(level, Level) else math.nan for level in levels]
    if len(levels) != steps + 1 or not all(now > after for now, after in pairwise(sigmas)):
        raise ValueError(f"got spacing {spacing}, expected {steps + 1} Levels for {steps} steps, the noisiest first")
    arguments: dict[str, Any] = {"spacing": spacing}
    if last is not None:
        # The sampler asks its spacing for the levels of `last` steps, and gets the last ones of these.
        arguments["spacing"] = lambda schedule, num: levels[-num - 1 :]
    if eta is not None:
        if "eta" not in parameters or not 0 <= eta <= 1:
            able = ", ".join(key for key, f in SAMPLERS.items() if "eta" in parameters_of(f))
            raise ValueError(f"got eta {eta} for {key}, expected 0 to 1, with one of {able}")
        arguments["eta"] = eta
    return SAMPLERS[key](schedule, last or steps, **arguments)


def _resolve(name: str) -> tuple[str, str | None]:
    """Split a name into a key of SAMPLERS and a key of SPACINGS, or None.  Raises ValueError, with near names."""
    words = name.strip().lower().replace(" ", "_").replace("-", "_").replace("dpm++", "dpmpp")
    if words in SAMPLERS:
        return words, None
    for spacing in SPACINGS:
        if words.removesuffix(f"_{spacing}") in SAMPLERS:
            return words.removesuffix(f"_{spacing}"), spacing
    near = difflib.get_close_matches(words, SAMPLERS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown sampler {name!r}: {hint}expected one of {', '.join(SAMPLERS)}")


# ---- in the variance-preserving scale -------------------------------------------------------------------------------


def _transfer(now: Level, after: Level, eps: Array, x: Array = X, eta: float = 0.0) -> Array:
    """DDIM's update of x from one level to the next with a given eps.  Song et al. 2021, eq. 12."""
    with np.errstate(divide="ignore", invalid="ignore"):  # at zero terminal SNR, which Rows.plan reports
        x0 = (x - now.s * eps) / now.a
    kept, fresh = _noise_shares(now, after, eta)
    return after.a * x0 + kept * eps + fresh * NOISE


def _noise_shares(now: Level, after: Level, eta: float) -> tuple[float, float]:
    """How much of the next latent is eps, the noise that is kept, and how much fresh noise.

    Song et al. 2021, eqs. 12 and 16, at the levels (a, s) now and (a', s') after: with r = (s'/a') / (s/a) and
    a^2 + s^2 = 1, 1 - r^2 = (1 - a^2/a'^2) / s^2.  So fresh = eta s' sqrt(1 - r^2), and kept = sqrt(s'^2 - fresh^2).
    """
    ratio = now.a * after.s / (after.a * now.s)
    kept = after.s * np.sqrt(1 - eta**2 + (eta * ratio) ** 2)
    fresh = eta * after.s * np.sqrt((1 - ratio) * (1 + ratio))
    return float(kept), float(fresh)


@sampler
def ddim(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 adds noise of DDPM's variance.  Song et al. 2021, eqs. 12 and 16.

    With the spacing "leading" it ends at timestep 0, not clean: the last state's x0 is not the image, but nearly.
    """
    rows = Rows(schedule, h="eps" if schedule.prediction == "eps" else "x0")
    levels = levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        if rows.h == "eps":
            x = _transfer(now, after, H, eta=eta)
        else:
            kept, fresh = _noise_shares(now, after, eta)
            eps = (X - now.a * H) / now.s  # H is x0; nothing is divided by a, which is 0 at zero terminal SNR
            x = after.a * H + kept * eps + fresh * NOISE
        rows.add(i, now, x)
    # As the original, it begins with unit noise, though the first level's s is a little below 1.
    return rows.plan(end=levels[-1], initial=1.0)


@sampler
def plms(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Pseudo linear multistep: DDIM's update with eps from Adams-Bashforth.  Liu et al. 2022, eqs. 9, 12 and 13.

    The first step makes two calls (pseudo improved Euler), so there is one call more than steps.
    """
    rows, levels = Rows(schedule, h="eps"), levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.s == 0 and i == 0:  # a single step to the clean image: no eps can be predicted at its end
            rows.add(i, now, _transfer(now, after, H))
        elif i == 0:
            rows.add(i, now, _transfer(now, after, H), aside=X)
            ahead = after
            # The original gives the network timesteps[min(i + 1, last)]: with a single step to timestep 0, where
            # `leading` ends before the clean image, that is the same timestep again.
            if len(levels) == 2 and after.t == 0:
                ahead = after._replace(t=now.t)
            rows.add(i, ahead, _transfer(now, after, (H1 + H) / 2, x=ASIDE), remember=False)
        elif i == 1:
            rows.add(i, now, _transfer(now, after, (3 * H - H1) / 2))
        elif i == 2:
            rows.add(i, now, _transfer(now, after, (23 * H - 16 * H1 + 5 * H2) / 12))
        else:
            rows.add(i, now, _transfer(now, after, (55 * H - 59 * H1 + 37 * H2 - 9 * H3) / 24))
    return rows.plan(end=levels[-1], initial=1.0)


# ---- in the variance-exploding scale --------------------------------------------------------------------------------


def slope(y: Array, x0: Array, sigma: float) -> Array:
    """dy/dsigma of the probability-flow ODE.  Karras et al. 2022, eq. 4 with sigma(t) = t."""
    return (y - x0) / sigma


@sampler
def euler(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Euler's method on dy/dsigma.  Karras et al. 2022, alg. 2 without the second half."""
    rows, levels = Rows(schedule, h="x0"), schedule.finite(levels_of(spacing, schedule, steps))
    for i, (now, after) in enumerate(pairwise(levels)):
        y = X / now.scale
        rows.add(i, now, after.scale * (y + slope(y, H, now.sigma) * (after.sigma - now.sigma)))
    return rows.plan(end=levels[-1])


@sampler
def euler_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral: step below the next level, then add noise up to it.  k-diffusion sample_euler_ancestral."""
    rows, levels = Rows(schedule, h="x0"), schedule.finite(levels_of(spacing, schedule, steps))
    for i, (now, after) in enumerate(pairwise(levels)):
        down, up = ancestral(now.sigma, after.sigma, eta)
        y = X / now.scale
        y = y + slope(y, H, now.sigma) * (down - now.sigma)
        rows.add(i, now, after.scale * y + after.scale * up * NOISE)
    return rows.plan(end=levels[-1])


# ---- DPM-Solver++: x0, in lambda = -log sigma -----------------------------------------------------------------------


@sampler
def dpmpp_2m(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DPM-Solver++ (2M): x0 is extrapolated in lambda.  Lu et al. 2022b, alg. 2.

    The first step is of first order, and so is one to sigma 0, where lambda is infinite.
    """
    rows, levels = Rows(schedule, h="x0"), schedule.finite(levels_of(spacing, schedule, steps))
    for i, (now, after) in enumerate(pairwise(levels)):
        x0 = H
        if i > 0 and after.sigma > 0:
            r = np.log(levels[i - 1].sigma / now.sigma) / np.log(now.sigma / after.sigma)
            x0 = H + (H - H1) / (2 * r)
        ratio = after.sigma / now.sigma  # exp(-h)
        rows.add(i, now, after.scale * (ratio * X / now.scale + (1 - ratio) * x0))
    return rows.plan(end=levels[-1])
