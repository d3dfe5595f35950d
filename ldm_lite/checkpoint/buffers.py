"""The buffers of a file that are no weights: the noise schedule, perhaps rounded to the dtype of the weights."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldm_lite.checkpoint.reader import read_weight
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import Array, Schedule
from ldm_lite.runtime.precision import short_name

# From coarse to fine: a buffer whose values all exist in one of these may have been rounded to it, whatever its dtype.
COARSE = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
DTYPES = (*COARSE, torch.bfloat16, torch.float16)
MERGED = 2e-3  # relative: the buffers of files merged in half precision are off by more than a rounding


def rounded_to(stored: Tensor) -> torch.dtype:
    """Return the coarsest dtype that holds all values of a buffer."""
    plain = stored.double()
    return next((each for each in DTYPES if torch.equal(plain.to(each).double(), plain)), stored.dtype)


def is_rounded(stored: Tensor, exact: NDArray[Any], dtype: torch.dtype, tolerance: float = 0.0) -> bool:
    """Whether a buffer holds these values (float64, of the same shape) rounded to a dtype, or within a tolerance."""
    about = torch.finfo(dtype)
    # One unit in the last place, since it may have been rounded twice, first to float16; near zero it is constant.
    unit = about.eps * np.maximum(np.abs(exact), max(about.tiny, torch.finfo(torch.float16).tiny))
    off = np.abs(stored.double().numpy() - exact)
    return bool((off <= np.maximum(unit, tolerance * np.abs(exact))).all())


def stored_schedule(file: Tensors, known: Schedule) -> Array | None:
    """Return alpha_bar (1000,) of the noise schedule in a file if it is not the known one, rounded or not; else None.

    Of `betas` and `alphas_cumprod`, the one that differs counts.  Raises ValueError for buffers that are no schedule,
    that contradict each other, or that are too coarse.
    """
    found: list[Array] = []  # alpha_bar of betas that are not the known ones
    for name, exact in (("betas", known.betas), ("alphas_cumprod", known.alpha_bar)):
        if name not in file.shapes:
            continue
        where, stored = f"{file.path}: its {name}", read_weight(file, name)
        if tuple(stored.shape) != exact.shape:
            raise ValueError(f"{where} have the shape {tuple(stored.shape)}, wanted {exact.shape}")
        dtype, values = rounded_to(stored), stored.double().numpy()
        if any(is_rounded(stored, each, dtype, MERGED) for each in (exact, *found)):
            continue
        if dtype in COARSE:
            raise ValueError(f"{where} are not the family's, and too coarse to be used: stored in {short_name(dtype)}")
        if found:
            raise ValueError(f"{where} and betas are of two different noise schedules")
        try:
            schedule = Schedule(values, "v") if name == "alphas_cumprod" else Schedule.from_betas(values, "v")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        found.append(schedule.alpha_bar)
    return found[0] if found else None
