"""Inpainting only the area around a mask, and what is under it to begin with: as AUTOMATIC1111's web UI."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ldm_lite
from ldm_lite.cli.task_options import InpaintOptions as Options
from ldm_lite.generate import encode
from ldm_lite.image import to_pixels
from ldm_lite.pipeline import Pipeline
from ldm_lite.tasks.batching import InitialLatents, batches_of
from ldm_lite.tasks.inpaint import inpaint, prepare
from ldm_lite.tasks.masked_area import area_of, covering, fill, fitted

GOLDENS = np.load(Path(__file__).parent / "data" / "masking.npz")
PICTURE = Image.fromarray(GOLDENS["image"])
SIZES = [tuple(map(int, size)) for size in GOLDENS["sizes"]]


def masked(*box: int, size: tuple[int, int] = PICTURE.size) -> Image.Image:
    mask = Image.new("L", size)
    mask.paste(255, box)
    return mask


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def test_areas_are_the_web_ui_s() -> None:
    for box, areas in zip(GOLDENS["boxes"].tolist(), GOLDENS["areas"].tolist(), strict=True):
        for size, area in zip(SIZES, areas, strict=True):
            assert list(area_of(masked(*box[:4]), box[4], size)) == area


@pytest.mark.parametrize("i", range(len(SIZES)))
def test_pictures_are_resized_as_the_web_ui_does(i: int) -> None:
    """To one level of 255: the filter depends on Pillow's version."""
    for name, made in (("fitted", fitted(PICTURE, SIZES[i])), ("covering", covering(PICTURE, SIZES[i]))):
        difference = np.asarray(made).astype(int) - GOLDENS[f"{name}_{i}"]
        assert abs(difference).max() <= 1, name


def test_what_is_masked_is_filled_as_in_the_web_ui() -> None:
    made = np.asarray(fill(PICTURE, masked(20, 12, 41, 37))).astype(int)
    assert abs(made - GOLDENS["filled"]).max() <= 1


# ---- the task -------------------------------------------------------------------------------------------------------


def test_only_the_area_is_repainted_at_the_models_size(bundled: Pipeline) -> None:
    """The network sees the area at 64 x 64; what is not masked keeps its bits, and the image its size."""
    picture = PICTURE.resize((300, 200))
    mask = masked(100, 60, 130, 90, size=picture.size)
    shapes = []
    options = Options("a red apple on white", init_img=[picture], mask=[mask], only_masked=8, steps=2)
    [result] = inpaint(bundled, options, on_step=lambda state: shapes.append(state.latents.shape))
    assert result.array.shape == (200, 300, 3)
    assert {tuple(shape[2:]) for shape in shapes} == {tuple(bundled.latent_shape(64, 64)[1:])}
    where = (result.array != np.asarray(picture)).any(axis=2)
    assert not where[np.asarray(mask) == 0].any()
    assert where[60:90, 100:130].mean() > 0.9
    assert "Inpaint area: Only masked, Masked area padding: 8" in result.parameters


def test_feathering_and_pixels_that_are_not_pasted_back_stay_in_the_area(pipe: Pipeline) -> None:
    picture = PICTURE.resize((160, 120))
    mask = masked(60, 40, 80, 60, size=picture.size)
    options = Options("a", init_img=[picture], mask=[mask], only_masked=4, steps=1, no_paste=True, width=32, height=32)
    [result] = inpaint(pipe, options)
    where = (result.array != np.asarray(picture)).any(axis=2)
    rows, columns = np.flatnonzero(where.any(axis=1)), np.flatnonzero(where.any(axis=0))
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (36, 64, 56, 84)
    assert area_of(mask, 4, (32, 32)) == (56, 36, 84, 64)
    [result] = inpaint(pipe, dataclasses.replace(options, no_paste=False, feather=8.0))
    where = (result.array != np.asarray(picture)).any(axis=2)
    assert where[38, 70]
    assert not where[:30].any()


@pytest.mark.parametrize("content", ["original", "fill", "noise", "nothing"])
def test_what_is_under_the_mask_to_begin_with(pipe: Pipeline, content: str) -> None:
    """The web UI: init * mask + (the seed's first noise, or nothing) * its inverse; the fill is encoded."""
    picture, mask = PICTURE.resize((64, 64)), masked(32, 0, 64, 64, size=(64, 64))
    options = Options("a", init_img=[picture], mask=[mask], masked_content=content, strength=0.5, steps=4, seed=3)
    job, inputs = prepare(pipe, options)
    [later] = inputs
    image = later.make()
    [batch] = batches_of(job, 0, image, None)
    latents, kept, _ = InitialLatents(job, image, None).draw(batch)
    noise = job.noise_source.draws([3], [0], image.latent_shape)()
    free = torch.zeros(1, 1, 8, 8)
    free[..., 4:] = 1
    start = picture if content == "original" else fill(picture, mask)
    wanted = encode(pipe, to_pixels(start)[None])[0]
    if content in ("noise", "nothing"):
        wanted = wanted * (1 - free) + free * (noise if content == "noise" else 0)
    assert job.start is not None
    torch.testing.assert_close(latents, job.start.a * wanted + job.start.s * noise)
    assert kept is not None
    torch.testing.assert_close(kept.latents, wanted)


def test_neither_is_in_the_original_code(pipe: Pipeline) -> None:
    for more in ({"only_masked": 4}, {"masked_content": "fill"}):
        with pytest.raises(ValueError, match="leave them out, or `compat`"):
            list(inpaint(pipe, Options("a", init_img=[PICTURE], mask=[masked(0, 0, 9, 9)], compat=True, **more)))
