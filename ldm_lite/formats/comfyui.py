"""Names that ComfyUI's files have in place of the original ones."""

import re

from ldm_lite.checkpoint.reader import joined
from ldm_lite.core.files import Tensors
from ldm_lite.formats.diffusers_layout import to_original

CLIP_G = "text_encoders.clip_g.transformer."  # of OpenCLIP bigG in files of Stable Diffusion 3
QUANT = re.compile(r"(^|\.)(?:en|de)coder\.((?:post_)?quant_conv)\.")  # inside encoder and decoder in the makers' files
NORM = re.compile(r"\b(query_norm|key_norm|distilled_guidance_layer\.norms\.\d+)\.weight$")


def norms(tensors: Tensors) -> Tensors:
    """Return a view with the makers' names of a transformer's norms."""
    return tensors.renamed({NORM.sub(r"\1.scale", key): key for key in tensors})


def quant_convs(tensors: Tensors) -> Tensors:
    """Return a view with the convolutions next to the latents outside of encoder and decoder."""
    return tensors.renamed({QUANT.sub(r"\1\2.", key): key for key in tensors})


def clip_g(tensors: Tensors) -> Tensors | None:
    """Return a view with OpenCLIP's names in place of transformers'."""
    inside = {key.removeprefix(CLIP_G): key for key in tensors if key.startswith(CLIP_G)}
    part = to_original(
        Tensors(tensors.path, tensors.renamed(inside).shapes, lambda key: tensors[CLIP_G + key], {"open_clip": "True"})
    )
    if part is None:
        return None
    rest = {key: (tensors, key) for key in tensors if not key.startswith(CLIP_G)}
    return joined(tensors.path, rest | {CLIP_G + key: (part, key) for key in part}, tensors.metadata)
