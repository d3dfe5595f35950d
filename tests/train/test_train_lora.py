"""LoRA training: only the factors change, what is written is kohya's file, and runs resume exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from safetensors import safe_open

import ldm_lite
from ldm_lite import generate
from ldm_lite.checkpoint.lora import merge_lora, open_lora
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.diffusion.guidance import classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.image import grid, to_pil
from ldm_lite.train import loop
from ldm_lite.train.__main__ import train
from ldm_lite.train.lora import LowRank
from tests.train.test_train import folder, load_options, losses, options  # noqa: F401 (a fixture)

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "lora.npz"))


@pytest.fixture(autouse=True)
def _log_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECK_EVERY", 1)


def test_only_the_factors_have_gradients(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    x, context, _ = toy.unet_inputs(pipe.family.unet)
    before = pipe.unet(x, toy.T, context)
    lora = LowRank({"unet": pipe.unet}, rank=2, alpha=1.0)
    assert torch.equal(pipe.unet(x, toy.T, context), before), "a new LoRA changes nothing"
    for _ in range(2):  # in the first step only the ups have one, as they are zero
        pipe.unet(x, toy.T, context).square().mean().backward()
        with torch.no_grad():
            for parameter in lora.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    assert all(parameter.grad.abs().sum() > 0 for parameter in lora.parameters())
    assert all(parameter.grad is None for parameter in pipe.unet.parameters())


def test_the_file_is_kohyas_and_gives_the_same_pictures(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    small_path: Path,
) -> None:
    extra = {"lora_rank": 4, "lora_alpha": 3.0, "lora_text": True, "save_every": 9, "lr": 1e-2}
    path = train(options(folder, tmp_path, **extra), load_options(small_path))
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        about = file.metadata()
    convolutions = ("resnets", "downsamplers", "upsamplers")  # kohya's own of the goldens has them too
    wanted = json.loads(str(GOLDEN["shapes"])) | {key: [] for key in json.loads(str(GOLDEN["alphas"]))}
    wanted = {k: v for k, v in wanted.items() if not any(c in k for c in convolutions)}
    assert shapes == wanted
    assert about["ss_network_dim"] == "4"
    assert about["ss_network_alpha"] == "3"
    assert about["ss_base_model_version"] == "sd_v1"
    assert about["step"] == "4"

    pipe = ldm_lite.load(small_path, device="cpu")
    before = pipe.unet.state_dict()["middle_block.1.transformer_blocks.0.attn1.to_q.weight"].clone()
    merge_lora({"unet": pipe.unet, "text_encoder": pipe.text_encoder}, [(open_lora(path), 1.0)])
    assert not torch.equal(before, pipe.unet.state_dict()["middle_block.1.transformer_blocks.0.attn1.to_q.weight"])
    noise = generate.SeededNoise(range(4), pipe.latent_shape(64, 64))()
    cond, uncond = (encode_prompts(pipe, [prompt] * 4) for prompt in ("picture 1", ""))
    plan = make_plan("dpmpp_2m", pipe.schedule, 20)
    latents = generate.denoise(pipe, noise, classifier_free(cond, uncond, pipe.family.scale), plan)
    ours = grid([to_pil(pixels) for pixels in generate.decode(pipe, latents)], columns=4)
    sheet = Image.open(tmp_path / "samples-0000004.png")  # from float32 averages; the file is float16
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(sheet, dtype=int)).mean() < 0.5


def test_a_resumed_run_has_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    small_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    extra = {"lora_rank": 2, "lora_text": True, "checkpointing": True, "steps": 3, "save_every": 9}
    train(options(folder, whole, **extra), load_options(small_path))
    for i in range(3):  # minutes 0: one step at a time
        train(options(folder, parts, minutes=0.0, resume=i > 0, **extra), load_options(small_path))
    assert losses(parts) == losses(whole)
    assert len(losses(whole)) == 3
    with pytest.raises(ValueError, match="is not the state of this run"):
        train(options(folder, parts, resume=True, **{**extra, "lora_rank": 3}), load_options(small_path))


def test_the_loss_falls(tmp_path: Path, folder: Path, small_path: Path) -> None:  # noqa: F811
    extra = {"steps": 25, "batch": 6, "save_every": 100, "lora_rank": 8, "lr": 3e-2}
    train(options(folder, tmp_path, **extra), load_options(small_path))
    got = losses(tmp_path)
    assert np.mean(got[-8:]) < 0.9 * np.mean(got[:5])


def test_mistakes(tmp_path: Path, folder: Path, small_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="got lora_rank 0, wanted 1 to 4096"):
        train(options(folder, tmp_path / "a", lora_rank=0), load_options(small_path))
    with pytest.raises(ValueError, match="a LoRA is of the diffusion stage of a checkpoint"):
        train(options(folder, tmp_path / "b", lora_rank=2, stage="autoencoder"), load_options(small_path))
