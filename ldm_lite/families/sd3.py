"""Stable Diffusion 3 and 3.5: CLIP-L, OpenCLIP bigG and T5, which may be missing; 3.5 medium skips layers to guide."""

from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen, extra_channels
from ldm_lite.conditioning.plain import num_tokens, t5_states, t5_tokenizer
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts, hidden
from ldm_lite.core.denoise import Conditioning
from ldm_lite.families.sd1 import CLIP_L_FILE, TRANSFORMER
from ldm_lite.families.sdxl import OPEN_CLIP_G_FILE, second_tokenizer
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.mmdit import SD3_MEDIUM, SD35_LARGE, SD35_MEDIUM, MMDiTSpec
from ldm_lite.models.open_clip import OPEN_CLIP_G
from ldm_lite.models.t5 import T5_FILE, T5_XXL
from ldm_lite.zoo.family import Flow, Recipe, SkipLayers

SD3 = replace(
    TRANSFORMER,
    title="Stable Diffusion 3 medium",
    unet=SD3_MEDIUM,
    vae_file="stabilityai/stable-diffusion-3.5-medium/vae/diffusion_pytorch_model.safetensors",
    text_encoders=(replace(CLIP_L, skip=1, norm=False), OPEN_CLIP_G, T5_XXL),
    text_files=(CLIP_L_FILE, OPEN_CLIP_G_FILE, T5_FILE),
    optional=(T5_XXL,),
    conditioner="sd3",
    noise=Flow("1000 s", "flow_sd3", shift=3.0),
    scale_factor=1.5305,
    shift_factor=0.0609,
    sampler="dpmpp_2m_sd3",
    scale=5.0,
    called=r"(sd|stable[-_]diffusion)[-_ ]?v?3",
    base_version="sd3",
)
HYPER = Recipe(r"hyper[-_ ]?(sd|\d)", "ByteDance/Hyper-SD", 8, 3.0, "euler")
SD3 = replace(SD3, recipes=(HYPER,))
TURBO = Recipe(r"turbo", "stabilityai/stable-diffusion-3.5-large-turbo", 4, 1.0, "euler")
LARGE = replace(SD3, title="Stable Diffusion 3.5 large", unet=SD35_LARGE, steps=40, scale=4.5, recipes=(HYPER, TURBO))
ROWS = {
    "sd3_medium": SD3,
    "sd35_medium": replace(
        SD3,
        title="Stable Diffusion 3.5 medium",
        unet=SD35_MEDIUM,
        skip_layers=SkipLayers((7, 8, 9), scale=2.5, start=0.01, end=0.20),
    ),
    "sd35_large": LARGE,
    "sd35_large_turbo": replace(  # not shown by shapes
        LARGE, title="Stable Diffusion 3.5 large turbo", sampler="euler", steps=4, scale=1.0, recipes=()
    ),
}


def variant(spec: MMDiTSpec) -> object:
    """What distinguishes the rows."""
    return spec.qk_norm, spec.dual_depth > 0, extra_channels(spec)


row = partial(chosen, ROWS, MMDiTSpec.from_shapes, variant=variant)


TOKENS = 77  # of CLIP
MOST = 256  # of T5
TOKENIZER = t5_tokenizer(MOST)


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """CLIP-L's and bigG's hidden states by channel, zeros up to T5's width, then T5's tokens.

    T5 has at least 77 tokens, at most 256; without T5 they are 77 zeros.  y is both pooled outputs, of which only
    bigG's is projected.  Stability-AI/sd3.5, sd3_infer.py, get_cond; Esser et al. 2024, sec. 4 and appendix B.3.
    """
    one_chunk, second = replace(options, num_chunks=1), second_tokenizer(model)
    context, pooled = hidden(model, model.text_encoder, model.tokenizer, prompts, one_chunk, pool=True)
    context_2, pooled_2 = hidden(model, model.text_encoder_2, second, prompts, one_chunk, pool=True)
    both = torch.cat([context, context_2], dim=2)
    both = F.pad(both, (0, model.family.unet.context_dim - both.shape[2]))  # (B, 77, D)
    tokens = torch.zeros_like(both)
    if model.t5_tokenizer is not None:
        tokens = t5_states(model, prompts, max(TOKENS, options.num_chunks)).to(both)
    return {"context": torch.cat([both, tokens], dim=1), "y": torch.cat([pooled, pooled_2], dim=1)}


CONDITIONER = Conditioner(
    encode,
    tokenizer=TOKENIZER,
    has_weights=False,
    length=lambda model, prompt: 1 if model.t5_tokenizer is None else num_tokens(TOKENIZER(model), prompt),
    most=MOST,
)
