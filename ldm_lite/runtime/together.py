"""Images of different requests in one run of the network, each with the bits that it has alone.

A kernel may add in another order for another number of images: matrix products of a few rows, Winograd's choice of
tiles, cuDNN's choice of algorithms.  Which layers do so depends on the machine, so it is measured: a layer that gives
other bits for a shape runs image by image, and a step that still does runs as a whole image by image.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.core.denoise import Guided, Network, run_row
from ldm_lite.core.layers import Conv1x1
from ldm_lite.core.plan import Row
from ldm_lite.runtime.patching import patch, patch_of

LAYERS = (nn.Linear, nn.Conv2d, Conv1x1, nn.GroupNorm, nn.LayerNorm)


class Together:
    """A network's denoising step for B images, called like run_row, with the bits of B runs of one image.

    The rows of a batch are branch by branch, so those of image i are i, B + i, ...  One thread may use it at a time.
    """

    def __init__(self, network: nn.Module, alone: Callable[..., Tensor] = run_row) -> None:
        """Patch the network's layers, which run as before outside of a step of several images.

        alone runs steps of one image: on CUDA it may be one that captures graphs.
        """
        self._step_alone = alone
        self.count = 1  # images in the running batch
        self._same: dict[object, bool] = {}  # what runs -> whether a batch has the bits of single images
        for module in network.modules():
            if type(module) in LAYERS:
                patch(module, _InTurn(self, patch_of(module) or type(module).forward))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_same": {}}  # whose keys are those of this process

    def __call__(
        self, network: Network, registers: Tensor, row: Row, noise: Tensor, guided: Guided, *how: Any
    ) -> Tensor:
        """Run one row of a plan, as run_row does."""
        count = registers.shape[1]
        inputs = network, registers, row, noise, guided, *how
        if count == 1:
            return self._step_alone(*inputs)
        shapes = [(name, part.shape) for name, part in guided.conditioning.items()]
        key = (registers.shape, *shapes, how[:2])
        if self._same.get(key) is False:
            return self._alone(*inputs)
        with self.images(count):
            whole = run_row(*inputs)
        if key in self._same:
            return whole
        alone = self._alone(*inputs)
        self._same[key] = torch.equal(whole, alone)
        return alone

    @contextlib.contextmanager
    def images(self, count: int) -> Iterator[None]:
        """Within the block the rows of the layers' inputs are those of `count` images: for what runs before a step."""
        before, self.count = self.count, count
        try:
            yield
        finally:
            self.count = before

    def _alone(self, network: Network, registers: Tensor, row: Row, noise: Tensor, guided: Guided, *how: Any) -> Tensor:
        count, images = registers.shape[1], []
        with self.images(1):
            for i in range(count):
                rows = {name: part[i::count] for name, part in guided.conditioning.items()}
                image = registers[:, i : i + 1], row, noise[i : i + 1], guided._replace(conditioning=rows)
                images.append(self._step_alone(network, *image, *how))
        return torch.cat(images, dim=1)

    def layer(self, inner: Callable[..., Tensor], layer: nn.Module, x: Tensor) -> Tensor:
        """Run a layer, by its inner forward, image by image where that gives other bits."""
        count = self.count
        if count == 1 or len(x) % count:
            return inner(layer, x)
        key = (id(layer), count, x.shape, x.stride(), x.dtype)
        if key not in self._same:
            probe = torch.randn_like(x)  # in the layout of x
            self._same[key] = torch.equal(inner(layer, probe), _each(inner, layer, probe, count))
        return inner(layer, x) if self._same[key] else _each(inner, layer, x, count)


class _InTurn:
    """The forward of a layer."""

    is_kernel = True

    def __init__(self, together: Together, inner: Callable[..., Tensor]) -> None:
        self.together, self.inner = together, inner

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.together.layer(self.inner, layer, x)


def _each(inner: Callable[..., Tensor], layer: nn.Module, x: Tensor, count: int) -> Tensor:
    """Run a layer on the rows of each image; return all rows in the order of x."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    outs = [inner(layer, x[i::count].contiguous(memory_format=layout)) for i in range(count)]
    last = outs[0].ndim == 4 and outs[0].is_contiguous(memory_format=torch.channels_last)
    out = outs[0].new_empty((len(x), *outs[0].shape[1:]))
    out = out.contiguous(memory_format=torch.channels_last) if last else out
    for i, rows in enumerate(outs):
        out[i::count] = rows
    return out
