"""Names of modules in files of diffusers and transformers, from our names, which are the original checkpoints'.

diffusers_layout.py reads whole files by them, adapters/lora.py the files of LoRAs.  diffusers divides what FLUX.1,
Stable Diffusion 3 and Z-Image fuse: queries, keys, values and the single blocks' MLP are some rows of a module here.
In the last modulations diffusers has the scale before the shift: there the halves are swapped.  Z-Image's own files are
those of diffusers; its names here are ComfyUI's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
LAST_LAYER = {
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
FLUX2_DOUBLE = DOUBLE | {  # a double block of FLUX.2, whose modulations are those of all blocks
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
FLUX2_SINGLE = SINGLE | {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}
APPROXIMATOR = "distilled_guidance_layer"  # of Chroma
LAYERS = {"in_layer": ("linear_1",), "out_layer": ("linear_2",)}
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


def flux_modules(depth: int, single_depth: int, approximator_depth: int = 0) -> dict[str, Parts]:
    """Return the parts of each module of FLUX.1 with this many blocks, or of Chroma with an approximator."""
    return {
        "img_in": Parts(("x_embedder",)),
        "txt_in": Parts(("context_embedder",)),
        **LAST_LAYER,
        **_embedders(("time_in", "vector_in", "guidance_in"), "in_layer", "out_layer"),
        **_blocks("double_blocks", "transformer_blocks", depth, DOUBLE),
        **_blocks("single_blocks", "single_transformer_blocks", single_depth, SINGLE),
        **_blocks(f"{APPROXIMATOR}.layers", f"{APPROXIMATOR}.layers", approximator_depth, LAYERS),
        **{name: Parts((name,)) for i in range(approximator_depth) for name in (f"{APPROXIMATOR}.norms.{i}",)},
    }


def flux2_modules(depth: int, single_depth: int) -> dict[str, Parts]:
    """Return the parts of each module of FLUX.2 with this many blocks."""
    shared = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    return {
        "img_in": Parts(("x_embedder",)),
        "txt_in": Parts(("context_embedder",)),
        **LAST_LAYER,
        **_embedders(("time_in", "guidance_in"), "in_layer", "out_layer", within="time_guidance_embed"),
        **{f"{name}.lin": Parts((f"{name}.linear",)) for name in shared},
        **_blocks("double_blocks", "transformer_blocks", depth, FLUX2_DOUBLE),
        **_blocks("single_blocks", "single_transformer_blocks", single_depth, FLUX2_SINGLE),
    }


def sd3_modules(depth: int) -> dict[str, Parts]:
    """Return the parts of each module of a Stable Diffusion 3 with this many blocks."""
    modules = {
        "x_embedder.proj": Parts(("pos_embed.proj",)),
        "context_embedder": Parts(("context_embedder",)),
        **LAST_LAYER,
        **_embedders(("t_embedder", "y_embedder"), "mlp.0", "mlp.2"),
        **_blocks("joint_blocks", "transformer_blocks", depth, JOINT),
    }
    last = f"joint_blocks.{depth - 1}.context_block.adaLN_modulation.1"
    return modules | {last: modules[last]._replace(swapped=True)}


def z_image_modules(depth: int, refiner_depth: int) -> dict[str, Parts]:
    """Return the parts of each module of Z-Image with this many blocks that has another name, or several."""
    modules = {
        "x_embedder": Parts(("all_x_embedder.2-1",)),
        "final_layer.linear": Parts(("all_final_layer.2-1.linear",)),
        "final_layer.adaLN_modulation.1": Parts(("all_final_layer.2-1.adaLN_modulation.1",)),
    }
    for name, number in (("layers", depth), ("noise_refiner", refiner_depth), ("context_refiner", refiner_depth)):
        modules |= _blocks(name, name, number, Z_IMAGE)
    return modules


def _embedders(names: Sequence[str], *layers: str, within: str = "time_text_embed") -> dict[str, Parts]:
    """Return the parts of the two layers of each embedder."""
    return {
        f"{ours}.{layer}": Parts((f"{within}.{EMBEDDERS[ours]}.linear_{number}",))
        for ours in names
        for number, layer in enumerate(layers, 1)
    }


def _blocks(ours: str, theirs: str, count: int, table: Mapping[str, tuple[str, ...]]) -> dict[str, Parts]:
    return {
        f"{ours}.{i}.{name}": Parts(tuple(f"{theirs}.{i}.{part}" for part in parts))
        for i in range(count)
        for name, parts in table.items()
    }
