"""OpenCLIP's key names of CLIP's image encoder (ViT-H, bigG), mapped to transformers', which ldm_lite has."""

import re

from torch import Tensor

from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import checked_shape
from ldm_lite.models.ops import multiple

_PREFIX = "visual."
NAMES = (  # a pattern of OpenCLIP's, and transformers' name
    (r"^conv1\.", "embeddings.patch_embedding."),
    (r"^class_embedding$", "embeddings.class_embedding"),
    (r"^positional_embedding$", "embeddings.position_embedding.weight"),
    (r"^ln_pre\.", "pre_layrnorm."),
    (r"^ln_post\.", "post_layernorm."),
    (r"^transformer\.resblocks\.(\d+)\.", r"encoder.layers.\1."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
)
JOINED = re.compile(r"\.attn\.in_proj_(weight|bias)$")


def to_transformers(stored: Tensors) -> Tensors:
    """Return a view with transformers' names in place of OpenCLIP's.  Raises ValueError if a shape makes no sense."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, int | None]] = {}  # a name -> the file's, and which third of it
    for key, shape in stored.shapes.items():
        if not key.startswith(_PREFIX):
            shapes[key], places[key] = shape, (key, None)
            continue
        name = key.removeprefix(_PREFIX)
        for pattern, theirs in NAMES:
            name = re.sub(pattern, theirs, name)
        if name == "proj":
            shapes["visual_projection.weight"] = checked_shape(stored.shapes, key, 2)[::-1]
            places["visual_projection.weight"] = key, None
        elif joined := JOINED.search(name):
            rows, *rest = checked_shape(stored.shapes, key, 2 if joined[1] == "weight" else 1)
            for i, part in enumerate("qkv"):
                part_name = f"vision_model.{name[: joined.start()]}.self_attn.{part}_proj.{joined[1]}"
                shapes[part_name], places[part_name] = (multiple(rows, 3, f"the length of {key}"), *rest), (key, i)
        else:
            shapes[f"vision_model.{name}"], places[f"vision_model.{name}"] = shape, (key, None)

    def read_part(name: str) -> Tensor:
        key, third = places[name]
        value = stored[key]
        if third is None:
            return value.T if name == "visual_projection.weight" and key != name else value
        return value.chunk(3)[third]

    return Tensors(stored.path, shapes, read_part, stored.metadata)
