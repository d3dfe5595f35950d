"""What the configuration files of a diffusers folder say is used, as diffusers uses it (the goldens), or refused."""

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from diffusers_files import DATA, weights_of
from safetensors.torch import save_file
from toy import NEGATIVE, NOISE, PROMPT

import ldm_lite
from ldm_lite.diffusion.names import label, named_plan
from ldm_lite.formats.diffusers_config import CHECKED, CONFIG_KINDS, read_network
from ldm_lite.formats.diffusers_schedulers import CHECKED as SCHEDULERS
from ldm_lite.formats.diffusers_schedulers import OF_ALL, OF_FLOWS, read_scheduler

GOLDEN = np.load(DATA / "configs.npz")
FILES: dict[str, dict[str, Any]] = json.loads(str(GOLDEN["made_with"]))["files"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder with weights alone."""
    folder = tmp_path_factory.mktemp("pipeline")
    for role, stem in (
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
    ):
        (folder / role).mkdir()
        values = {key: value for key, value in weights_of(f"lcm.{role}").items() if "cond_proj" not in key}
        save_file(values, folder / role / f"{stem}.safetensors", {"format": "pt"})
    return folder


def configure(folder: Path, name: str, file: str = "", **changed: object) -> Path:
    """The folder with the configuration of a case, and further settings of one file."""
    files = {**FILES["plain"], **FILES[name]}
    for path, config in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps({**config, **changed} if path == file else config))
    return folder


QUICK = ("zero_snr", "clean", "linear", "lcm", "euler", "networks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in toy.CONFIGS]
)
def test_a_folder_makes_the_image_that_diffusers_makes(
    weights: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With no setting told but the folder's own."""
    pipe = ldm_lite.load(configure(weights, name), device="cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert pipe.family.resolution == 128
    cond = pipe.encode_prompt(PROMPT)
    uncond = pipe.encode_prompt(NEGATIVE, negative=True)
    draw = pipe.noise_source(toy.LCM_SEED, height=64, width=64)
    plan = pipe.plan(pipe.family.sampler, 4)
    latents = pipe.denoise(NOISE, cond, uncond, plan, 5.0, draw=draw)
    assert toy.relative_error(latents, GOLDEN[f"{name}.latents"]) < 5e-5
    [pixels] = pipe.decode(latents, output="tensor")
    assert toy.relative_error(pixels[None, :, ::4, ::4], GOLDEN[f"{name}.pixels"].clip(-1, 1)) < 5e-5


def test_the_cases_differ() -> None:
    plain = GOLDEN["plain.latents"]
    errors = {name: toy.relative_error(GOLDEN[f"{name}.latents"], plain) for name in toy.CONFIGS if name != "plain"}
    assert min(errors.values()) > 1e-3


WRONG: dict[str, dict[str, object]] = {  # values that real configurations have, and that are computed otherwise here
    "unet/config.json": {
        "_class_name": "UNet3DConditionModel",
        "act_fn": "gelu",
        "norm_num_groups": 16,
        "norm_eps": 1e-6,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "mid_block_scale_factor": 1.41421,
        "downsample_padding": 0,
        "class_embed_type": "timestep",
        "center_input_sample": True,
        "attention_head_dim": [1, 4],
        "sample_size": -8,
        "timestep_post_act": "silu",
    },
    "vae/config.json": {
        "_class_name": "AsymmetricAutoencoderKL",
        "act_fn": "relu",
        "norm_num_groups": 16,
        "shift_factor": 0.1159,
        "latents_mean": [0.0, 0.1, 0.2, 0.3],
        "scaling_factor": -1,
    },
    "text_encoder/config.json": {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-12,
        "use_attention_mask": True,
        "num_attention_heads": "4",
        "eos_token_id": 7,
    },
    "tokenizer/tokenizer_config.json": {
        "pad_token": "!",
        "model_max_length": 64,
        "tokenizer_class": "BertTokenizer",
    },
    "scheduler/scheduler_config.json": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 500,
        "beta_schedule": "sigmoid",
        "beta_start": -0.1,
        "trained_betas": [0.1, 0.2],
        "prediction_type": "flow_prediction",
        "thresholding": True,
        "timestep_spacing": "log",
        "timestep_type": "continuous",
        "sigma_max": 700.0,
        "use_flow_sigmas": True,
    },
}


@pytest.mark.parametrize("file", WRONG)
def test_another_value_is_refused_by_name(weights: Path, file: str) -> None:
    for key, value in WRONG[file].items():
        with pytest.raises(ValueError, match=r"expected|not 1000 numbers") as caught:
            ldm_lite.load(configure(weights, "plain", file, **{key: value}), device="cpu")
        said = str(caught.value)
        assert "\n" not in said
        named = str(value) if key in ("_class_name", "beta_schedule") else key
        assert named in said, said


def test_every_value_of_every_table_is_checked() -> None:
    for kind, table in CHECKED.items():
        shapes: dict[str, tuple[int, ...]] = {key: (1,) for key, name in CONFIG_KINDS.items() if name == kind}
        if kind in ("vision", "open_clip_vision", "siglip"):
            shapes["vision_model.embeddings.patch_embedding.weight"] = (1280 if kind == "open_clip_vision" else 1024,)
        if kind in ("vision", "open_clip_vision"):
            shapes["vision_model.embeddings.class_embedding"] = (1024,)
        for key, values in table.items():
            for value in (*values, "another"):
                read = partial(read_network, "n", {key: value}, shapes)
                if value == "another":
                    with pytest.raises(ValueError, match=f"its {key} "):
                        read()
                else:
                    read()


def test_every_value_of_a_scheduler_is_checked() -> None:
    flow = "FlowMatchEulerDiscreteScheduler"
    for name, table in {"DDIMScheduler": OF_ALL, flow: OF_FLOWS, **SCHEDULERS}.items():
        for key, values in table.items():
            roles = ["transformer" if name == flow else "unet"]
            for value in values:
                read_scheduler("s", {"_class_name": name, key: value}, roles)
            with pytest.raises(ValueError, match=f"its {key} "):
                read_scheduler("s", {"_class_name": name, key: "another"}, roles)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shift", 0),
        ("shift", "3"),
        ("shift", True),
        ("shift_terminal", 1.5),
        ("shift_terminal", float("nan")),
        ("base_shift", [1]),
        ("max_image_seq_len", 100),
        ("steps_offset", -1),
        ("steps_offset", 1.5),
        ("use_karras_sigmas", True),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(key: str, value: object) -> None:
    flow = key not in ("steps_offset", "use_karras_sigmas")
    config = {
        "_class_name": "FlowMatchEulerDiscreteScheduler" if flow else "EulerDiscreteScheduler",
        "use_beta_sigmas": not flow,
        "use_dynamic_shifting": key != "shift",
        key: value,
    }
    with pytest.raises(ValueError, match=key):
        read_scheduler("s", config, ["transformer"] if flow else ["unet", "text_encoder_2"])


def test_settings_that_change_no_image_and_unknown_ones_are_not_read(
    weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(weights, "plain", "unet/config.json", mystery="x", dropout=0.1, upcast_attention=True, _private=3)
    ldm_lite.load(weights, device="cpu")
    ldm_lite.load(configure(weights, "plain", "vae/config.json", shift_factor=0.0), device="cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_pipeline_for_another_task_is_named(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"_class_name": "AnimateDiffPipeline", "motion_adapter": ["diffusers", "MotionAdapter"]}
    ldm_lite.load(configure(weights, "plain", "model_index.json", **wanted), device="cpu")
    assert 'is of "AnimateDiffPipeline", which ldm_lite does not know: only its networks are used' in caplog.text


def test_the_default_sampler_is_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name, sampler in (
        ("PNDM", "plms diffusers:offset=1:end=first"),
        ("DPMSolverMultistep", "dpmpp_2m diffusers:timesteps=linspace:multistep=1:curve=karras:unit"),
        ("UniPCMultistep", "unipc diffusers:timesteps=linspace:multistep=1:unit"),
        ("EulerAncestralDiscrete", "euler_a diffusers:timesteps=linspace:whole=0"),
        ("LCM", "lcm"),
    ):
        config = {"_class_name": f"{name}Scheduler", "use_karras_sigmas": "karras" in sampler}
        assert read_scheduler("s", config, [])["sampler"] == sampler
    assert "sampler" not in read_scheduler("s", {"_class_name": "HeunDiscreteScheduler"}, [])
    assert "s: its solver HeunDiscreteScheduler is not read: the sampler is the family's own" in caplog.text


def test_a_sampler_with_settings_is_read_back_from_its_name(weights: Path) -> None:
    pipe = ldm_lite.load(configure(weights, "euler"), device="cpu")
    assert pipe.family.sampler == "euler diffusers:timesteps=trailing"
    assert named_plan(label(pipe.family.sampler), pipe.schedule, 7).t == pytest.approx(pipe.plan(steps=7).t)


def test_a_spacing_of_the_checkpoint_yields_to_one_in_a_name(weights: Path) -> None:
    pipe = ldm_lite.load(configure(weights, "zero_snr"), device="cpu")
    assert pipe.schedule.spacing == "trailing_to_0"
    for name in ("ddim", "dpmpp_2m"):
        assert pipe.plan(name, 4).t[0] == 999
    plain = replace(pipe, schedule=replace(pipe.schedule, spacing=None))
    for name in ("ddim leading", "euler karras", "lcm"):
        assert np.array_equal(pipe.plan(name, 4).t, plain.plan(name, 4).t)
    assert pipe.plan("ddim", 4, spacing="leading").t[0] == 751


def test_what_the_user_tells_comes_first(weights: Path) -> None:
    told = {"scale_factor": "0.5", "resolution": "64", "beta_end": "0.02", "prediction": "v"}
    pipe = ldm_lite.load(configure(weights, "networks"), device="cpu", metadata=told)
    assert (pipe.family.scale_factor, pipe.family.resolution, pipe.family.prediction) == (0.5, 64, "v")
    assert pipe.schedule.betas[-1] == pytest.approx(0.02)


def test_another_autoencoder_brings_its_scaling_factor(weights: Path) -> None:
    configure(weights, "networks")
    part = ldm_lite.load(weights, device="cpu", vae=weights / "vae").family
    assert part.scale_factor == 0.3
