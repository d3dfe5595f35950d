"""Files that are distilled run by default as their makers say, which names tell, unless anything says otherwise."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_checkpoint import SMALL
from safetensors.torch import save_file

import ldm_lite
from ldm_lite.checkpoint.loading import with_recipe
from ldm_lite.diffusion.names import named_plan
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import FamilyRow

FILES = {  # as they are called on the hub and on Civitai: the row -> file -> (steps, scale, sampler)
    "sdxl_base": {
        "sdxl_lightning_4step_unet.safetensors": (4, 1, "euler_trailing"),
        "sdxl_lightning_8step.safetensors": (8, 1, "euler_trailing"),
        "juggernautXL_v9Rdphoto2Lightning.safetensors": (4, 1, "euler_trailing"),
        "dmd2_sdxl_4step_unet_fp16.bin": (4, 1, "lcm_trailing"),
        "Hyper-SDXL-1step-Unet.safetensors": (1, 1, "ddim_trailing"),
        "dreamshaperXL_v21TurboDPMSDE.safetensors": (4, 1, "euler_a_trailing"),
        "sdxl-flash.safetensors": (7, 3, "dpmpp_sde_trailing"),
        "lcm_merged_xl.safetensors": (4, 1.5, "lcm"),
    },
    "sd1": {"pcm_sd15_normalcfg_8step.safetensors": (8, 7.5, "ddim_trailing"), "my-tcd.ckpt": (4, 1, "tcd")},
    "sd35_large": {"sd3.5_large_turbo.safetensors": (4, 1, "euler")},
    "chroma": {"Chroma1-HD-Flash.safetensors": (8, 1, "heun")},
    "flux2_klein": {"flux-2-klein-base-4b.safetensors": (50, 4, "euler")},
    "flux_dev": {"flux1-schnell-merge.safetensors": (4, 1, "euler flow:shift=1")},
    "qwen_image": {"qwen_image_lightning_8steps_fp8.safetensors": (8, 1, "euler flow:shift=3")},
}
LORAS = {
    "sdxl_base": {
        "sdxl_lightning_2step_lora.safetensors": (2, 1, "euler_trailing"),
        "Hyper-SDXL-8steps-CFG-lora.safetensors": (8, 5, "ddim_trailing"),
        "lcm-lora-sdxl/pytorch_lora_weights.safetensors": (4, 1.5, "lcm"),
        "TCD-SDXL-LoRA": (4, 1, "tcd"),
    },
    "flux_dev": {
        "Hyper-FLUX.1-dev-16steps-lora.safetensors": (16, 3.5, "euler"),
        "FLUX.1-Turbo-Alpha": (8, 3.5, "euler"),
    },
    "qwen_image": {"Qwen-Image-Lightning-4steps-V1.0.safetensors": (4, 1, "euler flow:shift=3")},
}
PLAIN = (  # names of files that are not distilled, whose words look alike
    *("sd_xl_base_1.0.safetensors", "hyperrealistic_v3.safetensors", "filmcamera.safetensors", "dmdream.safetensors"),
    *("overpcmix.safetensors", "flashlight.safetensors", "v1-5-pruned-emaonly.safetensors", "realcartoon.ckpt"),
)
PLAIN_LORAS = (*PLAIN, "porsche_911_turbo.safetensors", "lightning_strikes.safetensors", "flash_photo.safetensors")


def settings(family: FamilyRow) -> tuple[int, float, str]:
    return family.steps, family.scale, family.sampler


@pytest.mark.parametrize(("table", "is_lora"), [(FILES, False), (LORAS, True)])
def test_a_distilled_file_runs_as_its_makers_say(
    table: dict[str, dict[str, tuple[int, float, str]]], is_lora: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for row, files in table.items():
        for name, expected in files.items():
            caplog.clear()
            family = with_recipe(FAMILY_ROWS[row], [(name, is_lora)], ())
            assert settings(family) == expected, name
            [line] = caplog.messages
            assert line.startswith(f"{name}: by its name, as ")
            assert f"{expected[0]} step" in line
            assert line.endswith("`steps`, `sampler` and `scale` override that")


def test_words_that_look_alike_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for row in ("sd1", "sd2", "sdxl_base", "flux_dev", "sd3_medium", "qwen_image", "chroma", "z_image"):
        for names, is_lora in ((PLAIN, False), (PLAIN_LORAS, True)):
            for name in names:
                assert with_recipe(FAMILY_ROWS[row], [(name, is_lora)], ()) == FAMILY_ROWS[row], (row, name)
    for row in ("lcm", "lcm_sdxl", "sdxl_turbo", "sd_turbo", "sd35_large_turbo", "chroma_flash", "flux_schnell"):
        name = f"{row}_lightning_turbo_flash_lcm_schnell.safetensors"  # these have their own
        assert with_recipe(FAMILY_ROWS[row], [(name, False)], ()) == FAMILY_ROWS[row]
    assert not caplog.messages


def test_every_sampler_of_a_recipe_has_the_levels_of_its_source() -> None:
    for name in FAMILY_ROWS:
        family = FAMILY_ROWS[name]
        for recipe in family.recipes:
            if recipe.sampler is not None:
                schedule = family.noise.schedule(family.prediction)
                named_plan(recipe.sampler, schedule, recipe.steps or 4)
    row = FAMILY_ROWS["qwen_image"]
    plan = named_plan("euler flow:shift=3", row.noise.schedule(row.prediction), 4)
    assert plan.level[:, 1] == pytest.approx([1, 0.9, 0.75, 0.5])  # Qwen-Image-Lightning, generate_with_diffusers.py
    schedule = FAMILY_ROWS["sdxl_base"].noise.schedule("eps")
    assert named_plan("lcm_trailing", schedule, 4).t.tolist() == [999, 749, 499, 249]  # tianweiy/DMD2


def test_what_is_told_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    names = [("sdxl_lightning_4step.safetensors", False)]
    family = with_recipe(FAMILY_ROWS["sdxl_base"], names, {"sampler"})
    assert settings(family) == (4, 1, FAMILY_ROWS["sdxl_base"].sampler)  # that of a folder's scheduler
    v_pred = [("noobaiXL_vPred10.safetensors", False)]
    assert with_recipe(FAMILY_ROWS["sdxl_base"], v_pred, ()).prediction == "v"
    assert "its name says v prediction, which is used: `prediction` overrides that" in caplog.text
    for told in ({"prediction"}, {"modelspec.prediction_type"}):
        assert with_recipe(FAMILY_ROWS["sdxl_base"], v_pred, told).prediction == "eps"
    v = replace(FAMILY_ROWS["sdxl_base"], prediction="v")
    assert with_recipe(v, v_pred, ()) == v


def test_a_lora_changes_the_defaults_of_the_model_that_it_is_loaded_with(
    small_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, width = "lora_unet_down_blocks_0_attentions_0_proj_in", SMALL.unet.model_channels
    pair = {
        f"{key}.lora_down.weight": torch.zeros(1, width, 1, 1),
        f"{key}.lora_up.weight": torch.zeros(width, 1, 1, 1),
    }
    folder = tmp_path / "lcm-lora-sdv1-5"
    folder.mkdir()
    plain = ldm_lite.load(small_path, device="cpu")
    for path, about in (
        (folder / "pytorch_lora_weights.safetensors", {}),
        (tmp_path / "mine.safetensors", {"ss_output_name": "sd15-lcm"}),
    ):
        save_file(pair, path, about)
        with caplog.at_level(logging.WARNING):
            pipe = ldm_lite.load(small_path, device="cpu", lora=[path])
        assert settings(pipe.family) == (4, 1.5, "lcm")
        assert "as latent-consistency/lcm-lora-sdxl: 4 steps of lcm at scale 1.5" in caplog.text
        [chosen] = pipe.txt2img("a", seed=1, steps=1, sampler="ddim", scale=1, height=64, width=64)
        assert "Steps: 1, Sampler: DDIM (ldm_lite), Schedule type: leading, CFG scale: 1" in str(chosen.info)
        assert settings(plain.family) != settings(pipe.family)
