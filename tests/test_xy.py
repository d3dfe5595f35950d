"""X/Y plots: axes from text, cells, and the labelled picture."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import texts
from PIL import Image

from ldm_lite import txt2img
from ldm_lite.cli.options import given
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.tasks import xy
from ldm_lite.tasks.features import check_options
from ldm_lite.tasks.xy import Axis, cells, changed, draw, read_axis
from ldm_lite.text.parameters import parameters, parse_parameters


@pytest.mark.parametrize(
    ("option", "text", "values"),
    [
        ("steps", "5, 10,20", (5, 10, 20)),
        ("steps", "1-4", (1, 2, 3, 4)),
        ("steps", "4-1", (4, 3, 2, 1)),
        ("steps", "1-10 (+4), 50", (1, 5, 9, 50)),
        ("steps", "10-20 [3]", (10, 15, 20)),
        ("steps", "9-5(-2)", (9, 7, 5)),
        ("steps", "7-9[1]", (7,)),
        ("steps", "1-2 [4]", (1, 1, 2, 2)),
        ("scale", "1.5, 3", (1.5, 3.0)),
        ("aesthetic_score", "-2", (-2.0,)),
        ("scale", "0-1 (+0.1)", tuple(round(0.1 * i, 9) for i in range(11))),
        ("--eta", "0-1 [5]", (0, 0.25, 0.5, 0.75, 1)),
        ("seed", "9223372036854775807, 1", (2**63 - 1, 1)),
        ("sampler", "DPM++ 2M Karras, ddim", ("DPM++ 2M Karras", "ddim")),
        ("prompt", '"a red, ripe apple", a pear', ("a red, ripe apple", "a pear")),
        ("negative_prompt", '"", blurred', ("", "blurred")),
        ("negative-prompt", "blurred", ("blurred",)),
        ("compat", "no, Yes", (False, True)),
        ("original_size", "512x256, 64x64", ((512, 256), (64, 64))),
        ("crop_top_left", '"0,0", "0,128"', ((0, 0), (0, 128))),
        ("embedding", "a.pt, b.pt", (("a.pt",), ("b.pt",))),
        ("replace", "apple, pear", ("apple", "pear")),
    ],
)
def test_axes_are_read_as_users_write_them(option: str, text: str, values: tuple[object, ...]) -> None:
    assert read_axis(Txt2imgOptions, option, text).values == values


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("stepz", "1", "did you mean --steps"),
        ("plan", "1", "expected an option"),
        ("strength", "0.5", "expected an option"),  # of img2img
        ("steps", "", "no values"),
        ("steps", " , ,", "no values"),
        ("steps", "5, many", "finite number"),
        ("steps", "5.5", "whole numbers"),
        ("steps", "0, 5", "got --steps 0, expected 1 to 1000"),
        ("steps", "1-100000", "range"),
        ("steps", "1-5 (-1)", "range"),
        ("steps", "1..2-3", "finite number"),
        ("scale", "nan", "got --scale 'nan', expected a finite number, or a range such as 1-5"),
        ("compat", "perhaps", "yes or no"),
        ("original_size", "big", "HxW"),
        ("steps", ",".join(["1"] * 401), "at most 400"),
    ],
)
def test_wrong_axes_are_one_line(
    option: str, text: str, message: str, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--ckpt", str(small_path), "--device", "cpu", "--out", str(tmp_path)]
    assert txt2img.main(["a cat", "--x", f"{option}={text}", *files]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("kind", [Txt2imgOptions, Img2imgOptions, InpaintOptions, UpscaleOptions])
def test_every_option_with_a_flag_can_be_an_axis(kind: type[Txt2imgOptions]) -> None:
    samples = {"original_size": "8x8", "target_size": "8x8", "crop_top_left": '"1,1"', "aesthetic_score": "5"}
    for field in dataclasses.fields(kind):
        if field.metadata["flag"]:
            hint, within = str(field.type), field.metadata["within"]
            number = "1" if within is None or within[0] <= 1 else str(within[0])
            text = samples.get(field.name) or (number if "int" in hint or "float" in hint else "yes")
            if field.metadata.get("choices"):
                text = field.metadata["choices"][0]
            assert len(read_axis(kind, field.name, text).values) == 1


def test_cells_are_rows_of_columns() -> None:
    x, y = Axis("steps", (5, 10)), Axis("scale", (1.0, 7.5))
    assert cells(x, y) == [
        {"scale": 1.0, "steps": 5},
        {"scale": 1.0, "steps": 10},
        {"scale": 7.5, "steps": 5},
        {"scale": 7.5, "steps": 10},
    ]
    assert cells(x, None) == [{"steps": 5}, {"steps": 10}]
    assert cells(None, y) == [{"scale": 1.0}, {"scale": 7.5}]
    options = Txt2imgOptions("a cat", seed=3)
    assert changed(options, cells(x, y)[2], x, y) == dataclasses.replace(options, scale=7.5, steps=5)
    for axes, message in (
        ((None, None), "one or two axes"),
        ((x, x), "two axes"),
        ((x, Axis("seed", (1,) * 201)), "402"),
    ):
        with pytest.raises(ValueError, match=message):
            cells(*axes)


def test_replace_changes_both_prompts() -> None:
    options, axis = Txt2imgOptions("a red apple", negative_prompt="no apple"), Axis("replace", ("apple", "pear"))
    variants = [changed(options, cell, axis) for cell in cells(axis, None)]
    assert [(variant.prompt, variant.negative_prompt) for variant in variants] == [
        ("a red apple", "no apple"),
        ("a red pear", "no pear"),
    ]
    # beside an axis of prompts, it looks in the cell's own
    x = Axis("prompt", ("an apple", "two apples"))
    assert [changed(options, cell, x, axis).prompt for cell in cells(x, axis)][2:] == ["an pear", "two pears"]
    with pytest.raises(ValueError, match="does not have 'plum'"):
        changed(options, {"replace": "pear"}, Axis("replace", ("plum", "pear")))


def colours(count: int, size: tuple[int, int] = (64, 48)) -> list[Image.Image]:
    return [Image.new("RGB", size, (40 * i, 255 - 40 * i, 80)) for i in range(count)]


def test_the_picture_has_every_image_in_its_place_and_labels_outside() -> None:
    x, y = Axis("steps", (5, 10, 20)), Axis("scale", (1.0, 7.5))
    images = colours(6)
    images[0].info["parameters"] = parameters("a, cat", None, {"Steps": 5, "Seed": 1, "Version": "ldm_lite 0"})
    sheet = draw(images, x, y)
    pixels = np.asarray(sheet)
    left, top = sheet.width - 3 * 64 - 2 * xy.GAP, sheet.height - 2 * 48 - xy.GAP
    for i, image in enumerate(images):
        row, column = top + i // 3 * (48 + xy.GAP), left + i % 3 * (64 + xy.GAP)
        assert (pixels[row : row + 48, column : column + 64] == np.asarray(image)).all()
    for i in range(3):  # ink above each column, and none that reaches into its neighbour
        column = left + i * (64 + xy.GAP)
        assert pixels[:top, column : column + 64].min() < 60
        assert i == 2 or pixels[:top, column + 64 : column + 64 + xy.GAP].min() == 255
    for i in range(2):
        row = top + i * (48 + xy.GAP)
        assert pixels[row : row + 48, :left].min() < 60
    text = parse_parameters(sheet.info["parameters"])
    assert text.prompt == "a, cat"
    assert text.settings["Seed"] == "1"
    assert (text.settings["X Type"], text.settings["X Values"]) == ("steps", "5, 10, 20")
    assert (text.settings["Y Type"], text.settings["Y Values"]) == ("scale", "1, 7.5")


def test_one_axis_images_of_other_sizes_and_long_labels() -> None:
    sizes = Axis("width", (32, 64))
    images = [Image.new("RGB", (32, 48), "red"), Image.new("RGB", (64, 48), "red")]
    sheet = draw(images, sizes, None)
    assert sheet.width == 2 * 64 + xy.GAP
    assert (np.asarray(sheet)[-48:, 16:48] == (255, 0, 0)).all()  # the narrow one, in the middle of its cell
    assert (np.asarray(sheet)[-48:, :16] == 255).all()
    column = draw(images, None, sizes)
    assert column.height == 2 * 48 + xy.GAP
    long = draw(colours(2), Axis("prompt", ("word " * 80, "x" * 400)), None)
    assert long.width == 2 * 64 + xy.GAP
    assert long.height < 48 + 200  # six lines
    strange = draw(colours(1), Axis("prompt", ("яблоко, 苹果, 🍎\x00\n",)), None)
    assert strange.width == 64


def test_a_third_value_stands_above_and_long_values_beside_are_wrapped() -> None:
    plain = draw(colours(2), Axis("steps", (1, 2)), None)
    titled = draw(colours(2), Axis("steps", (1, 2)), None, Axis("seed", (7,)))
    head = titled.height - plain.height
    assert head > 2 * xy.GAP
    assert np.asarray(titled)[:head].min() < 60
    assert np.array_equal(np.asarray(titled)[head:], np.asarray(plain))
    beside = draw(colours(2, (200, 48)), None, Axis("prompt", ("word " * 40, "b")))
    assert beside.width - 200 <= 100 + 2 * xy.GAP  # half of an image's width


def test_a_picture_that_would_be_too_large_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xy, "MOST_PIXELS", 2000)
    whole = 2 * 48 + xy.GAP  # of two rows
    assert draw(colours(4), Axis("steps", (1, 2)), Axis("seed", (1, 2))).height < whole


# ---- on the command line --------------------------------------------------------------------------------------------


APPLE = ["a red apple", "--steps", "2", "--device", "cpu"]


@pytest.mark.slow
def test_a_plot_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--x", "scale=1,3", "--y", "replace=red,green", "--z", "seed=1,2", "--outdir", str(tmp_path)]
    assert txt2img.main([*APPLE, *flags]) == 0
    assert len(list((tmp_path / "samples").glob("*.png"))) == 8
    plots = sorted(tmp_path.glob("grid-*.png"))
    assert len(plots) == 2
    text = parse_parameters(texts.load(plots[1]).info["parameters"])
    wanted = {"Script": "X/Y/Z plot", "X Type": "scale", "X Values": "1, 3", "Y Type": "replace", "Z Values": "2"}
    assert text.settings.items() >= wanted.items()
    assert text.settings["Seed"] == "2"
    # a cell is the image that its options make alone
    alone = ["a green apple", *APPLE[1:], "--scale", "3", "--seed", "2", "--out", str(tmp_path / "alone.png")]
    assert txt2img.main(alone) == 0
    cell, plot = Image.open(tmp_path / "alone.png").convert("RGB"), Image.open(plots[1]).convert("RGB")
    corner = plot.crop((plot.width - cell.width, plot.height - cell.height, plot.width, plot.height))
    assert np.array_equal(np.asarray(corner), np.asarray(cell))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--x", "scale"], "got --x 'scale', expected OPTION=VALUES"),
        (["--x", "scale=1,2", "--y", "scale=3"], "two axes are --scale"),
        (["--x", "scale=1", "--n_iter", "2"], "leave out --n-iter"),
        (["--x", "n_iter=1,2"], "a plot has one image a cell: no axis is n_iter, batch_size"),
        (["--x", "scale=1", "--skip-grid"], "a plot is a grid: leave out --skip-grid"),
        (["--x", "scale=1-2 [0]"], "got the range '1-2 [0]' of --scale, expected 1 to 400 values from it"),
        (["--x", "replace=pear,apple"], "does not have 'pear'"),
        (["--x", "seed=1-100", "--y", "steps=1-100"], "expected at most 400"),
        (["--x", "seed=1-100", "--z", "steps=1-100"], "expected at most 400"),
    ],
)
def test_mistakes_of_plots_are_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert txt2img.main([*APPLE, *flags, "--outdir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert not list(tmp_path.rglob("*.png"))


def test_a_plot_of_a_picture_s_settings_keeps_those_that_are_no_axis(tmp_path: Path) -> None:
    """Its seed and syntax too, which are no defaults."""
    entries = {"Steps": 2, "Seed": 77, "Prompt syntax": "a1111", "Clip skip": 2, "Version": "ldm_lite 1"}
    path = texts.save(tmp_path / "picture.png", parameters("a (red:1.2) apple", None, entries))
    cell = changed(Txt2imgOptions(from_png=path, clip_skip=1), {"steps": 3})
    assert given(cell) == {"from_png", "clip_skip", "steps"}
    options, _ = check_options(cell)
    assert (options.seed, options.prompt_syntax, options.clip_skip, options.steps) == (77, "a1111", 1, 3)
