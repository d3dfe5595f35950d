"""Group normalisation of channels-last maps, with what comes before and after it, as Triton kernels.

    out = silu(group_norm(x + y + added[:, :, None, None] + bias[:, None, None]))

where everything but x and the norm may be missing.  Maps of up to WHOLE positions take one kernel, in which a program
normalises a group; larger ones take two: statistics of strips, and the result.  Means and squares of differences from
them are summed in float32, in two passes, so a large mean costs no digits.

Needs Triton, so import it only where that is there.  TRITON_INTERPRET=1 runs the kernels on a CPU.

Shape letters: B batch, C channels, G groups, P positions, S strips.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WHOLE = 1024  # positions of a map that one program a group normalises: 32 x 32
STRIPS = 64  # of a larger map, each with statistics of its own
COLUMNS = 128  # channels, with padding, that a program of a larger map reads
TILE = 2048  # values that a program holds at a time, 16 a thread


@triton.jit
def _value(x_ptr, y_ptr, at, mask, shift, HAS_Y: tl.constexpr):
    """The sum that is normalised, rounded as memory holds it if y is a part of it."""
    value = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) + shift
    if HAS_Y:
        value += tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(mask, value, 0.0)


@triton.jit
def _shift(added_ptr, bias_ptr, b, C, channel, ok, HAS_ADDED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What is added to all positions of a channel."""
    shift = tl.zeros(channel.shape, tl.float32)
    if HAS_ADDED:
        shift += tl.load(added_ptr + b * C + channel, mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    return shift


@triton.jit
def _moments(
    x_ptr, y_ptr, sum_ptr, base, first, last, C, CPG, channel, ok, shift,
    BLOCK_P: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    """Mean, and sum of squared differences from it, of each group over positions first to last; (1, GB, 1)."""
    sums = tl.zeros([BLOCK_P, channel.shape[1], channel.shape[2]], tl.float32)
    for row in range(first, last, BLOCK_P):
        p = row + tl.arange(0, BLOCK_P)[:, None, None]
        at, mask = base + p.to(tl.int64) * C + channel, (p < last) & ok
        value = _value(x_ptr, y_ptr, at, mask, shift, HAS_Y)
        if HAS_Y:
            tl.store(sum_ptr + at, value.to(sum_ptr.dtype.element_ty), mask=mask)
        sums += value
    count = tl.maximum((last - first) * CPG * 1.0, 1.0)
    mean = tl.sum(tl.sum(sums, axis=2, keep_dims=True), axis=0, keep_dims=True) / count
    squares = tl.zeros([BLOCK_P, channel.shape[1], channel.shape[2]], tl.float32)
    for row in range(first, last, BLOCK_P):
        p = row + tl.arange(0, BLOCK_P)[:, None, None]
        at, mask = base + p.to(tl.int64) * C + channel, (p < last) & ok
        away = tl.where(mask, _value(x_ptr, y_ptr, at, mask, shift, HAS_Y) - mean, 0.0)
        squares += away * away
    return mean, tl.sum(tl.sum(squares, axis=2, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _write(
    x_ptr, y_ptr, out_ptr, weight_ptr, bias_ptr, base, first, last, C, channel, ok, shift, mean, rate,
    BLOCK_P: tl.constexpr, HAS_Y: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    scale = tl.load(weight_ptr + channel, mask=ok, other=0.0).to(tl.float32) * rate
    offset = tl.load(bias_ptr + channel, mask=ok, other=0.0).to(tl.float32) - mean * scale
    for row in range(first, last, BLOCK_P):
        p = row + tl.arange(0, BLOCK_P)[:, None, None]
        at, mask = base + p.to(tl.int64) * C + channel, (p < last) & ok
        value = _value(x_ptr, y_ptr, at, mask, shift, HAS_Y) * scale + offset
        if SILU:
            value = value / (1 + tl.exp(-value))
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def triton_norm_whole(
    x_ptr, y_ptr, added_ptr, channel_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, P, C, CPG, eps,
    PAD: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_Y: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program normalises a group of an image."""
    b, g = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PAD)[None, None, :]
    channel, ok, base = g * CPG + column, column < CPG, b.to(tl.int64) * P * C
    shift = _shift(added_ptr, channel_ptr, b, C, channel, ok, HAS_ADDED, HAS_BIAS)
    mean, squares = _moments(
        x_ptr, y_ptr, sum_ptr, base, 0, P, C, CPG, channel, ok, shift, BLOCK_P=BLOCK_P, HAS_Y=HAS_Y
    )
    rate = tl.rsqrt(squares / (P * CPG * 1.0) + eps)
    _write(
        x_ptr, y_ptr, out_ptr, weight_ptr, bias_ptr, base, 0, P, C, channel, ok, shift, mean, rate,
        BLOCK_P=BLOCK_P, HAS_Y=HAS_Y, SILU=SILU,
    )  # fmt: skip


@triton.jit
def triton_norm_strips(
    x_ptr, y_ptr, added_ptr, channel_ptr, sum_ptr, part_ptr, P, C, CPG, G, ROWS,
    GB: tl.constexpr, PAD: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_Y: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A program finds mean and squares of GB groups in a strip; part is (B, S, 2, G)."""
    b, s = tl.program_id(0), tl.program_id(1)
    g, column = tl.program_id(2) * GB + tl.arange(0, GB)[None, :, None], tl.arange(0, PAD)[None, None, :]
    channel, ok, base = g * CPG + column, (column < CPG) & (g < G), b.to(tl.int64) * P * C
    shift = _shift(added_ptr, channel_ptr, b, C, channel, ok, HAS_ADDED, HAS_BIAS)
    first, last = tl.minimum(s * ROWS, P), tl.minimum((s + 1) * ROWS, P)
    mean, squares = _moments(
        x_ptr, y_ptr, sum_ptr, base, first, last, C, CPG, channel, ok, shift, BLOCK_P=BLOCK_P, HAS_Y=HAS_Y
    )
    at = (b * tl.num_programs(1) + s) * 2 * G + g
    tl.store(part_ptr + at, mean, mask=g < G)
    tl.store(part_ptr + at + G, squares, mask=g < G)


@triton.jit
def triton_norm_apply(
    x_ptr, added_ptr, channel_ptr, weight_ptr, bias_ptr, part_ptr, out_ptr, P, C, CPG, G, ROWS, eps,
    GB: tl.constexpr, PAD: tl.constexpr, BLOCK_P: tl.constexpr, S: tl.constexpr,
    HAS_ADDED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program combines the statistics of all strips and writes a strip of GB groups."""
    b, s = tl.program_id(0), tl.program_id(1)
    g, column = tl.program_id(2) * GB + tl.arange(0, GB)[None, :, None], tl.arange(0, PAD)[None, None, :]
    channel, ok, base = g * CPG + column, (column < CPG) & (g < G), b.to(tl.int64) * P * C
    strip = tl.arange(0, S)[:, None, None]
    at, there = (b * S + strip) * 2 * G + g, g < G
    means = tl.load(part_ptr + at, mask=there, other=0.0)  # (S, GB, 1)
    squares = tl.load(part_ptr + at + G, mask=there, other=0.0)
    counts = (tl.minimum((strip + 1) * ROWS, P) - tl.minimum(strip * ROWS, P)) * CPG * 1.0
    count = P * CPG * 1.0
    mean = tl.sum(means * counts, axis=0, keep_dims=True) / count
    away = means - mean
    rate = tl.rsqrt(tl.sum(squares + counts * away * away, axis=0, keep_dims=True) / count + eps)
    shift = _shift(added_ptr, channel_ptr, b, C, channel, ok, HAS_ADDED, HAS_BIAS)
    _write(
        x_ptr, x_ptr, out_ptr, weight_ptr, bias_ptr, base, tl.minimum(s * ROWS, P), tl.minimum((s + 1) * ROWS, P),
        C, channel, ok, shift, mean, rate, BLOCK_P=BLOCK_P, HAS_Y=False, SILU=SILU,
    )  # fmt: skip


INTERPRETED = not isinstance(triton_norm_whole, triton.runtime.JITFunction)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    y: Tensor | None = None, added: Tensor | None = None, channel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise x (B,C,h,w), channels last; return the result and the sum that was normalised (x itself without y).

    y is like x, added (B,C), channel (C,); weight and bias (C,) are the norm's.
    """
    (batch, channels, h, w), y_last = x.shape, None if y is None else _last(y)
    x, positions, width = _last(x), h * w, channels // groups
    out, total, pad = torch.empty_like(x), x if y is None else torch.empty_like(x), triton.next_power_of_2(width)
    added = x if added is None else added.contiguous()
    has = {"HAS_ADDED": added is not x, "HAS_BIAS": channel is not None}
    channel = x if channel is None else channel
    sources = (x, x if y_last is None else y_last, added, channel)
    if positions <= WHOLE:
        wrapped(triton_norm_whole)[(batch, groups)](
            *sources, weight, bias, total, out, positions, channels, width, eps,
            HAS_Y=y is not None, SILU=silu, num_warps=8, **has, **tiles(pad, groups)[0],
        )  # fmt: skip
        return out, total
    tile = tiles(pad, groups)[1]
    part = torch.empty(batch, STRIPS, 2, groups, dtype=torch.float32, device=x.device)
    rows, grid = -(-positions // STRIPS), (batch, STRIPS, -(-groups // tile["GB"]))
    sizes = (positions, channels, width, groups, rows)
    wrapped(triton_norm_strips)[grid](*sources, total, part, *sizes, HAS_Y=y is not None, num_warps=4, **tile, **has)
    if y is not None:  # the sum holds all of it
        has = dict.fromkeys(has, False)
    wrapped(triton_norm_apply)[grid](
        total, added, channel, weight, bias, part, out, *sizes, eps, S=STRIPS, SILU=silu, num_warps=4, **tile, **has
    )
    return out, total


def tiles(pad: int, groups: int) -> tuple[dict[str, int], dict[str, int]]:
    """The tiles of a program of triton_norm_whole and of the other two, for groups of up to pad channels."""
    together = max(1, min(COLUMNS // pad, triton.next_power_of_2(groups)))
    rows = max(1, TILE // (together * pad))
    return {"PAD": pad, "BLOCK_P": max(1, 2 * TILE // pad)}, {"GB": together, "PAD": pad, "BLOCK_P": rows}


def runs_on(x: Tensor) -> bool:
    """Whether the kernels run where x is, in its dtype."""
    known = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and (x.is_cuda or INTERPRETED)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def wrapped(kernel: Any) -> Any:
    """A kernel as the compiler takes it in; the interpreter's as it is."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


@torch.library.triton_op("ldm_lite::group_norm", mutates_args={})
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    added: Tensor | None = None, channel: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """launch() without y, for the compiler."""
    return launch(x, weight, bias, groups, eps, silu, None, added, channel)[0]


@torch.library.triton_op("ldm_lite::group_norm_of_sum", mutates_args={})
def group_norm_of_sum(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    added: Tensor | None = None, channel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """launch() with y, for the compiler."""
    return launch(x, weight, bias, groups, eps, silu, y, added, channel)
