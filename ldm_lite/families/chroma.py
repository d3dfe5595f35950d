"""Chroma1: HD (and Base), and Flash, whose weights do not tell them apart; T5 alone reads the text."""

from collections.abc import Mapping
from dataclasses import replace

from ldm_lite.core.layers import Shapes
from ldm_lite.families.flux import DEV
from ldm_lite.models.chroma import RELEASED, ChromaSpec
from ldm_lite.models.t5 import T5_XXL
from ldm_lite.zoo.families import chosen
from ldm_lite.zoo.family import Family, Hint

HD = replace(
    DEV,
    title="Chroma1-HD",
    unet=RELEASED["chroma"],
    text_encoders=(T5_XXL,),
    conditioner="chroma",
    steps=40,
    scale=3.0,
    with_loras=None,
    hints=(Hint("flash", "chroma_flash", like="HD and Base"),),
)
ROWS = {
    "chroma": HD,
    "chroma_flash": replace(HD, title="Chroma1-Flash", sampler="heun", steps=8, scale=1.0, hints=()),
}


def row(unet: Shapes, metadata: Mapping[str, str]) -> Family:
    """Return the row of a file, with the spec of its network.  Raises ValueError for other networks."""

    def variant(spec: ChromaSpec) -> object:
        return spec.in_channels - spec.out_channels

    return chosen(ROWS, ChromaSpec.from_shapes(unet), variant, metadata)
