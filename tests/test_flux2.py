"""FLUX.2 [klein] in miniature: networks and whole runs against the originals (the goldens), its files, references."""

import gzip
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import toy
import toy_chroma
import toy_flux2
from PIL import Image
from random_checkpoint import random_tensor
from runs import run_latents
from safetensors.torch import load_file
from toy_flow import save, under, weights

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.checkpoint.reader import on_meta, split
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import levels_of
from ldm_lite.features.references import MOST, fitted
from ldm_lite.models.flux import SingleStreamBlock
from ldm_lite.models.flux2 import KL_F16_128, KLEIN, Flux2, Flux2VAESpec
from ldm_lite.models.ops import axial_rotation
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.tiling import tiled
from ldm_lite.train import __main__ as train
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.family import build, infer_vae

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "flux2.npz")
SHAPES = json.loads(str(GOLDEN["shapes"]))
VAE_SHAPES = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))["vae_flux2"]
SIZE = {"height": 32, "width": 48, "steps": 2}


def load(files: Mapping[str, Any], **changes: Any) -> Pipeline:
    options = {**files, **changes}
    return ldm_lite.load(options.pop("ckpt"), **options)


def run(network: torch.nn.Module, dtype: torch.dtype = torch.float32, **references: Any) -> torch.Tensor:
    x, t, context = toy_flux2.inputs()
    return network.to(dtype)(x.to(dtype), t, context.to(dtype), **references)


def pixels(images: list[Image.Image]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(image, dtype=np.float64) for image in images])


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """diffusers' folder, with the goldens' weights."""
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    return ldm_lite.load(toy_flux2.write_diffusers(tmp_path_factory.mktemp("k") / "d", shapes), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Any]:
    """Files of their own, as ComfyUI has them: the arguments of load."""
    return toy_flux2.write(folder)


# ---- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["original", "diffusers"])
def test_equals_the_original_with_references_and_without(name: str, pipe: Pipeline) -> None:
    assert toy.relative_error(run(pipe.unet), GOLDEN[name]) < 1e-5
    both = run(pipe.unet, **toy_flux2.references())
    assert toy.relative_error(both, GOLDEN[f"{name}.references"]) < 1e-5


@pytest.mark.slow
def test_a_block_of_the_released_width_equals_diffusers() -> None:
    with torch.device("meta"):
        block = SingleStreamBlock(KLEIN)
        block.modulation.lin = cast(Any, torch.nn.Flatten())  # (1, 3, D) -> (1, 3 D)
    toy.fill(block.to_empty(device="cpu"))
    x, mods = toy.normal(1, 1, 12, KLEIN.width), toy.normal(2, 1, 3, KLEIN.width)
    places = torch.zeros(4, 12)
    places[3, :4] = torch.arange(4)
    places[1:3, 4:] = torch.cartesian_prod(torch.arange(2), torch.arange(4)).T.float()
    out = block(x, mods, axial_rotation(places, KLEIN.axes, KLEIN.theta, torch.float32))
    assert toy.relative_error(out[..., ::48], GOLDEN["wide"]) < 1e-5


def test_the_autoencoder_has_the_keys_and_shapes_of_the_original() -> None:
    """Its convolutions beside the latents stand inside encoder and decoder there."""
    shapes = {key: tuple(shape) for key, shape in VAE_SHAPES["shapes"].items()}
    [(role, part)] = split(Tensors(Path("ae.safetensors"), shapes, lambda key: torch.zeros(shapes[key]))).items()
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build(KL_F16_128).state_dict().items()}
    assert role == "vae"
    assert {key: shape for key, shape in part.shapes.items() if key != "bn.num_batches_tracked"} == ours
    assert infer_vae(part.shapes) == KL_F16_128
    assert isinstance(infer_vae(part.shapes), Flux2VAESpec)
    statistics = math.prod(shapes["bn.running_mean"]) + math.prod(shapes["bn.running_var"])
    assert sum(map(math.prod, ours.values())) == VAE_SHAPES["params"] + statistics


def test_the_autoencoder_equals_the_original(pipe: Pipeline) -> None:
    image = torch.from_numpy(toy.photo(32, 48)).permute(2, 0, 1)[None].float() / 127.5 - 1
    latents = toy.normal(1, 1, 16, 2, 3)
    for vae in (pipe.vae, tiled(pipe.vae)):
        assert toy.relative_error(vae.encode(image)[0], GOLDEN["encoded"]) < 1e-5
        assert toy.relative_error(vae.decode(latents), GOLDEN["decoded"]) < 1e-5


def test_the_text_equals_transformers_with_its_mask(pipe: Pipeline) -> None:
    """Padding, which the network reads, sees the text alone."""
    context = pipe.encode_prompt(list(toy_flux2.PROMPTS)).context
    assert context is not None
    assert context.shape == (2, 512, 96)
    assert toy.relative_error(context[:, ::16], GOLDEN["text"]) < 1e-5


def test_half_precision_is_close(pipe: Pipeline) -> None:
    network = Flux2(toy_flux2.SPEC)
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
        network = Flux2(toy_flux2.SPEC)
        network.load_state_dict(pipe.unet.state_dict())
        network.requires_grad_(False)
        offloader = Offloader({"unet": network}, torch.device("cpu"), offload=kind, storage=storage)
        with offloader.phase("unet"):
            assert toy.relative_error(run(network), own.numpy()) < limit


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "tokens", "wanted"),
    [  # of the original's get_schedule
        (4, 4096, [0.967384, 0.908144, 0.7672]),
        (50, 4096, [0.997309, 0.994521, 0.991632]),
        (3, 6, [0.933708, 0.778821, 0.0]),
        (4, 5000, [0.916951, 0.786342, 0.550924]),
    ],
)
def test_the_shift_depends_on_size_and_steps(steps: int, tokens: int, wanted: list[float]) -> None:
    schedule = FAMILIES["flux2_klein"].noise.schedule("flow").sized(tokens)  # type: ignore[attr-defined]
    levels = levels_of("flow_flux2", schedule, steps)
    assert [level.s for level in levels[1:4]] == pytest.approx(wanted, abs=1e-6)
    assert (levels[0].s, levels[-1].s) == (1, 0)


@pytest.mark.parametrize(
    ("name", "scale"), [("plain", 1.0), ("guided", toy_flux2.GUIDANCE), ("edited", toy_flux2.GUIDANCE)]
)
def test_a_whole_run_equals_diffusers_pipeline(name: str, scale: float, pipe: Pipeline) -> None:
    """From prompts, and two references of different sizes, to pixels."""
    given: dict[str, Any] = {"noise": toy.normal(1, 2, 16, 2, 3), "height": 32, "width": 48}
    given |= {"reference": toy_flux2.pictures()} if name == "edited" else {}
    prompts = list(toy_flux2.PROMPTS)
    latents = run_latents(pipe, prompts, steps=toy_flux2.STEPS, sampler="euler", scale=scale, **given)
    made = torch.stack(pipe.decode(latents, output="tensor"))
    assert toy.relative_error((made + 1) / 2, GOLDEN[f"run.{name}"]) < 1e-4


@pytest.mark.slow
def test_references_on_the_command_line(files: dict[str, Any], tmp_path: Path) -> None:
    """The first one's size is the result's; both change it, and their order does."""
    paths = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path, picture in zip(paths, toy_flux2.pictures(), strict=True):
        picture.save(path)
    flags = ["--ckpt", str(files["ckpt"]), "--text-encoder", files["text_encoder"], "--vae", files["vae"]]
    flags += ["--device", "cpu", "--steps", "1", "--out", str(tmp_path / "out.png")]
    assert txt2img.main(["a cat", "--reference", paths[0], "--reference", paths[1], *flags]) == 0
    made = Image.open(tmp_path / "out.png")
    assert made.size == (80, 64)
    pipe = load(files)
    same = pipe.txt2img("a cat", reference=toy_flux2.pictures(), steps=1)
    assert np.array_equal(pixels(same), pixels([made]))
    size = {"width": 80, "height": 64, "steps": 1}
    others = [(), toy_flux2.pictures()[:1], toy_flux2.pictures()[::-1]]
    for reference in others:
        assert not np.array_equal(pixels(pipe.txt2img("a cat", reference=reference, **size)), pixels(same))


def test_references_are_reduced_and_cut() -> None:
    assert fitted(Image.new("RGB", (90, 47)), 16).size == (80, 32)
    large = fitted(Image.new("RGB", (3000, 1500)), 16)
    assert large.size == (1440, 720)
    assert large.width * large.height <= MOST
    with pytest.raises(ValueError, match="got a reference of 90 x 9 pixels, wanted 16 or more a side"):
        fitted(Image.new("RGB", (90, 9)), 16)


def test_img2img_and_inpainting_read_references_too(pipe: Pipeline, tmp_path: Path) -> None:
    image = Image.fromarray(toy.photo(32, 48))
    image.save(tmp_path / "image.png")
    hole = Image.new("L", (48, 32))
    hole.paste(255, (16, 8, 40, 24))
    hole.save(tmp_path / "mask.png")
    options = {"steps": 2, "scale": 1.0}
    made = pixels(pipe.inpaint("a cat", tmp_path / "image.png", mask=tmp_path / "mask.png", **options))
    outside = np.asarray(hole) == 0
    assert np.array_equal(made[:, outside], pixels([image])[:, outside])
    plain, changed = (
        pixels(pipe.img2img("a cat", tmp_path / "image.png", strength=0.5, reference=reference, **options))
        for reference in ((), toy_flux2.pictures())
    )
    assert plain.shape == (1, 32, 48, 3)
    assert not np.array_equal(plain, changed)


@pytest.mark.slow
def test_images_do_not_depend_on_their_batch(pipe: Pipeline) -> None:
    prompts = [*toy_flux2.PROMPTS, ""]
    both = pixels(pipe.txt2img(prompts, batch_size=3, reference=toy_flux2.pictures(), **SIZE))
    for i, prompt in enumerate(prompts):
        alone = pixels(pipe.txt2img(prompt, seed=42 + i, reference=toy_flux2.pictures(), **SIZE))
        assert np.abs(both[i] - alone[0]).max() <= 2


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_apart_and_all_in_one(files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = weights(toy_flux2.small())
    renamed = {key.replace(".scale", ".weight"): value for key, value in parts["unet"].items()}
    whole = under("model.diffusion_model.", renamed) | under("vae.", toy_flux2.original_vae(parts["vae"]))
    whole |= under("text_encoders.qwen3_4b.transformer.model.", parts["text_encoder"])
    pipes = [load(files), ldm_lite.load(save(folder / "whole.safetensors", whole), device="cpu")]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    for loaded in pipes:
        assert (loaded.family.conditioner, loaded.family.steps, loaded.family.scale) == ("flux2", 4, 1.0)
        for role, values in parts.items():
            assert all(torch.equal(value, values[key]) for key, value in loaded.networks[role].state_dict().items())


def test_scaled_fp8_of_comfyui(files: dict[str, Any], folder: Path) -> None:
    values = weights(toy_flux2.small())["unet"]
    stored = dict(values)
    for key, value in values.items():
        if value.ndim == 2 and "blocks" in key:
            scale = value.abs().max() / 448
            stored[key] = (value / scale).to(torch.float8_e4m3fn)
            stored[key + "_scale"] = scale
            about = json.dumps({"format": "float8_e4m3fn"}).encode()
            stored[key.replace(".weight", ".comfy_quant")] = torch.tensor(list(about), dtype=torch.uint8)
    loaded = load(files, ckpt=save(folder / "fp8_scaled.safetensors", stored)).unet.state_dict()
    for key, value in values.items():
        assert toy.relative_error(loaded[key], value.numpy()) < 0.04


def test_the_base_is_told_by_the_folder_a_name_and_the_metadata(
    pipe: Pipeline, files: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (pipe.family.steps, pipe.family.scale) == (50, 4.0)
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    distilled = ldm_lite.load(toy_flux2.write_diffusers(tmp_path / "d", shapes, is_distilled=True), device="cpu")
    assert (distilled.family.steps, distilled.family.scale) == (4, 1.0)
    caplog.clear()
    unet = save(folder / "flux-2-klein-base-4b.safetensors", weights(toy_flux2.small())["unet"])
    load(files, ckpt=unet)
    assert "if it is, add `metadata=family=flux2_klein_base`" in caplog.text
    assert load(files, ckpt=unet, metadata={"family": "flux2_klein_base"}).family.steps == 50


def test_what_does_not_fit_is_named(files: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    few = toy.network(toy_flux2.replace(toy_flux2.QWEN3, layers=20, states=(-2,))).state_dict()
    plain = tmp_path / "tokenizer.json"
    toy_flux2.toy_z_image.tokenizer().save(str(plain))
    for changes, message in (
        ({"text_encoder": str(save(folder / "few.safetensors", few))}, "has 20 layers, wanted more than 27"),
        ({"tokenizer": str(plain)}, "lacks <think>: wanted Qwen3's tokenizer.json"),
        ({"text_encoder": ()}, "reads text with Qwen3 4B: name the file of Qwen3 4B with `text_encoder=FILE`"),
    ):
        with pytest.raises(ValueError, match=message):
            load(files, **changes)


def test_other_families_read_no_references(small_path: Path) -> None:
    with pytest.raises(ValueError, match="reads no reference images: leave out `reference`"):
        ldm_lite.load(small_path, device="cpu").txt2img("a", reference=toy_flux2.pictures())


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
    lora = {
        spelled(key, style): random_tensor(f"lora.{key.removeprefix('transformer.')}", tuple(shape))
        for key, shape in SHAPES["lora"].items()
    }
    with pipe.lora(save(folder / f"{style}.safetensors", lora), 2.0):
        assert toy.relative_error(run(pipe.unet), GOLDEN["lora"]) < 1e-5
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model.", "base_model.model."])
@pytest.mark.parametrize(
    "module", ["double_blocks.1.txt_attn.qkv", "single_blocks.0.linear1", "double_blocks.0.img_mlp.0"]
)
def test_a_lora_of_the_originals_layers(prefix: str, module: str, pipe: Pipeline, folder: Path) -> None:
    """As kohya, musubi-tuner, ai-toolkit and ComfyUI name them."""
    before = pipe.unet.get_parameter(f"{module}.weight").clone()
    down, up = toy.normal(1, 3, before.shape[1]), toy.normal(2, before.shape[0], 3)
    name = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
    path = save(folder / "fused.safetensors", {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
    with pipe.lora(path):
        assert torch.allclose(pipe.unet.get_parameter(f"{module}.weight"), before + up @ down, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("toy_family", [toy_chroma, toy_flux2])
def test_a_lora_is_trained(toy_family: Any, tmp_path: Path) -> None:
    files = toy_family.write(tmp_path)
    (tmp_path / "data").mkdir()
    for name, caption in (("a", "a cat"), ("b", "a red apple on a table under a tree")):
        Image.fromarray(toy.photo(64, 64)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(caption)
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--lora-rank", "2", "--steps", "2"]
    arguments += ["--batch-size", "2", "--data-workers", "0", "--samples", "a", "--lr", "0.01", "--checkpointing"]
    arguments += ["--ckpt", str(files["ckpt"]), "--vae", files["vae"], "--text-encoder", files["text_encoder"]]
    assert train.main([*arguments, "--device", "cpu"]) == 0
    path = tmp_path / "out" / "lora.safetensors"
    assert "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight" in load_file(path)
    plain, changed = (load(files, lora=lora).txt2img("a", **SIZE) for lora in ((), f"{path}:50"))
    assert not np.array_equal(pixels(plain), pixels(changed))
