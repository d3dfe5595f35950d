"""Chroma, FLUX.2, Z-Image and Qwen-Image in miniature: what holds for each, by the originals, diffusers and PEFT."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import toy
import toy_chroma
import toy_flux2
import toy_qwen_image
import toy_z_image
from PIL import Image
from random_checkpoint import random_tensor
from runs import run_latents
from safetensors.torch import load_file
from toy_families import copied, load, pixels, run, spelled, warnings_in
from toy_flow import save, weights

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.models.chroma import CHROMA
from ldm_lite.models.flux import SingleStreamBlock
from ldm_lite.models.flux2 import KLEIN
from ldm_lite.models.ops import axial_rotation
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import Offloader
from ldm_lite.train import __main__ as train

TOYS = (toy_chroma, toy_flux2, toy_z_image)
of_three = pytest.mark.parametrize("toys", TOYS, indirect=True, ids=lambda toys: toys.GOLDEN)
of_each = pytest.mark.parametrize("toys", [*TOYS, toy_qwen_image], indirect=True, ids=lambda toys: toys.GOLDEN)
SIZE = {"height": 32, "width": 48, "steps": 2}

# ---- networks -------------------------------------------------------------------------------------------------------


@of_three
@pytest.mark.parametrize("name", ["original", "diffusers"])
def test_equals_the_original(name: str, toys: Any, pipe: Pipeline, golden: Any) -> None:
    """On texts of different lengths."""
    assert toy.relative_error(run(toys, pipe.unet), golden[name]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("toys", "spec"), [(toy_chroma, CHROMA), (toy_flux2, KLEIN)], indirect=["toys"])
def test_a_block_of_the_released_width_equals_diffusers(spec: Any, golden: Any) -> None:
    with torch.device("meta"):
        block = SingleStreamBlock(spec)
        block.modulation.lin = cast(Any, torch.nn.Flatten())  # (1, 3, D) -> (1, 3 D)
    toy.fill(block.to_empty(device="cpu"))
    places = torch.zeros(len(spec.axes), 12)  # of four tokens of text, then 2 x 4 of the image
    places[1:3, 4:] = torch.cartesian_prod(torch.arange(2), torch.arange(4)).T.float()
    if len(spec.axes) == 4:
        places[3, :4] = torch.arange(4)
    x, mods = toy.normal(1, 1, 12, spec.width), toy.normal(2, 1, 3, spec.width)
    out = block(x, mods, axial_rotation(places, spec.axes, spec.theta, torch.float32))
    assert toy.relative_error(out[..., ::48], golden["wide"]) < 1e-5


@of_each
def test_a_batch_of_texts_of_other_lengths_has_the_images_of_each_alone(toys: Any, pipe: Pipeline) -> None:
    texts = ["cat", "a red apple on a table " * 9]
    both = run_latents(pipe, texts, seed=[1, 2], **SIZE)
    for seed, (text, latents) in enumerate(zip(texts, both, strict=True), 1):
        alone = run_latents(pipe, [text], seed=[seed], **SIZE)
        assert toy.relative_error(latents, alone[0].double().numpy()) < 1e-4


@of_each
def test_half_precision_is_close(toys: Any, pipe: Pipeline) -> None:
    exact = run(toys, copied(pipe.unet, toys.SPEC), torch.float64)
    for dtype, limit in toys.HALF.items():
        assert toy.relative_error(run(toys, copied(pipe.unet, toys.SPEC), dtype).double(), exact.numpy()) < limit


@of_each
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_offloads_and_stores_in_8_bits(kind: str, toys: Any, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1)
    plain = run(toys, pipe.unet)
    for storage, limit in ((None, 1e-6), ("int8", 0.1), ("fp8", 0.2)):
        network = copied(pipe.unet, toys.SPEC)
        offloader = Offloader({"unet": network}, torch.device("cpu"), offload=kind, storage=storage)
        with offloader.phase("unet"):
            assert toy.relative_error(run(toys, network), plain.numpy()) < limit


# ---- text and whole runs --------------------------------------------------------------------------------------------


@of_each
def test_a_text_does_not_depend_on_its_batch(toys: Any, pipe: Pipeline) -> None:
    prompts = [*toys.PROMPTS, ""]
    together = pipe.encode_prompt(prompts)
    assert together.context is not None
    for i, prompt in enumerate(prompts):
        alone = pipe.encode_prompt(prompt)
        assert alone.context is not None
        count = alone.context.shape[1]
        if together.y is not None:
            assert alone.y is not None
            assert alone.y.tolist() == together.y[i : i + 1].tolist()
            count = int(alone.y)
        assert torch.allclose(alone.context[0, :count], together.context[i, :count], atol=1e-5)


@of_three
def test_long_texts_are_cut_with_a_warning(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    text = pipe.encode_prompt("one two " * 200 + "unreadable " * 1000)
    [line] = [record.getMessage() for record in caplog.records if "too long" in record.getMessage()]
    assert re.match(r"the prompt is too long, dropped: (one|two|unreadable) .*\.\.\. \([\d,]+ characters\)$", line)
    assert len(line) < 200
    assert text.context is not None
    assert text.context.shape[1] == 512
    assert text.y is None or text.y.tolist() == [[512]]


@of_each
def test_whole_runs_equal_those_of_diffusers(toys: Any, pipe: Pipeline, golden: Any) -> None:
    """From prompts of different lengths, and FLUX.2's references, to pixels."""
    for name, options in toys.RUNS.items():
        options = {"noise": toys.run_noise(), "height": 32, "width": 48, "sampler": "euler"} | options
        latents = run_latents(pipe, list(toys.PROMPTS), steps=toys.STEPS, **options)
        images = torch.stack(pipe.decode(latents, output="tensor"))
        assert toy.relative_error((images + 1) / 2, golden[f"run.{name}"]) < 1e-4, name


@of_each
@pytest.mark.thin(3)
def test_images_do_not_depend_on_their_batch(toys: Any, pipe: Pipeline) -> None:
    prompts = [*toys.PROMPTS, ""]
    for options in toys.BATCHES:
        together = pixels(pipe.txt2img(prompts, batch_size=3, **SIZE, **options))
        for i, prompt in enumerate(prompts):
            [alone] = pixels(pipe.txt2img(prompt, seed=42 + i, **SIZE, **options))
            assert np.abs(together[i] - alone).max() <= 2


@of_each
@pytest.mark.thin(3)
def test_img2img_and_inpainting(pipe: Pipeline, tmp_path: Path) -> None:
    image, hole = Image.fromarray(toy.photo(32, 48)), Image.new("L", (48, 32))
    hole.paste(255, (16, 8, 40, 24))
    image.save(tmp_path / "image.png")
    hole.save(tmp_path / "mask.png")
    painted = pixels(pipe.inpaint("a cat", tmp_path / "image.png", mask=tmp_path / "mask.png", steps=2, scale=1.0))
    outside = np.asarray(hole) == 0
    assert np.array_equal(painted[:, outside], pixels([image])[:, outside])
    assert not np.array_equal(painted, pixels([image]))
    changed = pixels(pipe.img2img("a cat", tmp_path / "image.png", strength=0.5, steps=4, scale=1.0))
    assert changed.shape == (1, 32, 48, 3)


# ---- files ----------------------------------------------------------------------------------------------------------


@of_three
def test_files_apart_and_all_in_one(
    toys: Any, files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipes = [load(files), ldm_lite.load(toys.write_whole(tmp_path), device="cpu")]
    assert warnings_in(caplog) == []
    for loaded in pipes:
        family = replace(toys.small(), title=loaded.family.title, resolution=loaded.family.resolution)
        assert loaded.family == family
        for role, values in weights(toys.small()).items():
            assert all(torch.equal(value, values[key]) for key, value in loaded.networks[role].state_dict().items())


@of_each
def test_a_missing_text_encoder_is_named(toys: Any, files: dict[str, Any]) -> None:
    name = toys.TEXT_ENCODER
    with pytest.raises(ValueError, match=f"reads text with {name}: name the file of {name} with `text_encoder=FILE`"):
        load(files, text_encoder=())


# ---- LoRA -----------------------------------------------------------------------------------------------------------


@of_each
@pytest.mark.parametrize("style", ["diffusers", "comfyui", "kohya"])
def test_a_lora_of_every_linear_layer(
    style: str, toys: Any, pipe: Pipeline, golden: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers' output with PEFT's LoRA; alpha is twice the rank, or half of it."""
    lora = {
        spelled(key, style): random_tensor(f"lora.{key.removeprefix('transformer.')}", tuple(shape))
        for key, shape in golden["shapes"]["lora"].items()
    }
    with pipe.lora(save(folder / f"{style}.safetensors", lora), 0.5 if toys is toy_qwen_image else 2.0):
        merged = copied(pipe.unet, toys.SPEC)
    assert toy.relative_error(run(toys, merged, torch.float64), golden["lora"]) < 1e-5  # in float64, as the golden
    assert warnings_in(caplog) == []


@of_three
@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model.", "base_model.model."])
def test_a_lora_of_the_originals_layers(prefix: str, toys: Any, pipe: Pipeline, folder: Path) -> None:
    """As kohya, musubi-tuner, ai-toolkit and ComfyUI name them; queries, keys and values are one layer."""
    for module in toys.FUSED:
        before = pipe.unet.get_parameter(f"{module}.weight").clone()
        down, up = toy.normal(1, 3, before.shape[1]), toy.normal(2, before.shape[0], 3)
        name = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
        names = ("down", "up") if prefix.endswith("_") else ("A", "B")
        keys = {f"{name}.lora_{end}.weight": value for end, value in zip(names, (down, up), strict=True)}
        with pipe.lora(save(folder / "fused.safetensors", keys)):
            assert torch.allclose(pipe.unet.get_parameter(f"{module}.weight"), before + up @ down, atol=1e-5)


@of_each
@pytest.mark.slow
def test_a_lora_is_trained(toys: Any, files: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, caption in (("a", "a cat"), ("b", "a red apple on a table under a tree")):
        Image.fromarray(toy.photo(64, 64)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(caption)
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--lora-rank", "2", "--steps", "2"]
    arguments += ["--batch-size", "2", "--data-workers", "0", "--samples", "a", "--lr", "0.01", "--checkpointing"]
    arguments += ["--resolution", "64"]
    arguments += ["--ckpt", str(files["ckpt"]), "--vae", files["vae"], "--text-encoder", files["text_encoder"]]
    assert train.main([*arguments, "--device", "cpu"]) == 0
    path = tmp_path / "out" / "lora.safetensors"
    assert f"lora_unet_{toys.FUSED[0].replace('.', '_')}.lora_down.weight" in load_file(path)
    plain, changed = (load(files, lora=lora).txt2img("a", **SIZE) for lora in ((), f"{path}:50"))
    assert not np.array_equal(pixels(plain), pixels(changed))
