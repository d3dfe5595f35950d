"""Networks have the keys, shapes and numbers of parameters of the released ones, read off the originals' classes."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from released import AUTOENCODERS, TRANSFORMERS, UNETS
from torch import nn

from ldm_lite.families.deepfloyd import IF_I_XL, IF_II_L
from ldm_lite.models.bert import BERT_LARGE, BERTSpec
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.open_clip import OPEN_CLIP_G, OPEN_CLIP_H
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.t5 import T5_XXL
from ldm_lite.models.taesd import TAESD
from ldm_lite.zoo.family import build_network

MANIFESTS = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "manifests.json.gz").read_bytes()))
# UNets that differ from another by one layer, as tests/zoo/test_detection.py checks.
WITHOUT_MANIFEST = {"instruct_pix2pix", "lcm", "lcm_sdxl"}
# Networks whose files have other keys or layers than ours: tests/families, and tests/test_style.py.
ELSEWHERE = {"transformer_z_image", "vae_flux2", "vae_qwen_image", "vision_qwen25_vl", "t2i_adapter_style"}
SPECS: dict[str, Any] = {
    **{f"unet_{name}": spec for name, spec in UNETS.items() if name not in WITHOUT_MANIFEST},
    **{f"transformer_{name}": spec for name, spec in TRANSFORMERS.items()},
    **{f"vae_{name}": spec for name, spec in AUTOENCODERS.items()},
    "unet_if_I_XL": IF_I_XL,
    "unet_if_II_L": IF_II_L,
    "text_clip_l": CLIP_L,
    "text_openclip_h14": OPEN_CLIP_H,
    "text_openclip_bigg14": OPEN_CLIP_G,
    "text_bert_ldm_large": BERT_LARGE,
    "text_bert_ldm_256": replace(BERT_LARGE, width=640),
    "text_bert_layout": BERTSpec(vocab_size=8192, length=92, width=512, layers=16),
    "t5_v1_1_xxl_encoder": T5_XXL,
}
WIDTHS = (320, 640, 1280, 1280)
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "control_sd15": lambda: ControlNet(UNETS["sd1"]),
    "control_sd21": lambda: ControlNet(UNETS["sd2"]),
    "t2i_adapter_sd_rgb": lambda: T2IAdapter(AdapterSpec(3, 8, WIDTHS, 2, light=False)),
    "t2i_adapter_sd_gray": lambda: T2IAdapter(AdapterSpec(1, 8, WIDTHS, 2, light=False)),
    "t2i_adapter_light_color": lambda: T2IAdapter(AdapterSpec(3, 8, WIDTHS, 4, light=True)),
    "t2i_adapter_sdxl": lambda: T2IAdapter(AdapterSpec(1, 16, WIDTHS, 2, light=False)),
    "taesd_encoder": lambda: TAESD(toy.TINY).get_submodule("encoder"),
    "taesd_decoder": lambda: TAESD(toy.TINY).get_submodule("decoder"),
}
PREFIXES = {"text_clip_l": "text_model.", "text_bert": "transformer."}  # that their files have
UNUSED = {"text_openclip": ["logit_scale"], "text_bert": ["to_logits.weight", "to_logits.bias"]}
UNUSED["t5"] = ["encoder.embed_tokens.weight"]


def of_kind(table: dict[str, Any], name: str, default: Any) -> Any:
    """The value whose key a name begins with."""
    return next((value for kind, value in table.items() if name.startswith(kind)), default)


def test_every_released_network_is_known() -> None:
    assert SPECS.keys() | OTHERS.keys() | ELSEWHERE == MANIFESTS.keys()
    for name, spec in AUTOENCODERS.items():
        assert spec.factor == int(name.split("_")[1].removeprefix("f"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted((SPECS.keys() | OTHERS.keys()) - ELSEWHERE))
def test_keys_shapes_and_parameters_are_those_of_the_originals(name: str) -> None:
    with torch.device("meta"):
        network = OTHERS[name]() if name in OTHERS else build_network(SPECS[name])
    prefix, unused = of_kind(PREFIXES, name, ""), of_kind(UNUSED, name, [])
    shapes = {key.removeprefix(prefix): shape for key, shape in MANIFESTS[name]["shapes"].items()}
    left_out = sum(int(np.prod(shapes[key])) for key in unused if key in shapes and name[:2] != "t5")  # T5's is shared
    weights = network.state_dict()
    assert {key: list(value.shape) for key, value in weights.items()} == {
        key: shape for key, shape in shapes.items() if key not in unused
    }
    assert sum(value.numel() for value in weights.values()) == MANIFESTS[name]["params"] - left_out
