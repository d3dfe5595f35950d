"""Weights in 8 bits, computed with in the network's own type: half the memory of half precision, a little less quality.

Each row (output channel) has a scale of its own.  Lossy; nothing is computed in 8 bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# name -> the type of the values, and the largest that it holds
STORAGES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


class Stored(NamedTuple):
    """A tensor as it is kept: its values times the scale of their row, or with no scale the values themselves."""

    values: Tensor
    scale: Tensor | None  # (rows, 1, ...) float32
    dtype: torch.dtype  # of the tensor


def store(tensor: Tensor, storage: str | None) -> Stored:
    """A weight (rows, ...) in 8 bits; what has one dimension (norms, biases), and integers, is kept as it is.

    It is kept as a copy, so that nothing holds on to a memory-mapped file whose weights are in 8 bits now.
    """
    if storage is None:
        return Stored(tensor, None, tensor.dtype)
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return Stored(tensor.clone(), None, tensor.dtype)
    dtype, largest = STORAGES[storage]
    rows, inside = tensor.float(), tuple(range(1, tensor.ndim))
    largest_of_row = torch.maximum(rows.amax(inside, keepdim=True), -rows.amin(inside, keepdim=True))
    scale = largest_of_row.clamp(min=1e-12) / largest
    values = rows / scale
    return Stored((values.round_() if dtype == torch.int8 else values).to(dtype), scale, tensor.dtype)


def restore(stored: Stored, device: torch.device) -> Tensor:
    """The tensor on a device; from pinned memory the copy is not waited for."""
    values = stored.values.to(device, non_blocking=True)
    if stored.scale is None:
        return values
    return values.to(stored.dtype) * stored.scale.to(device, stored.dtype, non_blocking=True)
