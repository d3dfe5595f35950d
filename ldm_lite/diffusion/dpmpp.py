"""Samplers of the DPM-Solver family, in lambda = -log sigma.  Conventions are those of samplers.py."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ldm_lite.core.plan import ASIDE, H1, H2, H3, NOISE, H, Plan, Rows, X
from ldm_lite.core.samplers import dpmpp_2m
from ldm_lite.core.schedule import Array, Level, Schedule, Spacing, ancestral
from ldm_lite.diffusion.flow import straightened
from ldm_lite.diffusion.names import register
from ldm_lite.diffusion.plan import TimedPlan
from ldm_lite.diffusion.samplers import finite_levels, level_below, only_preserving
from ldm_lite.diffusion.schedule import spaced_levels, spacing_of

# ---- DPM-Solver++: x0 -----------------------------------------------------------------------------------------------

register(dpmpp_2m, label="DPM++ 2M", aliases=("dpmsolver++", "dpmsolvermultistep", "dpm_solver"), replace=True)


@register(label="DPM++ 2M SD3")
def dpmpp_2m_sd3(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """DPM-Solver++ (2M) of a rectified flow with lambda = -log s, as in Stable Diffusion 3's code and ComfyUI."""
    return dpmpp_2m(straightened(schedule), steps, spacing_of(spacing))


@register(label="DPM++ 2S a", aliases=("dpmpp_2s_ancestral", "dpmpp_2s"))
def dpmpp_2s_a(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2S): step below the next level, then add noise up to it.  Lu et al. 2022b, alg. 1; k-diffusion."""
    rows, levels = Rows(schedule, h="x0"), straightened(schedule).finite(spaced_levels(spacing, schedule, steps))
    for i, (now, after) in enumerate(pairwise(levels)):
        down, factor, noise = level_below(schedule, now, after, eta)
        if down.s == 0:
            rows.add(i, now, factor * down.a * H + noise * NOISE)
            continue
        mid = schedule.at_sigma(math.sqrt(_noise_to_signal(now) * _noise_to_signal(down)))
        rows.add(i, now, _moved(now, mid, X), aside=X)
        rows.add(i, mid, factor * _moved(now, down, ASIDE) + noise * NOISE)
    return rows.plan(end=levels[-1])


def _noise_to_signal(level: Level) -> float:
    """s / a, also of a rectified flow's first level, which is pure noise except for a rounding error of either sign."""
    return level.s / level.a if level.a > 0 else math.inf


def _moved(now: Level, after: Level, x: Array) -> Array:
    """The step of first order with x0 = H, from x at one level to another."""
    ratio = after.s / now.s
    return ratio * x + (after.a - now.a * ratio) * H


@register(label="DPM++ SDE", aliases=("dpmsolversde",))
def dpmpp_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (SDE), two stages, r = 1/2.  Lu et al. 2022b, sec. 5; k-diffusion sample_dpmpp_sde.

    As in k-diffusion, one Brownian motion in sigma drives both stages: the second stage's noise contains the first's.
    """
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        if after.sigma == 0:
            rows.add(i, now, after.a * H)
            continue
        mid = schedule.at_sigma(float(np.sqrt(now.sigma * after.sigma)))
        # To the middle.  The second stage starts at X / now.a again, so X is put aside.
        down, up = ancestral(now.sigma, mid.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, now, mid.a * (ratio * X / now.a + (1 - ratio) * H + up * NOISE), aside=X)
        # The first stage's noise is its latent minus its mean.
        first = (X / mid.a - ratio * ASIDE / now.a - (1 - ratio) * H1) / up if up > 0 else 0 * NOISE
        shared = np.sqrt((now.sigma - mid.sigma) / (now.sigma - after.sigma))
        noise = shared * first + np.sqrt(1 - shared**2) * NOISE
        down, up = ancestral(now.sigma, after.sigma, eta)
        ratio = down / now.sigma
        rows.add(i, mid, after.a * (ratio * ASIDE / now.a + (1 - ratio) * H + up * noise))
    return TimedPlan.of(rows.plan(end=levels[-1]), schedule, levels, two_stages=True)


@register(label="DPM++ 2M SDE")
def dpmpp_2m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2M SDE), midpoint.  Lu et al. 2022b, eq. 18; k-diffusion sample_dpmpp_2m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=2)


@register(label="DPM++ 2M SDE Heun")
def dpmpp_2m_sde_heun(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (2M SDE) with the other weight of the difference.  k-diffusion, solver_type "heun"."""
    return _multistep_sde(schedule, steps, spacing, eta, order=2, heun=True)


@register(label="DPM++ 3M SDE")
def dpmpp_3m_sde(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver++ (3M SDE).  k-diffusion sample_dpmpp_3m_sde."""
    return _multistep_sde(schedule, steps, spacing, eta, order=3)


def _multistep_sde(
    schedule: Schedule, steps: int, spacing: str | Spacing, eta: float, order: int, heun: bool = False
) -> Plan:
    """Extrapolate x0 by its differences D1 and D2 in lambda, weighted by the phi functions of h (1 + eta)."""
    rows, levels = Rows(schedule, h="x0"), finite_levels(schedule, steps, spacing)
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
            y = y + (phi2 if heun else phi1 / 2) * (H - H1) * hs[i] / hs[i - 1]
        elif order == 3 and i == 1:
            y = y + phi2 * (H - H1) * hs[i] / hs[i - 1]
        elif order == 3 and i >= 2:
            r0, r1 = hs[i - 1] / hs[i], hs[i - 2] / hs[i]
            d0, d1 = (H - H1) / r0, (H1 - H2) / r1
            y = y + phi2 * (d0 + (d0 - d1) * r0 / (r0 + r1)) - (phi2 / h - 0.5) * (d0 - d1) / (r0 + r1)
        noise = after.sigma * np.sqrt(-np.expm1(-2 * eta * hs[i]))
        rows.add(i, now, after.a * (y + noise * NOISE))
    return TimedPlan.of(rows.plan(end=levels[-1]), schedule, levels)


@register(label="UniPC", aliases=("uni_pc", "uni_pc_bh2", "unipc_multistep", "unipcmultistep"))
def unipc(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """UniPC-2 (B2): DPM-Solver++ (2M) predicts; the next call first corrects that prediction.

    Zhao et al. 2023, algs. 5 and 6 with B(h) = e^h - 1, order 2, lower at both ends.
    """
    return _unipc(schedule, finite_levels(schedule, steps, spacing), order=2, exponential=True)


@register(label="UniPC bh1", aliases=("uni_pc_bh1",))
def unipc_bh1(schedule: Schedule, steps: int, spacing: str | Spacing = "time_uniform") -> Plan:
    """UniPC-3 (B1), B(h) = h, as the authors' code and A1111 run it, from unit noise.  Zhao et al. 2023."""
    levels = finite_levels(schedule, steps, spacing)
    # The authors' variant takes three of the orders for granted; fewer steps have no third.
    return replace(_unipc(schedule, levels, order=min(3, len(levels) - 1), exponential=False), initial=1.0)


def _unipc(schedule: Schedule, levels: list[Level], order: int, exponential: bool) -> Plan:
    """The predictor and the corrector of an order, in x0.  ASIDE is the last corrected y.

    Both are y + phi1 (x0 + weights of the differences of x0 to those at other levels), lower at both ends.
    """
    rows = Rows(schedule, h="x0")
    lambdas = [-np.log(level.sigma) if level.sigma > 0 else np.inf for level in levels]
    y, before = X / levels[0].a, 0
    for i, (now, after) in enumerate(pairwise(levels)):
        if i > 0:  # correct: from the last corrected y, with H at the predicted y
            past = [lambdas[i - 1 - k] for k in range(before)]
            change = _unipc_change(lambdas[i], past, (H, H1, H2, H3), exponential)
            y = now.sigma / levels[i - 1].sigma * ASIDE + change
        before = min(order, i + 1, len(levels) - 1 - i) if order > 2 or after.sigma == 0 else min(order, i + 1)
        if after.sigma == 0:
            rows.add(i, now, after.a * H, aside=y)
            continue
        past = [lambdas[i - k] for k in range(before)]
        change = _unipc_change(lambdas[i + 1], past, (None, H, H1, H2), exponential)
        rows.add(i, now, after.a * (after.sigma / now.sigma * y + change), aside=y)
    return rows.plan(end=levels[-1])


def _unipc_change(
    to: float, past: list[float], known: tuple[Array | None, Array, Array, Array], exponential: bool
) -> Array:
    """The change of the scaled y in a step: `past` are the lambdas of x0, the latest first; `known` is x0 at `to`.

    With x0 at `to` it corrects, without it predicts.  Weights solve Zhao et al. 2023, eq. 11; of a single difference
    they are 1/2, as in the authors' code.
    """
    ahead, latest, *earlier = known
    h = to - past[0]
    phi1 = -np.expm1(-h)  # 1 - e^-h
    ratios = [(lambda_ - past[0]) / h for lambda_ in past[1:]]
    differences = [(x0 - latest) / r for x0, r in zip(earlier, ratios, strict=False)]
    if ahead is not None:
        ratios, differences = [*ratios, 1.0], [*differences, ahead - latest]
    if not differences:
        return phi1 * latest
    scale = phi1 if exponential else h
    if len(differences) == 1:
        weights = np.array([0.5])
    else:
        phi, moments = np.expm1(-h) / -h - 1, []
        for k in range(1, len(ratios) + 1):
            moments.append(phi * math.factorial(k) / -scale)
            phi = phi / -h - 1 / math.factorial(k + 1)
        weights = np.linalg.solve(np.vander(ratios, increasing=True).T, moments)
    return phi1 * latest + scale * sum(w * d for w, d in zip(weights, differences, strict=True))


# ---- DPM-Solver: eps, in lambda -------------------------------------------------------------------------------------


@register(label="DPM fast", aliases=("dpm_fast",))
def dpm_fast(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-3, then one step of order 1 or 2: `steps` calls, evenly in log sigma, to the least sigma.

    Lu et al. 2022a, sec. 3.4; k-diffusion sample_dpm_fast.  The last steps alone run between their spacing's levels;
    all steps run over the schedule's range, and the spacing only sets the sigma that the first latent is scaled by, as
    in A1111.  The result is y = x0 + sigma eps.
    """
    rows, levels = Rows(schedule, h="eps"), finite_levels(schedule, steps, spacing)
    only_preserving(schedule, "DPM fast or adaptive")  # even steps in log sigma, which is infinite at the start
    high, low = solver_span(schedule, steps, spacing)
    calls = min(steps, len(levels) - 1)
    orders = [3] * (calls // 3 - (calls % 3 == 0)) + ([2, 1] if calls % 3 == 0 else [calls % 3])
    lambdas = np.linspace(-np.log(high), -np.log(low), len(orders) + 1)
    for i, (order, start) in enumerate(zip(orders, lambdas, strict=False)):
        after = schedule.at_sigma(float(np.exp(-lambdas[i + 1])))
        if i + 1 == len(orders):
            after = Level(schedule.at_sigma(low).t, 1.0, after.sigma)
        down, _ = ancestral(float(np.exp(-start)), after.sigma, eta)
        aim = min(lambdas[-1], -np.log(down))
        up = np.sqrt(max(0.0, after.sigma**2 - np.exp(-2 * aim)))
        solver_rows(rows, order, (float(start), float(aim)), after, up * NOISE)
    return rows.plan(end=after, initial=levels[0].sigma * schedule.at_sigma(high).a)


def solver_span(schedule: Schedule, steps: int, spacing: str | Spacing) -> tuple[float, float]:
    """The sigmas to solve between: the schedule's range, or for a part of the steps the spacing's."""
    levels = finite_levels(schedule, steps, spacing)
    low = float(schedule.sigmas[0])
    if len(levels) - 1 >= steps:
        return float(schedule.sigmas[-1]), low
    return levels[0].sigma, levels[-2].sigma if len(levels) > 2 else low


def solver_rows(rows: Rows, order: int, span: tuple[float, float], after: Level, noise: Array) -> None:
    """Add the calls of a step of DPM-Solver over a span of lambda; y at its end plus noise is of the level `after`.

    Every call counts as a step.  Lu et al. 2022a, algs. 1 and 2; H, H1 and H2 are eps.
    """
    start, h = span[0], span[1] - span[0]
    nodes = [rows.schedule.at_sigma(float(np.exp(-start - k * h / order))) for k in range(order)]
    y = X / nodes[0].a
    for k, node in enumerate(nodes):
        step, then = len(rows.rows), nodes[k + 1] if k + 1 < order else None
        part = (k + 1) / order * h
        sigma, grown = (np.exp(-span[1]) if then is None else then.sigma), np.expm1(part)
        first = (H, H1, H2)[k]
        new = y - sigma * grown * first
        if k == 1 and order == 2:
            new = new - sigma * grown * (H - first)
        elif k == 1:
            new = new - sigma * 2 * (grown / part - 1) * (H - first)
        elif k == 2:
            new = new - sigma * 1.5 * (grown / h - 1) * (H - first)
        rows.add(step, node, after.a * (new + noise) if then is None else then.a * new, aside=X if k == 0 else ASIDE)
        y = ASIDE / nodes[0].a
