"""The networks and schedulers of diffusers and transformers with the weights of an original checkpoint.

For comparisons of speed (worker.py, in a process of its own) and of numbers (scripts/): the only module that imports
them.  The weights are renamed by diffusers' own converters.  `pip install diffusers transformers`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, DDIMScheduler, PNDMScheduler, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint
from torch import Tensor, nn

from ldm_lite.families import Family
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.vae_kl import VAESpec

Weights = Mapping[str, Tensor]


def _fill(network: nn.Module, weights: Weights) -> nn.Module:
    network.load_state_dict(dict(weights), strict=True, assign=True)
    return network.eval().requires_grad_(False)


def unet(family: Family, weights: Weights) -> nn.Module:
    """diffusers' UNet2DConditionModel for a whole original state dict."""
    spec = family.unet
    widths = [spec.model_channels * mult for mult in spec.channel_mult]
    attends = [depth > 0 for depth in spec.transformer_depth]
    depths = tuple(max(1, depth) for depth in spec.transformer_depth)
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
        "class_embed_type": "projection" if spec.vector_dim else None,
        "projection_class_embeddings_input_dim": spec.vector_dim,
    }
    converted = convert_ldm_unet_checkpoint(dict(weights), {**config, "class_embed_type": config["class_embed_type"]})
    with torch.device("meta"):
        network = UNet2DConditionModel(**config)
    return _fill(network, converted)


def vae(family: Family, weights: Weights) -> nn.Module:
    """diffusers' AutoencoderKL for a whole original state dict."""
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
    return _fill(network, convert_ldm_vae_checkpoint(dict(weights), config))


def text_encoder(family: Family, weights: Weights) -> nn.Module:
    """transformers' CLIPTextModel for a whole original state dict; its module tree differs between versions."""
    spec = family.text
    assert isinstance(spec, CLIPTextSpec)
    config = transformers.CLIPTextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.length,
        hidden_act=spec.activation,
    )
    network = transformers.CLIPTextModel(config)  # not on meta: it has non-persistent buffers
    prefix = "cond_stage_model.transformer.text_model."
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    own.pop("embeddings.position_ids", None)
    inside = "text_model." if any(key.startswith("text_model.") for key in network.state_dict()) else ""
    return _fill(network, {inside + key: value for key, value in own.items()})


def schedulers(family: Family) -> dict[str, Callable[[], Any]]:
    """DDIM and PLMS with the settings of the released Stable Diffusion 1.x pipelines."""
    common = {
        "beta_start": family.beta_start,
        "beta_end": family.beta_end,
        "beta_schedule": "scaled_linear",
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": {"eps": "epsilon", "v": "v_prediction"}[family.prediction],
    }
    return {
        "ddim": lambda: DDIMScheduler(**common, clip_sample=False),
        "plms": lambda: PNDMScheduler(**common, skip_prk_steps=True),
    }


@torch.no_grad()
def sample(
    network: nn.Module, scheduler: Any, noise: Tensor, context: Tensor, uncond: Tensor, steps: int, scale: float
) -> Tensor:
    """diffusers' denoising loop with classifier-free guidance -> the last latents, in the UNet's scale."""
    scheduler.set_timesteps(steps)
    x, both = noise, torch.cat([uncond, context])
    for t in scheduler.timesteps:
        before, after = network(torch.cat([x, x]), t, encoder_hidden_states=both).sample.chunk(2)
        x = scheduler.step(before + scale * (after - before), t, x).prev_sample
    return x
