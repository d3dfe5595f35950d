"""The core's plans, and additions for some samplers.

They are a variance that the network predicts, and times of a Brownian motion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.plan import ASIDE, H1, H2, H3, NOISE, NUM_REGISTERS, H, Plan, Rows, X
from ldm_lite.core.schedule import Array, Level, Schedule

__all__ = ["ASIDE", "H1", "H2", "H3", "NOISE", "NUM_REGISTERS", "H", "Plan", "Rows", "X"]


@dataclass(frozen=True, eq=False, repr=False)
class LearnedVariancePlan(Plan):
    """A plan for networks that predict their variance, between the posterior's (the plan's) and beta.

    No other coefficient depends on the data.  Nichol and Dhariwal 2021, eq. 15.
    """

    stretch: Array  # (N,) log of the largest factor by which the learned variance scales the row's noise

    @staticmethod
    def of(plan: Plan) -> "LearnedVariancePlan":
        """Return a plan with the stretch added."""
        after = np.append(plan.level[1:, 1], plan.end.s)
        ratio = np.divide(plan.level[:, 1], after, out=np.ones_like(after), where=plan.adds_noise)
        return LearnedVariancePlan(**vars(plan), stretch=np.log(ratio))


class TimedLevel(Level):
    """A level with its sigma as k-diffusion computes it, in float32: the time of a Brownian motion.

    There, the last bit changes the noise by a thousandth.
    """

    time: float


def float32_sigmas(schedule: Schedule) -> Tensor:
    """The sigmas (1000,) of the schedule's timesteps as k-diffusion computes them, in float32."""
    alpha_bar = torch.from_numpy(schedule.alpha_bar).float()
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def timed(levels: Sequence[Level], times: Tensor) -> list[Level]:
    """Return levels with their times (N,); those after the last, which are clean, have none."""
    result: list[Level] = [TimedLevel(*level) for level in levels[: len(times)]]
    for level, time in zip(result, times.tolist(), strict=True):
        vars(level)["time"] = time
    return [*result, *levels[len(times) :]]


@dataclass(frozen=True, eq=False, repr=False)
class TimedPlan(Plan):
    """A plan whose noise may come from a Brownian motion over sigma."""

    times: Array  # (N+1,) of the levels of the calls, and of the end; float32 numbers
    motion: tuple[float, float]  # when it starts and ends: the least and the largest

    @staticmethod
    def of(plan: Plan, schedule: Schedule, levels: Sequence[Level], two_stages: bool = False) -> "TimedPlan":
        """Return the plan with times; it has one call for each level but the last, or two, as in sample_dpmpp_sde.

        With two stages the times are lambdas, the second's halfway to the next level's; for levels without a time, as
        in a spacing of your own, lambda is in float64.
        """
        of_timesteps, known = float32_sigmas(schedule).tolist(), list[float | None]()
        for level in levels:
            whole = level.s > 0 and level.t == int(level.t) and level == schedule.at(int(level.t))
            time = getattr(level, "time", of_timesteps[int(level.t)] if whole else math.nan)
            known.append(time if math.isclose(time, level.sigma, rel_tol=1e-3) else None)  # else near infinity
        sigmas = [level.sigma if time is None else time for level, time in zip(levels, known, strict=True)]
        times = torch.tensor(sigmas, dtype=torch.float32)
        used = times[(times > 0) & (times < torch.inf)]
        motion = float(used.min()), float(used.max())
        if two_stages:
            after, lambdas = times[1:], (times if any(known) else times.double()).log().neg()
            middle = (lambdas[:-1] + (lambdas[1:] - lambdas[:-1]) * 0.5).neg().exp()
            both = torch.stack([lambdas[:-1].neg().exp(), middle], dim=1)  # (steps, 2)
            called = torch.stack([torch.ones_like(after, dtype=torch.bool), after > 0], dim=1)
            times = torch.cat([both[called], lambdas[-1:].neg().exp()]).float()
        return TimedPlan(**vars(plan), times=times.double().numpy(), motion=motion)


def rises_before(plan: Plan, call: int) -> int:
    """Return how often the noise has risen before a call by over a tenth of all timesteps, as Restart's does."""
    return int((np.diff(plan.t[: call + 1]) > 100).sum())
