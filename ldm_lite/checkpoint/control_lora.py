"""LoRAs that make FLUX.1 dev a control model: depth and canny read an image's latents beside the noised ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.lora import Lora
from ldm_lite.checkpoint.reader import Checkpoint, Component
from ldm_lite.models.flux import FluxSpec
from ldm_lite.runtime.blocks import Blocks
from ldm_lite.zoo.families import FAMILIES, Family

INPUTS = ("img_in", "diffusion_model_img_in", "lora_unet_img_in", "transformer_x_embedder")  # names of the first layer


def widened(family: Family, unet: Component, loras: Sequence[Lora]) -> tuple[Family, Component]:
    """Return the family and the weights that control LoRAs change; the same ones for any other LoRA.

    The network gets inputs for the image's latents, with weights of 0, as in the original's load_flow_model.
    """
    spec = family.unet
    wide = [name for lora in loras for name in INPUTS if _columns(lora, name) == 8 * getattr(spec, "out_channels", 0)]
    if not isinstance(spec, FluxSpec) or not wide or spec.in_channels != spec.out_channels:
        return family, unet
    row, checkpoint, key = FAMILIES["flux_control"], unet.checkpoint, unet.keys["img_in.weight"]
    control = replace(
        family, title=row.title, task=row.task, scale=row.scale, unet=replace(spec, in_channels=2 * spec.in_channels)
    )
    more = 4 * spec.in_channels

    def read(name: str) -> Tensor:
        value = checkpoint.read(name)
        return F.pad(value.float(), (0, more)) if name == key else value

    shapes = {**checkpoint.shapes, key: (spec.width, 2 * more)}
    blocks = partial(_blocks, checkpoint, key)
    return control, replace(unet, checkpoint=replace(checkpoint, shapes=shapes, read=read, blocks=blocks))


def _blocks(checkpoint: Checkpoint, wide: str, key: str) -> Blocks | None:
    return None if key == wide else checkpoint.blocks(key)


def _columns(lora: Lora, name: str) -> int:
    change = lora.modules.get(name, {}).get("weight")
    return 0 if change is None else change.shape[1]
