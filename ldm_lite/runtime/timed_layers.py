"""Layers of a UNet that compute in another way on a GPU where that is timed to be faster.

- "conv": 3x3 convolutions of small maps as one matrix product over copied neighbourhoods;
- "geglu": a linear and GEGLU as one Triton kernel.

A layer is timed when it first runs uncompiled, for each size; compiled code has what the layer chose last.

Shape letters: B batch, C channels in, K channels out.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.ops import GEGLU
from ldm_lite.runtime.patching import kernel, patch
from ldm_lite.runtime.timing import fastest, measured_convolutions

_geglu: Any = None  # runtime.geglu_kernel once it is used: Triton may be missing, and the compiler follows no import
SMALL = 16 * 16  # positions of a map: with more, cuDNN has enough tiles for all of a GPU's processors


def as_product(x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
    """Convolve x (B,C,h,w) with weight (K,C,3,3), padding 1, as one product: (B,K,h,w), channels last."""
    b, _, h, w = x.shape
    return multiply(neighbourhoods(x), as_rows(weight), bias).view(b, h, w, -1).permute(0, 3, 1, 2)


def as_rows(weight: Tensor) -> Tensor:
    """Return the weight (K,C,3,3) as the rows of that product: (K,9C), a view if channels are last."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def neighbourhoods(x: Tensor) -> Tensor:
    """Return what a 3x3 convolution of x (B,C,h,w), padding 1, reads at each position: (Bhw,9C)."""
    b, _, h, w = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    return padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).reshape(b * h * w, -1)


@kernel
def _convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        vars(conv)["takes_product"] = _suits(x) and x.shape[2] * x.shape[3] <= SMALL and _product_wins(conv, x)
    if vars(conv).get("takes_product", False):
        return as_product(x, conv.weight, conv.bias)
    return conv._conv_forward(x, conv.weight, conv.bias)


def _suits(x: Tensor) -> bool:
    return x.is_cuda and not torch.is_grad_enabled()


def _product_wins(conv: nn.Conv2d, x: Tensor) -> bool:
    def measured() -> Tensor:
        with measured_convolutions():
            return conv._conv_forward(x, conv.weight, conv.bias)

    ways: dict[str, Any] = {
        "convolution": measured,
        "product": functools.partial(as_product, x, conv.weight, conv.bias),
    }
    (_, channels, h, w), out = x.shape, len(conv.weight)
    what = f"3x3 convolution of {channels} to {out} channels, {h} x {w}"
    return fastest(what, (x.dtype, *x.shape, out), ways, x.device) == "product"


@kernel
def _gate(layer: GEGLU, x: Tensor) -> Tensor:
    proj, compiling = layer.proj, torch.compiler.is_compiling()
    if not compiling:
        vars(layer)["tile"] = _tile(layer, x) if _suits(x) else None
    tile = vars(layer).get("tile")
    if tile is None:
        return GEGLU.forward(layer, x)
    return (_geglu.geglu if compiling else _geglu.launch)(x, proj.weight, proj.bias, *tile)


def _tile(layer: GEGLU, x: Tensor) -> tuple[int, int] | None:
    proj = layer.proj
    if type(proj) is not nn.Linear or proj.bias is None or x.dtype not in (torch.float16, torch.bfloat16):
        return None

    def plain() -> Tensor:  # the wide result, then one kernel of GELU's traffic, as the compiler makes it
        value, gate = proj(x).chunk(2, dim=-1)
        return value * gate

    tiles = {f"{m}x{n}": (m, n) for m, n in _geglu.TILES}
    ways: dict[str, Any] = {"linear": plain}
    ways |= {name: functools.partial(_geglu.launch, x, proj.weight, proj.bias, *t) for name, t in tiles.items()}
    what = f"GEGLU of {x.shape[1]} tokens, {x.shape[-1]} channels"
    return tiles.get(fastest(what, (x.dtype, *x.shape, len(proj.weight)), ways, x.device))


def use_convolutions(network: nn.Module) -> None:
    """Time the 3x3 convolutions of a network, and run those of small maps as products where that is faster."""
    for module in network.modules():
        if (
            type(module) is nn.Conv2d
            and (module.kernel_size, module.stride, module.padding) == ((3, 3), (1, 1), (1, 1))
            and (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
        ):
            patch(module, _convolve)


def use_geglu(network: nn.Module) -> None:
    """Time the GEGLU layers of a network, and run them by the Triton kernel where that is faster."""
    global _geglu
    _geglu = importlib.import_module("ldm_lite.runtime.geglu_kernel")
    for module in network.modules():
        if type(module) is GEGLU:
            patch(module, _gate)
