"""Further spacings: other programs', those over a range of sigmas, and rectified flow's.

Other programs are diffusers, AUTOMATIC1111's web UI ("A1111"), ComfyUI and DeepFloyd IF.  Each spacing is in SPACINGS
under its name.  Of a rectified flow, sigma_min and sigma_max are s.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.schedule import CLEAN, SPACINGS, Array, Level, Schedule, leading, level_of, trailing
from ldm_lite.diffusion.flow import NUM_TIMESTEPS, FlowSchedule, shifted, straightened
from ldm_lite.diffusion.plan import float32_sigmas, timed
from ldm_lite.diffusion.schedule import GENERAL, MADE_FOR_BETAS

# ---- whole timesteps ------------------------------------------------------------------------------------------------


def leading_clean(schedule: Schedule, steps: int) -> list[Level]:
    """The timesteps of `leading`, then clean: diffusers' DDIM with set_alpha_to_one."""
    return [*leading(schedule, steps)[:-1], CLEAN]


def trailing_to_0(schedule: Schedule, steps: int) -> list[Level]:
    """The timesteps of `trailing`, ending at timestep 0: diffusers' DDIM without set_alpha_to_one."""
    levels = trailing(schedule, steps)[:-1]
    return [*levels, schedule.at(0) if levels[-1].t > 0 else CLEAN]


def original(schedule: Schedule, steps: int) -> list[Level]:
    """The original scripts' timesteps, range(0, 1000, 1000 // steps) + 1, which can be more than steps.

    Raises ValueError if the original raises IndexError.  CompVis ldm/modules/diffusionmodules/util.py.
    """
    num = len(schedule.alpha_bar)
    timesteps = [t + 1 for t in range(0, num, num // steps)]
    if timesteps[-1] >= num:
        raise ValueError(f"the original scripts fail with {steps} steps (timestep {timesteps[-1]}): use another number")
    return [*(schedule.at(t) for t in reversed(timesteps)), schedule.at(0)]


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
        raise ValueError("A1111's DDIM and PLMS make no call in 1 step: use 2 or more")
    return [schedule.at(min(t + 1, num - 1)) for t in reversed(range(0, num, num // steps))]


def simple(schedule: Schedule, steps: int) -> list[Level]:
    """Whole timesteps 999 - floor(i * 1000 / steps), then clean: "simple" in ComfyUI and A1111."""
    num = len(schedule.alpha_bar)
    return [*(schedule.at(max(0, num - 1 - int(i * (num / steps)))) for i in range(steps)), CLEAN]


def turbo(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps i * 1000 / steps - 1, then clean: trailing, except for how halves are rounded.  Forge."""
    num = len(schedule.alpha_bar)
    timesteps = np.clip(np.round(np.arange(steps, 0, -1) * (num / steps) - 1), 0, num - 1)
    return [*(schedule.at(int(t)) for t in timesteps), CLEAN]


def lcm(schedule: Schedule, steps: int) -> list[Level]:
    """Some of the 50 timesteps 999, 979, ... that LCMs were distilled at; for more than 50 steps, trailing."""
    if steps > 50:
        return trailing(schedule, steps)
    stride = len(schedule.alpha_bar) // 50
    chosen = np.floor(np.linspace(0, 50, steps, endpoint=False)).astype(int)
    return [*(schedule.at(int(t)) for t in (50 - chosen) * stride - 1), CLEAN]


def diffusers(
    schedule: Schedule,
    steps: int,
    timesteps: str = "leading",
    offset: float = 0.0,
    multistep: float = 0.0,
    whole: float = 1.0,
    curve: str = "",
    end: str = "clean",
) -> list[Level]:
    """The levels of diffusers' schedulers, by settings named like theirs; the end is clean, or timestep 0: "first".

    timesteps: leading, linspace or trailing.  multistep: DPM-Solver's and UniPC's, one more without the last.  Not
    whole: Euler's linspace, whose sigmas are interpolated linearly.  curve: karras, exponential or beta sigmas in
    between, of multistep solvers over the schedule's whole range.
    """
    num, count = len(schedule.alpha_bar), steps + bool(multistep)
    rising = {
        "leading": np.arange(count) * float(num // count) + offset,
        "linspace": np.linspace(0, num - 1, count),
        "trailing": np.arange(num, 0, -num / steps)[:steps][::-1].round() - 1,
    }
    ends: dict[str, Level] = {"clean": CLEAN, "first": schedule.at(0)}
    if timesteps not in rising or curve not in CURVES or end not in ends:
        allowed = f"timesteps={'|'.join(rising)}, curve={'|'.join(filter(None, CURVES))}, end={'|'.join(ends)}"
        raise ValueError(f"the spacing diffusers has the settings {allowed}")
    t = rising[timesteps][::-1][:steps]
    t = t.round() if whole else t
    if t[0] >= num:
        raise ValueError(f"diffusers fails with {steps} steps of these timesteps ({t[0]:.0f}): use another number")
    if not curve and whole:
        return [*(schedule.at(int(step)) for step in t), ends[end]]
    index, table = np.arange(num), schedule.sigmas
    sigmas = np.interp(t, index, table)
    if curve:
        low, high = (table[0], table[-1]) if multistep else (sigmas[-1], sigmas[0])
        sigmas = CURVES[curve](low, high, steps)
        t = np.interp(np.log(sigmas), np.log(table), index)
        if multistep:
            t = t.round() if curve == "karras" else np.floor(t)
    return [*(level_of(float(step), float(sigma)) for step, sigma in zip(t, sigmas, strict=True)), ends[end]]


# (least, largest, count) -> that many values between them, falling.
CURVES: dict[str, Callable[[float, float, int], Array]] = {
    "": lambda low, high, count: np.linspace(high, low, count),
    "karras": lambda low, high, count: np.linspace(high ** (1 / 7), low ** (1 / 7), count) ** 7,
    "exponential": lambda low, high, count: np.exp(np.linspace(math.log(high), math.log(low), count)),
    "beta": lambda low, high, count: low + beta_quantiles(1 - np.linspace(0, 1, count), 0.6, 0.6) * (high - low),
}

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


def _from_table(name: str, schedule: Schedule, steps: int) -> list[Level]:
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
    timesteps, start = [], 0
    for i, count in enumerate(counts):
        part = size + (i < longer)
        stride, offset = (part - 1) / max(1, count - 1), 0.0
        for _ in range(count):
            timesteps.append(start + round(offset))
            offset += stride  # a running sum, as in the original, so that halves round the same way
        start += part
    return [*(schedule.at(t) for t in reversed(timesteps)), CLEAN]


# ---- fractional timesteps -------------------------------------------------------------------------------------------


def at_timesteps(schedule: Schedule, timesteps: Array, rounded: Tensor | None = None) -> list[Level]:
    """The levels of fractional timesteps, then clean; `rounded` are the same as k-diffusion rounds them."""
    levels = [*(schedule.between(float(t)) for t in timesteps), CLEAN]
    if isinstance(schedule, FlowSchedule):
        return levels
    t = torch.from_numpy(timesteps).float() if rounded is None else rounded
    logs, low, high = float32_sigmas(schedule).log(), t.floor().long(), t.ceil().long()
    return timed(levels, ((1 - t.frac()) * logs[low] + t.frac() * logs[high]).exp())


def linspace(schedule: Schedule, steps: int) -> list[Level]:
    """The core's `linspace`: fractional timesteps linspace(999, 0, steps), then clean.  k-diffusion's default."""
    last = len(schedule.alpha_bar) - 1
    return at_timesteps(schedule, np.linspace(last, 0, steps), torch.linspace(last, 0, steps))


def sgm_uniform(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps + 1) without the last, then clean: Stability AI's sgm."""
    timesteps = _timesteps(schedule, steps + 1, sigma_min, sigma_max)
    rounded = torch.linspace(timesteps[0], timesteps[-1], steps + 1)
    return at_timesteps(schedule, timesteps[:-1], rounded[:-1])


def normal(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Even fractional timesteps from sigma_max's to sigma_min's, then clean: ComfyUI's "normal"."""
    timesteps = _timesteps(schedule, steps, sigma_min, sigma_max)
    return at_timesteps(schedule, timesteps, torch.linspace(timesteps[0], timesteps[-1], steps))


def _timesteps(schedule: Schedule, count: int, sigma_min: float | None, sigma_max: float | None) -> Array:
    """Even fractional timesteps (count,) from the largest sigma's to the least's."""
    sigmas = sigma_range(schedule, sigma_min, sigma_max)
    if isinstance(schedule, FlowSchedule):
        low, high = map(schedule.timestep, sigmas)
    else:
        low, high = (schedule.at_sigma(sigma).t for sigma in sigmas)
    return np.linspace(high, low, count)


def beta(schedule: Schedule, steps: int) -> list[Level]:
    """Timesteps dense at both ends: quantiles of the Beta(0.6, 0.6) distribution, then clean.  Lee et al. 2024.

    Not rounded, unlike in ComfyUI, so that no two are equal.
    """
    quantiles = beta_quantiles(1 - np.linspace(0, 1, steps, endpoint=False), 0.6, 0.6)
    return at_timesteps(schedule, quantiles * (len(schedule.alpha_bar) - 1))


def beta_quantiles(fractions: Array, alpha: float, beta: float) -> Array:
    """The quantiles of the Beta(alpha, beta) distribution, for fractions (N,) in [0,1].  Raises ValueError."""
    if not 0 < min(alpha, beta) <= max(alpha, beta) <= 100:
        raise ValueError(f"got alpha {alpha:g} and beta {beta:g}, expected above 0 to 100")
    total = math.gamma(alpha) * math.gamma(beta) / math.gamma(alpha + beta)

    def distribution(u: Array, a: float, b: float) -> Array:
        """The distribution function at x = u^(1/a), x up to 1/2: x^a times a hypergeometric series."""
        x, term = u ** (1 / a), u / total
        result = term / a
        for n in range(60):
            term = term * x * (n + 1 - b) / (n + 1)
            result = result + term / (a + n + 1)
        return result

    def inverse(fraction: Array, a: float, b: float) -> Array:
        """By Newton's method in u, in which the function is nearly linear."""
        grid = np.linspace(0, 0.5**a, 513)
        u = np.interp(fraction, distribution(grid, a, b), grid)
        for _ in range(4):
            u = u - (distribution(u, a, b) - fraction) * a * total / (1 - u ** (1 / a)) ** (b - 1)
            u = np.clip(u, 0, 0.5**a)
        return u ** (1 / a)

    half = distribution(np.array(0.5**alpha), alpha, beta)
    lower = inverse(np.minimum(fractions, half), alpha, beta)
    upper = inverse(np.minimum(1 - fractions, 1 - half), beta, alpha)
    return np.where(fractions <= half, lower, 1 - upper)


def time_uniform(schedule: Schedule, steps: int) -> list[Level]:
    """Fractional timesteps linspace(999, 0, steps + 1), ending at the last; log alpha is interpolated linearly.

    UniPC's and DPM-Solver's own spacing.  Lu et al. 2022a, appendix D.
    """
    index, log_a = np.arange(len(schedule.alpha_bar)), np.log(np.maximum(schedule.alpha_bar, 2.0**-24)) / 2
    timesteps = np.linspace(len(index) - 1, 0, steps + 1)
    return [
        Level(float(t), float(np.exp(a)), float(np.sqrt(-np.expm1(2 * a))))
        for t, a in zip(timesteps, np.interp(timesteps, index, log_a), strict=True)
    ]


def webui_unipc(schedule: Schedule, steps: int) -> list[Level]:
    """time_uniform with as many steps as the original scripts have timesteps: A1111's UniPC."""
    num = len(schedule.alpha_bar)
    return time_uniform(schedule, len(range(0, num, num // steps)))


# ---- sigmas ---------------------------------------------------------------------------------------------------------


def at_sigmas(schedule: Schedule, sigmas: Array) -> list[Level]:
    """The levels of sigmas, then clean."""
    at = schedule.at_noise if isinstance(schedule, FlowSchedule) else schedule.at_sigma
    return [*(at(float(sigma)) for sigma in sigmas), CLEAN]


def sigma_range(schedule: Schedule, sigma_min: float | None, sigma_max: float | None) -> tuple[float, float]:
    """The least and the largest sigma: the schedule's where none is given.  Raises ValueError for an empty range."""
    sigmas = straightened(schedule).sigmas
    low = float(sigmas[0]) if sigma_min is None else sigma_min
    high = float(sigmas[-1]) if sigma_max is None else sigma_max
    most = 1.0 if isinstance(schedule, FlowSchedule) else 1e6
    if not 0 < low < high <= most:
        raise ValueError(f"got sigmas from {low:g} to {high:g}, expected a range above 0, at most {most:g}")
    return low, high


def _float32_range(schedule: Schedule, sigma_min: float | None, sigma_max: float | None) -> tuple[float, float] | None:
    """The same range for times of Brownian motions, from the schedule's sigmas in float32; None for rectified flows."""
    if isinstance(schedule, FlowSchedule):
        return None
    sigmas = float32_sigmas(schedule)
    return (sigmas[0].item() if sigma_min is None else sigma_min, sigmas[-1].item() if sigma_max is None else sigma_max)


def karras(
    schedule: Schedule,
    steps: int,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    rho: float = 7.0,
) -> list[Level]:
    """The core's `karras` over a range of sigmas, of rectified flows too.  Karras et al. 2022, eq. 5."""
    low, high = (sigma ** (1 / rho) for sigma in sigma_range(schedule, sigma_min, sigma_max))
    levels = at_sigmas(schedule, np.linspace(high, low, steps) ** rho)
    if (ends := _float32_range(schedule, sigma_min, sigma_max)) is None:
        return levels
    low, high = (sigma ** (1 / rho) for sigma in ends)
    return timed(levels, (high + torch.linspace(0, 1, steps) * (low - high)) ** rho)


def exponential(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Sigmas evenly spaced in log sigma over the schedule's range, then clean.  k-diffusion."""
    levels, ends = (
        polyexponential(schedule, steps, sigma_min, sigma_max),
        _float32_range(schedule, sigma_min, sigma_max),
    )
    if ends is None:
        return levels
    low, high = map(math.log, ends)
    return timed(levels, torch.linspace(high, low, steps).exp())


def polyexponential(
    schedule: Schedule,
    steps: int,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    rho: float = 1.0,
) -> list[Level]:
    """Log sigmas fall like a power of the steps left; rho 1 is exponential.  k-diffusion."""
    low, high = np.log(sigma_range(schedule, sigma_min, sigma_max))
    levels = at_sigmas(schedule, np.exp(np.linspace(1, 0, steps) ** rho * (high - low) + low))
    if (ends := _float32_range(schedule, sigma_min, sigma_max)) is None:
        return levels
    low, high = map(math.log, ends)
    return timed(levels, (torch.linspace(1, 0, steps) ** rho * (high - low) + low).exp())


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
    quantiles = beta_quantiles(1 - np.linspace(0, 1, steps), alpha, beta)
    levels = at_sigmas(schedule, low + quantiles * (high - low))
    if (ends := _float32_range(schedule, sigma_min, sigma_max)) is None:
        return levels
    return timed(levels, torch.from_numpy(ends[0] + quantiles * (ends[1] - ends[0])))


def kl_optimal(
    schedule: Schedule, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> list[Level]:
    """Arctangents of sigma evenly spaced, ending at the least sigma, not clean.  Sabour et al. 2024, sec. 3.1.

    As in A1111 the result is y = x0 + sigma eps, so the last level is not variance-preserving.
    """
    low, high = np.arctan(sigma_range(schedule, sigma_min, sigma_max))
    *levels, end = at_sigmas(schedule, np.tan(np.linspace(high, low, steps + 1)))[:-1]
    levels.append(Level(end.t, 1.0, end.sigma))
    if (ends := _float32_range(schedule, sigma_min, sigma_max)) is None:
        return levels
    (least, most), shares = torch.tensor(ends).arctan(), torch.arange(steps + 1) / steps
    return timed(levels, (shares * least + (1 - shares) * most).tan())


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


# ---- rectified flow -------------------------------------------------------------------------------------------------


def flow(schedule: Schedule, steps: int, shift: float | None = None, last: float = 0.0, curve: str = "") -> list[Level]:
    """s even from 1 to 0, shifted: most rectified flows; "simple" in ComfyUI if steps divides 1000.

    Then 1 - s is stretched so that the level before the end is at s = last, if that is not 0.  A curve (karras,
    exponential, beta) replaces the levels between the first and that one, as in diffusers.
    """
    flow = _with_shift(schedule, shift)
    return _bent(flow, shifted(np.linspace(1, 0, steps + 1)[:-1], flow.shift), last, curve)


def _bent(flow: FlowSchedule, s: Array, last: float, curve: str) -> list[Level]:
    """Return the levels of s (falling from 1), stretched to end at `last` and bent to a curve, then 0."""
    if curve not in CURVES:
        raise ValueError(f"unknown curve {curve!r:.60}: expected {', '.join(filter(None, CURVES))}")
    if last and len(s) > 1:
        s = 1 - (1 - s) * (1 - last) / (1 - s[-1])
    if curve:
        s = CURVES[curve](s[-1], s[0], len(s))
    return [flow.at_noise(float(level)) for level in np.append(s, 0.0)]


def flow_by_steps(
    schedule: Schedule, steps: int, shift: float | None = None, last: float = 0.0, curve: str = ""
) -> list[Level]:
    """Like `flow`, shifted by the image's size and, up to 4300 tokens, more for fewer steps.

    The schedule's own shift is for 200 steps; from 10 to 200 its logarithm is linear in the steps.
    Black Forest Labs 2025, sampling.py, compute_empirical_mu.
    """
    many = math.log(_with_shift(schedule, shift).shift)
    tokens = (many - 0.45666666) / 0.00016927
    if shift is None and tokens <= 4300:
        few = 8.73809524e-05 * tokens + 1.89833333
        shift = math.exp(many + (few - many) * (200 - steps) / 190)
    return flow(schedule, steps, shift, last, curve)


def flow_sd3(
    schedule: Schedule, steps: int, shift: float | None = None, last: float = 0.0, curve: str = ""
) -> list[Level]:
    """s even from 1 to the least of the shifted timesteps, shifted again, then 0: Stable Diffusion 3 and diffusers.

    diffusers takes the least before it shifts by the image's size.  last and curve are those of `flow`.
    stabilityai sd3_infer.py, get_sigmas.
    """
    flow = _with_shift(schedule, shift)
    least = float(flow.straight.sigmas[0]) if flow.by_size is None else 1 / NUM_TIMESTEPS
    return _bent(flow, shifted(np.linspace(1, least, steps), flow.shift), last, curve)


def _with_shift(schedule: Schedule, shift: float | None) -> FlowSchedule:
    """The schedule with another shift, if one is given.  Raises ValueError for another noise process."""
    if not isinstance(schedule, FlowSchedule):
        raise ValueError("this spacing is for rectified flow (FLUX, Stable Diffusion 3): leave it out")
    return schedule if shift is None else replace(FlowSchedule.of(shift), clock=schedule.clock)


SPACINGS |= {
    function.__name__: function
    for function in (
        *(
            linspace,
            karras,
            exponential,
            polyexponential,
            sgm_uniform,
            beta,
            lcm,
            original,
            leading_clean,
            trailing_to_0,
        ),
        *(respaced, normal, simple, turbo, kl_optimal, ddim_uniform, beta_sigma, time_uniform, webui_ddim, webui_unipc),
        diffusers,
        *(flow, flow_by_steps, flow_sd3),
    )
}
SPACINGS |= {name: functools.partial(_ays, name) for name in AYS}
SPACINGS |= {name: functools.partial(_from_table, name) for name in SECTIONS}
MADE_FOR_BETAS |= SPACINGS.keys() - GENERAL
