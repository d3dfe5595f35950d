"""Images of different jobs that are denoised together."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.denoise import Branch, Inputs
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import Constant
from ldm_lite.diffusion.plan import Plan
from ldm_lite.tasks.batching import InpaintMask, Ready


def are_alike(first: Ready, second: Ready) -> bool:
    """Whether two batches can be denoised as one: of one model, with the same steps, guidance and shapes."""
    if first.model is not second.model or not (_can_join(first) and _can_join(second)):
        return False
    ours, theirs = _inputs(first), _inputs(second)
    return (
        _same(first.plan, second.plan)
        and (first.mask is None) == (second.mask is None)
        and ours[2:] == theirs[2:]  # all but the network and the branches
        and first.latents.shape[1:] == second.latents.shape[1:]
        and list(map(_kind, ours.branches)) == list(map(_kind, theirs.branches))
    )


def join(batches: Sequence[Ready]) -> Ready:
    """Return one batch of all images, in order, of batches that are alike; its `batch` is the first one's."""
    first = batches[0]
    if len(batches) == 1:
        return first
    inputs = _inputs(first)
    columns = zip(*(_inputs(batch).branches for batch in batches), strict=True)
    source = Constant(inputs._replace(branches=tuple(map(_joined, columns))))
    masks = [batch.mask for batch in batches if batch.mask is not None]
    draws = [batch.draw for batch in batches]

    def draw() -> Tensor:
        return torch.cat([draw_part() for draw_part in draws])

    latents = torch.cat([batch.latents for batch in batches])
    mask = _joined_masks(masks) if masks else None
    return dataclasses.replace(first, latents=latents, source=source, draw=draw, mask=mask)


def _can_join(batch: Ready) -> bool:
    """Whether a batch has the same plain guidance in all steps: no texts that change, regions, controls, shortcuts."""
    if not isinstance(batch.source, Constant) or batch.refiner is not None or batch.plan is None:
        return False
    maps = any(isinstance(branch.weight, Tensor) for branch in batch.source.inputs.branches)
    same_steps = not isinstance(batch.plan, AdaptivePlan)
    return not maps and same_steps and (batch.mask is None or batch.mask.noise is not None)


def _inputs(batch: Ready) -> Inputs:
    assert isinstance(batch.source, Constant)
    return batch.source.inputs


def _same(first: Plan | None, second: Plan | None) -> bool:
    assert first is not None
    assert second is not None
    pairs = ((value, vars(second)[name]) for name, value in vars(first).items())
    return all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _kind(branch: Branch) -> tuple[object, ...]:
    """What must be the same of two branches: weight, sign, and the shapes of their conditionings."""
    shapes = sorted((name, part.shape[1:]) for name, part in branch.conditioning.items())
    return branch.weight, branch.positive, shapes


def _joined(branches: Sequence[Branch]) -> Branch:
    names = branches[0].conditioning
    parts = {name: torch.cat([branch.conditioning[name] for branch in branches]) for name in names}
    return branches[0]._replace(conditioning=parts)


def _joined_masks(masks: Sequence[InpaintMask]) -> InpaintMask:
    whole = [mask.mask.expand(len(mask.latents), -1, -1, -1) for mask in masks]
    noise = [mask.noise for mask in masks if mask.noise is not None]
    return InpaintMask(torch.cat([mask.latents for mask in masks]), torch.cat(whole), torch.cat(noise))
