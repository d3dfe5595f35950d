"""Norms on a GPU with adjacent operations, and gates of feed-forwards, each as one kernel or two, in inference.

PyTorch's group norm on a GPU makes maps contiguous, so that a layer with channels last copies its input before it and
its result after it.  In half precision triton_kernels.py takes one or two kernels instead of five, which also
compute a residual block's activations, timestep and convolution biases.  In a
transformer block a sum and the layer norm that follows are one kernel, and so are a gate's GELU and its product.
They are compared with PyTorch's at their first use, and not used if they differ or do not run.

Inductor compiles PyTorch's group norm to four kernels, and to a fifth that restores channels last if sizes may change.
Written out for channels-last maps it takes three: statistics of lines, statistics of groups, and the result.

Everything else runs PyTorch's operators.

Shape letters: B batch, C channels, G groups, N tokens.
"""

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Conv1x1, channels_last
from ldm_lite.core.unet import GEGLU, BasicTransformerBlock, ResBlock
from ldm_lite.runtime.patching import is_layer_unmodified, kernel, patch

log = logging.getLogger("ldm_lite")

MOST_POSITIONS = 256  # of a map whose groups one program each normalises


def written_out(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise x (B,C,h,w) by groups of channels in float32, in operations that fuse well."""
    (batch, channels, h, _), groups = x.shape, norm.num_groups
    pixels = x.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    variances, means = torch.var_mean(pixels, dim=2, correction=0)  # of lines, (B, h, C)
    variances, means = variances.view(batch, h, groups, -1), means.view(batch, h, groups, -1)
    mean = means.mean((1, 3), keepdim=True)  # (B, 1, G, 1)
    rate = ((variances + (means - mean).square()).mean((1, 3), keepdim=True) + norm.eps).rsqrt()
    scale = rate * norm.weight.float().view(groups, -1)  # (B, 1, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean * scale
    scale, shift = scale.view(batch, 1, 1, channels), shift.view(batch, 1, 1, channels)
    return (pixels * scale + shift).to(x.dtype).permute(0, 3, 1, 2)


# ---- our kernels ----------------------------------------------------------------------------------------------------


def _operator(shapes: Callable[..., Any]) -> Any:
    """Return the kernel of that name as an operator of PyTorch; the function gives the shapes of its results."""
    name = shapes.__name__

    @functools.wraps(shapes)
    def run(x: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # where Triton launches
            return getattr(_triton(), name)(x, *others)

    operator = torch.library.custom_op(f"ldm_lite::{name}", run, mutates_args=())
    operator.register_fake(shapes)
    return operator


@_operator
def group_norm(
    x: Tensor, weight: Tensor, offset: Tensor, groups: int, eps: float, silu: bool, shift: Tensor | None, bias: Tensor
) -> Tensor:
    """Normalise x (B,C,h,w), or x + shift (B,C) + bias (C,), which counts with a shift alone, and apply SiLU."""
    return torch.empty_like(x)


@_operator
def biased_sum(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Return x + y + bias, for maps (B,C,h,w) and a bias (C,)."""
    return torch.empty_like(x)


@_operator
def sum_and_norm(x: Tensor, y: Tensor, weight: Tensor, offset: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + y, of tokens (B,N,C), and its layer norm."""
    return torch.empty_like(x), torch.empty_like(x)


@_operator
def gated(x: Tensor) -> Tensor:
    """Return the first half of the channels of x (B,N,2C), times the GELU of the others."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@functools.cache
def _triton() -> Any:
    return importlib.import_module("ldm_lite.runtime.triton_kernels")


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether these kernels support a device; on the meta device they are counted."""
    has_triton = device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton")
    return device.type == "meta" or bool(has_triton)


def _runs(x: Tensor, name: str, channels: int, groups: int = 1, positions: int = 1) -> bool:
    """Whether a kernel supports this input, in half precision in inference, and computes it correctly."""
    if x.dtype not in (torch.float16, torch.bfloat16) or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or not runs_on(x.device):
        return False
    return x.is_meta or _computes(name, x.device, x.dtype, channels, groups, positions)


def _suits(x: Tensor, norm: nn.GroupNorm) -> bool:
    """Whether our kernels support a group norm of this map, with channels last."""
    if x.ndim != 4 or norm.weight.dtype != x.dtype or norm.num_groups.bit_count() != 1:
        return False
    positions = min(x[0, 0].numel(), MOST_POSITIONS + 1)  # all larger maps have the same kernels
    is_laid_out = x.is_contiguous(memory_format=torch.channels_last)
    return is_laid_out and _runs(x, "group norm", x.shape[1], norm.num_groups, positions)


@functools.cache
def _computes(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether a kernel runs on this device for so many channels, groups and positions, with PyTorch's results."""
    try:
        differences = [
            float((result.float() - expected).norm() / expected.norm())
            for result, expected in _results(name, device, dtype, *sizes)
        ]
    except Exception as error:  # compilers raise anything
        log.warning("%s by PyTorch: our kernel does not run (%s)", name, str(error).partition("\n")[0][:150])
        return False
    too_large = [difference for difference in differences if not difference < 0.02]  # or NaN
    if too_large:
        log.warning("%s by PyTorch: our kernel differs from it by %.1e", name, too_large[0])
    return not too_large


def _results(
    name: str, device: torch.device, dtype: torch.dtype, channels: int, groups: int, positions: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of a kernel, with those of PyTorch in float32."""

    def waves(*shape: int) -> Tensor:  # not random numbers, whose generator has a state
        return (3 + 2 * torch.arange(math.prod(shape), device=device).sin()).to(dtype).view(shape)

    weight, shift = waves(channels), waves(2, channels)
    if name == "group norm":
        x = waves(2, 1, positions, channels).permute(0, 3, 1, 2)
        shifted = x.float() + (shift + weight)[:, :, None, None].float()
        normed = F.group_norm(shifted, groups, weight.float(), weight.float())
        yield group_norm(x, weight, weight, groups, 1e-5, True, shift, weight), F.silu(normed)
        yield biased_sum(x, x, weight), 2 * x.float() + weight.float()[:, None, None]
    elif name == "layer norm":
        x = waves(2, 9, channels)
        total, normed = sum_and_norm(x, x, weight, weight, 1e-5)
        yield total, 2 * x.float()
        yield normed, F.layer_norm(2 * x.float(), (channels,), weight.float(), weight.float())
    else:
        x = waves(2, 9, channels) - 3
        value, gate = x.float().chunk(2, dim=-1)
        yield gated(x), value * F.gelu(gate)


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    fuses = x.ndim == 4 and x.is_cuda and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if fuses:
        return written_out(x, norm)
    if _suits(x, norm):
        out: Tensor = group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, False, None, norm.bias)
        return out
    return nn.GroupNorm.forward(norm, x)


def _normalised(norm: Any, x: Tensor, shift: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return SiLU of the norm of x, or of x + shift + bias."""
    bias = norm.bias if bias is None else bias
    out: Tensor = group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, True, shift, bias)
    return out


@functools.partial(kernel, is_whole=True)
def _res_block(block: Any, x: Tensor, emb: Tensor) -> Tensor:
    """Run a residual block, whose first convolution's bias and timestep are read by the norm that follows."""
    norm_in, _, conv_in = block.in_layers
    norm_out, _, _, conv_out = block.out_layers
    if not (_suits(x, norm_in) and _is_plain(block)):
        return ResBlock.forward(block, x, emb)
    h = channels_last(conv_in._conv_forward(_normalised(norm_in, x), conv_in.weight, None))
    h = _normalised(norm_out, h, block.emb_layers(emb), conv_in.bias)
    h = channels_last(conv_out._conv_forward(h, conv_out.weight, None))
    out: Tensor = biased_sum(channels_last(block.skip_connection(x)), h, conv_out.bias)
    return out


CLASSES = (ResBlock, nn.Sequential, nn.GroupNorm, nn.SiLU, nn.Conv2d, nn.Linear, nn.Identity, Conv1x1)


def _is_plain(block: nn.Module) -> bool:
    """Whether the layers of a block are unchanged: no hooks, no replaced forwards, no other classes."""
    return all(type(part) in CLASSES and is_layer_unmodified(part) for part in block.modules())


def _has_plain_norms(block: Any) -> bool:
    """Whether the norms of a transformer block that follow a sum are what they were made as, in one dtype."""
    return all(
        type(norm) is nn.LayerNorm and is_layer_unmodified(norm) and norm.weight.dtype == block.norm1.weight.dtype
        for norm in (block.norm2, block.norm3)
    )


@functools.partial(kernel, is_whole=True)
def _transformer_block(block: Any, x: Tensor, context: Tensor) -> Tensor:
    """Run a transformer block, two sums of which are computed together with the next norm."""
    if not (_runs(x, "layer norm", x.shape[-1]) and x.is_contiguous() and _has_plain_norms(block)):
        return BasicTransformerBlock.forward(block, x, context)

    def after(norm: nn.LayerNorm, y: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = sum_and_norm(x, y.contiguous(), norm.weight, norm.bias, norm.eps)
        return out

    normed = block.norm1(x)
    x, normed = after(block.norm2, block.attn1(normed, normed))
    x, normed = after(block.norm3, block.attn2(normed, context))
    return x + block.ff(normed)


@kernel
def _geglu(layer: Any, x: Tensor) -> Tensor:
    projected: Tensor = layer.proj(x)
    if projected.is_contiguous() and _runs(projected, "GEGLU", projected.shape[-1]):
        out: Tensor = gated(projected)
        return out
    value, gate = projected.chunk(2, dim=-1)
    return value * F.gelu(gate)


KERNELS: dict[type, Callable[..., Tensor]] = {
    nn.GroupNorm: _forward,
    ResBlock: _res_block,
    BasicTransformerBlock: _transformer_block,
    GEGLU: _geglu,
}


def use(network: nn.Module) -> None:
    """Use these forms for the norms, residual blocks, transformer blocks and gates of a network."""
    for module in network.modules():
        if type(module) in KERNELS:
            patch(module, KERNELS[type(module)])
