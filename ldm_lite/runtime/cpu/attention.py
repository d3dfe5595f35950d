"""Exact attention on a CPU in blocks of queries and keys, for many tokens and few channels a head.

PyTorch's CPU kernel keeps a running maximum of each query's scores.  Here a bound of the scores takes its place,
so a block is two matrix products and one pass of exponentials, and the sums of the exponentials come from the second
product, as a column of ones beside the values.

With keys k - mean(k), which leave the softmax as it is, the scores of a query have the mean 0, so their maximum is in
[0, b], b = |q| max|k| / sqrt(D).  Exponents are shifted by max(0, b - LIMIT): with b up to 2 LIMIT the largest term is
within exp(-LIMIT) and exp(LIMIT), and everything that counts is a normal number in float32.  Larger b take PyTorch's
kernel.

Shape letters: B batch, H heads, N queries, M keys, D channels of a head.
"""

import torch
from torch import Tensor

from ldm_lite.core.layers import sdpa
from ldm_lite.runtime.timing import fastest

LIMIT = 60.0
QUERIES, KEYS = 512, 256  # of a block: its scores take 512 KiB a head
MIN_TOKENS = 1024  # with fewer there is little to gain


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q (B,H,N,D) and k, v (B,H,M,D) -> (B,H,N,D), with an error like PyTorch's.

    For inference in float32 on a CPU; everything else runs PyTorch's kernel.
    """
    if not _suits(q):
        return sdpa(q, k, v)
    (batch, heads, n, dim), m = q.shape, k.shape[2]
    keys = k - k.mean(dim=2, keepdim=True)
    queries = q * dim**-0.5
    bound = queries.norm(dim=-1) * keys.norm(dim=-1).amax(dim=-1, keepdim=True)  # (B, H, N)
    most = bound.max().item()
    if not most <= 2 * LIMIT:  # or not a number
        return sdpa(q, k, v)
    if most > LIMIT:  # the shift of the exponents is one more channel
        queries = torch.cat([queries, (LIMIT - bound).clamp(max=0)[..., None]], dim=-1)
        keys = torch.cat([keys, keys.new_ones(batch, heads, m, 1)], dim=-1)
    queries = queries.transpose(2, 3).reshape(batch * heads, -1, n)
    keys = keys.reshape(batch * heads, m, -1)
    values = torch.cat([v, v.new_ones(batch, heads, m, 1)], dim=-1).transpose(2, 3).reshape(batch * heads, dim + 1, m)
    out = q.new_empty(batch * heads, dim, n)
    together = torch.get_num_threads()  # heads, so that each thread has its block in its cache
    for first in range(0, batch * heads, together):
        some = slice(first, first + together)
        for start in range(0, n, QUERIES):
            part = slice(start, start + QUERIES)
            _attend(queries[some, :, part], keys[some], values[some], out[some, :, part])
    return out.view(batch, heads, dim, n).transpose(2, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Write the attention of q (H,D,N) to k (H,M,D) and v (H,D+1,M), whose last row is 1, into out (H,D,N)."""
    memory, sums = q.new_empty(len(q), KEYS, q.shape[2]), q.new_zeros(len(q), v.shape[1], q.shape[2])
    for start in range(0, k.shape[1], KEYS):
        some = k[:, start : start + KEYS]
        scores = torch.bmm(some, q, out=memory[:, : some.shape[1]])
        sums.baddbmm_(v[:, :, start : start + KEYS], scores.exp_())
    torch.div(sums[:, :-1], sums[:, -1:], out=out)


def timed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the same by `blocked` or by PyTorch's kernel, whichever is faster on this CPU for these sizes."""
    if not _suits(q) or min(q.shape[2], k.shape[2]) < MIN_TOKENS:
        return sdpa(q, k, v)
    some = q[:1, :, : 2 * QUERIES], k[:1], v[:1]
    what = f"attention to {k.shape[2]} tokens, {q.shape[1]} heads of {q.shape[3]} channels"
    ways = {"sdpa": lambda: sdpa(*some), "blocked": lambda: blocked(*some)}
    return (blocked if fastest(what, "fp32", ways, q.device) == "blocked" else sdpa)(q, k, v)


def _suits(q: Tensor) -> bool:
    inference = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return inference and q.dtype == torch.float32 and q.device.type == "cpu"
