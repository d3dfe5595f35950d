"""Read GGUF files: weights in blocks of few bits, as llama.cpp, stable-diffusion.cpp and ComfyUI-GGUF write them.

A file is a header, pairs of metadata, a table of tensors, and their data.  Sizes and offsets are checked against the
file before anything is read.  runtime/blocks.py knows the formats of the blocks.
Source: the GGUF specification of ggml; key names of T5 from llama.cpp.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from ldm_lite.cli.files import open_file
from ldm_lite.core.files import Tensors
from ldm_lite.runtime.blocks import GGUF_FORMATS, BlockLinear, Blocks

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_PAIRS, MOST_TENSORS, MOST_TEXT = 4096, 65536, 2**20
MOST_ITEMS = 2**21  # of all arrays: vocabularies
MOST_HEADER = 2**26  # bytes of metadata and table
MOST_DIMENSIONS = 8
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value types
TEXT, ARRAY = 8, 9
NOT_READ = {  # ids of ggml's other formats
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
    **{40: "NVFP4", 41: "Q1_0"},
}
SHAPE = "comfy.gguf.orig_shape."  # key of the shape that a tensor had before it was flattened
# llama.cpp's names of T5's encoder -> transformers'.
T5 = (
    (r"^token_embd\.", "shared."),
    (r"^enc\.output_norm\.", "encoder.final_layer_norm."),
    (r"^enc\.blk\.(\d+)\.attn_rel_b\.", r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias."),
    (r"^enc\.blk\.(\d+)\.attn_([qkvo])\.", r"encoder.block.\1.layer.0.SelfAttention.\2."),
    (r"^enc\.blk\.(\d+)\.attn_norm\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^enc\.blk\.(\d+)\.ffn_gate\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^enc\.blk\.(\d+)\.ffn_up\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^enc\.blk\.(\d+)\.ffn_down\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
    (r"^enc\.blk\.(\d+)\.ffn_norm\.", r"encoder.block.\1.layer.1.layer_norm."),
)
QWEN3 = (  # of Qwen3 and Qwen2.5
    (r"^token_embd\.", "embed_tokens."),
    (r"^output_norm\.", "norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.attn_([qkv])\.", r"layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.attn_output\.", r"layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.attn_([qk])_norm\.", r"layers.\1.self_attn.\2_norm."),
    (r"^blk\.(\d+)\.attn_norm\.", r"layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"layers.\1.mlp.\2_proj."),
)


class Entry(NamedTuple):
    """A tensor in the table: its format, its shape as torch has it, and its first byte and number of bytes."""

    format: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class BlockTensors(Tensors):
    """The tensors of a GGUF file: their values, or the blocks in which they are stored."""

    blocks: Callable[[str], Blocks | None] = field(kw_only=True)  # None if a tensor is not in blocks

    def renamed(self, keys: Mapping[str, str]) -> BlockTensors:
        """Return a view with other keys: new -> old."""
        view: Any = super().renamed(keys)
        return replace(view, blocks=lambda new: self.blocks(keys[new]))

    def fill_blocks(self, network: nn.Module, device: torch.device, dtype: torch.dtype) -> set[str]:
        """Replace the linears whose weights are in blocks by ones that keep them so, and compute in dtype.

        Embeddings are dequantised, piece by piece.  Returns the keys of these weights.
        """
        done = set()
        for key in network.state_dict():
            name, _, last = key.rpartition(".")
            linear, blocks = network.get_submodule(name), self.blocks(key)
            if isinstance(linear, nn.Embedding) and blocks is not None:
                linear.weight = nn.Parameter(blocks.dequantize(dtype).to(device), requires_grad=False)
                done.add(key)
            if type(linear) is not nn.Linear or last != "weight" or blocks is None:
                continue
            if blocks.shape == tuple(linear.weight.shape):  # not widened for a control LoRA
                blocks = blocks._replace(data=blocks.data.to(device))
                network.set_submodule(name, BlockLinear(blocks, linear.bias, dtype))
                done.add(key)
        return done


def open_gguf(path: Path) -> BlockTensors:
    """Open a GGUF file.  Raises ValueError, one line, if it is damaged, truncated, or in an unknown format."""
    try:
        with open_file(path) as file:
            metadata, entries = _table(file)
            mapped, is_writable = _mapped(file)
    except NotImplementedError as error:
        raise ValueError(f"{path}: {str(error)[-300:]}") from error
    except (ValueError, struct.error, EOFError, UnicodeDecodeError) as error:
        reason = str(error)[:200]
        raise ValueError(f"{path}: is a truncated or damaged GGUF file ({reason}): download it again") from error
    if "token_embd.weight" in entries and "enc.output_norm.weight" in entries:
        entries = {_renamed(key, T5): entry for key, entry in entries.items()}
    if entries.keys() & {"blk.0.attn_q_norm.weight", "blk.0.attn_k.bias"}:
        entries = {_renamed(key, QWEN3): entry for key, entry in entries.items()}

    def stored(key: str) -> Blocks:
        entry = entries[key]
        return Blocks(mapped[entry.start : entry.start + entry.size], entry.format, entry.shape)

    return BlockTensors(
        path,
        {key: entry.shape for key, entry in entries.items()},
        read=lambda key: (stored(key) if is_writable else stored(key).copied()).dequantize(torch.float32),
        metadata=metadata,
        blocks=lambda key: stored(key) if GGUF_FORMATS[entries[key].format].values > 1 else None,
    )


def _mapped(file: BinaryIO) -> tuple[torch.Tensor, bool]:
    """Map a file, and return whether its values may be written; if it is larger than the memory they may not."""
    try:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8), True
    except OSError:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8), False


def _renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, ours in names:
        key = re.sub(pattern, ours, key)
    return key


def _table(file: BinaryIO) -> tuple[dict[str, str], dict[str, Entry]]:
    """Read the header: the metadata that are texts or numbers, and the tensors.  Raises ValueError if malformed."""
    total = file.seek(0, 2)
    file.seek(len(MAGIC))
    version, num_tensors, num_pairs = _unpack(file, "IQQ")
    if version not in VERSIONS:
        raise ValueError(f"version {version}, expected {' or '.join(map(str, VERSIONS))}")
    if num_tensors > MOST_TENSORS or num_pairs > MOST_PAIRS:
        raise ValueError(f"{num_tensors} tensors, {num_pairs} pairs, expected at most {MOST_TENSORS} and {MOST_PAIRS}")
    pairs, num_items = dict[str, Any](), 0
    for _ in range(num_pairs):
        key = _text(file)
        pairs[key], length = _value(file, _unpack(file, "I")[0], MOST_ITEMS - num_items)
        num_items += length
    table = []
    for _ in range(num_tensors):
        key, (dimensions,) = _text(file), _unpack(file, "I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        sides = _unpack(file, f"{dimensions}Q")[::-1]  # stored reversed
        table.append((key, sides, *_unpack(file, "IQ")))  # its format and offset

    alignment = pairs.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment!r}, expected a power of 2 from 8 on")
    data = -(-file.tell() // alignment) * alignment
    entries: dict[str, Entry] = {}
    for key, sides, kind, offset in table:
        form = next((name for name, form in GGUF_FORMATS.items() if form.id == kind), None)
        if form is None:
            name = NOT_READ.get(kind, kind)
            raise NotImplementedError(
                f"{key} has the format {name}, which is not supported: use a file in {', '.join(GGUF_FORMATS)}"
            )
        if key in entries:
            raise ValueError(f"two tensors {key}")
        entries[key] = _entry(key, form, sides, pairs.get(SHAPE + key), data + offset)
        if offset % alignment or entries[key].start + entries[key].size > total:
            raise ValueError(f"the values of {key} are missing")
    return {key: str(value) for key, value in pairs.items() if not isinstance(value, list)}, entries


def _entry(key: str, form: str, sides: tuple[int, ...], original: Any, start: int) -> Entry:
    """Return a tensor's entry.  Raises ValueError for a shape that its format cannot hold."""
    values = GGUF_FORMATS[form].values
    if not all(0 < side <= 2**31 for side in sides) or (sides and sides[-1] % values):
        raise ValueError(f"{key} has the shape {sides}, in blocks of {values}")
    count = math.prod(sides)
    shape = sides
    if original is not None:
        shape = tuple(original) if isinstance(original, list) and len(original) <= MOST_DIMENSIONS else (0,)
        if not all(isinstance(side, int) and 0 < side <= count for side in shape) or math.prod(shape) != count:
            raise ValueError(f"{key} has {count} values, which its original shape {original} does not fit")
    return Entry(form, shape, start, count // values * GGUF_FORMATS[form].bytes)


def _unpack(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > MOST_TEXT or file.tell() > MOST_HEADER:
        raise ValueError(f"a text of {length} bytes in a header of more than {file.tell()}")
    content = file.read(length)
    if len(content) < length:
        raise ValueError("its header ends early")
    return content.decode("utf-8")


def _value(file: BinaryIO, kind: int, most_items: int) -> tuple[Any, int]:
    """Read a value of the metadata, and return it with its number of items, at most so many.

    It is a number, a text, or a list of these.  Of lists only numbers are kept, as many as a shape may have.
    """
    if kind == TEXT:
        return _text(file), 1
    if kind == ARRAY:
        inner, length = _unpack(file, "IQ")
        if length > most_items or (inner != TEXT and inner not in NUMBERS):
            raise ValueError(f"an array of {length} values of type {inner}, expected at most {MOST_ITEMS} in all")
        if inner == TEXT:
            for _ in range(length):
                _text(file)
            return [], length
        values = _unpack(file, f"{length}{NUMBERS[inner]}")
        return list(values[: MOST_DIMENSIONS + 1]), length
    if kind not in NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    return _unpack(file, NUMBERS[kind])[0], 1
