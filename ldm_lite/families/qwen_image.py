"""Qwen-Image; Qwen2.5-VL's language model reads the text."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.plain import num_tokens
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.layers import Shapes
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.qwen3 import QWEN25_7B
from ldm_lite.models.qwen_image import RELEASED, QwenImageSpec
from ldm_lite.models.wan_vae import WAN_VAE
from ldm_lite.text.tokenizer import Qwen3Tokenizer
from ldm_lite.zoo.families import chosen
from ldm_lite.zoo.family import Family, Flow

QWEN_IMAGE = replace(
    SD1,
    title="Qwen-Image",
    unet=RELEASED["qwen_image"],
    vae=WAN_VAE,
    vae_file="Comfy-Org/Qwen-Image_ComfyUI/split_files/vae/qwen_image_vae.safetensors",
    text_encoders=(QWEN25_7B,),
    conditioner="qwen_image",
    prediction="flow",
    noise=Flow("s", "flow:last=0.02", by_size=(0.5, 0.5 + 0.4 * 3840 / 7936)),  # 0.5 at 256 tokens, 0.9 at 8192
    scale_factor=1.0,
    shift_factor=0.0,
    sampler="euler",
    resolution=1328,
    dtype="bf16",
    vae_overflows=True,
    steps=50,
    scale=4.0,
    norm_patch=2,
)
ROWS = {"qwen_image": QWEN_IMAGE}


def row(unet: Shapes, metadata: Mapping[str, str]) -> Family:
    """Return the row of a file, with the spec of its network.  Raises ValueError for other networks."""
    return chosen(ROWS, QwenImageSpec.from_shapes(unet), metadata)


MOST = 1024  # tokens of a text, with the end of its template
DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)


def tokenizer(model: Model) -> Qwen3Tokenizer:
    """The tokenizer with the family's template, which says first what to do with a text."""
    assert isinstance(model.tokenizer, Qwen3Tokenizer)
    longest = replace(model.tokenizer, system=DESCRIBE)
    return replace(longest, length=longest.num_before + MOST)


def length(model: Model, prompt: str | None) -> int:
    """Return the number of tokens of a prompt that the network reads."""
    return num_tokens(tokenizer(model), prompt) - tokenizer(model).num_before


def encode(model: Model, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Qwen2.5's last hidden states (B,T,D) of a chat, from the text on, of which the first y (B,1) are read.

    diffusers pipeline_qwenimage.py, which the makers release.
    """
    counts = [length(model, prompt) for prompt in prompts]
    reader = tokenizer(model)
    ids = replace(reader, length=reader.num_before + max(*counts, options.num_chunks))([text or "" for text in prompts])
    context = model.text_encoder(ids.to(model.device))[:, reader.num_before :]
    text = {"context": context, "y": torch.tensor(counts, device=model.device)[:, None]}
    return {**text, "full": torch.ones(len(prompts))} if options.alike else text


CONDITIONER = Conditioner(
    encode,
    tokenizer=tokenizer,
    has_weights=False,
    without_clip_skip="has no CLIP",
    length=length,
    most=MOST,
    has_mask=True,
)
