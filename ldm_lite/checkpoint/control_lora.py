"""LoRAs that make FLUX.1 dev a control model: depth and canny read an image's latents beside the noised ones."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.lora import Lora
from ldm_lite.core.files import Tensors
from ldm_lite.models.flux import FluxSpec
from ldm_lite.zoo.families import FAMILIES, Family

INPUTS = ("img_in", "diffusion_model_img_in", "lora_unet_img_in", "transformer_x_embedder")  # names of the first layer


def widened(family: Family, unet: Tensors, loras: Sequence[Lora]) -> tuple[Family, Tensors]:
    """Return the family and the weights that control LoRAs change; the same ones for any other LoRA.

    The network gets inputs for the image's latents, with weights of 0, as in the original's load_flow_model.
    """
    spec = family.unet
    wide = [name for lora in loras for name in INPUTS if _columns(lora, name) == 8 * getattr(spec, "out_channels", 0)]
    if not isinstance(spec, FluxSpec) or not wide or spec.in_channels != spec.out_channels:
        return family, unet
    row, key = FAMILIES["flux_control"], "img_in.weight"
    control = replace(
        family, title=row.title, task=row.task, scale=row.scale, unet=replace(spec, in_channels=2 * spec.in_channels)
    )
    more = 4 * spec.in_channels

    def read(name: str) -> Tensor:
        value = unet.read(name)
        return F.pad(value.float(), (0, more)) if name == key else value

    return control, replace(unet, shapes={**unet.shapes, key: (spec.width, 2 * more)}, read=read)


def _columns(lora: Lora, name: str) -> int:
    change = lora.modules.get(name, {}).get("weight")
    return 0 if change is None else change.shape[1]
