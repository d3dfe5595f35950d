"""The options that `compat` takes from the original scripts, beside their samplers and noise.

scripts/txt2img.py and scripts/img2img.py of CompVis/stable-diffusion, and for OpenCLIP's encoder those of
Stability-AI/stablediffusion.  Neither has a script to inpaint with an ordinary network, but their samplers take `mask`
and `x0`.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.trick_options import TrickOptions
from ldm_lite.diffusion.names import resolve
from ldm_lite.models.open_clip import OPEN_CLIP_H

log = logging.getLogger("ldm_lite")

Options = TypeVar("Options", bound=Txt2imgOptions)

_SIDES = {"height": 512, "width": 512}
FIRST: Mapping[str, Mapping[str, Any]] = {
    "txt2img": {"scale": 7.5, "n_iter": 2},
    "img2img": {"scale": 5.0, "n_iter": 1, "strength": 0.75},
    "inpaint": {"strength": 1.0},
}
SECOND: Mapping[str, Mapping[str, Any]] = {
    "txt2img": {"scale": 9.0, "n_iter": 3, **_SIDES},
    "img2img": {"scale": 9.0, "n_iter": 1, "strength": 0.8},
    "inpaint": {"strength": 1.0},
}


def is_second(model: Model) -> bool:
    """Whether the model's scripts are those of Stability-AI/stablediffusion."""
    return model.family.text == OPEN_CLIP_H


def as_original(model: Model, options: Options, command: str) -> Options:
    """Return the options with the defaults of the original script if `compat` is set."""
    if not options.compat:
        return options
    if model.schedule.is_flow:
        raise ValueError(f"`compat` is for scripts of Stable Diffusion 1 and 2, not {model.family.title}: leave it out")
    if model.ema and not model.family.original_ema:
        log.warning(
            '%s: has its EMA weights, the original script takes the main ones: load with `ema="no"`', model.name
        )
    defaults = {"sampler": "ddim", **(SECOND if is_second(model) else FIRST)[command]}
    if command == "txt2img" and model.family.conditioner == "bert":
        defaults |= _SIDES  # `laion400m`
    return dataclasses.replace(
        options, **{name: value for name, value in defaults.items() if getattr(options, name) is None}
    )


def check_original(options: Txt2imgOptions) -> None:
    """Raises ValueError for options that the original script lacks, if `compat` is set."""
    if not options.compat:
        return
    tricks = (each.name for each in dataclasses.fields(TrickOptions))
    for name in ("spacing", "churn", "exact_steps", *tricks):
        if getattr(options, name, None):
            raise ValueError(f"the original script has no `{name}`: leave it out, or `compat`")
    sampler, spacing = resolve("ddim" if options.sampler is None else options.sampler)
    known = options.original_samplers
    if sampler not in known or spacing is not None:
        raise ValueError(
            f"`compat` knows the samplers of the original script, {', '.join(known)}, not {options.sampler}"
        )


def load_img(image: Image.Image) -> Tensor:
    """Convert an image to pixels (3,H,W) in [-1,1], rounded as in the original's load_img."""
    return 2 * (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255) - 1
