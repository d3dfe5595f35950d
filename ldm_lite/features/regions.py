"""regions: a separate prompt for each region of an image: the parts of a prompt that AND joins.

At each position, the outputs for the parts whose regions hold it are averaged, by the weights of the parts; guidance
is as for a single prompt.  ComfyUI's "Conditioning (Set Mask)" and "Conditioning (Combine)": comfy/samplers.py,
_calc_cond_batch.  Every part sees the whole image, so the regions fit together.

Shape letters: P parts, h w latent size.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ldm_lite.conditioning.prompts import guided
from ldm_lite.core.denoise import Branch
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.guidance import Guidance, ScaleOrFunction, classifier_free, composed
from ldm_lite.diffusion.schedule import number
from ldm_lite.features.edited_texts import EditedTexts
from ldm_lite.tasks.cost import Cost
from ldm_lite.tasks.job import TaskJob

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0,1] of the image
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Regions(Feature):
    """Gives each part of a prompt a weight at each position."""

    stage: ClassVar = "scale"
    topic: ClassVar = "prompts"
    regions: str | None = option(
        None,
        "where the parts of a prompt, joined by AND, go: a box for each, left,top,right,bottom from 0 to 1, or all; "
        "for instance 'all; 0.1,0.2,0.5,0.8'",
        metavar="BOX; BOX",
        png="Regions",
        reads=lambda text: read_regions(text),
    )

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The regions of the parts."""
        boxes: tuple[Box, ...] = self.reading("regions")
        return boxes

    def add_cost(self, cost: Cost) -> Cost:
        """Return a cost whose prompts have parts."""
        return dataclasses.replace(cost, joins_parts=True)

    def change_job(self, job: TaskJob) -> TaskJob:
        """Let parts have regions.  Raises ValueError, before anything is encoded, unless there are as many of both."""
        assert isinstance(job.texts, EditedTexts), "EditedPrompts comes before"
        texts = self.once(job.texts, lambda texts: dataclasses.replace(texts, compose=self._compose))
        for prompt in texts.prompts:
            weights = texts.weights(prompt)
            if (count := len(weights)) != len(self.boxes):
                name = "prompt" if prompt in job.task.prompts else "`hires_prompt`"
                raise ValueError(
                    f"got {len(self.boxes)} `regions`, but the {name} has {count} part{'s' * (count != 1)}: give one "
                    "for each; AND joins parts"
                )
            shares(self.boxes, weights, job.shape[1:])
        return dataclasses.replace(job, texts=texts)

    def _compose(
        self, job: TaskJob, conds: Sequence[Parts], weights: Sequence[float], uncond: Parts | None
    ) -> Guidance:
        """EditedTexts.compose: each part where its region is."""
        if job.model.family.distilled:  # it reads the scale
            conds = [guided(job.model, cond, None, job.guidance).branches[0].conditioning for cond in conds]
        return regional(conds, shares(self.boxes, weights, job.shape[1:]), uncond, job.guidance)


def read_regions(text: str) -> tuple[Box, ...]:
    """Read "0,0,0.5,1; 0.5,0,1,1" or "all; 0.2,0.2,0.6,0.6".  Raises ValueError for other text."""
    return tuple(_box(box.strip()) for box in text.split(";"))


def _box(text: str) -> Box:
    if text == "all":
        return WHOLE
    try:
        left, top, right, bottom = (number(side.strip()) for side in text.split(","))
    except ValueError:
        left = top = right = bottom = math.nan
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ValueError(
            f"got a region {text!r:.60}, expected left,top,right,bottom from 0 to 1 of the image, or all; one for each "
            "part of the prompt, with ; between: 0,0,0.5,1; 0.5,0,1,1"
        )
    return left, top, right, bottom


def shares(boxes: Sequence[Box], weights: Sequence[float], size: tuple[int, int]) -> Tensor:
    """Return the share (P,1,h,w) of each part at each position of a latent image of this size; they add up to 1.

    weights are the parts' weights, above 0.  A position belongs to a box that holds its centre.  Raises ValueError for
    other weights, and for a box or a position that is in none.
    """
    if min(weights) <= 0:
        raise ValueError(f"got {min(weights):g} as the weight of a part of the prompt, expected more than 0")
    height, width = size
    masks = torch.zeros(len(boxes), 1, height, width)
    for mask, (left, top, right, bottom), weight in zip(masks, boxes, weights, strict=True):
        rows, columns = _inside(top, bottom, height), _inside(left, right, width)
        mask[0, rows, columns] = weight
        if not mask.any():
            box = f"{left:g},{top:g},{right:g},{bottom:g}"
            raise ValueError(f"the region {box} holds none of {width} x {height} positions of the latents: enlarge it")
    total = masks.sum(dim=0)
    if not total.all():
        raise ValueError("the regions leave part of the image out: make them larger, or give a part all of it")
    return masks / total


def _inside(low: float, high: float, count: int) -> slice:
    """The positions, of `count` between 0 and 1, whose centres are from low to high."""
    return slice(math.ceil(low * count - 0.5), math.ceil(high * count - 0.5))


def regional(
    conds: Sequence[Parts],
    shares: Tensor,
    uncond: Parts | None,
    guidance: ScaleOrFunction,
) -> Guidance:
    """uncond + scale * (cond - uncond), where cond is the sum of each of P conditionings times its share (P,1,h,w).

    shares add up to 1 at each position.  No uncond means no guidance.  Raises ValueError as composed does.
    """
    if len(conds) == 1:
        return classifier_free(conds[0], uncond, guidance)
    if uncond is None:
        return Guidance(tuple(map(Branch, conds, shares)))
    composition = composed(conds, (1.0,) * len(conds), uncond, guidance)
    return dataclasses.replace(composition, branches=(composition.branches[0], *map(Branch, conds, shares)))
