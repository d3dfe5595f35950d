"""Guidance that depends on the step: only in an interval, or with a scale that changes.

Where there is no guidance, the network runs on one branch only: half the work.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ldm_lite.core.denoise import Branch, Call, Inputs, InputSource, weighted
from ldm_lite.diffusion.guidance import IdentityKey
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import number


def within(source: InputSource, active: tuple[bool, ...], alone: bool = False) -> InputSource:
    """Return inputs whose guidance acts only in some of the steps, one bool for each: a scale of 1 in the others.

    With `alone` only the last branch runs in these, for weights that are not those of a scale.
    """
    last = gated(source, 0)

    def inputs_of(call: Call) -> Inputs:
        if active[call.step]:
            return source(call)
        return last(call) if alone else source(call)._replace(scale=1.0, combine=weighted)

    return inputs_of


def gated(source: InputSource, first: int) -> InputSource:
    """Return inputs of which only the last branch runs from a step on; regions, whose weights are maps, all run."""

    @functools.cache
    def last(branches: IdentityKey) -> tuple[Branch, ...]:
        maps = any(isinstance(branch.weight, Tensor) for branch in branches.value)
        chosen: tuple[Branch, ...] = branches.value if maps else (branches.value[-1]._replace(weight=1.0),)
        return chosen

    def inputs_of(call: Call) -> Inputs:
        inputs = source(call)
        if call.step < first:
            return inputs
        return inputs._replace(branches=last(IdentityKey(inputs.branches)), scale=1.0, combine=weighted)

    return inputs_of


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
