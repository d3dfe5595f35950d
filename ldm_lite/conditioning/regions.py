"""Prompts of their own for regions of an image: weights of the parts of a prompt, joined by AND, at each position.

At each position, the outputs for the parts whose regions hold it are averaged, by the weights of the parts; guidance
is as for a single prompt.  ComfyUI's "Conditioning (Set Mask)" and "Conditioning (Combine)": comfy/samplers.py,
_calc_cond_batch.  Every part sees the whole image, so the regions fit together.

Shape letters: P parts, h w latent size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ldm_lite.diffusion.schedule import number

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0,1] of the image
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


def read_regions(text: str) -> tuple[Box, ...]:
    """Read "0,0,0.5,1; 0.5,0,1,1" or "all; 0.2,0.2,0.6,0.6".  Raises ValueError for other text."""
    return tuple(_box(each.strip()) for each in text.split(";"))


def _box(text: str) -> Box:
    if text == "all":
        return WHOLE
    try:
        left, top, right, bottom = (number(each.strip()) for each in text.split(","))
    except ValueError:
        left = top = right = bottom = math.nan
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ValueError(
            f"got a region {text!r:.60}, wanted left,top,right,bottom from 0 to 1 of the image, or all; one for each "
            "part of the prompt, with ; between: 0,0,0.5,1; 0.5,0,1,1"
        )
    return left, top, right, bottom


def shares(boxes: Sequence[Box], weights: Sequence[float], size: tuple[int, int]) -> Tensor:
    """Return the share (P,1,h,w) of each part at each position of a latent image of this size; they add up to 1.

    weights are those of the parts, above 0.  A position belongs to a box that holds its centre.  Raises ValueError for
    other weights, and for a box or a position that is in none.
    """
    if min(weights) <= 0:
        raise ValueError(f"got {min(weights):g} as the weight of a part of the prompt, wanted more than 0 for a region")
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
