"""Files of FLUX.1 and Stable Diffusion 3: prefixes, text encoders apart, precisions, and what is refused."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import toy_flow
from flow_files import SPIECE, of_diffusers, same
from random_checkpoint import metadata, state_dict
from torch import Tensor
from toy_flow import all_in_one, hugging_face, save, under, weights

import ldm_lite
from ldm_lite.checkpoint.reader import load_weights, on_meta, open_checkpoint, parts_of
from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.models.mmdit import MMDiTSpec
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

NAMES = pytest.mark.parametrize("name", toy_flow.TRANSFORMERS)


@NAMES
@pytest.mark.thin(4)
def test_loads_all_in_one_and_apart(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = toy_flow.small(name)
    parts, about = weights(family), metadata(family)
    whole = save(tmp_path / "whole.safetensors", all_in_one(family, parts), about)
    with caplog.at_level(logging.WARNING):
        pipe = ldm_lite.load(whole, device="cpu", t5_vocab=SPIECE)
    assert not caplog.records
    same(pipe, parts)
    assert replace(pipe.family, title=family.title) == family
    assert pipe.tokenizer is not None
    assert pipe.t5_tokenizer is not None
    assert pipe.t5_tokenizer.length == 512

    files = {role: save(tmp_path / f"{role}.safetensors", values) for role, values in parts.items()}
    save(files["unet"], parts["unet"], about)
    if "text_encoder_3" in parts:
        # at its full width it is known without metadata
        save(files["text_encoder_2"], hugging_face(parts["text_encoder_2"]), {"open_clip": "True"})
    save(files["text_encoder"], under("text_model.", parts["text_encoder"]))
    texts = [str(file) for role, file in files.items() if role.startswith("text")][::-1]  # in any order
    shutil.copy(SPIECE, tmp_path / "spiece.model")
    same(ldm_lite.load(files["unet"], vae=files["vae"], text_encoder=texts, device="cpu"), parts)


@pytest.mark.slow
def test_a_file_is_its_own_row_by_its_metadata(tmp_path: Path) -> None:
    for name, row in (("sd35_large_turbo", "sd35_large"), ("flux_canny", "flux_control")):
        family = toy_flow.small(row)
        metadata = {"ldm_lite.text_num_heads": "2", "ldm_lite.text_2_num_heads": "2"}
        path = save(tmp_path / f"file_of_{len(name)}.safetensors", all_in_one(family, weights(family)), metadata)
        about = {"family": name}
        assert ldm_lite.load(path, device="cpu", t5_vocab=SPIECE).family.steps == FAMILY_ROWS[row].steps
        pipe = ldm_lite.load(path, device="cpu", t5_vocab=SPIECE, metadata=about)
        assert (pipe.family.steps, pipe.family.scale) == (FAMILY_ROWS[name].steps, FAMILY_ROWS[name].scale)


@pytest.mark.slow
def test_stable_diffusion_3_may_lack_t5_and_flux_may_not(tmp_path: Path) -> None:
    for name in ("sd35_medium", "flux_dev"):
        family = toy_flow.small(name)
        parts = weights(family)
        whole = {k: v for k, v in all_in_one(family, parts).items() if "t5xxl" not in k}
        path = save(tmp_path / f"{name}.safetensors", whole, metadata(family))
        if isinstance(family.unet, MMDiTSpec):
            pipe = ldm_lite.load(path, device="cpu")
            assert (pipe.t5_tokenizer, len(pipe.text_encoders)) == (None, 2)
            continue
        with pytest.raises(
            ValueError, match=r"reads text with CLIP-L and T5 XXL: name the file of T5 XXL with `text_enc"
        ):
            ldm_lite.load(path, device="cpu")


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    family = toy_flow.small("flux_dev")
    parts, about = weights(family), metadata(family)
    unet = save(tmp_path / "unet.safetensors", parts["unet"], about)
    vae = save(tmp_path / "vae.safetensors", parts["vae"])
    whole = save(tmp_path / "whole.safetensors", all_in_one(family, parts), about)
    wide = replace(toy_flow.T5, width=48)
    t5 = save(tmp_path / "t5.safetensors", toy.network(wide).state_dict())
    for match, source, options in (
        ("name the file of CLIP-L and T5 XXL", unet, {"vae": vae}),
        ("no spiece.model or tokenizer.json of T5 beside .*: name it with `t5_vocab=FILE`", whole, {}),
        ("T5's output is 48 wide, expected 32", whole, {"text_encoder": t5, "t5_vocab": SPIECE}),
        ("holds no text encoder", unet, {"text_encoder": vae}),
    ):
        with pytest.raises(ValueError, match=match):
            ldm_lite.load(source, device="cpu", **options)
    with pytest.raises(
        ValueError, match="got `height=72` and `width=64`, expected multiples of 16: use `height=64` and `width=64`"
    ):
        ldm_lite.load(whole, device="cpu", t5_vocab=SPIECE).latent_shape(72, 64)
    clip = {k: v for k, v in all_in_one(family, parts).items() if not k.startswith("vae.")}
    with pytest.raises(ValueError, match="without its autoencoder: name its file with `vae=FILE`"):
        ldm_lite.load(save(tmp_path / "no_vae.safetensors", clip, about), device="cpu", t5_vocab=SPIECE)


def test_norms_under_comfyuis_names_and_wrapped_keys(tmp_path: Path) -> None:
    family = toy_flow.small("flux_schnell")
    parts = weights(family)
    named = {
        "module." + key.replace("_norm.scale", "_norm.weight"): value
        for key, value in all_in_one(family, parts).items()
    }
    same(ldm_lite.load(save(tmp_path / "f.safetensors", named, metadata(family)), device="cpu", t5_vocab=SPIECE), parts)


# ---- precisions -----------------------------------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn


def scaled(values: Mapping[str, Tensor], kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights as a file of scaled fp8 stores them, and what they are worth."""
    stored, worth = dict(values), dict(values)
    for key, value in values.items():
        if value.ndim != 2 or "block" not in key:
            continue
        shape = {"rows": (len(value), 1), "blocks": (len(value), 4, 1)}.get(kind, ())
        scale = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(len(stored)))
        stored[key] = value.to(FP8)
        name = key.removesuffix("weight")
        stored[name + ("weight_scale" if kind == "newer" else "scale_weight")] = scale
        stored[name + ("input_scale" if kind == "newer" else "scale_input")] = torch.tensor(3.0)
        if kind == "newer":
            told = json.dumps({"format": "float8_e4m3fn"}).encode()
            stored[f"{name}comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
        blocks = value.to(FP8).float().view(len(value), 4, -1) if kind == "blocks" else value.to(FP8).float()
        worth[key] = (blocks * scale).view(value.shape)
    return stored | ({} if kind == "newer" else {"scaled_fp8": torch.empty(0, dtype=FP8)}), worth


@pytest.mark.parametrize("kind", ["scalar", "rows", "blocks", "newer"])
@pytest.mark.thin(3)
def test_scaled_fp8_is_multiplied(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = toy_flow.small("flux_schnell")
    parts = weights(family)
    stored, worth = scaled(parts["unet"], kind)
    about = dict(metadata(family))
    if kind == "newer":
        about["_quantization_metadata"] = json.dumps({"layers": {"a": {"format": "float8_e4m3fn"}}})
    whole = save(tmp_path / "f.safetensors", all_in_one(family, parts | {"unet": stored}), about)
    with caplog.at_level(logging.WARNING):
        pipe = ldm_lite.load(whole, device="cpu", t5_vocab=SPIECE)
    assert not caplog.records
    same(pipe, parts | {"unet": worth})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP8, torch.float8_e5m2])
@pytest.mark.thin(4)
def test_other_precisions_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    family = toy_flow.small("sd35_large")
    parts = weights(family)
    cast = {key: value.to(dtype) for key, value in all_in_one(family, parts).items()}
    pipe = ldm_lite.load(save(tmp_path / "f.safetensors", cast, metadata(family)), device="cpu", t5_vocab=SPIECE)
    same(pipe, {role: {key: v.to(dtype).float() for key, v in values.items()} for role, values in parts.items()})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"double_blocks.0.img_mod.lin.scale_weight": torch.ones(3)}, "its scale .* does not fit"),
        ({"nothing.scale_weight": torch.ones(())}, "does not fit nothing.weight which it lacks"),
        ({"a.scale_weight": torch.ones(3), "a.weight": torch.ones(3)}, "its scale .* does not fit a.weight"),
        (
            {"a.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)},
            "is quantised as nvfp4, expected float8_e4m3fn or float8_e5m2",
        ),
        ({"a.comfy_quant": torch.tensor(list(b"[1"), dtype=torch.uint8)}, "description of the quantisation is damaged"),
    ],
)
def test_scales_that_make_no_sense_are_refused(change: dict[str, Tensor], match: str, tmp_path: Path) -> None:
    stored, _ = scaled(weights(toy_flow.small("flux_schnell"))["unet"], "scalar")
    with pytest.raises(ValueError, match=match):
        ldm_lite.load(save(tmp_path / "f.safetensors", stored | change), device="cpu")


def test_scales_that_are_missing(tmp_path: Path) -> None:
    """A marked file without any is refused, unless nothing in it is in fp8."""
    parts = weights(toy_flow.small("flux_schnell"))
    stored, _ = scaled(parts["unet"], "scalar")
    stored = {key: value for key, value in stored.items() if not key.endswith((".scale_weight", ".scale_input"))}
    with pytest.raises(ValueError, match=r"f.safetensors: is marked as scaled fp8, but its scales are missing"):
        parts_of(open_checkpoint(save(tmp_path / "f.safetensors", stored)))
    assert "scaled_fp8" not in parts_of(open_checkpoint(save(tmp_path / "f.safetensors", stored | parts["unet"]))).file


@NAMES
@pytest.mark.thin(7)
def test_a_random_checkpoint_of_the_benchmark_loads(name: str, tmp_path: Path) -> None:
    family = toy_flow.small(name)
    path = save(tmp_path / "f.safetensors", dict(state_dict(family)), metadata(family))
    assert list(ldm_lite.load(path, device="cpu", t5_vocab=SPIECE).networks) == list(family.specs)


# ---- diffusers ------------------------------------------------------------------------------------------------------

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "transformers.npz")


@NAMES
@pytest.mark.thin(3)
def test_a_transformer_of_diffusers_computes_the_same(name: str, tmp_path: Path) -> None:
    component = parts_of(open_checkpoint(save(tmp_path / "d.safetensors", of_diffusers(name))))["unet"]
    spec = toy_flow.TRANSFORMERS[name]
    with on_meta():
        network = build_network(spec)
    load_weights(network, component, "transformer", torch.device("cpu"), torch.float32)
    x, t, context, y = toy_flow.inputs(spec)
    out = network(x, t, context, y, **toy_flow.more(spec))
    assert toy.relative_error(out, GOLDEN[f"diffusers.{name}"]) < 3e-5


SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": False}


@pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
@pytest.mark.thin(2)
def test_a_folder_of_diffusers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = toy_flow.small(name)
    parts = weights(family)
    last = max(role for role in parts if role.startswith("text"))
    clips = {"text_encoder": under("text_model.", parts["text_encoder"])}
    if last == "text_encoder_3":
        clips["text_encoder_2"] = hugging_face(parts["text_encoder_2"])
        parts["text_encoder"]["text_projection.weight"] = torch.rand(8, 8)
        clips["text_encoder"]["text_projection.weight"] = parts["text_encoder"]["text_projection.weight"]
    folders = {"transformer": of_diffusers(name), "vae": parts["vae"], last: parts[last], **clips}
    for folder, tensors in folders.items():
        (tmp_path / folder).mkdir()
        file = "diffusion_pytorch_model" if folder in ("transformer", "vae") else "model"
        save(tmp_path / folder / f"{file}.safetensors", tensors)
        act = {"hidden_act": "gelu" if folder == "text_encoder_2" else "quick_gelu", "num_attention_heads": 2}
        about = act if folder in clips else {"scaling_factor": 0.3, "shift_factor": 0.2} if folder == "vae" else {}
        (tmp_path / folder / "config.json").write_text(json.dumps(about))
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (tmp_path / last.replace("text_encoder", "tokenizer")).mkdir()
    shutil.copy(SPIECE, tmp_path / last.replace("text_encoder", "tokenizer") / "spiece.model")
    kind = "Flux" if name == "flux_dev" else "StableDiffusion3"
    listed = {role: ["diffusers", "x"] for role in folders}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": f"{kind}Pipeline", **listed}))
    with caplog.at_level(logging.WARNING):
        pipe = ldm_lite.load(tmp_path, device="cpu")
    assert not caplog.records
    same(pipe, {"unet": pipe.unet.state_dict(), **{role: parts[role] for role in parts if role != "unet"}})
    x, t, context, y = toy_flow.inputs(family.unet)
    out = pipe.unet(x, t, context, y, **toy_flow.more(family.unet))
    assert toy.relative_error(out, GOLDEN[f"diffusers.{name}"]) < 3e-5
    assert (pipe.family.scale_factor, pipe.family.shift_factor) == (0.3, 0.2)


@pytest.mark.parametrize(
    ("row", "file", "warning"),
    [
        ("flux_dev", "flux1-kontext-dev", "its name suggests Kontext"),
        ("flux_control", "flux1-canny-dev", "its name suggests Canny: .*add `metadata=family=flux_canny`"),
    ],
)
@pytest.mark.thin(3)
def test_what_only_a_name_tells_is_a_warning(
    row: str, file: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = replace(toy_flow.small(row), title=FAMILY_ROWS[row].title)
    path = save(tmp_path / f"{file}.safetensors", all_in_one(family, weights(family)), metadata(family))
    ldm_lite.load(path, device="cpu", t5_vocab=SPIECE)
    assert re.search(warning, caplog.text)


@pytest.mark.parametrize("name", ["flux_dev", "sd3_medium", "sd35_medium"])
def test_diffusers_transformers_are_read_under_a_prefix_too(name: str) -> None:
    shapes = {key: tuple(value.shape) for key, value in of_diffusers(name).items()}
    plain = original_layout(shapes)
    prefixed = original_layout({f"model.diffusion_model.{key}": shape for key, shape in shapes.items()})
    assert plain is not None
    assert prefixed is not None
    assert prefixed.keys() == {f"model.diffusion_model.{key}" for key in plain}
    assert plain.keys() == toy.network(toy_flow.TRANSFORMERS[name]).state_dict().keys()
