"""The model families, a row each: the specs of its networks, its noise schedule, and what its users expect.

identify.py infers a file's architecture from its shapes and looks it up here: the row *is* the fingerprint.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from ldm_lite.diffusion.schedule import Array, Prediction, cosine_betas, linear_betas
from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.embedders import ClassSpec, LabelMapSpec
from ldm_lite.models.pixels import PixelSpec
from ldm_lite.models.unet import UNetSpec
from ldm_lite.zoo.networks import (
    AUTOENCODERS,
    BERT_LARGE,
    CLIP_L,
    IF_I_XL,
    IF_II_L,
    KL_F8,
    OPEN_CLIP_G,
    OPEN_CLIP_H,
    SD1_UNET,
    UNETS,
    AutoencoderSpec,
    EncoderSpec,
    Spec,
)

IN_THE_FILE = math.nan  # a scale factor that only the file knows, in its buffer `scale_factor`


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its networks, its noise schedule, and what its users expect by default."""

    title: str
    unet: UNetSpec
    vae: AutoencoderSpec
    text: EncoderSpec | None  # what reads the prompts (or classes, or boxes)
    text_2: EncoderSpec | None  # a second one
    conditioner: str  # how those make what the UNet reads: a name in conditioning.CONDITIONERS
    task: str  # what it is for: "txt2img" (and all that can be made of it), "inpaint", ...: see job.COMMANDS
    sgm: bool  # its files have the text encoders' keys as generative-models names them
    prediction: Prediction
    beta_start: float  # of 1000 betas, linear in their square roots
    beta_end: float
    cosine: bool  # the cosine schedule in place of those
    scale_factor: float  # latents in the UNet's scale = scale_factor * the autoencoder's; may be IN_THE_FILE
    sampler: str  # by any of its names, with its spacing
    resolution: int  # pixels a side
    v_resolution: (
        int | None
    )  # of its variant that predicts v, which weights tell and shapes do not; None = there is none
    vae_overflows: bool  # in float16, so that it is kept in float32
    steps: int
    scale: float  # classifier-free guidance
    threshold: tuple[float, float] | None  # percentile and limit of dynamic thresholding, for models of pixels

    @property
    def networks(self) -> dict[str, Spec]:
        """The specs of its networks by their roles, which are the names of Pipeline's fields."""
        specs: dict[str, Spec | None] = {
            "unet": self.unet,
            "vae": self.vae,
            "text_encoder": self.text,
            "text_encoder_2": self.text_2,
        }
        return {role: spec for role, spec in specs.items() if spec is not None and not isinstance(spec, PixelSpec)}

    @property
    def betas(self) -> Array:
        """Its noise schedule, (1000,)."""
        return cosine_betas() if self.cosine else linear_betas(self.beta_start, self.beta_end)


SD1 = Family(
    title="Stable Diffusion 1.x",
    unet=SD1_UNET,
    vae=KL_F8,
    text=CLIP_L,
    text_2=None,
    conditioner="clip",
    task="txt2img",
    sgm=False,
    prediction="eps",
    beta_start=0.00085,
    beta_end=0.012,
    cosine=False,
    scale_factor=0.18215,
    sampler="ddim",
    resolution=512,
    v_resolution=None,
    vae_overflows=False,
    steps=50,
    scale=7.5,
    threshold=None,
)


SD2 = replace(
    SD1,
    title="Stable Diffusion 2.x",
    unet=UNETS["sd2"],
    text=OPEN_CLIP_H,
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
    text=replace(CLIP_L, skip=1, norm=False),
    text_2=OPEN_CLIP_G,
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
    unet=IF_I_XL,  # or of another size
    vae=PixelSpec(),
    text=None,  # T5 is a file of its own, which stages share
    conditioner="t5",
    task="cascade",
    cosine=True,
    scale_factor=1.0,
    sampler="ddpm_respaced",
    resolution=64,
    steps=150,
    scale=7.0,
    threshold=(0.95, 1.5),
)

TURBO: dict[str, Any] = {"sampler": "euler_a_trailing", "steps": 1, "scale": 1.0}  # Sauer et al. 2023
LCM: dict[str, Any] = {"sampler": "lcm", "steps": 4, "scale": 8.0}  # Luo et al. 2023; the scale that its card takes

# ---- latent diffusion's own models, and the upscaler ----------------------------------------------------------------

LDM = replace(
    SD1,
    title="LDM unconditional (CelebA-HQ, FFHQ or LSUN bedrooms)",
    unet=UNETS["ldm_celeba_ffhq_beds256"],
    vae=AUTOENCODERS["vq_f4"],
    text=None,
    conditioner="nothing",
    beta_start=0.0015,
    beta_end=0.0195,
    scale_factor=1.0,
    resolution=256,
    steps=200,
    scale=1.0,
)
ZOO = {
    "ldm_celeba_ffhq_beds256": LDM,
    "ldm_lsun_churches256": replace(
        LDM,
        title="LDM unconditional (LSUN churches)",
        unet=UNETS["ldm_lsun_churches256"],
        vae=KL_F8,
        beta_end=0.0155,
        scale_factor=IN_THE_FILE,
        steps=400,
    ),
    "ldm_text2img_large": replace(
        SD1,
        title="LDM text-to-image (1.45 B, LAION-400M)",
        unet=UNETS["ldm_text2img_large"],
        text=BERT_LARGE,
        conditioner="bert",
        resolution=256,
        scale=5.0,
    ),
    "ldm_text2img256": replace(
        LDM,
        title="LDM text-to-image 256",
        unet=UNETS["ldm_text2img256"],
        text=replace(BERT_LARGE, width=640),
        conditioner="bert",
        steps=100,
    ),
    "ldm_cin256_v2": replace(
        LDM,
        title="LDM ImageNet classes (v2)",
        unet=UNETS["ldm_cin256_v2"],
        text=ClassSpec(num_classes=1001, width=512, unconditional=1000),
        conditioner="classes",
        steps=20,
        scale=3.0,
    ),
    "ldm_cin256": replace(
        LDM,
        title="LDM ImageNet classes",
        unet=UNETS["ldm_cin256"],
        vae=AUTOENCODERS["vq_f8"],
        text=ClassSpec(num_classes=1000, width=512, unconditional=None),
        conditioner="classes",
        sampler="ddpm",
    ),
    "ldm_layout2img": replace(
        LDM,
        title="LDM layout-to-image (OpenImages)",
        unet=UNETS["ldm_layout2img"],
        text=BERTSpec(vocab_size=8192, length=92, width=512, layers=16),
        conditioner="layouts",
        beta_end=0.0205,
    ),
    "ldm_semantic_synthesis": replace(
        LDM,
        title="LDM semantic synthesis",
        unet=UNETS["ldm_semantic_synthesis"],
        text=LabelMapSpec(num_labels=182, channels=3, halvings=2),
        conditioner="label_maps",
        beta_end=0.0205,
    ),
    "rdm768": replace(
        LDM,
        title="retrieval-augmented diffusion 768",
        unet=UNETS["rdm768"],
        vae=AUTOENCODERS["kl_f16"],
        conditioner="embeddings",
        beta_end=0.015,
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
        beta_end=0.0205,
        resolution=512,
        steps=50,
    ),
    "ldm_bsr_sr": replace(
        LDM,
        title="LDM super-resolution",
        unet=UNETS["ldm_bsr_sr"],
        task="upscale",
        beta_end=0.0155,
        steps=100,
        sampler="ddpm",
    ),
    "x4": replace(
        SD1,
        title="Stable Diffusion x4 upscaler",
        unet=UNETS["x4"],
        vae=AUTOENCODERS["kl_f4_x4upscaler"],
        text=OPEN_CLIP_H,
        task="upscale",
        prediction="v",
        beta_start=0.0001,
        beta_end=0.02,
        scale_factor=0.08333,
        scale=9.0,
    ),
}

FAMILIES = {
    "sd1": SD1,
    "sd1_inpaint": replace(SD1, title="Stable Diffusion 1.x inpainting", unet=UNETS["sd1_inpaint"], task="inpaint"),
    "instruct_pix2pix": replace(
        SD1, title="InstructPix2Pix", unet=UNETS["instruct_pix2pix"], task="instruct", steps=100, sampler="euler_a"
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
    "sdxl_turbo": replace(SDXL, title="SDXL-Turbo", resolution=512, **TURBO),  # weights do not tell: identify.TURBOS
    "sdxl_inpaint": replace(SDXL, title="Stable Diffusion XL inpainting", unet=UNETS["sdxl_inpaint"], task="inpaint"),
    "lcm_sdxl": replace(SDXL, title="Latent Consistency Model (Stable Diffusion XL)", unet=UNETS["lcm_sdxl"], **LCM),
    "sdxl_refiner": replace(
        SDXL,
        title="Stable Diffusion XL refiner",
        unet=UNETS["sdxl_refiner"],
        text=OPEN_CLIP_G,
        text_2=None,
        conditioner="refiner",
    ),
    **ZOO,
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
