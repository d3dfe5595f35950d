"""Stable Diffusion 1.x: the row that other families' rows are derived from."""

from dataclasses import replace

from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.unet import LDMUNetSpec
from ldm_lite.zoo.family import KL_F8, KL_F8_16, FamilyRow, Preserving, Recipe

CLIP_L_FILE = "comfyanonymous/flux_text_encoders/clip_l.safetensors"
SD1 = FamilyRow(
    title="Stable Diffusion 1.x",
    unet=LDMUNetSpec(
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
    ),
    vae=KL_F8,
    text_encoders=(CLIP_L,),
    text_files=(CLIP_L_FILE,),
    conditioner="clip",
    prediction="eps",
    noise=Preserving(0.00085, 0.012),
    scale_factor=0.18215,
    sampler="ddim",
    resolution=512,
    steps=50,
    scale=7.5,
    base_version="sd_v1",
)
TRANSFORMER = replace(  # what most rectified flows have
    SD1,
    vae=KL_F8_16,
    prediction="flow",
    sampler="euler",
    resolution=1024,
    dtype="bf16",
    vae_overflows=True,
)
VAE_FILE = "stabilityai/sd-vae-ft-mse-original/vae-ft-mse-840000-ema-pruned.safetensors"  # of 1.x and 2.x
# Of networks and LoRAs of Stable Diffusion 1.x, 2.x and XL.
RECIPES = (
    Recipe(r"v[-_ ]?pred", "", prediction="v"),
    Recipe(
        r"lightning",
        "ByteDance/SDXL-Lightning",
        4,
        1.0,
        "euler_trailing",
        lora=r"lightning.*\d[-_ ]?step|xl[-_ ]lightning",
    ),
    Recipe(r"hyper[-_ ]?sd.*cfg", "ByteDance/Hyper-SD", 8, 5.0, "ddim_trailing"),
    Recipe(r"hyper[-_ ]?(sd|xl|\d|lora)", "ByteDance/Hyper-SD", 4, 1.0, "ddim_trailing"),
    Recipe(r"(?<![a-z])dmd2?(?![a-z])", "tianweiy/DMD2", 4, 1.0, "lcm_trailing"),
    Recipe(r"(?<![a-z])pcm(?![a-z]).*normalcfg", "wangfuyun/PCM_Weights", 4, 7.5, "ddim_trailing"),
    Recipe(r"(?<![a-z])pcm(?![a-z])", "wangfuyun/PCM_Weights", 4, 1.0, "ddim_trailing"),
    Recipe(r"(?<![a-z])tcd(?![a-z])", "h1t/TCD-SDXL-LoRA", 4, 1.0, "tcd"),
    Recipe(r"(?<![a-z])lcm(?![a-z])", "latent-consistency/lcm-lora-sdxl", 4, 1.5, "lcm"),
    Recipe(r"(?<![a-z])flash[-_ ](sd|pixart)", "jasperai/flash-sdxl", 4, 1.0, "lcm_trailing"),
    Recipe(r"(sd|xl)[-_ ]?flash", "sd-community/sdxl-flash", 7, 3.0, "dpmpp_sde_trailing"),
    Recipe(r"turbo", "stabilityai/sdxl-turbo", 4, 1.0, "euler_a_trailing", lora=r"(sd|xl)[-_ ]?turbo"),
)
ROWS = {"sd1": replace(SD1, vae_file=VAE_FILE, called=r"(sd|stable[-_]diffusion)[-_ ]?v?1", recipes=RECIPES)}
