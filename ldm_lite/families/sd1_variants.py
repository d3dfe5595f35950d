"""Models derived from Stable Diffusion 1.x: inpainting, InstructPix2Pix, Latent Consistency Models."""

from dataclasses import replace

from ldm_lite.families.sd1 import ROWS as PLAIN

SD1 = PLAIN["sd1"]
ROWS = {
    "sd1_inpaint": replace(
        SD1, title="Stable Diffusion 1.x inpainting", unet=replace(SD1.unet, in_channels=9), task="inpaint"
    ),
    "instruct_pix2pix": replace(
        SD1,
        title="InstructPix2Pix",
        unet=replace(SD1.unet, in_channels=8),
        task="instruct",
        steps=100,
        sampler="euler_a",
        recipes=(),
        original_ema=True,
    ),
    "lcm": replace(  # Luo et al. 2023
        SD1,
        title="Latent Consistency Model (Stable Diffusion 1.x)",
        unet=replace(SD1.unet, guidance_dim=256),
        resolution=768,
        sampler="lcm",
        steps=4,
        scale=8.0,  # of its model card
        recipes=(),
    ),
}
