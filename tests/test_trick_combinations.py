"""Every trick with everything else that changes a run: it acts, image by image, or is refused in one line."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
import toy
import toy_flow
from PIL import Image
from random_checkpoint import SMALL, small
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline

RUN: dict[str, Any] = {
    **{"sampler": "ddim", "steps": 4, "seed": 3, "scale": 4.0, "prompt_syntax": "a1111", "output": "tensor"}
}
TRICKS: dict[str, dict[str, Any]] = {
    "interval": {"guidance_interval": "0.25-0.75"},
    "stopped": {"guidance_interval": "-0.5"},
    "schedule": {"guidance_schedule": "cosine"},
    "APG": {"apg": "parallel=0:momentum=-0.5"},
    "DeepCache": {"deep_cache": "2"},
    "T-GATE": {"gate_step": 2},
    "DeepCache, T-GATE": {"deep_cache": "2", "gate_step": 2},  # whose last step with text is no whole one of DeepCache
    "FreeU": {"freeu": "1.2,1.4,0.9,0.2"},
    "AYS": {"spacing": "ays"},
    "all": {"guidance_interval": "-0.75", "deep_cache": "2:1", "gate_step": 3, "freeu": "1.2,1.4,0.9,0.2"},
    "all, Restart": {"guidance_interval": "0.1-0.75", "deep_cache": "3", "gate_step": 17, "freeu": "1.2,1.4,0.9,0.2"}
    | {"sampler": "restart", "spacing": "ays", "steps": 20},
}
SHORT = ("DeepCache", "T-GATE", "DeepCache, T-GATE", "FreeU", "all", "all, Restart")
GUIDED = ("interval", "stopped", "schedule", "APG", "all", "all, Restart")
GATED = ("T-GATE", "DeepCache, T-GATE", "all", "all, Restart")
OF_ONE_SCALE = ("schedule", "APG")
NOT_FOR_PARTS = dict.fromkeys(OF_ONE_SCALE, "a prompt with AND, or with a weight at its end, takes no")
OWN_FUNCTION = dict.fromkeys(OF_ONE_SCALE, "got a `guidance` function and")
NOT_A_UNET = dict.fromkeys(SHORT, "are for UNets") | {"AYS": "is not for rectified flow"}
FIXED = dict.fromkeys(SHORT, "DPM adaptive has no fixed steps") | {"APG": "DPM adaptive tries steps again"}
NO_GUIDANCE = dict.fromkeys(GUIDED, "but there is none")


@dataclasses.dataclass(frozen=True)
class Case:
    """What a trick is combined with, and which tricks it refuses, with what words."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "txt2img"
    command: str = "txt2img"
    prompt: str = "a cat"
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


FLOW: dict[str, Any] = {"height": 32, "width": 32, "prompt_syntax": "plain"}
COMPAT = {"compat": True, "prompt_syntax": "plain"}
REGIONS = {"regions": "0,0,0.5,1;0.5,0,1,1"}
CASES = {
    "alone": Case(),
    "heun": Case({"sampler": "heun"}),
    "noise": Case({"sampler": "dpmpp_2m_sde", "brownian": True}),
    "adaptive": Case({"sampler": "dpm_adaptive"}, refused=FIXED),
    "CFG++": Case({"sampler": "ddim_cfgpp"}, refused=dict.fromkeys(OF_ONE_SCALE, "has guidance of its own")),
    "no guidance": Case({"scale": 1.0}, refused=NO_GUIDANCE),
    "function of the step": Case({"guidance": lambda step: 3.0 + step}, refused=OWN_FUNCTION),
    "function": Case({"guidance": lambda cond, uncond: uncond + 3 * (cond - uncond)}, refused=OWN_FUNCTION),
    "rescaled": Case({"guidance_rescale": 0.7}),
    "ControlNet": Case({"control": "net"}),
    "guess mode, half of the steps": Case({"control": "net:0-0.5:guess"}),
    "T2I-Adapter and style": Case({"control": "adapter style"}),
    "img2img": Case({"strength": 0.9, "steps": 5}, command="img2img"),
    "inpaint": Case(command="inpaint"),
    "inpainting model": Case(command="inpaint", model="inpaint"),
    "instruction": Case(
        command="img2img", model="instruct", refused=dict.fromkeys(OF_ONE_SCALE, "by the prompt alone")
    ),
    "AND": Case(prompt="a AND b :0.5 AND c :-0.2", refused=NOT_FOR_PARTS),
    "AND without guidance": Case({"scale": 1.0}, prompt="a AND b", refused=NO_GUIDANCE | NOT_FOR_PARTS),
    "AND and ControlNet": Case({"control": "net"}, prompt="a AND b", refused=NOT_FOR_PARTS),
    "regions": Case(REGIONS, prompt="a AND b", refused=NOT_FOR_PARTS),
    "regions without guidance": Case(REGIONS | {"scale": 1.0}, prompt="a AND b", refused=NO_GUIDANCE | NOT_FOR_PARTS),
    "editing": Case(prompt="a [cat:dog:0.25]", refused=dict.fromkeys(GATED[:2], "the prompt changes in step")),
    "late editing": Case(prompt="a [cat:dog:0.5]", refused=dict.fromkeys(GATED, "the prompt changes in step")),
    "alternation": Case(prompt="a [cat|dog]", refused=dict.fromkeys(GATED, "the prompt changes in step")),
    "hires": Case({"hires": 2.0, "hires_strength": 0.9}),
    "seamless": Case({"seamless": "xy"}),
    "SDXL and its refiner": Case({"refiner": "refiner", "refiner_start": 0.5}, model="sdxl"),
    "8 bits": Case(model="int8"),
    "blocks in turn": Case(model="sequential"),
    "FLUX.1": Case(FLOW, model="flux_dev", refused=NO_GUIDANCE | NOT_A_UNET),
    "SD 3.5": Case(FLOW, model="sd35_medium", refused=NOT_A_UNET | {"APG": "or `skip_layer_scale`"}),
    "original script": Case(
        COMPAT, refused=dict.fromkeys(TRICKS, "does not go with `compat`") | {"AYS": "the original script has no"}
    ),
}
# Every refusal, and of the pairs that run a third: each trick with a third of the cases, each case with four of them.
# test_an_image_is_the_same_in_a_batch runs all at once with every case.  With Restart a run takes ten times as long.
GOES_BACK = ("alone", "img2img", "inpaint", "ControlNet", "AND", "regions", "editing", "hires", "SDXL and its refiner")
PAIRS = [
    (name, trick)
    for i, (name, case) in enumerate(CASES.items())
    for k, trick in enumerate(TRICKS)
    if (trick in case.refused or (i + k) % 3 == 0) and (trick != "all, Restart" or name in GOES_BACK)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo, and controls."""
    path = tmp_path_factory.mktemp("combinations")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    save_file(toy.control(SMALL.unet), path / "net.safetensors")
    save_file(toy.adapter(), path / "adapter.safetensors")
    torch.save(toy.style(), path / "style.pth")
    save_file({f"vision_model.{key}": value for key, value in toy.vision().items()}, path / "clip.safetensors")
    return path


@pytest.fixture(scope="module")
def pipes(folder: Path) -> Callable[[str], Pipeline]:
    """Return a function from the name of a miniature to its pipeline."""
    families = toy.PICTURE_FAMILIES | {"sdxl": small("sdxl_base"), "refiner": small("sdxl_refiner")}
    places: dict[str, dict[str, Any]] = {"int8": {"storage": "int8"}, "sequential": {"offload": "sequential"}}

    @functools.cache
    def pipe(name: str) -> Pipeline:
        file = folder / f"{name}.safetensors"
        if name in ("flux_dev", "sd35_medium"):
            toy_flow.write(folder, name)
        else:
            random_checkpoint.write(file, families.get(name, SMALL))
        return ldm_lite.load(file, device="cpu", **places.get(name, {}))

    return pipe


@pytest.fixture(scope="module")
def last_image(pipes: Callable[[str], Pipeline], folder: Path) -> Callable[..., Tensor]:
    """Return a function that runs a case with further options and returns the last image."""

    @functools.cache
    def run(name: str, trick: str | None = None, batch: bool = False) -> Tensor:
        case = CASES[name]
        options = {**RUN, **case.options, **({} if trick is None else TRICKS[trick])}
        options |= {"seed": 2, "batch_size": 2} if batch else {}
        if "guidance" in options:
            del options["scale"]  # which it replaces
        if (names := options.pop("control", None)) is not None:
            files = {"net": "net.safetensors", "adapter": "adapter.safetensors", "style": "style.pth"}
            parts = (control.partition(":") for control in names.split())
            options["control"] = [
                f"{folder / files[file]}:{folder / 'photo.png'}{on}{rest}" for file, on, rest in parts
            ]
            if "style" in names:
                options["clip_vision"] = str(folder / "clip.safetensors")
        if "refiner" in options:
            options["refiner"] = pipes(options["refiner"])
        images = {"txt2img": (), "img2img": (toy.waves(),), "inpaint": (toy.waves(), toy.mask())}[case.command]
        return getattr(pipes(case.model), case.command)(case.prompt, *images, **options)[-1]

    return run


@pytest.mark.thin(31)
@pytest.mark.parametrize(("name", "trick"), PAIRS)
def test_a_trick_acts_or_is_refused(name: str, trick: str, last_image: Callable[..., Tensor]) -> None:
    if trick in CASES[name].refused:
        with pytest.raises(ValueError, match=CASES[name].refused[trick]) as caught:
            last_image(name, trick)
        assert "\n" not in str(caught.value)
    else:
        assert (last_image(name, trick) - last_image(name)).abs().max() > 5e-5  # arithmetic: 1e-5


@pytest.mark.thin(13)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "all" not in case.refused])
def test_an_image_is_the_same_in_a_batch(name: str, last_image: Callable[..., Tensor]) -> None:
    assert (last_image(name, "all") - last_image(name, "all", batch=True)).abs().max() < 1e-3
