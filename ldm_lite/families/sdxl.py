"""Stable Diffusion XL: two text encoders, a vector of sizes; its Turbo, inpainting, LCM and refiner."""

from dataclasses import replace

from ldm_lite.families.sd1 import SD1
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.open_clip import OPEN_CLIP_G
from ldm_lite.zoo.family import Hint

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
    conditioner="sdxl",
    sgm=True,
    scale_factor=0.13025,
    resolution=1024,
    vae_overflows=True,
    scale=5.0,
)
SDXL = replace(PLAIN, hints=(Hint("turbo", "sdxl_turbo"),))
ROWS = {
    "sdxl_base": SDXL,
    "sdxl_turbo": replace(  # Sauer et al. 2023; shapes do not tell
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
        conditioner="refiner",
    ),
}
