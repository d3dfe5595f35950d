"""3x3 convolutions on a CPU, each by the fastest way for its size.

- Many positions: Winograd's filtering.
- Large weights on a small map: one matrix product over copied neighbourhoods.  PyTorch's convolution (oneDNN) reorders
  the weights at every call, which takes longer than the sums; the product reads them as they lie, channels last.
- Between the two: what is faster on this machine, by measuring once.
- Everything else: PyTorch's convolution.

For float32; all have gradients.

Shape letters: B batch, C channels in, K channels out.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ldm_lite.core.layers import channels_last
from ldm_lite.runtime.cpu import products, winograd
from ldm_lite.runtime.memory import MappedPages
from ldm_lite.runtime.patching import kernel, patch
from ldm_lite.runtime.timing import fastest

LARGE = 2**23  # numbers of a weight, which no cache holds
MANY = 1024  # positions of all maps of a batch: with as many, Winograd's filtering in tiles of 4 by 4 is the fastest
SOME = 512  # positions from which it is worth a try
MIN_CHANNELS = 128  # below, moving tiles costs more than the products save
MIN_TRAINED = 320  # channels from which the filtering with gradients is faster, in tiles of 4 by 4
_LOCK = threading.Lock()  # held while counts of readers change, and while a weight is laid out


def way(x: Tensor, weight: Tensor) -> str:
    """Name the fastest way of WAYS to convolve x (B,C,h,w) with weight (K,C,3,3), without gradients."""
    positions = _positions(x)
    if positions >= MANY:
        return "tiles of 4"
    if not _is_laid_out(weight):
        return "tiles of 2" if positions >= SOME else "plain"
    first = "product" if weight.numel() >= LARGE else "tiles of 2" if positions >= SOME else "plain"
    if positions < SOME:
        return first
    ways = {name: functools.partial(WAYS[name], x, weight, None) for name in (first, "tiles of 2", "tiles of 4")}
    what = f"3x3 convolution of {positions} positions, {weight.shape[1]} to {len(weight)} channels"
    return fastest(what, "fp32", ways, x.device)


def _positions(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def _is_laid_out(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)


def as_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve x (B,C,h,w) with weight (K,C,3,3), padding 1, as one product: (B,K,h,w), channels last."""
    b, _, h, w = x.shape
    return products.linear(neighbourhoods(x), as_rows(weight), bias).view(b, h, w, -1).permute(0, 3, 1, 2)


def as_rows(weight: Tensor) -> Tensor:
    """Return the weight (K,C,3,3) as the rows of that product: (K,9C), a view if channels are last."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def neighbourhoods(x: Tensor) -> Tensor:
    """Return what a 3x3 convolution of x (B,C,h,w), padding 1, reads at each position: (Bhw,9C)."""
    b, _, h, w = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    return padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).reshape(b * h * w, -1)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() < weight.numel() and not _is_laid_out(weight):  # channels last, it would reorder its weights
        x = x.contiguous()
    return F.conv2d(x, weight, bias, padding=1)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "plain": _plain,
    "product": as_product,
    "tiles of 2": functools.partial(winograd.convolve, m=2),
    "tiles of 4": functools.partial(winograd.convolve, m=4),
}


class _Product(torch.autograd.Function):
    """as_product, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return as_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        (b, channels, h, w), num_out = x.shape, len(weight)
        rows = channels_last(grad).permute(0, 2, 3, 1).reshape(-1, num_out)  # (Bhw, K)
        grad_x = grad_weight = None
        if of_x:
            columns = (rows @ as_rows(weight)).view(b, h, w, 3, 3, channels)
            padded = x.new_zeros(b, h + 2, w + 2, channels)
            for i in range(3):
                for j in range(3):
                    padded[:, i : i + h, j : j + w] += columns[:, :, :, i, j]
            grad_x = padded[:, 1:-1, 1:-1].permute(0, 3, 1, 2)
        if of_weight:
            grad_weight = (rows.T @ neighbourhoods(x)).view(num_out, 3, 3, channels).permute(0, 3, 1, 2)
        return grad_x, grad_weight, rows.sum(0) if of_bias else None


class _Filtered(torch.autograd.Function):
    """Winograd's filtering, with gradients; that of the weight is PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, m: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.m = m
        return winograd.convolve(x, weight, bias, m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = winograd.gradient(channels_last(grad), weight, ctx.m) if of_x else None
        mask = [False, of_weight, of_bias]
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation; not transposed
        _, *others = torch.ops.aten.convolution_backward(grad, x, weight, [len(weight)], *settings, mask)
        return grad_x, *others, None


@kernel
def _forward(conv: nn.Conv2d, x: Tensor) -> Tensor:
    other = x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu")
    if other or torch.compiler.is_compiling():
        return conv._conv_forward(x, conv.weight, conv.bias)
    if not vars(conv).get("may_move", False):
        return _fastest(conv, x)
    with _reading(conv):
        return _fastest(conv, x)


@contextlib.contextmanager
def _reading(conv: nn.Conv2d) -> Iterator[None]:
    """Within the block no thread moves the weight.  Before it this one lays it out, if it is frozen and none reads it.

    At the first call, whatever the map's size: later, it would change the last bits of what came before.  Not when
    it is loaded: that takes as long as loading.
    """
    with _LOCK:
        readers = vars(conv).get("readers", 0)
        before = conv.weight.data
        if readers == 0 and not conv.weight.requires_grad and not _is_laid_out(before):
            conv.weight.data = channels_last(before)
            MappedPages().release(before)
        vars(conv)["readers"] = readers + 1
    try:
        yield
    finally:
        with _LOCK:
            vars(conv)["readers"] -= 1


def _fastest(conv: nn.Conv2d, x: Tensor) -> Tensor:
    weight, bias, positions = conv.weight, conv.bias, _positions(x)
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return WAYS[way(x, weight)](x, weight, bias)
    if weight.numel() >= LARGE and positions < MANY and _is_laid_out(weight):
        return _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    if positions >= MANY and min(weight.shape[:2]) >= MIN_TRAINED:
        return _Filtered.apply(x, weight, bias, 4)  # type: ignore[no-untyped-call]
    return conv._conv_forward(x, weight, bias)


def use(network: nn.Module, may_move: bool = False) -> int:
    """Run a network's 3x3 convolutions by the fastest way.  Returns how many have a choice.

    may_move tells that nobody else moves weights: they are laid out at first use, in memory of their own.
    """
    found = [
        module
        for module in network.modules()
        if type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding) == ((3, 3), (1, 1), (1, 1))
        and (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
        and min(module.weight.shape[:2]) >= MIN_CHANNELS
    ]
    for conv in found:
        patch(conv, _forward)
        vars(conv)["may_move"] = may_move
    return len(found)
