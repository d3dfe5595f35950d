"""Control-LoRAs: files in Stability AI's layout, against ControlNets with weights by ComfyUI's formula."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from PIL import Image
from random_checkpoint import LCM, SMALL, random_tensor, small, write
from runs import run_latents
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.txt2img import main

XL = small("sdxl_base")
RANK = 3


def files(unet: Any, base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A Control-LoRA, and the ControlNet that it means.

    Matrices and kernels are pairs of factors, norms and biases are whole or left out.
    """
    file, meant = {"lora_controlnet": torch.zeros(0)}, {}
    for key, value in toy.control(unet).items():
        name, _, last = key.rpartition(".")
        if key not in base:
            file[key] = meant[key] = value
        elif ".transformer_blocks.0.norm" in key or key == "middle_block.0.out_layers.3.bias":
            meant[key] = base[key]
        elif last == "weight" and value.ndim > 1:
            up = random_tensor(f"{name}.up", (len(value), RANK, *[1] * (value.ndim - 2)))
            down = random_tensor(f"{name}.down", (RANK, *value.shape[1:]))
            file[f"{name}.up"], file[f"{name}.down"] = up, down
            product = torch.mm(up.flatten(start_dim=1).double(), down.flatten(start_dim=1).double())
            meant[key] = (base[key].double() + product.reshape(value.shape)).float()
        else:
            file[key] = meant[key] = value
    return file, meant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Miniatures of SD1, SDXL and LCM, each with a Control-LoRA and the ControlNet that it means; and a photo."""
    path = tmp_path_factory.mktemp("control_lora")
    for name, family in (("sd1", SMALL), ("xl", XL), ("lcm", LCM)):
        write(path / f"{name}.safetensors", family)
        unet = ldm_lite.load(path / f"{name}.safetensors", device="cpu").unet.state_dict()
        lora, whole = files(replace(family.unet, guidance_dim=None), unet)
        save_file(lora, path / f"{name}_lora.safetensors")
        save_file(whole, path / f"{name}_net.safetensors")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    return path


def asked(folder: Path, net: str) -> str:
    return f"{folder / net}:{folder / 'photo.png'}:0.8"


def latents(pipe: Pipeline, *controls: str) -> Tensor:
    """The last latents of a guided run."""
    options = {"steps": 2, "sampler": "ddim", "height": 64, "width": 64, "scale": 5.0}
    return run_latents(pipe, "a cat", control=controls, **options)


@pytest.mark.parametrize("name", ["xl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd1", "lcm"))])
def test_a_run_is_that_of_the_controlnet_it_means(folder: Path, name: str) -> None:
    pipe = ldm_lite.load(folder / f"{name}.safetensors", device="cpu")
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}
    ours, meant = (latents(pipe, asked(folder, f"{name}_{kind}.safetensors")) for kind in ("lora", "net"))
    assert toy.relative_error(ours, meant.double().numpy()) < 1e-5
    assert toy.relative_error(latents(pipe), meant.double().numpy()) > 1e-3
    assert all(torch.equal(value, before[key]) for key, value in pipe.unet.state_dict().items())


@pytest.mark.parametrize("tuning", [{"offload": "sequential"}, {"storage": "int8"}, {"dtype": "bf16"}])
def test_the_unet_may_be_kept_elsewhere(folder: Path, tuning: dict[str, str]) -> None:
    pipe = ldm_lite.load(folder / "sd1.safetensors", device="cpu", **tuning)
    ours, meant = (latents(pipe, asked(folder, f"sd1_{kind}.safetensors")) for kind in ("lora", "net"))
    tolerance = 1e-5 if "offload" in tuning else 0.05
    assert toy.relative_error(ours, meant.double().numpy()) < tolerance
    assert toy.relative_error(latents(pipe), meant.double().numpy()) > 2 * tolerance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.pop("time_embed.0.up"), "1 tensors unexpected (time_embed.0.down)"),
        (lambda file: file.pop("zero_convs.0.0.weight"), "1 tensors missing (zero_convs.0.0.weight)"),
        (
            lambda file: file.update({"time_embed.0.down": torch.zeros(RANK, 7)}),
            "is for another UNet: its time_embed.0.up is (128, 3), time_embed.0.down (3, 7), for (128, 32)",
        ),
        (
            lambda file: file.update({"time_embed.0.down": torch.zeros(RANK, 32, dtype=torch.int32)}),
            "time_embed.0.down is stored as int32",
        ),
    ],
)
def test_mistakes_are_one_line(
    folder: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    pipe = ldm_lite.load(folder / "sd1.safetensors", device="cpu")
    file, _ = files(SMALL.unet, pipe.unet.state_dict())
    change(file)
    save_file(file, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=r"wrong\.safetensors: ") as caught:
        pipe.txt2img("a cat", control=[f"{tmp_path / 'wrong.safetensors'}:{folder / 'photo.png'}"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_and_files_in_other_places(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["a cat", "--device", "cpu", "--steps", "1", "--H", "64", "--W", "64", "--out", str(tmp_path / "a.png")]
    lora = str(folder / "sd1_lora.safetensors")
    sd1 = ["--ckpt", str(folder / "sd1.safetensors")]
    assert main([*common, *sd1, "--control", asked(folder, "sd1_lora.safetensors"), "--preprocess", "canny"]) == 0
    for arguments, message in (
        ([*sd1, "--lora", lora], "is a Control-LoRA, to be used with a checkpoint: --control FILE:IMAGE"),
        (["--ckpt", lora], "is a ControlNet, to be used with a checkpoint"),
        ([*sd1, "--control", asked(folder, "xl_lora.safetensors")], "xl_lora.safetensors: "),
    ):
        capsys.readouterr()
        assert main([*common, *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a Control-LoRA, to be used with a checkpoint: `control=FILE:IMAGE`"):
        ldm_lite.open_lora(lora)
