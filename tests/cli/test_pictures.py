"""Pictures keep their settings in files, whoever saves them, and are made again from these."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ldm_lite import Pipeline
from ldm_lite.text.parameters import read_parameters, text_of

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".PNG")
SETTINGS: dict[str, Any] = {"steps": 2, "seed": 7, "width": 40, "height": 32, "scale": 3.5, "sampler": "dpmpp_2m"}
PROMPT = 'ein "Bär", rot\nauf 🍎'


def text_in(path: Path) -> str | None:
    with Image.open(path) as image:
        return text_of(image)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_saved_picture_is_made_again(
    pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    [result] = pipe.txt2img(PROMPT, negative_prompt="blau, \\", output="result", **SETTINGS)
    result.image.save(tmp_path / f"plain{ending}")
    result.save(tmp_path / f"own{ending}")
    caplog.clear()
    for name in ("plain", "own"):
        [again] = pipe.txt2img(from_png=tmp_path / f"{name}{ending}", output="result")
        assert again.parameters == result.parameters
        assert np.array_equal(again.array, result.array)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["own", "plain"]


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "copy": lambda image: image.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "resize": lambda image: image.resize((8, 8)),
    "crop": lambda image: image.crop((0, 0, 8, 8)),
    "convert": lambda image: image.convert("L"),
    "indexed": lambda image: image.quantize(8),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_it(pipe: Pipeline, tmp_path: Path, how: str) -> None:
    [image] = pipe.txt2img("a cat", **SETTINGS)
    copied = COPIES[how](image)
    assert isinstance(copied, Image.Image)
    copied.save(tmp_path / "a.png")
    assert read_parameters(tmp_path / "a.png").prompt == "a cat"


def test_it_is_an_image_like_any(pipe: Pipeline, tmp_path: Path) -> None:
    [image] = pipe.txt2img("a cat", **SETTINGS)
    plain = Image.fromarray(np.asarray(image))
    assert (image.mode, image.size, image.tobytes()) == (plain.mode, plain.size, plain.tobytes())
    for kind in ("png", "PNG", "jpeg", "webp"):
        file = io.BytesIO()
        image.save(file, kind, quality=90)
        assert text_of(Image.open(file)) == image.info["parameters"]
    with open(tmp_path / "a.jpg", "wb") as opened:
        image.save(opened)
    assert read_parameters(tmp_path / "a.jpg").prompt == "a cat"
    image.save(tmp_path / "a.bmp")
    with Image.open(tmp_path / "a.bmp") as opened_again:
        assert opened_again.tobytes() == plain.tobytes()
    with pytest.raises(ValueError, match="unknown file extension"):
        image.save(tmp_path / "a.cat")
    image.save(tmp_path / "a.png", pnginfo=None)
    assert text_in(tmp_path / "a.png") is None


def test_formats_without_text_are_refused_by_results(pipe: Pipeline, tmp_path: Path) -> None:
    [result] = pipe.txt2img("a cat", output="result", **SETTINGS)
    for name in ("a.bmp", "a", "a.txt"):
        with pytest.raises(ValueError, match=r"expected a name that ends in \.png, \.jpg or \.webp"):
            result.save(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        result.save(tmp_path / "none" / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_text_that_no_jpeg_holds(pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [image] = pipe.txt2img("a cat", **SETTINGS)
    image.info["parameters"] = "é" * 40_000
    image.save(tmp_path / "a.webp")
    assert not caplog.records
    image.save(tmp_path / "a.jpg")
    assert "too long for a JPEG" in caplog.text
    assert text_in(tmp_path / "a.webp") == "é" * 40_000
    assert text_in(tmp_path / "a.jpg") is None


def test_lists_of_images_are_grids_in_notebooks(pipe: Pipeline) -> None:
    for output in ("pil", "result"):
        images = pipe.txt2img(["a cat", "a dog", "a cow"], output=output, **SETTINGS)
        assert isinstance(images, list)
        shown = Image.open(io.BytesIO(images._repr_png_()))
        assert shown.size == (2 * 42 + 2, 2 * 34 + 2)
        first = getattr(images[0], "image", images[0])
        assert shown.crop((2, 2, 42, 34)).tobytes() == first.tobytes()
        assert first._repr_png_() == getattr(images[0], "_repr_png_")()  # noqa: B009
    assert pipe.decode(pipe.noise(seed=[1, 2], height=32, width=32))._repr_png_()
    images.clear()
    assert images._repr_png_() is None
