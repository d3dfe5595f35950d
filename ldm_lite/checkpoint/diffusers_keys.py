"""The names of diffusers and transformers for the networks of the original; files in their format, read by rule.

renamed() says of what the tensors of the original's layout are made in such a file: of one of another name, which may
be of another shape (1x1 convolutions written as linears), or of several (OpenCLIP's in_proj).
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ldm_lite.models.shapes import Shapes

# ---- UNets ----------------------------------------------------------------------------------------------------------

# Layers of a residual block, and those outside of the blocks: ours (the original's) -> diffusers'.
RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
    "op": "conv",  # of a downsampler
}
OUTSIDE = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "cond_proj": "time_embedding.cond_proj",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
# The same of classes, and of vectors where there is but one kind (unCLIP).
CLASSES = {
    "label_emb": "class_embedding",
    "label_emb.0.0": "class_embedding.linear_1",
    "label_emb.0.2": "class_embedding.linear_2",
}


def unet_blocks(num_res_blocks: Sequence[int], transformer_depth: Sequence[int], middle_depth: int) -> dict[str, str]:
    """The blocks of a UNet whose spec has these numbers: "input_blocks.1.0" -> diffusers' "down_blocks.0.resnets.0"."""
    table, n, last = {}, 1, len(num_res_blocks) - 1
    for level, count in enumerate(num_res_blocks):
        for i in range(count):
            table[f"input_blocks.{n}.0"] = f"down_blocks.{level}.resnets.{i}"
            table[f"input_blocks.{n}.1"] = f"down_blocks.{level}.attentions.{i}"
            n += 1
        if level != last:
            table[f"input_blocks.{n}.0"] = f"down_blocks.{level}.downsamplers.0"
            n += 1
    middle = ["resnets.0", "attentions.0", "resnets.1"] if middle_depth else ["resnets.0", "resnets.1"]
    table |= {f"middle_block.{i}": f"mid_block.{name}" for i, name in enumerate(middle)}
    n = 0
    for up, level in enumerate(range(last, -1, -1)):
        for i in range(num_res_blocks[level] + 1):
            kinds = [f"resnets.{i}", *[f"attentions.{i}"] * (transformer_depth[level] > 0)]
            kinds += ["upsamplers.0"] * (i == num_res_blocks[level])
            table |= {f"output_blocks.{n}.{j}": f"up_blocks.{up}.{kind}" for j, kind in enumerate(kinds)}
            n += 1
    return table


def unet_name(module: str, blocks: Mapping[str, str]) -> str:
    """A UNet's module by its name here -> by diffusers' name for the same; blocks is unet_blocks(...)."""
    if module in OUTSIDE:
        return OUTSIDE[module]
    parts = module.split(".")
    size = 2 if parts[0] == "middle_block" else 3
    block, layer = ".".join(parts[:size]), ".".join(parts[size:])
    return f"{blocks.get(block, block)}.{RESNET.get(layer, layer)}"


def _control_modules(counts: Mapping[str, int]) -> dict[str, str]:
    """What a ControlNet has beside the UNet's way down, diffusers' -> the original's; counts are _unet_original's."""
    inner = [f"blocks.{i}" for i in range(counts.get("controlnet_cond_embedding.blocks", 0))]
    table = {  # the original counts the activations in between
        f"controlnet_cond_embedding.{name}": f"input_hint_block.{2 * i}"
        for i, name in enumerate(["conv_in", *inner, "conv_out"])
    }
    table |= {
        f"controlnet_down_blocks.{i}": f"zero_convs.{i}.0" for i in range(counts.get("controlnet_down_blocks", 0))
    }
    return table | {"controlnet_mid_block": "middle_block_out.0"}


def _unet_original(shapes: Shapes) -> Callable[[str], str]:
    """-> a function: a key of a UNet of these shapes, or a ControlNet, by diffusers' name -> by the original's."""
    counts: dict[str, int] = {}  # how many there are of "down_blocks", "down_blocks.0.resnets", ...
    for key in shapes:
        for found in re.finditer(r"\.(\d+)(?=\.)", key):
            before = key[: found.start()]
            counts[before] = max(counts.get(before, 0), int(found[1]) + 1)
    levels = [f"down_blocks.{level}" for level in range(counts.get("down_blocks", 0))]
    blocks = unet_blocks(
        [counts.get(f"{level}.resnets", 0) for level in levels],
        [counts.get(f"{level}.attentions", 0) for level in levels],
        counts.get("mid_block.attentions", 0),
    )
    original_block = {theirs: ours for ours, theirs in blocks.items()}
    outside = {theirs: ours for ours, theirs in (*OUTSIDE.items(), *CLASSES.items())} | _control_modules(counts)
    resnet = {theirs: ours for ours, theirs in RESNET.items()}

    def original(key: str) -> str:
        module, _, last = key.rpartition(".")
        found = re.match(r"((?:down_blocks|up_blocks)\.\d+|mid_block)\.(\w+)\.\d+(?=\.)", module)
        if found is None:
            return f"{outside[module]}.{last}" if module in outside else key
        layer = module[found.end() + 1 :]
        layer = layer if found[2] in ("attentions", "upsamplers") else resnet.get(layer, layer)
        # what no table has keeps its name, so that it is found to be unknown
        return f"{original_block[found[0]]}.{layer}.{last}" if found[0] in original_block else key

    return original


def _adapter_original(shapes: Shapes) -> Callable[[str], str]:
    """-> a function: a key of a T2I-Adapter of these shapes by diffusers' name -> by the original's.

    The original counts the residual blocks of a full one through all levels.
    """
    light = "adapter.body.0.out_conv.weight" in shapes
    block = re.compile(r"^adapter\.body\.(\d+)\.(?:resnets\.(\d+)\.)?")
    num = 1 + max(int(found[2] or 0) for key in shapes if (found := block.match(key)))

    def name(found: re.Match[str]) -> str:
        level, inner = int(found[1]), found[2]
        if light:
            return f"adapter.body.{level}." + ("" if inner is None else f"body.{inner}.")
        return f"adapter.body.{level * num + int(inner or 0)}."

    return lambda key: block.sub(name, key)


# ---- autoencoders, text encoders ------------------------------------------------------------------------------------

# Patterns of diffusers' names -> the original's, all of them tried in this order.
VAE = (
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"down_blocks\.(\d+)\.resnets", r"down.\1.block"),
    (r"down_blocks\.(\d+)\.attentions", r"down.\1.attn"),
    (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d+)\.resnets", r"up.\1.block"),
    (r"up_blocks\.(\d+)\.attentions", r"up.\1.attn"),
    (r"up_blocks\.(\d+)\.upsamplers\.0", r"up.\1.upsample"),
    (r"(\.attn(?:_1|\.\d+))\.group_norm\.", r"\1.norm."),
    (r"(\.attn(?:_1|\.\d+))\.(?:to_([qkv])|(q)uery|(k)ey|(v)alue)\.", r"\1.\2\3\4\5."),
    (r"(\.attn(?:_1|\.\d+))\.(?:to_out\.0|proj_attn)\.", r"\1.proj_out."),
)
# OpenCLIP's names -> transformers', of modules; and patterns for what else of its keys differs.
TRANSFORMERS = {
    "transformer.resblocks": "encoder.layers",
    ".attn.": ".self_attn.",
    ".c_fc": ".fc1",
    ".c_proj": ".fc2",
    ".ln_": ".layer_norm",
    "ln_final": "final_layer_norm",
    "token_embedding": "embeddings.token_embedding",
}
OPEN_CLIP = (
    (r"^text_model\.", ""),
    *((re.escape(theirs), ours) for ours, theirs in TRANSFORMERS.items()),
    (r"\.attn\.[qkv]_proj\.", ".attn.in_proj_"),
    (r"^embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_projection\.weight$", "text_projection"),
)
QKV = "qkv"  # the order of in_proj's rows


def _vae_original(shapes: Shapes) -> Callable[[str], str]:
    """-> a function: a key of an autoencoder of these shapes by diffusers' name -> by the original's."""
    levels = [int(found[1]) for key in shapes if (found := re.match(r"decoder\.up_blocks\.(\d+)", key))]

    def original(key: str) -> str:
        # The original counts the decoder's levels from the highest resolution too.
        key = re.sub(r"(?<=^decoder\.up_blocks\.)\d+", lambda level: str(max(levels) - int(level[0])), key)
        return _substituted(VAE, key)

    return original


def _substituted(patterns: Sequence[tuple[str, str]], key: str) -> str:
    for pattern, ours in patterns:
        key = re.sub(pattern, ours, key)
    return key


def tiny_names(stored: Mapping[str, str]) -> Mapping[str, str]:
    """A TAESD file's keys as one network of two: the original's are numbers alone, a file each, diffusers' say layers.

    Those of any other file stay as they are.
    """
    if "1.weight" in stored and "19.weight" in stored:
        return {f"decoder.{key}": long for key, long in stored.items()}
    if "0.weight" in stored and "1.conv.0.weight" in stored:
        return {f"encoder.{key}": long for key, long in stored.items()}
    if "decoder.layers.0.weight" in stored or "encoder.layers.0.weight" in stored:
        # diffusers' decoder begins after the clamp, which the original counts
        pattern = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
        return {
            pattern.sub(lambda m: f"{m[1]}.{int(m[2]) + (m[1] == 'decoder')}.", key): long
            for key, long in stored.items()
        }
    return stored


def transformers_name(module: str) -> str:
    """A module of OpenCLIP's text encoder by its name here -> by transformers' name for the same."""
    for ours, theirs in TRANSFORMERS.items():
        module = module.replace(ours, theirs)
    return module


# ---- whole networks -------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Of what a tensor is made: tensors of a file, one below the other, turned if so asked, as `shape`."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    turned: bool = False

    def tensor(self, read: Callable[[str], Tensor], release: Callable[[Tensor], None]) -> Tensor:
        """The tensor, by a way to read the file's; those that were copied into it are released."""
        parts = [read(key) for key in self.keys]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        for part in parts:
            if part is not whole:
                release(part)
        return (whole.T if self.turned else whole).reshape(self.shape)


WIDTH_OF_CLIP_L = 768


def renamed(shapes: Shapes, open_clip: bool | None = None) -> dict[str, Source] | None:
    """Of what the tensors of a network are made, by the original's keys, in a file in the format of diffusers.

    None if its keys are not diffusers', or transformers' for what ldm_lite has as OpenCLIP: open_clip says whether a
    text encoder is that; None: if it is wider than CLIP-L.  What no rule knows keeps its name.
    """
    norm = next(
        (key for key in ("text_model.final_layer_norm.weight", "final_layer_norm.weight") if key in shapes), None
    )
    original: Callable[[str], str]
    if "time_embedding.linear_1.weight" in shapes:
        original = _unet_original(shapes)
    elif "adapter.body.0.resnets.0.block1.weight" in shapes:
        original = _adapter_original(shapes)
    elif any(re.match(r"(encoder|decoder)\.mid_block\.resnets\.0\.", key) for key in shapes):
        original = _vae_original(shapes)
    elif norm is not None and (shapes[norm][0] > WIDTH_OF_CLIP_L if open_clip is None else open_clip):
        original = functools.partial(_substituted, OPEN_CLIP)
    else:
        return None
    grouped: dict[str, list[str]] = {}
    for key in sorted(shapes, key=_in_order):
        grouped.setdefault(original(key), []).append(key)
    return {name: _source(name, keys, shapes) for name, keys in grouped.items()}


def _in_order(key: str) -> int:
    """Queries before keys before values."""
    found = re.search(r"\.([qkv])_proj\.", key)
    return 0 if found is None else QKV.index(found[1])


def _source(name: str, keys: Sequence[str], shapes: Shapes) -> Source:
    shape = shapes[keys[0]]
    if len(keys) > 1:
        shape = (sum(shapes[key][0] for key in keys), *shape[1:])
    if re.search(r"\.attn(_1|\.\d+)\.(q|k|v|proj_out)\.weight$", name) and len(shape) == 2:
        shape = (*shape, 1, 1)
    return Source(tuple(keys), shape, turned=name == "text_projection")
