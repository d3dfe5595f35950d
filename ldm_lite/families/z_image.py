"""Z-Image and Z-Image Turbo, whose weights do not tell them apart; Qwen3 reads the text."""

from dataclasses import replace
from functools import partial

import torch

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.conditioning.plain import num_tokens
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.families.sd1 import TRANSFORMER
from ldm_lite.models.qwen3 import QWEN3_4B
from ldm_lite.models.z_image import MULTIPLE, Z_IMAGE, ZImageSpec
from ldm_lite.zoo.family import Flow, Folder, Hint


def of_folder(folder: Folder) -> str | None:
    """Return the row with the shift of a diffusers folder."""
    shift = None if folder.scheduler.get("use_dynamic_shifting") else folder.scheduler.get("shift")
    return "z_image" if shift == 6 else "z_image_turbo" if shift == 3 else None


PLAIN = replace(
    TRANSFORMER,
    title="Z-Image",
    unet=Z_IMAGE,
    vae_file="Comfy-Org/z_image_turbo/split_files/vae/ae.safetensors",
    text_encoders=(QWEN3_4B,),
    text_files=("Comfy-Org/z_image_turbo/split_files/text_encoders/qwen_3_4b.safetensors",),
    conditioner="z_image",
    prediction="reverse_flow",
    noise=Flow("1 - s", "flow", shift=6.0),
    scale_factor=0.3611,
    shift_factor=0.1159,
    steps=50,
    scale=5.0,  # 1 more than its makers'
    called=r"z[-_ ]?image",
    base_version="zimage",
    look_alikes={r"(^|\.)siglip_embedder\.": "Z-Image Omni or Edit, which are not supported: use Z-Image"},
    of_folder=of_folder,
)
ROWS = {
    "z_image_turbo": replace(
        PLAIN,
        title="Z-Image Turbo",
        noise=Flow("1 - s", "flow", shift=3.0),
        steps=8,
        scale=1.0,
        hints=(Hint("turbo", "z_image", lacks=True),),
    ),
    "z_image": PLAIN,
}
row = partial(chosen, ROWS, ZImageSpec.from_shapes)


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Qwen3's second to last hidden states (B,T,D) of a chat, without a mask; y (B,1) is its number of tokens.

    T is a multiple of 32, at most 512.  Tongyi-MAI/Z-Image pipeline.py.
    """
    assert model.tokenizer is not None
    assert model.text_encoder is not None
    counts = [num_tokens(model.tokenizer, prompt) for prompt in prompts]
    length = MULTIPLE * max(options.num_chunks, *(-(-count // MULTIPLE) for count in counts))
    ids = replace(model.tokenizer, length=length)([prompt or "" for prompt in prompts])
    context = model.text_encoder(ids.to(model.device))
    text = {"context": context, "y": torch.tensor(counts, device=model.device)[:, None]}
    return {**text, "full": torch.ones(len(prompts))} if options.alike else text


CONDITIONER = Conditioner(
    encode,
    has_weights=False,
    without_clip_skip="has no CLIP",
    length=lambda model, prompt: -(-num_tokens(model.tokenizer, prompt) // MULTIPLE),
    most=512 // MULTIPLE,
    has_mask=True,
)
