"""The samplers of the original scripts as they are there, for `compat`."""

import dataclasses

import numpy as np

from ldm_lite.core.plan import Plan
from ldm_lite.core.samplers import dpmpp_2m
from ldm_lite.core.schedule import Level, Schedule
from ldm_lite.diffusion.spacings import original


def original_levels(key: str, schedule: Schedule, steps: int) -> list[Level]:
    """The spacing of a sampler of SAMPLERS in the original: ddim, plms, or dpmpp_2m (`dpm_solver`).

    CompVis ldm/models/diffusion/dpm_solver, time_uniform: log a is linear between timesteps, from unit noise to
    timestep 0.  Raises ValueError where the original fails.
    """
    if key != "dpmpp_2m":
        return original(schedule, steps)
    num = len(schedule.alpha_bar)
    if not 2 <= steps <= num:
        raise ValueError(f"got {steps} steps, wanted 2 to {num}: the original's DPM-Solver has no fewer")
    if schedule.alpha_bar[-1] == 0:
        raise ValueError("the original's DPM-Solver is undefined at zero terminal SNR: take ddim")
    timesteps = np.linspace(num - 1, 0, steps + 1)
    alpha_bar = np.exp(np.interp(timesteps, np.arange(num), np.log(schedule.alpha_bar)))
    return [Level(t, a, s) for t, a, s in zip(timesteps, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), strict=True)]


def as_original(key: str, plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan of a sampler with that spacing as the original runs it."""
    if key != "dpmpp_2m":  # noise is drawn at every call, if only to multiply it by zero
        return dataclasses.replace(plan, adds_noise=plan.adds_noise | True)
    mix = plan.mix.copy()
    if plan.num_steps < 15:  # the last step is of first order
        levels = original_levels(key, schedule, plan.num_steps)
        mix[-1] = dpmpp_2m(schedule, 1, lambda *_: levels[-2:]).mix[0]
    return dataclasses.replace(plan, mix=mix, initial=1.0)
