"""Kernels for a CPU: `use` gives each layer of a network the fastest kernel for its class.

- Group norms of large maps are computed in strips, for exactness.
- Linears and 1x1 convolutions are products, by the library that is faster here.
- Feed-forwards of transformers multiply by their gate within the products, in bfloat16 too.
- 3x3 convolutions take Winograd's filtering, one large product, or PyTorch's convolution, by their size; in bfloat16
  one of the last two.
- Attention of many tokens runs in blocks, if that is faster here, in bfloat16 too.
- An autoencoder computes large images strip by strip, in half the memory: see tiling.py.

Two choices depend on the CPU: the library for products in float32, and blocks of attention in each dtype.  Each is
timed once on a machine (timing.py), with sizes that never change, so that CPUs of one kind choose alike, whatever runs
first.  The rest are rules.

Training has separate kernels: Winograd's for 3x3 convolutions, and in bfloat16 group norms and attention.  Everything
else, such as other dtypes and compiled code, runs PyTorch's kernels.  Kernels here and PyTorch's differ by rounding.

Shape letters: B batch, C channels in, K channels out, G groups of channels, M rows of a product, T tiles; in attention
H heads, N queries, M keys, D channels of a head.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ldm_lite.core.layers import Conv1x1, channels_last, sdpa
from ldm_lite.core.unet import GEGLU
from ldm_lite.core.vae import Decoder, Encoder
from ldm_lite.runtime import tiling
from ldm_lite.runtime.memory import MappedPages
from ldm_lite.runtime.patching import is_layer_unmodified, is_unmodified, kernel, patch
from ldm_lite.runtime.timing import fastest

_is_last = functools.partial(Tensor.is_contiguous, memory_format=torch.channels_last)
# In bfloat16 there are kernels where the CPU multiplies it.
HALF = (torch.bfloat16,) if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else ()


def use(network: nn.Module, owns_weights: bool = False, attends: bool = True) -> None:
    """Give the layers of a network on a CPU these kernels, including attention's if `attends`.

    owns_weights says that nothing else moves weights: those of 3x3 convolutions become channels last at first use, in
    new memory.
    """
    layer: Any
    for layer in network.modules():
        kind = type(layer)
        if attends and "attention" in vars(layer):
            layer.attention = attention
        if kind is nn.GroupNorm:
            patch(layer, _group_norm)
        elif kind in (nn.Linear, Conv1x1) and layer.weight.numel() >= MIN_PRODUCT // 2**14:
            patch(layer, _linear if kind is nn.Linear else _conv1x1)
        elif kind is GEGLU:
            patch(layer, _geglu)
        elif (
            kind is nn.Conv2d
            and (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))
            and (layer.groups, layer.dilation, layer.padding_mode) == (1, (1, 1), "zeros")
            and min(layer.weight.shape[:2]) >= MIN_CHANNELS
        ):
            patch(layer, _conv3x3)
            vars(layer)["owns_weights"] = owns_weights
        elif kind in (Encoder, Decoder):
            patch(layer, _in_strips)


def _suits(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is inference in float32, or another of these dtypes, on a CPU, not compiled, without autocast."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, *dtypes) and not torch.is_autocast_enabled("cpu")


def _trains_in_bf16(x: Tensor) -> bool:
    """Whether this is a step of training in bfloat16 on a CPU, not compiled."""
    is_half = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return is_half and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _ramp(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values to time with, which take nothing from a generator of random numbers."""
    return torch.linspace(-1, 1, math.prod(size)).view(size).to(dtype)


# ---- group normalisation --------------------------------------------------------------------------------------------

LARGE_MAP = 256 * 256  # positions above which strips are used: below, the plain kernel's error is 1e-6 at most


FEW = 1024  # positions of a map that PyTorch's kernel for channels_last visits channel by channel


@kernel
def _group_norm(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    if x.ndim == 4 and _trains_in_bf16(x):
        # In channels_last PyTorch takes 5 to 20 times as long: with few channels a group, and for every backward pass.
        if x[0, 0].numel() < FEW or not _is_last(x):
            return nn.GroupNorm.forward(norm, x.contiguous())  # a layout that the next layers keep
        return _Normalised.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps)  # type: ignore[no-untyped-call]
    if not _suits(x) or x.ndim != 4 or x[0, 0].numel() <= LARGE_MAP or not _is_last(x):
        return nn.GroupNorm.forward(norm, x)
    return tiling.normalised(norm, x, x.device)(slice(None))


class _Normalised(torch.autograd.Function):
    """PyTorch's forward pass; backwards two sums over positions, and a linear combination of x and the gradient.

    Wu and He 2018; the gradient is that of batch normalisation over the values of a group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        y, mean, rstd = torch.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], x[0, 0].numel(), groups, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.to(x.dtype)
        size, groups, n = x.shape[:2], mean.shape[1], x[0, 0].numel()
        channels = size[1] // groups

        def spread(values: Tensor) -> Tensor:  # (B, groups) -> (B, C)
            return values.float().repeat_interleave(channels, dim=1)

        mean, rstd = spread(mean), spread(rstd)
        sum_g, sum_gx = (values.sum((2, 3)).float() for values in (grad, grad * x))  # (B, C)
        sum_gx = rstd * (sum_gx - mean * sum_g)  # the sum over positions of the gradient times the normalised x
        mean_g, mean_gx = (
            spread((weight * total).view(size[0], groups, channels).mean(2)) / n for total in (sum_g, sum_gx)
        )
        of_grad, of_x, constant = (
            values.to(x.dtype)[:, :, None, None]
            for values in (rstd * weight, -rstd.square() * mean_gx, rstd * (rstd * mean * mean_gx - mean_g))
        )
        return torch.addcmul(constant, grad, of_grad).addcmul_(x, of_x), sum_gx.sum(0), sum_g.sum(0), None, None


# ---- products -------------------------------------------------------------------------------------------------------
# PyTorch multiplies float32 matrices by MKL, which on some CPUs is slower than oneDNN.

MIN_PRODUCT = 2**28  # multiplications: smaller products take one or two milliseconds
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not public


@kernel
def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return matmul(x, layer.weight, layer.bias)


@kernel
def _conv1x1(layer: Conv1x1, x: Tensor) -> Tensor:
    pixels = channels_last(x).permute(0, 2, 3, 1)
    return matmul(pixels, layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (...,C) times weight (K,C) transposed, plus bias (K,), by the faster library if it is large: (...,K).

    Of weights (P,K,C) each multiplies its x (P,M,C), without bias: (P,M,K).
    """
    if not _suits(x) or x.numel() * weight.shape[-2] < MIN_PRODUCT or not x.is_contiguous():
        return _by_torch(x, weight, bias)
    return _product(torch.get_num_threads())(x, weight, bias)


@functools.cache
def _product(threads: int) -> Callable[..., Tensor]:
    """Choose the library for float32 on this CPU, with as many threads."""
    ways = {"torch": _by_torch, "onednn": _by_onednn}
    x, weight = _ramp(512, 1280), _ramp(1280, 1280)
    calls = {name: functools.partial(way, x, weight) for name, way in ways.items()}
    return ways[fastest("product", "fp32", calls, x.device)]


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias) if weight.ndim == 2 else torch.bmm(x, weight.mT)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _ONEDNN is None:
        return _by_torch(x, weight, bias)
    if weight.ndim == 3:
        return torch.stack([_by_onednn(*factors) for factors in zip(x, weight, strict=True)])
    # A matrix with gaps would take a hundred times as long.
    result: Tensor = _ONEDNN(x, weight.contiguous(), bias, "none", [], "")
    return result


MIN_GEGLU = 2**27  # multiplications


@kernel
def _geglu(layer: GEGLU, x: Tensor) -> Tensor:
    proj: Any = layer.proj
    is_plain = type(proj) is nn.Linear and is_layer_unmodified(proj) and x.is_contiguous()
    if _ONEDNN is None or not _suits(x, *HALF) or not is_plain or x.numel() * len(proj.weight) < MIN_GEGLU:
        return GEGLU.forward(layer, x)
    return gated(x, proj.weight, proj.bias)


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GEGLU of x (...,C), weight (2K,C) and bias (2K,): (...,K).

    Two products: the gate's ends with the GELU, the values' with their multiplication by the gate.
    """
    (of_value, of_gate), (bias_of_value, bias_of_gate) = weight.chunk(2), bias.chunk(2)
    gate = _ONEDNN(x, of_gate, bias_of_gate, "gelu", [], "none")  # by the error function
    result: Tensor = _ONEDNN.binary(x, gate, of_value, bias_of_value, "mul")
    return result


# ---- 3x3 convolutions -----------------------------------------------------------------------------------------------

LARGE = 2**23  # numbers of a weight, which no cache holds
MANY = 1024  # positions of all maps of a batch: with as many, Winograd's filtering in tiles of 4 by 4 is the fastest
SOME = 512  # positions from which tiles of 2 by 2 are the fastest
MIN_CHANNELS = 128  # below, moving tiles costs more than the products save
MIN_TRAINED = 320  # the same with gradients
_LOCK = threading.Lock()  # held while a weight's layout changes


@kernel
def _conv3x3(conv: nn.Conv2d, x: Tensor) -> Tensor:
    weight = conv.weight
    is_unsuited = x.dtype not in (torch.float32, *HALF) or x.device.type != "cpu" or torch.is_autocast_enabled("cpu")
    if is_unsuited or torch.compiler.is_compiling():
        return conv._conv_forward(x, weight, conv.bias)
    about = vars(conv)  # not while compiling: torch 2.6 cannot
    if about.get("owns_weights", False):
        with _LOCK:
            # Make the weight channels last if it is frozen.  At the first call, before any thread reads it, and
            # whatever the map's size: later, it would change the last bits of results.  Not at loading, which it
            # would double.
            before = weight.data
            if not weight.requires_grad and not _is_last(before):
                weight.data = channels_last(before)
                MappedPages().release(before)
            about["owns_weights"] = False
    return WAYS[way(x, weight)](x, weight, conv.bias)


def way(x: Tensor, weight: Tensor) -> str:
    """Name the fastest way of WAYS to convolve x (B,C,h,w) with weight (K,C,3,3)."""
    pixels, trains = x[:, 0].numel(), torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.dtype != torch.float32:
        is_product = weight.numel() >= LARGE and pixels < SOME and _is_last(weight) and not trains
        return "product" if is_product else "plain"
    if pixels >= MANY and min(weight.shape[:2]) >= (MIN_TRAINED if trains else MIN_CHANNELS):
        return "tiles of 4"
    if SOME <= pixels < MANY and not trains:
        return "tiles of 2"
    return "product" if weight.numel() >= LARGE and pixels < MANY and _is_last(weight) else "plain"


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() < weight.numel() and not _is_last(weight):  # it would reorder channels-last weights
        x = x.contiguous()
    return F.conv2d(x, weight, bias, padding=1)


def as_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve x (B,C,h,w) with weight (K,C,3,3), padding 1, as one product: (B,K,h,w), channels last.

    For large weights on small maps.  PyTorch's convolution (oneDNN) reorders the weights at every call, which takes
    longer than the sums; the product reads them as they are stored, channels last.
    """
    h, w = x.shape[2:]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    patches = [padded[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
    rows = weight.permute(0, 2, 3, 1).flatten(1)  # (K, 9C), a view if channels are last
    return matmul(torch.cat(patches, dim=-1), rows, bias).permute(0, 3, 1, 2)


# ---- Winograd's minimal filtering -----------------------------------------------------------------------------------
# The same sums with 2.25 or 4 times fewer multiplications.  PyTorch's CPU convolutions do not use it on x86.  An output
# tile of m by m is computed from an input tile of m+2 by m+2: Y = A^T [(G w G^T) * (B^T d B)] A.  Over all channels the
# product * is a matrix product for each of the (m+2)^2 positions.  Weights are transformed at every call, a part at a
# time: nothing is cached, so nothing can be out of date.  Relative errors in float32 against float64, with 640
# channels: 6e-7 for m = 2 and 1.1e-6 for m = 4; the plain convolution has 2e-7.
# Source: Lavin and Gray 2016, secs. 4.1 and 4.3; the choice of points: Barabasz et al. 2018.

# The points, by m, at which polynomials are evaluated, besides infinity.  For m = 4 the usual 0, 1, -1, 2, -2 have 1.7
# times the error; the best of 700 sets of eighths and sixteenths is better by less than 1 %.  The second must be 1.
POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 1.0, -0.5, 2.0, -1.25)}
TILES = 512  # computed at a time: enough to pay for reading the weights, few enough for the cache
PART = 2**25  # numbers of transformed weights at a time: 128 MiB


@functools.cache
def _transforms(points: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the transforms of input tiles (n*n,n*n), weights (n*n,9) and products (m*m,n*n), for flattened tiles.

    A filter of 3 on n = m+2 values is the transposed product of polynomials by their values at n points (Toom-Cook).
    """
    n = len(points) + 1
    powers = np.vander(points, n, increasing=True)
    to_input, to_weight, to_output = np.zeros((n, n)), np.zeros((n, 3)), np.zeros((n - 2, n))
    for i, point in enumerate(points):
        others = [root for root in points if root != point]
        to_input[i, :-1] = np.poly(others)[::-1]
        to_weight[i] = powers[i, :3] / np.prod(point - np.array(others))
        to_output[:, i] = powers[i, : n - 2]
    to_input[-1] = np.poly(points)[::-1]
    to_weight[-1, -1] = to_output[-1, -1] = 1  # infinity: the highest coefficients
    to_input_2, to_weight_2, to_output_2 = (
        torch.from_numpy(np.kron(once, once)).float() for once in (to_input, to_weight, to_output)
    )
    return to_input_2, to_weight_2, to_output_2


def filtered(x: Tensor, weight: Tensor, bias: Tensor | None, m: int, of_input: bool = False) -> Tensor:
    """Convolve x (B,C,h,w) with weight (K,C,3,3), padding 1, in tiles of m by m (2 or 4): (B,K,h,w), channels last.

    of_input flips the weights: from the gradient (B,K,h,w) of the output to the gradient (B,C,h,w) of the input.
    """
    (batch, channels, h, w), num_out, n = x.shape, weight.shape[1 if of_input else 0], m + 2
    to_input, to_weight, to_output = _transforms(POINTS[m])
    rows, columns = -(-h // m), -(-w // m)
    pixels = x.permute(0, 2, 3, 1)
    out = x.new_empty(batch, rows * m, columns * m, num_out)
    together = min(rows, max(1, TILES // (batch * columns)))  # rows of tiles
    strip = x.new_empty(batch, together * m + 2, columns * m + 2, channels)  # their pixels, and the padding
    strip[:, :, 0], strip[:, :, w + 1 :] = 0, 0
    image, line, pixel, _ = strip.stride()
    step = -(-num_out // -(-n * n * channels * num_out // PART))
    for part in (slice(k, k + step) for k in range(0, num_out, step)):
        some = weight[:, part] if of_input else weight[part]
        taps = some.permute(0, 2, 3, 1).reshape(len(some), 9, -1)  # a view, if channels are last
        matrix = to_weight.flip(1) if of_input else to_weight
        weights = torch.bmm(matrix.expand(len(some), -1, -1), taps).transpose(0, 1)
        weights = weights.mT if of_input else weights  # (n*n, some of K, C)
        for first in range(0, rows, together):
            count = min(together, rows - first)
            if part.start == 0 or together < rows:  # a single strip keeps its inputs
                top = first * m - 1  # the line of the image that is the strip's first
                begin, end = max(0, top), min(h, top + count * m + 2)
                strip[:, begin - top : end - top, 1 : w + 1] = pixels[:, begin:end]
                strip[:, : begin - top], strip[:, end - top :] = 0, 0
                # input tiles, which overlap by two: a view of the strip, copied and transformed
                size = n, n, batch, count, columns, channels
                tiles = strip.as_strided(size, (line, pixel, image, m * line, m * pixel, 1))
                inputs = (to_input @ tiles.reshape(n * n, -1)).view(n * n, -1, channels)  # (n*n, T, C)
            products = matmul(inputs, weights)  # (n*n, T, some of K)
            if bias is not None:
                products[n + 1] += bias[part]  # this position goes to each output of its tile with weight 1
            outputs = (to_output @ products.view(n * n, -1)).view(m, m, batch, count, columns, -1)
            lines = out[:, first * m : (first + count) * m].view(batch, count, m, columns, m, num_out)
            lines[..., part] = outputs.permute(2, 3, 0, 4, 1, 5)
    return out[:, :h, :w].permute(0, 3, 1, 2)  # (B, K, h, w)


class _Filtered(torch.autograd.Function):
    """Winograd's filtering, with gradients; the weight's is PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, m: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.m = m
        return filtered(x, weight, bias, m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = filtered(channels_last(grad), weight, None, ctx.m, of_input=True) if of_x else None
        mask = [False, of_weight, of_bias]
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation; not transposed
        _, *others = torch.ops.aten.convolution_backward(grad, x, weight, [len(weight)], *settings, mask)
        return grad_x, *others, None


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "plain": _plain,
    "product": as_product,
    "tiles of 2": functools.partial(filtered, m=2),
    "tiles of 4": lambda x, weight, bias: _Filtered.apply(x, weight, bias, 4),  # type: ignore[no-untyped-call]
}


# ---- attention ------------------------------------------------------------------------------------------------------

LIMIT = 60.0 * math.log2(math.e)  # of an exponent of 2
QUERIES = 512  # of a block: with 4096 keys its scores take 8 MiB
MIN_KEYS = 1024  # with fewer keys, or fewer scores of an image, there is little to gain
MIN_SCORES = 2**22


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, of many tokens by `blocked` or by PyTorch's kernel, whichever is faster here.

    Training in bfloat16 takes the plain formula: the backward pass of PyTorch's kernel takes four times as long.
    """
    if _trains_in_bf16(q):
        return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), dim=-1) @ v
    heads, n, m = *q.shape[1:3], k.shape[2]
    if not _suits(q, *HALF) or m < MIN_KEYS or heads * n * m < MIN_SCORES:
        return sdpa(q, k, v)
    return _attention(q.dtype, torch.get_num_threads())(q, k, v)


@functools.cache
def _attention(dtype: torch.dtype, threads: int) -> Callable[..., Tensor]:
    """Choose the attention for a dtype on this CPU, with as many threads."""
    ways = {"sdpa": sdpa, "blocked": blocked}
    q, k = _ramp(1, 2, QUERIES, 40, dtype=dtype), _ramp(1, 2, 4096, 40, dtype=dtype)
    calls = {name: functools.partial(way, q, k, k) for name, way in ways.items()}
    return ways[fastest("attention", "fp32" if dtype == torch.float32 else "bf16", calls, q.device)]


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q (B,H,N,D) and k, v (B,H,M,D) -> (B,H,N,D), with an error like PyTorch's.

    A block of one head's queries is two products by oneDNN with one pass of exponentials between.  The sums of the
    exponentials come from the second product, as a column of ones beside the values.  In bfloat16 scores are float32
    and exponentials bfloat16, as in PyTorch's kernel.

    A bound of the scores replaces their maximum.  With keys k - mean(k), which leave the softmax as it is,
    the scores of a query have the mean 0, so their maximum is in [0, b], b = |q| max|k| / sqrt(D).  Exponents are
    shifted by max(0, b - LIMIT): with b up to 2 LIMIT the largest term is within 2^-LIMIT and 2^LIMIT, and everything
    that counts is a normal number.  Larger b take PyTorch's kernel, and so does everything except inference on a CPU.
    Exponentials use base 2, which PyTorch computes faster than base e on some CPUs.
    """
    if not _suits(q, *HALF):
        return sdpa(q, k, v)
    (batch, heads, n, dim), m = q.shape, k.shape[2]
    keys = k.float()
    keys = keys - keys.mean(dim=2, keepdim=True)
    queries = q.float() * (dim**-0.5 * math.log2(math.e))
    bound = queries.norm(dim=-1) * keys.norm(dim=-1).amax(dim=-1, keepdim=True)  # (B, H, N)
    most = bound.max().item()
    if not most <= 2 * LIMIT:  # or not a number
        return sdpa(q, k, v)
    if most > LIMIT:  # the shift of the exponents is one more channel
        queries = torch.cat([queries, (LIMIT - bound).clamp(max=0)[..., None]], dim=-1)
        keys = torch.cat([keys, keys.new_ones(batch, heads, m, 1)], dim=-1)
    queries, keys = queries.contiguous(), keys.contiguous()
    values = v.new_zeros(batch, heads, -(-(dim + 1) // 8) * 8, m)  # oneDNN is faster with rows of whole vectors
    values[:, :, :dim], values[:, :, dim] = v.transpose(2, 3), 1
    out = q.new_empty(batch, n, heads, dim).transpose(1, 2)
    for place in itertools.product(range(batch), range(heads)):
        for start in range(0, n, QUERIES):
            part = (*place, slice(start, start + QUERIES))
            exponentials = _by_onednn(queries[part], keys[place]).exp2_().to(v.dtype)
            sums = _by_onednn(exponentials, values[place])
            torch.div(sums[:, :dim], sums[:, dim : dim + 1], out=out[part])
    return out


# ---- autoencoders ---------------------------------------------------------------------------------------------------


@kernel
def _in_strips(coder: Any, x: Tensor) -> Tensor:
    """Run an Encoder or Decoder: a large image strip by strip, if no part is replaced or hooked and relies on calls."""
    if not _suits(x) or not is_unmodified(coder):
        return type(coder).forward(coder, x)
    strips = tiling.Strips(share=2)  # as fast, in three quarters of the memory
    return strips.decode(coder, x) if type(coder) is Decoder else strips.encode(coder, x)
