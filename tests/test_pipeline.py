"""Loading: the bundled model computes what an independent implementation computed; what the user tells of a model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
from random_checkpoint import SMALL
from safetensors.torch import load_file, save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.zoo.families import FAMILY_ROWS, METADATA_FACTS, apply_user_metadata

DATA = Path(__file__).parent / "data"
GOLDEN = dict(np.load(DATA / "bundled.npz"))  # by diffusers and transformers on these weights, float32


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_text(bundled: Pipeline) -> None:
    prompts = GOLDEN["prompts"].tolist()
    assert relative(bundled.encode_prompt(prompts).context, golden("context")) < 1e-5
    assert relative(bundled.encode_prompt([""] * len(prompts)).context, golden("uncond")) < 1e-5


@pytest.mark.parametrize("t", [981, 501, 1])
def test_unet(bundled: Pipeline, t: int) -> None:
    ours = bundled.unet(golden("noise"), torch.full((2,), t), golden("context"))
    assert relative(ours, golden(f"unet_{t}")) < 1e-5


@pytest.mark.parametrize("run", ["ddim_20_2.5", "ddim_50_5.0"])
def test_whole_runs(bundled: Pipeline, run: str) -> None:
    sampler, steps, scale = run.split("_")
    plan = bundled.plan(sampler, int(steps))
    latents = bundled.denoise(golden("noise"), golden("context"), golden("uncond"), plan, float(scale))
    assert relative(latents, golden(run)) < 1e-4


def test_autoencoder(bundled: Pipeline) -> None:
    pixels = bundled.vae.decode(golden("ddim_20_2.5") / bundled.family.scale_factor)
    assert relative(pixels, golden("pixels")) < 1e-5
    mean, deviation = bundled.vae.encode(golden("image"))
    assert relative(torch.cat([mean, 2 * deviation.log()], dim=1), golden("moments")) < 1e-5
    with pytest.raises(ValueError, match=r"got latents of shape .*, expected \(B, 16, h, w\)"):
        bundled.decode(torch.zeros(1, 3, 8, 8))


def test_only_pixels_of_whole_latents_are_encoded(bundled: Pipeline) -> None:
    for shape in ((1, 4, 16, 16), (1, 1, 16, 16), (1, 3, 17, 16), (1, 3, 16, 12)):
        with pytest.raises(ValueError, match=r"expected \(B, 3, H, W\) with H and W multiples of 8") as error:
            bundled.encode_pixels(torch.zeros(shape))
        assert str(shape) in str(error.value)


def test_the_description_says_what_was_loaded(bundled: Pipeline) -> None:
    for word in ("emoji.safetensors", "v prediction", "main weights", "20 M parameters", "fp32 on cpu"):
        assert word in bundled.description


def test_networks_are_ready_for_inference_and_for_training(bundled: Pipeline) -> None:
    assert not any(p.requires_grad for network in bundled.networks.values() for p in network.parameters())
    assert not bundled.unet.training
    bundled.unet.requires_grad_(True)
    try:
        out = bundled.unet(golden("noise"), torch.full((2,), 500), golden("context"))
        out.square().mean().backward()
        assert all(p.grad is not None for p in bundled.unet.parameters())
    finally:
        bundled.unet.zero_grad()
        bundled.unet.requires_grad_(False)


# ---- families -------------------------------------------------------------------------------------------------------


def test_prediction_comes_from_argument_then_metadata_then_family(tmp_path: Path, small_path: Path) -> None:
    about = random_checkpoint.metadata(SMALL)
    assert ldm_lite.load(small_path, device="cpu").schedule.prediction == "eps"
    assert ldm_lite.load(small_path, device="cpu", prediction="v").schedule.prediction == "v"
    save_file(
        load_file(small_path), tmp_path / "v", metadata={**about, "modelspec.prediction_type": "v", "prediction": "v"}
    )
    assert ldm_lite.load(tmp_path / "v", device="cpu").schedule.prediction == "v"
    assert ldm_lite.load(tmp_path / "v", device="cpu", prediction="eps").schedule.prediction == "eps"
    with pytest.raises(ValueError, match="got `prediction` 'w', expected one of eps, v, x0"):
        ldm_lite.load(small_path, device="cpu", prediction="w")


def test_what_does_not_apply_to_a_model_is_refused(small_path: Path, flow_path: Path) -> None:
    """A rectified flow has one prediction and no SNR; metadata that fit nothing were ignored."""
    uses = "which .* does not use: leave it out"
    for options, message in (
        ({"prediction": "v"}, "is a rectified flow, which has one prediction: leave out `prediction`"),
        ({"zero_snr": True}, "is a rectified flow, which has no SNR to zero: leave out `zero_snr`"),
        ({"metadata": {"prediction": "v"}}, f"got `metadata` prediction, {uses}"),
        ({"metadata": {"beta_end": "0.02"}}, f"got `metadata` beta_end, {uses}"),
        ({"metadata": {"family": "sd1"}}, "got `metadata` family=sd1, whose networks differ from this file's"),
    ):
        with pytest.raises(ValueError, match=message):
            ldm_lite.load(flow_path, device="cpu", **options)
    for options, message in (
        ({"metadata": {"family": "flux_dev"}}, "the metadata name the family 'flux_dev', but this is a UNet"),
        ({"metadata": {"text_2_num_heads": "2"}}, f"got `metadata` text_2_num_heads, {uses}"),
        ({"t5_vocab": small_path}, "got `t5_vocab` .*, but small SD1 has no T5 here: leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            ldm_lite.load(small_path, device="cpu", **options)


def test_a_family_that_fits_nothing_is_refused() -> None:
    """Of networks that are known, and what the user tells of them is not the row's."""
    sd1, lcm, told = FAMILY_ROWS["sd1"], {"family": "lcm"}, {"resolution": "768", "steps": "8"}
    with pytest.raises(ValueError, match="got `metadata` family=lcm, whose networks differ from this file's"):
        apply_user_metadata(sd1, sd1, lcm)
    assert apply_user_metadata(sd1, sd1, {"family": "sd1"}) == sd1
    assert apply_user_metadata(sd1, sd1, told) == replace(sd1, resolution=768, steps=8)


def test_facts_of_an_unknown_model_are_the_same_from_the_user_and_from_its_file(
    tmp_path: Path, small_path: Path
) -> None:
    weights = load_file(small_path)
    save_file(weights, tmp_path / "bare.safetensors")
    told = random_checkpoint.metadata(SMALL)
    told.pop("family", None)  # which would supply what is missing
    save_file(weights, tmp_path / "told.safetensors", {f"ldm_lite.{name}": text for name, text in told.items()})
    by_file = ldm_lite.load(tmp_path / "told.safetensors", device="cpu").family
    assert ldm_lite.load(tmp_path / "bare.safetensors", device="cpu", metadata=told).family == by_file
    required = {fact.name: told[fact.name] for fact in METADATA_FACTS if fact.required}
    assert ldm_lite.load(tmp_path / "bare.safetensors", device="cpu", metadata=required).family.resolution == 64
    for name in required:
        fewer = {key: text for key, text in required.items() if key != name}
        with pytest.raises(ValueError, match=f"must give {name}$"):
            ldm_lite.load(tmp_path / "bare.safetensors", device="cpu", metadata=fewer)


def test_metadata_as_an_argument(tmp_path: Path, small_path: Path) -> None:
    save_file(load_file(small_path), tmp_path / "bare")
    pipe = ldm_lite.load(tmp_path / "bare", device="cpu", metadata=random_checkpoint.metadata(SMALL))
    assert pipe.family == replace(SMALL, title="small SD1")
    wrong = {**random_checkpoint.metadata(SMALL), "unet_num_heads": "four"}
    with pytest.raises(ValueError, match="the metadata does not describe a model"):
        ldm_lite.load(tmp_path / "bare", device="cpu", metadata=wrong)
    for name, value in (
        ("unet_num_heads", 0),
        ("unet_num_heads", 7),
        ("text_num_heads", 0),
        ("text_activation", "x"),
        ("scale_factor", "nan"),
        ("beta_start", -1),
        ("resolution", 7),
        ("guidance", "inf"),
    ):
        wrong = {**random_checkpoint.metadata(SMALL), name: str(value)}
        with pytest.raises(ValueError, match=f"not describe a model: its {name} cannot be .*: expected "):
            ldm_lite.load(tmp_path / "bare", device="cpu", metadata=wrong)


def test_the_file_s_own_noise_schedule_is_used_and_said(
    tmp_path: Path, small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(small_path)
    plain = ldm_lite.load(small_path, device="cpu").schedule.alpha_bar
    tensors["betas"] = tensors["betas"].half()
    save_file(tensors, tmp_path / "rounded", metadata=random_checkpoint.metadata(SMALL))
    assert np.array_equal(ldm_lite.load(tmp_path / "rounded", device="cpu").schedule.alpha_bar, plain)
    tensors["betas"] = torch.linspace(1e-4, 2e-2, 1000)
    save_file(tensors, tmp_path / "other", metadata=random_checkpoint.metadata(SMALL))
    alpha_bar = ldm_lite.load(tmp_path / "other", device="cpu").schedule.alpha_bar
    assert np.allclose(alpha_bar, np.cumprod(1 - np.linspace(1e-4, 2e-2, 1000)), rtol=1e-5)
    assert "other: using the noise schedule in the file" in caplog.text
    tensors["betas"][-1] = 1.0
    save_file(tensors, tmp_path / "zero", metadata=random_checkpoint.metadata(SMALL))
    with pytest.raises(ValueError, match="eps prediction is undefined at zero terminal SNR"):
        ldm_lite.load(tmp_path / "zero", device="cpu")


def test_zero_terminal_snr(tmp_path: Path, small_path: Path) -> None:
    about = {**random_checkpoint.metadata(SMALL), "prediction": "v"}
    save_file(load_file(small_path), tmp_path / "v", metadata=about)
    assert ldm_lite.load(tmp_path / "v", device="cpu").schedule.alpha_bar[-1] > 0
    assert ldm_lite.load(tmp_path / "v", device="cpu", zero_snr=True).schedule.alpha_bar[-1] == 0
    save_file({**load_file(small_path), "ztsnr": torch.zeros(0)}, tmp_path / "marked", metadata=about)
    assert ldm_lite.load(tmp_path / "marked", device="cpu").schedule.alpha_bar[-1] == 0
    with pytest.raises(ValueError, match="eps prediction is undefined at zero terminal SNR"):
        ldm_lite.load(small_path, device="cpu", zero_snr=True)


def test_ignored_tensors_are_reported_once(tmp_path: Path, small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "mystery.weight": torch.zeros(1),
        "loss.logvar": torch.zeros(1),
        "cond_stage_model.logit_scale": torch.zeros(1),
    }
    save_file({**load_file(small_path), **extra}, tmp_path / "extra", metadata=random_checkpoint.metadata(SMALL))
    ldm_lite.load(tmp_path / "extra", device="cpu")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == ["extra: ignored 1 unknown tensors: mystery.weight"]


def test_device_and_dtype() -> None:
    pipe = ldm_lite.load(device="cpu", dtype="bf16")
    assert (pipe.device.type, pipe.dtype) == ("cpu", torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for network in pipe.networks.values() for p in network.parameters())
    with pytest.raises(ValueError, match=r"unknown dtype '(fp)+f?: expected one of auto"):
        ldm_lite.load(dtype="fp" * 200)
    with pytest.raises(ValueError, match="unknown dtype 'int3': expected one of auto, fp32, fp16, bf16"):
        ldm_lite.load(dtype="int3")
    for name in ("nonsense", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}'"):
            ldm_lite.load(device=name)
