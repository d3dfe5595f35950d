"""T2I-Adapter's style network: its tokens, and runs with it, against the original's code."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import texts
import torch
import toy
from PIL import Image
from runs import run_latents, unet_calls
from safetensors.torch import save_file

from ldm_lite import Pipeline
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.image import clip_crop, to_pixels
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec, styled
from ldm_lite.txt2img import main

GOLDEN = np.load(Path(__file__).parent / "data" / "style.npz")
NOISE = toy.normal(9, 1, 4, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo, a style adapter, and CLIP as its file has it: with the text encoder beside the one of images."""
    path = tmp_path_factory.mktemp("style")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    torch.save(toy.style(), path / "style.pth")
    clip = {f"vision_model.{key}": value for key, value in toy.vision().items()}
    clip |= {
        "visual_projection.weight": torch.ones(2, 128),
        "text_model.embeddings.token_embedding.weight": torch.ones(2),
    }
    save_file(clip | {"logit_scale": torch.ones(1)}, path / "clip.safetensors")
    return path


def asked(folder: Path, rest: str = "", net: str = "style.pth") -> str:
    return f"{folder / net}:{folder / 'photo.png'}{rest}"


def test_what_clip_sees_is_what_transformers_has() -> None:
    """Its middle, scaled with the bicubic filter of PIL, and normalised; hidden states before the last norm."""
    encoder = CLIPVisionEncoder(toy.VISION)
    encoder.load_state_dict(toy.vision())
    assert CLIPVisionSpec.from_shapes({key: tuple(value.shape) for key, value in toy.vision().items()}) == toy.VISION
    picture = (to_pixels(clip_crop(Image.fromarray(toy.photo()), 32))[None] + 1) / 2
    with torch.no_grad():
        seen = encoder(picture)
    assert toy.relative_error(seen[:, ::4], GOLDEN["seen"]) < 1e-5


def test_its_tokens_are_the_originals(pipe: Pipeline, folder: Path) -> None:
    arguments = {"control": [asked(folder, ":0.5")], "clip_vision": folder / "clip.safetensors"}
    with unet_calls(pipe) as calls:
        pipe.txt2img("a", steps=1, height=64, width=64, **arguments)
    tokens = calls[0].context[1:, pipe.encode_prompt("a").context.shape[1] :]
    assert toy.relative_error(tokens, 0.5 * GOLDEN["tokens"]) < 1e-5


def test_runs_that_it_steers_end_as_the_originals(pipe: Pipeline, folder: Path) -> None:
    """In the first half of the steps, in the branch of the prompt; the other's context is made as long."""
    context, uncond = toy.embeddings()
    latents: dict[str, torch.Tensor] = {}
    for rest in (":0.8:0-0.5", ":0.8", ""):
        inputs = {"control": (asked(folder, rest),), "clip_vision": folder / "clip.safetensors"} if rest else {}
        inputs |= {"cond": context, "uncond": uncond, "noise": NOISE, "scale": 5.0}
        latents[rest] = run_latents(pipe, steps=4, sampler="ddim", height=64, width=64, **inputs)
    assert toy.relative_error(latents[":0.8:0-0.5"], GOLDEN["latents"]) < 1e-5
    assert toy.relative_error(latents[":0.8"], GOLDEN["latents"]) > 1e-3
    assert toy.relative_error(latents[""], GOLDEN["latents"]) > 1e-3


def test_tokens_are_not_for_the_negative_prompt() -> None:
    context, tokens = toy.normal(0, 6, 5, 4), toy.normal(1, 1, 2, 4)
    assert torch.equal(styled(context, tokens, positive=True), torch.cat([context, tokens.expand(6, -1, -1)], dim=1))
    assert torch.equal(styled(context, tokens, positive=False), torch.cat([context, context[:, 3:]], dim=1))
    longer = styled(context, toy.normal(1, 1, 7, 4), positive=False)  # more tokens than the context has
    assert torch.equal(longer[:, 5:], torch.cat([context[:, 3:], context], dim=1))


def test_the_released_file_is_this_network() -> None:
    """t2iadapter_style_sd14v1.pth, by the manifest of its keys."""
    manifests = json.loads(gzip.decompress((Path(__file__).parent / "data" / "manifests.json.gz").read_bytes()))
    shapes = {key: tuple(shape) for key, shape in manifests["t2i_adapter_style"]["shapes"].items()}
    with on_meta():
        network = StyleAdapter(StyleAdapterSpec.from_shapes(shapes))
    assert {key: tuple(value.shape) for key, value in network.state_dict().items()} == shapes


def test_the_command_and_its_mistakes(
    small_path: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["a cat", "--ckpt", str(small_path), "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "a.png")]
    clip = ["--clip-vision", str(folder / "clip.safetensors")]
    assert main([*common, "--control", asked(folder), *clip, "--H", "64", "--W", "64"]) == 0
    assert "Control: " in texts.load(tmp_path / "a.png").info["parameters"]
    wide = {key: value[..., :32] if key == "proj" else value for key, value in toy.style().items()}
    torch.save(wide, folder / "narrow.pth")
    for arguments, message in (
        (
            ["--control", asked(folder)],
            "give its file with --clip-vision FILE, for instance openai/clip-vit-large-patch",
        ),
        (clip, "--clip-vision is of a control: give one with --control FILE:IMAGE"),
        (
            ["--control", asked(folder), "--clip-vision", str(folder / "style.pth")],
            "style.pth: holds no image encoder of CLIP or SigLIP with the names of Hugging Face or OpenCLIP, only",
        ),
        (["--control", asked(folder, net="narrow.pth"), *clip], "is for UNets with context 32 "),
    ):
        assert main([*common, *arguments]) == 2
        assert message in capsys.readouterr().err
