"""deep_cache, gate_step, freeu: a UNet that leaves out work, or whose features are weighted."""

import dataclasses
import logging
from typing import Any

from ldm_lite.core.denoise import InputSource
from ldm_lite.diffusion.guidance import InTurns, gated
from ldm_lite.diffusion.schedule import number
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.shortened import Run
from ldm_lite.runtime.shortened import Shortcuts as Settings
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job

log = logging.getLogger("ldm_lite")


class Shortcuts(Feature):
    """Replaces the UNet, around which controls stay."""

    def check(self, options: Any) -> Any:
        """Raises ValueError for text that is no setting."""
        free = None if options.freeu is None else _four(options.freeu)
        self.settings = Settings(*_whole(options.deep_cache), options.gate_step, free)
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Raises ValueError for a network that it does not fit."""
        Run(model.unet, self.settings)
        if self.settings.gate is not None and is_compiled(model.step):
            log.warning("T-GATE runs uncompiled steps: `compile` has no effect with it")
        return model, options

    def change_job(self, job: Job) -> Job:
        """Log a `gate_step` that is not reached."""
        gate, plan = self.settings.gate, job.plan
        if plan is None:
            return job
        if gate is not None and gate >= plan.num_steps:
            steps = plan.num_steps
            self.log(logging.WARNING, f"`gate_step` {gate} is not reached in {steps} steps: it has no effect")

        def wrap(source: InputSource, job: Job) -> InputSource:
            assert job.plan is not None
            return Run(job.model.unet, self.settings, job.plan).wrapped(source)

        job = dataclasses.replace(job, wrappers=(*job.wrappers, wrap))
        return job if gate is None else dataclasses.replace(job, guiding=(*job.guiding, self._gated))

    def _gated(self, source: InputSource, job: Job) -> InputSource:
        """Raises ValueError if the text changes after it has been read for the last time."""
        assert job.plan is not None
        assert self.settings.gate is not None
        changes = job.plain.turns[1:] if isinstance(job.plain, InTurns) else ()
        for call, _ in changes:
            if call < len(job.plan.step) and job.plan.step[call] >= self.settings.gate:
                raise ValueError(
                    f"the prompt changes in step {job.plan.step[call] + 1}, but after step {self.settings.gate} "
                    "(`gate_step`) no text is read: take a larger `gate_step`, or an earlier change"
                )
        return gated(source, self.settings.gate)


def _whole(text: str | None) -> tuple[int, int]:
    every, _, branch = ("1" if text is None else text).partition(":")
    branch = branch or "0"
    if not (every.isdecimal() and branch.isdecimal() and 1 <= int(every) <= 1000):
        raise ValueError(f"got `deep_cache` {text!r:.60}, expected N, 1 to 1000, or N:BRANCH, for instance 3 or 3:1")
    return int(every), int(branch)


def _four(text: str) -> tuple[float, float, float, float]:
    try:
        b1, b2, s1, s2 = (number(factor) for factor in text.split(","))
    except ValueError as error:
        raise ValueError(f"got `freeu` {text!r:.60}, expected four numbers B1,B2,S1,S2: 1.5,1.6,0.9,0.2") from error
    return b1, b2, s1, s2
