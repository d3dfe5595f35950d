"""Images of different jobs that are denoised together."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.diffusion.plan import Plan
from ldm_lite.generate import Extras, InpaintMask
from ldm_lite.tasks.batching import Ready


def are_alike(one: Ready, other: Ready) -> bool:
    """Whether two batches can be denoised as one: of one model, with the same steps, guidance and shapes."""
    if one.model is not other.model or not (_can_join(one) and _can_join(other)):
        return False
    mine, theirs = one.branches, other.branches
    guidance = [(each.weights, each.rescale, each.threshold) for each in (mine, theirs)]
    masks = (one.extras.mask is None) == (other.extras.mask is None)
    return (
        _same(one.plan, other.plan)
        and masks
        and guidance[0] == guidance[1]
        and one.latents.shape[1:] == other.latents.shape[1:]
        and list(map(_shapes, mine.conditionings)) == list(map(_shapes, theirs.conditionings))
    )


def join(batches: Sequence[Ready]) -> Ready:
    """Return one batch of all images, in order, of batches that are alike; its `batch` is the first one's."""
    first = batches[0]
    if len(batches) == 1:
        return first
    each = zip(*(batch.branches.conditionings for batch in batches), strict=True)
    branches = dataclasses.replace(first.branches, conditionings=tuple(map(_joined, each)))
    masks = [batch.extras.mask for batch in batches]
    extras = Extras(None if masks[0] is None else _joined_masks([mask for mask in masks if mask is not None]))
    latents = torch.cat([batch.latents for batch in batches])
    draws = [batch.draw for batch in batches]

    def draw() -> Tensor:
        return torch.cat([each() for each in draws])

    return dataclasses.replace(first, latents=latents, branches=branches, draw=draw, extras=extras)


def _can_join(batch: Ready) -> bool:
    branches, (mask, *others) = batch.branches, batch.extras
    plain = all(each is None for each in others) and branches.combine is None and not callable(branches.weights)
    plain = plain and not branches.later and branches.maps is None  # texts that change, or have regions
    table = batch.plan is not None and not isinstance(batch.plan, AdaptivePlan)
    return plain and table and (mask is None or mask.noise is not None)


def _same(one: Plan | None, other: Plan | None) -> bool:
    assert one is not None
    assert other is not None
    pairs = ((value, vars(other)[name]) for name, value in vars(one).items())
    return all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _shapes(conditioning: Conditioning) -> list[torch.Size | None]:
    more = sorted((conditioning.inputs or {}).items())
    return [None if part is None else part.shape[1:] for part in (*conditioning[:3], *(each for _, each in more))]


def _joined(conditionings: Sequence[Conditioning]) -> Conditioning:
    parts = zip(*(each[:3] for each in conditionings), strict=True)
    context, y, concat = (None if part[0] is None else torch.cat(part) for part in parts)
    names = conditionings[0].inputs or {}
    more = {name: torch.cat([(each.inputs or {})[name] for each in conditionings]) for name in names}
    return Conditioning(context, y, concat, inputs=more or None)


def _joined_masks(masks: Sequence[InpaintMask]) -> InpaintMask:
    whole = [mask.mask.expand(len(mask.latents), -1, -1, -1) for mask in masks]
    noise = [mask.noise for mask in masks if mask.noise is not None]
    return InpaintMask(torch.cat([mask.latents for mask in masks]), torch.cat(whole), torch.cat(noise))
