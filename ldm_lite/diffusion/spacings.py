"""Spacings of other programs: AUTOMATIC1111's web UI ("A1111") and ComfyUI.  Each is in SPACINGS under its name."""

import functools

import numpy as np

from ldm_lite.diffusion.schedule import (
    CLEAN,
    SPACINGS,
    Level,
    Schedule,
    at_sigmas,
    at_timesteps,
    beta_quantiles,
    sigma_range,
)


def normal(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Fractional timesteps evenly from that of sigma_max to that of sigma_min, then clean: ComfyUI's "normal"."""
    low, high = (schedule.at_sigma(sigma).t for sigma in sigma_range(schedule, sigma_min, sigma_max))
    return at_timesteps(schedule, np.linspace(high, low, steps))


def simple(schedule: Schedule, steps: int) -> list[Level]:
    """Whole timesteps 999 - floor(i * 1000 / steps), then clean: "simple" in ComfyUI and A1111."""
    num = len(schedule.alpha_bar)
    return [*(schedule.at(max(0, num - 1 - int(i * (num / steps)))) for i in range(steps)), CLEAN]


def ddim_uniform(schedule: Schedule, steps: int) -> list[Level]:
    """The original scripts' timesteps, 1, 1 + 1000 // steps, ..., then clean: not always `steps` of them.

    "ddim_uniform" in ComfyUI, schedule type "DDIM" in A1111.
    """
    num = len(schedule.alpha_bar)
    return [*(schedule.at(t) for t in reversed(range(1, num, max(num // steps, 1)))), CLEAN]


def webui_ddim(schedule: Schedule, steps: int) -> list[Level]:
    """The original scripts' timesteps, at most 999, of which A1111's DDIM and PLMS take the least as the end.

    So 20 steps are 19 calls, from timestep 951 to 1.  Raises ValueError for one step, which makes no call.
    """
    num = len(schedule.alpha_bar)
    if steps == 1:
        raise ValueError("A1111's DDIM and PLMS make no call in 1 step: take 2 or more")
    return [schedule.at(min(t + 1, num - 1)) for t in reversed(range(0, num, num // steps))]


def time_uniform(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps + 1), ending at the last; log alpha is interpolated linearly.

    UniPC's and DPM-Solver's own spacing.  Lu et al. 2022a, appendix D.
    """
    index, log_a = np.arange(len(schedule.alpha_bar)), np.log(np.maximum(schedule.alpha_bar, 2.0**-24)) / 2
    ts = np.linspace(len(index) - 1, 0, steps + 1)
    return [
        Level(float(t), float(np.exp(a)), float(np.sqrt(-np.expm1(2 * a))))
        for t, a in zip(ts, np.interp(ts, index, log_a), strict=True)
    ]


def beta_sigma(
    schedule: Schedule,
    steps: int,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    alpha: float = 0.6,
    beta: float = 0.6,
) -> list[Level]:
    """Sigmas at quantiles of the Beta distribution, both ends included, then clean: "Beta" in A1111."""
    low, high = sigma_range(schedule, sigma_min, sigma_max)
    return at_sigmas(schedule, low + beta_quantiles(1 - np.linspace(0, 1, steps), alpha, beta) * (high - low))


def kl_optimal(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Arctangents of sigma evenly spaced, ending at the least sigma, not clean.  Sabour et al. 2024, sec. 3.1.

    As in A1111 the result is y = x0 + sigma eps, so the last level is not variance-preserving.
    """
    low, high = np.arctan(sigma_range(schedule, sigma_min, sigma_max))
    *levels, end = at_sigmas(schedule, np.tan(np.linspace(high, low, steps + 1)))[:-1]
    return [*levels, Level(end.t, 1.0, end.sigma)]


def webui_unipc(schedule: Schedule, steps: int) -> list[Level]:
    """time_uniform with as many steps as the original scripts have timesteps: A1111's UniPC."""
    num = len(schedule.alpha_bar)
    return time_uniform(schedule, len(range(0, num, num // steps)))


def turbo(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps i * 1000 / steps - 1, then clean: trailing, but for how halves are rounded.  Forge."""
    num = len(schedule.alpha_bar)
    ts = np.clip(np.round(np.arange(steps, 0, -1) * (num / steps) - 1), 0, num - 1)
    return [*(schedule.at(int(t)) for t in ts), CLEAN]


# Optimised for 10 steps.  Sabour et al. 2024 (Align Your Steps), and the authors' page on how to use them.
AYS = {
    "ays": (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029),
    "ays_sdxl": (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029),
}


def _ays(name: str, schedule: Schedule, steps: int) -> list[Level]:
    """Sigmas optimised for a network, then clean; for other counts than 11, log sigma is interpolated linearly."""
    table = np.log(AYS[name])
    # From the least sigma up, as in A1111, whose single step therefore is at the least.
    logs = np.interp(np.linspace(0, 1, steps), np.linspace(0, 1, len(table)), table[::-1])[::-1]
    return at_sigmas(schedule, np.exp(logs))


SPACINGS |= {
    each.__name__: each
    for each in (normal, simple, turbo, kl_optimal, ddim_uniform, beta_sigma, time_uniform, webui_ddim, webui_unipc)
}
SPACINGS |= {name: functools.partial(_ays, name) for name in AYS}
