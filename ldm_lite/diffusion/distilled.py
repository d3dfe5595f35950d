"""Samplers for distilled checkpoints.  Conventions are those of samplers.py."""

import math
from itertools import pairwise

import numpy as np

from ldm_lite.diffusion.names import register
from ldm_lite.diffusion.plan import NOISE, H, Plan, Rows, X
from ldm_lite.diffusion.samplers import finite_levels, only_preserving
from ldm_lite.diffusion.schedule import Level, Schedule, Spacing, levels_of


@register(label="LCM")
def lcm(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm") -> Plan:
    """Latent consistency: jump to x0, then add noise up to the next level.  Luo et al. 2023, alg. 3.

    The network's own x0 of a variance-preserving process is mixed with x, more at low noise; that of a flow is not.
    """
    rows, levels = Rows(schedule, keep="x0"), levels_of(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        scaled = math.inf if schedule.is_flow else 10.0 * now.t
        skip = 0.25 / (scaled**2 + 0.25)
        rows.add(i, now, after.a * (skip * X + np.sqrt(1 - skip) * H) + after.s * NOISE)
    return rows.plan(end=levels[-1])


@register(label="LCM webui")
def lcm_webui(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace") -> Plan:
    """Latent consistency as in A1111: any levels over the range of the 50 trained ones, and y in place of x.

    The network is given the trained timestep that is nearest in log sigma.
    """
    only_preserving(schedule, "LCM webui")
    stride = len(schedule.alpha_bar) // 50
    trained = Schedule(schedule.alpha_bar[stride - 1 :: stride], schedule.prediction)
    rows, levels = Rows(schedule, keep="x0"), finite_levels(trained, steps, spacing)
    for i, (now, after) in enumerate(pairwise(levels)):
        t = float(np.argmin(abs(np.log(now.sigma) - np.log(trained.sigmas))) * stride + stride - 1)
        scaled = 10.0 * t
        x0 = 0.25 / (scaled**2 + 0.25) * X / now.a + scaled / np.sqrt(scaled**2 + 0.25) * H
        rows.add(i, now._replace(t=t), after.a * (x0 + after.sigma * NOISE))
    return rows.plan(end=levels[-1], initial=levels[0].s)


@register(label="TCD")
def tcd(schedule: Schedule, steps: int, spacing: str | Spacing = "lcm", eta: float = 0.3) -> Plan:
    """Trajectory consistency: jump to timestep (1 - eta) t of the next t, then add noise up to t, down to timestep 0.

    eta is the paper's gamma: 0 adds no noise.  Zheng et al. 2024, alg. 4.
    """
    only_preserving(schedule, "TCD")
    rows, levels = Rows(schedule, keep="x0"), finite_levels(schedule, steps, spacing)
    levels = [*levels[:-1], schedule.at(0)] if levels[-1].s == 0 else levels
    for i, (now, after) in enumerate(pairwise(levels)):
        # A level may lie below timestep 0, as the last of "ays" does.
        down = min(_share_of(schedule, after, 1 - eta), after, key=lambda level: level.s)
        x = down.a * H + down.s * (X - now.a * H) / now.s
        ratio = after.a / down.a
        rows.add(i, now, ratio * x + np.sqrt(max(0.0, 1 - ratio**2)) * NOISE)
    return rows.plan(end=levels[-1])


def _share_of(schedule: Schedule, level: Level, share: float) -> Level:
    """The level at a share of a level's timestep, rounded down if that is whole."""
    t = share * level.t
    if share == 1:
        return level
    return schedule.at(int(t + 1e-9)) if level.t == int(level.t) else schedule.between(t)
