"""FLUX.1 Redux: its image encoder, its tokens and a run with them, against diffusers and transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import toy_flow
from flow_files import of_diffusers
from PIL import Image
from random_checkpoint import SMALL
from runs import run_latents, unet_calls
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.models.redux import ReduxSpec, SiglipSpec
from ldm_lite.txt2img import main

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "redux.npz")
RELEASED = {  # shapes of flux1-redux-dev and of SigLIP So400m, patch 14, 384 px
    "redux_up.weight": (12288, 1152),
    "redux_down.weight": (4096, 12288),
    "embeddings.patch_embedding.weight": (1152, 3, 14, 14),
    "embeddings.position_embedding.weight": (729, 1152),
    **{f"encoder.layers.{i}.mlp.fc1.weight": (4304, 1152) for i in range(27)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX.1 dev with the golden's weights, Redux, SigLIP as its file has it, with its pooling head, and a photo."""
    path = tmp_path_factory.mktemp("redux")
    toy_flow.write(path, "flux_dev")
    toy_flow.save(path / "dev.safetensors", of_diffusers("flux_dev"))
    save_file(toy_flow.redux(), path / "redux.safetensors")
    siglip = {f"vision_model.{key}": value for key, value in toy_flow.siglip().items()}
    head = {"vision_model.head.probe": torch.ones(1, 1, 128), "vision_model.head.mlp.fc1.bias": torch.ones(192)}
    save_file(siglip | head, path / "siglip.safetensors")
    save_file({f"vision_model.{key}": value for key, value in toy.vision().items()}, path / "clip.safetensors")
    Image.fromarray(toy.photo(48, 72)).save(path / "photo.png")
    return path


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return ldm_lite.load(folder / "flux_dev.safetensors", unet=folder / "dev.safetensors", device="cpu")


def asked(folder: Path, rest: str = "", net: str = "redux") -> str:
    return f"{folder / net}.safetensors:{folder / 'photo.png'}{rest}"


def test_the_released_sizes() -> None:
    assert ReduxSpec.from_shapes(RELEASED) == ReduxSpec(1152, 12288, 4096)
    assert SiglipSpec.from_shapes(RELEASED) == SiglipSpec(384, 14, 1152, 4304, 27, 16)


def test_tokens_are_those_of_diffusers(pipe: Pipeline, folder: Path) -> None:
    """Of an image that is not square, from its file."""
    arguments = {"control": [asked(folder, ":0.5")], "clip_vision": folder / "siglip.safetensors"}
    with unet_calls(pipe) as calls:
        pipe.txt2img("a", steps=1, height=32, width=32, **arguments)
    tokens = calls[0].context[0, pipe.encode_prompt("a").context.shape[1] :]
    assert toy.relative_error(tokens[None], 0.5 * GOLDEN["tokens"]) < 1e-5


def test_a_run_is_that_of_diffusers(pipe: Pipeline, folder: Path) -> None:
    """The tokens follow the text's in its range of steps; beyond it, the run is another."""
    x, _, context, y = toy_flow.run_inputs(pipe.family.unet)
    cond = Conditioning(context, y)
    arguments = {"cond": cond, "noise": x, "scale": toy_flow.SCALE, "clip_vision": folder / "siglip.safetensors"}
    arguments |= {"steps": toy_flow.STEPS, "height": 48, "width": 80, "batch_size": 2}
    latents = {rest: run_latents(pipe, control=[asked(folder, rest)], **arguments) for rest in ("", ":1:0-0.5")}
    assert toy.relative_error(latents[""], GOLDEN["run"]) < 2e-5
    assert toy.relative_error(latents[":1:0-0.5"], GOLDEN["run"]) > 1e-3


@pytest.mark.slow
def test_the_command_and_guidance(folder: Path, tmp_path: Path) -> None:
    """schnell with guidance has a negative prompt, which the image is not for; two images follow each other."""
    toy_flow.write(tmp_path, "flux_schnell")
    arguments = ["a cat", "--ckpt", str(tmp_path / "flux_schnell.safetensors"), "--device", "cpu", "--steps", "2"]
    arguments += ["--H", "32", "--W", "48", "--scale", "2", "--negative-prompt", "a dog"]
    redux = ["--control", asked(folder), "--clip-vision", str(folder / "siglip.safetensors")]
    results = []
    for name, more in (("plain", []), ("one", redux), ("two", [*redux, "--control", asked(folder, ":0.3")])):
        assert main([*arguments, *more, "--out", str(tmp_path / f"{name}.png")]) == 0
        results.append(Image.open(tmp_path / f"{name}.png").tobytes())
    assert len(set(results)) == 3


def test_what_does_not_fit_is_one_line(pipe: Pipeline, folder: Path, small_path: Path) -> None:
    siglip, clip = (str(folder / f"{name}.safetensors") for name in ("siglip", "clip"))
    wide = {
        key: torch.zeros(48, 96) if key == "redux_down.weight" else value for key, value in toy_flow.redux().items()
    }
    save_file(wide, folder / "wide.safetensors")
    for model, net, vision, message in (
        (pipe, "redux", None, "FLUX.1 Redux needs SigLIP's image encoder: give its file with `clip_vision=FILE`"),
        (pipe, "redux", clip, "clip.safetensors: is not the right image encoder: FLUX.1 Redux needs SigLIP's"),
        (pipe, "wide", siglip, "wide.safetensors: is for FLUX.1 with T5 48 wide, not for"),
        (ldm_lite.load(small_path, device="cpu"), "redux", siglip, "is for FLUX.1 with T5 32 wide, not for"),
    ):
        with pytest.raises(ValueError, match=message):
            model.txt2img("a", control=[asked(folder, net=net)], clip_vision=vision)
    save_file(toy.control(SMALL.unet), folder / "net.safetensors")
    with pytest.raises(ValueError, match="is a transformer, whose controls are not supported"):
        pipe.txt2img("a", control=[asked(folder, net="net")])
