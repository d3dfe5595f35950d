"""Stable Diffusion 3 and 3.5: CLIP-L, OpenCLIP bigG and T5, which may be missing; 3.5 medium skips layers to guide."""

from collections.abc import Mapping
from dataclasses import replace

from ldm_lite.core.layers import Shapes
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.mmdit import RELEASED, MMDiTSpec
from ldm_lite.models.open_clip import OPEN_CLIP_G
from ldm_lite.models.t5 import T5_XXL
from ldm_lite.zoo.families import chosen
from ldm_lite.zoo.family import KL_F8_16, Family, Flow, Hint, SkipLayers

SD3 = replace(
    SD1,
    title="Stable Diffusion 3 medium",
    unet=RELEASED["sd3_medium"],
    vae=KL_F8_16,
    text_encoders=(replace(CLIP_L, skip=1, norm=False), OPEN_CLIP_G, T5_XXL),
    optional=(T5_XXL,),
    conditioner="sd3",
    prediction="flow",
    noise=Flow("1000 s", "flow_sd3", shift=3.0),
    scale_factor=1.5305,
    shift_factor=0.0609,
    sampler="dpmpp_2m_sd3",
    resolution=1024,
    dtype="bf16",
    vae_overflows=True,
    scale=5.0,
)
LARGE = replace(SD3, title="Stable Diffusion 3.5 large", unet=RELEASED["sd35_large"], steps=40, scale=4.5)
ROWS = {
    "sd3_medium": SD3,
    "sd35_medium": replace(
        SD3,
        title="Stable Diffusion 3.5 medium",
        unet=RELEASED["sd35_medium"],
        skip_layers=SkipLayers((7, 8, 9), scale=2.5, start=0.01, end=0.20),
    ),
    "sd35_large": replace(LARGE, hints=(Hint("turbo", "sd35_large_turbo"),)),
    "sd35_large_turbo": replace(  # shapes do not tell
        LARGE, title="Stable Diffusion 3.5 large turbo", sampler="euler", steps=4, scale=1.0
    ),
}


def row(unet: Shapes, metadata: Mapping[str, str]) -> Family:
    """Return the row of a file, with the spec of its network.  Raises ValueError for other networks."""

    def variant(spec: MMDiTSpec) -> object:
        return spec.qk_norm, spec.dual_depth > 0, spec.in_channels - spec.out_channels

    return chosen(ROWS, MMDiTSpec.from_shapes(unet), variant, metadata)
