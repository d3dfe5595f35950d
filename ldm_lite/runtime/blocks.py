"""Weights in blocks of few bits, as GGUF files store them: kept so in memory, dequantised in a layer's forward.

LoRAs change the dequantised weight.

A block holds 32 or 256 values of a row: quantised numbers, and the scales of the block and of its parts.  Rules in
terms of bytes: lo = byte & 15, hi = byte >> 4, d and m are float16.
Source: ggml-quants of ggml, by its documentation; the numbers are ComfyUI-GGUF's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.runtime.quantization import Change, changed

# ---- formats --------------------------------------------------------------------------------------------------------

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block (N,bytes), as float32 (N,1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Bytes (N,K) -> (N,2K): all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], dim=1)


def _parts(data: Tensor, bits: int) -> Tensor:
    """Bytes (...,K) -> their numbers of so many bits (...,K,8/bits), the lowest first."""
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    return (data[..., None] >> shifts) & (2**bits - 1)


def _fives(low: Tensor, high: Tensor) -> Tensor:
    """Numbers (N,32) of five bits, as float32, from bytes (N,16) of low halves and (N,4) of highest bits."""
    return (_nibbles(low) | _parts(high, 1).flatten(1) << 4).float()


def _iq4(numbers: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=numbers.device)[numbers.long()]


def _quarters(data: Tensor) -> Tensor:
    """Bytes (N,64) -> two-bit numbers (N,256): of each 32 bytes the lowest bits first."""
    return _parts(data.view(-1, 2, 32), 2).transpose(2, 3).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, d, m = blocks[:, :16, None], _half(blocks, 80)[:, :, None], _half(blocks, 82)[:, :, None]
    numbers = _quarters(blocks[:, 16:80]).view(-1, 16, 16)
    return (d * (scales & 15).float() * numbers.float() - m * (scales >> 4).float()).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    high = _parts(packed[:, 8:], 2).transpose(1, 2).flatten(1)  # (N, 16)
    scales = (_nibbles(packed[:, :8]) | high << 4).float() - 32
    above = _parts(blocks[:, :32], 1).transpose(1, 2).flatten(1).float()  # (N, 256): 32 values of each bit
    numbers = _quarters(blocks[:, 32:96]).float() + 4 * above - 4
    return ((_half(blocks, 108) * scales)[:, :, None] * numbers.view(-1, 16, 16)).flatten(1)


def _six_bit(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes (N,12) -> eight scales and eight minima (N,8,1) of six bits, as float32."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], dim=1)
    minima = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], dim=1)
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _pairs(data: Tensor) -> Tensor:
    """Bytes (N,128) -> numbers (N,8,32): of each 32 bytes the low halves, then the high ones."""
    return torch.stack([data.view(-1, 4, 32) & 15, data.view(-1, 4, 32) >> 4], dim=2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _six_bit(blocks[:, 4:16])
    d, m = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    return (d * scales * _pairs(blocks[:, 16:].contiguous()).float() - m * minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _six_bit(blocks[:, 4:16])
    d, m = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    high = _parts(blocks[:, 16:48], 1).transpose(1, 2)  # (N, 8, 32)
    return (d * scales * (_pairs(blocks[:, 48:].contiguous()) | high << 4).float() - m * minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].contiguous().view(-1, 2, 64)
    low = torch.cat([low & 15, low >> 4], dim=2)  # (N, 2, 128)
    numbers = (low.flatten(1) | _quarters(blocks[:, 128:192].contiguous()) << 4).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[:, :, None] * numbers.view(-1, 16, 16)).flatten(1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = _parts(blocks[:, 2:4], 2).flatten(1)  # (N, 8)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)
    scales = (low | high << 4).float() - 32
    data = blocks[:, 8:].contiguous().view(-1, 8, 16)
    numbers = torch.cat([data & 15, data >> 4], dim=2)  # (N, 8, 32)
    return ((_half(blocks, 0) * scales)[:, :, None] * _iq4(numbers)).flatten(1)


class Format(NamedTuple):
    """How GGUF stores numbers: its id, values and bytes of a block, and blocks (N,bytes) -> (N,values) float32."""

    id: int
    values: int
    bytes: int
    dequantize: Callable[[Tensor], Tensor]


GGUF_FORMATS = {
    "F32": Format(0, 1, 4, lambda b: b.contiguous().view(torch.float32)),
    "F16": Format(1, 1, 2, lambda b: _half(b, 0)),
    "Q4_0": Format(2, 32, 18, lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)),
    "Q4_1": Format(3, 32, 20, lambda b: _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2)),
    "Q5_0": Format(6, 32, 22, lambda b: _half(b, 0) * (_fives(b[:, 6:], b[:, 2:6]) - 16)),
    "Q5_1": Format(7, 32, 24, lambda b: _half(b, 0) * _fives(b[:, 8:], b[:, 4:8]) + _half(b, 2)),
    "Q8_0": Format(8, 32, 34, lambda b: _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float()),
    "Q2_K": Format(10, 256, 84, _q2_k),
    "Q3_K": Format(11, 256, 110, _q3_k),
    "Q4_K": Format(12, 256, 144, _q4_k),
    "Q5_K": Format(13, 256, 176, _q5_k),
    "Q6_K": Format(14, 256, 210, _q6_k),
    "IQ4_NL": Format(20, 32, 18, lambda b: _half(b, 0) * _iq4(_nibbles(b[:, 2:]))),
    "IQ4_XS": Format(23, 256, 136, _iq4_xs),
    "BF16": Format(30, 1, 2, lambda b: b.contiguous().view(torch.bfloat16).float()),
}


ONE_KERNEL_MAX_VALUES = 2**26  # values; all linears of FLUX.1 have fewer
PIECE = 2**16  # blocks, of 32 or 256 values, or of one


class Blocks(NamedTuple):
    """A tensor in blocks: the bytes of all of them, their format, and the tensor's shape."""

    data: Tensor  # uint8
    format: str
    shape: tuple[int, ...]

    def copied(self) -> "Blocks":
        """Return the same blocks in separate memory."""
        return self._replace(data=self.data.clone())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor, on the device of the blocks; a large one, an embedding, piece by piece."""
        form = GGUF_FORMATS[self.format]
        blocks = self.data.view(-1, form.bytes)
        if len(blocks) * form.values <= ONE_KERNEL_MAX_VALUES:
            return form.dequantize(blocks).to(dtype).view(self.shape)
        values = torch.empty(len(blocks), form.values, dtype=dtype, device=blocks.device)
        for start in range(0, len(blocks), PIECE):
            values[start : start + PIECE] = form.dequantize(blocks[start : start + PIECE])
        return values.view(self.shape)


# ---- layers ---------------------------------------------------------------------------------------------------------


class BlockLinear(nn.Module):
    """A linear whose weight stays in blocks: it is dequantised for each forward."""

    blocks: Tensor
    compiled = False  # code that is compiled already would not see further changes

    def __init__(self, weight: Blocks, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format, self.dtype = weight.format, dtype
        self.changes: list[Change] = []  # made to the weight for each forward
        self.register_buffer("blocks", weight.data)
        self.bias = bias

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:
        """The weight (out_features,in_features), with its changes, in the dtype that the layer was made for."""
        wide = torch.float32 if self.changes else self.dtype
        return changed(Blocks(self.blocks, self.format, self.shape).dequantize(wide), self.changes).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)
