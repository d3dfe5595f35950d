"""Networks and schedulers of diffusers and transformers, with the weights of an original checkpoint.

For comparisons of speed (worker.py, in a process of its own) and of numbers (scripts/parity.py, the golden makers).
The weights are renamed by diffusers' own converters.  `pip install diffusers transformers`.
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
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from torch import Tensor, nn

from ldm_lite.checkpoint.reader import prefix
from ldm_lite.core.vae import VAESpec
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.zoo.family import Family, Preserving, Spec

Weights = Mapping[str, Tensor]


def _fill(network: nn.Module, weights: Weights) -> nn.Module:
    network.load_state_dict(dict(weights), strict=True, assign=True)
    return network.eval().requires_grad_(False)


def unet(family: Family, weights: Weights) -> nn.Module:
    """Build diffusers' UNet2DConditionModel from a whole original state dict."""
    spec = family.unet
    widths = [spec.model_channels * mult for mult in spec.channel_mult]
    attends = [depth > 0 for depth in spec.transformer_depth]
    depths = tuple(
        depth or spec.middle_depth for depth in spec.transformer_depth
    )  # the last is also the middle block's
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
    return _fill(network, converted)


def vae(family: Family, weights: Weights) -> nn.Module:
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
    return _fill(network, convert_ldm_vae_checkpoint(dict(weights), config))


def text_encoder(family: Family, weights: Weights) -> nn.Module:
    """Build transformers' CLIP from a whole original state dict: its text encoder, or the first of two."""
    pooled = family.conditioner == "refiner"
    return _text(family.text, weights, prefix("text_encoder", _probes(family.text), family.sgm), pooled)


def text_encoder_2(family: Family, weights: Weights) -> nn.Module:
    """Build transformers' CLIPTextModelWithProjection from a whole original state dict: SDXL's second text encoder."""
    spec = family.text_encoders[1]
    return _text(spec, weights, prefix("text_encoder_2", _probes(spec), True), True)


def _probes(spec: Spec | None) -> list[str]:
    return ["embeddings.token_embedding.weight" if isinstance(spec, CLIPTextSpec) else "ln_final.weight"]


def _text(spec: Spec | None, weights: Weights, prefix: str, pooled: bool) -> nn.Module:
    # The module tree of transformers' CLIPTextModel differs between its versions.
    assert isinstance(spec, CLIPTextSpec | OpenCLIPTextSpec)
    layers = spec.layers if pooled or isinstance(spec, CLIPTextSpec) else spec.layers - spec.skip
    config = transformers.CLIPTextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.length,
        hidden_act=spec.activation if isinstance(spec, CLIPTextSpec) else "gelu",
        projection_dim=spec.width,
    )
    with torch.device("meta"):
        network = (transformers.CLIPTextModelWithProjection if pooled else transformers.CLIPTextModel)(config)
    for module in network.modules():
        if "position_ids" in dict(module.named_buffers(recurse=False)):  # not in the files
            module.position_ids = torch.arange(spec.length)[None]
    if isinstance(spec, CLIPTextSpec):
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        own.pop("embeddings.position_ids", None)
    else:
        converted = convert_open_clip_checkpoint(network, dict(weights), prefix)
        own = {key.removeprefix("text_model."): value for key, value in converted.items()}
        if not pooled:  # diffusers' Stable Diffusion 2 has no layers that are not used
            unread = ("text_projection.", *(f"encoder.layers.{n}." for n in range(layers, spec.layers)))
            own = {key: value for key, value in own.items() if not key.startswith(unread)}
    inside = "text_model." if any(key.startswith("text_model.") for key in network.state_dict()) else ""
    return _fill(network, {("" if key.startswith("text_projection") else inside) + key: v for key, v in own.items()})


NETWORKS = {"unet": unet, "vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}  # by role


def schedulers(family: Family) -> dict[str, Callable[[], Any]]:
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


@torch.no_grad()
def sample(
    network: nn.Module, scheduler: Any, noise: Tensor, context: Tensor, uncond: Tensor, steps: int, scale: float
) -> Tensor:
    """Run diffusers' denoising loop with classifier-free guidance; return the final latents, in the UNet's scale."""
    scheduler.set_timesteps(steps)
    x, both = noise, torch.cat([uncond, context])
    for t in scheduler.timesteps:
        before, after = network(torch.cat([x, x]), t, encoder_hidden_states=both).sample.chunk(2)
        x = scheduler.step(before + scale * (after - before), t, x).prev_sample
    return x
