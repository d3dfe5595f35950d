"""Stable Diffusion 2.x: OpenCLIP's text encoder, eps or v prediction, which only weights tell apart; its variants."""

from dataclasses import replace

from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.zoo.family import Hint

V_DEVIATION = 0.09


def predicts(unet: Tensors) -> tuple[Prediction, str]:
    """Return what a UNet predicts, eps or v, by its weights, and the reason, in words.

    The bias of the last transformer's first norm spreads wider in networks trained with v prediction.  ComfyUI decides
    by the same statistic.
    """
    norms = [key for key in unet if key.startswith("output_blocks.") and key.endswith("blocks.0.norm1.bias")]
    key = max(norms, key=lambda key: int(key.split(".")[1]))
    deviation = float(unet[key].float().std(correction=0))
    prediction: Prediction = "v" if deviation > V_DEVIATION else "eps"
    sign = ">" if prediction == "v" else "<="
    return prediction, f"by its weights: {key} deviates by {deviation:.3f} {sign} {V_DEVIATION}"


PLAIN = replace(
    SD1,
    title="Stable Diffusion 2.x",
    unet=replace(SD1.unet, num_heads=None, head_dim=64, context_dim=1024, linear_proj=True),
    text_encoders=(OPEN_CLIP_H,),
    scale=9.0,
)
SD2 = replace(PLAIN, v_resolution=768, predicts=predicts, hints=(Hint("turbo", "sd_turbo"),))
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
