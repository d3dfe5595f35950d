"""The samplers of the original scripts as they are there, for `compat`."""

import dataclasses
from itertools import pairwise

import numpy as np

from ldm_lite.diffusion.names import make_plan, resolve
from ldm_lite.diffusion.plan import H1, H, Plan, Rows, X
from ldm_lite.diffusion.schedule import Level, Schedule


def original_plan(
    sampler: str, schedule: Schedule, steps: int, *, eta: float | None = None, last: int | None = None
) -> Plan:
    """Return the plan of ddim, plms or dpmpp_2m (`dpm_solver`) in the original; arguments are those of make_plan.

    Raises ValueError where the original fails.
    """
    key, _ = resolve(sampler)
    if key == "dpmpp_2m":
        if eta:
            raise ValueError(f"got eta {eta}, but {key} has none: leave it out")
        return _dpm_solver(schedule, steps)
    plan = make_plan(key, schedule, steps, eta=eta, spacing="original", last=last)
    # Noise is drawn at every call, if only to multiply it by zero.
    return dataclasses.replace(plan, adds_noise=plan.adds_noise | True)


def _dpm_solver(schedule: Schedule, steps: int) -> Plan:
    """DPM-Solver++ (2M), time_uniform, from unit noise to timestep 0; below 15 steps the last is of first order.

    CompVis ldm/models/diffusion/dpm_solver: log a is linear between timesteps.
    """
    num = len(schedule.alpha_bar)
    if not 2 <= steps <= num:
        raise ValueError(f"got {steps} steps, wanted 2 to {num}: the original's DPM-Solver has no fewer")
    ts = np.linspace(num - 1, 0, steps + 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # at zero terminal SNR; Rows.plan reports it
        alpha_bar = np.exp(np.interp(ts, np.arange(num), np.log(schedule.alpha_bar)))
        levels = [Level(t, a, s) for t, a, s in zip(ts, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), strict=True)]
        rows = Rows(schedule, keep="x0")
        for i, (now, after) in enumerate(pairwise(levels)):
            ratio, x0 = after.sigma / now.sigma, H
            if i > 0 and (steps >= 15 or i < steps - 1):
                r = np.log(levels[i - 1].sigma / now.sigma) / np.log(now.sigma / after.sigma)
                x0 = H + (H - H1) / (2 * r)
            rows.add(i, now, after.a * (ratio * X / now.a + (1 - ratio) * x0))
        return rows.plan(end=levels[-1])
