"""Names of modules in files of diffusers and transformers, from our names, which are the original checkpoints'.

diffusers_layout.py reads whole files by them, adapters/lora.py the files of LoRAs.  A transformer's spec has them:
`other_names`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# ---- UNets ----------------------------------------------------------------------------------------------------------

# Layers of a residual block, and layers outside the blocks: the original's name (ours) -> diffusers'.
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


def unet_blocks(num_res_blocks: Sequence[int], transformer_depth: Sequence[int], middle_depth: int) -> dict[str, str]:
    """Map block names of a UNet with these spec values: "input_blocks.1.0" -> diffusers' "down_blocks.0.resnets.0"."""
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
    """Return diffusers' name of a UNet module.  `blocks` is the result of unet_blocks."""
    if module in OUTSIDE:
        return OUTSIDE[module]
    parts = module.split(".")
    size = 2 if parts[0] == "middle_block" else 3
    block, layer = ".".join(parts[:size]), ".".join(parts[size:])
    return f"{blocks.get(block, block)}.{RESNET.get(layer, layer)}"


# ---- text encoders --------------------------------------------------------------------------------------------------

# OpenCLIP's module names -> transformers'.
TRANSFORMERS = {
    "transformer.resblocks": "encoder.layers",
    ".attn.": ".self_attn.",
    ".c_fc": ".fc1",
    ".c_proj": ".fc2",
    ".ln_": ".layer_norm",
    "ln_final": "final_layer_norm",
    "token_embedding": "embeddings.token_embedding",
}


def transformers_name(module: str) -> str:
    """Return transformers' name of a module of OpenCLIP's text encoder."""
    for ours, theirs in TRANSFORMERS.items():
        module = module.replace(ours, theirs)
    return module


# ---- transformers ---------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<=\.)\d{1,4}(?=\.|$)")


class Renamed(NamedTuple):
    """Modules of diffusers whose rows form one module here, in this order, and whether their halves are swapped."""

    names: tuple[str, ...]
    swapped: bool


def row_of(name: str, table: Mapping[str, T]) -> tuple[T | None, str]:
    """Return a table's entry for a name, as it is or with * for its first number, and that number."""
    if name in table:
        return table[name], ""
    number = NUMBER.search(name)
    return (None, "") if number is None else (table.get(NUMBER.sub("*", name, count=1)), number[0])


def are_swapped(names: Collection[str], others: Mapping[str, str]) -> set[str]:
    """Return the modules of a network whose halves are swapped in diffusers: in blocks, only the last block's."""
    last: dict[str, tuple[int, str]] = {}
    for name in names:
        theirs, number = row_of(name, others)
        if theirs is not None and theirs.startswith("~"):
            last[theirs] = max(last.get(theirs, (-1, "")), (int(number or 0), name))
    return {name for _, name in last.values()}


def renamed(modules: Collection[str], others: Mapping[str, str]) -> dict[str, Renamed]:
    """Return diffusers' modules for each of a network's modules that has another name there, or is several."""
    swapped, new_names = are_swapped(modules, others), {}
    for module in modules:
        for last in ("", ".scale"):
            theirs, number = row_of(module + last, others)
            if theirs is not None:
                names = theirs.removeprefix("~").removesuffix(".weight" if last else "").replace("*", number).split()
                new_names[module] = Renamed(tuple(names), module in swapped)
    return new_names
