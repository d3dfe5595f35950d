"""Chroma1 in miniature: its network and whole runs against the original and diffusers (the goldens), and its files."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import toy
import toy_chroma
from PIL import Image
from random_checkpoint import random_tensor
from runs import run_latents
from toy_flow import save, under, weights

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.models.chroma import CHROMA, Chroma
from ldm_lite.models.flux import SingleStreamBlock
from ldm_lite.models.ops import axial_rotation
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import Offloader

GOLDEN = np.load(Path(__file__).parent / "data" / "chroma.npz")
SHAPES = json.loads(str(GOLDEN["shapes"]))


def load(files: Mapping[str, Any], **changes: Any) -> Pipeline:
    options = {**files, **changes}
    return ldm_lite.load(options.pop("ckpt"), **options)


def run(network: torch.nn.Module, dtype: torch.dtype = torch.float32, **more: Any) -> torch.Tensor:
    x, t, context, y = toy_chroma.inputs()
    return network.to(dtype)(x.to(dtype), t, context.to(dtype), y, **more)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """diffusers' folder, with the goldens' weights."""
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    return ldm_lite.load(toy_chroma.write_diffusers(tmp_path_factory.mktemp("c") / "d", shapes), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Any]:
    """Files of their own, as ComfyUI has them: the arguments of load."""
    return toy_chroma.write(folder)


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["original", "diffusers"])
def test_equals_the_original_on_texts_of_different_lengths(name: str, pipe: Pipeline) -> None:
    assert toy.relative_error(run(pipe.unet), GOLDEN[name]) < 1e-5


@pytest.mark.slow
def test_a_block_of_the_released_width_equals_diffusers() -> None:
    with torch.device("meta"):
        block = SingleStreamBlock(CHROMA)
        block.modulation.lin = cast(Any, torch.nn.Flatten())  # (1, 3, D) -> (1, 3 D)
    toy.fill(block.to_empty(device="cpu"))
    x, mods = toy.normal(1, 1, 12, CHROMA.width), toy.normal(2, 1, 3, CHROMA.width)
    places = torch.cat([torch.zeros(4, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(4.0))])
    out = block(x, mods, axial_rotation(places.T, CHROMA.axes, 10000.0, torch.float32))
    assert toy.relative_error(out[..., ::48], GOLDEN["wide"]) < 1e-5


def test_padding_is_not_read_and_texts_of_one_length_need_no_mask(pipe: Pipeline) -> None:
    x, t, context, y = toy_chroma.inputs()
    own = pipe.unet(x, t, context, y)
    context[1, y[1] :] = 7.0
    assert torch.equal(pipe.unet(x, t, context, y), own)
    whole = pipe.unet(x, t, context, torch.tensor([[9], [9]]))
    for attention in ("vanilla", "sdpa"):
        pipe.use_attention(attention)
        assert toy.relative_error(pipe.unet(x, t, context, y, full=torch.ones(2)), whole.numpy()) < 1e-5


def test_half_precision_is_close(pipe: Pipeline) -> None:
    network = Chroma(toy_chroma.SPEC)
    network.load_state_dict(pipe.unet.state_dict())
    network.requires_grad_(False)
    exact = run(network, torch.float64)
    for dtype, limit in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
        assert toy.relative_error(run(network, dtype).double(), exact.numpy()) < limit


@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_offloads_and_stores_in_8_bits(kind: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1)
    own = run(pipe.unet)
    for storage, limit in ((None, 1e-6), ("int8", 0.1), ("fp8", 0.2)):
        network = Chroma(toy_chroma.SPEC)
        network.load_state_dict(pipe.unet.state_dict())
        network.requires_grad_(False)
        offloader = Offloader({"unet": network}, torch.device("cpu"), offload=kind, storage=storage)
        with offloader.phase("unet"):
            assert toy.relative_error(run(network), own.numpy()) < limit


# ---- text and whole runs --------------------------------------------------------------------------------------------


def test_a_text_does_not_depend_on_its_batch(pipe: Pipeline) -> None:
    together = pipe.encode_prompt([*toy_chroma.PROMPTS, ""])
    assert together.context is not None
    assert together.y is not None
    assert together.y.tolist() == [[15], [9], [2]]  # tokens, the end, and one padding
    for i, prompt in enumerate([*toy_chroma.PROMPTS, ""]):
        alone = pipe.encode_prompt(prompt)
        assert alone.context is not None
        assert alone.y is not None
        count = int(alone.y)
        assert alone.context.shape == (1, count, 32)
        assert torch.allclose(alone.context[0], together.context[i, :count], atol=1e-6)


def test_long_texts_are_cut_with_a_warning(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = pipe.encode_prompt("one two " * 200)
    assert "prompt is too long, dropped from it:" in caplog.text
    assert found.context is not None
    assert found.y is not None
    assert (found.context.shape[1], found.y.tolist()) == (512, [[512]])


@pytest.mark.parametrize(("name", "scale"), [("plain", 1.0), ("guided", toy_chroma.GUIDANCE)])
def test_a_whole_run_equals_diffusers_pipeline(name: str, scale: float, pipe: Pipeline) -> None:
    """From prompts of different lengths to pixels."""
    given = {"negative_prompt": toy_chroma.NEGATIVE, "noise": toy.normal(1, 2, 4, 4, 6), "height": 32, "width": 48}
    latents = run_latents(pipe, toy_chroma.PROMPTS, steps=toy_chroma.STEPS, sampler="euler", scale=scale, **given)
    pixels = torch.stack(pipe.decode(latents, output="tensor"))
    assert toy.relative_error((pixels + 1) / 2, GOLDEN[f"run.{name}"]) < 1e-4


def test_images_do_not_depend_on_their_batch(pipe: Pipeline, tmp_path: Path) -> None:
    prompts = [*toy_chroma.PROMPTS, ""]
    size = {"height": 32, "width": 48, "steps": 2}
    both = pipe.txt2img(prompts, batch_size=3, **size)
    for i, prompt in enumerate(prompts):
        [alone] = pipe.txt2img(prompt, seed=42 + i, **size)
        assert np.abs(np.asarray(both[i], dtype=float) - np.asarray(alone, dtype=float)).max() <= 2
    Image.fromarray(toy.photo(32, 48)).save(tmp_path / "image.png")
    [again] = pipe.img2img("a cat", tmp_path / "image.png", strength=0.5, steps=4)
    assert again.size == (48, 32)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_apart_all_in_one_and_with_comfyuis_names(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = weights(toy_chroma.small())
    renamed = {key.replace(".scale", ".weight"): value for key, value in parts["unet"].items()}
    comfyui = save(folder / "renamed.safetensors", under("model.diffusion_model.", renamed))
    pipes = [load(files), ldm_lite.load(toy_chroma.write_whole(folder), device="cpu"), load(files, ckpt=comfyui)]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    for loaded in pipes:
        assert (loaded.family.conditioner, loaded.family.steps, loaded.family.scale) == ("chroma", 40, 3.0)
        for role, values in parts.items():
            assert all(torch.equal(value, values[key]) for key, value in loaded.networks[role].state_dict().items())


def test_scaled_fp8_of_comfyui(files: dict[str, Any], folder: Path) -> None:
    values = weights(toy_chroma.small())["unet"]
    stored = dict(values) | {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for key, value in values.items():
        if value.ndim == 2 and "blocks" in key:
            scale = value.abs().max() / 448
            stored[key] = (value / scale).to(torch.float8_e4m3fn)
            stored[key.replace(".weight", ".scale_weight")] = scale
    loaded = load(files, ckpt=save(folder / "fp8_scaled.safetensors", stored)).unet.state_dict()
    for key, value in values.items():
        assert toy.relative_error(loaded[key], value.numpy()) < 0.04


def test_flash_is_told_by_its_name_and_the_metadata(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unet = save(folder / "Chroma1-HD-Flash.safetensors", weights(toy_chroma.small())["unet"])
    load(files, ckpt=unet)
    assert "its name says Flash, which weights cannot tell from HD and Base" in caplog.text
    caplog.clear()
    flash = load(files, ckpt=unet, metadata={"family": "chroma_flash"}).family
    assert (flash.steps, flash.scale, flash.sampler) == (8, 1.0, "heun")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_what_does_not_belong_to_it_is_refused(files: dict[str, Any], folder: Path, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="reads text with T5 XXL: name the file of T5 XXL with `text_encoder=FILE`"):
        load(files, text_encoder=())
    with pytest.raises(ValueError, match="has no CLIP"):
        pipe.txt2img("a", clip_skip=2)
    radiance = save(
        folder / "r.safetensors", {"distilled_guidance_layer.x": torch.ones(1), "nerf_blocks.0.a": torch.ones(1)}
    )
    with pytest.raises(ValueError, match="is Chroma1-Radiance"):
        load(files, ckpt=radiance)


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def spelled(key: str, style: str) -> str:
    """A key of PEFT's file as kohya or ComfyUI has it."""
    name = key.removeprefix("transformer.")
    if style == "comfyui":
        return f"diffusion_model.{name}"
    module, _, last = name.rpartition(".lora_")
    kohya = f"lora_unet_{module.replace('.', '_')}.lora_{'down' if last.startswith('A') else 'up'}.weight"
    return key if style == "diffusers" else kohya


@pytest.mark.parametrize("style", ["diffusers", "comfyui", "kohya"])
def test_a_lora_of_every_linear_layer(
    style: str, pipe: Pipeline, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers' output with PEFT's LoRA; alpha is twice the rank."""
    shapes = SHAPES["lora"].items()
    lora = {
        spelled(key, style): random_tensor(f"lora.{key.removeprefix('transformer.')}", tuple(shape))
        for key, shape in shapes
    }
    with pipe.lora(save(folder / f"{style}.safetensors", lora), 2.0):
        assert toy.relative_error(run(pipe.unet), GOLDEN["lora"]) < 1e-5
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model."])
def test_a_lora_of_the_originals_layers(prefix: str, pipe: Pipeline, folder: Path) -> None:
    """kohya's and the makers' own trainer change the fused layers of the blocks."""
    down, up = toy.normal(1, 3, 64), toy.normal(2, 192, 3)
    module = "double_blocks.1.txt_attn.qkv"
    name = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
    before = pipe.unet.get_parameter(f"{module}.weight").clone()
    path = save(folder / "fused.safetensors", {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
    with pipe.lora(path):
        assert torch.allclose(pipe.unet.get_parameter(f"{module}.weight"), before + up @ down, atol=1e-5)
