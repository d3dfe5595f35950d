"""cloneofsimo's LoRA files, the very first ones, which number the layers of diffusers' networks of late 2022.

Layers are in the order of that code: attention before the feed-forward and the second attention, the middle block last.
Source: cloneofsimo/lora, lora_diffusion/lora.py, save_safeloras; diffusers 0.11, transformers 4.25.
"""

import re

from ldm_lite.core.files import Tensors

LAYER = re.compile(r"(unet|text_encoder):(\d+):(up|down)")
BLOCKS = (
    *(f"down_blocks.{level}.attentions.{i}" for level in range(3) for i in range(2)),
    *(f"up_blocks.{level}.attentions.{i}" for level in range(1, 4) for i in range(3)),
    "mid_block.attentions.0",
)
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
PARTS = (*(f"attn1.{name}" for name in PROJECTIONS), "ff.net.0.proj", *(f"attn2.{name}" for name in PROJECTIONS))
NAMES = {
    "unet": [f"{block}.transformer_blocks.0.{part}" for block in BLOCKS for part in PARTS],
    "text_encoder": [
        f"text_model.encoder.layers.{layer}.self_attn.{part}_proj"
        for layer in range(12)
        for part in ("k", "v", "q", "out")
    ],
}


def named(file: Tensors) -> Tensors:
    """Return a file with diffusers' names in place of numbers; any other file as it is.

    Its embeddings get the names that kohya gives to bundled ones.  Raises ValueError, one line, unless they are the
    attention and feed-forward layers of Stable Diffusion 1.x.
    """
    layers = {key: match for key in file.shapes if (match := LAYER.fullmatch(key))}
    if not layers:
        return file
    for role, names in NAMES.items():
        numbers = {int(match[2]) for match in layers.values() if match[1] == role}
        if numbers and numbers != {*range(len(names))}:
            raise ValueError(
                f"{file.path}: numbers {len(numbers)} layers of the {role.replace('_', ' ')}, expected the "
                f"{len(names)} of Stable Diffusion 1.x's attention and feed-forwards"
            )
    keys = {f"{m[1]}.{NAMES[m[1]][int(m[2])]}.lora_{m[3]}.weight": key for key, m in layers.items()}
    keys |= {f"bundle_emb.{key}.emb_params": key for key in file.shapes if re.fullmatch(r"<.+>", key)}
    return file.renamed(keys)
