"""Every trainer's LoRA files for every family: its own names of keys, random numbers, and the weights that it computes.

DIALECTS says how each writer names the layers of each family, from the writers' repositories (kohya-ss/sd-scripts and
musubi-tuner, Nerogar/OneTrainer, ostris/ai-toolkit, bghira/SimpleTuner, huggingface/diffusers and peft, ComfyUI,
KohakuBlueleaf/LyCORIS).  The formulas of what the files mean are written out here, in float64.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toy
import toy_chroma
import toy_flow
import toy_flux2
import toy_qwen_image
import toy_z_image
from random_checkpoint import SMALL
from random_checkpoint import small as miniature
from safetensors.torch import save_file
from torch import Tensor, nn

import ldm_lite
from ldm_lite.adapters.lora import merge_lora

# ---- layers ---------------------------------------------------------------------------------------------------------

# The original's name of a layer, which is that of its parameter here -> diffusers' and transformers' names: one, or
# several that divide its rows.  "~" before a name: its halves are swapped.
UNET = {
    "middle_block.1.transformer_blocks.0.attn2.to_k": "mid_block.attentions.0.transformer_blocks.0.attn2.to_k",
    "middle_block.1.transformer_blocks.0.attn1.to_out.0": "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "middle_block.1.transformer_blocks.0.ff.net.0.proj": "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj",
    "middle_block.1.proj_in": "mid_block.attentions.0.proj_in",  # a convolution in Stable Diffusion 1
    "input_blocks.1.0.in_layers.2": "down_blocks.0.resnets.0.conv1",
    "input_blocks.2.0.op": "down_blocks.0.downsamplers.0.conv",
    "output_blocks.0.0.skip_connection": "up_blocks.0.resnets.0.conv_shortcut",
    "output_blocks.0.0.emb_layers.1": "up_blocks.0.resnets.0.time_emb_proj",
}
FLUX_BLOCKS = {
    "double_blocks.1.img_attn.qkv": [f"transformer_blocks.1.attn.to_{part}" for part in "qkv"],
    "double_blocks.1.txt_attn.qkv": [f"transformer_blocks.1.attn.add_{part}_proj" for part in "qkv"],
    "double_blocks.0.img_attn.proj": "transformer_blocks.0.attn.to_out.0",
    "double_blocks.0.txt_attn.proj": "transformer_blocks.0.attn.to_add_out",
}
FLUX_SINGLE = {
    "single_blocks.1.linear1": [
        *(f"single_transformer_blocks.1.attn.to_{part}" for part in "qkv"),
        "single_transformer_blocks.1.proj_mlp",
    ],
    "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    "double_blocks.1.txt_mlp.2": "transformer_blocks.1.ff_context.net.2",
    "img_in": "x_embedder",
}
QWEN_IMAGE = (
    "transformer_blocks.1.attn.to_q",
    "transformer_blocks.1.attn.add_k_proj",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.attn.to_add_out",
    "transformer_blocks.1.img_mlp.net.0.proj",
    "transformer_blocks.0.txt_mlp.net.2",
    "transformer_blocks.1.img_mod.1",
    "transformer_blocks.0.txt_mod.1",
    "img_in",
    "proj_out",
    "norm_out.linear",
    "time_text_embed.timestep_embedder.linear_1",
)
LAYERS: dict[str, dict[str, str | list[str]]] = {
    "sd1": {**UNET},
    "sd2": {**UNET},
    "sdxl": {**UNET, "label_emb.0.0": "add_embedding.linear_1"},
    "sd3": {
        "joint_blocks.1.x_block.attn.qkv": [f"transformer_blocks.1.attn.to_{part}" for part in "qkv"],
        "joint_blocks.1.context_block.attn.qkv": [f"transformer_blocks.1.attn.add_{part}_proj" for part in "qkv"],
        "joint_blocks.0.x_block.attn2.qkv": [f"transformer_blocks.0.attn2.to_{part}" for part in "qkv"],
        "joint_blocks.0.x_block.attn.proj": "transformer_blocks.0.attn.to_out.0",
        "joint_blocks.0.context_block.mlp.fc1": "transformer_blocks.0.ff_context.net.0.proj",
        "joint_blocks.0.x_block.adaLN_modulation.1": "transformer_blocks.0.norm1.linear",
        "joint_blocks.2.context_block.adaLN_modulation.1": "~transformer_blocks.2.norm1_context.linear",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "~norm_out.linear",
    },
    "flux": {
        **FLUX_BLOCKS,
        **FLUX_SINGLE,
        "double_blocks.0.txt_mod.lin": "transformer_blocks.0.norm1_context.linear",
        "single_blocks.0.modulation.lin": "single_transformer_blocks.0.norm.linear",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "final_layer.adaLN_modulation.1": "~norm_out.linear",
    },
    "flux2": {
        **FLUX_BLOCKS,
        "single_blocks.1.linear1": "single_transformer_blocks.1.attn.to_qkv_mlp_proj",
        "single_blocks.1.linear2": "single_transformer_blocks.1.attn.to_out",
        "double_blocks.1.img_mlp.0": "transformer_blocks.1.ff.linear_in",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "~norm_out.linear",
    },
    "z_image": {
        "layers.1.attention.qkv": [f"layers.1.attention.to_{part}" for part in "qkv"],
        "noise_refiner.0.attention.out": "noise_refiner.0.attention.to_out.0",
        "context_refiner.0.feed_forward.w2": "context_refiner.0.feed_forward.w2",
        "layers.0.adaLN_modulation.0": "layers.0.adaLN_modulation.0",
        "cap_embedder.1": "cap_embedder.1",
        "final_layer.linear": "all_final_layer.2-1.linear",
    },
    "chroma": {
        **FLUX_BLOCKS,
        **FLUX_SINGLE,
        "distilled_guidance_layer.layers.1.in_layer": "distilled_guidance_layer.layers.1.linear_1",
    },
    "qwen_image": {name: name for name in QWEN_IMAGE},  # whose makers' names are those of diffusers
}
TEXT: dict[str, dict[str, str | list[str]]] = {  # by the class of the encoder
    "CLIPTextModel": {
        "encoder.layers.1.self_attn.v_proj": "text_model.encoder.layers.1.self_attn.v_proj",
        "encoder.layers.0.mlp.fc2": "text_model.encoder.layers.0.mlp.fc2",
    },
    "OpenCLIPTextEncoder": {
        "transformer.resblocks.0.attn.in_proj_weight": [
            f"text_model.encoder.layers.0.self_attn.{part}_proj" for part in "qkv"
        ],
        "transformer.resblocks.1.mlp.c_fc": "text_model.encoder.layers.1.mlp.fc1",
    },
    "T5Encoder": {
        "encoder.block.1.layer.0.SelfAttention.k": "encoder.block.1.layer.0.SelfAttention.k",
        "encoder.block.0.layer.1.DenseReluDense.wi_1": "encoder.block.0.layer.1.DenseReluDense.wi_1",
    },
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "sd1": lambda: SMALL,
    "sd2": lambda: miniature("sd2"),
    "sdxl": lambda: miniature("sdxl_base"),
    "sd3": lambda: toy_flow.small("sd35_medium"),
    "flux": lambda: toy_flow.small("flux_dev"),
    "flux2": toy_flux2.small,
    "z_image": lambda: replace(toy_z_image.small(), unet=replace(toy_z_image.SPEC, mlp_width=176)),
    "chroma": toy_chroma.small,
    "qwen_image": toy_qwen_image.small,
}
READ_ALONE = ("Qwen3Spec", "Qwen25Spec")  # language models, of which nobody trains a LoRA for these families


@cache
def networks(family: str) -> dict[str, nn.Module]:
    specs = FAMILIES[family]().specs.items()
    return {role: toy.network(spec) for role, spec in specs if role != "vae" and type(spec).__name__ not in READ_ALONE}


# ---- what the files mean --------------------------------------------------------------------------------------------


class Numbers:
    """Random numbers, the same for the same layer."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def __call__(self, *shape: int, size: float = 0.5) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * size


Parts = dict[str, Tensor]
ALPHA, RANK = 3.0, 2
Kind = Callable[[Tensor, Numbers], tuple[Parts, Tensor]]  # a weight in float64 -> parts of a file, and the new weight


def product(up: Tensor, down: Tensor, shape: torch.Size) -> Tensor:
    return torch.einsum("or,rn->on", up.double().flatten(1), down.double().flatten(1)).reshape(shape)


def lora(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    ones = [1] * (weight.ndim - 2)
    up, down = new(len(weight), RANK, *ones), new(RANK, *weight.shape[1:])
    alpha = torch.tensor(ALPHA)
    return {"up": up, "down": down, "alpha": alpha}, weight + ALPHA / RANK * product(up, down, weight.shape)


def tucker(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    if weight.ndim == 2 or weight.shape[2] == 1:
        return lora(weight, new)
    up, down, mid = new(len(weight), RANK, 1, 1), new(RANK, weight.shape[1], 1, 1), new(RANK, RANK, *weight.shape[2:])
    change = torch.einsum("om,mnkl,ni->oikl", up.double()[..., 0, 0], mid.double(), down.double()[..., 0, 0])
    return {"up": up, "down": down, "mid": mid, "alpha": torch.tensor(ALPHA)}, weight + ALPHA / RANK * change


def lengths(weight: Tensor, axis: int, new: Numbers, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Random lengths of rows (axis 0) or columns, as the file has them, and the weight with these lengths."""
    wanted = new(weight.shape[axis], size=0.1).abs() + 0.5
    view = [-1 if i == axis else 1 for i in range(weight.ndim)]
    norms = weight.transpose(0, axis).flatten(1).norm(dim=1).view(view)
    return wanted.view(shape or view), wanted.double().view(view) * weight / norms


def dora(weight: Tensor, new: Numbers, axis: int = 0, part: str = "dora_scale") -> tuple[Parts, Tensor]:
    parts, changed = lora(weight, new)
    parts[part], changed = lengths(changed, axis, new, [-1] if part == "magnitude" and weight.ndim == 2 else [])
    if part == "magnitude" and weight.ndim == 4:
        parts[part] = parts[part].transpose(0, 1)  # (1,out,1,1)
    return parts, changed


def dora_columns(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    return dora(weight, new, axis=1)


def dora_peft(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    return dora(weight, new, part="magnitude")


def loha(weight: Tensor, new: Numbers, flat: bool = True) -> tuple[Parts, Tensor]:
    columns = [weight[0].numel()] if flat else list(weight.shape[1:])
    ones = [] if flat else [1] * (weight.ndim - 2)
    parts = {f"hada_w{i}_a": new(len(weight), RANK, *ones) for i in (1, 2)}
    parts |= {f"hada_w{i}_b": new(RANK, *columns) for i in (1, 2)}
    first, second = (product(parts[f"hada_w{i}_a"], parts[f"hada_w{i}_b"], weight.shape) for i in (1, 2))
    return parts | {"alpha": torch.tensor(ALPHA)}, weight + ALPHA / RANK * first * second


def loha_of_kernels(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    """OneTrainer's factors have the shapes of convolutions."""
    return loha(weight, new, flat=False)


def kronecker(first: Tensor, second: Tensor, shape: torch.Size) -> Tensor:
    return torch.einsum("ac,bd...->abcd...", first.double(), second.double()).reshape(shape)


def lokr(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    """The second factor is a product."""
    out, columns, *kernel = weight.shape
    w1, up = new(2, 2), new(out // 2, RANK)
    down = new(RANK, columns // 2 * int(torch.tensor(kernel).prod()))
    second = product(up, down, torch.Size([out // 2, columns // 2, *kernel]))
    parts = {"lokr_w1": w1, "lokr_w2_a": up, "lokr_w2_b": down, "alpha": torch.tensor(ALPHA)}
    return parts, weight + ALPHA / RANK * kronecker(w1, second, weight.shape)


def lokr_whole(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    """Both factors are whole: writers store an alpha, of which nothing depends."""
    out, columns, *kernel = weight.shape
    w1, w2 = new(2, 4), new(out // 2, columns // 4, *kernel)
    return {"lokr_w1": w1, "lokr_w2": w2, "alpha": torch.tensor(4.0)}, weight + kronecker(w1, w2, weight.shape)


def lokr_dora(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    parts, changed = lokr(weight, new)
    parts["dora_scale"], changed = lengths(changed, 1, new, [])
    return parts, changed


def skew(blocks: Tensor) -> Tensor:
    return blocks.double() - blocks.double().transpose(-1, -2)


def cayley(q: Tensor) -> Tensor:
    eye = torch.eye(q.shape[-1], dtype=torch.float64)
    return (eye + q) @ torch.linalg.inv(eye - q)


def oft(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    """Rows in blocks of 4; alpha times their number limits the norm of all blocks, here to half of it."""
    blocks = new(len(weight) // 4, 4, 4)
    q = skew(blocks)
    alpha = float(q.norm()) / 2 / len(weight)
    turned = torch.einsum("knm,knx->kmx", cayley(q / 2), weight.reshape(-1, 4, weight[0].numel()))
    return {"oft_blocks": blocks, "alpha": torch.tensor(alpha)}, turned.reshape(weight.shape)


def oft_of_comfyui(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    """As above, but alpha itself is the limit."""
    parts, turned = oft(weight, new)
    return parts | {"alpha": parts["alpha"] * len(weight)}, turned


def boft(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    blocks, rescale = new(2, len(weight) // 4, 4, 4), new(len(weight), *[1] * (weight.ndim - 1)) + 1
    rows = weight.flatten(1)
    for stage, rotations in enumerate(cayley(skew(blocks))):
        half = 2 * 2**stage  # rows this far apart meet in a block
        order = torch.tensor(
            [j + k * half for j0 in range(0, len(rows), 2 * half) for j in range(j0, j0 + half) for k in (0, 1)]
        )
        turned = torch.einsum("bij,bjx->bix", rotations, rows[order].view(-1, 4, rows.shape[1])).flatten(0, 1)
        rows = torch.empty_like(rows).index_copy_(0, order, turned)
    return {"oft_blocks": blocks, "rescale": rescale}, rescale.double() * rows.reshape(weight.shape)


def columns_turned(weight: Tensor, new: Numbers, share: bool = False, scaled: bool = False) -> tuple[Parts, Tensor]:
    """OneTrainer's OFT: blocks of 4 columns, by a series for Cayley's rotation.  It turns kernels the other way."""
    count = weight[0].numel() // 4
    angles = new(1 if share else count, 6, size=0.2)
    q = torch.zeros(len(angles), 4, 4, dtype=torch.float64)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for (i, j), angle in zip(pairs, angles.double().T, strict=True):
        q[:, i, j], q[:, j, i] = angle, -angle
    q = q / (2 * 3**0.5) if scaled else q
    turn = torch.eye(4, dtype=torch.float64) + 2 * q + 2 * q @ q + 2 * q @ q @ q + q @ q @ q @ q
    turn = turn.expand(count, 4, 4)
    turn = turn if weight.ndim == 4 else turn.transpose(1, 2)
    turned = torch.einsum("ork,rkc->orc", weight.reshape(len(weight), count, 4), turn)
    marker = {"scaled_oft": torch.tensor(True)} if scaled else {}
    return {"oft_R": angles, **marker}, turned.reshape(weight.shape)


def columns_turned_alike(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    return columns_turned(weight, new, share=True)


def columns_turned_scaled(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    return columns_turned(weight, new, scaled=True)


def ia3(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    scales = new(len(weight))
    stored = scales if weight.ndim == 2 else scales.view(1, -1, 1, 1)
    view = [-1, *[1] * (weight.ndim - 1)]
    return {"ia3": stored, "on_input": torch.tensor(0)}, weight * (1 + scales.double().view(view))


def glora(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    ones, columns = [1] * (weight.ndim - 2), weight.shape[1]
    a1, a2 = new(columns, RANK, *ones), new(RANK, columns, *ones)
    b1, b2 = new(len(weight), RANK, *ones), new(RANK, *weight.shape[1:])
    inside = torch.einsum("oi...,ir,rj->oj...", weight, a1.double().flatten(1), a2.double().flatten(1))
    parts = {f"glora_{name}": value for name, value in {"a1": a1, "a2": a2, "b1": b1, "b2": b2}.items()}
    change = inside + product(b1, b2, weight.shape)
    return parts | {"alpha": torch.tensor(ALPHA)}, weight + ALPHA / RANK * change


def full(weight: Tensor, new: Numbers) -> tuple[Parts, Tensor]:
    diff = new(*weight.shape)
    return {"diff": diff}, weight + diff.double()


# ---- dialects -------------------------------------------------------------------------------------------------------

LYCORIS = (lora, tucker, dora, dora_columns, loha, lokr, lokr_whole, oft, boft, ia3, glora, full)
ONE_TRAINER = (lora, dora, dora_columns, loha_of_kernels, lokr, lokr_whole, lokr_dora)
ONE_TRAINER += (columns_turned, columns_turned_alike, columns_turned_scaled)
PEFT = (lora, dora_peft)
# The end of a key by its part, where it is not the part's own name.
ENDS = {"ia3": "weight", "oft_R": "oft_R.weight", "scaled_oft": "oft_R.scaled_oft"}
ENDS |= {f"glora_{name}": f"{name}.weight" for name in ("a1", "a2", "b1", "b2")}
DOWN = ENDS | {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}
AB = ENDS | {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"}
OLD = {"down": "lora.down.weight", "up": "lora.up.weight"}


class Dialect(NamedTuple):
    """How a writer names the keys of some families."""

    writer: str
    families: str
    network: str  # the prefix of the UNet or transformer
    texts: str = ""  # those of the text encoders, in the pipeline's order
    names: str = "diffusers"  # or "original"
    ends: Mapping[str, str] = DOWN
    kinds: tuple[Kind, ...] = (lora,)
    alpha: str = "tensor"  # or where else it is: "folded" into the up matrices, "metadata" or "adapter_config.json"

    def key(self, prefix: str, layer: str, part: str) -> str:
        """Return the key of a part of a layer; a prefix that ends in _ goes with flat names."""
        name = layer.replace(".", "_") if prefix.endswith("_") else layer
        return f"{prefix}{name}.{self.ends.get(part, part)}"


FLOW = "sd3 flux flux2 z_image chroma qwen_image"
DIFFUSERS_TEXTS = "text_encoder. text_encoder_2. text_encoder_3."
CLIPS = "text_encoders.clip_l.transformer. text_encoders.clip_g.transformer."
T5XXL = "text_encoders.t5xxl.transformer."
DIALECTS = [
    # SDXL's UNet has the original's names in sd-scripts, that of Stable Diffusion 1 and 2 those of diffusers.
    Dialect("kohya", "sd1 sd2", "lora_unet_", "lora_te_"),
    Dialect("kohya", "sdxl", "lora_unet_", "lora_te1_ lora_te2_", "original"),
    Dialect("kohya", "sd3", "lora_unet_", "lora_te1_ lora_te2_ lora_te3_", "original"),
    Dialect("kohya", "flux", "lora_unet_", "lora_te1_ lora_te3_", "original"),
    Dialect("kohya", "chroma", "lora_unet_", "lora_te3_", "original"),
    Dialect("kohya, OFT", "sd1 sd2", "oft_unet_", kinds=(oft,)),
    Dialect("kohya, OFT", "sdxl", "oft_unet_", names="original", kinds=(oft,)),
    Dialect("musubi-tuner", "flux flux2", "lora_unet_", names="original", kinds=(lora, loha, lokr, lokr_whole)),
    Dialect("musubi-tuner", "z_image qwen_image", "lora_unet_", kinds=(lora, loha, lokr, lokr_whole)),
    # OneTrainer writes four layouts, and the ones of its older versions.
    Dialect("OneTrainer, as kohya", "sd1 sd2", "lora_unet_", "lora_te_", kinds=ONE_TRAINER),
    Dialect("OneTrainer, as kohya", "sdxl", "lora_unet_", "lora_te1_ lora_te2_", "original", kinds=ONE_TRAINER),
    Dialect(
        "OneTrainer, as kohya", "sd3", "lora_unet_", "lora_te1_ lora_te2_ lora_te3_", "original", DOWN, ONE_TRAINER
    ),
    Dialect("OneTrainer, as kohya", "flux", "lora_unet_", "lora_te1_ lora_te2_", "original", kinds=ONE_TRAINER),
    Dialect("OneTrainer, as kohya", "chroma", "lora_unet_", "lora_te1_", "original", kinds=ONE_TRAINER),
    Dialect("OneTrainer, as kohya", "flux2", "lora_unet_", names="original", kinds=ONE_TRAINER),
    Dialect("OneTrainer, as kohya", "z_image qwen_image", "lora_unet_", kinds=ONE_TRAINER),
    Dialect("OneTrainer, old", "sdxl", "lora_unet_", "lora_te1_ lora_te2_"),
    Dialect("OneTrainer, old", "sd3 flux", "lora_transformer_", "lora_te1_ lora_te2_ lora_te3_"),
    Dialect("OneTrainer, old", "chroma", "lora_transformer_", "lora_te_"),
    Dialect("OneTrainer, old", "flux2 z_image qwen_image", "transformer."),
    Dialect("OneTrainer, as diffusers", "sd1 sd2 sdxl", "unet.", DIFFUSERS_TEXTS, ends=AB, kinds=PEFT, alpha="folded"),
    Dialect("OneTrainer, as diffusers", FLOW, "transformer.", DIFFUSERS_TEXTS, ends=AB, kinds=PEFT, alpha="folded"),
    Dialect("OneTrainer, as ComfyUI", "sd1 sdxl", "diffusion_model.", CLIPS, "original", AB, ONE_TRAINER),
    Dialect("OneTrainer, as ComfyUI", "sd2", "diffusion_model.", "text_encoders.clip_h.transformer.", "original", AB),
    Dialect("OneTrainer, as ComfyUI", "sd3", "diffusion_model.", f"{CLIPS} {T5XXL}", "original", AB, ONE_TRAINER),
    Dialect("OneTrainer, as ComfyUI", "flux", "diffusion_model.", f"{CLIPS.split()[0]} {T5XXL}", "original", AB),
    Dialect("OneTrainer, as ComfyUI", "chroma", "diffusion_model.", T5XXL, "original", AB, ONE_TRAINER),
    Dialect("OneTrainer, as ComfyUI", "flux2", "diffusion_model.", "", "original", AB, ONE_TRAINER),
    Dialect("OneTrainer, as ComfyUI", "z_image qwen_image", "diffusion_model.", ends=AB, kinds=ONE_TRAINER),
    Dialect("OneTrainer, original", "sd1 sd2 sdxl sd3 flux flux2 chroma", "", "", "original", AB, ONE_TRAINER),
    Dialect("ai-toolkit", "sd1 sd2", "lora_unet_", "lora_te_"),
    Dialect("ai-toolkit", "sdxl", "lora_unet_", "lora_te1_ lora_te2_"),
    Dialect("ai-toolkit", "sd3 flux", "transformer.", ends=AB, alpha="folded"),
    Dialect("ai-toolkit", "flux2 chroma", "diffusion_model.", names="original", ends=AB, alpha="folded"),
    Dialect("ai-toolkit", "z_image qwen_image", "diffusion_model.", ends=AB, alpha="folded"),
    Dialect("ai-toolkit, others", "sd3 flux", "transformer.", ends=AB, kinds=(lokr, lokr_whole, full)),
    Dialect("ai-toolkit, others", "flux2 chroma", "diffusion_model.", "", "original", AB, (lokr, lokr_whole, full)),
    Dialect("ai-toolkit, others", "z_image qwen_image", "diffusion_model.", ends=AB, kinds=(lokr, lokr_whole, full)),
    Dialect("ai-toolkit, old LoKr", "sd3 flux", "lycoris_", kinds=(lokr, lokr_whole)),
    Dialect("SimpleTuner", "sd1 sd2 sdxl", "unet.", DIFFUSERS_TEXTS, ends=OLD, alpha="folded"),
    Dialect("SimpleTuner", FLOW, "transformer.", DIFFUSERS_TEXTS, ends=AB, alpha="folded"),
    Dialect("SimpleTuner, as ComfyUI", "sd1 sd2", "lora_unet_", "lora_te_"),
    Dialect("SimpleTuner, as ComfyUI", "sdxl", "lora_unet_", "lora_te1_ lora_te2_"),
    Dialect("SimpleTuner, as ComfyUI", "sd3 flux z_image chroma qwen_image", "diffusion_model.", ends=AB),
    Dialect("SimpleTuner, as ComfyUI", "flux2", "diffusion_model.", names="original", ends=AB),
    Dialect("diffusers", "sd1 sd2 sdxl", "unet.", DIFFUSERS_TEXTS, ends=OLD, alpha="metadata"),
    Dialect("diffusers", FLOW, "transformer.", DIFFUSERS_TEXTS, ends=AB, kinds=PEFT, alpha="metadata"),
    Dialect("PEFT", "sd1 sd2 sdxl " + FLOW, "base_model.model.", ends=AB, kinds=PEFT, alpha="adapter_config.json"),
    Dialect("ComfyUI", "sd1 sd2 sdxl " + FLOW, "diffusion_model.", names="original",
            kinds=(lora, loha, lokr, lokr_whole, oft_of_comfyui, full)),
    Dialect("LyCORIS, in sd-scripts", "sd1 sd2", "lora_unet_", "lora_te_", kinds=LYCORIS),
    Dialect("LyCORIS, in sd-scripts", "sdxl", "lora_unet_", "lora_te1_ lora_te2_", "original", kinds=LYCORIS),
    Dialect("lightx2v", "qwen_image", ""),  # Qwen-Image-Lightning
    Dialect("LyCORIS, alone and in SimpleTuner", "sd1 sd2 sdxl " + FLOW, "lycoris_", kinds=LYCORIS),
]  # fmt: skip


def layers(dialect: Dialect, family: str) -> Iterator[tuple[str, str, str, slice, bool]]:
    """Yield for each layer of a file its prefix, name, network and key here, rows of that, and whether halves swap."""
    nets = networks(family)
    roles = [(dialect.network, "unet"), *zip(dialect.texts.split(), sorted(nets.keys() - {"unet"}), strict=False)]
    for prefix, role in roles:
        net = nets[role]
        table = LAYERS[family] if role == "unet" else TEXT[type(net).__name__]
        # Text encoders have transformers' names in every file.
        for ours, theirs in table.items():
            key = ours if ours.endswith("_weight") else f"{ours}.weight"
            parameter = net.get_parameter(key)
            if role == "unet" and dialect.names == "original":
                yield prefix, ours, f"{role}/{key}", slice(None), False
                continue
            names = [theirs] if isinstance(theirs, str) else theirs
            third = min(parameter.shape) if role == "unet" else len(parameter) // 3
            for i, name in enumerate(names):
                rows = slice(None) if len(names) == 1 else slice(i * third, None if i == 3 else (i + 1) * third)
                yield prefix, name.removeprefix("~"), f"{role}/{key}", rows, name.startswith("~")


CASES = [(dialect, family) for dialect in DIALECTS for family in dialect.families.split()]


def write(path: Path, dialect: Dialect, family: str, kinds: Sequence[Kind], wanted: dict[str, Tensor]) -> Path:
    """Write a file of random numbers, each layer of the next of the kinds; change the weights as it says."""
    tensors: dict[str, Tensor] = {}
    for i, (prefix, layer, parameter, rows, swapped) in enumerate(layers(dialect, family)):
        seen = wanted[parameter][rows]
        half = len(seen) // 2 if swapped else 0
        parts, changed = kinds[i % len(kinds)](seen.roll(half, 0), Numbers(layer))
        wanted[parameter][rows] = changed.roll(-half, 0)
        if dialect.alpha != "tensor" and "up" in parts:
            alpha = parts.pop("alpha")
            parts["up"] = parts["up"] * alpha / RANK if dialect.alpha == "folded" else parts["up"]
        tensors |= {dialect.key(prefix, layer, part): value for part, value in parts.items()}
    settings: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA}
    about = None
    if dialect.alpha == "metadata":
        roles = [dialect.network, *dialect.texts.split()]
        settings = {role + name: value for role in roles for name, value in settings.items()}
        about = {"lora_adapter_metadata": json.dumps(settings)}
    if dialect.alpha == "adapter_config.json":
        (path.parent / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
        path = path.with_name("adapter_model.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata=about)
    return path


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dealt", "each"])
@pytest.mark.parametrize(("dialect", "family"), CASES, ids=[f"{d.writer}-{family}" for d, family in CASES])
def test_a_file_is_merged_as_its_writer_merges_it(
    dialect: Dialect, family: str, everywhere: bool, tmp_path: Path
) -> None:
    """With the kinds of change that the writer knows dealt out among the layers, or each on every layer."""
    nets, kinds = networks(family), dialect.kinds
    before = {f"{role}/{key}": value.clone() for role, net in nets.items() for key, value in net.state_dict().items()}
    count, first = len(list(layers(dialect, family))), CASES.index((dialect, family))
    hands = [kinds[i:] + kinds[:i] for i in ((first + n) % len(kinds) for n in range(0, len(kinds), count))]
    for hand in [(kind,) for kind in kinds] if everywhere else hands:
        wanted = {key: before[key].double() for _, _, key, _, _ in layers(dialect, family)}
        file = write(tmp_path / "a.safetensors", dialect, family, hand, wanted)
        with merge_lora(nets, [(ldm_lite.open_lora(file), 1.0)]):
            for role, net in nets.items():
                for key, value in net.state_dict().items():
                    if (exact := wanted.get(f"{role}/{key}")) is None:
                        assert torch.equal(value, before[f"{role}/{key}"]), f"{role}/{key} has changed"
                    else:
                        error = float((value - exact).abs().max() / exact.abs().max())
                        assert error < 1e-5, f"{role}/{key} of {', '.join(kind.__name__ for kind in hand)}"


@pytest.mark.parametrize("prefix", sorted({dialect.network for dialect in DIALECTS}))
@pytest.mark.parametrize("family", LAYERS)
def test_an_unknown_part_of_a_layer_is_named(prefix: str, family: str, tmp_path: Path) -> None:
    """What a layer computes with it is not known: left out it would change the image."""
    layer = next(iter(LAYERS[family]))
    layer = layer.replace(".", "_") if prefix.endswith("_") else layer
    keys = [f"{prefix}{layer}.{part}" for part in ("lora_up.weight", "lora_down.weight", "twist")]
    save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"tensors of a kind that is not known ({keys[2]})")):
        ldm_lite.open_lora(tmp_path / "a.safetensors")


def test_the_documented_matrix_is_what_is_tested() -> None:
    page = (Path(__file__).parents[1] / "docs" / "loras.md").read_text(encoding="utf-8")
    table = page[page.index("| LoRAs of |") :].split("\n\n")[0].splitlines()[2:]
    told = {}
    for line in table:
        writer, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        told[writer.removesuffix(" sd-scripts")] = [cell == "yes" for cell in cells]
    writers = {dialect.writer.partition(",")[0] for dialect in DIALECTS}
    trained = {(dialect.writer.partition(",")[0], family) for dialect, family in CASES}
    assert told == {writer: [(writer, family) in trained for family in LAYERS] for writer in writers}
