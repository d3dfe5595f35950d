"""The model families, a row each: the specs of its networks, its noise schedule, and what its users expect.

identify.py infers a file's architecture from its shapes and looks it up here: the row *is* the fingerprint.
"""

from dataclasses import dataclass, replace

from torch import nn

from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.models.clip import CLIPTextEncoder, CLIPTextSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.models.vae_kl import AutoencoderKL, VAESpec

Spec = UNetSpec | VAESpec | CLIPTextSpec
NETWORKS: dict[type, type[nn.Module]] = {UNetSpec: UNet, VAESpec: AutoencoderKL, CLIPTextSpec: CLIPTextEncoder}


def build(spec: Spec) -> nn.Module:
    """The network that a spec describes, on the device of the context."""
    return NETWORKS[type(spec)](spec)


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its networks, its noise schedule, and what its users expect by default."""

    title: str
    unet: UNetSpec
    vae: VAESpec
    text: CLIPTextSpec | None  # what reads the prompts (or classes, or boxes)
    text_2: CLIPTextSpec | None  # a second one
    conditioner: str  # how those make what the UNet reads: a name in conditioning.CONDITIONERS
    task: str  # what it is for: "txt2img" (and all that can be made of it), "inpaint" or "instruct"
    prediction: Prediction
    beta_start: float  # of 1000 betas, linear in their square roots
    beta_end: float
    scale_factor: float  # latents in the UNet's scale = scale_factor * the autoencoder's
    resolution: int  # pixels a side
    steps: int
    scale: float  # classifier-free guidance

    @property
    def networks(self) -> dict[str, Spec]:
        """The specs of its networks by their roles, which are the names of Pipeline's fields."""
        specs: dict[str, Spec | None] = {
            "unet": self.unet,
            "vae": self.vae,
            "text_encoder": self.text,
            "text_encoder_2": self.text_2,
        }
        return {role: spec for role, spec in specs.items() if spec is not None}


# ---- networks -------------------------------------------------------------------------------------------------------

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
LDM_UNET = replace(  # text2img256; most of the LDM zoo states its difference from this row
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

# Every LDM UNet by the name of its original.  One without a row in FAMILIES is recognised, and refused by name.
UNETS = {
    "sd1": SD1_UNET,
    "sd1_inpaint": replace(SD1_UNET, in_channels=9),
    "instruct_pix2pix": replace(SD1_UNET, in_channels=8),
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

KL_F8 = VAESpec(
    channels=128,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=2,
    z_channels=4,
    embed_dim=4,
    attn_levels=(),
    mid_attn=True,
)
CLIP_L = CLIPTextSpec(
    vocab_size=49408, length=77, width=768, mlp_width=3072, layers=12, heads=12, activation="quick_gelu"
)

# ---- families -------------------------------------------------------------------------------------------------------

SD1 = Family(
    title="Stable Diffusion 1.x",
    unet=SD1_UNET,
    vae=KL_F8,
    text=CLIP_L,
    text_2=None,
    conditioner="clip",
    task="txt2img",
    prediction="eps",
    beta_start=0.00085,
    beta_end=0.012,
    scale_factor=0.18215,
    resolution=512,
    steps=50,
    scale=7.5,
)


FAMILIES = {
    "sd1": SD1,
    "sd1_inpaint": replace(SD1, title="Stable Diffusion 1.x inpainting", unet=UNETS["sd1_inpaint"], task="inpaint"),
    "instruct_pix2pix": replace(SD1, title="InstructPix2Pix", unet=UNETS["instruct_pix2pix"], task="instruct"),
}
