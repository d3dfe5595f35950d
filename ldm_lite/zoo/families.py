"""The model families, one row each: the specs of the networks, the noise process, and the default settings.

detection.py infers a file's architecture from its shapes and finds the row with the same specs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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

IN_THE_FILE = math.nan  # a scale factor that is stored only in the file's buffer `scale_factor`


@dataclass(frozen=True)
class ScaledLinear:
    """A variance-preserving noise process with 1000 betas, linear in their square roots."""

    start: float
    end: float

    @property
    def betas(self) -> Array:
        """The betas, (1000,)."""
        return linear_betas(self.start, self.end)


@dataclass(frozen=True)
class Linear(ScaledLinear):
    """The same with 1000 betas linear themselves: "linear" in diffusers."""

    @property
    def betas(self) -> Array:
        """The betas, (1000,)."""
        return np.linspace(self.start, self.end, 1000)


@dataclass(frozen=True)
class Betas:
    """A variance-preserving noise process given by its betas, (1000,)."""

    values: tuple[float, ...]

    @property
    def betas(self) -> Array:
        """The betas, (1000,)."""
        return np.array(self.values, dtype=np.float64)


@dataclass(frozen=True)
class Cosine:
    """A variance-preserving noise process with the cosine schedule of Nichol and Dhariwal 2021."""

    @property
    def betas(self) -> Array:
        """The betas, (1000,)."""
        return cosine_betas()


Noise = ScaledLinear | Cosine | Betas


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its networks, its noise process, and its default settings."""

    title: str
    unet: UNetSpec
    vae: AutoencoderSpec
    text_encoders: tuple[EncoderSpec, ...]  # encoders of the prompt: text, a class, boxes, a label map
    conditioner: str  # how their outputs become the UNet's inputs: a key of CONDITIONERS
    task: str  # "txt2img" (and tasks built on it), "inpaint", ...: see job.TASKS
    sgm: bool  # text encoders have the key names of generative-models
    prediction: Prediction
    noise: Noise
    scale_factor: float  # UNet latents = scale_factor * autoencoder latents; may be IN_THE_FILE
    sampler: str  # any name of a sampler, with its timestep spacing
    resolution: int  # pixels per side
    v_resolution: int | None  # of the v-prediction variant, which only weights tell apart; None = no such variant
    vae_overflows: bool  # the autoencoder overflows in float16, so it stays in float32
    steps: int
    scale: float  # classifier-free guidance
    threshold: tuple[float, float] | None  # percentile and limit of dynamic thresholding, for pixel models
    original_ema: bool  # the original code samples with the EMA copy: `use_ema` of its config, and its ema_scope

    @property
    def text(self) -> EncoderSpec | None:
        """Spec of the first text encoder; None if there is none."""
        return self.text_encoders[0] if self.text_encoders else None

    @property
    def networks(self) -> dict[str, Spec]:
        """Specs of its networks by role: "unet", "vae", "text_encoder", "text_encoder_2", ..."""
        specs: dict[str, Spec] = {"unet": self.unet}
        if not isinstance(self.vae, PixelSpec):
            specs["vae"] = self.vae
        return specs | dict(zip(text_roles(self.text_encoders), self.text_encoders, strict=True))


def text_roles(encoders: Sequence[object]) -> list[str]:
    """Return the roles of text encoders: "text_encoder", "text_encoder_2", ..."""
    return [f"text_encoder_{i + 1}" if i else "text_encoder" for i in range(len(encoders))]


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
        text_encoders=(ClassSpec(num_classes=1001, width=512, unconditional=1000),),
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
        text_encoders=(ClassSpec(num_classes=1000, width=512, unconditional=None),),
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
