"""The model to measure: a file, the bundled model, or a family of known size with random weights.

Random weights do the same work as trained ones (zeros do not), and no full-size file is needed.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ldm_lite.checkpoint.reader import open_source, parts_of, prefix
from ldm_lite.core.files import Tensors
from ldm_lite.zoo.families import FAMILY_ROWS, describe, detect_family
from ldm_lite.zoo.family import FamilyRow, build_network


def open_model(size: str, ckpt: str | None, device: str = "cpu", ahead: bool = True) -> Tensors:
    """Open the checkpoint to measure: the file `ckpt` if given, otherwise "bundled" or a name of FAMILY_ROWS.

    device: where it will run; random weights are drawn there if that is CUDA.  ahead: otherwise threads draw them
    before they are read, which takes memory.  Raises ValueError for another name.
    """
    if ckpt is not None or size == "bundled":
        return open_source(ckpt)
    if size not in FAMILY_ROWS:
        raise ValueError(f"unknown size {size!r}: expected bundled, or one of {', '.join(FAMILY_ROWS)}")
    return random_checkpoint(size, FAMILY_ROWS[size], device=device, ahead=ahead)


def family_of(checkpoint: Tensors) -> FamilyRow:
    """Return a checkpoint's family; no weights are read."""
    shapes = {role: part.shapes for role, part in parts_of(checkpoint).items()}
    return detect_family(shapes, checkpoint.metadata)


def random_checkpoint(name: str, family: FamilyRow, seed: int = 0, device: str = "cpu", ahead: bool = True) -> Tensors:
    """Return a checkpoint in the original layout with random weights, each made when it is read."""
    with torch.device("meta"):
        states = {role: build_network(spec).state_dict() for role, spec in family.specs.items()}
    shapes = {
        prefix(role, state, family.sgm) + key: tuple(state[key].shape)
        for role, state in states.items()
        for key in state
    }
    on_cuda = device.startswith("cuda")
    if ahead and not on_cuda:
        read = _drawn_ahead(shapes, seed)
    else:
        read = functools.partial(_read, shapes, seed, torch.device(device if on_cuda else "cpu"))
    return Tensors(Path(f"random {name}"), shapes, read, describe(family))


def _read(shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device, key: str) -> Tensor:
    return random_tensor(key, shapes[key], seed, device)


AHEAD = 8  # tensors that threads draw while a reader takes those before them: numpy lets others run meanwhile


def _drawn_ahead(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Callable[[str], Tensor]:
    """Return a function that makes the tensor of a key; the next ones in the order of the keys are drawn meanwhile."""
    keys, threads, drawn = list(shapes), ThreadPoolExecutor(AHEAD), dict[str, Future[Tensor]]()
    places = {key: place for place, key in enumerate(keys)}

    def read(key: str) -> Tensor:
        if key not in drawn:  # another order than before
            drawn.clear()
        for following in keys[places[key] : places[key] + AHEAD + 1]:
            if following not in drawn:
                drawn[following] = threads.submit(random_tensor, following, shapes[following], seed)
        return drawn.pop(key).result()

    return read


def random_tensor(
    key: str,
    shape: tuple[int, ...],
    seed: int = 0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Tensor:
    """Return float32 values scaled like trained weights: near 1 for norm scales, 1/sqrt(fan in) for matrices.

    They depend on the seed and the key alone, and are the same on every machine (numpy's PCG64); CUDA draws different
    ones, the same in all processes of a machine.
    """
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    if device.type == "cuda":
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator, device=device)
    else:
        values = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
        noise = torch.from_numpy(values.standard_normal(shape, dtype=np.float32))
    if len(shape) == 1:
        return noise.mul_(0.05).add_(1.0 if key.endswith(("weight", ".scale", ".running_var")) else 0.0)
    # Codebook entries are as large as the latents that they are compared with.
    small = "embedding" in key and "quantize" not in key
    return noise.mul_(0.02 if small else float(np.prod(shape[1:])) ** -0.5)
