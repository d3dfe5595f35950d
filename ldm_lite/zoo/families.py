"""The model families, one row each: the specs of the networks, the noise process, and the default settings.

detection.py infers a file's architecture from its shapes and finds the row with the same specs.
"""

from dataclasses import replace
from typing import Any

from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.embedders import ClassSpec, LabelMapSpec
from ldm_lite.models.pixels import PixelSpec
from ldm_lite.zoo.family import IN_THE_FILE as IN_THE_FILE
from ldm_lite.zoo.family import Betas as Betas
from ldm_lite.zoo.family import Cosine as Cosine
from ldm_lite.zoo.family import Family as Family
from ldm_lite.zoo.family import Flow, SkipLayers
from ldm_lite.zoo.family import Linear as Linear
from ldm_lite.zoo.family import Noise as Noise
from ldm_lite.zoo.family import ScaledLinear as ScaledLinear
from ldm_lite.zoo.family import text_roles as text_roles
from ldm_lite.zoo.networks import (
    AUTOENCODERS,
    BERT_LARGE,
    CLIP_L,
    IF_I_XL,
    IF_II_L,
    KL_F8,
    OPEN_CLIP_G,
    OPEN_CLIP_H,
    QWEN3_4B,
    SD1_UNET,
    T5_XXL,
    TRANSFORMERS,
    UNETS,
)

SD1 = Family(
    title="Stable Diffusion 1.x",
    unet=SD1_UNET,
    vae=KL_F8,
    text_encoders=(CLIP_L,),
    conditioner="clip",
    task="txt2img",
    sgm=False,
    prediction="eps",
    noise=ScaledLinear(0.00085, 0.012),
    scale_factor=0.18215,
    shift_factor=0.0,
    sampler="ddim",
    resolution=512,
    v_resolution=None,
    vae_overflows=False,
    steps=50,
    scale=7.5,
    threshold=None,
    original_ema=False,
)


SD2 = replace(
    SD1,
    title="Stable Diffusion 2.x",
    unet=UNETS["sd2"],
    text_encoders=(OPEN_CLIP_H,),
    v_resolution=768,
    scale=9.0,
)
UNCLIP = replace(
    SD2,
    title="Stable Diffusion 2.1 unCLIP (H)",
    unet=UNETS["sd2_unclip_h"],
    conditioner="unclip",
    prediction="v",
    resolution=768,
    v_resolution=None,
    scale=10.0,
)
SDXL = replace(
    SD1,
    title="Stable Diffusion XL",
    unet=UNETS["sdxl_base"],
    text_encoders=(replace(CLIP_L, skip=1, norm=False), OPEN_CLIP_G),
    conditioner="sdxl",
    sgm=True,
    scale_factor=0.13025,
    resolution=1024,
    vae_overflows=True,
    scale=5.0,
)

IF = replace(
    SD1,
    title="DeepFloyd IF, stage I",
    unet=IF_I_XL,  # or another size
    vae=PixelSpec(),
    text_encoders=(),  # T5 is in a file of its own, shared by the stages
    conditioner="t5",
    task="cascade",
    noise=Cosine(),
    scale_factor=1.0,
    sampler="ddpm_respaced",
    resolution=64,
    steps=150,
    scale=7.0,
    threshold=(0.95, 1.5),
)

TURBO: dict[str, Any] = {"sampler": "euler_a_trailing", "steps": 1, "scale": 1.0}  # Sauer et al. 2023
LCM: dict[str, Any] = {"sampler": "lcm", "steps": 4, "scale": 8.0}  # Luo et al. 2023; scale of its model card

# ---- latent diffusion's own models, and the upscaler ----------------------------------------------------------------

LDM = replace(
    SD1,
    title="LDM unconditional (CelebA-HQ, FFHQ or LSUN bedrooms)",
    unet=UNETS["ldm_celeba_ffhq_beds256"],
    vae=AUTOENCODERS["vq_f4"],
    text_encoders=(),
    conditioner="nothing",
    noise=ScaledLinear(0.0015, 0.0195),
    scale_factor=1.0,
    resolution=256,
    steps=200,
    scale=1.0,
    original_ema=True,
)
ZOO = {
    "ldm_celeba_ffhq_beds256": LDM,
    "ldm_lsun_churches256": replace(
        LDM,
        title="LDM unconditional (LSUN churches)",
        unet=UNETS["ldm_lsun_churches256"],
        vae=KL_F8,
        noise=ScaledLinear(0.0015, 0.0155),
        scale_factor=IN_THE_FILE,
        steps=400,
    ),
    "ldm_text2img_large": replace(
        SD1,
        title="LDM text-to-image (1.45 B, LAION-400M)",
        unet=UNETS["ldm_text2img_large"],
        text_encoders=(BERT_LARGE,),
        conditioner="bert",
        resolution=256,
        scale=5.0,
    ),
    "ldm_text2img256": replace(
        LDM,
        title="LDM text-to-image 256",
        unet=UNETS["ldm_text2img256"],
        text_encoders=(replace(BERT_LARGE, width=640),),
        conditioner="bert",
        steps=100,
    ),
    "ldm_cin256_v2": replace(
        LDM,
        title="LDM ImageNet classes (v2)",
        unet=UNETS["ldm_cin256_v2"],
        text_encoders=(ClassSpec(num_classes=1001, width=512, guided=True),),
        conditioner="classes",
        steps=20,
        scale=3.0,
        original_ema=False,
    ),
    "ldm_cin256": replace(
        LDM,
        title="LDM ImageNet classes",
        unet=UNETS["ldm_cin256"],
        vae=AUTOENCODERS["vq_f8"],
        text_encoders=(ClassSpec(num_classes=1000, width=512),),
        conditioner="classes",
        sampler="ddpm",
    ),
    "ldm_layout2img": replace(
        LDM,
        title="LDM layout-to-image (OpenImages)",
        unet=UNETS["ldm_layout2img"],
        text_encoders=(BERTSpec(vocab_size=8192, length=92, width=512, layers=16),),
        conditioner="layouts",
        noise=ScaledLinear(0.0015, 0.0205),
    ),
    "ldm_semantic_synthesis": replace(
        LDM,
        title="LDM semantic synthesis",
        unet=UNETS["ldm_semantic_synthesis"],
        text_encoders=(LabelMapSpec(num_labels=182, channels=3, halvings=2),),
        conditioner="label_maps",
        noise=ScaledLinear(0.0015, 0.0205),
    ),
    "rdm768": replace(
        LDM,
        title="retrieval-augmented diffusion 768",
        unet=UNETS["rdm768"],
        vae=AUTOENCODERS["kl_f16"],
        conditioner="embeddings",
        noise=ScaledLinear(0.0015, 0.015),
        scale_factor=0.22765929,
        resolution=768,
        steps=50,
        scale=5.0,
    ),
    "ldm_inpainting_big": replace(
        LDM,
        title="LDM inpainting",
        unet=UNETS["ldm_inpainting_big"],
        vae=AUTOENCODERS["vq_f4_noattn"],
        task="inpaint_ldm",
        noise=ScaledLinear(0.0015, 0.0205),
        resolution=512,
        steps=50,
    ),
    "ldm_bsr_sr": replace(
        LDM,
        title="LDM super-resolution",
        unet=UNETS["ldm_bsr_sr"],
        task="upscale",
        noise=ScaledLinear(0.0015, 0.0155),
        steps=100,
        sampler="ddpm",
    ),
    "x4": replace(
        SD1,
        title="Stable Diffusion x4 upscaler",
        unet=UNETS["x4"],
        vae=AUTOENCODERS["kl_f4_x4upscaler"],
        text_encoders=(OPEN_CLIP_H,),
        task="upscale",
        prediction="v",
        noise=ScaledLinear(0.0001, 0.02),
        scale_factor=0.08333,
        scale=9.0,
    ),
}

# ---- rectified flow --------------------------------------------------------------------------------------------------

FLUX_DEV = replace(
    SD1,
    title="FLUX.1 [dev]",
    unet=TRANSFORMERS["flux_dev"],
    vae=AUTOENCODERS["kl_f8_flux"],
    text_encoders=(CLIP_L, T5_XXL),
    conditioner="flux",
    prediction="flow",
    noise=Flow("s", "flow", by_size=(0.5, 1.15)),
    scale_factor=0.3611,
    shift_factor=0.1159,
    sampler="euler",
    resolution=1024,
    vae_overflows=True,
    scale=2.5,
)
SD3 = replace(
    FLUX_DEV,
    title="Stable Diffusion 3 medium",
    unet=TRANSFORMERS["sd3_medium"],
    text_encoders=(replace(CLIP_L, skip=1, norm=False), OPEN_CLIP_G, T5_XXL),
    conditioner="sd3",
    noise=Flow("1000 s", "flow_sd3", shift=3.0),
    scale_factor=1.5305,
    shift_factor=0.0609,
    sampler="dpmpp_2m_sd3",
    scale=5.0,
)
Z_IMAGE_TURBO = replace(
    FLUX_DEV,
    title="Z-Image Turbo",
    unet=TRANSFORMERS["z_image"],
    text_encoders=(QWEN3_4B,),
    conditioner="z_image",
    prediction="reverse_flow",
    noise=Flow("1 - s", "flow", shift=3.0),
    steps=8,
    scale=1.0,
)
FLOWS = {
    "flux_dev": FLUX_DEV,
    "flux_schnell": replace(
        FLUX_DEV,
        title="FLUX.1 [schnell]",
        unet=TRANSFORMERS["flux_schnell"],
        noise=Flow("s", "flow"),
        steps=4,
        scale=1.0,
    ),
    # Shapes do not tell it from dev: `metadata=family=flux_kontext`.
    "flux_kontext": replace(FLUX_DEV, title="FLUX.1 Kontext", task="edit"),
    "flux_fill": replace(
        FLUX_DEV, title="FLUX.1 Fill", unet=TRANSFORMERS["flux_fill"], task="inpaint_flux", scale=30.0
    ),
    "flux_control": replace(
        FLUX_DEV, title="FLUX.1 Depth", unet=TRANSFORMERS["flux_control"], task="control_image", scale=10.0
    ),
    # Shapes do not tell it from Depth: `metadata=family=flux_canny`.
    "flux_canny": replace(
        FLUX_DEV, title="FLUX.1 Canny", unet=TRANSFORMERS["flux_control"], task="control_image", scale=30.0
    ),
    "sd3_medium": SD3,
    "sd35_medium": replace(
        SD3,
        title="Stable Diffusion 3.5 medium",
        unet=TRANSFORMERS["sd35_medium"],
        skip_layers=SkipLayers((7, 8, 9), scale=2.5, start=0.01, end=0.20),
    ),
    "sd35_large": replace(
        SD3, title="Stable Diffusion 3.5 large", unet=TRANSFORMERS["sd35_large"], steps=40, scale=4.5
    ),
    "sd35_large_turbo": replace(  # shapes do not tell: detection.TURBOS
        SD3,
        title="Stable Diffusion 3.5 large turbo",
        unet=TRANSFORMERS["sd35_large"],
        sampler="euler",
        steps=4,
        scale=1.0,
    ),
    "z_image_turbo": Z_IMAGE_TURBO,
    # Shapes do not tell it from Turbo: `metadata=family=z_image`.  Its makers' scale, 4, is 1 less than ours.
    "z_image": replace(Z_IMAGE_TURBO, title="Z-Image", noise=Flow("1 - s", "flow", shift=6.0), steps=50, scale=5.0),
}

FAMILIES = {
    "sd1": SD1,
    "sd1_inpaint": replace(SD1, title="Stable Diffusion 1.x inpainting", unet=UNETS["sd1_inpaint"], task="inpaint"),
    "instruct_pix2pix": replace(
        SD1,
        title="InstructPix2Pix",
        unet=UNETS["instruct_pix2pix"],
        task="instruct",
        steps=100,
        sampler="euler_a",
        original_ema=True,
    ),
    "lcm": replace(
        SD1, title="Latent Consistency Model (Stable Diffusion 1.x)", unet=UNETS["lcm"], resolution=768, **LCM
    ),
    "sd2": SD2,
    "sd_turbo": replace(SD2, title="SD-Turbo", sgm=True, v_resolution=None, **TURBO),
    "sd2_inpaint": replace(
        SD2, title="Stable Diffusion 2 inpainting", unet=UNETS["sd2_inpaint"], task="inpaint", v_resolution=None
    ),
    "sd2_depth": replace(
        SD2, title="Stable Diffusion 2 depth", unet=UNETS["sd2_depth"], task="depth", v_resolution=None
    ),
    "sd2_unclip_h": UNCLIP,
    "sd2_unclip_l": replace(
        UNCLIP, title="Stable Diffusion 2.1 unCLIP (L)", unet=UNETS["sd2_unclip_l"], conditioner="unclip_l"
    ),
    "sdxl_base": SDXL,
    "sdxl_turbo": replace(SDXL, title="SDXL-Turbo", resolution=512, **TURBO),  # shapes do not tell: detection.TURBOS
    "sdxl_inpaint": replace(SDXL, title="Stable Diffusion XL inpainting", unet=UNETS["sdxl_inpaint"], task="inpaint"),
    "lcm_sdxl": replace(SDXL, title="Latent Consistency Model (Stable Diffusion XL)", unet=UNETS["lcm_sdxl"], **LCM),
    "sdxl_refiner": replace(
        SDXL,
        title="Stable Diffusion XL refiner",
        unet=UNETS["sdxl_refiner"],
        text_encoders=(OPEN_CLIP_G,),
        conditioner="refiner",
    ),
    **ZOO,
    **FLOWS,
    "if_I": IF,
    "if_II": replace(
        IF,
        title="DeepFloyd IF, stage II",
        unet=IF_II_L,
        sampler="ddpm_smart50",
        resolution=256,
        steps=50,
        scale=4.0,
        threshold=(0.95, 1.0),
    ),
}
