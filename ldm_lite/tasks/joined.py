"""Images of different jobs that are denoised together."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.denoise import Branch, unconstrained
from ldm_lite.core.job import Started
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import Constant
from ldm_lite.tasks.job import TaskJob

Prepared = tuple[TaskJob, Started]


def are_alike(first: Prepared, second: Prepared) -> bool:
    """Whether two batches can be denoised as one: of one model, with the same steps, guidance and shapes.

    Texts that change, regions, controls and shortcuts rule that out.
    """
    (ours, (our_x, our_source, *_)), (theirs, (their_x, their_source, *_)) = first, second
    if not isinstance(our_source, Constant) or not isinstance(their_source, Constant):
        return False
    our_inputs, their_inputs = our_source.inputs, their_source.inputs
    if ours.plan is None or theirs.plan is None or ours.model is not theirs.model:
        return False
    columns = ((column, vars(theirs.plan)[name]) for name, column in vars(ours.plan).items())
    return (
        not isinstance(ours.plan, AdaptivePlan)
        and not any(isinstance(branch.weight, Tensor) for branch in our_inputs.branches)
        and all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in columns)
        and our_inputs[2:] == their_inputs[2:]  # all but the network and the branches
        and our_x.shape[1:] == their_x.shape[1:]
        and list(map(_kind, our_inputs.branches)) == list(map(_kind, their_inputs.branches))
    )


def _kind(branch: Branch) -> tuple[object, ...]:
    """What two branches must have in common: weight, sign, and the shapes of their conditionings."""
    return (
        branch.weight if not isinstance(branch.weight, Tensor) else None,
        branch.positive,
        sorted((name, part.shape[1:]) for name, part in branch.conditioning.items()),
    )


def join_batches(batches: Sequence[Started]) -> Started:
    """Return one batch of all images, in order, from batches that are alike."""
    if len(batches) == 1:
        return batches[0]
    all_x, sources, draws, constraints = zip(*batches, strict=True)
    columns = zip(*(source.inputs.branches for source in sources), strict=True)
    inputs = sources[0].inputs._replace(branches=tuple(map(_joined, columns)))
    sizes = [len(x) for x in all_x]

    def draw() -> Tensor:
        return torch.cat([draw_part() for draw_part in draws])

    def constrain(number: int, x: Tensor) -> Tensor:
        parts = zip(constraints, torch.split(x, sizes), strict=True)
        return torch.cat([constrain_part(number, part) for constrain_part, part in parts])

    free = all(constraint is unconstrained for constraint in constraints)
    return Started(torch.cat(all_x), Constant(inputs), draw, unconstrained if free else constrain)


def _joined(branches: Sequence[Branch]) -> Branch:
    names = branches[0].conditioning
    parts = {name: torch.cat([branch.conditioning[name] for branch in branches]) for name in names}
    return branches[0]._replace(conditioning=parts)
