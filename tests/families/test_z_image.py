"""Z-Image in miniature: what it alone has, beside test_shared.py: Qwen3, its tokenizer, and the layouts of files."""

import gzip
import json
import math
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
from torch import Tensor
from toy_families import copied, load, pixels, run, warnings_in
from toy_flow import save, under, weights

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.core.denoise import Branch, join, weighted
from ldm_lite.core.plan import device_rows
from ldm_lite.diffusion.names import named_plan
from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.models.qwen3 import QWEN3_4B, Qwen3Spec
from ldm_lite.models.z_image import ZImageSpec
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.together import Together
from ldm_lite.tasks.joined import _joined
from ldm_lite.train.losses import checkpoint_activations
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

TOYS = toy_z_image
MANIFESTS = Path(__file__).parents[1] / "data" / "manifests.json.gz"
MANIFEST = json.loads(gzip.decompress(MANIFESTS.read_bytes()))["transformer_z_image"]
SPEC, QWEN3 = toy_z_image.SPEC, toy_z_image.QWEN3


@pytest.fixture(scope="module")
def original(golden: Any) -> dict[str, Tensor]:
    """The transformer's weights that the goldens were made with, under the original's keys."""
    shapes = golden["shapes"]["transformer"]
    return {key: random_tensor(f"transformer.{key}", tuple(shape)) for key, shape in shapes.items()}


# ---- networks -------------------------------------------------------------------------------------------------------


def test_keys_shapes_and_parameters_are_those_of_the_original() -> None:
    """Each of the original's keys is read once; queries, keys and values become one weight, as in ComfyUI's files."""
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build_network(TRANSFORMERS["z_image"]).state_dict().items()}
    stored = original_layout({key: tuple(shape) for key, shape in MANIFEST["shapes"].items()}, open_clip=None)
    assert stored is not None
    assert {key: tensor.shape for key, tensor in stored.items()} == ours
    assert sorted(key for tensor in stored.values() for key in tensor.keys) == sorted(MANIFEST["shapes"])
    assert sum(math.prod(shape) for shape in ours.values()) == MANIFEST["params"] == 6_154_908_736
    assert ZImageSpec.from_shapes(ours) == TRANSFORMERS["z_image"]


def test_qwen3_has_the_released_size() -> None:
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build_network(QWEN3_4B).state_dict().items()}
    assert sum(math.prod(shape) for shape in ours.values()) == 4_022_468_096
    assert len(ours) == 398
    assert Qwen3Spec.from_shapes(ours) == QWEN3_4B


def test_large_activations_are_finite_in_half_precision(pipe: Pipeline) -> None:
    network = copied(pipe.unet, SPEC)
    for key, value in network.named_parameters():
        if key.endswith(("w1.weight", "w3.weight")):
            value.data.mul_(3000)
    assert run(toy_z_image, network, torch.float16).isfinite().all()


def test_qwen3_equals_transformers_whatever_the_padding(pipe: Pipeline, golden: Any) -> None:
    ids, mask = toy_z_image.token_ids()
    out = pipe.text_encoder(ids) * mask[:, :, None]  # type: ignore[misc]
    assert toy.relative_error(out, golden["qwen3"]) < 1e-5
    alone = pipe.text_encoder(ids[:1, :7])  # type: ignore[misc]
    assert toy.relative_error(alone[0], out[1, :7].numpy()) < 3e-6


def test_captions_of_one_length_need_no_mask(pipe: Pipeline) -> None:
    """So that every attention kernel can be chosen; the result is the same."""
    network, (x, t, context, _) = pipe.unet, toy_z_image.inputs()
    y = torch.tensor([[40], [33]])
    expected = network(x, t, context, y)
    for attention in ("vanilla", "sliced:3", "math", "sdpa"):
        pipe.use_attention(attention)
        with pipe.attention_maps() as maps:
            assert toy.relative_error(network(x, t, context, y, full=torch.ones(2)), expected.numpy()) < 1e-5
        assert {tuple(value[0].shape[2:]) for key, value in maps.items() if key.startswith("layers")} == {(96, 96)}
        assert len(maps) == SPEC.depth + 2 * SPEC.refiner_depth


@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_qwen3_offloads_and_is_stored_in_8_bits(kind: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1)
    ids, _ = toy_z_image.token_ids()
    text = pipe.text_encoder(ids)  # type: ignore[misc]
    for storage, limit in ((None, 1e-6), ("int8", 0.1), ("fp8", 0.2)):
        network = copied(pipe.networks["text_encoder"], QWEN3)
        offloader = Offloader({"text_encoder": network}, torch.device("cpu"), offload=kind, storage=storage)
        with offloader.phase("text_encoder"):
            assert toy.relative_error(network(ids), text.numpy()) < limit


def test_recomputed_activations_give_the_same_gradients(pipe: Pipeline) -> None:
    gradients = []
    for recompute in (False, True):
        network = copied(pipe.unet, SPEC).requires_grad_(True)
        if recompute:
            checkpoint_activations(network)
        run(toy_z_image, network).square().mean().backward()
        gradients.append(network.layers[0].attention.qkv.weight.grad)
    assert torch.allclose(gradients[0], gradients[1])
    assert gradients[0].abs().max() > 0


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", [False, True])
def test_tokens_are_those_of_transformers_with_the_chat_template(
    older: bool, files: dict[str, Any], golden: Any, tmp_path: Path
) -> None:
    path = (toy_z_image.write_vocabulary if older else toy_z_image.write_tokenizer)(tmp_path)
    tokenizer = load(files, tokenizer=str(path)).tokenizer
    ours = [token for text in (*toy_z_image.PROMPTS, *toy_z_image.TEXTS) for token in (*tokenizer.encode(text), -1)]
    assert ours == golden["ids"].astype(int).tolist()


def test_what_is_dropped_of_a_long_text_is_its_end(files: dict[str, Any]) -> None:
    tokenizer = load(files).tokenizer
    assert tokenizer.dropped("x" * 400) == ""
    text = "x y" * 170  # 3 tokens each
    assert len(tokenizer.encode(text)) == len(tokenizer.encode("")) + 510
    assert tokenizer.dropped(text) != ""
    assert text.endswith(tokenizer.dropped(text))
    assert tokenizer([text]).shape == (1, 512)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_makes_the_image_of_the_function(files: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    flags = ["--ckpt", str(files["ckpt"]), "--text-encoder", files["text_encoder"], "--vae", files["vae"]]
    size = ["--H", "48", "--W", "80", "--steps", "2", "--device", "cpu", "--out", str(out)]
    assert txt2img.main(["a cat", *flags, *size]) == 0
    ours = load(files).txt2img("a cat", height=48, width=80, steps=2)
    assert np.array_equal(pixels(ours), pixels([Image.open(out)]))


@pytest.mark.slow
def test_negative_prompts_count_if_there_is_guidance(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    """Without, one warning says that they do not; an empty one is none."""
    size = {"height": 32, "width": 32, "steps": 2}
    plain = pixels(pipe.txt2img("a", negative_prompt="", **size))
    assert "negative" not in caplog.text
    assert np.array_equal(plain, pixels(pipe.txt2img("a", negative_prompt="apple", **size)))
    assert warnings_in(caplog) == [
        "a guidance scale of 1 (Z-Image Turbo's own) uses no negative prompt: leave it out, or use a larger `scale`"
    ]
    guided = [pixels(pipe.txt2img("a", negative_prompt=text, scale=5.0, **size)) for text in (None, "", "apple")]
    assert np.array_equal(guided[0], guided[1])
    assert np.abs(guided[0] - guided[2]).max() > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a (cat)", "prompt_syntax": "a1111"}, "cannot weight parts: got 'cat' with the weight 1.1"),
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
    prefix: str, pipe: Pipeline, original: dict[str, Tensor], files: dict[str, Any], tmp_path: Path
) -> None:
    separate = save(tmp_path / "s.safetensors", under(prefix, original))
    fused = save(
        tmp_path / "f.safetensors", under(prefix, {**pipe.unet.state_dict(), "norm_final.weight": torch.ones(64)})
    )
    for path in (separate, fused):
        loaded = load(files, ckpt=path)
        assert loaded.family.unet == SPEC
        for key, value in pipe.unet.state_dict().items():
            assert torch.equal(loaded.unet.state_dict()[key], value), key


def test_the_folder_of_diffusers_tells_turbo_from_not(tmp_path: Path, pipe: Pipeline, shapes: Any) -> None:
    assert (pipe.family.steps, pipe.family.scale, pipe.schedule.shift) == (8, 1.0, 3.0)  # type: ignore[attr-defined]
    base = ldm_lite.load(toy_z_image.write_diffusers(tmp_path / "d", shapes, shift=6.0), device="cpu")
    assert (base.family.steps, base.family.scale, base.schedule.shift) == (50, 5.0, 6.0)  # type: ignore[attr-defined]


def test_what_only_a_name_tells_is_a_warning(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unet = save(folder / "z_image_bf16.safetensors", weights(toy_z_image.small())["unet"])
    load(files, ckpt=unet)
    assert "if it is that, add `metadata=family=z_image`" in caplog.text
    caplog.clear()
    assert load(files, ckpt=unet, metadata={"family": "z_image"}).family.steps == 50
    assert warnings_in(caplog) == []


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
    other_path = tmp_path / "tokenizer.json"
    other_path.write_text("{}")
    for change, message in (
        ({"text_encoder": str(t5)}, r"t5.safetensors: is T5 XXL, but .* reads text with Qwen3 4B"),
        ({"text_encoder": str(wide), "tokenizer": str(folder)}, "Qwen3's output is 48 wide, expected 32"),
        ({"text_encoder": str(few)}, "tokenizer.json: has 268 tokens, but .* only 200"),
        ({"vae": None}, "without its autoencoder: name its file with `vae=FILE`"),
        ({"vae": str(wrong)}, "latents have 4 channels, but those of the autoencoder 8"),
        ({"text_encoder": str(qwen)}, "no tokenizer.json of Qwen3, nor vocab.json .* name one with `tokenizer=FILE`"),
        ({"tokenizer": str(alone)}, "no tokenizer.json of Qwen3, .* in .*alone"),
        ({"tokenizer": str(other_path)}, "is not a tokenizer of Qwen3"),
    ):
        with pytest.raises(ValueError, match=message):
            load(files, **change)
    loaded = load(files, text_encoder=str(qwen), tokenizer=str(folder))
    assert loaded.encode_prompt("a cat").context.shape == (1, 32, 32)


# ---- the server ------------------------------------------------------------------------------------------------------


def test_requests_that_are_joined_keep_all_inputs() -> None:
    """Each image's own, in one batch and where a step runs image by image."""
    texts = [{"context": torch.ones(1, 32, 8), "y": torch.ones(1, 1), "full": torch.full((1,), i)} for i in range(2)]
    both, seen = _joined([Branch(text) for text in texts]), []

    def network(x: Tensor, t: Tensor, context: Tensor, y: Tensor, full: Tensor) -> Tensor:
        seen.append(full.tolist())
        return x

    [row] = device_rows(
        named_plan("euler", FAMILY_ROWS["z_image"].noise.schedule("reverse_flow"), 1), torch.device("cpu")
    )
    zeros = torch.zeros(2, 4, 2, 2)
    guided = join([both], 1.0, torch.device("cpu"))
    registers = zeros.expand(len(row.mix), -1, -1, -1, -1)
    Together(torch.nn.Sequential())(network, registers, row, zeros, guided, weighted, ())
    assert seen == [[0, 1], [0], [1]]
