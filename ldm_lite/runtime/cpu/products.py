"""Matrix products on a CPU by the library that is faster there.

PyTorch multiplies float32 matrices by MKL, which on some CPUs is slower than oneDNN.  Which one is faster is timed
once for each kind of product on a machine (`runtime/timing.py`).  Both add float32 numbers in another order: results
differ by rounding.

For inference in float32; everything else runs PyTorch's layers.

Shape letters: M rows, K channels in, N channels out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Conv1x1, channels_last
from ldm_lite.runtime.patching import kernel, patch
from ldm_lite.runtime.timing import fastest

MIN_PRODUCT = 2**27  # multiplications: smaller products take less than two milliseconds
TIMED = 512  # rows of a product that is timed, at most
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not public: without it a 1x1 convolution serves


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (...,K) times weight (N,K) transposed, plus bias (N,), by the faster library: (...,N).  See is_timed."""
    out, channels = weight.shape
    rows = min(TIMED, 1 << (x.numel() // channels - 1).bit_length())  # products of like sizes share a choice
    some = x.view(-1, channels)[:rows]
    ways: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.linear(some, weight, bias),
        "onednn": lambda: _onednn(some, weight, bias),
    }
    what = f"product of {rows} rows, {channels} to {out} channels"
    return (F.linear if fastest(what, "fp32", ways, x.device) == "torch" else _onednn)(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, by the faster library where there is a choice."""
    return multiply(x, weight, bias) if is_timed(x, weight) else F.linear(x, weight, bias)


def is_timed(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is large enough for a choice of its library, for inference in float32 on a CPU."""
    inference = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    large = x.numel() * len(weight) >= MIN_PRODUCT
    return inference and on_cpu and large and x.is_contiguous() and weight.is_contiguous()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _ONEDNN is not None:
        made: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
        return made
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, K, M, 1), channels last
    out = F.conv2d(image, weight[:, :, None, None], bias)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def multiply_each(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write P products of x (P,M,K) and weight (P,N,K) transposed, by the faster library, to out (P,M,N)."""
    (_, rows, channels), num_out = x.shape, weight.shape[1]
    way = "torch"
    if rows * channels * num_out >= MIN_PRODUCT // 4:
        some = x[:2], weight[:2], out[:2]
        ways = {"torch": lambda: _bmm(*some), "onednn": lambda: _onednn_each(*some)}
        what = f"products of {1 << (rows - 1).bit_length()} rows, {channels} to {num_out} channels"
        way = fastest(what, "fp32", ways, x.device)
    (_bmm if way == "torch" else _onednn_each)(x, weight, out)


def _bmm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.bmm(x, weight.transpose(1, 2), out=out)


def _onednn_each(x: Tensor, weight: Tensor, out: Tensor) -> None:
    for own_x, own_weight, own_out in zip(x, weight, out, strict=True):
        own_out.copy_(_onednn(own_x, own_weight.contiguous(), None))  # with gaps it takes a hundred times as long


@kernel
def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    if is_timed(x, layer.weight):
        return multiply(x, layer.weight, layer.bias)
    return nn.Linear.forward(layer, x)


@kernel
def _conv1x1(layer: Conv1x1, x: Tensor) -> Tensor:
    pixels = channels_last(x).permute(0, 2, 3, 1)
    if is_timed(pixels, layer.weight):
        return multiply(pixels, layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)
    return Conv1x1.forward(layer, x)


def use(network: nn.Module) -> None:
    """Take the faster library for the linears and 1x1 convolutions of a network."""
    for module in network.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_PRODUCT // 2**14:
            patch(module, _linear)
        elif type(module) is Conv1x1 and module.weight.numel() >= MIN_PRODUCT // 2**14:
            patch(module, _conv1x1)
