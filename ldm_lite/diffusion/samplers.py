"""Further samplers: each is one function that writes its paper's update as the rows of a Plan.

Conventions are those of the core's samplers.py.  The first ones extend the core's: by churn, rectified flow, and
levels that other programs end at.  Solvers of the ODE in sigma run in a rectified flow's own scale, `straightened`.
To add a sampler, write such a function, here or in your own code, and decorate it with @register.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ldm_lite.core import samplers as core
from ldm_lite.core.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.core.samplers import SAMPLERS, slope
from ldm_lite.core.schedule import CLEAN, Level, Schedule, Spacing, ancestral
from ldm_lite.diffusion.flow import FlowSchedule, StraightLevel, straightened
from ldm_lite.diffusion.names import register
from ldm_lite.diffusion.plan import LearnedVariancePlan
from ldm_lite.diffusion.schedule import spaced_levels
from ldm_lite.diffusion.spacings import karras

__all__ = ["SAMPLERS", "register"]

# ---- in the variance-preserving scale -------------------------------------------------------------------------------


def _preserving(spacing: str | Spacing) -> Spacing:
    """The spacing with all levels of the schedule's kind, also the last, which need not be variance-preserving."""

    def levels(schedule: Schedule, steps: int) -> list[Level]:
        *levels, end = spaced_levels(spacing, schedule, steps)
        scale = np.hypot(end.a, end.s)
        if isinstance(schedule, FlowSchedule) or abs(scale - 1) < 1e-9:
            return [*levels, end]
        return [*levels, Level(end.t, end.a / scale, end.s / scale)]

    return levels


def only_preserving(schedule: Schedule, sampler: str) -> None:
    """Raises ValueError, naming the sampler, for a rectified flow."""
    if isinstance(schedule, FlowSchedule):
        raise ValueError(
            f"{sampler} is not defined for rectified flow (FLUX, Stable Diffusion 3): use euler, heun or dpmpp_2m"
        )


@register(label="DDIM", replace=True)
def ddim(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 adds noise of DDPM's variance.  Song et al. 2021, eqs. 12 and 16."""
    return core.ddim(schedule, steps, _preserving(spacing), eta)


@register(label="PLMS", aliases=("pndm",), replace=True)
def plms(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Pseudo linear multistep; not for rectified flow.  Liu et al. 2022."""
    only_preserving(schedule, "PLMS")
    return core.plms(schedule, steps, _preserving(spacing))


@register(label="DDPM")
def ddpm(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """DDIM with eta 1: the noise has the posterior's variance, or the network's own.  Ho et al. 2020, eq. 7."""
    return LearnedVariancePlan.of(ddim(schedule, steps, spacing, eta=1.0))


@register(label="DDIM CFG++")
def ddim_cfgpp(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM whose step away from x0 is the unguided one: the plan is DDIM's, the guidance guidance.cfg_plus_plus's.

    Chung et al. 2024, alg. 2.  The tasks apply both.
    """
    return ddim(schedule, steps, spacing, eta)


# ---- in the variance-exploding scale, or a rectified flow's ---------------------------------------------------------


def finite_levels(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The levels of a spacing, without an infinite sigma.  Raises ValueError for eps at zero terminal SNR."""
    return schedule.finite(spaced_levels(spacing, schedule, steps))


def _churned(
    schedule: Schedule, steps: int, spacing: str | Spacing, churn: float
) -> Iterator[tuple[int, Level, Level, Level, float]]:
    """Yield (number, now, after, hat, extra) for each step: from `now` to `after`, then up to `hat`, the next `now`.

    Churn adds noise before a call, here at the end of the previous row; `extra` is its sigma.  Karras et al. 2022,
    alg. 2.
    """
    if churn:
        only_preserving(schedule, "`churn`")
    levels = finite_levels(schedule, steps, spacing)
    gamma = min(churn / (len(levels) - 1), np.sqrt(2) - 1)
    hats = levels
    if gamma > 0:
        hats = [*(schedule.at_sigma(level.sigma * (1 + gamma)) for level in levels[:-1]), levels[-1]]
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        yield i, now, after, hat, _extra(after, hat)


def _extra(level: Level, hat: Level) -> float:
    """Return the sigma of the noise that raises y from a level to a noisier one."""
    return math.sqrt(max(0.0, hat.sigma**2 - level.sigma**2))


@register(label="Euler", aliases=("eulerdiscrete", "flowmatcheulerdiscrete"), replace=True)
def euler(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Euler's method on dy/dsigma, with churn.  Karras et al. 2022, alg. 2 without the second half."""
    schedule = straightened(schedule)
    rows = Rows(schedule, h="x0")
    for i, now, after, hat, extra in _churned(schedule, steps, spacing, churn):
        y = X / now.scale
        y = y + slope(y, H, now.sigma) * (after.sigma - now.sigma)
        rows.add(i, now, hat.scale * (y + extra * NOISE))
    return rows.plan(end=after)


def level_below(schedule: Schedule, now: Level, after: Level, eta: float) -> tuple[Level, float, float]:
    """Return (level, factor, noise): step from `now` down to the level, times the factor, plus noise, is `after`.

    k-diffusion get_ancestral_step; for rectified flow ComfyUI's choice of the level, sample_euler_ancestral_RF.
    """
    if isinstance(schedule, FlowSchedule):
        s = after.s * (1 + (after.s / now.s - 1) * eta)
        factor = after.a / (1 - s)
        return StraightLevel(after.t, 1 - s, s), factor, math.sqrt(max(0.0, after.s**2 - (factor * s) ** 2))
    down, up = ancestral(now.sigma, after.sigma, eta)
    return after._replace(s=after.a * down), 1.0, after.a * up


@register(label="Euler a", aliases=("euler_ancestral", "eulerancestraldiscrete"), replace=True)
def euler_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral, for rectified flow too: step below the next level, then add noise up to it.  k-diffusion."""
    schedule = straightened(schedule)
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, factor, noise = level_below(schedule, now, after, eta)
        y = X / now.scale
        y = y + slope(y, H, now.sigma) * (down.sigma - now.sigma)
        rows.add(i, now, factor * down.scale * y + noise * NOISE)
    return rows.plan(end=levels[-1])


@register(label="Heun", aliases=("heundiscrete",))
def heun(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Heun's method: an Euler step, repeated with the mean slope of its two ends.  Karras et al. 2022, alg. 2.

    Two calls a step, except for the last, which ends at sigma 0.
    """
    schedule = straightened(schedule)
    rows = Rows(schedule, h="x0")
    for i, now, after, hat, _ in _churned(schedule, steps, spacing, churn):
        _heun_step(rows, i, now, after, hat)
    return rows.plan(end=after)


@register(label="Restart")
def restart(schedule: Schedule, steps: int, spacing: str | Spacing = "karras") -> Plan:
    """Heun's method that goes back from sigma 0.1 to 2, by adding noise, and down again.  Xu et al. 2023, alg. 1.

    As in A1111: below 20 steps it is Heun's method; from 20 on, 9 of the steps are the second descent; from 36 on, two
    descents take a quarter each.  The levels are then "karras", from the spacing's first to its last but one.
    """
    only_preserving(schedule, "Restart")
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
    total, start, path = len(levels) - 1, levels[0].s, list(pairwise(levels))
    if total >= 20:
        again, times = (total // 4, 2) if total >= 36 else (9, 1)
        low, high = levels[-2].sigma, levels[0].sigma
        levels = karras(schedule, total - again * times, sigma_min=low, sigma_max=high)
        sigmas = np.array([level.sigma for level in levels])
        bottom, top = (int(np.argmin(abs(sigmas - sigma))) for sigma in (0.1, 2.0))
        path = list(pairwise(levels))
        if top < bottom:
            # As karras, but the lower end may be 0.
            roots = np.linspace(sigmas[top] ** (1 / 7), sigmas[bottom] ** (1 / 7), again + 1)
            back = [schedule.at_sigma(float(sigma)) if sigma > 0 else CLEAN for sigma in roots**7]
            path[bottom:bottom] = [*pairwise(back)] * times
    for i, (now, after) in enumerate(path):
        hat = path[i + 1][0] if i + 1 < len(path) else after
        _heun_step(rows, i, now, after, hat)
    return rows.plan(end=path[-1][1], initial=start)


def _heun_step(rows: Rows, step: int, now: Level, after: Level, hat: Level) -> None:
    """Add the one or two calls of a step of Heun's method, and noise from `after` up to `hat`."""
    y, h = X / now.scale, after.sigma - now.sigma
    ahead = y + slope(y, H, now.sigma) * h
    if after.sigma == 0:
        rows.add(step, now, hat.scale * (ahead + hat.sigma * NOISE))
        return
    # The network reads variance-preserving latents; the last level may have another scale.
    mid = after if np.isclose(after.a**2 + after.s**2, 1) else rows.schedule.at_sigma(after.sigma)
    rows.add(step, now, mid.scale * ahead, aside=X)
    y, ahead = ASIDE / now.scale, X / mid.scale
    y = y + (slope(y, H1, now.sigma) + slope(ahead, H, after.sigma)) / 2 * h
    rows.add(step, mid, hat.scale * (y + _extra(after, hat) * NOISE))


@register(label="DPM2", aliases=("dpm_2", "kdpm_2", "kdpm2discrete"))
def dpm2(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """DPM-Solver-2: steps with the slope at the geometric mean of two sigmas.  Lu et al. 2022a, alg. 1; k-diffusion."""
    schedule = straightened(schedule)
    rows = Rows(schedule, h="x0")
    for i, now, after, hat, extra in _churned(schedule, steps, spacing, churn):
        _dpm2_step(rows, i, now, after, hat.scale, hat.scale * extra)
    return rows.plan(end=after)


@register(
    label="DPM2 a", aliases=("dpm2_ancestral", "dpm_2_a", "dpm_2_ancestral", "kdpm_2_a", "kdpm2ancestraldiscrete")
)
def dpm2_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-2: step below the next level, then add noise up to it.  k-diffusion sample_dpm_2_ancestral."""
    schedule = straightened(schedule)
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, factor, noise = level_below(schedule, now, after, eta)
        _dpm2_step(rows, i, now, down, factor * down.scale, noise)
    return rows.plan(end=levels[-1])


def _dpm2_step(rows: Rows, step: int, now: Level, after: Level, scale: float, noise: float) -> None:
    """Add the one or two calls of a step of DPM-Solver-2; the next latent is y at its end times scale, plus noise."""
    if after.s == 0:
        rows.add(step, now, scale * H + noise * NOISE)
        return
    y, mid = X / now.scale, rows.schedule.at_sigma(math.sqrt(now.sigma * after.sigma))
    rows.add(step, now, mid.scale * (y + slope(y, H, now.sigma) * (mid.sigma - now.sigma)), aside=X)
    y = ASIDE / now.scale + slope(X / mid.scale, H, mid.sigma) * (after.sigma - now.sigma)
    rows.add(step, mid, scale * y + noise * NOISE)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)


def _adams(rows: Rows, levels: list[Level], order: int, log: bool) -> Plan:
    """Adams-Bashforth, exact for uneven steps: H, the slope, is interpolated in sigma or in log sigma."""
    sigmas = np.array([level.sigma for level in levels])
    for i, (now, after) in enumerate(pairwise(levels)):
        past = 1 if log and after.sigma == 0 else min(order, i + 1)  # log 0 cannot be interpolated
        points = sigmas[i - past + 1 : i + 1][::-1]
        # Integrals over sigma, from `now` to `after`, of the Lagrange polynomials through the points.
        sigma = (after.sigma + now.sigma) / 2 + (after.sigma - now.sigma) / 2 * _NODES
        u, v = (np.log(sigma), np.log(points)) if log else (sigma, points)
        y = X / now.scale
        for j, h in enumerate((H, H1, H2, H3)[:past]):
            basis = np.ones_like(u)
            for k in range(past):
                if k != j:
                    basis *= (u - v[k]) / (v[j] - v[k])
            y = y + (after.sigma - now.sigma) / 2 * (_WEIGHTS * basis).sum() * h
        rows.add(i, now, after.scale * y)
    return rows.plan(end=levels[-1])


@register(label="LMS", aliases=("lmsdiscrete",))
def lms(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Linear multistep of order 4 in sigma.  k-diffusion sample_lms."""
    schedule = straightened(schedule)
    keep: Any = "flow" if isinstance(schedule, FlowSchedule) else "eps"  # the slope
    return _adams(Rows(schedule, keep), finite_levels(schedule, steps, spacing), order=4, log=False)


@register(label="DEIS", aliases=("deismultistep",))
def deis(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DEIS: linear multistep of order 3 in log sigma ("log-rho AB").  Zhang and Chen 2023, sec. 4."""
    levels = finite_levels(schedule, steps, spacing)
    if isinstance(schedule, FlowSchedule):
        levels = schedule.finite(levels, 3e-4)  # eps cancels x at a higher first sigma, in float32
    return _adams(Rows(schedule, h="eps"), levels, order=3, log=True)


# ---- for distilled checkpoints --------------------------------------------------------------------------------------


@register(label="LCM")
def lcm(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm") -> Plan:
    """Latent consistency: jump to x0, then add noise up to the next level.  Luo et al. 2023, alg. 3.

    For a variance-preserving process x0 is mixed with x, more at low noise; for a flow it is not.
    """
    rows, levels = Rows(schedule, h="x0"), spaced_levels(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        scaled = math.inf if isinstance(schedule, FlowSchedule) else 10.0 * now.t
        skip = 0.25 / (scaled**2 + 0.25)
        rows.add(i, now, after.a * (skip * X + np.sqrt(1 - skip) * H) + after.s * NOISE)
    return rows.plan(end=levels[-1], initial=1.0)


@register(label="LCM webui")
def lcm_webui(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Latent consistency as in A1111: any levels over the range of the 50 trained ones, and y in place of x.

    The network is given the trained timestep that is nearest in log sigma.
    """
    only_preserving(schedule, "LCM webui")
    stride = len(schedule.alpha_bar) // 50
    trained = replace(schedule, alpha_bar=schedule.alpha_bar[stride - 1 :: stride])
    rows, levels = Rows(schedule, h="x0"), finite_levels(trained, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        t = float(np.argmin(abs(np.log(now.sigma) - np.log(trained.sigmas))) * stride + stride - 1)
        scaled = 10.0 * t
        x0 = 0.25 / (scaled**2 + 0.25) * X / now.a + scaled / np.sqrt(scaled**2 + 0.25) * H
        rows.add(i, now._replace(t=t), after.a * (x0 + after.sigma * NOISE))
    return rows.plan(end=levels[-1])


@register(label="TCD")
def tcd(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm", eta: float = 0.3) -> Plan:
    """Trajectory consistency: jump to timestep (1 - eta) t of the next t, then add noise up to t, down to timestep 0.

    eta is the paper's gamma: 0 adds no noise.  Zheng et al. 2024, alg. 4.
    """
    only_preserving(schedule, "TCD")
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
    levels = [*levels[:-1], schedule.at(0)] if levels[-1].s == 0 else levels
    for i, (now, after) in enumerate(pairwise(levels)):
        down = after
        if eta > 0:
            t = (1 - eta) * after.t
            below = schedule.at(int(t + 1e-9)) if after.t == int(after.t) else schedule.between(t)
            # A level may lie below timestep 0, as the last of "ays" does.
            down = min(below, after, key=lambda level: level.s)
        x = down.a * H + down.s * (X - now.a * H) / now.s
        ratio = after.a / down.a
        rows.add(i, now, ratio * x + np.sqrt(max(0.0, 1 - ratio**2)) * NOISE)
    return rows.plan(end=levels[-1], initial=1.0)
