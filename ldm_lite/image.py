"""Images between tensors, PIL and files' text: nothing here writes."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


def to_array(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels (3,H,W) in [-1,1], clamped -> (H,W,3) in [0,255], rounded."""
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def to_pil(pixels: Tensor) -> Image.Image:
    """Pixels (3,H,W) in [-1,1], on the CPU -> an RGB image."""
    return Image.fromarray(to_array(pixels))


def grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Images of one size -> one image, `columns` wide, with the 2 pixels between that the original scripts leave."""
    gap, (width, height) = 2, images[0].size
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap))
    for i, image in enumerate(images):
        sheet.paste(image, (gap + i % columns * (width + gap), gap + i // columns * (height + gap)))
    return sheet


def parameters(prompt: str, negative_prompt: str, settings: Mapping[str, object]) -> str:
    """The text that AUTOMATIC1111's web UI stores in a PNG under "parameters", so that its readers understand it."""
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    lines.append(", ".join(f"{key}: {value}" for key, value in settings.items()))
    return "\n".join(lines)
