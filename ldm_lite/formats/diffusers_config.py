"""The settings in the configuration files of diffusers and transformers that change an image.

A few are read: read_network() turns them into metadata, which zoo/families.py uses.  CHECKED lists settings that
the weights do not show and the networks here cannot change, with the values that are computed; any other value is
refused by name.  Other settings concern training or precision, or have weights of their own, which loading
refuses.  diffusers_schedulers.py reads the settings of the noise levels.
"""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ldm_lite.core.layers import Shapes
from ldm_lite.models.wan_vae import DEVIATION, MEAN
from ldm_lite.zoo.families import FAMILY_ROWS, Module, with_autoencoder_in

log = logging.getLogger("ldm_lite")

Config = Mapping[str, Any]
Values = tuple[object, ...]
UNET: dict[str, Values] = {
    "act_fn": ("silu", "swish"),
    "center_input_sample": (False,),
    "class_embed_type": (None, "projection"),
    "downsample_padding": (1,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_scale_factor": (1,),
    "norm_eps": (1e-5,),
    "norm_num_groups": (32,),
    "resnet_out_scale_factor": (1,),
    "resnet_skip_time_act": (False,),
    "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,),
}
CLIP: dict[str, Values] = {"layer_norm_eps": (1e-5,), "eos_token_id": (None, 2, 49407), "use_attention_mask": (None, 0)}
CHECKED: dict[str, dict[str, Values]] = {
    "unet": {"_class_name": ("UNet2DConditionModel",), **UNET},
    "control": {"_class_name": ("ControlNetModel",), "controlnet_conditioning_channel_order": ("rgb",), **UNET},
    "vae": {
        "_class_name": ("AutoencoderKL", "VQModel"),
        "act_fn": ("silu", "swish"),
        "lookup_from_codebook": (False,),
        "norm_num_groups": (32,),
        "latents_mean": (None,),
        "latents_std": (None,),
        "shift_factor": (None, 0),  # diffusers reads it for transformers alone, whose autoencoders lack quant_conv
    },
    "wan_vae": {
        "latents_mean": (list(MEAN),),
        "latents_std": (list(DEVIATION),),
    },
    "tiny": {
        "_class_name": ("AutoencoderTiny",),
        "act_fn": ("relu",),
        "scaling_factor": (None, 1),
        "shift_factor": (None, 0),
    },
    "text": {"hidden_act": ("quick_gelu", "gelu"), **CLIP},
    "vision": {"hidden_act": ("quick_gelu",), **CLIP},  # CLIP ViT-B and L
    "open_clip_vision": {"hidden_act": ("gelu",), **CLIP},  # ViT-H, g and bigG, which are wider
    "siglip": {"hidden_act": ("gelu_pytorch_tanh",), "layer_norm_eps": (1e-6,)},
}
# A key that only this kind of network has, in the format of diffusers or transformers.  The first match wins.
CONFIG_KINDS = {
    "controlnet_cond_embedding.conv_in.weight": "control",
    "time_embedding.linear_1.weight": "unet",
    "decoder.mid_block.resnets.0.norm1.gamma": "wan_vae",
    "decoder.conv_in.weight": "vae",
    "decoder.layers.0.weight": "tiny",
    "vision_model.embeddings.patch_embedding.weight": "vision",
    "text_model.embeddings.token_embedding.weight": "text",
    "embeddings.token_embedding.weight": "text",
}
CLIP_KEYS = {"num_attention_heads", *CHECKED["text"]}


def read_network(place: str, config: Config, shapes: Shapes) -> dict[str, str]:
    """Return the metadata in a network's config.json, for a file with these shapes in the format of diffusers.

    Raises ValueError for a setting that is not supported, naming it.
    """
    kind = next((kind for key, kind in CONFIG_KINDS.items() if key in shapes), None)
    if kind is None:
        return {}
    if kind == "text" or kind == "vision":
        nested = config.get(f"{kind}_config")  # of a whole CLIP
        config = config if not isinstance(nested, dict) else {key: nested[key] for key in nested.keys() & CLIP_KEYS}
    has_shift = kind == "vae" and not any("quant_conv." in key for key in shapes)
    checked = kind
    if kind == "vision":
        is_clip = "vision_model.embeddings.class_embedding" in shapes
        width = (shapes["vision_model.embeddings.patch_embedding.weight"] or (0,))[0]
        checked = ("vision" if width <= 1024 else "open_clip_vision") if is_clip else "siglip"
    of_family = kind == "vae" and with_autoencoder_in(shapes) is not None
    unchecked = {"shift_factor"} if has_shift else set()
    unchecked |= {"_class_name"} if of_family else set()
    wanted = {key: values for key, values in CHECKED[checked].items() if key not in unchecked}
    check(place, config, wanted)
    metadata: dict[str, object] = {"global_pool_conditions": config.get("global_pool_conditions")}
    if kind in ("unet", "control"):
        metadata |= _heads(place, config)
        size = config.get("sample_size")
        metadata["sample_size"] = _positive(place, "sample_size", size, whole=True) if isinstance(size, int) else None
    elif kind == "vae":
        scale, shift = config.get("scaling_factor"), config.get("shift_factor")
        metadata["scaling_factor"] = None if scale is None else _positive(place, "scaling_factor", scale)
        if shift is not None and (isinstance(shift, bool) or not isinstance(shift, (int, float))):
            raise ValueError(f"{place}: its shift_factor cannot be {short(shift)}: expected a number")
        metadata["shift_factor"] = shift
    if kind == "text":
        metadata |= {"hidden_act": config.get("hidden_act"), "text_activation": config.get("hidden_act")}
    if kind in ("text", "vision"):
        heads = config.get("num_attention_heads")
        metadata[f"{kind}_num_heads"] = None if heads is None else _positive(place, "num_attention_heads", heads, True)
    return {key: str(value) for key, value in metadata.items() if value is not None}


def check(place: str, config: Config, supported: Mapping[str, Values]) -> None:
    """Raise ValueError for a setting whose value is not among the supported ones."""
    for key, values in supported.items():
        if key in config and config[key] not in values:
            wanted = " or ".join(json.dumps(value) for value in values)
            raise ValueError(f"{place}: its {key} {short(config[key])} is not supported: expected {wanted}")


def short(value: object) -> str:
    """Return a value as JSON, at most 60 characters of it."""
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def _positive(place: str, key: str, value: object, whole: bool = False) -> float | int:
    """Return a positive number from a configuration.  Raises ValueError for anything else."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise ValueError(f"{place}: its {key} cannot be {short(value)}: expected a number above 0")
    return value


def _heads(place: str, config: Config) -> dict[str, object]:
    """Return the number of attention heads or their width; attention_head_dim is the number, for historical reasons."""
    num_heads = config.get("attention_head_dim")
    if num_heads is None:
        return {}
    if not isinstance(num_heads, list):
        return {"unet_num_heads": _positive(place, "attention_head_dim", num_heads, whole=True)}
    levels = [_positive(place, "attention_head_dim", num, whole=True) for num in num_heads]
    widths = config.get("block_out_channels")
    if len(set(levels)) == 1:
        return {"unet_num_heads": levels[0]}
    if isinstance(widths, list) and len(widths) == len(levels):
        sizes = {_positive(place, "block_out_channels", width) / num for width, num in zip(widths, levels, strict=True)}
        if len(sizes) == 1 and (size := sizes.pop()) == int(size):
            return {"unet_head_dim": int(size)}
    raise ValueError(
        f"{place}: its attention_head_dim {short(num_heads)} is not supported: expected one number of heads, or one "
        "width of heads, for all levels"
    )


# ---- pipelines and tokenizers ---------------------------------------------------------------------------------------

TASKS = r"(ControlNet|Control|Adapter|Img2Img|Inpaint|Legacy|InstructPix2Pix|Depth2Img|Upscale|Fill)*Pipeline"
GENERAL = ("AutoPipelineForText2Image", "DiffusionPipeline", "None")


def check_pipeline(place: str, index: Config, roles: Collection[str]) -> Module | None:
    """Return the file of families/ for the pipeline of a model_index.json; None if it names none.

    Warns about components other than the networks of these roles.
    """
    name = str(index.get("_class_name"))
    modules = (module for module in FAMILY_ROWS.modules.values() if module.pipelines)
    of_name = next((module for module in modules if re.fullmatch(module.pipelines + TASKS, name)), None)
    if of_name is None and name not in GENERAL:
        log.warning("%s: is of %s, which ldm_lite does not know: only its networks are used", place, short(name))
    if index.get("force_zeros_for_empty_prompt") is False and {"text_encoder", "text_encoder_2"} <= set(roles):
        log.warning('%s: its unconditional text is the empty prompt: give `negative_prompt=""`', place)
    return of_name


END = "<|endoftext|>"


def check_tokenizer(place: str, files: Sequence[Config], open_clip: bool, length: int | None) -> None:
    """Raise ValueError if a tokenizer pads with another token, or to another length, than the one here."""

    def values(key: str) -> list[Any]:
        return [file[key] for file in files if file.get(key) is not None]

    pads = [pad["content"] if isinstance(pad, dict) and "content" in pad else pad for pad in values("pad_token")]
    wanted = "!" if open_clip else END
    if open_clip and pads and all(pad == END for pad in pads):
        log.warning("%s: pads prompts with %s; here they are padded with ! as in the original", place, END)
    elif pads and wanted not in pads:
        raise ValueError(f"{place}: its pad_token {short(pads[0])} is not supported: expected {short(wanted)}")
    lengths = [size for size in values("model_max_length") if isinstance(size, int) and size < 10**6]
    if length is not None and lengths and length not in lengths:
        raise ValueError(f"{place}: its model_max_length {lengths[0]} is not supported: expected {length}")
    names = values("tokenizer_class")
    if names and not str(names[0]).startswith("CLIPTokenizer"):
        raise ValueError(f"{place}: its tokenizer_class {short(names[0])} is not supported: expected CLIPTokenizer")
