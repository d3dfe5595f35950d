# mypy: ignore-errors
"""Kernels for NVIDIA GPUs in Triton, for maps with channels last and tokens in half precision; sums are in float32.

Group norm of large maps is two of them: statistics of rows of the map, by as many programs as a GPU has
multiprocessors, and the result, which joins them.  On a small map a program holds a group of an image.  The normalised
values may be a sum, of the map and numbers for each image or channel, and SiLU may follow.
Kernels are compiled for each number of channels, in a second or more each, and kept by Triton on the disk.  Imported
where they run (fused.py, which tells what they compute): Triton only comes with torch's builds for CUDA.

Letters: B images, P positions, C channels, G groups of R channels, S parts of the positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ldm_lite.runtime.fused import MOST_POSITIONS

LANES = 4096  # numbers that a program has at once
MOST_PARTS = 128  # of a map: each program that writes results reads all statistics
PROGRAMS = 256  # of a kernel, about: two for each multiprocessor of a large GPU


@triton.jit(do_not_specialize=["P", "S", "ROWS", "SHIFTED"])
def _norm_statistics(x, shift, bias, parts, P, S, ROWS, SHIFTED, C: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
                WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean, and the sum of squared differences from it, of each group in ROWS positions of an image."""
    image, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDE)[None, :]
    channel = tl.arange(0, G)[:, None] * R + column  # (G, WIDE), of which R columns are used
    is_channel = column < R
    added = tl.zeros((G, WIDE), tl.float32)
    if SHIFTED != 0:
        added += tl.load(shift + image * C + channel, mask=is_channel, other=0.0).to(tl.float32)
        added += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    start = image.to(tl.int64) * P * C
    # Differences from about the mean, since squares of large numbers would lose digits: from that of the first row.
    first = tl.load(x + start + part * ROWS * C + channel, mask=is_channel, other=0.0).to(tl.float32)
    near = tl.sum(tl.where(is_channel, first + added, 0.0), 1)[:, None] / R  # (G, 1)
    sums, squares = tl.zeros((G, WIDE), tl.float32), tl.zeros((G, WIDE), tl.float32)
    for offset in range(0, ROWS, BLOCK):
        row = offset + tl.arange(0, BLOCK)[:, None, None]
        position = part * ROWS + row
        is_there = (position < P) & (row < ROWS) & is_channel[None, :, :]
        value = tl.load(x + start + position * C + channel[None, :, :], mask=is_there, other=0.0).to(tl.float32)
        value = tl.where(is_there, value + (added - near)[None, :, :], 0.0)
        sums += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    count = tl.minimum(ROWS, P - part * ROWS) * R
    total = tl.sum(sums, 1)
    mean = total / count
    place = ((image * S + part) * 2) * G + tl.arange(0, G)
    tl.store(parts + place, mean + tl.sum(near, 1))
    tl.store(parts + place + G, tl.sum(squares, 1) - total * mean)


@triton.jit(do_not_specialize=["P", "S", "ROWS", "SHIFTED", "LAST", "SILU"])
def _norm_result(x, shift, bias, parts, P, S, ROWS, SHIFTED, weight, offset, out, eps, LAST, SILU, C: tl.constexpr,
            R: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Write LAST normalised positions of an image, whose statistics are in S parts, MOST at most."""
    image = tl.program_id(0)
    part = tl.arange(0, MOST)[:, None]
    place = ((image * S + part) * 2) * G + tl.arange(0, G)[None, :]
    means = tl.load(parts + place, mask=part < S, other=0.0)
    differences = tl.load(parts + place + G, mask=part < S, other=0.0)
    counts = tl.where(part < S, tl.minimum(ROWS, P - part * ROWS) * R, 0).to(tl.float32)
    mean = tl.sum(means * counts, 0) / (P * R)  # (G,)
    apart = means - mean[None, :]
    variance = (tl.sum(differences, 0) + tl.sum(counts * apart * apart, 0)) / (P * R)
    rate = tl.rsqrt(variance + eps)
    column = tl.arange(0, WIDE)[None, :]
    channel = tl.arange(0, G)[:, None] * R + column
    is_channel = column < R
    scale = tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32) * rate[:, None]
    added = tl.load(offset + channel, mask=is_channel, other=0.0).to(tl.float32)
    less = tl.zeros((G, WIDE), tl.float32) - mean[:, None]
    if SHIFTED != 0:
        less += tl.load(shift + image * C + channel, mask=is_channel, other=0.0).to(tl.float32)
        less += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    start = image.to(tl.int64) * P * C
    for first in range(0, LAST, BLOCK):
        row = first + tl.arange(0, BLOCK)[:, None, None]
        position = tl.program_id(1) * LAST + row
        is_there = (position < P) & (row < LAST) & is_channel[None, :, :]
        number = start + position * C + channel[None, :, :]
        value = tl.load(x + number, mask=is_there, other=0.0).to(tl.float32)
        value = (value + less[None, :, :]) * scale[None, :, :] + added[None, :, :]
        value = tl.where(SILU != 0, value / (1 + tl.exp(-value)), value)
        tl.store(out + number, value.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["P", "SHIFTED", "SILU"])
def _norm_small(x, shift, bias, P, SHIFTED, weight, offset, out, eps, SILU, C: tl.constexpr, R: tl.constexpr,
           WIDE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write a normalised group of an image, of P positions, ROWS at most."""
    image, group = tl.program_id(0), tl.program_id(1)
    position, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    channel, is_channel = group * R + column, column < R
    is_there = (position < P) & is_channel
    number = image.to(tl.int64) * P * C + position * C + channel
    value = tl.load(x + number, mask=is_there, other=0.0).to(tl.float32)
    if SHIFTED != 0:
        value += tl.load(shift + image * C + channel, mask=is_channel, other=0.0).to(tl.float32)
        value += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(tl.where(is_there, value, 0.0), 1), 0) / (P * R)
    value = tl.where(is_there, value - mean, 0.0)
    rate = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / (P * R) + eps)
    value *= rate * tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    value += tl.load(offset + channel, mask=is_channel, other=0.0).to(tl.float32)
    value = tl.where(SILU != 0, value / (1 + tl.exp(-value)), value)
    tl.store(out + number, value.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _sum_and_norm(x, y, weight, offset, total, out, eps, C: tl.constexpr, WIDE: tl.constexpr):
    """Write the sum of a token of x and of y, and its layer norm."""
    channel = tl.arange(0, WIDE)
    is_channel = channel < C
    number = tl.program_id(0).to(tl.int64) * C + channel
    value = tl.load(x + number, mask=is_channel, other=0.0).to(tl.float32)
    value += tl.load(y + number, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(total + number, value.to(total.dtype.element_ty), mask=is_channel)
    value = tl.where(is_channel, value - tl.sum(value, 0) / C, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / C + eps)
    value *= tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    value += tl.load(offset + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + number, value.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["C"])
def _gated(x, out, C, BLOCK: tl.constexpr):
    """Write some of the C results of a token, from two numbers each."""
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + 2 * token * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    gate = tl.load(x + (2 * token + 1) * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    value *= 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + token * C + channel, value.to(out.dtype.element_ty), mask=channel < C)


@triton.jit(do_not_specialize=["P", "C"])
def _sum(x, y, bias, out, P, C, BLOCK: tl.constexpr):
    """Write x + y + bias, with a bias for each of C channels, to P places."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < P
    total = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    total += tl.load(y + place, mask=is_there, other=0.0).to(tl.float32)
    total += tl.load(bias + place % C, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_there)


def group_norm(
    x: Tensor, weight: Tensor, offset: Tensor, groups: int, eps: float, silu: bool, shift: Tensor | None, bias: Tensor
) -> Tensor:
    """Compute fused.group_norm."""
    (images, channels, h, w), out = x.shape, torch.empty_like(x)
    positions, wide = h * w, triton.next_power_of_2(channels // groups)
    is_shifted, shift = int(shift is not None), x if shift is None else shift
    sizes = {"C": channels, "R": channels // groups, "WIDE": wide}
    if positions <= MOST_POSITIONS and wide <= 128:
        rows = triton.next_power_of_2(positions)
        warps = min(16, max(1, rows * wide // 1024))
        arguments = x, shift, bias, positions, is_shifted, weight, offset, out, eps, int(silu)
        _norm_small[(images, groups)](*arguments, **sizes, ROWS=rows, num_warps=warps)
        return out
    sizes |= {"G": groups, "BLOCK": max(1, LANES // (groups * wide))}
    rows = triton.cdiv(positions, max(1, min(PROGRAMS // images, MOST_PARTS, max(64, positions // 512))))
    num_parts = triton.cdiv(positions, rows)
    last = max(sizes["BLOCK"], triton.next_power_of_2(triton.cdiv(positions, max(1, 2 * PROGRAMS // images))))
    parts = torch.empty(images * num_parts * 2 * groups, device=x.device, dtype=torch.float32)
    arguments = x, shift, bias, parts, positions, num_parts, rows, is_shifted
    _norm_statistics[(images, num_parts)](*arguments, **sizes)
    grid = images, triton.cdiv(positions, last)
    _norm_result[grid](*arguments, weight, offset, out, eps, last, int(silu), **sizes, MOST=MOST_PARTS)
    return out


def biased_sum(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Compute fused.biased_sum."""
    out = torch.empty_like(x)
    _sum[(triton.cdiv(x.numel(), 1024),)](x, y, bias, out, x.numel(), x.shape[1], BLOCK=1024)
    return out


def sum_and_norm(x: Tensor, y: Tensor, weight: Tensor, offset: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute fused.sum_and_norm."""
    total, out, channels = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    sizes = {"C": channels, "WIDE": triton.next_power_of_2(channels)}
    _sum_and_norm[(x.numel() // channels,)](x, y, weight, offset, total, out, eps, **sizes)
    return total, out


def gated(x: Tensor) -> Tensor:
    """Compute fused.gated."""
    *sizes, channels = x.shape
    out = x.new_empty(*sizes, channels // 2)
    grid = x.numel() // channels, triton.cdiv(channels // 2, 1024)
    _gated[grid](x, out, channels // 2, BLOCK=1024)
    return out
