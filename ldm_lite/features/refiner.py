"""refiner: another model takes over for the last steps."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.checkpoint.hub import check_there
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import LoadOptions, changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import Call, Constraint, Draw, Inputs, InputSource, State, run_plan
from ldm_lite.core.features import Feature, option
from ldm_lite.core.job import Item
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import number
from ldm_lite.runtime.precision import short_name
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class Refiner(Feature):
    """Gives the calls of the last steps the inputs of another model, with the same texts and guidance."""

    stage: ClassVar = "around"
    topic: ClassVar = "sampling"
    loads: ClassVar = True
    part_of: ClassVar = ("refiner", "needs a refiner: give one with `refiner=FILE`")
    refiner: Any = option(
        None,
        "checkpoint that takes over for the last steps: SDXL's refiner, or a similar one",
        metavar="FILE",
    )
    refiner_start: float | None = option(
        None,
        "fraction of the steps before the refiner takes over, 0 to 1 (default: 0.8)",
        within=(0, 1),
        png="Refiner from step",
        keys=("Refiner", "Refiner switch at"),
        always=True,
        from_text=lambda settings, explicit: start_of(settings),
    )

    def check_files(self) -> None:
        """Raises OSError for a checkpoint that is not there."""
        if not isinstance(self.refiner, CheckpointModel):
            check_there(self.refiner)

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Load the refiner.  Raises ValueError for one that cannot continue from the model's latents."""
        refiner = self.refiner
        if not isinstance(refiner, CheckpointModel):
            place = LoadOptions(ckpt=refiner, device=str(model.device), dtype=short_name(model.dtype))
            refiner = load_model(place, CheckpointModel)
        if embeddings := getattr(options, "embedding", ()):
            refiner = with_embeddings(refiner, embeddings)
        if refiner.family.prediction != model.family.prediction:
            raise ValueError(
                f"{model.name} predicts {model.family.prediction}, but {refiner.name} {refiner.family.prediction}: the "
                "second cannot continue a run of the first"
            )
        self.state["model"] = refiner
        return model, changed(options, refiner=refiner)

    def change_job(self, job: TaskJob) -> TaskJob:
        """Switch to the refiner, outside of everything that changes the inputs of the model."""
        if job.plan is None:
            return job
        if isinstance(job.plan, AdaptivePlan):
            raise ValueError("DPM adaptive has no fixed steps for a mask or a refiner: use another sampler")
        refiner, model, num_steps = self.state["model"], job.model, job.plan.num_steps
        start = 0.8 if self.refiner_start is None else self.refiner_start
        first = max(0, round(start * (job.skipped + num_steps)) - job.skipped)
        self.log(logging.INFO, f"{refiner.name}: runs the last {num_steps - first} of {num_steps} steps")
        texts = dataclasses.replace(job.texts, model=refiner, cond=None, uncond=None, is_refiner=True)
        input_source, wrappers = job.input_source, job.wrappers

        def encode_for_both(job: TaskJob, items: Sequence[Item]) -> InputSource:
            source = input_source(job, items)
            for wrap in wrappers:
                source = wrap(source, job)
            refined = texts.encode(job, items)
            return lambda call: refined(call) if call.step >= first else source(call)

        def solve(x: Tensor, plan: Plan, inputs_of: InputSource, draw: Draw, constrain: Constraint) -> Iterator[State]:
            """Run the plan; one of the two models is on the device."""
            with contextlib.ExitStack() as phase:
                running: CheckpointModel | None = None

                def on_device(call: Call) -> Inputs:
                    nonlocal running
                    needed = refiner if call.step >= first else model
                    if needed is not running:
                        phase.close()
                        phase.enter_context(needed.phase("unet"))
                        running = needed
                    return inputs_of(call)

                yield from run_plan(x, plan, on_device, draw, constrain)

        settings = {**job.settings, "Refiner": refiner.name, "Refiner from step": first + 1}
        return dataclasses.replace(job, input_source=encode_for_both, wrappers=(), solve=solve, settings=settings)


def start_of(settings: Mapping[str, str]) -> float | None:
    """Return the fraction of the steps that a picture's text names, in A1111's form or ours."""
    if "Refiner switch at" in settings:
        return number(settings["Refiner switch at"])
    first, steps = (number(settings[key]) if key in settings else 0.0 for key in ("Refiner from step", "Steps"))
    return min(1.0, (first - 1) / steps) if first and steps else None
