"""Spacings of other programs: AUTOMATIC1111's web UI ("A1111"), ComfyUI and DeepFloyd IF.

Each is in SPACINGS under its name.
"""

import functools
from collections.abc import Sequence

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
    low, high = (schedule.at_noise(sigma).t for sigma in sigma_range(schedule, sigma_min, sigma_max))
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


# DeepFloyd IF's tables: timesteps per section of the schedule, which is cut into equal parts, cleanest first.
SECTIONS = {
    "fast27": (10, 10, 3, 2, 2),
    "smart27": (7, 4, 2, 1, 2, 4, 7),
    "smart50": (10, 6, 4, 3, 2, 2, 3, 4, 6, 10),
    "smart100": (1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 10, 13),
    "smart185": (1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20),
    "super27": (1, 1, 1, 1, 1, 1, 1, 2, 5, 13),
    "super40": (2, 2, 2, 2, 2, 2, 3, 4, 6, 15),
    "super100": (4, 4, 6, 6, 8, 8, 10, 10, 14, 30),
}


def respaced(schedule: Schedule, steps: int) -> list[Level]:
    """Even timesteps from 999 to 0 (only 0 for one step), rounded, then clean: DeepFloyd IF given a number of steps."""
    return _in_sections(schedule, (steps,))


def _table(name: str, schedule: Schedule, steps: int) -> list[Level]:
    """The levels of one of SECTIONS, which has a fixed number of steps.  deepfloyd_if/model/respace.py."""
    counts = SECTIONS[name]
    if steps != sum(counts):
        raise ValueError(f"got {steps} steps, but the spacing {name} has {sum(counts)}: leave steps out")
    levels = _in_sections(schedule, counts)
    # An exception in the original too, against artefacts at the noisiest timestep.
    return [schedule.at(len(schedule.alpha_bar) - 3), *levels[1:]] if name == "fast27" else levels


def _in_sections(schedule: Schedule, counts: Sequence[int]) -> list[Level]:
    """Cut the schedule into equal parts (the first may be longer by one), and take `counts` even timesteps of each."""
    size, longer = divmod(len(schedule.alpha_bar), len(counts))
    ts, start = [], 0
    for i, count in enumerate(counts):
        part = size + (i < longer)
        stride, at = (part - 1) / max(1, count - 1), 0.0
        for _ in range(count):
            ts.append(start + round(at))
            at += stride  # a running sum, as in the original, so that halves round the same way
        start += part
    return [*(schedule.at(t) for t in reversed(ts)), CLEAN]


SPACINGS |= {
    each.__name__: each
    for each in (
        respaced,
        normal,
        simple,
        turbo,
        kl_optimal,
        ddim_uniform,
        beta_sigma,
        time_uniform,
        webui_ddim,
        webui_unipc,
    )
}
SPACINGS |= {name: functools.partial(_ays, name) for name in AYS}
SPACINGS |= {name: functools.partial(_table, name) for name in SECTIONS}
SPACINGS["respaced"] = respaced
