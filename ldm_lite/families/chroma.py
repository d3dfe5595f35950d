"""Chroma1: HD (and Base), and Flash, whose weights do not tell them apart; T5 alone reads the text."""

from dataclasses import replace
from functools import partial

import torch

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.conditioning.plain import num_tokens, t5_states, t5_tokenizer
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.families.flux import DEV
from ldm_lite.models.chroma import CHROMA, ChromaSpec
from ldm_lite.models.ops import inside
from ldm_lite.models.t5 import T5_FILE, T5_XXL
from ldm_lite.zoo.family import Recipe

HD = replace(
    DEV,
    title="Chroma1-HD",
    unet=CHROMA,
    text_encoders=(T5_XXL,),
    text_files=(T5_FILE,),
    conditioner="chroma",
    steps=40,
    scale=3.0,
    with_loras=None,
    called=r"chroma",
    base_version="chroma",
    look_alikes={r"(^|\.)nerf_(blocks|image_embedder)\.": "Chroma1-Radiance, which is not supported: use Chroma1-HD"},
    of_folder=None,
    hints=(),
    recipes=(Recipe(r"flash(?![a-z])", "lodestones/Chroma1-Flash", 8, 1.0, "heun", lora=r"chroma.*flash"),),
)
ROWS = {
    "chroma": HD,
    "chroma_flash": replace(HD, title="Chroma1-Flash", sampler="heun", steps=8, scale=1.0, recipes=()),
}
row = partial(chosen, ROWS, ChromaSpec.from_shapes)


MOST = 512  # tokens of T5
TOKENIZER = t5_tokenizer(MOST)


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """T5's hidden states (B,T,D) with its mask: the first y (B,1) tokens are read, the text and one of padding.

    lodestone-rock/flow train_chroma.py.
    """
    counts = torch.tensor([[num_tokens(TOKENIZER(model), prompt)] for prompt in prompts], device=model.device)
    length = min(MOST, max(int(counts.max()), options.num_chunks) + 1)
    context = t5_states(model, prompts, length, mask=inside(counts, length))
    text = {"context": context, "y": (counts + 1).clamp(max=MOST)}
    return {**text, "full": torch.ones(len(prompts))} if options.alike else text


CONDITIONER = Conditioner(
    encode,
    tokenizer=TOKENIZER,
    has_weights=False,
    without_clip_skip="has no CLIP",
    length=lambda model, prompt: num_tokens(TOKENIZER(model), prompt),
    most=MOST,
    has_mask=True,
)
