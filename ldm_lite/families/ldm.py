"""Latent diffusion's own models: unconditional, of classes, of text, of layouts, and others; the zoo of 2021 and 2022.

Source: Rombach et al. 2022; CompVis/latent-diffusion, configs.
"""

from dataclasses import replace

from ldm_lite.conditioning import inputs
from ldm_lite.conditioning.prompts import Conditioner, clip
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.bert import BERT_LARGE, BERTSpec
from ldm_lite.models.embedders import ClassSpec, LabelMapSpec
from ldm_lite.models.vae_vq import VQSpec
from ldm_lite.zoo.family import IN_THE_FILE, KL_F8, Preserving

KL_F4 = replace(KL_F8, channel_mult=(1, 2, 4), z_channels=3, embed_dim=3)
KL_F16 = replace(KL_F8, channel_mult=(1, 1, 2, 2, 4), z_channels=16, embed_dim=16, attn_levels=(4,))
VQ_F4 = VQSpec(**vars(KL_F4), num_codes=8192)
VQ_F8 = replace(VQ_F4, channel_mult=(1, 2, 2, 4), z_channels=4, embed_dim=4, attn_levels=(3,), num_codes=16384)

LDM_UNET = replace(  # text2img256; most of the LDM zoo is defined by its difference from this spec
    SD1.unet,
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

LDM = replace(
    SD1,
    title="LDM unconditional (CelebA-HQ, FFHQ or LSUN bedrooms)",
    unet=UNCONDITIONAL_UNET,
    vae=VQ_F4,
    text_encoders=(),
    conditioner="nothing",
    noise=Preserving(0.0015, 0.0195),
    scale_factor=1.0,
    resolution=256,
    steps=200,
    scale=1.0,
    original_ema=True,
)
ROWS = {
    "ldm_celeba_ffhq_beds256": LDM,
    "ldm_lsun_churches256": replace(
        LDM,
        title="LDM unconditional (LSUN churches)",
        unet=replace(
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
        vae=KL_F8,
        noise=Preserving(0.0015, 0.0155),
        scale_factor=IN_THE_FILE,
        steps=400,
    ),
    "ldm_text2img_large": replace(
        SD1,
        title="LDM text-to-image (1.45 B, LAION-400M)",
        unet=replace(SD1.unet, context_dim=1280),
        text_encoders=(BERT_LARGE,),
        conditioner="bert",
        resolution=256,
        scale=5.0,
    ),
    "ldm_text2img256": replace(
        LDM,
        title="LDM text-to-image 256",
        unet=LDM_UNET,
        text_encoders=(replace(BERT_LARGE, width=640),),
        conditioner="bert",
        steps=100,
    ),
    "ldm_cin256_v2": replace(
        LDM,
        title="LDM ImageNet classes (v2)",
        unet=replace(LDM_UNET, num_heads=1, head_dim=None, context_dim=512),
        text_encoders=(ClassSpec(num_classes=1001, width=512, guided=True),),
        conditioner="classes",
        steps=20,
        scale=3.0,
        original_ema=False,
    ),
    "ldm_cin256": replace(
        LDM,
        title="LDM ImageNet classes",
        unet=replace(
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
        vae=VQ_F8,
        text_encoders=(ClassSpec(num_classes=1000, width=512),),
        conditioner="classes",
        sampler="ddpm",
    ),
    "ldm_layout2img": replace(
        LDM,
        title="LDM layout-to-image (OpenImages)",
        unet=replace(
            LDM_UNET,
            model_channels=128,
            channel_mult=(1, 2, 3, 4),
            transformer_depth=(0, 3, 3, 3),
            middle_depth=3,
            context_dim=512,
        ),
        text_encoders=(BERTSpec(vocab_size=8192, length=92, width=512, layers=16),),
        conditioner="layouts",
        noise=Preserving(0.0015, 0.0205),
    ),
    "ldm_semantic_synthesis": replace(
        LDM,
        title="LDM semantic synthesis",
        unet=replace(
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
        text_encoders=(LabelMapSpec(num_labels=182, channels=3, halvings=2),),
        conditioner="label_maps",
        noise=Preserving(0.0015, 0.0205),
    ),
    "rdm768": replace(
        LDM,
        title="retrieval-augmented diffusion 768",
        unet=replace(
            LDM_UNET,
            in_channels=16,
            out_channels=16,
            model_channels=448,
            channel_mult=(1, 2, 3, 4),
            transformer_depth=(1, 1, 1, 0),
            context_dim=768,
        ),
        vae=KL_F16,
        conditioner="embeddings",
        noise=Preserving(0.0015, 0.015),
        scale_factor=0.22765929,
        resolution=768,
        steps=50,
        scale=5.0,
    ),
    "ldm_inpainting_big": replace(
        LDM,
        title="LDM inpainting",
        unet=replace(
            UNCONDITIONAL_UNET, in_channels=7, model_channels=256, num_heads=8, head_dim=None, resblock_updown=True
        ),
        vae=replace(VQ_F4, mid_attn=False),
        task="inpaint_ldm",
        noise=Preserving(0.0015, 0.0205),
        resolution=512,
        steps=50,
    ),
    "ldm_bsr_sr": replace(
        LDM,
        title="LDM super-resolution",
        unet=replace(
            UNCONDITIONAL_UNET,
            in_channels=6,
            model_channels=160,
            channel_mult=(1, 2, 2, 4),
            transformer_depth=(0, 0, 0, 1),
        ),
        task="upscale",
        noise=Preserving(0.0015, 0.0155),
        steps=100,
        sampler="ddpm",
    ),
}

TEXT = Conditioner(clip, without_clip_skip="has no CLIP")  # of their own encoder
NOTHING = Conditioner(inputs.nothing, reads="none", without_clip_skip="has no CLIP")
CLASSES = replace(NOTHING, encode=inputs.classes, reads="text")
LAYOUTS = replace(NOTHING, encode=inputs.layouts, reads="files")
LABEL_MAPS = replace(LAYOUTS, encode=inputs.label_maps)
EMBEDDINGS = replace(
    LAYOUTS,
    encode=inputs.embeddings,
    length=lambda model, prompt: len(inputs.read_embeddings(model, prompt)),
)
