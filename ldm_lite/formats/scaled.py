"""Files of scaled fp8: each weight is stored in 8 bits, with a scale to multiply it by.

ComfyUI writes `X.scale_weight`, newer files `X.weight_scale` and a description in `X.comfy_quant` or the metadata;
kohya's have a scale for each row, or for each block of a row.
"""

import json
import re
from typing import Any

import torch
from torch import Tensor

from ldm_lite.core.files import Tensors

SCALE = re.compile(r"^(.*\.)(?:scale_weight|weight_scale)$")
BESIDE = re.compile(r"(?:^|\.)(?:scale_input|input_scale|comfy_quant|scaled_fp8)$")  # of no use where nothing is in fp8
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
QUANTIZATION = "_quantization_metadata"


def unscaled(tensors: Tensors) -> Tensors | None:
    """Return a view without the scales, with tensors multiplied by them, in float32.  None if nothing is scaled.

    Raises ValueError for a format other than fp8, for a scale that does not fit its weight, and for a file marked as
    scaled without scales.
    """
    shapes, read = tensors.shapes, tensors.read
    scales = {f"{match[1]}weight": key for key in shapes if (match := SCALE.match(key))}
    _check_formats(tensors)
    if not scales and any(read(key).dtype in FP8 for key, shape in shapes.items() if len(shape) == 2):
        raise ValueError("is marked as scaled fp8, but its scales are missing: use a whole file")
    for key, scale in scales.items():
        if key not in shapes or not _fits(shapes[scale], shapes[key]):
            raise ValueError(
                f"its scale {scale} {shapes[scale]} does not fit {key} {shapes.get(key, 'which it lacks')}"
            )

    def read_unscaled(key: str) -> Tensor:
        value = read(key)
        if key not in scales or value.dtype not in FP8:
            return value
        scale = read(scales[key]).float()
        if scale.ndim != 3:
            return value.float() * scale.view(scale.shape if scale.ndim == 2 else (-1,) + (1,) * (value.ndim - 1))
        blocks = value.float().view(len(value), scale.shape[1], -1)
        return (blocks * scale).view(value.shape)

    kept = {key: shape for key, shape in shapes.items() if not SCALE.match(key) and not BESIDE.search(key)}
    return Tensors(tensors.path, kept, read_unscaled, tensors.metadata)


def _fits(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether a scale is one number, one of each row, or of each block of a row."""
    if scale in ((), (1,)):
        return True
    rows, width = (weight[0], weight[1]) if len(weight) == 2 else (0, 0)
    blocked = len(scale) == 3 and scale[0] == rows and scale[2] == 1 and scale[1] > 0 and width % scale[1] == 0
    return scale in ((rows, 1), (rows,)) or blocked


def _check_formats(tensors: Tensors) -> None:
    """Raise ValueError if the file says that a weight is in a format other than fp8."""
    layers: list[Any] = []
    try:
        if QUANTIZATION in tensors.metadata:
            layers += json.loads(tensors.metadata[QUANTIZATION])["layers"].values()
        for key in tensors:
            if key.endswith(".comfy_quant"):
                layers.append(json.loads(bytes(tensors[key].tolist())))
        formats = {str(layer["format"]) for layer in layers}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its description of the quantisation is damaged ({error})") from error
    if unknown := formats - set(_FORMATS):
        raise ValueError(f"is quantised as {', '.join(sorted(unknown))}, expected {' or '.join(_FORMATS)}")
