"""A linear with GEGLU in its epilogue, as a Triton kernel: (x V + b) * gelu(x W + c) without the wide result in memory.

Needs Triton, so import it only where that is there.  TRITON_INTERPRET=1 runs it on a CPU.

Shape letters: M rows, K channels in, N channels out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ldm_lite.runtime.norm_kernels import wrapped

# (rows, channels out) of a program, its warps and the stages of its pipeline; each is a candidate
TILES = {(128, 64): (8, 4), (64, 64): (8, 4)}
DEPTH = 32  # channels in of a stage


@triton.jit
def triton_geglu(x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A program computes a tile of values and gates: rows N to 2N of weight (2N,K) are the gates'."""
    rows, columns = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * K + depth[None, :]
    value_at = weight_ptr + columns.to(tl.int64)[None, :] * K + depth[:, None]
    gate_at = value_at + N * K
    values, gates = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        x_there = (rows < M)[:, None] & (depth[None, :] < K - k * BK)
        there = (columns < N)[None, :] & (depth[:, None] < K - k * BK)
        x = tl.load(x_at, mask=x_there, other=0.0)
        values = tl.dot(x, tl.load(value_at, mask=there, other=0.0), values)
        gates = tl.dot(x, tl.load(gate_at, mask=there, other=0.0), gates)
        x_at, value_at, gate_at = x_at + BK, value_at + BK, gate_at + BK
    values += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    gates += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out = values * 0.5 * gates * (1 + tl.erf(gates * 0.7071067811865476))
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def launch(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    """GEGLU of x (...,K) by weight (2N,K) and bias (2N,), in tiles of rows by columns: (...,N)."""
    k, n, flat = x.shape[-1], weight.shape[0] // 2, x.reshape(-1, x.shape[-1]).contiguous()
    warps, stages = TILES[rows, columns]
    out = torch.empty(flat.shape[0], n, dtype=x.dtype, device=x.device)
    grid = (-(-n // columns), -(-flat.shape[0] // rows))
    wrapped(triton_geglu)[grid](
        flat, weight, bias, out, flat.shape[0], n, k, BM=rows, BN=columns, BK=DEPTH, num_warps=warps, num_stages=stages
    )
    return out.view(*x.shape[:-1], n)


@torch.library.triton_op("ldm_lite::geglu", mutates_args={})
def geglu(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    """launch() for the compiler."""
    return launch(x, weight, bias, rows, columns)
