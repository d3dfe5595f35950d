"""Images of different requests in one run of the network, each with the bits that it has alone.

A kernel may add in a different order for a different number of images: matrix products of a few rows, Winograd's choice
of tiles, cuDNN's choice of algorithms.  Which layers do so depends on the machine, so it is measured: a layer that
gives other bits for a shape runs image by image, and a step that still does runs as a whole image by image.  So does a
step whose CUDA graph is slower than one graph for each image.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.core.denoise import Guided, Network, run_row
from ldm_lite.core.layers import Conv1x1
from ldm_lite.core.plan import Row
from ldm_lite.runtime import joined
from ldm_lite.runtime.compile import PLAIN_CALLS
from ldm_lite.runtime.patching import is_whole, patch, patch_of

LAYERS = (nn.Linear, nn.Conv2d, Conv1x1, nn.GroupNorm, nn.LayerNorm)


class Together:
    """A network's denoising step for B images, called like run_row, with the bits of B runs of one image.

    The rows of a batch are branch by branch, so those of image i are i, B + i, ...  One thread may use it at a time.
    """

    def __init__(self, network: nn.Module, step: Callable[..., Tensor] = run_row) -> None:
        """Patch the network's layers, which run as before outside of a step of several images.

        step is the step to run: on CUDA it may be one that captures graphs.
        """
        self._step = step
        # A step in graphs is compared and timed again once both are replayed.
        self._num_trials = 1 if step is run_row else PLAIN_CALLS + 2
        self._trials: Counter[object] = Counter()
        self.count = 1  # images in the running batch
        self._same: dict[object, bool] = {}  # shapes -> whether a batch has the bits of single images, and is faster
        parts = set[nn.Module]()  # of what is compared as a whole
        for module in list(network.modules()):  # what is in another one comes after it
            if module not in parts and (is_whole(patch_of(module)) or type(module) in LAYERS):
                parts.update(module.modules())
                patch(module, _InTurn(self, patch_of(module) or type(module).forward))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_same": {}, "_trials": Counter()}  # their keys are ids of this process

    def __call__(
        self, network: Network, registers: Tensor, row: Row, noise: Tensor, guided: Guided, *how: Any
    ) -> Tensor:
        """Run one row of a plan, as run_row does."""
        count = registers.shape[1]
        inputs = network, registers, row, noise, guided, *how
        if count == 1:
            return self._step(*inputs)
        shapes = [(name, part.shape) for name, part in guided.conditioning.items()]
        key = (registers.shape, *shapes, how[:2])
        if key in self._same:
            return self._whole(*inputs) if self._same[key] else self._alone(*inputs)
        whole, whole_s = _timed(self._whole, *inputs)
        alone, alone_s = _timed(self._alone, *inputs)
        is_same = torch.equal(whole, alone)
        self._trials[key] += 1
        if not is_same or self._trials[key] >= self._num_trials:
            self._same[key] = is_same and (self._num_trials == 1 or whole_s < alone_s)
        return alone

    def _whole(self, network: Network, registers: Tensor, *inputs: Any) -> Tensor:
        with self.images(registers.shape[1]):
            return self._step(network, registers, *inputs)

    @contextlib.contextmanager
    def images(self, count: int) -> Iterator[None]:
        """Within the block the layers' inputs have rows of `count` images: for networks that run before a step."""
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
                images.append(self._step(network, *image, *how))
        return torch.cat(images, dim=1)

    def layer(self, inner: Callable[..., Tensor], layer: nn.Module, *inputs: Tensor) -> Tensor:
        """Run a layer, by its inner forward, image by image where that gives other bits."""
        count = self.count
        if count == 1 or len(inputs[0]) % count:
            return inner(layer, *inputs)
        kind = tuple(map(joined.is_joined, joined.joined_layers(layer)))  # else it runs other products
        key = (id(layer), kind, count, *((x.shape, x.stride(), x.dtype) for x in inputs))
        if key not in self._same:
            probes = _mapped(torch.randn_like, inputs)  # in the layout of the inputs
            self._same[key] = torch.equal(inner(layer, *probes), _each(inner, layer, probes, count))
        return inner(layer, *inputs) if self._same[key] else _each(inner, layer, inputs, count)


class _InTurn:
    """The forward of a layer."""

    is_kernel = True

    def __init__(self, together: Together, inner: Callable[..., Tensor]) -> None:
        self.together, self.inner = together, inner

    def __call__(self, layer: nn.Module, *inputs: Tensor) -> Tensor:
        return self.together.layer(self.inner, layer, *inputs)


def _timed(run: Callable[..., Tensor], network: Network, registers: Tensor, *inputs: Any) -> tuple[Tensor, float]:
    """Run a step; return its result, and the seconds until the device has finished."""

    def now() -> float:
        if registers.is_cuda:
            torch.cuda.synchronize(registers.device)
        return time.perf_counter()

    start = now()
    out = run(network, registers, *inputs)
    return out, now() - start


def _mapped(change: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Change the inputs of a layer; those that are the same tensor stay so, as of attention to itself."""
    changed = {id(x): change(x) for x in inputs}
    return tuple(changed[id(x)] for x in inputs)


def _each(inner: Callable[..., Tensor], layer: nn.Module, inputs: tuple[Tensor, ...], count: int) -> Tensor:
    """Run a layer on the rows of each image; return all rows in the order of the inputs."""
    outs = []
    for i in range(count):
        rows = _mapped(lambda x: _laid_out(x[i::count], like=x), inputs)  # noqa: B023 (called at once)
        outs.append(inner(layer, *rows))
    out = _laid_out(outs[0].new_empty((len(inputs[0]), *outs[0].shape[1:])), like=outs[0])
    for i, rows_of_image in enumerate(outs):
        out[i::count] = rows_of_image
    return out


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
