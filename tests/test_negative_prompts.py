"""Lists of negative prompts, one for each prompt or image, in every task; numbers that are no booleans."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import toy_zoo
from PIL import Image

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.tasks.results import Result
from ldm_lite.text.parameters import parse_parameters
from ldm_lite.toolkit import estimate_cost

NEGATIVE = ["blue", "", "a dog " * 60]
SMALL: dict[str, Any] = {"steps": 2, "width": 32, "height": 32, "output": "result"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a1111": {"prompt_syntax": "a1111", "negative_prompt": ["[blue:red:0.5]", "", "(a dog:1.2)"]},
    "regions": {"prompt": ["a AND b"] * 3, "regions": "all; 0,0,0.5,1"},
    "hires": {"hires": 2.0, "hires_strength": 0.7},
}


def check(results: list[Result], alone: list[Result], negative: list[str]) -> None:
    assert len(results) == len(alone) == len(negative)
    for result, single, text in zip(results, alone, negative, strict=True):
        assert parse_parameters(result.parameters).negative_prompt == text.strip()
        assert parse_parameters(result.parameters) == parse_parameters(single.parameters)
        assert np.abs(result.array.astype(int) - single.array).max() <= 1
    assert len({result.array.tobytes() for result in results}) == len(results)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_prompt_has_its_own(pipe: Pipeline, way: str, batch_size: int) -> None:
    options = {"prompt": ["a cat"] * 3, "negative_prompt": [text.strip() for text in NEGATIVE], **SMALL, **WAYS[way]}
    prompts, negative = options.pop("prompt"), options.pop("negative_prompt")
    # As the longest text of a call sets the length of all, each is made with that one beside it.
    longest = max(negative, key=len)
    alone = [
        pipe.txt2img([prompt, prompt], negative_prompt=[text, longest], seed=[5, 0], **options)[0]
        for prompt, text in zip(prompts, negative, strict=True)
    ]
    results = pipe.txt2img(prompts, negative_prompt=negative, seed=[5] * 3, batch_size=batch_size, **options)
    check(results, alone, negative)


def test_of_images_and_repetitions(pipe: Pipeline) -> None:
    """One for each image of a prompt, and lists for the prompts of one repetition or of all."""
    alone = [pipe.txt2img("a cat", negative_prompt=text, seed=3 + i, **SMALL)[0] for i, text in enumerate("abab")]
    check(pipe.txt2img("a cat", negative_prompt=["a", "b"], n_iter=2, batch_size=2, seed=3, **SMALL), alone, [*"abab"])
    check(pipe.txt2img("a cat", negative_prompt=[*"abab"], batch_size=4, seed=3, **SMALL), alone, [*"abab"])
    check(pipe.txt2img("a cat", negative_prompt=[*"abab"], n_iter=4, seed=3, **SMALL), alone, [*"abab"])
    templates = pipe.txt2img(["a {cat}"] * 2, negative_prompt=["a", "b"], n_iter=2, seed=3, dynamic="random", **SMALL)
    check(templates, alone, [*"abab"])


def test_of_the_other_tasks(pipe: Pipeline, tmp_path: Path) -> None:
    images = [Image.new("RGB", (32, 32), colour) for colour in ("red", "green")]
    mask, pairs = Image.new("L", (32, 32), 255), list(zip(images, "ab", strict=True))
    for make in (
        lambda image, **options: pipe.img2img("a cat", image, **SMALL, **options),
        lambda image, **options: pipe.inpaint("a cat", image, mask, **SMALL, **options),
    ):
        alone = [make(image, negative_prompt=text, seed=3 + i)[0] for i, (image, text) in enumerate(pairs)]
        check(make(images, negative_prompt=["a", "b"], seed=3), alone, ["a", "b"])
    random_checkpoint.write(tmp_path / "x4.safetensors", toy_zoo.small("x4"))
    upscaler = ldm_lite.load(tmp_path / "x4.safetensors", device="cpu")
    options: dict[str, Any] = {"steps": 2, "scale": 3.0, "output": "result"}
    alone = [
        upscaler.upscale(image, "a cat", negative_prompt=text, seed=3 + i, **options)[0]
        for i, (image, text) in enumerate(pairs)
    ]
    check(upscaler.upscale(images, "a cat", negative_prompt=["a", "b"], seed=3, **options), alone, ["a", "b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"negative_prompt": ["a", "b"]},
            r"got 2 negative prompts for 1 prompt and 1 image, expected one, or one for each",
        ),
        ({"negative_prompt": []}, "got an empty list of negative prompts, expected one or more"),
        ({"negative_prompt": ["a", None], "batch_size": 2}, "got `negative_prompt` None, expected a text"),
        ({"negative_prompt": ["a", 3], "batch_size": 2}, "got `negative_prompt` 3, expected a text"),
        ({"negative_prompt": "ab", "seed": True}, "got `seed` True, expected a whole number or a list of them"),
        ({"seed": [1, False], "batch_size": 2}, "got `seed` False, expected a whole number"),
        ({"seed": np.True_}, "got `seed` .*True.*, expected a whole number"),
        ({"steps": True}, "got `steps` True, expected a whole number"),
        ({"batch_size": True}, "got `batch_size` True, expected a whole number"),
        ({"scale": True}, "got `scale` True, expected a number"),
        ({"eta": np.False_}, "got `eta` .*False.*, expected a number"),
    ],
)
def test_what_is_refused(pipe: Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pipe.txt2img("a cat", **{**SMALL, **options})


def test_what_they_cost() -> None:
    asked = estimate_cost(Txt2imgOptions(["a", "b"], negative_prompt=["c", "d BREAK e"]), 20)
    assert (asked.images, asked.longest) == (2, 2)
