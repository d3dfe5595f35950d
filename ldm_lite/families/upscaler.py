"""Stable Diffusion's x4 upscaler: reads the small image beside the latents, and its noise level as a class."""

from dataclasses import replace

from ldm_lite.families.sd1 import SD1
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.zoo.family import KL_F8, Preserving

ROWS = {
    "x4": replace(
        SD1,
        title="Stable Diffusion x4 upscaler",
        unet=replace(
            SD1.unet,
            in_channels=7,
            model_channels=256,
            channel_mult=(1, 2, 2, 4),
            transformer_depth=(0, 1, 1, 1),
            context_dim=1024,
            linear_proj=True,
            cross_only=(False, True, True, False),
            num_classes=1000,
        ),
        vae=replace(KL_F8, channel_mult=(1, 2, 4)),
        text_encoders=(OPEN_CLIP_H,),
        task="upscale",
        prediction="v",
        noise=Preserving(0.0001, 0.02),
        scale_factor=0.08333,
        scale=9.0,
    )
}
