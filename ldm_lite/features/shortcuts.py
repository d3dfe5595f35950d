"""deep_cache, gate_step, freeu: a UNet that leaves out work, or whose features are weighted."""

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import InputSource
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.guidance import InTurns, gated
from ldm_lite.diffusion.schedule import number
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.shortened import Run
from ldm_lite.runtime.shortened import Shortcuts as Settings
from ldm_lite.tasks.job import TaskJob

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Shortcuts(Feature):
    """Replaces the UNet; controls stay around it."""

    stage: ClassVar = "inside"
    topic: ClassVar = "shortcuts"
    excludes: ClassVar = ("compat",)
    deep_cache: str | None = option(
        None,
        "DeepCache: run the UNet's deep blocks only in every N-th call; BRANCH is how many more blocks the other calls "
        "run",
        metavar="N[:BRANCH]",
        png="DeepCache",
        reads=lambda text: _whole(text),
    )
    gate_step: int | None = option(
        None,
        "T-GATE: after this many steps, reuse the results of cross-attention and stop guidance",
        within=(1, 999),
        png="Gate step",
    )
    freeu: str | None = option(
        None,
        "FreeU's factors, for instance 1.5,1.6,0.9,0.2 for SD 1",
        metavar="B1,B2,S1,S2",
        png="FreeU",
        reads=lambda text: _four(text),
    )

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings that the texts give."""
        every, branch = self.reading("deep_cache") or (1, 0)
        return Settings(every, branch, self.gate_step, self.reading("freeu"))

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Raises ValueError for a network that it does not fit."""
        Run(model.unet, self.settings)
        if self.settings.gate is not None and is_compiled(model.run_row):
            log.warning("T-GATE runs uncompiled steps: `compile` has no effect with it")
        return model, options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Log a `gate_step` that is not reached."""
        gate, plan = self.settings.gate, job.plan
        if plan is None:
            return job
        if gate is not None and gate >= plan.num_steps:
            steps = plan.num_steps
            self.log(logging.WARNING, f"`gate_step` {gate} is not reached in {steps} steps: it has no effect")

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            assert job.plan is not None
            return Run(job.model.unet, self.settings, job.plan).wrapped(source)

        job = dataclasses.replace(job, wrappers=(*job.wrappers, wrap))
        return job if gate is None else dataclasses.replace(job, guiding=(*job.guiding, self._gated))

    def _gated(self, source: InputSource, job: TaskJob) -> InputSource:
        """Raises ValueError if the text changes after the gate, when it is no longer read."""
        assert job.plan is not None
        assert self.settings.gate is not None
        changes = job.plain.turns[1:] if isinstance(job.plain, InTurns) else ()
        for call, _ in changes:
            if call < len(job.plan.step) and job.plan.step[call] >= self.settings.gate:
                raise ValueError(
                    f"the prompt changes in step {job.plan.step[call] + 1}, but after step {self.settings.gate} "
                    "(`gate_step`) no text is read: use a larger `gate_step`, or an earlier change"
                )
        return gated(source, self.settings.gate)


def _whole(text: str) -> tuple[int, int]:
    every, _, branch = text.partition(":")
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
