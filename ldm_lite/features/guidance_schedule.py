"""guidance_schedule: a guidance scale that changes over the steps."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.core.denoise import Call, Inputs, InputSource
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.guidance import check_classifier_free
from ldm_lite.diffusion.schedule import number
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class GuidanceSchedule(Feature):
    """Another scale in each step."""

    stage: ClassVar = "scale"
    topic: ClassVar = "guidance"
    excludes: ClassVar = ("compat",)
    guidance_schedule: str | None = option(
        None,
        "how the guidance scale changes: linear, falling, cosine, falling_cosine, sine, power_cosine[:power=4], each "
        "with [:least=WEIGHT]",
        metavar="NAME",
        png="Guidance schedule",
        reads=lambda text: scheduled(text, 1.0, 1),
    )

    def change_job(self, job: TaskJob) -> TaskJob:
        """Change the scale of each call."""

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            assert job.plan is not None
            scale = check_classifier_free(job, "guidance_schedule")
            scale_at = scheduled(self.guidance_schedule or "", scale, job.plan.num_steps)

            def inputs_of(call: Call) -> Inputs:
                return source(call)._replace(scale=float(scale_at(call.step)))

            return inputs_of

        return dataclasses.replace(job, guiding=(*job.guiding, wrap))


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
    """Return the guidance scale of every step, counted from 0, for one of SHAPES with a mean or maximum scale.

    "linear:least=1" never goes below a weight of 1 (the paper's clamping); "power_cosine:power=2" sets its power
    (default 4).  The paper's weight is scale - 1, of cond + weight * (cond - uncond).  Raises ValueError for other
    text.
    """
    name, *assignments = schedule.split(":")
    settings = {"least": 0.0, "power": 4.0}
    try:
        settings |= {key: number(value) for key, _, value in (setting.partition("=") for setting in assignments)}
    except ValueError:
        settings["power"] = 0
    powered = any(setting.startswith("power=") for setting in assignments) and name != "power_cosine"
    if name not in SHAPES or len(settings) > 2 or settings["power"] <= 0 or powered:
        raise ValueError(
            f"got `guidance_schedule` {schedule!r:.60}, expected one of {', '.join(SHAPES)}, optionally with "
            ":least=NUMBER, and power_cosine with :power=NUMBER above 0"
        )
    shape, weight = SHAPES[name], scale - 1

    def at(step: int) -> float:
        t = step / max(1, steps - 1)
        return 1 + max(settings["least"], weight * shape(t, settings["power"]))

    return at
