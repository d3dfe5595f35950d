"""Files of one network with the names of diffusers or transformers -> the original layout.

original_layout() says how each tensor of the original layout is read from such a file: from one tensor with another
name and perhaps another shape (1x1 convolutions stored as linears), or from several (OpenCLIP's in_proj, FLUX.1's qkv).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import Shapes, checked_shape
from ldm_lite.formats.diffusers_names import OUTSIDE, RESNET, TRANSFORMERS, are_swapped, row_of, unet_blocks
from ldm_lite.runtime.memory import MappedPages
from ldm_lite.zoo.families import FAMILY_ROWS

# ---- UNets ----------------------------------------------------------------------------------------------------------

ORIGINAL_RESNET = {theirs: ours for ours, theirs in RESNET.items()}
# The same for class embeddings, and for the vectors of unCLIP.
CLASSES = {
    "label_emb": "class_embedding",
    "label_emb.0.0": "class_embedding.linear_1",
    "label_emb.0.2": "class_embedding.linear_2",
}


def _unet_keys(keys: Collection[str]) -> dict[str, str]:
    """Map a UNet's or ControlNet's keys, diffusers' -> the original's.  An unknown key keeps its name."""
    children: dict[str, set[str]] = {}  # the numbers of each module's: "down_blocks", "down_blocks.0.resnets", ...
    for key in keys:
        for number in re.finditer(r"\.(\d+)(?=\.)", key):
            children.setdefault(key[: number.start()], set()).add(number[1])
    counts = {parent: len(numbers) for parent, numbers in children.items()}
    levels = [f"down_blocks.{level}" for level in range(counts.get("down_blocks", 0))]
    blocks = unet_blocks(
        [counts.get(f"{level}.resnets", 0) for level in levels],
        [counts.get(f"{level}.attentions", 0) for level in levels],
        counts.get("mid_block.attentions", 0),
    )
    ours_of = {theirs: ours for ours, theirs in blocks.items()}
    outside = {theirs: ours for ours, theirs in (*OUTSIDE.items(), *CLASSES.items())}
    # What a ControlNet adds; in its embedding of the hint the original also counts the activations in between.
    inner = [f"blocks.{i}" for i in range(counts.get("controlnet_cond_embedding.blocks", 0))]
    for i, name in enumerate(["conv_in", *inner, "conv_out"]):
        outside[f"controlnet_cond_embedding.{name}"] = f"input_hint_block.{2 * i}"
    for i in range(counts.get("controlnet_down_blocks", 0)):
        outside[f"controlnet_down_blocks.{i}"] = f"zero_convs.{i}.0"
    outside["controlnet_mid_block"] = "middle_block_out.0"

    def original(key: str) -> str:
        module, _, last = key.rpartition(".")
        block = re.match(r"((?:down_blocks|up_blocks)\.\d+|mid_block)\.(\w+)\.\d+(?=\.)", module)
        if block is None:
            return f"{outside[module]}.{last}" if module in outside else key
        layer = module[block.end() + 1 :]
        layer = layer if block[2] in ("attentions", "upsamplers") else ORIGINAL_RESNET.get(layer, layer)
        return f"{ours_of[block[0]]}.{layer}.{last}" if block[0] in ours_of else key

    return {key: original(key) for key in keys}


def _adapter_keys(keys: Collection[str]) -> dict[str, str]:
    """Map a T2I-Adapter's keys, diffusers' -> the original's, which numbers a full adapter's blocks across levels."""
    light = "adapter.body.0.out_conv.weight" in keys
    pattern = re.compile(r"^adapter\.body\.(\d+)\.(?:resnets\.(\d+)\.)?")
    matches = {key: match for key in keys if (match := pattern.match(key))}
    count = 1 + max(int(match[2] or 0) for match in matches.values())
    names = {key: key for key in keys}
    for key, match in matches.items():
        level, block = int(match[1]), match[2]
        if light:
            module = f"{level}" if block is None else f"{level}.body.{block}"
        else:
            module = f"{level * count + int(block or 0)}"
        names[key] = f"adapter.body.{module}.{key[match.end() :]}"
    return names


# ---- autoencoders, text encoders ------------------------------------------------------------------------------------

# Patterns of diffusers' names -> the original's, all applied in this order.
VAE = (
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"down_blocks\.(\d+)\.resnets", r"down.\1.block"),
    (r"down_blocks\.(\d+)\.attentions", r"down.\1.attn"),
    (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d+)\.resnets", r"up.\1.block"),
    (r"up_blocks\.(\d+)\.attentions", r"up.\1.attn"),
    (r"up_blocks\.(\d+)\.upsamplers\.0", r"up.\1.upsample"),
    (r"(\.attn(?:_1|\.\d+))\.group_norm\.", r"\1.norm."),
    (r"(\.attn(?:_1|\.\d+))\.(?:to_([qkv])|(q)uery|(k)ey|(v)alue)\.", r"\1.\2\3\4\5."),
    (r"(\.attn(?:_1|\.\d+))\.(?:to_out\.0|proj_attn)\.", r"\1.proj_out."),
)
# Of text encoders with transformers' names -> OpenCLIP's.
OPEN_CLIP = (
    (r"^text_model\.", ""),
    *((re.escape(theirs), ours) for ours, theirs in TRANSFORMERS.items()),
    (r"\.attn\.[qkv]_proj\.", ".attn.in_proj_"),
    (r"^embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_projection\.weight$", "text_projection"),
)


def _vae_keys(keys: Collection[str]) -> dict[str, str]:
    """Map an autoencoder's keys, diffusers' -> the original's, which counts decoder levels from the finest down."""
    pattern = re.compile(r"^decoder\.up_blocks\.(\d+)")
    last = max((int(match[1]) for key in keys if (match := pattern.match(key))), default=0)
    turned = {key: pattern.sub(lambda match: f"decoder.up_blocks.{last - int(match[1])}", key) for key in keys}
    return {key: _substitute(VAE, level) for key, level in turned.items()}


def _substitute(patterns: Sequence[tuple[str, str]], key: str) -> str:
    for pattern, ours in patterns:
        key = re.sub(pattern, ours, key)
    return key


# ---- transformers ---------------------------------------------------------------------------------------------------

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")


def stored_keys(shapes: Shapes) -> dict[str, tuple[tuple[str, ...], bool]] | None:
    """Map the originals' keys to the keys in a file of diffusers, and whether halves are swapped.

    None if the file is of another network.  Unknown keys keep their names.
    """
    for before in PREFIXES:
        for module in FAMILY_ROWS.modules.values():
            if module.diffusers and before + module.diffusers in shapes:
                others: Mapping[str, str] = FAMILY_ROWS[module.rows[0]].unet.other_names
                stored = _keys_of(shapes, before, others)
                if before + module.key in stored:
                    return stored
    return None


def _keys_of(shapes: Shapes, before: str, others: Mapping[str, str]) -> dict[str, tuple[tuple[str, ...], bool]]:
    """The same with diffusers' names of one network, whose keys begin with `before`."""
    places = {
        name: (ours, place)
        for ours, theirs in others.items()
        for place, name in enumerate(theirs.removeprefix("~").split())
    }
    parts: dict[tuple[str, str], dict[int, str]] = {}  # of our modules and parameters: keys, by their place
    stored: dict[str, tuple[tuple[str, ...], bool]] = {}
    for key in shapes:
        name = key.removeprefix(before) if key.startswith(before) else ""
        module, _, last = name.rpartition(".")
        row, number = row_of(name, places)
        if row is not None:
            stored[before + row[0].replace("*", number)] = ((key,), False)
            continue
        row, number = row_of(module, places)
        if row is None or last not in ("weight", "bias"):
            stored[key] = ((key,), False)
        else:
            parts.setdefault((row[0].replace("*", number), last), {})[row[1]] = key
    swapped = are_swapped({ours for ours, _ in parts}, others)
    for (ours, last), keys in parts.items():
        pattern, _ = row_of(ours, others)
        if len(keys) == len((pattern or "").split()):
            stored[f"{before}{ours}.{last}"] = tuple(keys[place] for place in sorted(keys)), ours in swapped
        else:
            stored |= {key: ((key,), False) for key in keys.values()}
    return stored


# ---- whole networks -------------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """How a tensor is stored: a file's tensors, concatenated by rows, transposed or in swapped halves, and reshaped."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    swapped: bool = False

    def read(self, read: Callable[[str], Tensor], pages: MappedPages) -> Tensor:
        """Return the tensor.  `read` reads a tensor of the file; `pages` releases those that were copied."""
        parts = [read(key) for key in self.keys]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        for part in parts:
            if part is not whole:
                pages.release(part)
        if self.swapped:
            whole = whole.roll(len(whole) // 2, dims=0)
        return (whole.T if self.transposed else whole).reshape(self.shape)


WIDTH_OF_CLIP_L = 768


def to_original(tensors: Tensors) -> Tensors | None:
    """Return a file of one network in the original layout; None if it is not a file of diffusers.

    Metadata may say whether a text encoder is OpenCLIP: "open_clip", or "hidden_act", gelu in transformers' config.
    """
    act = tensors.metadata.get("hidden_act")
    told = tensors.metadata.get("open_clip", None if act is None else str(act == "gelu"))
    stored = original_layout(tensors.shapes, open_clip=None if told is None else told == "True")
    if stored is None:
        return None
    pages = MappedPages()
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    return Tensors(tensors.path, shapes, lambda key: stored[key].read(tensors.read, pages), tensors.metadata)


def original_layout(shapes: Shapes, open_clip: bool | None = None) -> dict[str, StoredTensor] | None:
    """Map the keys of a network's original layout to the tensors of a file in the format of diffusers.

    Return None if the keys are neither diffusers' nor transformers' names of an OpenCLIP text encoder.  `open_clip`
    says whether a text encoder is OpenCLIP; None = OpenCLIP if wider than CLIP-L.  Unknown keys keep their names.
    """
    if (stored := stored_keys(shapes)) is not None:
        return {name: _stored(name, keys, shapes)._replace(swapped=swapped) for name, (keys, swapped) in stored.items()}
    names = _original_keys(shapes, open_clip)
    if names is None:
        return None

    def rank(key: str) -> int:  # queries before keys before values, as the rows of in_proj
        match = re.search(r"\.([qkv])_proj\.", key)
        return 0 if match is None else "qkv".index(match[1])

    grouped: dict[str, list[str]] = {}
    for key in sorted(shapes, key=rank):
        grouped.setdefault(names[key], []).append(key)
    return {name: _stored(name, keys, shapes) for name, keys in grouped.items()}


def _original_keys(shapes: Shapes, open_clip: bool | None) -> dict[str, str] | None:
    """Map a file's keys to the original's names; None if no rule applies."""
    if "time_embedding.linear_1.weight" in shapes:
        return _unet_keys(shapes)
    if "adapter.body.0.resnets.0.block1.weight" in shapes:
        return _adapter_keys(shapes)
    if any(re.match(r"(encoder|decoder)\.mid_block\.resnets\.0\.", key) for key in shapes):
        return _vae_keys(shapes)
    norms = ("text_model.final_layer_norm.weight", "final_layer_norm.weight")
    norm = next((key for key in norms if key in shapes), None)
    if norm is not None and (checked_shape(shapes, norm, 1)[0] > WIDTH_OF_CLIP_L if open_clip is None else open_clip):
        return {key: _substitute(OPEN_CLIP, key) for key in shapes}
    return None


def _stored(name: str, keys: Sequence[str], shapes: Shapes) -> StoredTensor:
    shape = shapes[keys[0]]
    if len(keys) > 1:
        if not all(shapes[key] and shapes[key][1:] == shape[1:] for key in keys):
            raise ValueError(f"{', '.join(keys)} have shapes that do not fit together")
        shape = (sum(shapes[key][0] for key in keys), *shape[1:])
    if re.search(r"\.attn(_1|\.\d+)\.(q|k|v|proj_out)\.weight$", name) and len(shape) == 2:
        shape = (*shape, 1, 1)
    return StoredTensor(tuple(keys), shape, transposed=name == "text_projection")
