"""Averages of weights while a run goes on: by power functions, and networks that hold averages for a while.

The average of exponent g after step t has the weights p(s) ~ s^g, s <= t; its length is the standard deviation of p as
a share of t.  Karras et al. 2024 (EDM2), sec. 3 and appendix C.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ldm_lite.train.files import write_tensors

FOLDER = "averages"
LENGTHS = (0.05, 0.1)  # of the two that a run keeps
Weights = Mapping[str, Tensor]  # of all networks, "unet.out.2.weight"


def exponent(length: float) -> float:
    """Return the exponent of an average of a length in (0,0.28).  EDM2, algorithm 2."""
    t = length**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


class PowerAverages:
    """Averages of networks by power functions, one for each of LENGTHS."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.exponents = [exponent(length) for length in LENGTHS]
        self.networks = [
            {name: copy.deepcopy(net).requires_grad_(False) for name, net in networks.items()} for _ in LENGTHS
        ]

    @torch.no_grad()
    def update(self, networks: Mapping[str, nn.Module], step: int) -> None:
        """Add the weights after a step, counted from 1.  EDM2, eq. 127: the first replaces what was there."""
        for g, averages in zip(self.exponents, self.networks, strict=True):
            weight = 1 - (1 - 1 / step) ** (g + 1)
            for name, network in networks.items():
                torch._foreach_lerp_(list(averages[name].parameters()), list(network.parameters()), weight)

    def state(self) -> list[dict[str, Weights]]:
        """Return the averages, for the state of a run."""
        return [{name: net.state_dict() for name, net in averages.items()} for averages in self.networks]

    def store(self, folder: Path, step: int) -> None:
        """Write snapshots, in float16, to the folder of a run.  Raises OSError."""
        (folder / FOLDER).mkdir(exist_ok=True)
        for length, averages in zip(LENGTHS, self.networks, strict=True):
            values = {
                f"{name}.{key}": parameter.detach().to("cpu", torch.float16).contiguous()
                for name, network in averages.items()
                for key, parameter in network.named_parameters()
            }
            path = folder / FOLDER / f"{step:07}-{length:.3f}.safetensors"
            write_tensors(path, values)


@contextlib.contextmanager
def using(networks: Mapping[str, nn.Module], averages: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block networks hold the parameters of others of the same kind, such as their averages."""
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]
    values = [parameter for name in networks for parameter in averages[name].parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    _copy(values, parameters)
    try:
        yield
    finally:
        _copy(before, parameters)


@torch.no_grad()
def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
