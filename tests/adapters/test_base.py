"""A LoRA for another family, whose layers may have the same names and widths, is refused by what its metadata say."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_checkpoint import SMALL
from safetensors.torch import save_file

import ldm_lite
from ldm_lite.adapters.lora import Lora, check_base
from ldm_lite.toolkit import merge_loras
from ldm_lite.zoo.families import FAMILY_ROWS

CALLED = {  # the row -> what trainers (kohya, ai-toolkit, OneTrainer, PEFT) and Stability's standard call it
    "sd1": ("sd_v1", "sd_1.5", "stable-diffusion-v1/lora", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    "sd2": ("sd_v2_v", "stable-diffusion-v2-768-v/lora", "stabilityai/stable-diffusion-2-1"),
    "sdxl_base": ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora", "OnomaAIResearch/Illustrious-xl-v1"),
    "sd3_medium": ("sd3_m", "stable-diffusion-3-medium", "stabilityai/stable-diffusion-3.5-large"),
    "flux_dev": ("flux1", "flux-1-dev/lora", "Flux.1-dev", "black-forest-labs/FLUX.1-Kontext-dev"),
    "chroma": ("chroma", "lodestones/Chroma1-HD"),
    "flux2_klein": ("flux_2_klein_4b", "flux2_klein_4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    "qwen_image": ("qwen_image", "Qwen/Qwen-Image-Edit-2509", "qwen-image"),
    "z_image_turbo": ("zimage", "z_image_turbo", "Tongyi-MAI/Z-Image-Turbo"),
}
KEY = "lora_unet_down_blocks_0_attentions_0_proj_in"


def test_a_base_of_another_family_is_refused_and_the_familys_own_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    for row in CALLED:
        for base, texts in CALLED.items():
            for text in texts:
                lora = Lora("l.safetensors", {}, bases={"ss_base_model_version": text})
                if row == base:
                    check_base(lora, FAMILY_ROWS[row])
                    continue
                with pytest.raises(
                    ValueError, match=r"l\.safetensors: is for .*, as its metadata say \(ss_base_model_"
                ):
                    check_base(lora, FAMILY_ROWS[row])
    assert not caplog.messages


def test_doubt_is_said(caplog: pytest.LogCaptureFixture) -> None:
    check_base(Lora("l", {}, bases={"modelspec.architecture": "lumina-2/lora"}), FAMILY_ROWS["z_image"])
    check_base(Lora("l", {}, names=("qwen-image-style.safetensors",)), FAMILY_ROWS["flux_dev"])
    assert caplog.messages == [
        "l: is for 'lumina-2/lora', as its metadata say (modelspec.architecture): is that this model?",
        "l: by its name it is for Qwen-Image, but this is FLUX.1 [dev]",
    ]
    caplog.clear()
    check_base(Lora("l", {}, bases={"base_model_name_or_path": "/models/base"}), FAMILY_ROWS["flux_dev"])
    check_base(
        Lora("l", {}, names=("qwen-image-style",), bases={"modelspec.architecture": "flux-1"}), FAMILY_ROWS["flux_dev"]
    )
    check_base(Lora("l", {}, bases={"ss_base_model_version": "sd_v1"}), replace(FAMILY_ROWS["ldm_cin256"]))
    assert not caplog.messages


def pair(key: str = KEY) -> dict[str, torch.Tensor]:
    width = SMALL.unet.model_channels
    return {f"{key}.lora_down.weight": torch.ones(1, width, 1, 1), f"{key}.lora_up.weight": torch.ones(width, 1, 1, 1)}


def test_every_way_in_refuses_it_before_weights_change(small_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "style.safetensors"
    save_file(pair(), path, {"modelspec.architecture": "flux-1-dev/lora"})
    message = "is for FLUX"
    with pytest.raises(ValueError, match=message):
        ldm_lite.load(small_path, device="cpu", lora=[path])
    pipe = ldm_lite.load(small_path, device="cpu")
    with pytest.raises(ValueError, match=message):
        pipe.lora(path)
    with pytest.raises(ValueError, match=message):
        merge_loras(pipe, [str(path)])


def test_pefts_configuration_names_the_base(small_path: Path, tmp_path: Path) -> None:
    key = "base_model.model.down_blocks.0.attentions.0.proj_in"
    width = SMALL.unet.model_channels
    weights = {f"{key}.lora_A.weight": torch.ones(1, width, 1, 1), f"{key}.lora_B.weight": torch.ones(width, 1, 1, 1)}
    folder = tmp_path / "unet"
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    for base, fits in (("stable-diffusion-v1-5/stable-diffusion-v1-5", True), ("Qwen/Qwen-Image", False)):
        about = f'{{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "{base}"}}'
        (folder / "adapter_config.json").write_text(about)
        if fits:
            ldm_lite.load(small_path, device="cpu", lora=[folder])
        else:
            with pytest.raises(ValueError, match=r"is for Qwen-Image, as its metadata say \(base_model_name_or_path"):
                ldm_lite.load(small_path, device="cpu", lora=[folder])


def test_a_file_of_mostly_deeper_blocks_is_for_another_model(
    small_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep.safetensors"
    pipe = ldm_lite.load(small_path, device="cpu")
    deeper = pair(KEY.replace("blocks_0", "blocks_7")) | pair(KEY.replace("blocks_0", "blocks_8"))
    save_file(pair() | deeper, path)
    with pytest.raises(ValueError, match=r"is for a model of more blocks: this one lacks lora_unet_down_blocks_[78]"):
        pipe.lora(path)
    save_file(pair() | pair(KEY.replace("blocks_0", "blocks_7")), path)
    with caplog.at_level(logging.WARNING):
        pipe.lora(path).remove()
    assert "1 modules are not in this model and have no effect" in caplog.text
