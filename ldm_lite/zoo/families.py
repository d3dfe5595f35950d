"""The families, by name: each file of families/ has the rows of some, and is imported when one of them is looked up.

A file without its module is left out: any of them can be deleted but sd1, from which the others are made.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import NamedTuple

from ldm_lite.core.files import imported
from ldm_lite.zoo.family import Family


class Module(NamedTuple):
    """A file of families/."""

    rows: tuple[str, ...]  # their names
    contexts: tuple[int | None, ...] = ()  # widths of what their UNets read; None is nothing


# A file is of the first module that has a row with its networks.
MODULES = {
    "sd1": Module(("sd1",), contexts=(768,)),
    "sd1_variants": Module(("sd1_inpaint", "instruct_pix2pix", "lcm"), contexts=(768,)),
    "sd2": Module(
        ("sd2", "sd_turbo", "sd2_inpaint", "sd2_depth", "sd2_unclip_h", "sd2_unclip_l"),
        contexts=(1024,),
    ),
    "sdxl": Module(
        ("sdxl_base", "sdxl_turbo", "sdxl_inpaint", "lcm_sdxl", "sdxl_refiner"),
        contexts=(2048, 1280),
    ),
    "ldm": Module(
        (
            *("ldm_celeba_ffhq_beds256", "ldm_lsun_churches256", "ldm_text2img_large", "ldm_text2img256"),
            *("ldm_cin256_v2", "ldm_cin256", "ldm_layout2img", "ldm_semantic_synthesis", "rdm768"),
            *("ldm_inpainting_big", "ldm_bsr_sr"),
        ),
        contexts=(None, 512, 640, 768, 1280),
    ),
    "upscaler": Module(("x4",), contexts=(1024,)),
    "flux": Module(("flux_dev", "flux_schnell", "flux_kontext", "flux_fill", "flux_control", "flux_canny")),
    "sd3": Module(("sd3_medium", "sd35_medium", "sd35_large", "sd35_large_turbo")),
    "z_image": Module(("z_image_turbo", "z_image")),
    "deepfloyd": Module(("if_I", "if_II")),
}
# A key of a network that is no UNet of latent diffusion -> (its shapes, metadata) -> its row, with its sizes.
DENOISERS = {
    "double_blocks.0.img_attn.norm.key_norm.scale": "ldm_lite.families.flux:row",
    "joint_blocks.0.context_block.attn.qkv.weight": "ldm_lite.families.sd3:row",
    "cap_pad_token": "ldm_lite.families.z_image:row",
    "encoder_pooling.1.positional_embedding": "ldm_lite.families.deepfloyd:stage",
}


class Families(Mapping[str, Family]):
    """The rows by name."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = {name: module for name, module in modules.items() if find_spec(f"ldm_lite.families.{name}")}

    def rows(self, name: str) -> dict[str, Family]:
        """Return the rows of a module."""
        rows: dict[str, Family] = imported(f"ldm_lite.families.{name}:ROWS")
        return rows

    def __getitem__(self, name: str) -> Family:
        for module, (names, _) in self.modules.items():
            if name in names:
                return self.rows(module)[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for module in self.modules.values() for name in module.rows)

    def __len__(self) -> int:
        return sum(len(module.rows) for module in self.modules.values())

    def __contains__(self, name: object) -> bool:
        return name in set(self)


FAMILIES = Families(MODULES)
