"""Digests of networks' weights, which show whether files were made with the same ones."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

SAMPLED = 32  # values of each weight


@torch.no_grad()
def sampled(network: nn.Module) -> Iterator[tuple[str, Tensor, bytes]]:
    """Yield the name of each weight, the weight, and some of its values as bytes of float32."""
    for name, value in network.state_dict().items():
        places = np.linspace(0, value.numel() - 1, min(SAMPLED, value.numel())).astype(np.int64)
        index = tuple(torch.from_numpy(axis).to(value.device) for axis in np.unravel_index(places, value.shape))
        # torch 2.6 cannot index numbers of 8 bits on a CPU, but bytes.
        chosen = value.view(torch.uint8)[index].view(value.dtype) if value.dtype.itemsize == 1 else value[index]
        yield name, value, chosen.float().cpu().numpy().tobytes()


def digest(*networks: nn.Module) -> str:
    """Digest the names, shapes and some values of all weights, whatever their device: 32 hexadecimal digits.

    Weights rounded to another type have another digest.
    """
    parts = [(name, tuple(value.shape), values) for network in networks for name, value, values in sampled(network)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
