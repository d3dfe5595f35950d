"""Weights of a LoRA by network and block: their syntax, and what they do, against the extension's rules."""

from pathlib import Path

import pytest
import torch
from random_checkpoint import random_tensor
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters.lora import file_names, merge_lora, targets
from ldm_lite.adapters.strength import LISTED, PRESETS, Strength, _blocks, parse, strength_of
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.families.sd1 import SD1
from ldm_lite.families.sdxl import SDXL
from ldm_lite.models.unet import LDMUNet
from ldm_lite.txt2img import main

# BLOCKID17, 26, 12 and 20 of the extension
LISTS = {
    17: "BASE IN01 IN02 IN04 IN05 IN07 IN08 M00 OUT03 OUT04 OUT05 OUT06 OUT07 OUT08 OUT09 OUT10 OUT11",
    26: "BASE IN00 IN01 IN02 IN03 IN04 IN05 IN06 IN07 IN08 IN09 IN10 IN11 M00 OUT00 OUT01 OUT02 OUT03 OUT04 OUT05 "
    "OUT06 OUT07 OUT08 OUT09 OUT10 OUT11",
    12: "BASE IN04 IN05 IN07 IN08 M00 OUT00 OUT01 OUT02 OUT03 OUT04 OUT05",
    20: "BASE IN00 IN01 IN02 IN03 IN04 IN05 IN06 IN07 IN08 M00 OUT00 OUT01 OUT02 OUT03 OUT04 OUT05 OUT06 OUT07 OUT08",
}


@pytest.fixture
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


@pytest.fixture
def file(tmp_path: Path, pipe: Pipeline) -> Path:
    """A LoRA of every matrix of the UNet and of the text encoder."""
    tensors = {}
    for role in ("unet", "text_encoder"):
        names = file_names(role, pipe.networks[role])
        for module, value in targets(pipe.networks[role]).items():
            weight = value.get("weight")
            if weight is not None and len(weight.shape) > 1:
                tensors[f"{names[module][0]}.diff"] = 0.01 * random_tensor(module, tuple(weight.shape))
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    ("text", "file", "strength"),
    [
        ("a.safetensors", "a.safetensors", Strength()),
        ("a.safetensors:0.5", "a.safetensors", Strength(0.5, 0.5)),
        ("a.safetensors:-1", "a.safetensors", Strength(-1, -1)),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", Strength()),
        (r"C:\loras\a.safetensors:0.8", r"C:\loras\a.safetensors", Strength(0.8, 0.8)),
        ("a:0.5:0.75", "a", Strength(0.5, 0.75)),
        ("a:te=0.5", "a", Strength(0.5, 0.5)),
        ("a:unet=0.5", "a", Strength(1, 0.5)),
        ("a:0.3:te=0:unet=.5", "a", Strength(0, 0.5)),
        ("a:lbw=OUTD:0.5", "a", Strength(0.5, 0.5, "OUTD")),
        ("a:1:lbw=1,0,.5,-1e-1,0", "a", Strength(1, 1, (1, 0, 0.5, -0.1, 0))),
    ],
)
def test_a_file_and_its_weights(text: str, file: str, strength: Strength) -> None:
    assert parse(text) == (file, strength)
    assert strength_of(str(strength).split(":")) == strength


def test_the_extensions_older_syntax_is_read_in_tags() -> None:
    assert strength_of(["1", "INALL"]) == Strength(1, 1, "INALL")
    assert strength_of(["1", "0.5", "1,0"]) == Strength(1, 0.5, (1, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:lbw=SOME", "a: got lbw=SOME, expected NONE, ALL, INS, IND, INALL, MIDD, OUTD, OUTS, OUTALL, or a number"),
        ("a:lbw=1,R,0", "a: got the weight 'R', expected a number"),
        ("a:te=much", "a: got the weight 'much', expected a number"),
        ("a:1:start=10", "a: start= is not supported, expected FILE"),
        ("a:1:2:3", "a: got the weights 1, 2, 3, expected two at most"),
        ("a:1:te=nan", "a: got the weight 'nan', expected a number"),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_the_lists_are_the_extensions() -> None:
    """For the released UNets, from their own blocks."""
    for spec, counts in ((SD1.unet, (26, 17)), (SDXL.unet, (20, 12))):
        with on_meta():
            assert _blocks(LDMUNet(spec)) == tuple(LISTS[count].split() for count in counts)
    assert list(LISTED) == LISTS[17].split()
    assert PRESETS["MIDD"] == "1,0,0,0,1,1,1,1,1,1,1,1,0,0,0,0,0".replace(",", "")


def extensions_ratio(key: str, ratios: dict[str, float]) -> float:
    """Ratiodealer's rule: by the original's name of a UNet's module; BASE for text encoders, 1 for the rest."""
    for side, name in (("input_blocks", "IN"), ("output_blocks", "OUT")):
        for i in range(12):
            if f"diffusion_model_{side}_{i}_" in key:
                return ratios[f"{name}{i:02}"]
    return ratios["M00"] if "diffusion_model_middle_block_" in key else 1.0


@pytest.mark.parametrize(
    "text", ["0.5:2", "te=0", "0.5:lbw=2,0.5,3,0,-1", "1:0.5:lbw=0,1,2,3,4,5,6,7,8,9", "lbw=OUTS", "lbw=NONE"]
)
def test_each_block_changes_by_its_weight(pipe: Pipeline, file: Path, text: str) -> None:
    """The small UNet has 10 blocks with BASE, of which attention is in IN01, M00, OUT02 and OUT03."""
    before = {role: {k: v.clone() for k, v in pipe.networks[role].state_dict().items()} for role in pipe.networks}
    pipe.lora(ldm_lite.open_lora(file), 1.0).remove()
    every = ["BASE", *(f"IN{i:02}" for i in range(4)), "M00", *(f"OUT{i:02}" for i in range(4))]
    strength = strength_of(text.split(":"))
    if isinstance(strength.blocks, str):
        preset = dict(zip(LISTS[17].split(), map(float, PRESETS[strength.blocks]), strict=True))
        ratios = {name: preset.get(name, 0.0) for name in every}
    elif strength.blocks is None:
        ratios = dict.fromkeys(every, 1.0)
    else:
        names = every if len(strength.blocks) == 10 else ["BASE", "IN01", "M00", "OUT02", "OUT03"]
        ratios = dict.fromkeys(every, 0.0) | dict(zip(names, strength.blocks, strict=True))
    changes = {role: {} for role in ("unet", "text_encoder")}
    with pipe.lora(file):
        for role, change in changes.items():
            change |= {key: value - before[role][key] for key, value in pipe.networks[role].state_dict().items()}
    with pipe.lora(file, text):
        for role, change in changes.items():
            for key, value in pipe.networks[role].state_dict().items():
                ratio = (
                    ratios["BASE"]
                    if role == "text_encoder"
                    else extensions_ratio(f"diffusion_model_{key}".replace(".", "_"), ratios)
                )
                factor = ratio * (strength.text if role == "text_encoder" else strength.unet)
                torch.testing.assert_close(value, before[role][key] + factor * change[key], rtol=1e-5, atol=1e-6)
    for role in changes:
        assert all(torch.equal(value, before[role][key]) for key, value in pipe.networks[role].state_dict().items())


def test_another_number_of_blocks_is_one_line(
    small_path: Path, pipe: Pipeline, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pipe.unet.input_blocks[0][0].weight.clone()
    with pytest.raises(ValueError, match=r"got 3 weights of blocks \(lbw\), expected 5 \(BASE, IN01, M00, OUT02"):
        pipe.lora(file, "1:lbw=1,0,1")
    assert torch.equal(pipe.unet.input_blocks[0][0].weight, before)
    common = ["x", "--ckpt", str(small_path), "--device", "cpu", "--steps", "1", "--out", str(tmp_path / "a.png")]
    assert main([*common, "--lora", f"{file}:0.5:lbw=1,1"]) == 2
    assert "a.safetensors: got 2 weights of blocks (lbw), expected 5 (BASE" in capsys.readouterr().err
    assert main([*common, "--H", "64", "--W", "64", "--lora", f"{file}:0.5:lbw=IND"]) == 0
    assert "lbw=IND does not list" in capsys.readouterr().err


def test_networks_without_such_blocks_are_named(file: Path) -> None:
    with pytest.raises(ValueError, match=r"weights of blocks \(lbw\) are for the UNets of Stable"):
        merge_lora({"unet": torch.nn.Linear(1, 1)}, [(ldm_lite.open_lora(file), Strength(blocks="ALL"))])
