"""diffusers' names of the modules of FLUX.1, Stable Diffusion 3 and Z-Image, which divides what others fuse.

Their files and LoRAs hold queries, keys, values and the single blocks' MLP apart: each is some rows of a module here.
In the last modulations diffusers has the scale before the shift: there the halves are swapped.  Z-Image's own files
are those of diffusers; its names here are ComfyUI's.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ldm_lite.core.layers import Shapes


class Parts(NamedTuple):
    """diffusers' modules whose rows make one module here, in this order; their halves swapped, or not."""

    names: tuple[str, ...]
    swapped: bool = False


QKV, ADDED = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
EMBEDDERS = {  # of the time, the pooled text and the guidance scale, ours -> theirs
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
    "t_embedder": "timestep_embedder",
    "y_embedder": "text_embedder",
}
OUTSIDE = {
    "final_layer.linear": Parts(("proj_out",)),
    "final_layer.adaLN_modulation.1": Parts(("norm_out.linear",), swapped=True),
}
DOUBLE = {  # a double block of FLUX.1
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": QKV,
    "txt_attn.qkv": ADDED,
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
SINGLE = {  # a single block of FLUX.1
    "modulation.lin": ("norm.linear",),
    "linear1": (*QKV, "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}
JOINT = {  # a block of Stable Diffusion 3
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "x_block.attn.qkv": QKV,
    "context_block.attn.qkv": ADDED,
    "x_block.attn.ln_q": ("attn.norm_q",),
    "x_block.attn.ln_k": ("attn.norm_k",),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "x_block.attn.proj": ("attn.to_out.0",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.ln_q": ("attn2.norm_q",),
    "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
Z_IMAGE = {  # what has another name in a block of Z-Image
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.out": ("attention.to_out.0",),
    "attention.q_norm": ("attention.norm_q",),
    "attention.k_norm": ("attention.norm_k",),
}
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")


def flux_modules(depth: int, single_depth: int) -> dict[str, Parts]:
    """Return the parts of each module of FLUX.1 with this many blocks."""
    found = {"img_in": Parts(("x_embedder",)), "txt_in": Parts(("context_embedder",)), **OUTSIDE}
    for ours in ("time_in", "vector_in", "guidance_in"):
        for layer, number in (("in_layer", 1), ("out_layer", 2)):
            found[f"{ours}.{layer}"] = Parts((f"time_text_embed.{EMBEDDERS[ours]}.linear_{number}",))
    for ours, theirs, count, table in (
        ("double_blocks", "transformer_blocks", depth, DOUBLE),
        ("single_blocks", "single_transformer_blocks", single_depth, SINGLE),
    ):
        found |= _blocks(ours, theirs, count, table)
    return found


def sd3_modules(depth: int) -> dict[str, Parts]:
    """Return the parts of each module of a Stable Diffusion 3 with this many blocks."""
    found = {"x_embedder.proj": Parts(("pos_embed.proj",)), "context_embedder": Parts(("context_embedder",)), **OUTSIDE}
    for ours in ("t_embedder", "y_embedder"):
        for layer, number in (("mlp.0", 1), ("mlp.2", 2)):
            found[f"{ours}.{layer}"] = Parts((f"time_text_embed.{EMBEDDERS[ours]}.linear_{number}",))
    found |= _blocks("joint_blocks", "transformer_blocks", depth, JOINT)
    last = f"joint_blocks.{depth - 1}.context_block.adaLN_modulation.1"
    return found | {last: found[last]._replace(swapped=True)}


def z_image_modules(depth: int, refiner_depth: int) -> dict[str, Parts]:
    """Return the parts of each module of Z-Image with this many blocks that has another name, or several."""
    found = {"x_embedder": Parts(("all_x_embedder.2-1",))}
    for ours in ("final_layer.linear", "final_layer.adaLN_modulation.1"):
        found[ours] = Parts((ours.replace("final_layer", "all_final_layer.2-1"),))
    for name, number in (("layers", depth), ("noise_refiner", refiner_depth), ("context_refiner", refiner_depth)):
        found |= _blocks(name, name, number, Z_IMAGE)
    return found


def _blocks(ours: str, theirs: str, count: int, table: Mapping[str, tuple[str, ...]]) -> dict[str, Parts]:
    return {
        f"{ours}.{i}.{name}": Parts(tuple(f"{theirs}.{i}.{part}" for part in parts))
        for i in range(count)
        for name, parts in table.items()
    }


def modules_of(keys: Collection[str]) -> dict[str, Parts] | None:
    """Return the parts of each module of a file in the format of diffusers; None if it is of another network."""

    def count(name: str) -> int:
        found = [int(match[1]) for key in keys if (match := re.match(rf"{name}\.(\d{{1,4}})\.", key))]
        return 1 + max(found, default=-1)

    if "layers.0.attention.to_q.weight" in keys and "cap_pad_token" in keys:
        return z_image_modules(count("layers"), count("noise_refiner"))
    if "transformer_blocks.0.attn.add_q_proj.weight" not in keys:
        return None
    if "pos_embed.proj.weight" in keys:
        return sd3_modules(count("transformer_blocks"))
    if "single_transformer_blocks.0.proj_mlp.weight" in keys:
        return flux_modules(count("transformer_blocks"), count("single_transformer_blocks"))
    return None


def stored_keys(shapes: Shapes) -> dict[str, tuple[tuple[str, ...], bool]] | None:
    """Map the keys of the originals to those of a file of diffusers, and whether halves are swapped.

    None if the file is of another network.  Unknown keys keep their names.
    """
    own = {before: {key.removeprefix(before) for key in shapes if key.startswith(before)} for before in PREFIXES}
    known = ((before, modules) for before, keys in own.items() if (modules := modules_of(keys)) is not None)
    before, modules = next(known, ("", None))
    if modules is None:
        return None
    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    for ours, (theirs, swapped) in modules.items():
        for last in ("weight", "bias"):
            keys = tuple(f"{before}{name}.{last}" for name in theirs if f"{name}.{last}" in own[before])
            if len(keys) == len(theirs):
                scale = ours.endswith(("query_norm", "key_norm"))
                found[f"{before}{ours}.{'scale' if scale else last}"] = (keys, swapped)
    if "pos_embed.pos_embed" in shapes:
        found["pos_embed"] = (("pos_embed.pos_embed",), False)
    used = {key for keys, _ in found.values() for key in keys}
    return found | {key: ((key,), False) for key in shapes if key not in used}
