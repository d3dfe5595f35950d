"""From options to what saves evaluations of the network: guidance in some steps, shortcuts in the UNet."""

import dataclasses
import inspect
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import InputSource
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import Guidance
from ldm_lite.diffusion.guidance_steps import Interval, gated, scheduled, within
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.projected import Projection
from ldm_lite.diffusion.schedule import number
from ldm_lite.runtime.compile import CompiledStep
from ldm_lite.runtime.shortened import Shortcuts, ShortenedUNet

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Tricks:
    """What the options ask for; nothing if all is None."""

    interval: Interval | None = None
    schedule: str | None = None
    projection: Projection | None = None
    gate: int | None = None
    shortcuts: Shortcuts | None = None

    def scaled(self, guidance: Guidance, plan: Plan | None) -> Guidance:
        """Return guidance whose scale follows the schedule, in the steps of a plan.

        Raises ValueError without guidance, and for guidance that has no single scale.
        """
        changed = [self.interval, self.schedule, self.projection]
        if plan is None or all(trick is None for trick in changed):
            return guidance
        if not guidance.is_guided:
            raise ValueError(
                "`guidance_interval`, `guidance_schedule` and `apg` change the guidance, but there is none: take a "
                "`scale` other than 1, and a checkpoint that is not distilled"
            )
        if (self.schedule, self.projection) != (None, None) and not guidance.is_classifier_free:
            raise ValueError("`guidance_schedule` and `apg` take `scale` alone: leave other guidance out")
        if self.projection is not None and isinstance(plan, AdaptivePlan):
            raise ValueError("DPM adaptive tries steps again, which `apg` would remember: take another sampler")
        if self.schedule is None:
            return guidance
        assert not callable(guidance.scale)
        return dataclasses.replace(guidance, scale=scheduled(self.schedule, guidance.scale, plan.num_steps))

    def wrapped(self, source: InputSource, plan: Plan | None, instructed: bool) -> InputSource:
        """Return the inputs of a run in whose steps guidance acts as the options say; it may be guidance.instructed."""
        if plan is None:
            return source
        if self.projection is not None:
            if isinstance(plan, AdaptivePlan):
                raise ValueError("DPM adaptive tries steps again, which `apg` would remember: take another sampler")
            inner, combine = source, self.projection.begin()
            source = lambda call: inner(call).combined_by(combine)  # noqa: E731
        if self.interval is not None:
            source = within(source, self.interval.steps(plan), alone=instructed)
        return source if self.gate is None else gated(source, self.gate)

    def check_changes(self, calls: Iterable[int], plan: Plan) -> None:
        """Raises ValueError if the text changes in a call of the network after T-GATE has read it for the last time."""
        for call in calls:
            if self.gate is not None and call < len(plan.step) and plan.step[call] >= self.gate:
                raise ValueError(
                    f"the prompt changes in step {plan.step[call] + 1}, but after step {self.gate} (`gate_step`) no "
                    "text is read: take a larger `gate_step`, or an earlier change"
                )

    def report(self, plan: Plan) -> None:
        """Log what has no effect in the steps of a plan."""
        steps = plan.num_steps
        if self.gate is not None and self.gate >= steps:
            log.warning("`gate_step` %d is not reached in %d steps: it has no effect", self.gate, steps)
        if self.interval is not None and not any(self.interval.steps(plan)):
            log.warning("none of %d steps is within `guidance_interval`: there is no guidance", steps)


def tricks_of(options: Txt2imgOptions, *models: Model) -> Tricks:
    """Return the tricks of the options.  Raises ValueError for wrong ones, and for those a model cannot do."""
    if options.guidance_schedule is not None:
        scheduled(options.guidance_schedule, 1.0, 1)
    every, branch = _whole(options.deep_cache)
    free = None if options.freeu is None else _four(options.freeu)
    shortcuts = Shortcuts(every, branch, options.gate_step, free)
    for model in models if shortcuts != Shortcuts() else ():
        ShortenedUNet(model.unet, shortcuts)  # raises ValueError for one that it does not fit
    plain_steps = options.apg is not None or shortcuts != Shortcuts()
    if plain_steps and any(isinstance(inspect.unwrap(model.step), CompiledStep) for model in models):
        log.warning("DeepCache, T-GATE, FreeU and APG run uncompiled steps: `compile` has no effect with them")
    return Tricks(
        None if options.guidance_interval is None else Interval.read(options.guidance_interval),
        options.guidance_schedule,
        None if options.apg is None else _projection(options.apg),
        options.gate_step,
        None if shortcuts == Shortcuts() else shortcuts,
    )


def _projection(text: str) -> Projection:
    known = {each.name for each in dataclasses.fields(Projection)}
    settings: dict[str, float] = {}
    for part in text.split(":"):
        name, _, value = part.partition("=")
        try:
            settings[name] = number(value)
        except ValueError:
            settings[""] = math.nan
    if not set(settings) <= known or settings.get("threshold", 0) < 0 or abs(settings.get("momentum", 0)) >= 1:
        raise ValueError(
            f"got `apg` {text!r:.60}, wanted parallel=0, perhaps with :threshold=NUMBER, 0 or more, and "
            ":momentum=NUMBER between -1 and 1"
        )
    return Projection(**settings)


def _whole(text: str | None) -> tuple[int, int]:
    every, _, branch = ("1" if text is None else text).partition(":")
    branch = branch or "0"
    if not (every.isdecimal() and branch.isdecimal() and 1 <= int(every) <= 1000):
        raise ValueError(f"got `deep_cache` {text!r:.60}, wanted N, 1 to 1000, or N:BRANCH, for instance 3 or 3:1")
    return int(every), int(branch)


def _four(text: str) -> tuple[float, float, float, float]:
    try:
        b1, b2, s1, s2 = (number(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"got `freeu` {text!r:.60}, wanted four numbers B1,B2,S1,S2: 1.5,1.6,0.9,0.2") from error
    return b1, b2, s1, s2
