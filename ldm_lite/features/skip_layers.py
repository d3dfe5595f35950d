"""Skip-layer guidance: away from the network's output without some of its blocks.  Stable Diffusion 3.5 medium."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.declare import SCALES
from ldm_lite.core.denoise import Branch, Call, Inputs, InputSource, weighted
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.guidance import IdentityKey
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class SkipLayerGuidance(Feature):
    """Adds a branch that skips blocks."""

    stage: ClassVar = "inside"
    topic: ClassVar = "guidance"
    brought_by: ClassVar = ("skip_layers",)
    skip_layer_scale: float | None = option(
        None,
        "Stable Diffusion 3.5 medium: scale of skip-layer guidance; 0 turns it off (default: 2.5)",
        within=SCALES,
        png="Skip layer scale",
    )

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Raises ValueError if the model's family has no such guidance."""
        if self.skip_layer_scale is not None and model.family.skip_layers is None:
            raise ValueError(f"{model.family.title} has no skip-layer guidance: leave out `skip_layer_scale`")
        return model, options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Raises ValueError for prompts of several parts."""
        skip, scale = job.model.family.skip_layers, self.skip_layer_scale
        assert skip is not None
        scale = skip.scale if scale is None else scale
        if scale == 0 or job.plan is None:
            return job
        job.refuse_parts("skips no layers: give `skip_layer_scale=0` for a model that skips some")
        blocks = torch.tensor([block in skip.layers for block in range(job.model.family.unet.depth)])
        steps = job.plan.num_steps
        between, on_device = (skip.start * steps, skip.end * steps), blocks.to(job.model.device)

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            return skipping(source, on_device, scale, between)

        return dataclasses.replace(job, wrappers=(*job.wrappers, wrap))


def skipping(source: InputSource, skip: Tensor, scale: float, between: tuple[float, float]) -> InputSource:
    """Return inputs with skip-layer guidance: plus scale * (cond - cond without the blocks in `skip`).

    skip (depth,) bool says which blocks are left out, `between` (both excluded) in which steps.
    Stability-AI/sd3.5, SkipLayerCFGDenoiser.
    """

    @functools.cache
    def branches_of(branches: IdentityKey) -> tuple[tuple[Branch, ...], Branch]:
        cond = branches.value[-1].conditioning
        rows = skip.expand(len(cond["context"]), -1)
        whole = {"skip": torch.zeros_like(rows)}
        changed = (branch._replace(conditioning={**branch.conditioning, **whole}) for branch in branches.value)
        return tuple(changed), Branch({**cond, "skip": rows}, positive=False)

    @functools.cache
    def weighted_branches(branches: IdentityKey, guidance: float) -> tuple[Branch, ...]:
        (*others, cond), skipped = branches_of(branches)
        uncond = [branch._replace(weight=1 - guidance) for branch in others]
        return skipped, *uncond, cond._replace(weight=guidance + scale)

    def inputs_of(call: Call) -> Inputs:
        inputs = source(call)
        if inputs.combine is not weighted:
            raise ValueError(
                "skip-layer guidance takes `scale` alone: leave out the `guidance` function, or `skip_layer_scale`"
            )
        key = IdentityKey(inputs.branches)
        if not between[0] < call.step < between[1]:
            return inputs._replace(branches=branches_of(key)[0])
        return inputs._replace(branches=weighted_branches(key, inputs.scale), scale=1.0)

    return inputs_of
