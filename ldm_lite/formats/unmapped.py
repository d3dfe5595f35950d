"""Safetensors files that cannot be mapped, since they are larger than the memory: tensors are read one by one.

safetensors' own reader maps a file privately and writable, which the system counts as memory.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldm_lite.cli.files import open_file
from ldm_lite.core.files import Tensors

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}


def open_safetensors(path: Path) -> Tensors:
    """Open a safetensors file without a map.  Raises ValueError, one line, if its header is damaged."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            metadata = {str(key): str(text) for key, text in header.pop("__metadata__", {}).items()}
            entries = {
                key: (_DTYPES[about["dtype"]], about["shape"], *about["data_offsets"]) for key, about in header.items()
            }
            for key, (dtype, shape, start, end) in entries.items():
                if math.prod(shape) * dtype.itemsize != end - start:
                    raise ValueError(f"{key} has {end - start} bytes")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is a damaged safetensors file ({error}): download it again") from error

    def read(key: str) -> Tensor:
        dtype, shape, start, end = entries[key]
        content = bytearray(end - start)
        with open_file(path) as file:
            file.seek(8 + length + start)
            if file.readinto(content) < len(content):  # type: ignore[attr-defined]  # of a buffered file
                raise ValueError(f"{path}: is truncated: the values of {key} are missing")
        values = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return values.view(dtype).view(shape)

    return Tensors(path, {key: tuple(entry[1]) for key, entry in entries.items()}, read, metadata)
