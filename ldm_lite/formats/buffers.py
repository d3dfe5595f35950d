"""Buffers of a file that differ from its family's: another scale factor or noise schedule, or the same one, rounded.

They may have been rounded to the dtype of the weights.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldm_lite.checkpoint.loading import MERGED
from ldm_lite.checkpoint.reader import read_weight
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import Array, NoiseSchedule
from ldm_lite.runtime.precision import short_name
from ldm_lite.zoo.family import FamilyRow

# From coarse to fine: a buffer whose values all exist in one of these may have been rounded to it, whatever its dtype.
COARSE = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_DTYPES = (*COARSE, torch.bfloat16, torch.float16)


def is_rounded(stored: Tensor, exact: NDArray[Any], dtype: torch.dtype, tolerance: float = 0.0) -> bool:
    """Whether a buffer holds these values (float64, of the same shape) rounded to a dtype, or within a tolerance."""
    about = torch.finfo(dtype)
    # One unit in the last place, since it may have been rounded twice, first to float16; near zero it is constant.
    unit = about.eps * np.maximum(np.abs(exact), max(about.tiny, torch.finfo(torch.float16).tiny))
    off = np.abs(stored.double().numpy() - exact)
    return bool((off <= np.maximum(unit, tolerance * np.abs(exact))).all())


def stored_schedule(file: Tensors, expected: NoiseSchedule) -> Array | None:
    """Return alpha_bar (1000,) of the noise schedule in a file if it is not the family's, rounded or not; else None.

    Of `betas` and `alphas_cumprod`, the one that differs counts.  Raises ValueError for buffers that are not a
    schedule, that contradict each other, or that are too coarse.
    """
    others: list[Array] = []  # alpha_bar of betas that are not the known ones
    for name, exact in (("betas", expected.betas), ("alphas_cumprod", expected.alpha_bar)):
        if name not in file.shapes:
            continue
        where, stored = f"{file.path}: its {name}", read_weight(file, name)
        if tuple(stored.shape) != exact.shape:
            raise ValueError(f"{where} have the shape {tuple(stored.shape)}, expected {exact.shape}")
        plain = stored.double()
        dtype = next((dtype for dtype in _DTYPES if torch.equal(plain.to(dtype).double(), plain)), stored.dtype)
        values = plain.numpy()
        if any(is_rounded(stored, known, dtype, MERGED) for known in (exact, *others)):
            continue
        if dtype in COARSE:
            raise ValueError(f"{where} are not the family's, and too coarse to be used: stored in {short_name(dtype)}")
        if others:
            raise ValueError(f"{where} and betas are of two different noise schedules")
        try:
            schedule = NoiseSchedule(values, "v") if name == "alphas_cumprod" else NoiseSchedule.from_betas(values, "v")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        others.append(schedule.alpha_bar)
    return others[0] if others else None


def scaled(family: FamilyRow, file: Tensors) -> FamilyRow:
    """Return the family with the scale factor in its file, if it has one: training measured it.

    Raises ValueError for an impossible one, one that is too coarse, and if it is needed and missing.
    """
    path, known = file.path, family.scale_factor
    if "scale_factor" in file.shapes:
        stored = read_weight(file, "scale_factor")
        value = float(stored) if stored.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{path}: its scale_factor cannot be {value}: expected one number above 0")
        if is_rounded(stored, np.full(stored.shape, known), stored.dtype):
            return family
        if stored.dtype in COARSE:
            raise ValueError(
                f"{path}: its scale_factor is stored in {short_name(stored.dtype)}, too coarse to be used: use the "
                "original file, or give `metadata=scale_factor=X`"
            )
        return replace(family, scale_factor=value)
    if math.isnan(known):
        raise ValueError(
            f"{path}: lacks scale_factor, which differs between files of {family.title}: use the original file, or "
            "give `metadata=scale_factor=X`"
        )
    return family
