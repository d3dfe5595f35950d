"""Matrix products on a CPU by the library that is faster there, and feed-forward layers in parts that fit its cache.

PyTorch multiplies float32 matrices by MKL, which on some CPUs is slower than oneDNN.  Which one is faster is timed
once for each kind of product on a machine (`runtime/timing.py`).  Both add float32 numbers in another order: results
differ by rounding.

For inference in float32; everything else runs PyTorch's layers.

Shape letters: M rows, K channels in, N channels out, B batch, T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.ops import GEGLU, Conv1x1, channels_last
from ldm_lite.models.transformer import FeedForward
from ldm_lite.runtime.patching import kernel, patch, runs_as_written
from ldm_lite.runtime.timing import fastest

MIN_PRODUCT = 2**27  # multiplications: smaller products take less than two milliseconds
ROWS = 1024  # of a feed-forward layer at a time
TIMED = 512  # rows of a product that is timed, at most
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not public: without it a 1x1 convolution serves


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (...,K) times weight (N,K) transposed, plus bias (N,), by the faster library: (...,N)."""
    (out, channels), rows = weight.shape, x.numel() // max(1, weight.shape[1])
    if not _suits(x) or rows * channels * out < MIN_PRODUCT or not (x.is_contiguous() and weight.is_contiguous()):
        return F.linear(x, weight, bias)
    kind = min(TIMED, 1 << (rows - 1).bit_length())  # products of like sizes share a choice
    some = x.view(-1, channels)[:kind]
    ways: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.linear(some, weight, bias),
        "onednn": lambda: _onednn(some, weight, bias),
    }
    what = f"product of {kind} rows, {channels} to {out} channels"
    if fastest(what, "fp32", ways, x.device) == "torch":
        return F.linear(x, weight, bias)
    return _onednn(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _ONEDNN is not None:
        return _ONEDNN(x, weight, bias, "none", [], "")
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, K, M, 1), channels last
    out = F.conv2d(image, weight[:, :, None, None], bias)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def multiply_each(x: Tensor, weight: Tensor) -> Tensor:
    """P products of x (P,M,K) and weight (P,N,K) transposed, by the faster library: (P,M,N), without gradients."""
    (_, rows, channels), out = x.shape, weight.shape[1]
    if rows * channels * out < MIN_PRODUCT // 4:
        return torch.bmm(x, weight.transpose(1, 2))
    some = x[:2], weight[:2]
    ways = {"torch": lambda: torch.bmm(some[0], some[1].transpose(1, 2)), "onednn": lambda: _onednn_each(*some)}
    what = f"products of {1 << (rows - 1).bit_length()} rows, {channels} to {out} channels"
    if fastest(what, "fp32", ways, x.device) == "torch":
        return torch.bmm(x, weight.transpose(1, 2))
    return _onednn_each(x, weight)


def _onednn_each(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([_onednn(a, b, None) for a, b in zip(x, weight, strict=True)])


@kernel
def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return multiply(x, layer.weight, layer.bias)


@kernel
def _conv1x1(layer: Conv1x1, x: Tensor) -> Tensor:
    return multiply(channels_last(x).permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)


@kernel
def _feed_forward(layer: FeedForward, x: Tensor) -> Tensor:
    """Run GEGLU and the linear after it on some rows of an image at a time: the wide values stay in the cache."""
    if not _suits(x) or x.ndim != 3 or x.shape[1] <= ROWS or not all(map(runs_as_written, layer.net)):
        return FeedForward.forward(layer, x)
    gated, last = layer.net[0].proj, layer.net[2]
    (value, gate), (value_bias, gate_bias) = gated.weight.chunk(2), gated.bias.chunk(2)
    out = x.new_empty(*x.shape[:2], last.out_features)
    for tokens, result in zip(x, out, strict=True):  # image by image, so that a batch has the bits of its images
        for rows, made in zip(tokens.split(ROWS), result.split(ROWS), strict=True):
            wide = F.gelu(multiply(rows, gate, gate_bias)).mul_(multiply(rows, value, value_bias))
            made.copy_(multiply(wide, last.weight, last.bias))
    return out


def _suits(x: Tensor) -> bool:
    inference = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return inference and x.dtype == torch.float32 and x.device.type == "cpu"


def use(network: nn.Module) -> None:
    """Take the faster library for the linears and 1x1 convolutions of a network, and parts for its feed-forwards."""
    for module in network.modules():
        if type(module) in (nn.Linear, Conv1x1) and module.weight.numel() >= MIN_PRODUCT // 2**14:
            patch(module, _linear if type(module) is nn.Linear else _conv1x1)
        elif type(module) is FeedForward and _is_plain(module):
            patch(module, _feed_forward)


def _is_plain(layer: FeedForward) -> bool:
    gated, last = layer.net[0], layer.net[2]
    linears = (gated.proj, last) if type(gated) is GEGLU else ()
    return bool(linears) and all(type(each) is nn.Linear and each.bias is not None for each in linears)
