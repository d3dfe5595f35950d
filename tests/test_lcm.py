"""Latent Consistency Models: a UNet that reads its guidance scale, by the files in which it is published."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from diffusers_files import GOLDEN, shapes_of, weights_of
from PIL import Image
from random_checkpoint import LCM, metadata
from released import UNETS
from runs import unet_calls
from safetensors.torch import save_file
from toy import NEGATIVE, NOISE, PROMPT

import ldm_lite
from ldm_lite import Pipeline, generate, txt2img
from ldm_lite.adapters.lora import file_names
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.conditioning.prompts import guided
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.models.unet import LDMUNet
from ldm_lite.train import __main__ as train
from ldm_lite.zoo.families import FAMILY_ROWS

Load = Callable[..., Pipeline]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the networks of an LCM in miniature, as diffusers writes them."""
    path = tmp_path_factory.mktemp("lcm")
    for name in ("unet", "vae", "text_encoder"):
        save_file(weights_of(f"lcm.{name}"), path / f"{name}.safetensors", metadata(LCM))
    return path


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    parts = {name: folder / f"{name}.safetensors" for name in ("vae", "text_encoder")}
    return ldm_lite.load(folder / "unet.safetensors", **parts, device="cpu")


def run(pipe: Pipeline, steps: int, scale: float) -> torch.Tensor:
    cond, uncond = pipe.encode_prompt(PROMPT), pipe.encode_prompt(NEGATIVE)
    draw = pipe.noise_source(toy.LCM_SEED)
    return pipe.denoise(NOISE, cond, uncond, pipe.plan(steps=steps), scale, draw=draw)


@pytest.mark.parametrize(("steps", "scale"), toy.LCM_RUNS)
def test_a_run_ends_as_that_of_diffusers(pipe: Pipeline, steps: int, scale: float) -> None:
    wanted = GOLDEN[f"lcm.{steps}.{scale:g}"]
    assert toy.relative_error(run(pipe, steps, scale), wanted) < 1e-5
    assert toy.relative_error(run(pipe, steps, scale + 2), wanted) > 1e-4


def test_there_is_one_branch_which_is_told_the_scale(pipe: Pipeline) -> None:
    with unet_calls(pipe) as calls:
        pipe.txt2img(["a", "b"], negative_prompt="c", batch_size=2, steps=1, scale=8.0)
        pipe.txt2img("a", negative_prompt="c", steps=1, scale=3.0)
    first, second = (call.inputs["y"] for call in calls)
    assert first.shape == (2, 256)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[:1], second)


def test_the_scale_stands_behind_the_vector_of_sdxl(pipe: Pipeline) -> None:
    sdxl = replace(pipe, family=replace(pipe.family, unet=replace(pipe.family.unet, vector_dim=24)))
    cond, vector = pipe.encode_prompt(["a", "b"]), toy.normal(3, 2, 24)
    alone, both = (
        guided(model, Conditioning(cond.context, y), None, 8.0).branches[0].conditioning["y"]
        for model, y in ((pipe, None), (sdxl, vector))
    )
    assert torch.equal(both, torch.cat([vector, alone], dim=1))


def test_the_defaults_are_those_of_the_paper() -> None:
    for name in ("lcm", "lcm_sdxl"):
        row = FAMILY_ROWS[name]
        schedule = NoiseSchedule.from_betas(row.noise.betas, row.prediction)
        assert named_plan(row.sampler, schedule, row.steps).t.tolist() == [999, 759, 499, 259]
        assert row.scale == 8


def test_without_a_scale_nothing_is_run(pipe: Pipeline) -> None:
    plan = pipe.plan("ddim", 2)
    branches = guided(replace(pipe, family=FAMILY_ROWS["sd1"]), Conditioning(torch.zeros(1, 77, 64)), None, 1.0)
    with pytest.raises(ValueError, match=r"y: got none, expected one of shape \(1, 256\)"):
        generate.denoise(pipe, NOISE, branches, plan)


def test_the_command_takes_the_unet_beside_a_checkpoint(
    folder: Path, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--scale is the network's; a negative prompt is of no use, which is said once."""
    common = ["--ckpt", str(small_path), "--unet", str(folder / "unet.safetensors"), "--device", "cpu", "--skip_grid"]
    pictures = {}
    for name, arguments in (
        ("plain", []),
        ("scale", ["--scale", "1"]),
        ("negative", ["--negative-prompt", NEGATIVE, "--n_iter", "2"]),
    ):
        assert txt2img.main([PROMPT, "--out", str(tmp_path / name), *common, *arguments]) == 0
        paths = sorted((tmp_path / name).rglob("*.png"))
        pictures[name] = Image.open(paths[0])
        said = capsys.readouterr().err
        assert said.count("the negative prompt is not used") == (name == "negative")
    about = pictures["plain"].info["parameters"]
    assert "Steps: 4, Sampler: LCM (ldm_lite), Schedule type: lcm, CFG scale: 8.0" in about
    assert pictures["negative"].tobytes() == pictures["plain"].tobytes() != pictures["scale"].tobytes()


def test_it_is_not_trained_whole(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a")
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--steps", "1", "--device", "cpu"]
    files = {"--ckpt": "unet", "--vae": "vae", "--text-encoder": "text_encoder"}
    for flag, name in files.items():
        arguments += [flag, str(folder / f"{name}.safetensors")]
    assert train.main(arguments) == 2
    said = capsys.readouterr().err
    assert "small LCM: is distilled: train a LoRA of it, or the model it was distilled from" in said


# The layers that LCM-LoRA changes: those of the released files, and of diffusers' training script for them.
LORA_LAYERS = r"to_[qkv]|to_out\.0|proj_in|proj_out|ff\.net\.0\.proj|ff\.net\.2|conv1|conv2|conv_shortcut"
LORA_LAYERS += r"|downsamplers\.0\.conv|upsamplers\.0\.conv|time_emb_proj"


@pytest.mark.parametrize("name", ["sd1", "sdxl_base"])
def test_lcm_lora_finds_all_its_modules(name: str) -> None:
    """In kohya's spelling, which the released files have, and in PEFT's, of diffusers' own names."""
    with on_meta():
        names = file_names("unet", LDMUNet(UNETS[name]))
    known = {spelling for spellings in names.values() for spelling in spellings}
    pattern = re.compile(rf"\.({LORA_LAYERS})\.weight$")
    modules = [key.removesuffix(".weight") for key in shapes_of(f"unet_{name}") if pattern.search(key)]
    assert len(modules) == {"sd1": 278, "sdxl_base": 788}[name]
    for module in modules:
        for spelling in ("lora_unet_" + module.replace(".", "_"), "unet_" + module.replace(".", "_")):
            assert spelling in known


def test_ready_embeddings_are_told_the_scale_too(pipe: Pipeline) -> None:
    options = {"height": 64, "width": 64, "output": "tensor"}
    [ready] = pipe.txt2img(cond=pipe.encode_prompt(PROMPT).context, **options)
    [encoded] = pipe.txt2img(PROMPT, **options)
    assert torch.equal(ready, encoded)
