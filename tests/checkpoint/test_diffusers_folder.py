"""Folders as diffusers saves them: read whole, or refused in one line."""

import json
import re
from pathlib import Path

import pytest
import torch
import toy
from diffusers_files import GOLDEN, THEIRS, save, told, weights_of
from random_checkpoint import LCM, small
from runs import ddim_latents
from safetensors.torch import save_file
from toy import NEGATIVE, PROMPT

import ldm_lite
from ldm_lite import reconstruct, txt2img
from ldm_lite.checkpoint.reader import open_source, parts_of
from ldm_lite.core.files import Tensors
from ldm_lite.formats import diffusers_folder
from ldm_lite.zoo.families import FAMILY_ROWS, detect_family


def test_a_folder_of_stable_diffusion_2_says_what_it_predicts(tmp_path: Path) -> None:
    save(tmp_path, "sd2")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(
        '{"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "timestep_spacing": "leading"}'
    )
    pipe = ldm_lite.load(tmp_path, metadata=told(small("sd2"), "prediction"), device="cpu")
    assert pipe.family.prediction == "v"
    assert pipe.name == tmp_path.name
    assert toy.relative_error(ddim_latents(pipe, NEGATIVE, 5.0), GOLDEN["folder.sd2"]) < 1e-5


def test_a_folder_of_sdxl_has_two_text_encoders(tmp_path: Path) -> None:
    pipe = ldm_lite.load(save(tmp_path, "sdxl_base"), metadata=told(small("sdxl_base")), device="cpu")
    assert toy.relative_error(ddim_latents(pipe, NEGATIVE, 5.0), GOLDEN["folder.sdxl_base"]) < 1e-5


def test_a_refiner_has_but_the_second(tmp_path: Path) -> None:
    save(tmp_path, "sdxl_base")
    for path in (tmp_path / "text_encoder").iterdir():
        path.unlink()
    (tmp_path / "text_encoder").rmdir()
    about = told(small("sdxl_refiner"))
    assert list(ldm_lite.load(tmp_path, metadata=about, device="cpu").networks) == ["unet", "vae", "text_encoder"]


def test_the_command_takes_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an LCM, in half precision; one network's beside a checkpoint; and what is beside the networks is said."""
    folder = save(tmp_path / "lcm", "lcm", torch.float16)
    (folder / "safety_checker").mkdir()
    about = [flag for pair in told(LCM).items() for flag in ("--metadata", "=".join(pair))]
    common = ["--device", "cpu", "--out", str(tmp_path / "out"), *about]
    assert txt2img.main([PROMPT, "--ckpt", str(folder), *common]) == 0
    said = capsys.readouterr().err
    assert "lcm: ignored safety_checker" in said
    assert re.search("lcm: small LCM, eps prediction", said)
    flags = ("--vae", "--text-encoder")
    parts = [argument for flag in flags for argument in (flag, str(folder / flag[2:].replace("-", "_")))]
    assert txt2img.main([PROMPT, "--ckpt", str(folder / "unet"), *parts, *common]) == 0
    first, second = sorted((tmp_path / "out").rglob("*.png"))
    assert first.read_bytes().partition(b"IDAT")[2] == second.read_bytes().partition(b"IDAT")[2]
    assert reconstruct.main([str(first), "--ckpt", str(folder), "--out", str(tmp_path / "rec")]) == 0


@pytest.mark.parametrize("kind", [".bin", "shards"])
def test_weights_may_be_pickled_or_in_several_files(tmp_path: Path, kind: str) -> None:
    folder, values = save(tmp_path, "lcm"), weights_of("lcm.unet")
    plain = ldm_lite.load(folder, metadata=told(LCM), device="cpu").unet.state_dict()
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.unlink()
    if kind == ".bin":
        torch.save(values, file.with_suffix(".bin"))
    else:
        places = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(sorted(values))}
        for name in set(places.values()):
            save_file({key: value for key, value in values.items() if places[key] == name}, folder / "unet" / name)
        file.with_name(f"{file.name}.index.json").write_text(json.dumps({"weight_map": places}))
    weights = ldm_lite.load(folder, metadata=told(LCM), device="cpu").unet.state_dict()
    assert plain.keys() == weights.keys()
    assert all(torch.equal(plain[key], weights[key]) for key in plain)
    if kind == "shards":
        (folder / "unet" / "part-1.safetensors").unlink()
        with pytest.raises(
            ValueError, match=r"lacks part-1.safetensors, which .*index.json names: download the whole folder"
        ):
            ldm_lite.load(folder, metadata=told(LCM), device="cpu")


NAMES = ["model.safetensors", "model.safetensors.index.json", "model.fp16.safetensors", "model.bin", "model.fp16.bin"]
NAMES += ["model.safetensors.index.fp16.json", "model.fp16.safetensors.index.json", "model.safetensors.index.bf16.json"]
NAMES += ["pytorch_model.bin.index.json", "model.bin.index.fp16.json", "model.index.json"]
FULL = {"model.safetensors", "model.safetensors.index.json", "model.bin", "pytorch_model.bin.index.json"}


def test_full_precision_is_read_before_fp16_and_one_file_before_shards() -> None:
    for first in NAMES:
        for second in NAMES:
            taken = diffusers_folder._weights([first, second, "model-00001-of-00002.safetensors", "config.json"])
            assert taken is not None
            if ".safetensors" in first and ".safetensors" not in second:
                assert taken == first
            elif (".safetensors" in first) == (".safetensors" in second) and first in FULL and second not in FULL:
                assert taken == first or "model.index.json" in (first, second)
    for names in (NAMES[:2], [NAMES[2], NAMES[6]], [NAMES[3], NAMES[8]]):
        assert not str(diffusers_folder._weights(names)).endswith(".json")
    assert diffusers_folder._weights(["config.json", "model-00001-of-00002.safetensors"]) is None


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"x": torch.ones(2), name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    for where in ({"one": "one.safetensors", "two": "two.safetensors"}, {"x": "one.safetensors"}):
        places = {"one": "one.safetensors", "two": "two.safetensors", **where}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ValueError, match=r"both one.safetensors and two.safetensors hold x: download the whole"):
            open_source(tmp_path)


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        ({"class_embedding": 1024}, {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}),
        ({"class_embedding": 1280}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}),  # ViT-H
        ({"class_embedding": 1664}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}),  # bigG
        ({}, {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),  # SigLIP
    ],
)
def test_folders_of_all_image_encoders_are_read(
    keys: dict[str, int], config: dict[str, object], tmp_path: Path
) -> None:
    width = keys.get("class_embedding", 1152)
    weights = {f"vision_model.embeddings.{key}": torch.ones(width) for key in keys}
    weights["vision_model.embeddings.patch_embedding.weight"] = torch.ones(width, 3, 2, 2)
    save_file(weights, tmp_path / "model.safetensors")
    for about in (config, {"vision_config": config, "projection_dim": 768}):
        (tmp_path / "config.json").write_text(json.dumps(about))
        assert "vision" in parts_of(open_source(tmp_path))
        wrong = json.dumps(about).replace("gelu", "relu")
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"its hidden_act .* is not supported"):
            open_source(tmp_path)


def test_a_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    for name in ("b.ckpt", "a.safetensors", "notes.txt", "c.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"use one of its files: a\.safetensors, b\.ckpt, c\.gguf$"):
        ldm_lite.load(tmp_path, device="cpu")
    for number in range(20):
        (tmp_path / f"{number}.safetensors").touch()
    with pytest.raises(ValueError, match=r"17\.safetensors, \.\.\.$"):
        ldm_lite.load(tmp_path, device="cpu")


@pytest.mark.slow
def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    folder, about = save(tmp_path / "lcm", "lcm"), told(LCM)
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    (tmp_path / "empty").mkdir()

    def refused(message: str, source: Path, **arguments: object) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            ldm_lite.load(source, device="cpu", **arguments)
        assert "\n" not in str(caught.value)

    refused("is a folder without weights, expected a checkpoint, or a diffusers folder", tmp_path / "empty")
    refused("holds no unet, only vae", folder, unet=folder / "vae", metadata=about)
    refused("holds no unet, only text_encoder", folder, unet=folder / "text_encoder", metadata=about)
    refused("holds only unet: give the missing networks with `vae=FILE` and `text_encoder=FILE`", unet, metadata=about)

    values = weights_of("lcm.unet")
    for name, changed, message in (
        (
            "missing",
            {key: value for key, value in values.items() if "mid_block.resnets.1.conv2" not in key},
            r"the unet does not fit: 2 tensors missing \(middle_block.2.out_layers.3.bias",
        ),
        (
            "no_conv_out",
            {key: value for key, value in values.items() if "conv_out" not in key},
            r"a tensor that every such network has is missing: out.2.weight",
        ),
        (
            "misshapen",
            {**values, "conv_out.bias": torch.zeros(5)},
            r"1 tensors of another shape \(out.2.bias \(5,\) in place of \(4,\)\)",
        ),
        (
            "another",
            {**values, "down_blocks.0.attentions.0.transformer_blocks.0.attn2.add_k_proj.weight": torch.zeros(2, 2)},
            r"1 tensors unexpected \(input_blocks.1.1.transformer_blocks.0.attn2.add_k_proj.weight\)",
        ),
        (
            "if",
            {**values, "down_blocks.0.downsamplers.1.conv1.weight": torch.zeros(2, 2)},
            r"is an unsupported kind of UNet in diffusers' format",
        ),
    ):
        save_file(changed, tmp_path / f"{name}.safetensors")
        refused(message, folder, unet=tmp_path / f"{name}.safetensors", metadata=about)
    bare = {key: value for key, value in weights_of("vae").items() if "quant_conv" not in key}  # Flux has such ones
    save_file(bare, tmp_path / "flux.safetensors")
    message = r"flux.safetensors: does not fit: it has no quant_conv, but .*'s autoencoder one"
    refused(message, folder, vae=tmp_path / "flux.safetensors", metadata=about)
    half = {key: value for key, value in weights_of("vae").items() if "post_quant_conv" not in key}
    save_file(half, tmp_path / "half.safetensors")
    message = r"half.safetensors: holds an unknown kind of autoencoder: .* is missing: post_quant_conv.weight"
    refused(message, folder, vae=tmp_path / "half.safetensors", metadata=about)
    (folder / "unet").rename(folder / "prior")
    refused("is a pipeline without a UNet", folder)


def test_released_folders_need_nothing_told(tmp_path: Path) -> None:
    """Keys and shapes of the released networks alone, as a folder of theirs has them."""
    parts = {"unet": "unet_lcm", "vae": "vae_kl_f8_sd", "text_encoder": "text_clip_l"}
    shapes = {}
    for role, name in parts.items():
        theirs = {key: tuple(shape) for key, shape in THEIRS[name].items()}
        shapes[role] = parts_of(Tensors(tmp_path / role, theirs, torch.zeros))[role].shapes
    assert detect_family(shapes, {}) == FAMILY_ROWS["lcm"]
