"""Qwen-Image, whose text Qwen2.5-VL's language model reads; Qwen-Image-Edit, which shows it images too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from PIL import Image
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.transformers import chosen
from ldm_lite.conditioning.plain import num_tokens
from ldm_lite.conditioning.prompts import Conditioner, PromptOptions, Prompts
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.layers import Shapes
from ldm_lite.families.sd1 import TRANSFORMER
from ldm_lite.image import to_pixels
from ldm_lite.models.qwen3 import QWEN25_7B
from ldm_lite.models.qwen25_vl import QWEN25_VL_7B
from ldm_lite.models.qwen_image import QWEN_IMAGE, QwenImageSpec
from ldm_lite.models.wan_vae import WAN_VAE
from ldm_lite.text.qwen3 import Qwen3Tokenizer
from ldm_lite.zoo.family import FamilyRow, Flow, Folder, Hint, Recipe, References

UNIT = 32  # of the sides of a reference
MOST_RATIO = 100  # of its sides
AREA, SEEN_AREA = 1024**2, 384**2  # pixels of a reference, and of what the language model sees of it from 2509 on


def fitted(image: Image.Image, unit: int, area: int | None = None) -> Image.Image:
    """Resize an image to about `area` pixels, or AREA, with sides of multiples of UNIT.

    diffusers pipeline_qwenimage_edit.py, which the makers release.  Raises ValueError for too long an image.
    """
    ratio = image.width / image.height
    width = sqrt((area or AREA) * ratio)
    size = round(width / UNIT) * UNIT, round(width / ratio / UNIT) * UNIT
    if max(ratio, 1 / ratio) > MOST_RATIO:
        raise ValueError(
            f"got a reference of {image.width} x {image.height} pixels, expected a side at most {MOST_RATIO} times the "
            "other: crop it"
        )
    return image.resize(size, Image.Resampling.LANCZOS)


def of_folder(folder: Folder) -> str | None:
    """Return the kind of Edit that a diffusers folder holds.  Raises ValueError for Layered."""
    if "Layered" in folder.name:
        raise ValueError(f"is of {folder.name}, which is not supported: use Qwen-Image")
    if not folder.name.startswith("QwenImageEdit"):
        return None
    kind = "_2511" if folder.network.get("zero_cond_t") else "_2509" if "Plus" in folder.name else ""
    return f"qwen_image_edit{kind}"


PLAIN = replace(
    TRANSFORMER,
    title="Qwen-Image",
    unet=QWEN_IMAGE,
    vae=WAN_VAE,
    vae_file="Comfy-Org/Qwen-Image_ComfyUI/split_files/vae/qwen_image_vae.safetensors",
    text_encoders=(QWEN25_7B,),
    text_files=("Comfy-Org/Qwen-Image_ComfyUI/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",),
    conditioner="qwen_image",
    noise=Flow("s", "flow:last=0.02", by_size=(0.5, 0.5 + 0.4 * 3840 / 7936)),  # 0.5 at 256 tokens, 0.9 at 8192
    scale_factor=1.0,
    resolution=1328,
    steps=50,
    scale=4.0,
    norm_patch=2,
    called=r"qwen[-_ ]?image",
    base_version="qwen_image",
    look_alikes={
        r"(^|\.)time_text_embed\.addition_t_embedding\.": "Qwen-Image-Layered, which is not supported: use Qwen-Image"
    },
    of_folder=of_folder,
    recipes=(
        Recipe(
            r"lightning", "lightx2v/Qwen-Image-Lightning", 4, 1.0, "euler flow:shift=3", lora=r"lightning.*\d[-_ ]?step"
        ),
    ),
    hints=(
        Hint("2511", "qwen_image_edit_2511"),
        Hint("2509", "qwen_image_edit_2509"),
        Hint("edit", "qwen_image_edit"),
    ),
)
EDIT = replace(
    PLAIN,
    title="Qwen-Image-Edit",
    text_encoders=(QWEN25_VL_7B,),
    resolution=1024,
    references=References(fitted, most=1),
    hints=(),
)
EDIT_2509 = replace(EDIT, title="Qwen-Image-Edit 2509", references=References(fitted, sized_by=-1), steps=40)
EDIT_2511 = replace(EDIT_2509, title="Qwen-Image-Edit 2511", unet=replace(QWEN_IMAGE, clean_references=True))
ROWS = {
    "qwen_image": PLAIN,
    "qwen_image_edit": EDIT,
    "qwen_image_edit_2509": EDIT_2509,
    "qwen_image_edit_2511": EDIT_2511,
}


def row(unet: Shapes, metadata: Mapping[str, str]) -> FamilyRow:
    """Return the row of a file, with the spec of its network.  Raises ValueError for other networks."""

    def spec_of(unet: Shapes) -> QwenImageSpec:
        spec = QwenImageSpec.from_shapes(unet)
        is_2511 = metadata.get("family") == "qwen_image_edit_2511"  # of its files, only ComfyUI's are marked
        return replace(spec, clean_references=True) if is_2511 else spec

    return chosen(ROWS, spec_of, unet, metadata, variant=lambda spec: (spec.in_channels, spec.clean_references))


MOST = 1024  # tokens of a text, with the end of its template
DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
DESCRIBE_EDIT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


def tokenizer(model: CheckpointModel, system: str = DESCRIBE, images: Sequence[tuple[str, int]] = ()) -> Qwen3Tokenizer:
    """The tokenizer with the family's template, which begins with an instruction."""
    assert isinstance(model.tokenizer, Qwen3Tokenizer)
    longest = replace(model.tokenizer, system=system, images=tuple(images))
    return replace(longest, length=longest.num_before + MOST)


def length(model: CheckpointModel, prompt: str | None) -> int:
    """Return the number of tokens of a prompt that the network reads."""
    images = () if model.family.references is None else (("", 1),)  # line ends after one are tokens of their own
    reader = tokenizer(model, images=images)
    return num_tokens(reader, prompt) - reader.num_before


def encode(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Qwen2.5's last hidden states (B,T,D) of a chat, from the text or its images on, of which the first y (B,1) count.

    diffusers pipeline_qwenimage.py, and those of Edit, which the makers release.
    """
    images = [] if model.family.references is None else seen(model, getattr(options.extra, "reference", ()))
    system = DESCRIBE_EDIT if images else DESCRIBE
    reader, first = tokenizer(model, system, told(model, images)), tokenizer(model, system).num_before
    counts = [num_tokens(reader, prompt) - reader.num_before for prompt in prompts]
    longest = reader.num_before + max(*counts, options.num_chunks)
    ids = replace(reader, length=longest)([text or "" for text in prompts]).to(model.device)
    places = list(zip(reader.image_starts, images, strict=True))
    context = model.text_encoder(ids, images=places)[:, first:]
    lengths = torch.tensor(counts, device=model.device)[:, None] + reader.num_before - first
    text = {"context": context, "y": lengths}
    alike = options.alike and model.family.references is None  # else texts may be shorter than `length`
    return {**text, "full": torch.ones(len(prompts))} if alike else text


def seen(model: CheckpointModel, references: Sequence[Image.Image]) -> list[Tensor]:
    """Return the references as the language model sees them, each (3,H,W) in [0,1]."""
    images = []
    for image in references:
        side = model.text_encoder.spec.vision.side
        image = fitted(image, UNIT, SEEN_AREA if is_numbered(model) else None)
        width, height = (round(pixels / side) * side for pixels in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        images.append((to_pixels(image).to(model.device) + 1) / 2)
    return images


def told(model: CheckpointModel, images: Sequence[Tensor]) -> list[tuple[str, int]]:
    """Return the text that precedes each image, and its number of tokens."""
    names = (f"Picture {number}: " * is_numbered(model) for number in range(1, len(images) + 1))
    sides = [[pixels // model.text_encoder.spec.vision.side for pixels in image.shape[1:]] for image in images]
    return [(name, rows * columns) for name, (rows, columns) in zip(names, sides, strict=True)]


def is_numbered(model: CheckpointModel) -> bool:
    """Whether images have names in the text, as they do from 2509 on."""
    return model.family.references is not None and model.family.references.most is None


CONDITIONER = Conditioner(
    encode,
    tokenizer=tokenizer,
    has_weights=False,
    without_clip_skip="has no CLIP",
    length=length,
    most=MOST,
    has_mask=True,
)
