"""Images of different jobs that are denoised together."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.denoise import Branch, unconstrained
from ldm_lite.core.job import Started
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import Constant
from ldm_lite.tasks.job import Job

Prepared = tuple[Job, Started]


def are_alike(first: Prepared, second: Prepared) -> bool:
    """Whether two batches can be denoised as one: of one model, with the same steps, guidance and shapes.

    Texts that change, regions, controls and shortcuts rule that out.
    """
    (ours, our_start), (theirs, their_start) = first, second
    if not isinstance(our_start.inputs_of, Constant) or not isinstance(their_start.inputs_of, Constant):
        return False
    our_inputs, their_inputs = our_start.inputs_of.inputs, their_start.inputs_of.inputs
    if ours.plan is None or theirs.plan is None or ours.model is not theirs.model:
        return False
    columns = ((column, vars(theirs.plan)[name]) for name, column in vars(ours.plan).items())
    return (
        not isinstance(ours.plan, AdaptivePlan)
        and not any(isinstance(branch.weight, Tensor) for branch in our_inputs.branches)
        and all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in columns)
        and our_inputs[2:] == their_inputs[2:]  # all but the network and the branches
        and our_start.x.shape[1:] == their_start.x.shape[1:]
        and list(map(_kind, our_inputs.branches)) == list(map(_kind, their_inputs.branches))
    )


def _kind(branch: Branch) -> tuple[object, ...]:
    """What must be the same of two branches: weight, sign, and the shapes of their conditionings."""
    return (
        branch.weight if not isinstance(branch.weight, Tensor) else None,
        branch.positive,
        sorted((name, part.shape[1:]) for name, part in branch.conditioning.items()),
    )


def join(batches: Sequence[Started]) -> Started:
    """Return one batch of all images, in order, of batches that are alike."""
    if len(batches) == 1:
        return batches[0]
    sources = [batch.inputs_of for batch in batches if isinstance(batch.inputs_of, Constant)]
    columns = zip(*(source.inputs.branches for source in sources), strict=True)
    inputs = sources[0].inputs._replace(branches=tuple(map(_joined, columns)))
    sizes = [len(batch.x) for batch in batches]

    def draw() -> Tensor:
        return torch.cat([batch.draw() for batch in batches])

    def constrain(number: int, x: Tensor) -> Tensor:
        parts = zip(batches, torch.split(x, sizes), strict=True)
        return torch.cat([batch.constrain(number, part) for batch, part in parts])

    free = all(batch.constrain is unconstrained for batch in batches)
    x = torch.cat([batch.x for batch in batches])
    return Started(x, Constant(inputs), draw, unconstrained if free else constrain)


def _joined(branches: Sequence[Branch]) -> Branch:
    names = branches[0].conditioning
    parts = {name: torch.cat([branch.conditioning[name] for branch in branches]) for name in names}
    return branches[0]._replace(conditioning=parts)
