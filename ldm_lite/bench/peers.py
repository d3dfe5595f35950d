"""Networks and schedulers of diffusers and transformers, with the weights of an original checkpoint.

For comparisons of speed, in a separate process.  tests/fixtures/peers.py has more, for comparisons of numbers.  The
weights are renamed by diffusers' own converters.  `pip install diffusers transformers`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    UNet2DConditionModel,
)
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint
from torch import Tensor, nn

from ldm_lite.checkpoint.reader import prefix
from ldm_lite.core.clip import CLIPSpec
from ldm_lite.core.vae import VAESpec
from ldm_lite.zoo.family import FamilyRow, Preserving

Weights = Mapping[str, Tensor]


def fill(network: nn.Module, weights: Weights) -> nn.Module:
    """Load weights strictly into a network on the meta device."""
    network.load_state_dict(dict(weights), strict=True, assign=True)
    return network.eval().requires_grad_(False)


def unet(family: FamilyRow, weights: Weights) -> nn.Module:
    """Build diffusers' UNet2DConditionModel from a whole original state dict."""
    spec = family.unet
    widths = [spec.model_channels * mult for mult in spec.channel_mult]
    attends = [depth > 0 for depth in spec.transformer_depth]
    depths = tuple(depth or spec.middle_depth for depth in spec.transformer_depth)  # the last is the middle block's too
    config = {
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        "block_out_channels": tuple(widths),
        "layers_per_block": spec.num_res_blocks[0],
        "down_block_types": tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        "up_block_types": tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
        "transformer_layers_per_block": depths,
        "cross_attention_dim": spec.context_dim,
        # diffusers' attention_head_dim is the number of heads
        "attention_head_dim": tuple(spec.heads(width) for width in widths),
        "use_linear_projection": spec.linear_proj,
        "class_embed_type": "projection" if family.conditioner in ("unclip", "unclip_l") else None,
        "addition_embed_type": "text_time" if family.conditioner in ("sdxl", "refiner") else None,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": spec.vector_dim,
        "time_cond_proj_dim": spec.guidance_dim,
    }
    converted = convert_ldm_unet_checkpoint(dict(weights), config)
    if spec.guidance_dim is not None:  # the original has no key for it
        converted["time_embedding.cond_proj.weight"] = weights["model.diffusion_model.cond_proj.weight"]
    with torch.device("meta"):
        network = UNet2DConditionModel(**config)
    return fill(network, converted)


def vae(family: FamilyRow, weights: Weights) -> nn.Module:
    """Build diffusers' AutoencoderKL from a whole original state dict."""
    spec = family.vae
    assert isinstance(spec, VAESpec)
    levels = len(spec.channel_mult)
    config = {
        "block_out_channels": tuple(spec.channels * mult for mult in spec.channel_mult),
        "layers_per_block": spec.num_res_blocks,
        "latent_channels": spec.embed_dim,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }
    with torch.device("meta"):
        network = AutoencoderKL(**config)
    return fill(network, convert_ldm_vae_checkpoint(dict(weights), config))


def text_encoder(family: FamilyRow, weights: Weights) -> nn.Module:
    """Build transformers' CLIPTextModel from a whole original state dict."""
    spec = family.text
    assert isinstance(spec, CLIPSpec)
    network = clip(transformers.CLIPTextModel, spec, spec.layers, getattr(spec, "activation", "quick_gelu"))
    before = prefix("text_encoder", ["embeddings.token_embedding.weight"], family.sgm)
    return fill_clip(network, {key.removeprefix(before): weights[key] for key in weights if key.startswith(before)})


def clip(kind: Any, spec: Any, layers: int, activation: str) -> nn.Module:
    """Build one of transformers' CLIP models with the sizes of a text encoder's spec, without weights."""
    config = transformers.CLIPTextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.length,
        hidden_act=activation,
        projection_dim=spec.width,
    )
    with torch.device("meta"):
        network: nn.Module = kind(config)
    for module in network.modules():
        if "position_ids" in dict(module.named_buffers(recurse=False)):  # not in the files
            module.position_ids = torch.arange(spec.length)[None]
    return network


def fill_clip(network: nn.Module, weights: Weights) -> nn.Module:
    """Load the weights of an encoder, whose module tree differs between the versions of transformers."""
    inside = "text_model." if any(key.startswith("text_model.") for key in network.state_dict()) else ""
    named = {("" if key.startswith("text_projection") else inside) + key: value for key, value in weights.items()}
    return fill(network, {key: value for key, value in named.items() if not key.endswith("embeddings.position_ids")})


NETWORKS = {"unet": unet, "vae": vae, "text_encoder": text_encoder}  # by role


def schedulers(family: FamilyRow) -> dict[str, Callable[[], Any]]:
    """Return diffusers' schedulers: DDIM and PLMS as in Stable Diffusion 1.x; Euler and DPM++ 2M end at sigma 0."""
    assert isinstance(family.noise, Preserving)
    common = {
        "beta_start": family.noise.start,
        "beta_end": family.noise.end,
        "beta_schedule": "scaled_linear",
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": {"eps": "epsilon", "v": "v_prediction"}[family.prediction],
    }
    clean = {key: value for key, value in common.items() if key != "set_alpha_to_one"}
    return {
        "ddim": lambda: DDIMScheduler(**common, clip_sample=False),
        "plms": lambda: PNDMScheduler(**common, skip_prk_steps=True),
        "euler": lambda: EulerDiscreteScheduler(**clean, timestep_spacing="linspace"),
        "dpmpp_2m": lambda: DPMSolverMultistepScheduler(**clean, timestep_spacing="trailing", final_sigmas_type="zero"),
    }
