"""Files in the format of diffusers and transformers: every key has its place; networks compute what theirs do."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from diffusers_files import DATA, GOLDEN, THEIRS, shapes_of, weights_of
from random_checkpoint import SMALL, small
from safetensors.torch import save_file
from torch import Tensor, nn

from ldm_lite.checkpoint.reader import load_weights, on_meta, open_checkpoint, parts_of
from ldm_lite.core.files import Tensors
from ldm_lite.families.sdxl import SDXL
from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.models.controlnet import ControlNet, infer_spec
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.unet import LDMUNetSpec
from ldm_lite.zoo.families import infer_vae
from ldm_lite.zoo.family import Spec, build_network

ORIGINAL = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))
del ORIGINAL["transformer_z_image"]  # its makers' keys are diffusers', ours are ComfyUI's: tests/families/


def loaded(component: Tensors, spec: Spec) -> nn.Module:
    with on_meta():
        network = build_network(spec)
    load_weights(network, component, "network", torch.device("cpu"), torch.float32)
    return network


# ---- every key ------------------------------------------------------------------------------------------------------

RELEASED = [name for name in THEIRS if name.startswith(("unet_", "vae_", "text_openclip"))]


@pytest.mark.parametrize("name", RELEASED)
def test_every_key_of_a_released_network_has_its_place(name: str) -> None:
    """And every place a key, but for the layer that Stable Diffusion 2 does not read, which converted files lack."""
    sources = original_layout(shapes_of(name))
    ours = {key: source.shape for key, source in sources.items()}
    if name.startswith("unet_lcm"):
        manifest = {"unet_lcm": "unet_sd1", "unet_lcm_sdxl": "unet_sdxl_base"}[name]
        assert ours.pop("cond_proj.weight") == (320, 256)
    else:
        manifest = name
    wanted = {key: tuple(shape) for key, shape in ORIGINAL[manifest]["shapes"].items()}
    if name == "text_openclip_h14":
        wanted = {key: s for key, s in wanted.items() if ".resblocks.23." not in key and key != "text_projection"}
    wanted.pop("logit_scale", None)
    assert ours == wanted
    assert sorted(key for source in sources.values() for key in source.keys) == sorted(THEIRS[name])


def controlnet(shapes: Mapping[str, tuple[int, ...]], like: LDMUNetSpec) -> ControlNet:
    """A ControlNet as its shapes say, with the heads of its UNet."""
    with on_meta():
        return ControlNet(replace(infer_spec(shapes), num_heads=like.num_heads, head_dim=like.head_dim))


@pytest.mark.parametrize("name", toy.DIFFUSERS_CONTROLS)
def test_every_key_of_a_released_controlnet_has_its_place(name: str) -> None:
    sources = original_layout(shapes_of(f"control_{name}"))
    ours = {key: source.shape for key, source in sources.items()}
    net = controlnet(ours, SDXL.unet)
    assert ours == {key: tuple(value.shape) for key, value in net.state_dict().items()}
    assert sorted(key for source in sources.values() for key in source.keys) == sorted(THEIRS[f"control_{name}"])
    if f"control_{name}" in ORIGINAL:
        assert ours == {key: tuple(shape) for key, shape in ORIGINAL[f"control_{name}"]["shapes"].items()}
    if name == "sdxl":
        assert net.spec == SDXL.unet
    if name == "sdxl_small":  # of which only the middle reads the text
        assert (net.spec.transformer_depth, net.spec.middle_depth) == ((0, 0, 0), 1)


@pytest.mark.parametrize("name", ["sd_rgb", "light_color", "sdxl"])
def test_every_key_of_a_released_adapter_has_its_place(name: str) -> None:
    sources = original_layout(shapes_of(f"t2i_adapter_{name}"))
    ours = {key.removeprefix("adapter."): source.shape for key, source in sources.items()}
    assert ours == {key: tuple(shape) for key, shape in ORIGINAL[f"t2i_adapter_{name}"]["shapes"].items()}


def test_the_original_layout_is_left_alone() -> None:
    for name, manifest in ORIGINAL.items():
        if name == "vae_qwen_image":  # whose release is in diffusers' layout: see families/test_qwen_image.py
            continue
        assert original_layout({key: tuple(shape) for key, shape in manifest["shapes"].items()}) is None, name
    assert original_layout(shapes_of("text_clip_l")) is None  # whose names transformers has from where we have them


# ---- what they compute ----------------------------------------------------------------------------------------------


def component(path: Path, name: str, values: Mapping[str, Tensor], role: str, **metadata: str) -> Tensors:
    save_file(dict(values), path / f"{name}.safetensors", metadata)
    components = parts_of(open_checkpoint(path / f"{name}.safetensors"))
    assert set(components) == {role}
    return components[role]


@pytest.mark.parametrize("name", toy.DIFFUSERS_UNETS)
def test_a_unet_computes_what_diffusers_does(tmp_path: Path, name: str) -> None:
    spec = toy.DIFFUSERS_UNETS[name]
    part = component(tmp_path, name, weights_of(f"unet_{name}"), "unet")
    inferred = LDMUNetSpec.from_shapes(part.shapes)
    assert inferred == replace(spec, num_heads=None, head_dim=None)
    x, context, y = toy.unet_inputs(spec)
    out = loaded(part, spec)(x, toy.T, context, y)
    assert toy.relative_error(out, GOLDEN[f"unet.{name}"]) < 1e-5
    if spec.guidance_dim is not None:  # which is read
        negated = y.clone()
        negated[:, -spec.guidance_dim :] *= -1
        assert toy.relative_error(loaded(part, spec)(x, toy.T, context, negated), GOLDEN[f"unet.{name}"]) > 1e-4


@pytest.mark.parametrize("name", toy.DIFFUSERS_CONTROLS)
def test_a_controlnet_computes_what_diffusers_does(tmp_path: Path, name: str) -> None:
    spec = toy.DIFFUSERS_CONTROLS[name]
    part = component(tmp_path, name, weights_of(f"control_{name}"), "control")
    net = controlnet(part.shapes, spec)
    assert net.spec == spec
    load_weights(net, part, "control", torch.device("cpu"), torch.float32)
    x, context, y = toy.unet_inputs(spec)
    results = net(x, toy.T, context, net.embed_hint(toy.picture()), y)
    for i in (6, -1):
        assert toy.relative_error(results[i], GOLDEN[f"control.{name}.{i}"]) < 1e-5


@pytest.mark.parametrize("name", toy.ADAPTERS)
def test_an_adapter_computes_what_diffusers_does(tmp_path: Path, name: str) -> None:
    part = component(tmp_path, name, weights_of(f"adapter_{name}"), "adapter")
    assert AdapterSpec.from_shapes(part.shapes, 3) == toy.ADAPTERS[name]
    with on_meta():
        adapter = T2IAdapter(toy.ADAPTERS[name])
    load_weights(adapter, part, "adapter", torch.device("cpu"), torch.float32)
    features = adapter(toy.picture(adapter.spec.in_channels))
    for i in (1, -1):
        assert toy.relative_error(features[i][:, ::4], GOLDEN[f"adapter.{name}.{i}"]) < 1e-5


OLD = {"group_norm": "group_norm", "to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


@pytest.mark.parametrize("old", [False, True])
def test_an_autoencoder_computes_what_diffusers_does(tmp_path: Path, old: bool) -> None:
    """Also by the names that its attention had at first, which the released files of Stable Diffusion 1.5 have."""
    values = weights_of("vae")
    if old:
        values = {
            next((key.replace(new, name) for new, name in OLD.items() if f"attentions.0.{new}." in key), key): value
            for key, value in values.items()
        }
        assert "encoder.mid_block.attentions.0.proj_attn.weight" in values
    part = component(tmp_path, "vae", values, "vae")
    assert infer_vae(part.shapes) == SMALL.vae
    vae = loaded(part, SMALL.vae)
    assert toy.relative_error(vae.encode(toy.picture() * 2 - 1)[0], GOLDEN["vae.mean"]) < 1e-5
    assert toy.relative_error(vae.decode(toy.normal(4, 1, 4, 8, 8))[:, :, ::4, ::4], GOLDEN["vae.pixels"]) < 1e-5


@pytest.mark.parametrize("prefix", ["", "text_model."])
@pytest.mark.parametrize("name", ["text_openclip_h14", "text_openclip_bigg14"])
def test_a_text_encoder_computes_what_transformers_does(tmp_path: Path, name: str, prefix: str) -> None:
    """Released versions of transformers write keys with "text_model." or without."""
    values = {
        key if key == "text_projection.weight" else prefix + key.removeprefix("text_model."): value
        for key, value in weights_of(name).items()
    }
    part = component(tmp_path, "text", values, "text_encoder", hidden_act="gelu")
    row = small("sd2").text if name == "text_openclip_h14" else small("sdxl_base").text_encoders[1]
    encoder = loaded(part, row.fitted(part.shapes))
    ids = toy.token_ids(row.vocab_size, row.length)
    if name == "text_openclip_bigg14":
        context, pooled = encoder.context_and_pooled(ids)
        assert toy.relative_error(pooled, GOLDEN[f"{name}.pooled"]) < 1e-5
    else:
        context = encoder(ids)
    assert toy.relative_error(context[:, ::8], GOLDEN[name]) < 1e-5
