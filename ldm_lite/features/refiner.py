"""refiner: another model takes over for the last steps."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core.denoise import Call, Constraint, Draw, Inputs, InputSource, State, run_plan
from ldm_lite.core.job import Item
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.runtime.precision import short_name
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job


class Refiner(Feature):
    """Gives the calls of the last steps the inputs of another model, with the same texts and guidance."""

    is_last = True

    def check(self, options: Any) -> Any:
        """Raises ValueError for a start without a refiner."""
        if options.refiner is None:
            raise ValueError("`refiner_start` needs a refiner: give one with `refiner=FILE`")
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Load the refiner.  Raises ValueError for one that cannot go on with the model's latents."""
        refiner = options.refiner
        if not isinstance(refiner, Model):
            place = LoadOptions(ckpt=refiner, device=str(model.device), dtype=short_name(model.dtype))
            refiner = load_model(place, Model)
        if options.embedding:
            refiner = with_embeddings(refiner, options.embedding)
        if refiner.family.prediction != model.family.prediction:
            raise ValueError(
                f"{model.name} predicts {model.family.prediction}, but {refiner.name} {refiner.family.prediction}: the "
                "second cannot continue a run of the first"
            )
        self.model: Model = refiner
        return model, dataclasses.replace(options, refiner=refiner)

    def change_job(self, job: Job) -> Job:
        """Switch to the refiner, outside of all that changes the inputs of the model."""
        if job.plan is None:
            return job
        if isinstance(job.plan, AdaptivePlan):
            raise ValueError("DPM adaptive has no fixed steps for a mask or a refiner: take another sampler")
        refiner, model, num_steps = self.model, job.model, job.plan.num_steps
        start = 0.8 if job.options.refiner_start is None else job.options.refiner_start
        first = max(0, round(start * (job.skipped + num_steps)) - job.skipped)
        self.log(logging.INFO, f"{refiner.name}: runs the last {num_steps - first} of {num_steps} steps")
        texts = dataclasses.replace(job.texts, model=refiner, cond=None, uncond=None, is_refiner=True)
        encode, wrappers = job.encode, job.wrappers

        def encode_for_both(job: Job, items: Sequence[Item]) -> InputSource:
            source = encode(job, items)
            for wrap in wrappers:
                source = wrap(source, job)
            refined = texts.encode(job, items)
            return lambda call: refined(call) if call.step >= first else source(call)

        def solve(x: Tensor, plan: Plan, inputs_of: InputSource, draw: Draw, constrain: Constraint) -> Iterator[State]:
            """Run the plan; one of the two models is on the device."""
            with contextlib.ExitStack() as phase:
                running: Model | None = None

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
        return dataclasses.replace(job, encode=encode_for_both, wrappers=(), solve=solve, settings=settings)
