"""Z-Image in miniature: its networks and whole runs against the originals' (the goldens), its files, and every task."""

import copy
import gzip
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_flow
import toy_z_image
from PIL import Image
from random_checkpoint import random_tensor
from released import TRANSFORMERS
from runs import run_latents
from safetensors.torch import load_file
from torch import Tensor
from toy_flow import save, under, weights

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.core.denoise import Branch, join, weighted
from ldm_lite.core.plan import rows_of
from ldm_lite.diffusion.names import make_plan
from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.models.qwen3 import QWEN3_4B, Qwen3, Qwen3Spec
from ldm_lite.models.z_image import ZImage, ZImageSpec
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.together import Together
from ldm_lite.tasks.joined import _joined
from ldm_lite.train import __main__ as train
from ldm_lite.train.losses import checkpoint_activations
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.family import build

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "z_image.npz")
SHAPES = json.loads(str(GOLDEN["shapes"]))
MANIFEST = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))["transformer_z_image"]
SPEC, QWEN3 = toy_z_image.SPEC, toy_z_image.QWEN3


def of_original(network: str) -> dict[str, Tensor]:
    """The weights that a golden was made with, under the original's keys."""
    return {key: random_tensor(f"{network}.{key}", tuple(shape)) for key, shape in SHAPES[network].items()}


def load(files: Mapping[str, Any], **changes: Any) -> Pipeline:
    options = {**files, **changes}
    return ldm_lite.load(options.pop("ckpt"), **options)


def run(network: torch.nn.Module, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    x, t, context, y = toy_z_image.inputs()
    return network.to(dtype)(x.to(dtype), t, context.to(dtype), y, **more)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """diffusers' folder, with the goldens' weights."""
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    return ldm_lite.load(toy_z_image.write_diffusers(tmp_path_factory.mktemp("z") / "d", shapes), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Any]:
    """ComfyUI's files: the arguments of load."""
    return toy_z_image.write(folder)


# ---- networks -------------------------------------------------------------------------------------------------------


def test_keys_shapes_and_parameters_are_those_of_the_original() -> None:
    """Each of the original's keys is read once; queries, keys and values become one weight, as in ComfyUI's files."""
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build(TRANSFORMERS["z_image"]).state_dict().items()}
    stored = original_layout({key: tuple(shape) for key, shape in MANIFEST["shapes"].items()}, open_clip=None)
    assert stored is not None
    assert {key: tensor.shape for key, tensor in stored.items()} == ours
    assert sorted(key for tensor in stored.values() for key in tensor.keys) == sorted(MANIFEST["shapes"])
    assert sum(math.prod(shape) for shape in ours.values()) == MANIFEST["params"] == 6_154_908_736
    assert ZImageSpec.from_shapes(ours) == TRANSFORMERS["z_image"]


def test_qwen3_has_the_released_size() -> None:
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build(QWEN3_4B).state_dict().items()}
    assert sum(math.prod(shape) for shape in ours.values()) == 4_022_468_096
    assert len(ours) == 398
    assert Qwen3Spec.from_shapes(ours) == QWEN3_4B


@pytest.mark.parametrize("name", ["original", "diffusers"])
def test_equals_the_original_on_captions_of_different_lengths(name: str, pipe: Pipeline) -> None:
    assert toy.relative_error(run(pipe.unet), GOLDEN[name]) < 1e-5


def test_half_precision_is_close_and_finite(pipe: Pipeline) -> None:
    network = ZImage(SPEC)
    network.load_state_dict(pipe.unet.state_dict())
    network.requires_grad_(False)
    exact = run(network, torch.float64)
    for dtype, limit in ((torch.bfloat16, 0.05), (torch.float16, 0.006)):
        assert toy.relative_error(run(copy.deepcopy(network), dtype).double(), exact.numpy()) < limit
    for key, value in network.named_parameters():
        if key.endswith(("w1.weight", "w3.weight")):
            value.data.mul_(3000)
    assert run(network, torch.float16).isfinite().all()


def test_qwen3_equals_transformers_whatever_the_padding(pipe: Pipeline) -> None:
    ids, mask = toy_z_image.token_ids()
    out = pipe.text_encoder(ids) * mask[:, :, None]  # type: ignore[misc]
    assert toy.relative_error(out, GOLDEN["qwen3"]) < 1e-5
    alone = pipe.text_encoder(ids[:1, :7])  # type: ignore[misc]
    assert toy.relative_error(alone[0], out[1, :7].numpy()) < 3e-6


def test_captions_of_one_length_need_no_mask(pipe: Pipeline) -> None:
    """So that every attention kernel can be chosen; the result is the same."""
    network, (x, t, context, _) = pipe.unet, toy_z_image.inputs()
    y = torch.tensor([[40], [33]])
    own = network(x, t, context, y)
    for attention in ("vanilla", "sliced:3", "math", "sdpa"):
        pipe.use_attention(attention)
        with pipe.attention_maps() as maps:
            assert toy.relative_error(network(x, t, context, y, full=torch.ones(2)), own.numpy()) < 1e-5
        assert {tuple(each[0].shape[2:]) for key, each in maps.items() if key.startswith("layers")} == {(96, 96)}
        assert len(maps) == SPEC.depth + 2 * SPEC.refiner_depth


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_offloads_and_stores_in_8_bits(kind: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1)
    ids, _ = toy_z_image.token_ids()
    own, text = run(pipe.unet), pipe.text_encoder(ids)  # type: ignore[misc]
    for storage, limit in ((None, 1e-6), ("int8", 0.1), ("fp8", 0.2)):
        networks = {"unet": ZImage(SPEC), "text_encoder": Qwen3(QWEN3)}
        for role, network in networks.items():
            network.load_state_dict(pipe.networks[role].state_dict())
            network.requires_grad_(False)
        offloader = Offloader(networks, torch.device("cpu"), offload=kind, storage=storage)
        with offloader.phase("unet"):
            assert toy.relative_error(run(networks["unet"]), own.numpy()) < limit
        with offloader.phase("text_encoder"):
            assert toy.relative_error(networks["text_encoder"](ids), text.numpy()) < limit


@pytest.mark.slow
def test_recomputed_activations_give_the_same_gradients(pipe: Pipeline) -> None:
    found = []
    for recompute in (False, True):
        network = ZImage(SPEC)
        network.load_state_dict(pipe.unet.state_dict())
        if recompute:
            checkpoint_activations(network)
        run(network).square().mean().backward()
        found.append(network.layers[0].attention.qkv.weight.grad)
    assert torch.allclose(found[0], found[1])
    assert found[0].abs().max() > 0


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", [False, True])
def test_tokens_are_those_of_transformers_with_the_chat_template(
    older: bool, files: dict[str, Any], tmp_path: Path
) -> None:
    path = (toy_z_image.write_vocabulary if older else toy_z_image.write_tokenizer)(tmp_path)
    tokenizer = load(files, tokenizer=str(path)).tokenizer
    ours = [each for text in (*toy_z_image.PROMPTS, *toy_z_image.TEXTS) for each in (*tokenizer.encode(text), -1)]
    assert ours == GOLDEN["ids"].astype(int).tolist()


def test_what_does_not_fit_is_named(files: dict[str, Any]) -> None:
    tokenizer = load(files).tokenizer
    template = len(tokenizer.encode(""))
    assert tokenizer.dropped("x" * 400) == ""
    text = "x y" * 170  # 3 tokens each
    assert len(tokenizer.encode(text)) == template + 510
    before = len(tokenizer.encode("")) - len(
        tokenizer.encode("")[tokenizer.encode("").index(tokenizer.encode("")[-1]) :]
    )
    assert before > 0
    assert text.endswith(tokenizer.dropped(text))
    assert tokenizer([text]).shape == (1, 512)


def test_a_caption_does_not_depend_on_its_batch(pipe: Pipeline) -> None:
    prompts = [*toy_z_image.PROMPTS, ""]
    together = pipe.encode_prompt(prompts)
    assert together.context is not None
    assert together.y is not None
    assert together.context.shape == (3, 96, 32)
    for i, prompt in enumerate(prompts):
        alone = pipe.encode_prompt(prompt)
        assert alone.context is not None
        assert alone.y is not None
        assert alone.y.tolist() == together.y[i : i + 1].tolist()
        count = int(alone.y)
        assert torch.allclose(alone.context[0, :count], together.context[i, :count], atol=1e-6)


def test_long_captions_are_cut_with_a_warning(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = pipe.encode_prompt("one two " * 200)
    assert "prompt is too long, dropped from it:" in caplog.text
    assert found.context is not None
    assert found.context.shape[1] == 512
    assert found.y is not None
    assert found.y.tolist() == [[512]]


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scale"), [pytest.param("plain", 1.0, marks=pytest.mark.slow), ("guided", 1 + toy_z_image.GUIDANCE)]
)
def test_a_whole_run_equals_diffusers_pipeline(name: str, scale: float, pipe: Pipeline) -> None:
    """From prompts to pixels; its guidance scale is 1 less than the usual one."""
    given = {"negative_prompt": toy_z_image.NEGATIVE, "noise": toy.normal(1, 2, 4, 4, 6), "height": 32, "width": 48}
    latents = run_latents(pipe, toy_z_image.PROMPTS, steps=toy_z_image.STEPS, sampler="euler", scale=scale, **given)
    pixels = torch.stack(pipe.decode(latents, output="tensor"))
    assert toy.relative_error((pixels + 1) / 2, GOLDEN[f"run.{name}"]) < 1e-4


def pixels(images: list[Image.Image]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(image, dtype=np.float64) for image in images])


@pytest.mark.slow
def test_the_command_makes_the_image_of_the_function(files: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    flags = ["--ckpt", str(files["ckpt"]), "--text-encoder", files["text_encoder"], "--vae", files["vae"]]
    size = ["--H", "48", "--W", "80", "--steps", "2", "--device", "cpu", "--out", str(out)]
    assert txt2img.main(["a cat", *flags, *size]) == 0
    ours = load(files).txt2img("a cat", height=48, width=80, steps=2)
    assert np.array_equal(pixels(ours), pixels([Image.open(out)]))


@pytest.mark.slow
def test_images_do_not_depend_on_their_batch(pipe: Pipeline) -> None:
    """Captions of different lengths, with guidance and without."""
    prompts = [*toy_z_image.PROMPTS, ""]
    for scale in (1.0, 4.0):
        size = {"height": 48, "width": 80, "steps": 2, "scale": scale}
        both = pixels(pipe.txt2img(prompts, batch_size=3, **size))
        for i, prompt in enumerate(prompts):
            alone = pixels(pipe.txt2img(prompt, seed=42 + i, **size))
            assert np.abs(both[i] - alone[0]).max() <= 2


@pytest.mark.slow
def test_negative_prompts_count_if_there_is_guidance(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    """Without, one warning says that they do not; an empty one is none."""
    size = {"height": 32, "width": 32, "steps": 2}
    plain = pixels(pipe.txt2img("a", negative_prompt="", **size))
    assert "negative" not in caplog.text
    assert np.array_equal(plain, pixels(pipe.txt2img("a", negative_prompt="apple", **size)))
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        "a guidance scale of 1 (Z-Image Turbo's own) uses no negative prompt: leave it out, or take a larger `scale`"
    ]
    guided = [pixels(pipe.txt2img("a", negative_prompt=each, scale=5.0, **size)) for each in (None, "", "apple")]
    assert np.array_equal(guided[0], guided[1])
    assert np.abs(guided[0] - guided[2]).max() > 2


@pytest.mark.slow
def test_img2img_and_inpainting(pipe: Pipeline, tmp_path: Path) -> None:
    image = Image.fromarray(toy.photo(32, 48))
    image.save(tmp_path / "image.png")
    hole = Image.new("L", (48, 32))
    hole.paste(255, (16, 8, 40, 24))
    hole.save(tmp_path / "mask.png")
    made = pixels(pipe.inpaint("a cat", tmp_path / "image.png", mask=tmp_path / "mask.png", steps=2))
    kept = pixels([image])
    outside = np.asarray(hole) == 0
    assert np.array_equal(made[:, outside], kept[:, outside])
    assert not np.array_equal(made, kept)
    again = pixels(pipe.img2img("a cat", tmp_path / "image.png", strength=0.5, steps=4))
    assert again.shape == (1, 32, 48, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a (cat)", "prompt_syntax": "a1111"}, "no weights: got 'cat' with the weight 1.1"),
        ({"clip_skip": 2}, "has no CLIP"),
        ({"height": 40}, "multiples of 16"),
        ({"sampler": "plms"}, "PLMS is not defined for rectified flow"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.txt2img(**{"prompt": "a", **options})


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_either_layout_loads_with_any_prefix(
    prefix: str, pipe: Pipeline, files: dict[str, Any], tmp_path: Path
) -> None:
    separate = save(tmp_path / "s.safetensors", under(prefix, of_original("transformer")))
    fused = save(
        tmp_path / "f.safetensors", under(prefix, {**pipe.unet.state_dict(), "norm_final.weight": torch.ones(64)})
    )
    for path in (separate, fused):
        loaded = load(files, ckpt=path)
        assert loaded.family.unet == SPEC
        for key, value in pipe.unet.state_dict().items():
            assert torch.equal(loaded.unet.state_dict()[key], value), key


def test_all_in_one_and_apart(files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = weights(toy_z_image.small())
    (folder / "whole").mkdir()
    path = toy_z_image.write_whole(folder / "whole")
    with caplog.at_level(logging.WARNING):
        pipes = [ldm_lite.load(path, device="cpu"), load(files)]
    assert not caplog.records
    for loaded in pipes:
        assert loaded.family == replace(toy_z_image.small(), title=loaded.family.title)
        for role, values in parts.items():
            assert all(torch.equal(value, values[key]) for key, value in loaded.networks[role].state_dict().items())


def test_the_folder_of_diffusers_tells_turbo_from_not(tmp_path: Path, pipe: Pipeline) -> None:
    assert (pipe.family.steps, pipe.family.scale, pipe.schedule.shift) == (8, 1.0, 3.0)  # type: ignore[attr-defined]
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    base = ldm_lite.load(toy_z_image.write_diffusers(tmp_path / "d", shapes, shift=6.0), device="cpu")
    assert (base.family.steps, base.family.scale, base.schedule.shift) == (50, 5.0, 6.0)  # type: ignore[attr-defined]


def test_what_only_a_name_tells_is_a_warning(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unet = save(folder / "z_image_bf16.safetensors", weights(toy_z_image.small())["unet"])
    load(files, ckpt=unet)
    assert "else add `metadata=family=z_image`" in caplog.text
    caplog.clear()
    assert load(files, ckpt=unet, metadata={"family": "z_image"}).family.steps == 50
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.slow
def test_what_is_missing_or_does_not_fit_is_named(files: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    t5 = save(tmp_path / "t5.safetensors", toy.network(toy_flow.T5).state_dict())
    vae = replace(toy_flow.VAE, z_channels=8, embed_dim=8)
    wrong = save(tmp_path / "vae.safetensors", toy.network(vae).state_dict())
    alone = tmp_path / "alone"
    alone.mkdir()
    qwen = save(alone / "qwen.safetensors", weights(toy_z_image.small())["text_encoder"])
    wide = save(tmp_path / "wide.safetensors", toy.network(replace(QWEN3, width=48)).state_dict())
    few = save(folder / "few.safetensors", toy.network(replace(QWEN3, vocab_size=200)).state_dict())
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    for change, message in (
        ({"text_encoder": ()}, "reads text with Qwen3 4B: name the file of Qwen3 4B with `text_encoder=FILE`"),
        ({"text_encoder": str(t5)}, r"t5.safetensors: is T5 XXL, but .* reads text with Qwen3 4B"),
        ({"text_encoder": str(wide), "tokenizer": str(folder)}, "Qwen3's output is 48 wide, wanted 32"),
        ({"text_encoder": str(few)}, "tokenizer.json: has 268 tokens, but .* only 200"),
        ({"vae": None}, "without its autoencoder: name its file with `vae=FILE`"),
        ({"vae": str(wrong)}, "latents have 4 channels, but those of the autoencoder 8"),
        ({"text_encoder": str(qwen)}, "no tokenizer.json of Qwen3, nor vocab.json .* name one with `tokenizer=FILE`"),
        ({"tokenizer": str(alone)}, "no tokenizer.json of Qwen3, .* in .*alone"),
        ({"tokenizer": str(other)}, "is not a tokenizer of Qwen3"),
    ):
        with pytest.raises(ValueError, match=message):
            load(files, **change)
    loaded = load(files, text_encoder=str(qwen), tokenizer=str(folder))
    assert loaded.encode_prompt("a cat").context.shape == (1, 32, 32)


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def spelled(key: str, style: str) -> str:
    """A key of PEFT's file as kohya or ComfyUI has it."""
    if style == "diffusers":
        return key
    key = key.removeprefix("transformer.")
    if style == "comfyui":
        return f"diffusion_model.{key}"
    module, _, last = key.rpartition(".lora_")
    return f"lora_unet_{module.replace('.', '_')}.lora_{'down' if last.startswith('A') else 'up'}.weight"


@pytest.mark.parametrize("style", ["diffusers", "comfyui", "kohya"])
def test_a_lora_in_the_formats_of_others(
    style: str, files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers' output with PEFT's LoRA on every linear; alpha is twice the rank."""
    unet = save(folder / "original_turbo.safetensors", of_original("transformer"))
    tensors = {
        key: random_tensor(f"lora.{key.removeprefix('transformer.')}", tuple(shape))
        for key, shape in SHAPES["lora"].items()
    }
    lora = {spelled(key, style): value for key, value in tensors.items()}
    path = save(folder / f"lora_{style}.safetensors", lora)
    changed = load(files, ckpt=unet, lora=f"{path}:2")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert toy.relative_error(run(changed.unet), GOLDEN["lora"]) < 1e-5


def test_a_fused_lora_changes_queries_keys_and_values(files: dict[str, Any], folder: Path) -> None:
    down, up = toy.normal(1, 3, 64), toy.normal(2, 192, 3)
    before = load(files).unet.layers[1].attention.qkv.weight
    for name in ("diffusion_model.layers.1.attention.qkv", "lora_unet_layers_1_attention_qkv"):
        keys = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        path = save(folder / "fused.safetensors", keys)
        after = load(files, lora=str(path)).unet.layers[1].attention.qkv.weight
        assert torch.allclose(after, before + up @ down, atol=1e-5)


@pytest.mark.slow
def test_a_lora_is_trained(files: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, caption in (("a", "a cat"), ("b", "a red apple on a table under a tree")):
        Image.fromarray(toy.photo(64, 64)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(caption)
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--lora-rank", "2", "--steps", "2"]
    arguments += ["--batch-size", "2", "--data-workers", "0", "--samples", "a", "--lr", "0.01", "--checkpointing"]
    arguments += ["--ckpt", str(files["ckpt"]), "--vae", files["vae"], "--text-encoder", files["text_encoder"]]
    assert train.main([*arguments, "--device", "cpu"]) == 0
    path = tmp_path / "out" / "lora.safetensors"
    assert "lora_unet_layers_0_attention_qkv.lora_down.weight" in load_file(path)
    size = {"height": 32, "width": 32, "steps": 1}
    plain, changed = (load(files, lora=lora).txt2img("a", **size) for lora in ((), f"{path}:50"))
    assert not np.array_equal(pixels(plain), pixels(changed))


def test_requests_that_are_joined_keep_all_inputs() -> None:
    """Each image's own, in one batch and where a step runs image by image."""
    texts = [{"context": torch.ones(1, 32, 8), "y": torch.ones(1, 1), "full": torch.full((1,), i)} for i in range(2)]
    both, seen = _joined([Branch(text) for text in texts]), []

    def network(x: Tensor, t: Tensor, context: Tensor, y: Tensor, full: Tensor) -> Tensor:
        seen.append(full.tolist())
        return x

    [row] = rows_of(make_plan("euler", FAMILIES["z_image"].noise.schedule("reverse_flow"), 1), torch.device("cpu"))
    zeros = torch.zeros(2, 4, 2, 2)
    guided = join([both], 1.0, torch.device("cpu"))
    registers = zeros.expand(len(row.mix), -1, -1, -1, -1)
    Together(torch.nn.Sequential())(network, registers, row, zeros, guided, weighted, ())
    assert seen == [[0, 1], [0], [1]]
