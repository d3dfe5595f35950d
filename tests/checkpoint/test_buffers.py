"""Noise schedules and scale factors in files: rounded, another's, or nonsense; and weights that are no numbers."""

from collections.abc import Mapping
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
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas
from ldm_lite.formats.buffers import scaled, stored_schedule
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import Preserving

SD = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (*FP8, torch.bfloat16, torch.float16, torch.float32)
ABOUT = random_checkpoint.metadata(SMALL)


def file(tensors: Mapping[str, Tensor]) -> Tensors:
    return Tensors(Path("a.ckpt"), {key: tuple(value.shape) for key, value in tensors.items()}, tensors.__getitem__)


def buffers(betas: np.ndarray) -> dict[str, Tensor]:
    return {"betas": torch.from_numpy(betas), "alphas_cumprod": torch.from_numpy(np.cumprod(1 - betas))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_family_s_schedule_is_known_however_it_is_rounded(dtype: torch.dtype) -> None:
    """As cast at once, as cast from float32 or float16, and as cast back."""
    for noise in {family.noise for family in FAMILY_ROWS.values() if isinstance(family.noise, Preserving)}:
        known = NoiseSchedule.from_betas(noise.betas, "eps")
        for first in (torch.float64, torch.float32, torch.float16):
            for last in (dtype, torch.float32):
                rounded = {k: v.to(first).to(dtype).to(last) for k, v in buffers(noise.betas).items()}
                assert stored_schedule(file(rounded), known) is None, (noise, first, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_another_schedule_is_used(dtype: torch.dtype) -> None:
    betas = np.linspace(1e-4, 2e-2, 1000)
    for names in (("betas",), ("alphas_cumprod",), ("betas", "alphas_cumprod")):
        if dtype != torch.float32 and names == ("alphas_cumprod",):
            continue  # many of its values are equal
        stored = {name: buffers(betas)[name].to(dtype) for name in names}
        alpha_bar = stored_schedule(file(stored), SD)
        assert alpha_bar is not None
        np.testing.assert_allclose(np.log(alpha_bar), np.log(np.cumprod(1 - betas)), rtol=5e-3, atol=1e-3)
    zero = {"betas": buffers(SD.betas)["betas"], "alphas_cumprod": torch.from_numpy(SD.alpha_bar.copy())}
    zero["alphas_cumprod"] = torch.from_numpy(replace(SD, prediction="v").zero_terminal_snr().alpha_bar)
    assert stored_schedule(file(zero), SD)[-1] == 0  # which the original samples with


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"betas": torch.linspace(1e-4, 2e-2, 1000).to(torch.float8_e4m3fn)}, "too coarse to be used"),
        ({"betas": torch.linspace(1e-4, 2e-2, 1000).to(torch.float8_e5m2)}, "too coarse to be used"),
        ({"betas": torch.zeros(1000)}, "too coarse"),
        ({"betas": torch.full((1000,), float("nan"))}, "not a noise schedule"),
        ({"betas": torch.full((1000,), float("inf"))}, "too coarse|not a noise schedule"),
        ({"betas": -torch.linspace(1e-4, 2e-2, 1000)}, "not a noise schedule"),
        ({"betas": torch.linspace(1e-4, 1.2, 1000)}, "not a noise schedule"),
        ({"betas": torch.linspace(0, 2e-2, 1000)}, "not a noise schedule"),
        ({"betas": torch.linspace(1e-4, 2e-2, 999)}, r"have the shape \(999,\), expected \(1000,\)"),
        ({"betas": torch.tensor(0.1)}, r"have the shape \(\), expected \(1000,\)"),
        ({"betas": torch.arange(1000)}, "betas is stored as int64"),
        ({"betas": torch.linspace(1e-4, 2e-2, 1000).to(torch.complex64)}, "betas is stored as complex64"),
        ({"alphas_cumprod": torch.linspace(0.1, 0.9, 1000)}, "not a noise schedule"),
        ({"alphas_cumprod": torch.linspace(1.5, 0.9, 1000)}, "not a noise schedule"),
        (
            {"betas": torch.linspace(1e-4, 2e-2, 1000), "alphas_cumprod": torch.linspace(0.99, 0.1, 1000)},
            "two different noise schedules",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^a.ckpt: .*({message})") as caught:
        stored_schedule(file(changed), SD)
    assert "\n" not in str(caught.value)


def test_a_rounded_scale_factor_is_the_family_s() -> None:
    for dtype in DTYPES:
        assert scaled(SMALL, file({"scale_factor": torch.tensor(0.18215).to(dtype)})) == SMALL
    assert scaled(SMALL, file({"scale_factor": torch.tensor(0.19)})).scale_factor == pytest.approx(0.19)
    churches = FAMILY_ROWS["ldm_lsun_churches256"]
    assert scaled(churches, file({"scale_factor": torch.tensor(0.22).half()})).scale_factor == pytest.approx(0.22, 1e-3)
    for dtype in FP8:
        with pytest.raises(ValueError, match="too coarse to be used"):
            scaled(churches, file({"scale_factor": torch.tensor(0.22).to(dtype)}))


@pytest.mark.parametrize("value", [-1.0, 0.0, float("inf"), float("nan"), [0.1, 0.2], 3, True])
def test_an_odd_scale_factor_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^a.ckpt: (its )?scale_factor (cannot be|is stored as)"):
        scaled(SMALL, file({"scale_factor": torch.tensor(value)}))


def test_odd_metadata_of_a_known_family_are_refused(tmp_path: Path, small_path: Path) -> None:
    """In the file, and given; a family that matches uses them too."""
    for name, value in (("scale_factor", "-1"), ("scale_factor", "inf"), ("beta_end", "nan"), ("trained_betas", "[1]")):
        with pytest.raises(ValueError, match=f"not describe a model: its {name.replace('beta_end', 'beta_start')} "):
            ldm_lite.load(small_path, device="cpu", metadata={name: value})
    save_file(load_file(small_path), tmp_path / "bad", metadata={**ABOUT, "scale_factor": "0"})
    with pytest.raises(ValueError, match=r"its scale_factor cannot be 0.0: expected more than 0"):
        ldm_lite.load(tmp_path / "bad", device="cpu")


NO_WEIGHTS = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.uint16]
if hasattr(torch, "float8_e8m0fnu"):  # which torch 2.6 does not know
    NO_WEIGHTS.append(torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", NO_WEIGHTS)
def test_weights_that_are_no_floating_point_numbers_are_refused(
    tmp_path: Path, small_path: Path, dtype: torch.dtype
) -> None:
    key = "model.diffusion_model.out.2.bias"
    tensors = load_file(small_path)
    tensors[key] = torch.zeros(tensors[key].shape).to(dtype)
    torch.save(tensors, tmp_path / "odd.ckpt")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"odd.ckpt: out.2.bias is stored as {name}, expected floating-point numbers"):
        ldm_lite.load(tmp_path / "odd.ckpt", device="cpu", metadata=ABOUT)


@pytest.mark.parametrize("name", ["scale_weight", "weight_scale"])
def test_scaled_fp8_is_multiplied(small_path: Path, tmp_path: Path, name: str) -> None:
    tensors, key = load_file(small_path), "model.diffusion_model.time_embed.0"
    plain = tensors[f"{key}.weight"]
    tensors |= {f"{key}.weight": (plain / 0.5).to(FP8[0]), f"{key}.{name}": torch.tensor(0.5)}
    if name == "scale_weight":
        tensors["scaled_fp8"] = torch.empty(0, dtype=FP8[0])
    save_file(tensors, tmp_path / "scaled.safetensors", metadata=ABOUT)
    unet = ldm_lite.load(tmp_path / "scaled.safetensors", device="cpu").unet
    assert torch.equal(unet.time_embed[0].weight, tensors[f"{key}.weight"].float() * 0.5)


def test_a_file_in_fp8_has_the_family_s_schedule(
    tmp_path: Path, small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ldm_lite.load(small_path, device="cpu").schedule.alpha_bar
    tensors = {k: v.to(FP8[0]) if v.is_floating_point() else v for k, v in load_file(small_path).items()}
    save_file(tensors, tmp_path / "rounded", metadata=ABOUT)
    assert np.array_equal(ldm_lite.load(tmp_path / "rounded", device="cpu").schedule.alpha_bar, plain)
    assert "noise schedule" not in caplog.text
