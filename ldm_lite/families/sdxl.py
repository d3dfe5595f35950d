"""Stable Diffusion XL: two text encoders, a vector of sizes; its Turbo, inpainting, LCM and refiner."""

from dataclasses import replace

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts, hidden, image_size
from ldm_lite.core.denoise import Conditioning, to_device
from ldm_lite.core.layers import sinusoids
from ldm_lite.families.sd1 import CLIP_L_FILE, RECIPES, SD1
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.open_clip import OPEN_CLIP_G
from ldm_lite.text.tokenizer import OpenCLIPTokenizer
from ldm_lite.zoo.family import Hint

OPEN_CLIP_G_FILE = "Comfy-Org/stable-diffusion-3.5-fp8/text_encoders/clip_g.safetensors"
PLAIN = replace(
    SD1,
    title="Stable Diffusion XL",
    unet=replace(
        SD1.unet,
        channel_mult=(1, 2, 4),
        num_res_blocks=(2, 2, 2),
        transformer_depth=(0, 2, 10),
        middle_depth=10,
        num_heads=None,
        head_dim=64,
        context_dim=2048,
        linear_proj=True,
        cross_only=(False, False, False),
        vector_dim=2816,
    ),
    text_encoders=(replace(CLIP_L, skip=1, norm=False), OPEN_CLIP_G),
    text_files=(CLIP_L_FILE, OPEN_CLIP_G_FILE),
    conditioner="sdxl",
    sgm=True,
    scale_factor=0.13025,
    resolution=1024,
    vae_overflows=True,
    vae_file="stabilityai/sdxl-vae/sdxl_vae.safetensors",
    scale=5.0,
    called=r"sd[-_]?xl|stable[-_]diffusion[-_]xl|illustrious|noobai",
    base_version="sdxl_base_v1-0",
    ays="ays_sdxl",
)
SDXL = replace(PLAIN, hints=(Hint("turbo", "sdxl_turbo"),), recipes=RECIPES)
ROWS = {
    "sdxl_base": SDXL,
    "sdxl_turbo": replace(  # Sauer et al. 2023; not shown by shapes
        PLAIN,
        title="SDXL-Turbo",
        scheduler="EulerAncestralDiscreteScheduler, trailing",
        resolution=512,
        sampler="euler_a_trailing",
        steps=1,
        scale=1.0,
    ),
    "sdxl_inpaint": replace(
        PLAIN, title="Stable Diffusion XL inpainting", unet=replace(PLAIN.unet, in_channels=9), task="inpaint"
    ),
    "lcm_sdxl": replace(  # Luo et al. 2023
        PLAIN,
        title="Latent Consistency Model (Stable Diffusion XL)",
        unet=replace(PLAIN.unet, guidance_dim=256),
        sampler="lcm",
        steps=4,
        scale=8.0,  # of its model card
    ),
    "sdxl_refiner": replace(
        PLAIN,
        title="Stable Diffusion XL refiner",
        unet=replace(
            PLAIN.unet,
            model_channels=384,
            channel_mult=(1, 2, 4, 4),
            num_res_blocks=(2, 2, 2, 2),
            transformer_depth=(0, 4, 4, 0),
            middle_depth=4,
            context_dim=1280,
            cross_only=(False, False, False, False),
            vector_dim=2560,
        ),
        text_encoders=(OPEN_CLIP_G,),
        text_files=(OPEN_CLIP_G_FILE,),
        conditioner="refiner",
        ays="ays",
    ),
}


# ---- text and sizes -------------------------------------------------------------------------------------------------


def with_both_encoders(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Both encoders' hidden states, concatenated by channel; y is bigG's pooled output followed by the sizes.

    Sizes are height first: (original, top and left of the crop, target).  Without a prompt, context and pooled output
    are zeros.  Podell et al. 2023, sec. 2.2; GeneralConditioner of generative-models.
    """
    context, _ = hidden(model, model.text_encoder, model.tokenizer, prompts, options)
    context_2, pooled = hidden(model, model.text_encoder_2, second_tokenizer(model), prompts, options, pool=True)
    context = torch.cat([context, context_2], dim=2)
    target = image_size(model, options) if options.extra.target_size is None else options.extra.target_size
    has_text = torch.tensor([prompt is not None for prompt in prompts], device=context.device)
    y = with_numbers(pooled * has_text[:, None], torch.tensor((*_cut(model, options), *target)))
    return {"context": context * has_text[:, None, None], "y": y}


def of_refiner(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """BigG alone, with an aesthetic score in place of the image's size."""
    context, pooled = hidden(model, model.text_encoder, model.tokenizer, prompts, options, pool=True)
    score = options.extra.negative_aesthetic_score if options.negative else options.extra.aesthetic_score
    if score is None:
        score = 2.5 if options.negative else 6.0
    return {"context": context, "y": with_numbers(pooled, torch.tensor((*_cut(model, options), score)))}


def second_tokenizer(model: CheckpointModel) -> OpenCLIPTokenizer:
    """Return the tokenizer of a model's second text encoder, with the names of embeddings."""
    assert model.tokenizer is not None
    return OpenCLIPTokenizer(model.family.text_encoders[1].length, added=model.tokenizer.added)


def _cut(model: CheckpointModel, options: PromptOptions) -> tuple[int, int, int, int]:
    """Return height and width of the original image, top and left of the crop."""
    original = image_size(model, options) if options.extra.original_size is None else options.extra.original_size
    return (*original, *(options.extra.crop_top_left or (0, 0)))


def with_numbers(pooled: Tensor, numbers: Tensor) -> Tensor:
    """Append the sinusoids of N numbers, (N,) or (B,N), 256 each, to pooled outputs (B,D): y (B, D + 256 * N)."""
    embedded = sinusoids(to_device(numbers.flatten(), pooled.device), 256).view(*numbers.shape[:-1], -1)
    return torch.cat([pooled, embedded.to(pooled.dtype).expand(len(pooled), -1)], dim=1)


BOTH_ENCODERS = Conditioner(
    with_both_encoders, with_sizes=lambda y, sizes: with_numbers(y[:, : -256 * sizes.shape[1]], sizes)
)
REFINER = Conditioner(of_refiner)
