"""from_png: options from the text of a picture."""

import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import texts
from PIL import Image

from ldm_lite import Pipeline
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.features.from_png import FromPng
from ldm_lite.text.parameters import parameters, parse_parameters
from ldm_lite.txt2img import main

WEBUI = """a (red:1.2) apple <lora:fruit:0.8>,
on a table
Negative prompt: blue, "green"
sky
Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 4294967295, Size: 64x96, \
Model hash: 45dee52b12, Model: fruit, Denoising strength: 0.4, Clip skip: 2, ENSD: 31337, RNG: CPU, Hires upscale: 2, \
ADetailer prompt: "a, \\"b\\": c", Lora hashes: "fruit: 123", Version: v1.10.1"""


def with_picture(path: Path, **options: Any) -> Any:
    """The options as the picture completes them."""
    return FromPng(from_png=path).check(Txt2imgOptions(from_png=path, **options))


def test_the_grammar() -> None:
    settings = parse_parameters(WEBUI)
    assert settings.prompt == "a (red:1.2) apple <lora:fruit:0.8>,\non a table"
    assert settings.negative_prompt == 'blue, "green"\nsky'
    assert settings.settings["Sampler"] == "DPM++ 2M"
    assert settings.settings["ADetailer prompt"] == 'a, "b": c'
    assert settings.settings["Size"] == "64x96"
    assert settings.settings["Version"] == "v1.10.1"
    assert parse_parameters("Steps: 1, Seed: 2").prompt == ""
    assert parse_parameters("\nSteps: 1, Seed: 2").negative_prompt is None
    for text in ("", "a cat", "a cat\nSteps: 3", "x" * 200_000):
        with pytest.raises(ValueError, match=r"settings|characters"):
            parse_parameters(text)


@pytest.mark.parametrize(
    "value",
    ["plain", "a, b", 'say "hi"', '"quoted"', "two\nlines", "back\\slash", "a: b, c: d", "", " é🍎", "C:\\a,b.png"],
)
def test_every_value_comes_back(value: str) -> None:
    settings = parse_parameters(parameters("p\nq", "n", {"Steps": 3, "Key": value, "Last": "x"}))
    assert settings == ("p\nq", "n", {"Steps": "3", "Key": value.strip() if "\n" not in value else value, "Last": "x"})


def test_a_picture_of_the_web_ui(tmp_path: Path, pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    small = WEBUI.replace("Steps: 20", "Steps: 4").replace("64x96", "32x40")
    path = texts.save(tmp_path / "a.png", small)
    [result] = pipe.txt2img(from_png=path, seed=42, output="result")
    assert result.parameters.splitlines()[:4] == [
        "a (red:1.2) apple ,",
        "on a table",
        'Negative prompt: blue, "green"',
        "sky",
    ]
    assert result.parameters.splitlines()[4].startswith(
        "Steps: 4, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 42, Size: 32x40, Model: small, "
        "RNG: CPU, Denoising strength: 0.4, Hires upscaler: Latent, Hires upscale: 2.0, Prompt syntax: a1111, "
        "Clip skip: 2, ENSD: 31337, Version: ldm_lite"
    )
    assert result.image.size == (64, 80)
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert first == f"{path}: ignored settings: ADetailer prompt, Lora hashes, <lora:fruit:0.8>"
    assert second == f"{path}: was made with fruit (45dee52b12), not {pipe.name}"
    # all that was given overrides it, also with the value that is the default
    arguments = {"prompt": "x", "negative_prompt": "", "steps": 5, "sampler": "euler", "scale": 7.0, "width": 48}
    [result] = pipe.txt2img(from_png=path, prompt_syntax="plain", clip_skip=1, output="result", **arguments)
    assert result.parameters.startswith(
        "x\nNegative prompt: \nSteps: 5, Sampler: Euler, Schedule type: Uniform, CFG scale: 7.0, Seed: 4294967295, "
        "Size: 48x40, Model: small, RNG: CPU, Denoising strength: 0.4, Hires upscaler: Latent, Hires upscale: 2.0, "
        "ENSD: 31337, Version: ldm_lite"
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "eta": {"eta": 0.5, "sampler": "euler_a"},
    "churn": {"churn": 2.0, "sampler": "heun karras"},
    "a1111": {"noise": "a1111", "ensd": 31337, "sampler": "euler_a"},
    "diffusers": {"noise": "diffusers", "sampler": "euler_a"},
    "comfy": {"noise": "comfy", "sampler": "euler_a"},
    "variation": {"variation_seed": 3, "variation_strength": 0.25},
    "guidance_rescale": {"guidance_rescale": 0.7},
    "mimic_scale": {"mimic_scale": 3.0, "dynamic_threshold": 0.9},
    "prompt_syntax": {"prompt_syntax": "a1111", "prompt": "a (red:1.5) apple"},
    "clip_skip": {"clip_skip": 2},
    "defaults": {},
    "webui": {"sampler": "webui DDIM CFG++", "scale": 5.0, "steps": 2},
    "restart": {"sampler": "restart"},
    "settings": {"sampler": "dpmpp_2m", "spacing": "karras:rho=5:sigma_min=0.1:discard"},
    "ours": {"sampler": "dpm2 beta"},
    "compatible": {"sampler": "webui UniPC"},
    "tcd": {"sampler": "tcd", "eta": 0.6},
    "lines": {"prompt": "two\n lines, and: more ", "negative_prompt": "", "seed": 2**40, "width": 72, "scale": 2.25},
}
ELSEWHERE = {  # options that the text writes of other networks, or beside others
    "original_size": (48, 64),
    "crop_top_left": (3, 5),
    "target_size": (64, 48),
    "aesthetic_score": 5.5,
    "negative_aesthetic_score": 2.25,
}


@pytest.mark.parametrize("case", OPTIONS)
def test_our_own_pictures_make_the_same_image(
    case: str, pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"prompt": "a cat", "steps": 3, **OPTIONS[case]}
    [image] = pipe.txt2img(**options)
    path = texts.save(tmp_path / "a.png", image.info["parameters"])
    caplog.clear()
    [again] = pipe.txt2img(from_png=path)
    assert np.array_equal(image, again)
    assert again.info["parameters"] == image.info["parameters"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_every_option_that_a_text_holds_comes_back(tmp_path: Path) -> None:
    named = {field.name: field.metadata["png"] for field in dataclasses.fields(Txt2imgOptions) if field.metadata["png"]}
    assert set(named) == {*ELSEWHERE, "eta", "churn", "guidance_rescale", "mimic_scale", "dynamic_threshold"} | {
        "prompt_syntax",
        "clip_skip",
        "preprocess",
        "ensd",
        "variation_strength",
        "skip_layer_scale",
        *("hires", "hires_steps", "hires_sampler", "hires_strength", "hires_upscaler"),  # tests/test_hires.py
        *("hires_prompt", "hires_negative_prompt"),
        "regions",  # tests/test_regions.py
        "seamless",  # tests/test_seamless.py
        *("guidance_interval", "guidance_schedule", "apg", "deep_cache", "gate_step", "freeu"),  # test_tricks.py
        "brownian",  # test_noise.py
        *("control", "refiner_start"),  # with files, which a text opens none of
    }
    for name, value in {**ELSEWHERE, "preprocess": "canny,none", "skip_layer_scale": 1.5}.items():
        text = value if not isinstance(value, tuple) else ("{},{}" if "crop" in name else "{}x{}").format(*value)
        entries = {"Steps": 3, "Sampler": "Euler", named[name]: text, "Version": "ldm_lite 1"}
        path = texts.save(tmp_path / f"{name}.png", parameters("a", None, entries))
        extra = {"control": ("a.png:b.png",)} if name == "preprocess" else {}
        assert getattr(with_picture(path, **extra), name) == value
    # a refiner and controls are files of the user's: the text alone opens none
    entries = {"Steps": 20, "Control": "/etc/passwd:b.png", "Refiner": "r", "Refiner from step": 17}
    path = texts.save(tmp_path / "refiner.png", parameters("a", None, entries | {"Version": "ldm_lite 1"}))
    assert with_picture(path).refiner is None
    assert with_picture(path, refiner="x.ckpt").refiner_start == 0.8


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("Steps: 1001, Seed: 1", "Steps: got `steps` 1001, expected 1 to 1000"),
        ("Steps: many, Seed: 1", "Steps: got 'many', expected a whole number"),
        ("Steps: 2, Seed: -2", "Seed: got `seed` -2, expected -1"),
        ("Steps: 2, CFG scale: inf", "CFG scale: got 'inf', expected a finite number"),
        ("Steps: 2, Size: 64", "Size: got '64', expected WIDTHxHEIGHT"),
        (
            "Steps: 2, RNG: dice",
            "its RNG is 'dice', expected one of CPU, NV, diffusers, comfy, GPU; or give `noise=PROGRAM`",
        ),
        ("Steps: 2, Sampler: Magic", "unknown sampler 'Magic': expected one of .*; or give `sampler=NAME`"),
        ("Steps: 2, Sampler: Euler, Schedule type: Magic", "unknown schedule type 'magic'"),
        ("no settings", "has no settings in its last line"),
    ],
)
def test_wrong_values_are_one_line(pipe: Pipeline, entries: str, message: str, tmp_path: Path) -> None:
    path = texts.save(tmp_path / "a.png", f"a cat\n{entries}")
    with pytest.raises(ValueError, match=f"a.png: {message}"):
        pipe.txt2img(from_png=path)


def test_files_that_hold_no_text(pipe: Pipeline, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("Steps: 1, Seed: 2")
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.bmp")
    for name, message in (
        ("plain.png", "holds no text"),
        ("text.png", "is not a PNG, JPEG or WebP"),
        ("photo.bmp", "is not a PNG, JPEG or WebP"),
        (".", "is a folder, expected a regular file"),
        ("missing.png", "No such file"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            pipe.txt2img(from_png=tmp_path / name)
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + "é\nSteps: 2, Seed: 4".encode("utf-16-be")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    [result] = pipe.txt2img(from_png=tmp_path / "a.jpg", output="result")
    assert (result.prompt, result.seed) == ("é", 4)
    assert "Negative prompt" not in result.parameters
    assert "Steps: 2" in result.parameters


@pytest.mark.parametrize(
    "text",
    [
        "a" * 99_000,
        'b:"' * 30_000,
        "c: " * 30_000,
        '\\"' * 40_000,
        'k:"' + "\\" * 90_000,
        "\n" * 99_999,
        '"a: ,' * 19_000,
    ],
)
def test_hostile_texts_take_no_time(text: str) -> None:
    start = time.process_time()
    with contextlib.suppress(ValueError):
        parse_parameters(f"x\n{text}, Steps: 1, Seed: 2")
    assert time.process_time() - start < 10


def test_the_command(pipe: Pipeline, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = texts.save(
        tmp_path / "in" / "a.png",
        "a cat\nSteps: 2, Sampler: UniPC, Seed: 5, Size: 64x64, RNG: CPU, Hires steps: 1, Version: v1.6.0",
    )
    assert (
        main(["--from-png", str(path), "--steps", "4", "--ckpt", str(small_path), "--out", str(tmp_path / "b.png")])
        == 0
    )
    with Image.open(tmp_path / "b.png") as image:
        assert "a cat\nSteps: 4, Sampler: UniPC, Schedule type: Automatic" in image.info["parameters"]
        assert "Seed: 5" in image.info["parameters"]
    printed = capsys.readouterr().err
    assert printed.count("ignored settings: Hires steps") == 1
    assert "RNG" not in printed
    with pytest.raises(ValueError, match="`from_png` is an option of txt2img"):
        pipe.img2img("a", Image.new("RGB", (64, 64)), from_png=path)
