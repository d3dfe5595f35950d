"""Samplers: each is one function that writes its paper's update as the rows of a Plan.

A spacing gives the noise levels, the noisiest first.  Latents are X = a x0 + s eps.  A sampler written for the
variance-exploding scale y = x0 + sigma eps uses y = X / a and X = a y.  H is the network's eps or x0.
To add a sampler, write such a function, here or in your own code, and decorate it with @register.
"""

from itertools import pairwise

import numpy as np

from ldm_lite.diffusion.names import SAMPLERS as SAMPLERS
from ldm_lite.diffusion.names import register as register
from ldm_lite.diffusion.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.diffusion.schedule import Array, Level, Schedule, Spacing, levels_of

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
    ratio = now.a / after.a
    old = after.s * np.sqrt(1 - eta**2 + (eta * ratio * after.s / now.s) ** 2)
    return float(old), float(eta * (after.s / now.s) * np.sqrt(1 - ratio**2))


@register(label="DDIM")
def ddim(schedule: Schedule, steps: int, spacing: str | Spacing = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 adds noise of DDPM's variance.  Song et al. 2021, eqs. 12 and 16."""
    # H is x0 unless the network predicts eps, so that zero terminal SNR is defined.
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


@register(label="PLMS", aliases=("pndm",))
def plms(schedule: Schedule, steps: int, spacing: str | Spacing = "leading") -> Plan:
    """Pseudo linear multistep: DDIM's update with eps from Adams-Bashforth.  Liu et al. 2022, eqs. 9, 12 and 13.

    The first step makes two calls (pseudo improved Euler), so there is one call more than steps.  A single step to the
    clean image is DDIM's, since no eps can be predicted at its end.
    """
    rows, levels = Rows(schedule, keep="eps"), levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.s == 0 and i == 0:
            rows.add(i, now, _transfer(now, after, H))
        elif i == 0:
            rows.add(i, now, _transfer(now, after, H), aside=X)
            # The original makes this call at the next timestep, which a single step does not have.
            ahead = after if len(levels) > 2 else after._replace(t=now.t)
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


def _levels(schedule: Schedule, steps: int, spacing: str | Spacing) -> list[Level]:
    """The levels of a spacing; an infinite sigma (zero terminal SNR) becomes 4096, as in diffusers.

    Raises ValueError for eps prediction at zero terminal SNR, from which x0 cannot be computed.
    """
    levels = levels_of(spacing, schedule, steps)
    if schedule.prediction == "eps" and schedule.alpha_bar[-1] == 0:
        raise ValueError("eps prediction is undefined at zero terminal SNR: take a model with v prediction")
    return [level if level.a > 0 else level._replace(a=2.0**-12) for level in levels]


def _slope(y: Array, x0: Array, sigma: float) -> Array:
    """dy/dsigma of the probability-flow ODE.  Karras et al. 2022, eq. 4 with sigma(t) = t."""
    return (y - x0) / sigma


def _ancestral(now: float, after: float, eta: float = 1.0) -> tuple[float, float]:
    """Return the sigma to step down to on the way from `now` to `after`, and that of the noise to add.  k-diffusion."""
    up = min(after, eta * np.sqrt(after**2 * (now**2 - after**2) / now**2))
    return float(np.sqrt(after**2 - up**2)), float(up)


def _churned(schedule: Schedule, levels: list[Level], churn: float) -> list[Level]:
    """Return the levels raised by their share of churn, as the model sees them.  Karras et al. 2022, alg. 2."""
    gamma = min(churn / (len(levels) - 1), np.sqrt(2) - 1)
    return (
        levels if gamma == 0 else [schedule.at_sigma(level.sigma * (1 + gamma)) for level in levels[:-1]] + levels[-1:]
    )


@register(label="Euler", aliases=("eulerdiscrete",))
def euler(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Euler's method on dy/dsigma = (y - x0) / sigma.  Karras et al. 2022, alg. 2 without the second half.

    Churn adds noise before a model call: here, at the end of the previous row.
    """
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
    hats = _churned(schedule, levels, churn)
    for i, (now, hat, after) in enumerate(zip(hats, hats[1:], levels[1:], strict=False)):
        y = X / now.a
        y = y + _slope(y, H, now.sigma) * (after.sigma - now.sigma)
        rows.add(i, now, hat.a * (y + _extra(after, hat) * NOISE))
    return rows.plan(end=levels[-1], initial=hats[0].s)


def _extra(level: Level, hat: Level) -> float:
    """Return the sigma of the noise that raises y from a level to its churned level."""
    return float(np.sqrt(max(0.0, hat.sigma**2 - level.sigma**2)))


@register(label="Euler a", aliases=("euler_ancestral", "eulerancestraldiscrete"))
def euler_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral: step below the next level, then add noise up to it.  k-diffusion sample_euler_ancestral."""
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        down, up = _ancestral(now.sigma, after.sigma, eta)
        y = X / now.a
        y = y + _slope(y, H, now.sigma) * (down - now.sigma) + up * NOISE
        rows.add(i, now, after.a * y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="Heun", aliases=("heundiscrete",))
def heun(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """Heun's method: an Euler step, repeated with the mean slope of its two ends.  Karras et al. 2022, alg. 2.

    Two calls a step, except for the last, which ends at sigma 0.
    """
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
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


@register(label="DPM2", aliases=("dpm_2", "kdpm_2", "kdpm2discrete"))
def dpm2(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", churn: float = 0.0) -> Plan:
    """DPM-Solver-2: steps with the slope at the geometric mean of two sigmas.  Lu et al. 2022a, alg. 1; k-diffusion."""
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
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


@register(
    label="DPM2 a", aliases=("dpm2_ancestral", "dpm_2_a", "dpm_2_ancestral", "kdpm_2_a", "kdpm2ancestraldiscrete")
)
def dpm2_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-2: step below the next level, then add noise up to it.  k-diffusion sample_dpm_2_ancestral."""
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
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


def _adams(schedule: Schedule, steps: int, spacing: str | Spacing, order: int, log: bool) -> Plan:
    """Adams-Bashforth, exact for uneven steps: the slope, eps, is interpolated in sigma or in log sigma."""
    rows, levels = Rows(schedule, keep="eps"), _levels(schedule, steps, spacing)
    sigmas = np.array([level.sigma for level in levels])
    for i, (now, after) in enumerate(pairwise(levels)):
        past = 1 if log and after.sigma == 0 else min(order, i + 1)  # log 0 cannot be interpolated
        points = sigmas[i - past + 1 : i + 1][::-1]
        weights = _interpolation_integrals(points, now.sigma, after.sigma, log)
        y = X / now.a + sum(w * h for w, h in zip(weights, (H, H1, H2, H3), strict=False))
        rows.add(i, now, after.a * y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="LMS", aliases=("lmsdiscrete",))
def lms(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Linear multistep of order 4 in sigma.  k-diffusion sample_lms."""
    return _adams(schedule, steps, spacing, order=4, log=False)


@register(label="DEIS", aliases=("deismultistep",))
def deis(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DEIS: linear multistep of order 3 in log sigma ("log-rho AB").  Zhang and Chen 2023, sec. 4."""
    return _adams(schedule, steps, spacing, order=3, log=True)


# ---- DPM-Solver++: x0, in lambda = -log sigma -----------------------------------------------------------------------


@register(label="DPM++ 2M", aliases=("dpmsolver++", "dpmsolvermultistep", "dpm_solver"))
def dpmpp_2m(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DPM-Solver++ (2M): x0 is extrapolated in lambda.  Lu et al. 2022b, alg. 2.

    The first step is of first order, and so is one to sigma 0, where lambda is infinite.
    """
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        x0 = H
        if i > 0 and after.sigma > 0:
            r = np.log(levels[i - 1].sigma / now.sigma) / np.log(now.sigma / after.sigma)
            x0 = H + (H - H1) / (2 * r)
        ratio = after.sigma / now.sigma  # exp(-h)
        rows.add(i, now, after.a * (ratio * X / now.a + (1 - ratio) * x0))
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="DPM++ 2S a", aliases=("dpmpp_2s_ancestral", "dpmpp_2s"))
def dpmpp_2s_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2S): step below the next level, then add noise up to it.  Lu et al. 2022b, alg. 1; k-diffusion."""
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
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


@register(label="DPM++ SDE", aliases=("dpmsolversde",))
def dpmpp_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (SDE), two stages, r = 1/2.  Lu et al. 2022b, sec. 5; k-diffusion sample_dpmpp_sde.

    As in k-diffusion, one Brownian motion in sigma drives both stages: the second stage's noise contains the first's.
    """
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.sigma == 0:
            rows.add(i, now, after.a * H)
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * after.sigma)))
        # To the middle.  The second stage starts at X / now.a again, so X is put aside.
        down, up = _ancestral(now.sigma, mid.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, now, mid.a * (ratio * X / now.a + (1 - ratio) * H + up * NOISE), aside=X)
        # The first stage's noise is its latent minus its mean.
        first = (X / mid.a - ratio * ASIDE / now.a - (1 - ratio) * H1) / up if up > 0 else 0 * NOISE
        shared = np.sqrt((now.sigma - mid.sigma) / (now.sigma - after.sigma))
        noise = shared * first + np.sqrt(1 - shared**2) * NOISE
        down, up = _ancestral(now.sigma, after.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, mid, after.a * (ratio * ASIDE / now.a + (1 - ratio) * H + up * noise))
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="DPM++ 2M SDE")
def dpmpp_2m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2M SDE), midpoint.  Lu et al. 2022b, eq. 18; k-diffusion sample_dpmpp_2m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=2)


@register(label="DPM++ 3M SDE")
def dpmpp_3m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (3M SDE).  k-diffusion sample_dpmpp_3m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=3)


def _multistep_sde(schedule: Schedule, steps: int, spacing: str | Spacing, eta: float, order: int) -> Plan:
    """Extrapolate x0 by its differences D1 and D2 in lambda, weighted by the phi functions of h (1 + eta)."""
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
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


@register(label="UniPC", aliases=("uni_pc", "uni_pc_bh2", "unipc_multistep", "unipcmultistep"))
def unipc(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """UniPC-2 (B2): DPM-Solver++ (2M) predicts; the next call first corrects that prediction.

    Zhao et al. 2023, algs. 5 and 6 with B(h) = e^h - 1, order 2, lower at both ends.  ASIDE is the last corrected y.
    """
    rows, levels = Rows(schedule, keep="x0"), _levels(schedule, steps, spacing)
    lambdas = [-np.log(level.sigma) if level.sigma > 0 else np.inf for level in levels]

    y = X / levels[0].a
    for i, (now, after) in enumerate(pairwise(levels)):
        if i > 0:  # correct: from the last corrected y, with H at the predicted y
            y = _unipc_correct(levels[i - 1], now, lambdas[i - 2] if i > 1 else None, lambdas[i - 1], lambdas[i])
        ratio, x0 = after.sigma / now.sigma, H
        if i > 0 and after.sigma > 0:
            r = (lambdas[i] - lambdas[i - 1]) / (lambdas[i + 1] - lambdas[i])
            x0 = H + (H - H1) / (2 * r)
        rows.add(i, now, after.a * (ratio * y + (1 - ratio) * x0), aside=y)
    return rows.plan(end=levels[-1], initial=levels[0].s)


def _unipc_correct(before: Level, now: Level, oldest: float | None, last: float, this: float) -> Array:
    """Return y at `now`, from y and x0 at `before` (ASIDE, H1), the x0 before that (H2), and x0 at the predicted y (H).

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


# ---- for distilled checkpoints --------------------------------------------------------------------------------------


@register(label="LCM")
def lcm(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm") -> Plan:
    """Latent consistency: jump to x0, then add noise up to the next level.  Luo et al. 2023, alg. 3."""
    rows, levels = Rows(schedule, keep="x0"), levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        scaled = 10.0 * now.t
        x0 = 0.25 / (scaled**2 + 0.25) * X + scaled / np.sqrt(scaled**2 + 0.25) * H
        rows.add(i, now, after.a * x0 + after.s * NOISE)
    return rows.plan(end=levels[-1])
