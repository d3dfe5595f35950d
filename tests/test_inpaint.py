"""Inpainting: what is masked changes, the rest does not; masks of all kinds; beyond the edges; messages."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from runs import SAMPLERS, decoded_latents, unet_calls

from ldm_lite import Pipeline
from ldm_lite import inpaint as command
from ldm_lite.image import mask_of, to_image

CAT = "a cat on a yellow background"


@pytest.fixture(scope="module")
def apple(bundled: Pipeline) -> Image.Image:
    """The bundled model's apple on blue, 128 x 128."""
    return bundled.txt2img("a red apple on a blue background", steps=10)[0]


def right_half(size: tuple[int, int] = (128, 128)) -> Image.Image:
    mask = Image.new("L", size)
    mask.paste(255, (size[0] // 2, 0, *size))
    return mask


def changed(result: np.ndarray, picture: Image.Image) -> np.ndarray:
    """(H,W): where a result differs from an image."""
    return (result != np.asarray(picture)).any(axis=2)


@pytest.mark.parametrize("sampler", ["ddim", "euler_a", "dpmpp_2m"])
def test_half_an_emoji_changes_and_the_other_half_does_not(bundled: Pipeline, apple: Image.Image, sampler: str) -> None:
    """The right half becomes yellow; the left half is the image's, bit for bit."""
    [result] = bundled.inpaint(CAT, apple, right_half(), steps=20, sampler=sampler, output="result")
    where = changed(result.array, apple)
    assert not where[:, :64].any()
    assert where[:, 64:].mean() > 0.9
    red, green, blue = result.array[:, -4:].reshape(-1, 3).mean(axis=0)
    assert min(red, green) > blue + 40


QUICK = ("ddim", "plms", "euler_a", "heun", "dpmpp_2m", "lcm")
OTHERS = [name for name in SAMPLERS if name not in (*QUICK, "dpm_adaptive")]  # the last takes no mask


@pytest.mark.parametrize("sampler", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_every_sampler_leads_to_what_is_kept(
    bundled: Pipeline, apple: Image.Image, sampler: str, strength: float
) -> None:
    """In the latents, whatever the sampler remembers and adds: at the end they are the image's."""
    with decoded_latents(bundled) as latents:
        bundled.inpaint(CAT, apple, right_half(), steps=4, sampler=sampler, strength=strength)
    difference = (latents[0] - bundled.encode(apple)).abs()
    assert difference[..., :8].max() < 1e-4
    assert difference[..., 8:].max() > 0.3


def test_without_pasting_the_rest_is_the_autoencoder_s(bundled: Pipeline, apple: Image.Image) -> None:
    pasted, bare = (
        bundled.inpaint(CAT, apple, right_half(), steps=4, no_paste=no, output="numpy")[0] for no in (False, True)
    )
    assert np.array_equal(pasted[:, 64:], bare[:, 64:])
    assert changed(bare, apple)[:, :64].any()


def test_feathering_reaches_into_the_rest_and_no_farther(bundled: Pipeline, apple: Image.Image) -> None:
    [result] = bundled.inpaint(CAT, apple, right_half(), steps=4, feather=4.0, output="result")
    where = changed(result.array, apple).mean(axis=0)
    assert where[62:64].min() > 0.5
    assert where[:56].max() == 0
    assert "Mask blur: 4.0" in result.parameters


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_a_single_pixel(bundled: Pipeline, apple: Image.Image) -> None:
    mask = Image.new("L", (128, 128))
    mask.putpixel((17, 41), 255)
    [result] = bundled.inpaint(CAT, [apple], [mask], steps=4, output="result")
    assert np.argwhere(changed(result.array, apple)).tolist() == [[41, 17]]


def test_all_white_is_txt2img(bundled: Pipeline, apple: Image.Image) -> None:
    white = Image.new("L", (128, 128), 255)
    [result] = bundled.inpaint(CAT, [apple], [white], steps=4, output="result")
    [plain] = bundled.txt2img(CAT, steps=4, output="result")
    assert (result.pixels - plain.pixels).abs().max() < 1e-4


MASK = np.zeros((128, 128), np.uint8)
MASK[32:64, 16:80] = 1
PLANE = torch.from_numpy(MASK)
SIGNED = PLANE.float().expand(3, -1, -1) * 2 - 1


@pytest.mark.parametrize(
    "mask",
    [
        *(MASK, MASK * 255, MASK > 0, MASK.astype(np.int64), MASK.astype(np.uint16), MASK / 1.0),
        *(MASK[None], MASK[..., None]),
        *(PLANE, PLANE[None], PLANE * 255, PLANE > 0, PLANE.float(), PLANE.half()[None, None]),
        *(SIGNED, (SIGNED + 1) / 2),
        *map(Image.fromarray, (MASK, MASK * 255, MASK > 0)),
    ],
)
def test_a_mask_has_any_usual_range(mask: Any) -> None:
    assert np.array_equal(np.asarray(mask_of(mask)), MASK * 255)


def test_a_mask_out_of_range_is_one_line() -> None:
    for mask in (MASK * 2.0 - 1, PLANE.float() * 255, MASK.astype(int) * 300, MASK - 1.0, PLANE.float()[:, :, None]):
        with pytest.raises(ValueError, match=r"got an? (array|tensor) .* as a mask, expected"):
            mask_of(mask)


def test_images_that_fit_another_range_are_told(caplog: pytest.LogCaptureFixture) -> None:
    ones = MASK.repeat(3).reshape(128, 128, 3)
    to_image(ones)
    to_image(ones.astype(np.uint16) * 200)
    to_image(torch.from_numpy(ones / 2.0).permute(2, 0, 1))
    assert caplog.messages == [
        "got an array of uint8 from 0 to 1 as an image, read as 0 to 255: it is nearly black",
        "got an array of uint16 from 0 to 200 as an image, read as 0 to 65535: it is nearly black",
        "got a tensor from 0 to 0.5 as an image, read as [-1,1]: scale [0,1] by 2 * x - 1",
    ]
    caplog.clear()
    for image in (ones * 255, ones * 2, torch.ones(3, 8, 8), torch.linspace(-1, 1, 192).view(3, 8, 8), ones > 0):
        to_image(image)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_paste": True, "feather": 8.0}, "`feather` has no effect with `no_paste`"),
        ({"mask": (), "extend": "left=8", "invert_mask": True}, "`invert_mask` has no effect without `mask`"),
        ({"only_masked": 8, "resize": "fit"}, "`resize` has no effect with `only_masked`"),
        ({"resize": "fit", "width": 64}, "`resize` has no effect without both `width` and `height`"),
    ],
)
def test_options_without_effect_are_named(
    bundled: Pipeline, apple: Image.Image, options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    bundled.inpaint(CAT, apple, **{"mask": MASK, "steps": 1, **options})
    assert sum(message in text for text in caplog.messages) == 1


def test_all_black_is_an_error(bundled: Pipeline, apple: Image.Image) -> None:
    black = Image.new("L", (128, 128))
    with pytest.raises(ValueError, match="image: nothing to repaint, its mask is black: white is repainted"):
        bundled.inpaint(CAT, [apple], [black], steps=4)


def test_inverted_and_of_another_size(bundled: Pipeline, apple: Image.Image) -> None:
    [array] = bundled.inpaint(CAT, apple, right_half((64, 64)), steps=4, invert_mask=True, output="numpy")
    where = changed(array, apple)
    assert not where[:, 64:].any()
    assert where[:, :64].any()
    with pytest.raises(ValueError, match="image has 128 x 128 pixels, but its mask 128 x 64"):
        bundled.inpaint(CAT, apple, right_half((128, 64)), steps=4, invert_mask=True)


@pytest.mark.parametrize("size", [(50, 37), (9, 9), (65, 64)])
def test_odd_sizes_stay_and_so_does_the_rest(bundled: Pipeline, apple: Image.Image, size: tuple[int, int]) -> None:
    small = apple.resize(size)
    [result] = bundled.inpaint(CAT, [small], [right_half(size)], steps=2, output="result")
    assert result.image.size == size
    where = changed(result.array, small)
    assert not where[:, : size[0] // 2].any()
    assert where[:, size[0] // 2 :].any()


def test_a_batch_equals_single_runs(bundled: Pipeline, apple: Image.Image) -> None:
    options = {"steps": 4, "sampler": "euler_a", "output": "result"}
    masks = [right_half(), right_half().rotate(90)]
    many = bundled.inpaint(CAT, [apple, apple], masks, batch_size=2, **options)
    for number, result in enumerate(many):
        [alone] = bundled.inpaint(CAT, apple, masks[number // 2], seed=result.seed, **options)
        assert (alone.pixels - result.pixels).abs().max() < 1e-3


def test_beyond_the_edges(bundled: Pipeline, apple: Image.Image) -> None:
    options = {"steps": 4, "extend": "left=20, bottom=8", "output": "result"}
    [result] = bundled.inpaint(CAT, apple, **options)
    assert result.image.size == (148, 136)
    assert np.array_equal(result.array[:128, 20:], np.asarray(apple))
    [both] = bundled.inpaint(CAT, apple, right_half(), **options)
    where = changed(both.array[:128, 20:], apple)
    assert not where[:, :64].any()
    assert where[:, 64:].any()


def test_what_a_checkpoint_for_inpainting_looks_at(picture_pipes: dict[str, Pipeline]) -> None:
    """[latents, mask, latents of the image with a grey hole]."""
    pipe, photo, mask = picture_pipes["inpaint"], toy.waves(), Image.new("L", (64, 64))
    mask.putpixel((17, 41), 255)
    with unet_calls(pipe) as calls:
        pipe.inpaint("a", Image.fromarray(photo), mask, steps=1)
    _, seen, hole = calls[0].x[0].split((4, 1, 4))
    assert np.argwhere(seen[0].numpy()).tolist() == [[5, 2]]
    assert seen.max() == 1
    pixels = torch.from_numpy(photo).permute(2, 0, 1) / 127.5 - 1
    pixels[:, 41, 17] = 0
    assert torch.allclose(hole, pipe.family.scale_factor * pipe.vae.encode(pixels[None])[0][0], atol=1e-5)


# ---- what does not fit, and the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no prompt: give one"),
        ({"prompt": "a", "strength": -1.0}, "got `strength` -1.0, expected 0 to 1"),
        ({"prompt": "a", "feather": -1.0}, "got `feather` -1.0, expected 0 to 1000"),
        ({"prompt": "a", "extend": "left"}, "got `extend` 'left', expected left=128,top=64, or right, bottom"),
        ({"prompt": "a", "extend": "up=8"}, "got `extend` 'up=8', expected left=128,top=64, or right, bottom"),
        ({"prompt": "a", "extend": "left=0"}, "got `extend` 'left=0', expected left=128,top=64, or"),
        ({"prompt": "a", "extend": f"left={10**20}"}, "got `extend` 'left=10*', expected left=128,top=64, or"),
        ({"prompt": "a", "extend": "left=8,left=16"}, "got `extend` 'left=8,left=16', expected left=128,top=64, or"),
    ],
)
def test_options_that_do_not_fit(bundled: Pipeline, apple: Image.Image, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundled.inpaint(options.pop("prompt", None), apple, right_half(), **options)


def test_images_and_masks_must_pair(bundled: Pipeline, apple: Image.Image) -> None:
    with pytest.raises(ValueError, match="no mask: give one with `mask=FILE`, white where to repaint, or `extend="):
        bundled.inpaint("a", [apple])
    with pytest.raises(ValueError, match="got 2 masks for 3 images, expected one, or one for each"):
        bundled.inpaint("a", [apple] * 3, [right_half()] * 2)


def run(arguments: list[str], out: Path) -> int:
    return command.main([*arguments, "--steps", "2", "--out", os.fspath(out), "--device", "cpu"])


@pytest.mark.slow
def test_the_command(tmp_path: Path, apple: Image.Image, capsys: pytest.CaptureFixture[str]) -> None:
    apple.save(tmp_path / "apple.png")
    right_half().save(tmp_path / "apple_mask.png")
    files = ["--init-img", os.fspath(tmp_path / "apple.png"), "--mask", os.fspath(tmp_path / "apple_mask.png")]
    assert run([CAT, *files], tmp_path / "one.png") == 0
    assert run([CAT, "--indir", os.fspath(tmp_path)], tmp_path / "two.png") == 0
    with Image.open(tmp_path / "one.png") as by_name, Image.open(tmp_path / "two.png") as by_folder:
        assert by_name.tobytes() == by_folder.tobytes()
        assert not changed(np.asarray(by_name), apple)[:, :64].any()
        assert "Denoising strength: 1.0, Init image: apple.png" in by_name.info["parameters"]
    errors = capsys.readouterr().err
    assert "apple.png: 50 % of it is repainted" in errors
    assert "strength 1: the last 2 of 2 steps, 2 UNet calls" in errors
    assert run([CAT, *files[:2]], tmp_path / "three.png") == 2
    assert "no mask: give one with --mask FILE" in capsys.readouterr().err
    assert run([CAT, *files, "--indir", os.fspath(tmp_path)], tmp_path / "three.png") == 2
    assert "got --indir beside --init-img or --mask" in capsys.readouterr().err
    assert run([CAT, "--indir", os.fspath(tmp_path / "none")], tmp_path / "three.png") == 2
    assert "none: No such file or directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run([CAT, "--indir", os.fspath(tmp_path / "empty")], tmp_path / "three.png") == 2
    assert "holds no NAME_mask.png beside a NAME.png" in capsys.readouterr().err
