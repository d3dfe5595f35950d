"""Samplers: one function each, which writes its paper's update as the rows of a Plan.

Levels come from a spacing, the noisiest first.  Latents are X = a x0 + s eps; a sampler written for the
variance-exploding scale y = x0 + sigma eps uses y = X / a, and X = a y.  H is eps or x0.
To add a sampler: write such a function, and give it a name in SAMPLERS (names.py knows other spellings).
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ldm_lite.diffusion.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.diffusion.schedule import Array, Level, Schedule, Spacing, levels_of

# ---- in the variance-preserving scale -------------------------------------------------------------------------------


def _transfer(now: Level, after: Level, eps: Array, x: Array = X, eta: float = 0.0) -> Array:
    """x at one level -> the next, by DDIM's update with a given eps.  Song et al. 2021, eq. 12."""
    with np.errstate(divide="ignore", invalid="ignore"):  # at zero SNR; Rows.plan reports it
        x0 = (x - now.s * eps) / now.a
    old, new = _noise_shares(now, after, eta)
    return after.a * x0 + old * eps + new * NOISE


def _noise_shares(now: Level, after: Level, eta: float) -> tuple[float, float]:
    """What after.s is made of: eps, and fresh noise (sigma of Song et al. 2021, eq. 16).

    The first is sqrt(after.s^2 - sigma^2) without its cancellation, which is complete at zero SNR with eta 1.
    """
    ratio = now.a / after.a
    old = after.s * np.sqrt(1 - eta**2 + (eta * ratio * after.s / now.s) ** 2)
    return float(old), float(eta * (after.s / now.s) * np.sqrt(1 - ratio**2))


def ddim(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 is DDPM's variance.  Song et al. 2021, eqs. 12 and 16."""
    # From x0 where the network does not predict eps: then zero terminal SNR is defined.
    rows = Rows(schedule, keep="eps" if schedule.prediction == "eps" else "x0")
    levels = levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        if rows.keep == "eps":
            x = _transfer(now, after, H, eta=eta)
        else:
            old, new = _noise_shares(now, after, eta)
            x = after.a * H + old * (X - now.a * H) / now.s + new * NOISE
        rows.add(i, now, x)
    return rows.plan(end=levels[-1])


def ddpm(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Ancestral sampling with the posterior's variance, or the network's own: DDIM of eta 1.  Ho et al. 2020, eq. 7."""
    return ddim(schedule, steps, spacing, eta=1.0).with_learned_variance()


def plms(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Pseudo linear multistep: DDIM's update with eps from Adams-Bashforth.  Liu et al. 2022, eqs. 9, 12 and 13.

    The first step makes two calls (pseudo improved Euler), so there is one call more than steps; but a single step to
    clean is DDIM's, since there is no noise to ask for at its end.
    """
    rows = Rows(schedule, keep="eps")
    levels = levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.s == 0 and i == 0:
            rows.add(i, now, _transfer(now, after, H))
        elif i == 0:
            rows.add(i, now, _transfer(now, after, H), aside=X)
            # The original asks at the next timestep, of which a single step has none.
            ahead = after if len(levels) > 2 else after._replace(t=now.t)
            rows.add(i, ahead, _transfer(now, after, (H1 + H) / 2, x=ASIDE), remember=False)
        elif i == 1:
            rows.add(i, now, _transfer(now, after, (3 * H - H1) / 2))
        elif i == 2:
            rows.add(i, now, _transfer(now, after, (23 * H - 16 * H1 + 5 * H2) / 12))
        else:
            rows.add(i, now, _transfer(now, after, (55 * H - 59 * H1 + 37 * H2 - 9 * H3) / 24))
    return rows.plan(end=levels[-1])


def lcm(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm") -> Plan:
    """Latent consistency: jump to x0, noise it to the next level.  Luo et al. 2023, alg. 3."""
    rows = Rows(schedule, keep="x0")
    levels = levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        scaled = 10.0 * now.t
        x0 = 0.25 / (scaled**2 + 0.25) * X + scaled / np.sqrt(scaled**2 + 0.25) * H
        rows.add(i, now, after.a * x0 + after.s * NOISE)
    return rows.plan(end=levels[-1])


# ---- in the variance-exploding scale --------------------------------------------------------------------------------


def _levels(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The spacing's levels, with sigma at most 4096 where it is infinite (zero terminal SNR), as diffusers has it.

    Raises ValueError for eps prediction there, which says nothing about x0.
    """
    levels = levels_of(spacing, schedule, steps)
    if schedule.prediction == "eps" and schedule.alpha_bar[-1] == 0:
        raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
    return [level if level.a > 0 else level._replace(a=2.0**-12) for level in levels]


def _slope(y: Array, x0: Array, sigma: float) -> Array:
    """dy/dsigma of the probability-flow ODE.  Karras et al. 2022, eq. 4 with sigma(t) = t."""
    return (y - x0) / sigma


def _ancestral(now: float, after: float, eta: float = 1.0) -> tuple[float, float]:
    """sigma -> (the sigma to step down to, the noise to add then) for the next level.  As in k-diffusion."""
    up = min(after, eta * np.sqrt(after**2 * (now**2 - after**2) / now**2))
    return float(np.sqrt(after**2 - up**2)), float(up)


def _churned(schedule: Schedule, levels: list[Level], churn: float) -> list[Level]:
    """The levels that the model sees: each raised by its share of churn.  Karras et al. 2022, alg. 2, all sigmas."""
    gamma = min(churn / (len(levels) - 1), np.sqrt(2) - 1)
    return (
        levels if gamma == 0 else [schedule.at_sigma(level.sigma * (1 + gamma)) for level in levels[:-1]] + levels[-1:]
    )


def euler(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Euler's method on dy/dsigma = (y - x0) / sigma.  Karras et al. 2022, alg. 2 without the second half.

    Churn adds noise before a call: here at the end of the row before.
    """
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y = X / now.a
        y = y + _slope(y, H, now.sigma) * (after.sigma - now.sigma)
        rows.add(i, now, hat.a * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


def _extra(level: Level, hat: Level) -> float:
    """The noise that raises y from a level to its churned one."""
    return float(np.sqrt(max(0.0, hat.sigma**2 - level.sigma**2)))


def euler_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral: a step to below the next level, then noise up to it.  k-diffusion sample_euler_ancestral."""
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, up = _ancestral(now.sigma, after.sigma, eta)
        y = X / now.a
        y = y + _slope(y, H, now.sigma) * (down - now.sigma) + up * NOISE
        rows.add(i, now, after.a * y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


def heun(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Heun's method: Euler, then the mean of the slopes at both ends.  Karras et al. 2022, alg. 2.

    Two calls a step but in the last, which ends at sigma 0.
    """
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y, h = X / now.a, after.sigma - now.sigma
        ahead = y + _slope(y, H, now.sigma) * h
        if after.sigma == 0:
            rows.add(i, now, after.a * ahead)
            continue
        rows.add(i, now, after.a * ahead, aside=X)
        y, ahead = ASIDE / now.a, X / after.a
        y = y + (_slope(y, H1, now.sigma) + _slope(ahead, H, after.sigma)) / 2 * h
        rows.add(i, after, hat.a * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


def dpm2(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """DPM-Solver-2: the slope at the geometric mean of two sigmas.  Lu et al. 2022a, alg. 1; k-diffusion."""
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y = X / now.a
        if after.sigma == 0:
            rows.add(i, now, after.a * H)
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * after.sigma)))
        rows.add(i, now, mid.a * (y + _slope(y, H, now.sigma) * (mid.sigma - now.sigma)), aside=X)
        y = ASIDE / now.a + _slope(X / mid.a, H, mid.sigma) * (after.sigma - now.sigma)
        rows.add(i, mid, hat.a * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


def dpm2_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-2 to below the next level, then noise up to it.  k-diffusion sample_dpm_2_ancestral."""
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, up = _ancestral(now.sigma, after.sigma, eta)
        y = X / now.a
        if down == 0:
            rows.add(i, now, after.a * (H + up * NOISE))
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * down)))
        rows.add(i, now, mid.a * (y + _slope(y, H, now.sigma) * (mid.sigma - now.sigma)), aside=X)
        y = ASIDE / now.a + _slope(X / mid.a, H, mid.sigma) * (down - now.sigma)
        rows.add(i, mid, after.a * (y + up * NOISE))
    return rows.plan(end=levels[-1], initial=levels[0].s)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)


def _interpolation_integrals(points: Array, low: float, high: float, log: bool) -> Array:
    """Integral over sigma from low to high of each Lagrange polynomial through `points`, in sigma or in log sigma."""
    sigma = (high + low) / 2 + (high - low) / 2 * _NODES
    u, v = (np.log(sigma), np.log(points)) if log else (sigma, points)
    integrals = []
    for j in range(len(v)):
        others = [k for k in range(len(v)) if k != j]
        basis = np.prod([(u - v[k]) / (v[j] - v[k]) for k in others] + [np.ones_like(u)], axis=0)
        integrals.append((high - low) / 2 * (_WEIGHTS * basis).sum())
    return np.array(integrals)


def _adams(schedule: Schedule, steps: int, spacing: str | Spacing, order: int, log: bool) -> Plan:
    """Adams-Bashforth with exact coefficients for uneven steps: the slope eps interpolated in sigma or log sigma."""
    rows = Rows(schedule, keep="eps")
    levels = _levels(schedule, steps, spacing)
    sigmas = np.array([level.sigma for level in levels])
    for i, (now, after) in enumerate(pairwise(levels)):
        past = 1 if log and after.sigma == 0 else min(order, i + 1)  # log 0 has no interpolation
        points = sigmas[i - past + 1 : i + 1][::-1]
        weights = _interpolation_integrals(points, now.sigma, after.sigma, log)
        y = X / now.a + sum(w * h for w, h in zip(weights, (H, H1, H2, H3), strict=False))
        rows.add(i, now, after.a * y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


def lms(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Linear multistep of order 4 in sigma.  k-diffusion sample_lms."""
    return _adams(schedule, steps, spacing, order=4, log=False)


def deis(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DEIS: linear multistep of order 3 in log sigma ("log-rho AB").  Zhang and Chen 2023, sec. 4."""
    return _adams(schedule, steps, spacing, order=3, log=True)


# ---- DPM-Solver++: x0, in lambda = -log sigma -----------------------------------------------------------------------


def dpmpp_2m(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DPM-Solver++ (2M): x0 extrapolated in lambda.  Lu et al. 2022b, alg. 2.

    First order at the first step, and at the last, whose lambda is infinite.
    """
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        x0 = H
        if i > 0 and after.sigma > 0:
            r = np.log(levels[i - 1].sigma / now.sigma) / np.log(now.sigma / after.sigma)
            x0 = H + (H - H1) / (2 * r)
        ratio = after.sigma / now.sigma  # exp(-h)
        rows.add(i, now, after.a * (ratio * X / now.a + (1 - ratio) * x0))
    return rows.plan(end=levels[-1], initial=levels[0].s)


def dpmpp_2s_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2S) to below the next level, then noise up to it.  Lu et al. 2022b, alg. 1; k-diffusion."""
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, up = _ancestral(now.sigma, after.sigma, eta)
        if down == 0:
            rows.add(i, now, after.a * (H + up * NOISE))
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * down)))
        ratio = mid.sigma / now.sigma
        rows.add(i, now, mid.a * (ratio * X / now.a + (1 - ratio) * H), aside=X)
        ratio = down / now.sigma
        rows.add(i, mid, after.a * (ratio * ASIDE / now.a + (1 - ratio) * H + up * NOISE))
    return rows.plan(end=levels[-1], initial=levels[0].s)


def dpmpp_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (SDE), two stages, r = 1/2.  Lu et al. 2022b, sec. 5; k-diffusion sample_dpmpp_sde.

    The noises of both stages are those of one Brownian motion in sigma, as there: the second contains the first.
    """
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.sigma == 0:
            rows.add(i, now, after.a * H)
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * after.sigma)))
        # To the middle.  The second stage starts at X / now.a again, which is recovered from what is put aside.
        down, up = _ancestral(now.sigma, mid.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, now, mid.a * (ratio * X / now.a + (1 - ratio) * H + up * NOISE), aside=X)
        # The first stage's noise is what its latent holds beside its mean.
        first = (X / mid.a - ratio * ASIDE / now.a - (1 - ratio) * H1) / up if up > 0 else 0 * NOISE
        shared = np.sqrt((now.sigma - mid.sigma) / (now.sigma - after.sigma))
        noise = shared * first + np.sqrt(1 - shared**2) * NOISE
        down, up = _ancestral(now.sigma, after.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, mid, after.a * (ratio * ASIDE / now.a + (1 - ratio) * H + up * noise))
    return rows.plan(end=levels[-1], initial=levels[0].s)


def dpmpp_2m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2M SDE), midpoint.  Lu et al. 2022b, eq. 18; k-diffusion sample_dpmpp_2m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=2)


def dpmpp_3m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (3M SDE).  k-diffusion sample_dpmpp_3m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=3)


def _multistep_sde(schedule: Schedule, steps: int, spacing: str | Spacing, eta: float, order: int) -> Plan:
    """x0 by its differences D1 and D2 in lambda, weighted by the phi functions of h (1 + eta)."""
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    hs = [np.log(now.sigma / after.sigma) for now, after in pairwise(levels) if after.sigma > 0]
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.sigma == 0:
            rows.add(i, now, after.a * H)
            continue
        h = hs[i] * (1 + eta)
        decay, phi1 = np.exp(-h), -np.expm1(-h)
        phi2 = 1 - phi1 / h
        y = decay * X / now.a + phi1 * H
        if order == 2 and i >= 1:
            y = y + phi1 / 2 * (H - H1) * hs[i] / hs[i - 1]
        elif order == 3 and i == 1:
            y = y + phi2 * (H - H1) * hs[i] / hs[i - 1]
        elif order == 3 and i >= 2:
            r0, r1 = hs[i - 1] / hs[i], hs[i - 2] / hs[i]
            d0, d1 = (H - H1) / r0, (H1 - H2) / r1
            y = y + phi2 * (d0 + (d0 - d1) * r0 / (r0 + r1)) - (phi2 / h - 0.5) * (d0 - d1) / (r0 + r1)
        noise = after.sigma * np.sqrt(-np.expm1(-2 * eta * hs[i]))
        rows.add(i, now, after.a * (y + noise * NOISE))
    return rows.plan(end=levels[-1], initial=levels[0].s)


def unipc(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """UniPC-2 (B2): DPM-Solver++ (2M) predicts, the next call's answer corrects before it predicts in turn.

    Zhao et al. 2023, algs. 5 and 6 with B(h) = e^h - 1, order 2, lower at both ends.  ASIDE is the last corrected y.
    """
    rows = Rows(schedule, keep="x0")
    levels = _levels(schedule, steps, spacing)
    lambdas = [-np.log(level.sigma) if level.sigma > 0 else np.inf for level in levels]

    y = X / levels[0].a
    for i, (now, after) in enumerate(pairwise(levels)):
        if i > 0:  # correct: from the last corrected y, with H at its predicted one
            y = _unipc_correct(levels[i - 1], now, lambdas[i - 2] if i > 1 else None, lambdas[i - 1], lambdas[i])
        ratio, x0 = after.sigma / now.sigma, H
        if i > 0 and after.sigma > 0:
            r = (lambdas[i] - lambdas[i - 1]) / (lambdas[i + 1] - lambdas[i])
            x0 = H + (H - H1) / (2 * r)
        rows.add(i, now, after.a * (ratio * y + (1 - ratio) * x0), aside=y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


def _unipc_correct(before: Level, now: Level, oldest: float | None, last: float, this: float) -> Array:
    """y at `now` from y at `before` (ASIDE), x0 there (H1), x0 before it (H2), and x0 at the predicted y (H).

    Solves Zhao et al. 2023, eq. 11 for the weights of (H2 - H1) / r and (H - H1): p = 2 nodes, or 1 at the start.
    """
    h = this - last
    phi1 = -np.expm1(-h)  # 1 - e^-h
    y = now.sigma / before.sigma * ASIDE + phi1 * H1
    if oldest is None:
        return y + phi1 / 2 * (H - H1)
    r = (oldest - last) / h
    b = np.expm1(-h)
    phi = np.array([b / -h - 1, (b / -h - 1) / -h - 0.5])
    weights = np.linalg.solve([[1.0, 1.0], [r, 1.0]], phi * [1, 2] / b)
    return y + phi1 * (weights[0] * (H2 - H1) / r + weights[1] * (H - H1))


Sampler = Callable[..., Plan]  # (schedule, steps, spacing=..., and eta=... or churn=... where it has one)
SAMPLERS: dict[str, Sampler] = {
    each.__name__: each
    for each in (
        ddim, plms, ddpm, euler, euler_a, heun, dpm2, dpm2_a, lms, dpmpp_2m, dpmpp_2m_sde, dpmpp_3m_sde, dpmpp_sde,
        dpmpp_2s_a, unipc, deis, lcm,
    )
}  # fmt: skip
