"""Autoencoders of Wan 2.1, with its makers' names or diffusers' -> those of latent diffusion, for one frame.

Both count the blocks of several levels in one row: Wan's files everywhere, diffusers' in the encoder.  Kernels in time
become their last slice, fused queries, keys and values are divided, and layers between frames are left out.
"""

import re

from torch import Tensor

from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import MOST_BLOCKS

NAMES = (  # all applied, in this order
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"coder\.conv1\.", "coder.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.(middle\.0|mid_block\.resnets\.0)\.", ".mid.block_1."),
    (r"\.(middle\.1|mid_block\.attentions\.0)\.", ".mid.attn_1."),
    (r"\.(middle\.2|mid_block\.resnets\.1)\.", ".mid.block_2."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.(conv_)?shortcut\.", ".nin_shortcut."),
    (r"\.attn_1\.proj\.", ".attn_1.proj_out."),
)
PROBE = re.compile(r"^(.*)decoder\.(?:middle\.0\.residual\.0|mid_block\.resnets\.0\.norm1)\.gamma$")
ROW = re.compile(r"(encoder|decoder)\.(?:downsamples|down_blocks|upsamples)\.(\d+)\.(resample\.1\.)?")
LEVEL = re.compile(r"decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)\.|upsamplers\.0\.resample\.1\.)")


def to_images(tensors: Tensors) -> Tensors:
    """Return a view of a file with an autoencoder for images."""
    [before] = {match[1] for key in tensors if (match := PROBE.match(key))}
    names = {key: key.removeprefix(before) for key in tensors if key.startswith(before)}
    rows = [match for name in names.values() if (match := ROW.match(name))]
    levels = [int(match[1]) for name in names.values() if (match := LEVEL.match(name))]

    def from_row(match: re.Match[str]) -> str:
        """Return the level and the block of an entry of a row, in which levels end with a resampler."""
        row, index = match[1], int(match[2])
        size = 1 + min((int(end[2]) for end in rows if end[1] == row and end[3]), default=MOST_BLOCKS)
        level, block = divmod(index, size)
        last = max(int(entry[2]) for entry in rows if entry[1] == row) // size
        level, way = (level, "down") if row == "encoder" else (last - level, "up")  # 0 is the highest resolution
        return f"{row}.{way}.{level}." + (f"{way}sample.conv." if match[3] else f"block.{block}.")

    def from_level(match: re.Match[str]) -> str:
        return f"decoder.up.{max(levels) - int(match[1])}." + (f"block.{match[2]}." if match[2] else "upsample.conv.")

    stored: dict[str, tuple[str, int | None]] = {}  # our keys -> the file's, and which third of the tensor, if one is
    for key, name in names.items():
        name = LEVEL.sub(from_level, ROW.sub(from_row, name))
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        if ".to_qkv." in name:
            stored |= {before + name.replace("to_qkv", part): (key, third) for third, part in enumerate("qkv")}
        elif ".time_conv." not in name:
            stored[before + name] = key, None
    stored |= {key: (key, None) for key in tensors if key not in names}

    def shape_of(key: str, third: int | None) -> tuple[int, ...]:
        shape = tensors.shapes[key]
        if key not in names:  # of another network in the file
            return shape
        if key.endswith(".gamma"):
            return shape[:1]
        shape = shape if third is None else (*(side // 3 for side in shape[:1]), *shape[1:])
        return (*shape[:2], *shape[3:]) if len(shape) == 5 else shape

    def read(ours: str) -> Tensor:
        key, third = stored[ours]
        value = tensors.read(key)
        value = value if third is None else value.chunk(3)[third]
        return (value[:, :, -1] if value.ndim == 5 and key in names else value).reshape(shape_of(key, third))

    return Tensors(tensors.path, {ours: shape_of(*where) for ours, where in stored.items()}, read, tensors.metadata)
