"""Inpainting only the area around a mask, and what is under it to begin with: as AUTOMATIC1111's web UI."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import decoded_latents, encoded_pixels, unet_calls

from ldm_lite import Pipeline
from ldm_lite.tasks.masked_area import covering

GOLDENS = np.load(Path(__file__).parent / "data" / "masking.npz")
PICTURE = Image.fromarray(GOLDENS["image"])
SIZES = [tuple(map(int, size)) for size in GOLDENS["sizes"]]


def masked(*box: int, size: tuple[int, int] = PICTURE.size) -> Image.Image:
    mask = Image.new("L", size)
    mask.paste(255, box)
    return mask


def repainted(pipe: Pipeline, picture: Image.Image, mask: Image.Image, **options: Any) -> list[int]:
    """The area (left, top, right, bottom) that is pasted back, of which every edge differs from the picture."""
    [array] = pipe.inpaint("a", picture, mask, no_paste=True, output="numpy", **options)
    where = (array != np.asarray(picture)).any(axis=2)
    rows, columns = np.flatnonzero(where.any(axis=1)), np.flatnonzero(where.any(axis=0))
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


@pytest.mark.parametrize("i", range(len(GOLDENS["boxes"])))
@pytest.mark.thin(6)
def test_areas_are_the_web_ui_s(pipe: Pipeline, i: int) -> None:
    *box, padding = GOLDENS["boxes"][i].tolist()
    for (width, height), area in zip(SIZES, GOLDENS["areas"][i].tolist(), strict=True):
        options = {"only_masked": padding, "width": width, "height": height, "strength": 0.0}
        assert repainted(pipe, PICTURE, masked(*box), **options) == area


def levels(pixels: torch.Tensor) -> np.ndarray:
    """Pixels (1,3,H,W) in [-1,1] as levels (H,W,3) of 255."""
    return ((pixels[0] + 1) * 127.5).round().int().permute(1, 2, 0).numpy()


@pytest.mark.parametrize("i", range(len(SIZES)))
def test_pictures_are_resized_as_the_web_ui_does(pipe: Pipeline, i: int) -> None:
    """To one level of 255: the filter depends on Pillow's version."""
    (width, height), white = SIZES[i], masked(0, 0, *PICTURE.size)
    with encoded_pixels(pipe) as pixels:
        pipe.inpaint("a", PICTURE, white, only_masked=0, width=width, height=height, strength=0.0)
    assert abs(levels(pixels[0]) - GOLDENS[f"fitted_{i}"]).max() <= 1
    assert abs(np.asarray(covering(PICTURE, SIZES[i])).astype(int) - GOLDENS[f"covering_{i}"]).max() <= 1


def test_what_is_masked_is_filled_as_in_the_web_ui(pipe: Pipeline) -> None:
    with encoded_pixels(pipe) as pixels:
        pipe.inpaint("a", PICTURE, masked(20, 12, 41, 37), masked_content="fill", strength=0.0)
    assert abs(levels(pixels[0])[:50, :65] - GOLDENS["filled"]).max() <= 1


# ---- the task -------------------------------------------------------------------------------------------------------


def test_only_the_area_is_repainted_at_the_models_size(bundled: Pipeline) -> None:
    """The network sees the area at 128 x 128; what is not masked keeps its bits, and the image its size."""
    picture = PICTURE.resize((300, 200))
    mask = masked(100, 60, 130, 90, size=picture.size)
    with unet_calls(bundled) as calls:
        options = {"only_masked": 8, "steps": 2, "output": "result"}
        [result] = bundled.inpaint("a red apple on white", picture, mask, **options)
    assert result.array.shape == (200, 300, 3)
    assert {call.x.shape[2:] for call in calls} == {bundled.latent_shape(128, 128)[1:]}
    where = (result.array != np.asarray(picture)).any(axis=2)
    assert not where[np.asarray(mask) == 0].any()
    assert where[60:90, 100:130].mean() > 0.9
    assert "Inpaint area: Only masked, Masked area padding: 8" in result.parameters


def test_feathering_and_pixels_that_are_not_pasted_back_stay_in_the_area(pipe: Pipeline) -> None:
    picture = PICTURE.resize((160, 120))
    mask = masked(60, 40, 80, 60, size=picture.size)
    options = {"only_masked": 4, "steps": 1, "width": 32, "height": 32}
    assert repainted(pipe, picture, mask, **options) == [56, 36, 84, 64]
    [array] = pipe.inpaint("a", picture, mask, feather=8.0, output="numpy", **options)
    where = (array != np.asarray(picture)).any(axis=2)
    assert where[38, 70]
    assert not where[:30].any()


@pytest.mark.parametrize("content", ["original", "fill", "noise", "nothing"])
def test_what_is_under_the_mask_to_begin_with(pipe: Pipeline, content: str) -> None:
    """The web UI: init * mask + (the seed's first noise, or nothing) * its inverse; the fill is encoded."""
    picture, mask = PICTURE.resize((64, 64)), masked(32, 0, 64, 64, size=(64, 64))
    options = {"masked_content": content, "strength": 0.5, "steps": 4, "seed": 3}
    with encoded_pixels(pipe) as encoded, unet_calls(pipe) as calls, decoded_latents(pipe) as latents:
        pipe.inpaint("a", picture, mask, **options)
    [start] = encoded
    assert np.array_equal(levels(start), np.asarray(picture)) == (content == "original")
    wanted = pipe.family.scale_factor * pipe.vae.encode(start)[0]
    if content in ("noise", "nothing"):
        wanted[..., 4:] = pipe.noise(3)[..., 4:] if content == "noise" else 0
    a, s = pipe.plan(steps=4, last=2).level[0].tolist()
    torch.testing.assert_close(calls[0].x[:1], a * wanted + s * pipe.noise(3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(latents[0][..., :4], wanted[..., :4], atol=1e-5, rtol=1e-5)


def test_neither_is_in_the_original_code(pipe: Pipeline) -> None:
    for more in ({"only_masked": 4}, {"masked_content": "fill"}):
        with pytest.raises(ValueError, match="leave them out, or `compat`"):
            pipe.inpaint("a", PICTURE, masked(0, 0, 9, 9), compat=True, **more)


@pytest.mark.parametrize(
    ("picture", "box", "padding", "cells"),
    [((64, 64), (24, 24, 40, 40), 16, range(2, 6)), ((900, 900), (450, 450, 451, 451), 350, range(3, 5))],
)
def test_what_is_not_masked_in_the_area_is_kept(
    pipe: Pipeline, picture: tuple[int, int], box: tuple[int, int, int, int], padding: int, cells: range
) -> None:
    """The latents of two seeds differ under the mask alone, also under one pixel, of which a 255th is left."""
    image, runs = PICTURE.resize(picture), []
    for seed in (1, 2):
        with decoded_latents(pipe) as latents:
            size = {"only_masked": padding, "width": 64, "height": 64}
            pipe.inpaint("a", image, masked(*box, size=picture), steps=2, seed=seed, **size)
        runs.append(latents[0])
    changed = (runs[0] != runs[1]).any(dim=1)[0].nonzero()
    assert {*map(tuple, changed.tolist())} <= {(y, x) for y in cells for x in cells}
    assert len(changed)
