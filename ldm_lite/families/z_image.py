"""Z-Image and Z-Image Turbo, whose weights do not tell them apart; Qwen3 reads the text."""

from collections.abc import Mapping
from dataclasses import replace

from ldm_lite.core.layers import Shapes
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.qwen3 import QWEN3_4B
from ldm_lite.models.z_image import RELEASED, ZImageSpec
from ldm_lite.zoo.families import chosen
from ldm_lite.zoo.family import KL_F8_16, Family, Flow, Hint

PLAIN = replace(
    SD1,
    title="Z-Image",
    unet=RELEASED["z_image"],
    vae=KL_F8_16,
    vae_file="Comfy-Org/z_image_turbo/split_files/vae/ae.safetensors",
    text_encoders=(QWEN3_4B,),
    conditioner="z_image",
    prediction="reverse_flow",
    noise=Flow("1 - s", "flow", shift=6.0),
    scale_factor=0.3611,
    shift_factor=0.1159,
    sampler="euler",
    resolution=1024,
    dtype="bf16",
    vae_overflows=True,
    steps=50,
    scale=5.0,  # 1 more than its makers'
)
ROWS = {
    "z_image_turbo": replace(
        PLAIN,
        title="Z-Image Turbo",
        noise=Flow("1 - s", "flow", shift=3.0),
        steps=8,
        scale=1.0,
        hints=(Hint("turbo", "z_image", like="Z-Image", lacks=True),),
    ),
    "z_image": PLAIN,
}


def row(unet: Shapes, metadata: Mapping[str, str]) -> Family:
    """Return the row of a file, with the spec of its network.  Raises ValueError for other networks."""

    def variant(spec: ZImageSpec) -> object:
        return spec.in_channels - spec.out_channels

    return chosen(ROWS, ZImageSpec.from_shapes(unet), variant, metadata)
