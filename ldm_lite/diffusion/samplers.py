"""Samplers: each is one function that writes its paper's update as the rows of a Plan.

A spacing gives the noise levels, the noisiest first.  Latents are X = a x0 + s eps.  A sampler written for the
variance-exploding scale y = x0 + sigma eps uses y = X / a and X = a y; a solver of the ODE, which also runs in a
rectified flow's own scale, `scale` in place of a.  H is the network's eps or x0.
To add a sampler, write such a function, here or in your own code, and decorate it with @register.
"""

from itertools import pairwise

import numpy as np

from ldm_lite.diffusion.names import SAMPLERS as SAMPLERS
from ldm_lite.diffusion.names import register as register
from ldm_lite.diffusion.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.diffusion.schedule import CLEAN, Array, Level, Schedule, Spacing, karras, levels_of

# ---- in the variance-preserving scale -------------------------------------------------------------------------------


def _transfer(now: Level, after: Level, eps: Array, x: Array = X, eta: float = 0.0) -> Array:
    """Return DDIM's update of x from one level to the next with a given eps.  Song et al. 2021, eq. 12."""
    with np.errstate(divide="ignore", invalid="ignore"):  # at zero SNR; Rows.plan reports it
        x0 = (x - now.s * eps) / now.a
    old, new = _noise_shares(now, after, eta)
    return after.a * x0 + old * eps + new * NOISE


def _noise_shares(now: Level, after: Level, eta: float) -> tuple[float, float]:
    """Return the coefficients of eps and of fresh noise (sigma of Song et al. 2021, eq. 16) in the next latent.

    That of eps is sqrt(after.s^2 - sigma^2), written to avoid cancellation (total at zero SNR with eta 1).
    """
    ratio = now.a * after.s / (after.a * now.s)  # of the two levels' s / a
    old = after.s * np.sqrt(1 - eta**2 + (eta * ratio) ** 2)
    return float(old), float(eta * after.s * np.sqrt((1 - ratio) * (1 + ratio)))


def _preserving(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The levels of a spacing, all of them of the schedule's kind, also the last."""
    *levels, end = levels_of(spacing, schedule, steps)
    if schedule.is_flow:
        return [*levels, end]
    scale = np.hypot(end.a, end.s)
    return [*levels, end if abs(scale - 1) < 1e-9 else Level(end.t, end.a / scale, end.s / scale)]


@register(label="DDIM")
def ddim(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 adds noise of DDPM's variance.  Song et al. 2021, eqs. 12 and 16."""
    # H is x0 unless the network predicts eps, so that zero terminal SNR is defined.
    rows = Rows(schedule, keep="eps" if schedule.prediction == "eps" else "x0")
    levels = _preserving(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        if rows.keep == "eps":
            x = _transfer(now, after, H, eta=eta)
        else:
            old, new = _noise_shares(now, after, eta)
            x = after.a * H + old * (X - now.a * H) / now.s + new * NOISE
        rows.add(i, now, x)
    return rows.plan(end=levels[-1])


@register(label="PLMS", aliases=("pndm",))
def plms(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Pseudo linear multistep: DDIM's update with eps from Adams-Bashforth.  Liu et al. 2022, eqs. 9, 12 and 13.

    The first step makes two calls (pseudo improved Euler), so there is one call more than steps.  A single step to the
    clean image is DDIM's, since no eps can be predicted at its end.
    """
    only_preserving(schedule, "PLMS")
    rows, levels = Rows(schedule, keep="eps"), _preserving(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.s == 0 and i == 0:
            rows.add(i, now, _transfer(now, after, H))
        elif i == 0:
            rows.add(i, now, _transfer(now, after, H), aside=X)
            # The original makes this call at the next timestep, which a single step to timestep 0 does not have.
            ahead = after if len(levels) > 2 or after.t > 0 else after._replace(t=now.t)
            rows.add(i, ahead, _transfer(now, after, (H1 + H) / 2, x=ASIDE), remember=False)
        elif i == 1:
            rows.add(i, now, _transfer(now, after, (3 * H - H1) / 2))
        elif i == 2:
            rows.add(i, now, _transfer(now, after, (23 * H - 16 * H1 + 5 * H2) / 12))
        else:
            rows.add(i, now, _transfer(now, after, (55 * H - 59 * H1 + 37 * H2 - 9 * H3) / 24))
    return rows.plan(end=levels[-1])


@register(label="DDPM")
def ddpm(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """DDIM with eta 1: the noise has the posterior's variance, or the network's own.  Ho et al. 2020, eq. 7."""
    return ddim(schedule, steps, spacing, eta=1.0).with_learned_variance()


# ---- in the variance-exploding scale --------------------------------------------------------------------------------


def finite_levels(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The levels of a spacing, without an infinite sigma.  Raises ValueError for eps at zero terminal SNR."""
    return schedule.finite(levels_of(spacing, schedule, steps))


def ode_levels(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The same for solvers of the ODE: those of a rectified flow are flow.Straight, where sigma is s."""
    return schedule.straight(levels_of(spacing, schedule, steps))


def only_preserving(schedule: Schedule, sampler: str) -> None:
    """Raises ValueError, naming the sampler, for a rectified flow."""
    if schedule.is_flow:
        raise ValueError(
            f"{sampler} is not defined for rectified flow (FLUX, Stable Diffusion 3): take euler, heun or dpmpp_2m"
        )


def slope(y: Array, x0: Array, sigma: float) -> Array:
    """dy/dsigma of the probability-flow ODE.  Karras et al. 2022, eq. 4 with sigma(t) = t."""
    return (y - x0) / sigma


def _churned(schedule: Schedule, levels: list[Level], churn: float) -> list[Level]:
    """Return the levels raised by their share of churn, as the model sees them.  Karras et al. 2022, alg. 2."""
    if churn:
        only_preserving(schedule, "`churn`")
    gamma = min(churn / (len(levels) - 1), np.sqrt(2) - 1)
    return (
        levels if gamma == 0 else [schedule.at_sigma(level.sigma * (1 + gamma)) for level in levels[:-1]] + levels[-1:]
    )


@register(label="Euler", aliases=("eulerdiscrete",))
def euler(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Euler's method on dy/dsigma = (y - x0) / sigma.  Karras et al. 2022, alg. 2 without the second half.

    Churn adds noise before a model call: here, at the end of the previous row.
    """
    rows, levels = Rows(schedule, keep="x0"), ode_levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y = X / now.scale
        y = y + slope(y, H, now.sigma) * (after.sigma - now.sigma)
        rows.add(i, now, hat.scale * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


def _extra(level: Level, hat: Level) -> float:
    """Return the sigma of the noise that raises y from a level to its churned level."""
    return float(np.sqrt(max(0.0, hat.sigma**2 - level.sigma**2)))


@register(label="Euler a", aliases=("euler_ancestral", "eulerancestraldiscrete"))
def euler_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral: step below the next level, then add noise up to it.  k-diffusion sample_euler_ancestral."""
    rows, levels = Rows(schedule, keep="x0"), ode_levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, factor, noise = schedule.below(now, after, eta)
        y = X / now.scale
        y = y + slope(y, H, now.sigma) * (down.sigma - now.sigma)
        rows.add(i, now, factor * down.scale * y + noise * NOISE)
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="Heun", aliases=("heundiscrete",))
def heun(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Heun's method: an Euler step, repeated with the mean slope of its two ends.  Karras et al. 2022, alg. 2.

    Two calls a step, except for the last, which ends at sigma 0.
    """
    rows, levels = Rows(schedule, keep="x0"), ode_levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        _heun_step(rows, i, now, after, hat)
    return rows.plan(end=levels[-1], initial=hats[0].s)


@register(label="Restart")
def restart(schedule: Schedule, steps: int, spacing: str | Spacing = "karras") -> Plan:
    """Heun's method that goes back from sigma 0.1 to 2, by adding noise, and down again.  Xu et al. 2023, alg. 1.

    As in A1111: below 20 steps it is Heun's method; from 20 on, 9 of the steps are the second descent; from 36 on, two
    descents take a quarter each.  Levels are then those of "karras", between the spacing's first and last but one.
    """
    only_preserving(schedule, "Restart")
    rows, levels = Rows(schedule, keep="x0"), finite_levels(schedule, steps, spacing)
    total, start, path = len(levels) - 1, levels[0].s, list(pairwise(levels))
    if total >= 20:
        again, times = (total // 4, 2) if total >= 36 else (9, 1)
        low, high = levels[-2].sigma, levels[0].sigma
        levels = karras(schedule, total - again * times, sigma_min=low, sigma_max=high)
        sigmas = np.array([level.sigma for level in levels])
        bottom, top = (int(np.argmin(abs(sigmas - sigma))) for sigma in (0.1, 2.0))
        path = list(pairwise(levels))
        if top < bottom:
            roots = np.linspace(
                sigmas[top] ** (1 / 7), sigmas[bottom] ** (1 / 7), again + 1
            )  # karras, but perhaps to 0
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
    # The network reads variance-preserving latents; the last level may be of another scale.
    mid = after if np.isclose(after.a**2 + after.s**2, 1) else rows.schedule.beside(after, after.sigma)
    rows.add(step, now, mid.scale * ahead, aside=X)
    y, ahead = ASIDE / now.scale, X / mid.scale
    y = y + (slope(y, H1, now.sigma) + slope(ahead, H, after.sigma)) / 2 * h
    rows.add(step, mid, hat.scale * (y + _extra(after, hat) * NOISE))


@register(label="DPM2", aliases=("dpm_2", "kdpm_2", "kdpm2discrete"))
def dpm2(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """DPM-Solver-2: steps with the slope at the geometric mean of two sigmas.  Lu et al. 2022a, alg. 1; k-diffusion."""
    rows, levels = Rows(schedule, keep="x0"), ode_levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y = X / now.scale
        if after.sigma == 0:
            rows.add(i, now, after.scale * H)
            continue
        mid = schedule.beside(now, float(np.sqrt(now.sigma * after.sigma)))
        rows.add(i, now, mid.scale * (y + slope(y, H, now.sigma) * (mid.sigma - now.sigma)), aside=X)
        y = ASIDE / now.scale + slope(X / mid.scale, H, mid.sigma) * (after.sigma - now.sigma)
        rows.add(i, mid, hat.scale * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


@register(
    label="DPM2 a", aliases=("dpm2_ancestral", "dpm_2_a", "dpm_2_ancestral", "kdpm_2_a", "kdpm2ancestraldiscrete")
)
def dpm2_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-2: step below the next level, then add noise up to it.  k-diffusion sample_dpm_2_ancestral."""
    rows, levels = Rows(schedule, keep="x0"), ode_levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, factor, noise = schedule.below(now, after, eta)
        y = X / now.scale
        if down.s == 0:
            rows.add(i, now, factor * down.scale * H + noise * NOISE)
            continue
        mid = schedule.beside(now, float(np.sqrt(now.sigma * down.sigma)))
        rows.add(i, now, mid.scale * (y + slope(y, H, now.sigma) * (mid.sigma - now.sigma)), aside=X)
        y = ASIDE / now.scale + slope(X / mid.scale, H, mid.sigma) * (down.sigma - now.sigma)
        rows.add(i, mid, factor * down.scale * y + noise * NOISE)
    return rows.plan(end=levels[-1], initial=levels[0].s)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)


def _interpolation_integrals(points: Array, low: float, high: float, log: bool) -> Array:
    """Integrals over sigma, low to high, of the Lagrange polynomials through `points`, in sigma or in log sigma."""
    sigma = (high + low) / 2 + (high - low) / 2 * _NODES
    u, v = (np.log(sigma), np.log(points)) if log else (sigma, points)
    integrals = []
    for j in range(len(v)):
        basis = np.ones_like(u)
        for k in range(len(v)):
            if k != j:
                basis *= (u - v[k]) / (v[j] - v[k])
        integrals.append((high - low) / 2 * (_WEIGHTS * basis).sum())
    return np.array(integrals)


def _adams(rows: Rows, levels: list[Level], order: int, log: bool) -> Plan:
    """Adams-Bashforth, exact for uneven steps: H, the slope, is interpolated in sigma or in log sigma."""
    sigmas = np.array([level.sigma for level in levels])
    for i, (now, after) in enumerate(pairwise(levels)):
        past = 1 if log and after.sigma == 0 else min(order, i + 1)  # log 0 cannot be interpolated
        points = sigmas[i - past + 1 : i + 1][::-1]
        weights = _interpolation_integrals(points, now.sigma, after.sigma, log)
        y = X / now.scale + sum(w * h for w, h in zip(weights, (H, H1, H2, H3), strict=False))
        rows.add(i, now, after.scale * y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="LMS", aliases=("lmsdiscrete",))
def lms(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Linear multistep of order 4 in sigma.  k-diffusion sample_lms."""
    rows = Rows(schedule, keep="flow" if schedule.is_flow else "eps")
    return _adams(rows, ode_levels(schedule, steps, spacing), order=4, log=False)


@register(label="DEIS", aliases=("deismultistep",))
def deis(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DEIS: linear multistep of order 3 in log sigma ("log-rho AB").  Zhang and Chen 2023, sec. 4."""
    levels = finite_levels(schedule, steps, spacing)
    if schedule.is_flow:
        levels = schedule.finite(levels, 3e-4)  # eps cancels x at a higher first sigma, in float32
    return _adams(Rows(schedule, keep="eps"), levels, order=3, log=True)


# ---- with its own guidance ------------------------------------------------------------------------------------------


@register(label="DDIM CFG++")
def ddim_cfgpp(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM whose step away from x0 is the unguided one: the plan is DDIM's, the guidance guidance.cfg_plus_plus's.

    Chung et al. 2024, alg. 2.  The tasks apply both.
    """
    return ddim(schedule, steps, spacing, eta)
