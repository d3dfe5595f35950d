"""A picture's text, read back, makes the picture again: random sets of options, alone and together."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ldm_lite import Pipeline
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.diffusion.names import SAMPLERS, has
from ldm_lite.diffusion.noise import is_brownian
from ldm_lite.tasks.features import check_options, without_loading

# Options with a key in the text, each with values to draw from.
VALUES: dict[str, list[Any]] = {
    "scale": [1.0, 3.5, 7.0],
    "spacing": ["karras", "trailing", "exponential", "sgm_uniform", "beta", "linspace"],
    "negative_prompt": ["", "grey, (dull)", 'a "quoted" word\nand a line'],
    "clip_skip": [1, 2],
    "guidance_rescale": [0.3],
    "guidance_interval": ["0.2-0.7", "sigma=0.3-6"],
    "guidance_schedule": ["cosine", "linear:least=1"],
    "apg": ["parallel=0.1:threshold=15"],
    "deep_cache": ["2", "3:1"],
    "gate_step": [3],
    "freeu": ["1.2,1.4,0.9,0.2"],
    "seamless": ["x", "xy"],
    "noise": ["own", "a1111", "diffusers", "comfy"],
    "width": [64, 96],
    "height": [64, 80],
    "hires": [1.5],
}
OF_HIRES = {
    "hires_strength": [0.5],
    "hires_steps": [3],
    "hires_upscaler": ["Latent (nearest)", "Lanczos"],
    "hires_sampler": ["euler", "DPM++ 2M Karras"],
    "hires_prompt": ["a tree"],
    "hires_negative_prompt": ["a house"],
}
GUIDED = ("guidance_rescale", "guidance_interval", "guidance_schedule", "apg", "gate_step")
SAMPLERS_OF_STEPS = [name for name in SAMPLERS if name not in ("dpm_adaptive", "ddim_cfgpp", "restart")]


def random_options(seed: int) -> dict[str, Any]:
    """A set of options that go together."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"sampler": draw.choice(SAMPLERS_OF_STEPS), "seed": draw.randrange(2**40), "steps": 5}
    options |= {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.25}
    if "hires" in options:
        options |= {name: draw.choice(values) for name, values in OF_HIRES.items() if draw.random() < 0.5}
    if options.get("scale", 2.5) == 1.0:
        options = {name: value for name, value in options.items() if name not in GUIDED and "negative" not in name}
    if "hires_sampler" not in options:  # which may have none of these
        for name, value in (("eta", 0.5), ("churn", 3.0)):
            if has(options["sampler"], name) and draw.random() < 0.5:
                options[name] = value
        if is_brownian(options["sampler"]) and options.get("noise", "own") == "own" and draw.random() < 0.5:
            options["brownian"] = True
    if options.get("noise", "own") in ("own", "a1111") and draw.random() < 0.3:
        options |= {"variation_seed": draw.randrange(1000), "variation_strength": 0.25}
    if draw.random() < 0.3:
        options |= {"prompt": "a [red:green:2] apple, (shiny:1.2)", "prompt_syntax": "a1111"}
        options.pop("gate_step", None)
    return {"prompt": "a red apple, <on> a table: \\(one\\)", **options}


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_a_text_read_back_makes_the_picture(
    seed: int, pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [result] = pipe.txt2img(output="result", **random_options(seed))
    result.save(tmp_path / "picture.png")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        [again] = pipe.txt2img(from_png=tmp_path / "picture.png", output="result")
    assert torch.equal(again.pixels, result.pixels), result.parameters
    assert again.parameters == result.parameters
    ignored = [record.getMessage() for record in caplog.records if "picture.png" in record.getMessage()]
    assert not ignored


def test_what_is_of_a_file_is_not_read_without_it(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    """A text opens no files: what was made with a control is told, and the rest is made."""
    picture = Image.new("RGB", (8, 8))
    picture.info["parameters"] = (
        "a cat\nSteps: 2, Sampler: DDIM, Seed: 1, Size: 64x64, Control: n.safetensors:i.png, "
        "Control preprocess: canny, Version: ldm_lite 0"
    )
    pipe.txt2img(from_png=picture)
    assert "ignored settings: Control, Control preprocess" in caplog.text


def test_options_that_only_a_loaded_network_uses_are_left_out_before_it_is_loaded() -> None:
    """The others stay, and so do options that belong to them."""
    options = Txt2imgOptions("a", control=("n.safetensors:i.png",), image_embedding="e.npy", noise_level=5)
    without = without_loading(options)
    assert (without.control, without.image_embedding, without.noise_level) == ((), "e.npy", 5)  # type: ignore[attr-defined]
    check_options(without)
    options = Txt2imgOptions("a", refiner="r.safetensors", aesthetic_score=7.0, original_size="64x64")
    without = without_loading(options)
    assert (without.refiner, without.aesthetic_score) == (None, None)  # type: ignore[attr-defined]
