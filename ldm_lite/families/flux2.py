"""FLUX.2 [klein], and its base, whose weights do not tell them apart; Qwen3 reads the text."""

import math
from dataclasses import replace
from functools import partial

import torch
from PIL import Image

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.conditioning.plain import num_tokens
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.layers import Shapes
from ldm_lite.families.sd1 import TRANSFORMER
from ldm_lite.models.flux2 import KL_F16_128, KLEIN, Flux2Spec
from ldm_lite.models.ops import inside
from ldm_lite.models.qwen3 import QWEN3_4B
from ldm_lite.zoo.family import Flow, Folder, Recipe, References

# Logarithms of the shift of 200 steps, which grow with the image's tokens: see flow_by_steps.
BY_SIZE = (0.00016927 * 256 + 0.45666666, 0.00016927 * 4096 + 0.45666666)

MOST = 1024**2  # pixels of a reference


def of_folder(folder: Folder) -> str | None:
    """Return the row of a folder's pipeline: the base, unless it says that it is distilled."""
    return None if folder.pipeline.get("is_distilled") is True else "flux2_klein_base"


def fitted(image: Image.Image, unit: int) -> Image.Image:
    """Reduce an image to MOST pixels, and cut its edges to multiples of unit.

    black-forest-labs/flux2 sampling.py, default_prep.  Raises ValueError if a side is shorter than unit.
    """
    ratio = math.sqrt(MOST / (image.width * image.height))
    if ratio < 1:
        size = max(1, int(image.width * ratio)), max(1, int(image.height * ratio))
        image = image.resize(size, Image.Resampling.LANCZOS)
    width, height = image.width // unit * unit, image.height // unit * unit
    if not width or not height:
        raise ValueError(f"got a reference of {image.width} x {image.height} pixels, expected {unit} or more a side")
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


DISTILLED = replace(
    TRANSFORMER,
    title="FLUX.2 [klein]",
    unet=KLEIN,
    vae=KL_F16_128,
    vae_file="Comfy-Org/flux2-klein/split_files/vae/flux2-vae.safetensors",
    text_encoders=(replace(QWEN3_4B, states=(9, 18, 27)),),
    text_files=("Comfy-Org/flux2-klein/split_files/text_encoders/qwen_3_4b.safetensors",),
    conditioner="flux2",
    thinks=False,
    noise=Flow("s", "flow_by_steps", by_size=BY_SIZE),
    scale_factor=1.0,
    steps=4,
    scale=1.0,
    called=r"flux[-_. ]?2|klein",
    base_version="flux_2_klein_4b",
    of_folder=of_folder,
    references=References(fitted),
    recipes=(Recipe(r"(?<![a-z])base(?![a-z])", "black-forest-labs/FLUX.2-klein-base-4B", 50, 4.0),),
)
ROWS = {
    "flux2_klein": DISTILLED,
    "flux2_klein_base": replace(DISTILLED, title="FLUX.2 [klein] base", steps=50, scale=4.0, recipes=()),
}


def spec_of(unet: Shapes) -> Flux2Spec:
    """Return the spec of a network.  Raises ValueError for FLUX.2 [dev]."""
    spec = Flux2Spec.from_shapes(unet)
    if spec.guidance:
        raise ValueError("is FLUX.2 [dev], which reads text with Mistral 3: that is not supported, use FLUX.2 [klein]")
    return spec


row = partial(chosen, ROWS, spec_of)


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Three of Qwen3's states (B,512,D) of a chat, with its mask; the network reads the padding too."""
    assert model.tokenizer is not None
    assert model.text_encoder is not None
    ids = model.tokenizer([prompt or "" for prompt in prompts]).to(model.device)
    counts = torch.tensor([[num_tokens(model.tokenizer, prompt)] for prompt in prompts], device=model.device)
    return {"context": model.text_encoder(ids, inside(counts, ids.shape[1]))}


CONDITIONER = Conditioner(
    encode,
    has_weights=False,
    without_clip_skip="has no CLIP",
    length=lambda model, prompt: 1,
)
