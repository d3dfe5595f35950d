"""guidance_interval: guidance only in some steps; in the others one branch runs, half the work."""

import dataclasses
import logging
import math
import re
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.core.denoise import Call, Inputs, InputSource, weighted
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.guidance import check_guided, gated
from ldm_lite.diffusion.plan import Plan
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class GuidanceInterval(Feature):
    """A scale of 1 outside of an interval of the steps."""

    stage: ClassVar = "branches"
    topic: ClassVar = "guidance"
    excludes: ClassVar = ("compat",)
    guidance_interval: str | None = option(
        None,
        "guidance only in this part of the run, START-END: fractions of the steps (0.1-0.7, -0.6) or noise levels "
        "(sigma=0.3-5); the other steps cost half",
        metavar="START-END",
        png="Guidance interval",
        reads=lambda text: Interval.read(text),
    )

    @property
    def interval(self) -> "Interval":
        """The interval that the text gives."""
        interval: Interval = self.reading("guidance_interval")
        return interval

    def change_job(self, job: TaskJob) -> TaskJob:
        """Log an interval without a step."""
        if job.plan is not None and not any(self.interval.steps(job.plan)):
            steps = job.plan.num_steps
            self.log(logging.WARNING, f"none of {steps} steps is within `guidance_interval`: there is no guidance")
        return dataclasses.replace(job, guiding=(*job.guiding, self._within))

    def _within(self, source: InputSource, job: TaskJob) -> InputSource:
        assert job.plan is not None
        check_guided(job, "guidance_interval")
        active, last = self.interval.steps(job.plan), gated(source, 0)

        def inputs_of(call: Call) -> Inputs:
            if active[call.step]:
                return source(call)
            # Three-way guidance has weights that are not those of a scale.
            return last(call) if job.image_scale is not None else source(call)._replace(scale=1.0, combine=weighted)

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
            low, high = (float(bound or end) for bound, end in zip(match.groups(), (0, math.inf), strict=True))
            if low < high and (by_sigma or (low < 1 and (high <= 1 or high == math.inf))):
                return Interval(by_sigma, low, high)
        raise ValueError(
            f"got `guidance_interval` {text!r:.60}, expected START-END, in fractions of the steps (0.1-0.8, -0.5) or "
            "noise levels (sigma=0.3-5)"
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
