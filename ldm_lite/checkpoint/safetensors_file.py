"""Open safetensors files."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ldm_lite.core.layers import Shapes

MOST_TENSORS = 65536  # Stable Diffusion XL with an EMA copy has 5,000
MOST_HEADER = 64 * 2**20  # bytes; most of a large one is metadata


def open_safetensors(path: Path, size: int, header: int) -> tuple[Shapes, Mapping[str, str], Callable[[str], Tensor]]:
    """Return the shapes of a file's tensors by key, its metadata, and a function that reads one tensor.

    `header` is what the file says to be the length of its header.  Raises ValueError, one line.
    """
    if 8 + header > size:
        raise ValueError(f"{path}: is truncated: {size} bytes, but its header alone takes {8 + header}")
    if header > MOST_HEADER:
        raise ValueError(f"{path}: has a header of {header} bytes, wanted at most {MOST_HEADER}")
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        with open(path, "rb") as raw:
            ends = re.findall(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\b', raw.read(8 + header))
        wanted = 8 + header + max(map(int, ends), default=0)
        if size < wanted:
            raise ValueError(f"{path}: is truncated: {size} of {wanted} bytes: download it again") from error
        raise ValueError(f"{path}: is a damaged safetensors file ({error}): download it again") from error
    keys = file.keys()
    if len(keys) > MOST_TENSORS:
        raise ValueError(f"{path}: holds {len(keys)} tensors, wanted at most {MOST_TENSORS}")
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    return shapes, file.metadata() or {}, file.get_tensor
