"""`compat` against the original scripts, run whole (the goldens): the pixels of every file they save."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import toy
from PIL import Image

import ldm_lite
from ldm_lite import Pipeline, img2img, txt2img
from ldm_lite.cli.task_options import Img2imgOptions, Txt2imgOptions
from ldm_lite.families.sd2 import SD2
from ldm_lite.features.compat import Compat, as_original, dpm_solver
from ldm_lite.image import grid
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.zoo.families import FAMILY_ROWS

GOLDEN = np.load(Path(__file__).parent / "data" / "compat.npz")
COMMANDS = {"txt2img": txt2img, "img2img": img2img}


@pytest.fixture(scope="module")
def with_ema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compat") / "ema.safetensors"
    random_checkpoint.write(path, random_checkpoint.SMALL, ema=True)
    return path


@pytest.mark.parametrize("name", toy.COMPAT_RUNS)
def test_files_are_those_of_the_original_script(with_ema: Path, tmp_path: Path, name: str) -> None:
    """Kernels differ from diffusers' that the goldens ran on, so a fraction may be cut off at another integer."""
    command, flags = toy.COMPAT_RUNS[name]
    arguments = [toy.COMPAT_PROMPT, *flags.split(), "--precision", "full", "--compat", "--device", "cpu"]
    arguments += ["--ckpt", os.fspath(with_ema), "--outdir", os.fspath(tmp_path / "out")]
    if command == "img2img":
        Image.fromarray(toy.waves(40)[:32]).save(tmp_path / "image.png")
        arguments += ["--init-img", os.fspath(tmp_path / "image.png")]
    else:
        arguments += ["--H", "32", "--W", "32"]
    assert COMMANDS[command].main(arguments) == 0
    files = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*.png")}
    theirs = {key.removeprefix(f"{name}/"): GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{name}/")}
    assert files.keys() == theirs.keys()
    for path, pixels in theirs.items():
        ours = np.asarray(Image.open(files[path])).astype(int)
        assert ours.shape == pixels.shape
        difference = np.abs(ours - pixels)
        assert difference.max() <= 1
        assert difference.mean() < 0.002, path


def test_bits_are_cut_off_as_in_numpy(bundled: Pipeline) -> None:
    """From Python too; without compat they are rounded."""
    for compat in (True, False):
        options = {"steps": 2, "compat": compat, "batch_size": 1, "n_iter": 1, "height": 64, "width": 64}
        [tensor], [array], [image], [result] = (
            bundled.txt2img("a", output=output, **options) for output in ("tensor", "numpy", "pil", "result")
        )
        fractions = 255.0 * ((tensor + 1.0) / 2.0).clamp(0.0, 1.0).permute(1, 2, 0).numpy()
        assert np.array_equal(array, fractions.astype(np.uint8)) == compat
        assert np.array_equal(array, fractions.round().astype(np.uint8)) != compat
        assert np.array_equal(array, np.asarray(image))
        assert np.array_equal(array, result.array)


def test_the_grid_of_one_image_has_no_border() -> None:
    image = Image.new("RGB", (8, 8), "red")
    assert grid([image], 3).size == (8, 8)
    assert grid([image, image], 3).size == (22, 12)


def test_weights_are_those_of_the_original_configuration(with_ema: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not ldm_lite.load(with_ema, device="cpu", ema="original").ema
    loaded = ldm_lite.load(with_ema, device="cpu")
    assert loaded.ema
    loaded.txt2img("a", steps=2, n_iter=1, batch_size=1, height=32, width=32, compat=True)
    assert 'has its EMA weights, the original script takes the main ones: load with `ema="no"`' in caplog.text


def test_families_whose_original_takes_ema_weights() -> None:
    with_it = {name for name, family in FAMILY_ROWS.items() if family.original_ema}
    assert {"instruct_pix2pix", "ldm_inpainting_big", "ldm_bsr_sr", "ldm_cin256", "ldm_layout2img"} < with_it
    assert not {"sd1", "sd2", "sd2_depth", "x4", "sd1_inpaint", "ldm_text2img_large", "ldm_cin256_v2"} & with_it


def test_defaults_are_those_of_the_original_script(bundled: Pipeline) -> None:
    second = replace(bundled, family=SD2)
    assert second.family.text == OPEN_CLIP_H
    options = Compat().change_options(second, Txt2imgOptions(compat=True))[1]
    assert (options.scale, options.repeats, options.images_at_a_time) == (9.0, 3, 3)
    assert (options.height, options.width) == (512, 512)
    image = Compat().change_options(second, Img2imgOptions(compat=True))[1]
    assert (image.scale, image.repeats, image.images_at_a_time, image.strength) == (9.0, 1, 2, 0.8)
    first = Compat().change_options(bundled, Img2imgOptions(compat=True, strength=0.5))[1]
    assert (first.scale, first.strength, first.sampler) == (5.0, 0.5, "ddim")
    large = replace(bundled, family=FAMILY_ROWS["ldm_text2img_large"])
    assert Compat().change_options(large, Txt2imgOptions(compat=True, width=256))[1].width == 256
    assert Compat().change_options(large, Txt2imgOptions(compat=True))[1].height == 512


def test_of_fewer_than_15_steps_the_last_is_of_first_order(bundled: Pipeline) -> None:
    for steps, is_first_order in ((14, True), (15, False)):
        plan = bundled.plan("dpmpp_2m", steps, spacing=dpm_solver)
        ours = as_original(plan, "dpmpp_2m", bundled.schedule)
        assert np.array_equal(ours.mix[:-1], plan.mix[:-1])
        assert np.array_equal(ours.mix[-1], plan.mix[-1]) is not is_first_order


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("txt2img", {"spacing": "karras"}, "the original script has no `spacing`"),
        ("txt2img", {"churn": 1.0}, "the original script has no `churn`"),
        ("img2img", {"exact_steps": True}, "the original script has no `exact_steps`"),
        ("txt2img", {"sampler": "ddim karras"}, r"ddim, plms, dpmpp_2m, not ddim karras"),
        ("img2img", {"sampler": "dpmpp_2m"}, "of the original script, ddim, not dpmpp_2m"),
        ("inpaint", {"sampler": "dpmpp_2m"}, "of the original script, ddim, plms, not dpmpp_2m"),
        ("txt2img", {"sampler": "dpmpp_2m", "steps": 1}, "got 1 steps, expected 2 to 1000"),
        ("txt2img", {"sampler": "dpmpp_2m", "steps": 10, "eta": 0.5}, "got eta 0.5, but dpmpp_2m has none"),
    ],
)
def test_what_the_scripts_lack_is_an_error(bundled: Pipeline, task: str, options: dict[str, Any], message: str) -> None:
    image, mask = Image.fromarray(toy.waves()), Image.fromarray(toy.mask())
    images = {"txt2img": (), "img2img": (image,), "inpaint": (image, mask)}
    with pytest.raises(ValueError, match=message):
        getattr(bundled, task)("a", *images[task], compat=True, **options)


def test_inpainting_networks_have_no_repeatable_original(picture_pipes: dict[str, Pipeline]) -> None:
    image, mask = Image.fromarray(toy.waves()), Image.fromarray(toy.mask())
    with pytest.raises(ValueError, match=r"inpaints with networks of 4 input channels, not .*: leave it out"):
        picture_pipes["inpaint"].inpaint("a", image, mask, steps=2, compat=True)
    with pytest.raises(ValueError, match="`compat` inpaints only at strength 1"):
        picture_pipes["txt2img"].inpaint("a", image, mask, steps=2, strength=0.5, compat=True)
