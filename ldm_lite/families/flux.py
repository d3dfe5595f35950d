"""FLUX.1: dev, schnell, Kontext, Fill, Depth and Canny, and LoRAs that make dev one of the last two; its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.conditioning.plain import t5_states, t5_tokenizer
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts, hidden
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.files import Tensors
from ldm_lite.families.sd1 import CLIP_L_FILE, TRANSFORMER
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.flux import FLUX_DEV, FluxSpec
from ldm_lite.models.t5 import T5_FILE, T5_XXL
from ldm_lite.zoo.family import FamilyRow, Flow, Folder, Hint, Recipe

MASK = 64  # channels of Fill's mask: the 8x8 pixels of a latent position
INPUTS = ("img_in", "diffusion_model_img_in", "lora_unet_img_in", "transformer_x_embedder")  # names of the first layer


def variant(spec: FluxSpec) -> object:
    """What distinguishes the rows: whether it reads the guidance scale, and what it reads besides the latents."""
    beside = spec.in_channels - spec.out_channels
    return spec.guidance, {0: "", spec.out_channels: "image", spec.out_channels + MASK: "mask"}.get(beside, beside)


def of_folder(folder: Folder) -> str | None:
    """Return the row of a folder's pipeline."""
    return "flux_kontext" if folder.name == "FluxKontextPipeline" else None


def widened(family: FamilyRow, unet: Tensors, loras: Sequence[Any]) -> tuple[FamilyRow, Tensors]:
    """Return the family and the weights that control LoRAs change; the same ones for any other LoRA.

    Depth and Canny read an image's latents besides the noised ones.  The network gets inputs for them, with weights of
    0, as in the original's load_flow_model.
    """
    spec = family.unet
    changes = (lora.modules.get(name, {}).get("weight") for lora in loras for name in INPUTS)
    wide = any(change is not None and change.shape[1] == 8 * spec.out_channels for change in changes)
    if not wide or spec.in_channels != spec.out_channels:
        return family, unet
    control, key, more = ROWS["flux_control"], "img_in.weight", 4 * spec.in_channels
    wider = replace(spec, in_channels=2 * spec.in_channels)

    def read(name: str) -> Tensor:
        value = unet.read(name)
        return F.pad(value.float(), (0, more)) if name == key else value

    shapes = {**unet.shapes, key: (spec.width, 2 * more)}
    family = replace(family, title=control.title, task=control.task, scale=control.scale, unet=wider)
    return family, replace(unet, shapes=shapes, read=read)


DEV = replace(
    TRANSFORMER,
    title="FLUX.1 [dev]",
    unet=FLUX_DEV,
    vae_file="black-forest-labs/FLUX.1-schnell/ae.safetensors",
    text_encoders=(CLIP_L, T5_XXL),
    text_files=(CLIP_L_FILE, T5_FILE),
    conditioner="flux",
    noise=Flow("s", "flow", by_size=(0.5, 1.15)),
    scale_factor=0.3611,
    shift_factor=0.1159,
    scale=2.5,
    with_loras=widened,
    called=r"flux(?![-_. ]?2)",
    base_version="flux1",
    of_folder=of_folder,
    recipes=(
        Recipe(r"schnell", "black-forest-labs/FLUX.1-schnell", 4, 1.0, "euler flow:shift=1"),
        Recipe(r"turbo", "alimama-creative/FLUX.1-Turbo-Alpha", 8, 3.5, lora=r"turbo[-_ ]?alpha|flux.*turbo"),
        Recipe(r"hyper[-_ ]?(flux|sd|\d)", "ByteDance/Hyper-SD", 8, 3.5),
    ),
    hints=(Hint("kontext", "flux_kontext"),),
)
CONTROL = replace(
    DEV,
    title="FLUX.1 Depth",
    unet=replace(FLUX_DEV, in_channels=32),
    task="control_image",
    scale=10.0,
    hints=(Hint("canny", "flux_canny"),),
)
ROWS = {
    "flux_dev": DEV,
    "flux_schnell": replace(
        DEV,
        title="FLUX.1 [schnell]",
        unet=replace(FLUX_DEV, guidance=False),
        noise=Flow("s", "flow"),
        steps=4,
        scale=1.0,
        recipes=(),
    ),
    "flux_kontext": replace(DEV, title="FLUX.1 Kontext", task="edit", hints=()),
    "flux_fill": replace(
        DEV, title="FLUX.1 Fill", unet=replace(FLUX_DEV, in_channels=96), task="inpaint_flux", scale=30.0
    ),
    "flux_control": CONTROL,
    "flux_canny": replace(CONTROL, title="FLUX.1 Canny", scale=30.0, hints=()),
}
row = partial(chosen, ROWS, FluxSpec.from_shapes, variant=variant)


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """T5's hidden states (B,512,D) as context, padding included; y is CLIP's pooled output, without projection.

    schnell was trained with 256 tokens.  black-forest-labs/flux conditioner.py.
    """
    _, pooled = hidden(model, model.text_encoder, model.tokenizer, prompts, options, pool=True)
    return {"context": t5_states(model, prompts, most_tokens(model)), "y": pooled}


def most_tokens(model: CheckpointModel) -> int:
    """Return the number of T5's tokens."""
    return 512 if model.family.distilled else 256


CONDITIONER = Conditioner(
    encode,
    tokenizer=lambda model: t5_tokenizer(most_tokens(model))(model),
    has_weights=False,
    without_clip_skip="reads only CLIP's pooled output",
    length=lambda model, prompt: 1,
)
