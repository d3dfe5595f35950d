"""Specs of the networks in the research repositories' checkpoints, by the names of their originals.

NETWORKS maps each spec class to its network class; build() makes a network from its spec.
"""

from dataclasses import replace

from torch import nn

from ldm_lite.core.layers import Shapes
from ldm_lite.core.vae import AutoencoderKL, VAESpec
from ldm_lite.models import flux, mmdit, taesd, vae_vq, z_image
from ldm_lite.models.bert import BERT_LARGE as BERT_LARGE
from ldm_lite.models.bert import BERTSpec, BERTTextEncoder
from ldm_lite.models.clip import CLIP_L as CLIP_L
from ldm_lite.models.clip import CLIPTextEncoder, CLIPTextSpec
from ldm_lite.models.embedders import ClassEmbedder, ClassSpec, LabelMapRescaler, LabelMapSpec
from ldm_lite.models.flux import FLUX_DEV as FLUX_DEV
from ldm_lite.models.flux import Flux, FluxSpec
from ldm_lite.models.mmdit import MMDiT, MMDiTSpec
from ldm_lite.models.open_clip import OPEN_CLIP_G as OPEN_CLIP_G
from ldm_lite.models.open_clip import OPEN_CLIP_H as OPEN_CLIP_H
from ldm_lite.models.open_clip import OpenCLIPTextEncoder, OpenCLIPTextSpec
from ldm_lite.models.pixels import Pixels, PixelSpec
from ldm_lite.models.qwen3 import QWEN3_4B as QWEN3_4B
from ldm_lite.models.qwen3 import Qwen3, Qwen3Spec
from ldm_lite.models.t5 import T5_XXL as T5_XXL
from ldm_lite.models.t5 import T5Encoder, T5Spec
from ldm_lite.models.taesd import TAESD, TAESDSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.models.unet_if import IFSpec, UNetIF
from ldm_lite.models.vae_vq import VQModel, VQSpec
from ldm_lite.models.z_image import ZImage, ZImageSpec

AutoencoderSpec = VAESpec | VQSpec | TAESDSpec | PixelSpec
TextSpec = CLIPTextSpec | OpenCLIPTextSpec | T5Spec | Qwen3Spec
EncoderSpec = TextSpec | BERTSpec | ClassSpec | LabelMapSpec  # of a prompt's encoder
DenoiserSpec = UNetSpec | FluxSpec | MMDiTSpec | ZImageSpec
Spec = DenoiserSpec | AutoencoderSpec | EncoderSpec
Autoencoder = AutoencoderKL | VQModel | TAESD | Pixels

NETWORKS: dict[type, type[nn.Module]] = {
    UNetSpec: UNet,
    IFSpec: UNetIF,
    FluxSpec: Flux,
    MMDiTSpec: MMDiT,
    ZImageSpec: ZImage,
    VAESpec: AutoencoderKL,
    VQSpec: VQModel,
    TAESDSpec: TAESD,
    PixelSpec: Pixels,
    CLIPTextSpec: CLIPTextEncoder,
    OpenCLIPTextSpec: OpenCLIPTextEncoder,
    T5Spec: T5Encoder,
    Qwen3Spec: Qwen3,
    BERTSpec: BERTTextEncoder,
    ClassSpec: ClassEmbedder,
    LabelMapSpec: LabelMapRescaler,
}


def build(spec: Spec) -> nn.Module:
    """Build the network that a spec describes, on the default device."""
    return NETWORKS[type(spec)](spec)


def infer_vae(shapes: Shapes) -> VAESpec | VQSpec | TAESDSpec:
    """Return the spec of an autoencoder whose weights have these shapes.  Raises ValueError if they make no sense."""
    if any(probe in shapes for probe in taesd.PROBES):
        return TAESDSpec.from_shapes(shapes)
    return (VQSpec if vae_vq.PROBE in shapes else VAESpec).from_shapes(shapes)


# ---- UNets ----------------------------------------------------------------------------------------------------------

SD1_UNET = UNetSpec(
    in_channels=4,
    out_channels=4,
    model_channels=320,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=(2, 2, 2, 2),
    transformer_depth=(1, 1, 1, 0),
    middle_depth=1,
    num_heads=8,
    head_dim=None,
    context_dim=768,
    linear_proj=False,
    cross_only=(False, False, False, False),
    vector_dim=None,
    guidance_dim=None,
    num_classes=None,
    scale_shift=False,
    resblock_updown=False,
)
SD2_UNET = replace(SD1_UNET, num_heads=None, head_dim=64, context_dim=1024, linear_proj=True)
SDXL_UNET = replace(
    SD2_UNET,
    channel_mult=(1, 2, 4),
    num_res_blocks=(2, 2, 2),
    transformer_depth=(0, 2, 10),
    middle_depth=10,
    context_dim=2048,
    cross_only=(False, False, False),
    vector_dim=2816,
)
LDM_UNET = replace(  # text2img256; most of the LDM zoo is defined by its difference from this spec
    SD1_UNET,
    in_channels=3,
    out_channels=3,
    model_channels=192,
    channel_mult=(1, 2, 3, 5),
    transformer_depth=(0, 1, 1, 1),
    num_heads=None,
    head_dim=32,
    context_dim=640,
)
UNCONDITIONAL_UNET = replace(LDM_UNET, model_channels=224, channel_mult=(1, 2, 3, 4), context_dim=None)

# Every LDM UNet by its original name.  If one has no row in FAMILIES, the error names it.
UNETS = {
    "sd1": SD1_UNET,
    "sd1_inpaint": replace(SD1_UNET, in_channels=9),
    "instruct_pix2pix": replace(SD1_UNET, in_channels=8),
    "lcm": replace(SD1_UNET, guidance_dim=256),
    "sd2": SD2_UNET,
    "sd2_inpaint": replace(SD2_UNET, in_channels=9),
    "sd2_depth": replace(SD2_UNET, in_channels=5),
    "sd2_unclip_h": replace(SD2_UNET, vector_dim=2048),
    "sd2_unclip_l": replace(SD2_UNET, vector_dim=1536),
    "x4": replace(
        SD2_UNET,
        in_channels=7,
        model_channels=256,
        channel_mult=(1, 2, 2, 4),
        transformer_depth=(0, 1, 1, 1),
        num_heads=8,
        head_dim=None,
        cross_only=(False, True, True, False),
        num_classes=1000,
    ),
    "sdxl_base": SDXL_UNET,
    "sdxl_inpaint": replace(SDXL_UNET, in_channels=9),
    "lcm_sdxl": replace(SDXL_UNET, guidance_dim=256),
    "sdxl_refiner": replace(
        SD2_UNET,
        model_channels=384,
        transformer_depth=(0, 4, 4, 0),
        middle_depth=4,
        context_dim=1280,
        vector_dim=2560,
    ),
    "ldm_text2img_large": replace(SD1_UNET, context_dim=1280),
    "ldm_text2img256": LDM_UNET,
    "ldm_cin256_v2": replace(LDM_UNET, num_heads=1, head_dim=None, context_dim=512),
    "ldm_cin256": replace(
        LDM_UNET,
        in_channels=4,
        out_channels=4,
        model_channels=256,
        channel_mult=(1, 2, 4),
        num_res_blocks=(2, 2, 2),
        transformer_depth=(1, 1, 1),
        context_dim=512,
        cross_only=(False, False, False),
    ),
    "ldm_layout2img": replace(
        LDM_UNET,
        model_channels=128,
        channel_mult=(1, 2, 3, 4),
        transformer_depth=(0, 3, 3, 3),
        middle_depth=3,
        context_dim=512,
    ),
    "rdm768": replace(
        LDM_UNET,
        in_channels=16,
        out_channels=16,
        model_channels=448,
        channel_mult=(1, 2, 3, 4),
        transformer_depth=(1, 1, 1, 0),
        context_dim=768,
    ),
    "ldm_celeba_ffhq_beds256": UNCONDITIONAL_UNET,
    "ldm_lsun_churches256": replace(
        UNCONDITIONAL_UNET,
        in_channels=4,
        out_channels=4,
        model_channels=192,
        channel_mult=(1, 2, 2, 4, 4),
        num_res_blocks=(2, 2, 2, 2, 2),
        transformer_depth=(1, 1, 1, 1, 0),
        num_heads=8,
        head_dim=None,
        cross_only=(False, False, False, False, False),
        scale_shift=True,
        resblock_updown=True,
    ),
    "ldm_inpainting_big": replace(
        UNCONDITIONAL_UNET, in_channels=7, model_channels=256, num_heads=8, head_dim=None, resblock_updown=True
    ),
    "ldm_bsr_sr": replace(
        UNCONDITIONAL_UNET,
        in_channels=6,
        model_channels=160,
        channel_mult=(1, 2, 2, 4),
        transformer_depth=(0, 0, 0, 1),
    ),
    "ldm_semantic_synthesis": replace(
        UNCONDITIONAL_UNET,
        in_channels=6,
        model_channels=128,
        channel_mult=(1, 4, 8),
        num_res_blocks=(2, 2, 2),
        transformer_depth=(0, 0, 0),
        num_heads=8,
        head_dim=None,
        cross_only=(False, False, False),
    ),
}

IF_I_XL = IFSpec(
    in_channels=3,
    out_channels=6,
    model_channels=704,
    channel_mult=(1, 2, 3, 4),
    num_res_blocks=(3, 3, 3, 3),
    transformer_depth=(0, 1, 1, 1),
    middle_depth=1,
    num_heads=None,
    head_dim=64,
    context_dim=4096,
    linear_proj=False,
    cross_only=(False, False, False, False),
    vector_dim=None,
    guidance_dim=None,
    num_classes=None,
    scale_shift=True,
    resblock_updown=True,
    pool_heads=64,
    super_resolution=False,
)
IF_II_L = replace(
    IF_I_XL,
    in_channels=6,
    model_channels=160,
    channel_mult=(1, 2, 4, 6, 8),
    num_res_blocks=(2, 2, 3, 5, 5),
    transformer_depth=(0, 0, 0, 1, 1),
    cross_only=(False, False, False, False, False),
    num_classes=1000,
    super_resolution=True,
)

# ---- transformers ---------------------------------------------------------------------------------------------------

TRANSFORMERS: dict[str, FluxSpec | MMDiTSpec | ZImageSpec] = {**flux.RELEASED, **mmdit.RELEASED, **z_image.RELEASED}

# ---- autoencoders ---------------------------------------------------------------------------------------------------

KL_F8 = VAESpec(channels=128, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=4, embed_dim=4)
KL_F4 = replace(KL_F8, channel_mult=(1, 2, 4), z_channels=3, embed_dim=3)
KL_F16 = replace(KL_F8, channel_mult=(1, 1, 2, 2, 4), z_channels=16, embed_dim=16, attn_levels=(4,))
VQ_F4 = VQSpec(**vars(KL_F4), num_codes=8192)
VQ_F8 = replace(VQ_F4, channel_mult=(1, 2, 2, 4), z_channels=4, embed_dim=4, attn_levels=(3,), num_codes=16384)

AUTOENCODERS = {
    "kl_f4": KL_F4,
    "kl_f4_x4upscaler": replace(KL_F4, z_channels=4, embed_dim=4),
    "kl_f8_sd": KL_F8,
    "kl_f8_flux": replace(KL_F8, z_channels=16, embed_dim=16, quant=False),  # and Stable Diffusion 3, Z-Image
    "kl_f16": KL_F16,
    "kl_f32": replace(KL_F16, channel_mult=(1, 1, 2, 2, 4, 4), z_channels=64, embed_dim=64, attn_levels=(4, 5)),
    "vq_f4": VQ_F4,
    "vq_f4_noattn": replace(VQ_F4, mid_attn=False),
    "vq_f8": VQ_F8,
    "vq_f8_n256": replace(VQ_F8, num_codes=256),
    "vq_f16": replace(VQ_F8, channel_mult=(1, 1, 2, 2, 4), z_channels=8, embed_dim=8, attn_levels=(4,)),
}
