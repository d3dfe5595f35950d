"""Qwen-Image in miniature: networks and whole runs against diffusers (the goldens), its files, refusals, LoRAs."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_qwen_image
from safetensors.torch import load_file
from toy_families import load, pixels, run, warnings_in
from toy_flow import save, under

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.checkpoint.reader import on_meta, parts_of
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.adjustments import keeping_norm
from ldm_lite.diffusion.schedule import spaced_levels
from ldm_lite.models.ops import axial_rotation
from ldm_lite.models.qwen3 import QWEN25_7B
from ldm_lite.models.qwen_image import QWEN_IMAGE, THETA, QwenImageBlock, places
from ldm_lite.models.wan_vae import WAN_VAE, WanVAESpec
from ldm_lite.runtime import tiling
from ldm_lite.zoo.families import FAMILY_ROWS, infer_vae
from ldm_lite.zoo.family import build_network

DATA = Path(__file__).parents[1] / "data"
TOYS = toy_qwen_image
GOLDEN = np.load(DATA / "qwen_image.npz")
SHAPES = json.loads(str(GOLDEN["shapes"]))
MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))
SIZE = {"height": 32, "width": 48, "steps": 2}


@pytest.fixture(scope="module")
def pipe(files: dict[str, Any]) -> Pipeline:
    """Of files of their own, as ComfyUI has them; that of diffusers' folder is in test_shared.py."""
    return load(files)


# ---- networks -------------------------------------------------------------------------------------------------------


def test_equals_diffusers(pipe: Pipeline) -> None:
    assert toy.relative_error(run(toy_qwen_image, pipe.unet), GOLDEN["plain"]) < 1e-5


def test_padding_is_not_read(pipe: Pipeline) -> None:
    x, t, context, y = toy_qwen_image.inputs()
    changed = context.clone()
    changed[1, toy_qwen_image.LENGTHS[1] :] = 7.0
    assert torch.equal(pipe.unet(x, t, changed, y), pipe.unet(x, t, context, y))
    whole = torch.full_like(y, context.shape[1])
    unmasked = pipe.unet(x, t, context, y, full=torch.ones(2))
    assert torch.allclose(unmasked, pipe.unet(x, t, context, whole), atol=1e-5)


@pytest.mark.slow
def test_a_block_of_the_released_width_equals_diffusers() -> None:
    with torch.device("meta"):
        block = QwenImageBlock(QWEN_IMAGE)
    toy.fill(block.to_empty(device="cpu"))
    x, context, vec = (toy.normal(i, 1, n, QWEN_IMAGE.width) for i, n in ((1, 8), (2, 4), (3, 1)))
    positions = places(4, [(2, 4)], torch.device("cpu"))
    rotation = axial_rotation(positions, QWEN_IMAGE.axes, THETA, torch.float32)
    text, image = block(context, x, torch.nn.functional.silu(vec[:, 0]), rotation, None)
    assert toy.relative_error(torch.cat([text, image], dim=1)[..., ::48], GOLDEN["wide"]) < 1e-5


@pytest.mark.parametrize("strip", [2**22, 2**14])
def test_the_autoencoder_equals_diffusers(strip: int, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose convolutions in time see zeros before a single frame; strip by strip too."""
    monkeypatch.setattr(tiling, "STRIP", strip)
    image = torch.from_numpy(toy.photo(32, 48)).permute(2, 0, 1)[None].float() / 127.5 - 1
    for vae in (pipe.vae, tiling.tiled(pipe.vae)):
        assert toy.relative_error(vae.encode(image)[0], GOLDEN["encoded"]) < 1e-5
        decoded = vae.decode(toy.normal(1, 1, 16, 4, 6)).clamp(-1, 1)  # as diffusers does
        assert toy.relative_error(decoded, GOLDEN["decoded"]) < 1e-5


def test_the_text_equals_transformers(pipe: Pipeline) -> None:
    """From the text on: the template before it is left out."""
    text = pipe.encode_prompt(list(toy_qwen_image.PROMPTS))
    assert text.context is not None
    assert text.y is not None
    assert text.context.shape[2] == 256
    read = torch.arange(text.context.shape[1]) < text.y
    assert toy.relative_error((text.context * read[:, :, None])[..., ::4], GOLDEN["text"]) < 1e-5


# ---- whole runs -----------------------------------------------------------------------------------------------------


def test_the_shift_depends_on_the_size_and_the_last_step_is_at_0_02() -> None:
    """Numbers of diffusers' scheduler with the release's configuration."""
    schedule = FAMILY_ROWS["qwen_image"].noise.schedule("flow").sized(6889)  # type: ignore[attr-defined]
    levels = spaced_levels(schedule.spacing, schedule, 4)
    assert [level.s for level in levels] == pytest.approx(WANTED, abs=1e-6)
    assert [level.s for level in spaced_levels(schedule.spacing, schedule, 1)] == [1, 0]


WANTED = [1.0, 0.780980, 0.475549, 0.02, 0.0]


def test_the_norm_is_kept_by_the_feature_with_others(pipe: Pipeline) -> None:
    """Each token's norm is the conditional one's; without guidance nothing is done."""
    adjust = keeping_norm(2)
    assert keeping_norm(2) is adjust  # for compiled steps
    cond, guided = toy.normal(1, 1, 16, 4, 6), 5 * toy.normal(2, 1, 16, 4, 6)
    outputs: Any = SimpleNamespace(outs=torch.stack([guided, cond]), cond=cond)

    def norms(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_unshuffle(x, 2).norm(dim=1)

    assert torch.allclose(norms(adjust(guided, outputs)), norms(cond), rtol=1e-5)
    outputs.outs = cond[None]
    assert adjust(cond, outputs) is cond
    plain, rescaled = (pixels(pipe.txt2img("a", guidance_rescale=share, **SIZE)) for share in (0.0, 0.7))
    assert not np.array_equal(plain, rescaled)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["diffusers", "wan"])
def test_the_released_autoencoder_is_read_for_single_images(layout: str) -> None:
    """Under diffusers' names and under Wan's, whose kernels in time become their last slice."""
    stored = {key: tuple(shape) for key, shape in MANIFESTS["vae_qwen_image"]["shapes"].items()}
    shapes = stored if layout == "diffusers" else toy_qwen_image.of_wan(stored, num_res_blocks=2)
    for prefix in ("", "vae."):
        file = Tensors(Path("vae.safetensors"), under(prefix, shapes), lambda key: torch.empty(0))  # type: ignore[arg-type]
        [(role, part)] = parts_of(file).items()
        with on_meta():
            ours = {key: tuple(value.shape) for key, value in build_network(WAN_VAE).state_dict().items()}
        assert (role, dict(part.shapes)) == ("vae", ours)
        assert infer_vae(part.shapes) == WAN_VAE
        assert isinstance(infer_vae(part.shapes), WanVAESpec)


def test_a_kernel_in_time_becomes_its_last_slice(pipe: Pipeline) -> None:
    values = toy_qwen_image.random_weights("vae", SHAPES["vae"])
    ours = pipe.vae.state_dict()
    assert torch.equal(ours["encoder.conv_in.weight"], values["encoder.conv_in.weight"][:, :, -1])
    assert torch.equal(
        ours["decoder.mid.attn_1.k.weight"], values["decoder.mid_block.attentions.0.to_qkv.weight"].chunk(3)[1]
    )
    first = values["decoder.up_blocks.0.resnets.1.norm2.gamma"].flatten()
    assert torch.equal(ours["decoder.up.3.block.1.norm2.gamma"], first)


def test_the_released_text_encoder_has_7_billion_parameters() -> None:
    """Those of Qwen2.5 7B's layers, and of its embeddings once."""
    with on_meta():
        assert sum(p.numel() for p in build_network(QWEN25_7B).parameters()) == 7_070_619_136


def test_a_folder_of_diffusers_is_the_same(pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {name: SHAPES[name] for name in ("transformer", "text_encoder", "vae")}
    folder = toy_qwen_image.write_diffusers(tmp_path / "d", shapes)
    loaded = ldm_lite.load(folder, device="cpu")
    assert warnings_in(caplog) == []
    assert np.array_equal(pixels(loaded.txt2img("a cat", **SIZE)), pixels(pipe.txt2img("a cat", **SIZE)))
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("QwenImagePipeline", "QwenImageLayeredPipeline"))
    with pytest.raises(ValueError, match="is of QwenImageLayeredPipeline, which is not supported: use Qwen-Image"):
        ldm_lite.load(folder, device="cpu")


def test_all_in_one_with_prefixes(pipe: Pipeline, files: dict[str, Any], tmp_path: Path) -> None:
    """As ComfyUI saves checkpoints; fp8 with scales, and Qwen2.5-VL's part for images, which is left out."""
    text = load_file(files["text_encoder"])
    assert any(key.startswith("visual.") for key in text)
    whole = under("model.diffusion_model.", load_file(files["ckpt"])) | under("vae.", load_file(files["vae"]))
    whole |= under("text_encoders.qwen25_7b.transformer.", text)
    (tmp_path / "tokenizer.json").write_bytes((Path(files["vae"]).parent / "tokenizer.json").read_bytes())
    same = ldm_lite.load(save(tmp_path / "whole.safetensors", whole), device="cpu")
    assert np.array_equal(pixels(same.txt2img("a cat", **SIZE)), pixels(pipe.txt2img("a cat", **SIZE)))
    scaled = {"scaled_fp8": torch.tensor([], dtype=torch.float8_e4m3fn)}
    for key, value in text.items():
        scale = value.abs().max() / 448
        is_linear = key.endswith("proj.weight") and value.ndim == 2
        scaled[key] = (value / scale).to(torch.float8_e4m3fn) if is_linear else value
        scaled |= {key.replace(".weight", ".scale_weight"): scale} if is_linear else {}
    fp8 = load(files, text_encoder=str(save(Path(files["vae"]).parent / "fp8_scaled.safetensors", scaled)))
    for key, value in fp8.text_encoder.state_dict().items():
        assert toy.relative_error(value, pipe.text_encoder.state_dict()[key].numpy()) < 0.04


def test_no_warning_for_what_is_known(files: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    load(files)
    assert warnings_in(caplog) == []


def test_what_does_not_fit_is_named(files: dict[str, Any], tmp_path: Path) -> None:
    transformer, vae = load_file(files["ckpt"]), load_file(files["vae"])
    layered = transformer | {"time_text_embed.addition_t_embedding.weight": torch.zeros(2, 64)}
    narrow = {key: value[:8] if key == "conv2.bias" else value for key, value in vae.items()}
    narrow["conv2.weight"] = vae["conv2.weight"][:8, :8]
    narrow["decoder.conv1.weight"] = vae["decoder.conv1.weight"][:, :8]
    for changes, message in (
        ({"ckpt": save(tmp_path / "layered.safetensors", layered)}, "Qwen-Image-Layered, which is not supported"),
        ({"vae": None}, "is Qwen-Image without its autoencoder"),
        ({"vae": str(save(tmp_path / "narrow.safetensors", narrow))}, "its latents have 8 channels, expected 16"),
    ):
        with pytest.raises(ValueError, match=message):
            load(files, **changes)
