"""The samplers of the original scripts as they are there, for `compat`."""

import dataclasses

import numpy as np

from ldm_lite.core.plan import Plan
from ldm_lite.core.samplers import dpmpp_2m
from ldm_lite.core.schedule import Level, Schedule
from ldm_lite.diffusion.names import make_plan, resolve


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
    if schedule.alpha_bar[-1] == 0:
        raise ValueError("the original's DPM-Solver is undefined at zero terminal SNR: take ddim")
    timesteps = np.linspace(num - 1, 0, steps + 1)
    alpha_bar = np.exp(np.interp(timesteps, np.arange(num), np.log(schedule.alpha_bar)))
    levels = [Level(t, a, s) for t, a, s in zip(timesteps, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), strict=True)]
    plan = dpmpp_2m(schedule, steps, lambda *_: levels)
    if steps < 15:
        plan.mix[-1] = dpmpp_2m(schedule, 1, lambda *_: levels[-2:]).mix[0]
    return dataclasses.replace(plan, initial=1.0)
