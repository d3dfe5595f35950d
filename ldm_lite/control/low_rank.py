"""Control-LoRA: a ControlNet as differences of low rank from the UNet that it is used with.

A file has X.up and X.down for most of the weights X.weight, which are the UNet's plus up @ down.  Tensors that it has
whole replace the UNet's; those that it lacks are the UNet's.
Source: Stability AI's control-lora; ComfyUI comfy/controlnet.py, ControlLora.
"""

import math
from collections.abc import Container

import torch
from torch import Tensor

from ldm_lite.checkpoint.reader import read_weight
from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import Shapes

MARK = "lora_controlnet"  # a tensor that says nothing but what kind of file it is


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the sizes of a tensor as a matrix with the same rows."""
    return math.prod(shape[:1]), math.prod(shape[1:])


def differences(file: Tensors, wanted: Shapes, base: Container[str]) -> tuple[Tensors, set[str]]:
    """Return the weights of a Control-LoRA as differences from a UNet's, and the keys of those that are whole.

    wanted are the shapes of the ControlNet, base the keys that its UNet has too.  Keys that are no part of it stay in
    the result.  Raises ValueError if a pair of factors is for another UNet.
    """
    stored, pairs = file.shapes, dict[str, tuple[str, str]]()
    added = {key: shape for key, shape in wanted.items() if key in base and key not in stored}
    for key, shape in added.items():
        up, down = (key.removesuffix("weight") + part for part in ("up", "down"))
        if key.endswith(".weight") and up in stored and down in stored:
            (rows, rank), (inner, columns) = (_matrix(stored[part]) for part in (up, down))
            if (rows, columns) != _matrix(shape) or rank != inner:
                raise ValueError(f"is for another UNet: its {up} is {stored[up]}, {down} {stored[down]}, for {shape}")
            pairs[key] = up, down
    whole = stored.keys() - {MARK, *(part for pair in pairs.values() for part in pair)}

    def read(key: str) -> Tensor:
        if key in whole:
            return file.read(key)
        if key not in pairs:
            return torch.zeros(added[key])
        up, down = (read_weight(file, part).float().flatten(1) for part in pairs[key])
        return (up @ down).view(added[key])

    shapes = {**added, **{key: stored[key] for key in whole}}
    return Tensors(file.path, shapes, read, file.metadata), set(whole)
