"""Weight quantisation: 8-bit values with a scale for each row (output channel).

Half the memory of half precision for slightly lower quality.  Weights are dequantised to the dtype that the network
computes in; nothing is computed in 8 bits.  LoRAs change them after that, so their 8 bits stay as they are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# option `storage` -> dtype of the values, and the largest of them
STORAGES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


Change = Callable[[Tensor], None]  # of a weight in float32, in place


class Quantized(NamedTuple):
    """A tensor as it is kept: values times the scale of their row, or, without a scale, the tensor itself."""

    values: Tensor
    scale: Tensor | None  # (rows, 1, ...) float32
    dtype: torch.dtype  # of the dequantised tensor
    changes: list[Change]  # made to it after it is dequantised, if it has a scale


def quantize(tensor: Tensor, storage: str | None) -> Quantized:
    """Quantise a weight (rows, ...) to "fp8" or "int8"; None keeps the tensor itself.

    Vectors (norms, biases) and integers are copied, not quantised.  Copied, since one tensor of a memory-mapped file
    keeps the whole file in memory.
    """
    if storage is None:
        return Quantized(tensor, None, tensor.dtype, [])
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return Quantized(tensor.clone(), None, tensor.dtype, [])
    dtype, largest = STORAGES[storage]
    rows, inside = tensor.float(), tuple(range(1, tensor.ndim))
    largest_of_row = torch.maximum(rows.amax(inside, keepdim=True), -rows.amin(inside, keepdim=True))
    scale = largest_of_row.clamp(min=1e-12) / largest
    values = rows / scale
    return Quantized((values.round_() if dtype == torch.int8 else values).to(dtype), scale, tensor.dtype, [])


def dequantize(quantized: Quantized, device: torch.device) -> Tensor:
    """Return the tensor on a device.  Copies to a CUDA GPU do not wait; on Apple's, they would read freed memory."""
    non_blocking = device.type == "cuda" and quantized.values.is_pinned()
    values = quantized.values.to(device, non_blocking=non_blocking)
    if quantized.scale is None:
        return values
    wide = torch.float32 if quantized.changes else quantized.dtype
    scale = quantized.scale.to(device, non_blocking=device.type == "cuda" and quantized.scale.is_pinned())
    restored = values.to(wide) * scale.to(wide)
    return changed(restored, quantized.changes).to(quantized.dtype)


def changed(weight: Tensor, changes: Sequence[Change]) -> Tensor:
    """Return a weight after its changes, which are made in place; without any it may have any dtype."""
    for change in tuple(changes):  # another thread may add some
        change(weight)
    return weight
