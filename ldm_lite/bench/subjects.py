"""What is measured: a checkpoint from a file, the bundled one, or one of a known size with random weights, made here.

Random weights are good for speed (zeros are not): the networks do the same work, and a full-size file is not needed.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.reader import Checkpoint, on_meta, prefix
from ldm_lite.zoo.detection import describe
from ldm_lite.zoo.families import FAMILIES, Family
from ldm_lite.zoo.networks import build


def subject(size: str, ckpt: str | None) -> Checkpoint:
    """The checkpoint to measure: a file if one is named, else of a size: "bundled", or a name of FAMILIES.

    Raises ValueError for another name.
    """
    if ckpt is not None or size == "bundled":
        return open_source(ckpt)
    if size not in FAMILIES:
        raise ValueError(f"unknown size {size!r}: wanted bundled, or one of {', '.join(FAMILIES)}")
    return random_checkpoint(size, FAMILIES[size])


def random_checkpoint(name: str, family: Family, seed: int = 0) -> Checkpoint:
    """A checkpoint in the original layout with random weights, each made when it is read."""
    with on_meta():
        states = {role: build(spec).state_dict() for role, spec in family.networks.items()}
    shapes = {
        prefix(role, state, family.sgm) + key: tuple(state[key].shape)
        for role, state in states.items()
        for key in state
    }
    return Checkpoint(
        Path(f"random {name}"), shapes, describe(family), lambda key: random_tensor(key, shapes[key], seed)
    )


def random_tensor(key: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """float32 values of the size of trained weights: around 1 for the scales of norms, 1/sqrt(fan in) for matrices.

    They depend on the seed and the key alone, and are the same on every machine (numpy's PCG64).
    """
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    values = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    noise = torch.from_numpy(values.standard_normal(shape, dtype=np.float32))
    if len(shape) == 1:
        return noise.mul_(0.05).add_(1.0 if key.endswith("weight") else 0.0)
    # Codes are as large as the latents that are compared with them.
    small = "embedding" in key and "quantize" not in key
    return noise.mul_(0.02 if small else float(np.prod(shape[1:])) ** -0.5)
