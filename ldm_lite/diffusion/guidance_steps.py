"""Guidance that depends on the step: only in an interval, or with a scale that changes.

Where there is no guidance, the network runs on one branch only: half the work.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ldm_lite.diffusion.guidance import Branches
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import number

Weights = tuple[float, ...]


@dataclass(frozen=True)
class Within:
    """Weights of branches in some of the steps, and those without guidance in the others."""

    others: Weights | Callable[[int], Weights]
    active: tuple[bool, ...]  # one for each step
    unguided: Weights | None  # None: the last branch alone

    def __call__(self, step: int) -> Weights:
        """The weights of a step, counted from 0."""
        weights = self.others(step) if callable(self.others) else self.others
        return weights if self.active[step] else self.unguided or (*(0.0 for _ in weights[1:]), 1.0)


def within(branches: Branches, active: tuple[bool, ...]) -> Branches:
    """Return branches whose guidance acts only in some of the steps, one bool for each."""
    return replace(branches, weights=Within(branches.weights, active, branches.unguided))


@dataclass(frozen=True)
class Interval:
    """Steps from `low` to `high`: shares of all steps, or noise levels."""

    by_sigma: bool
    low: float
    high: float

    @staticmethod
    def read(text: str) -> "Interval":
        """Read "0.1-0.8", "-0.5" or "0.2-", or "sigma=0.3-5".  Raises ValueError for other text."""
        by_sigma = text.startswith("sigma=")
        match = re.fullmatch(r"(\d*\.?\d*)-(\d*\.?\d*)", text.removeprefix("sigma=").replace(" ", ""))
        if match is not None and not {*match.groups()} & {"."}:
            low, high = (float(each or end) for each, end in zip(match.groups(), (0, math.inf), strict=True))
            if low < high and (by_sigma or (low < 1 and (high <= 1 or high == math.inf))):
                return Interval(by_sigma, low, high)
        raise ValueError(
            f"got `guidance_interval` {text!r:.60}, wanted START-END in shares of the steps (0.1-0.8, -0.5), or noise "
            "levels (sigma=0.3-5)"
        )

    def steps(self, plan: Plan) -> tuple[bool, ...]:
        """Return which steps of a plan it holds, one bool for each.

        By shares, step i of N is in it from floor(low N) up to floor(high N), excluded, as in diffusers' guiders; by
        noise levels if low < sigma <= high at the step's first call, Kynkäänniemi et al. 2024, eq. 6.
        """
        count = plan.num_steps
        if not self.by_sigma:
            first, end = int(self.low * count), int(min(self.high, 1.0) * count)
            return tuple(first <= step < end for step in range(count))
        calls = plan.level[[list(plan.step).index(step) for step in range(count)]]
        return tuple(bool(self.low * a < s <= self.high * a) if a else self.high == math.inf for a, s in calls)


def _powered(t: float, power: float) -> float:
    return (1 - math.cos(math.pi * t**power)) / 2


# Weights of guidance over time, t from 0 at the first step to 1 at the last; those with a mean of 1 keep the scale's
# total.  Wang et al. 2024, "Analysis of classifier-free guidance weight schedulers", sec. 4 and 5.
SHAPES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda t, power: 2 * t,
    "falling": lambda t, power: 2 * (1 - t),
    "cosine": lambda t, power: 1 - math.cos(math.pi * t),
    "falling_cosine": lambda t, power: 1 + math.cos(math.pi * t),
    "sine": lambda t, power: math.sin(math.pi * t) * math.pi / 2,
    "power_cosine": _powered,
}


def scheduled(schedule: str, scale: float, steps: int) -> Callable[[int], float]:
    """Return the guidance scale of every step, counted from 0, for one of SHAPES with a mean or greatest scale.

    "linear:least=1" never goes below a weight of 1 (the paper's clamping); "power_cosine:power=2" sets its power
    (default 4).  The paper's weight is scale - 1, of cond + weight * (cond - uncond).  Raises ValueError for other
    text.
    """
    name, *given = schedule.split(":")
    settings = {"least": 0.0, "power": 4.0}
    try:
        settings |= {key: number(value) for key, _, value in (each.partition("=") for each in given)}
    except ValueError:
        settings["power"] = 0
    powered = any(each.startswith("power=") for each in given) and name != "power_cosine"
    if name not in SHAPES or len(settings) > 2 or settings["power"] <= 0 or powered:
        raise ValueError(
            f"got `guidance_schedule` {schedule!r:.60}, wanted one of {', '.join(SHAPES)}, perhaps with :least=NUMBER, "
            "and power_cosine with :power=NUMBER above 0"
        )
    shape, weight = SHAPES[name], scale - 1

    def at(step: int) -> float:
        t = step / max(1, steps - 1)
        return 1 + max(settings["least"], weight * shape(t, settings["power"]))

    return at
