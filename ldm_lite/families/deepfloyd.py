"""DeepFloyd IF: stages on pixels, the second of which enlarges; T5 is in a separate file, shared by them."""

from dataclasses import replace
from functools import partial
from operator import attrgetter

from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.pixels import PixelSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.zoo.family import COSINE, Preserving

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
IF = replace(
    SD1,
    title="DeepFloyd IF, stage I",
    unet=IF_I_XL,  # or another size
    vae=PixelSpec(),
    text_encoders=(),
    conditioner="t5",
    task="cascade",
    noise=Preserving(curve=COSINE),
    scale_factor=1.0,
    sampler="ddpm_respaced",
    resolution=64,
    steps=150,
    scale=7.0,
    threshold=(0.95, 1.5),
)
ROWS = {
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
row = partial(chosen, ROWS, IFSpec.from_shapes, variant=attrgetter("super_resolution"))
