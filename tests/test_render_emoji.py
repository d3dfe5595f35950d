"""The emoji scenes, and the statistics of their evaluation; what draws is skipped where the font is not installed."""

import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import evaluate_emoji as evaluation
import numpy as np
import pytest
import render_emoji as emoji
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

from ldm_lite.image import to_pil
from ldm_lite.pipeline import Pipeline

needs_font = pytest.mark.needs("emoji font")


# ---- without the font -----------------------------------------------------------------------------------------------


def test_the_vocabulary_is_in_a_fixed_order_and_every_name_is_of_one_emoji() -> None:
    entries = emoji.VOCABULARY
    assert len(entries) == len({entry.character for entry in entries}) == 1306
    assert [entry.names[0] for entry in entries[:3]] == ["red apple", "cat", "red car"]
    names = [name for entry in entries for name in entry.names]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and name == name.strip().lower() and name for name in names)
    assert emoji.vocabulary(66) == entries[:66]
    assert not any("REGIONAL" in unicodedata.name(e.character, "") or e.character.isascii() for e in entries)


def test_the_table_names_only_what_is_in_the_vocabulary() -> None:
    named = [name.strip().split(" ", 1)[0] for name in emoji.NAMES.replace("\n", " ").split(";")]
    assert len(set(named)) == len(named)
    assert set(named) <= {entry.character for entry in emoji.VOCABULARY}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("owl", "an owl"),
        ("cat", "a cat"),
        ("unicorn", "a unicorn"),
        ("hourglass", "an hourglass"),
        ("octopus", "an octopus"),
        ("glasses", "glasses"),
        ("glass of milk", "a glass of milk"),
        ("stack of books", "a stack of books"),
        ("face with three hearts", "a face with three hearts"),
        ("bow and arrow", "bow and arrow"),
        ("bowl of rice", "a bowl of rice"),
        ("fire", "fire"),
        ("mount fuji", "mount fuji"),
    ],
)
def test_articles(name: str, wanted: str) -> None:
    assert emoji.with_article(name) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cat", "cats"),
        ("fox", "foxes"),
        ("cherry blossom", "cherry blossoms"),
        ("butterfly", "butterflies"),
        ("monkey", "monkeys"),
        ("slice of pizza", "slices of pizza"),
        ("face with tears of joy", "faces with tears of joy"),
        ("computer mouse", "computer mice"),
        ("office building", "office buildings"),
        ("scissors", None),
        ("milk", None),
        ("person bouncing a ball", None),
    ],
)
def test_plurals(name: str, wanted: str | None) -> None:
    assert emoji.plural(name) == wanted


def test_one_combination_in_ten_is_held_out() -> None:
    held = [emoji.in_split("held_out", character.character, 2) for character in emoji.VOCABULARY]
    assert 80 < sum(held) < 180
    assert held == [not emoji.in_split("train", symbol.character, 2) for symbol in emoji.VOCABULARY]
    assert all(emoji.in_split("all", symbol.character) for symbol in emoji.VOCABULARY)


def test_captions() -> None:
    assert emoji.caption(emoji.COLOURED[0], "red apple", "orange") == "a red apple on an orange background"
    assert emoji.caption(emoji.COLOURED[1], "red apple", "blue") == "red apple emoji, blue background"
    phrase = emoji.caption(emoji.BESIDE["left"][0], "cat", second="owl")
    assert phrase == "a cat to the left of an owl"
    assert emoji.ground_caption(emoji.GROUNDS[0], phrase, "orange") == f"{phrase} on an orange background"
    assert emoji.caption(emoji.COUNTED[3][0], "slice of pizza") == "three slices of pizza"
    assert all("{c}" not in t and "{ac}" not in t for t in (*emoji.PLAIN, *emoji.GROUNDS_PLAIN))
    assert not set(evaluation.NEW_WORDINGS) & {*emoji.PLAIN, *emoji.COLOURED}


def test_the_colours_are_far_apart() -> None:
    assert len(emoji.COLOURS) == 16
    assert min(math.dist(a, b) for a, b in itertools.combinations(emoji.COLOURS.values(), 2)) > 100


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"expected 1 to 1306"):
        emoji.scenes(64, emoji=5000)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        emoji.scenes(64, two=2)
    with pytest.raises(ValueError, match="two different"):
        emoji.scenes(64, emoji=1, two=0.5)
    with pytest.raises(ValueError, match="16 or more"):
        emoji.scenes(8)
    with pytest.raises(ValueError, match="expected 1 or less together"):
        emoji.scenes(64, two=0.6, counts=0.6)
    with pytest.raises(ValueError, match="expected one of all, train, held_out"):
        emoji.scenes(64, split="test")
    with pytest.raises(ValueError, match="'count', expected one of"):
        emoji.scenes(64, count=0.5)
    with pytest.raises(ValueError, match="expected 2 to 16"):
        emoji.scenes(64, colours=17)
    with pytest.raises(ValueError, match="got sized 2, expected 0 to 1"):
        emoji.scenes(64, sized=2)
    with pytest.raises(ValueError, match="fluent-emoji-3d"):
        emoji.scenes(64, solid=0.5, pictures=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="fonts-noto-color-emoji"):
        emoji.scenes(64, font=str(tmp_path / "none.ttf"))
    assert emoji.main([str(tmp_path / "out"), "--font", str(tmp_path / "none.ttf")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert evaluation.main(["--count", "0"]) == 2


def test_wilson_intervals() -> None:
    low, high = evaluation.wilson(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert evaluation.wilson(0, 10)[0] == 0
    assert evaluation.wilson(10, 10)[1] == pytest.approx(1)
    assert evaluation.wilson(0, 0) == (0, 1)


def test_prompts_and_verdicts() -> None:
    entries = emoji.vocabulary(66)
    prompts = evaluation.draw_prompts(entries, 400, 0, lambda entry: list(emoji.COLOURS))
    assert prompts == evaluation.draw_prompts(entries, 400, 0, lambda entry: list(emoji.COLOURS))
    assert prompts != evaluation.draw_prompts(entries, 400, 1, lambda entry: list(emoji.COLOURS))
    assert len({prompt.seed for prompt in prompts}) == 400
    assert all(prompt.colour == "white" for prompt in prompts if prompt.template in emoji.PLAIN)
    colours = torch.tensor([emoji.COLOURS[prompt.colour] for prompt in prompts]) / 255
    images = colours[:, :, None, None].expand(-1, 3, 64, 64)
    verdicts = evaluation.judge(images, prompts, lambda x: torch.zeros(len(x), dtype=torch.long))
    groups = evaluation.by_group(verdicts)
    assert {"trained wording", "new wording", *emoji.PLAIN, *evaluation.NEW_WORDINGS} <= set(groups)
    assert all(numbers["background"]["share"] == 1 for numbers in groups.values())  # type: ignore[index]
    right = sum(prompt.label == 0 for prompt in prompts)
    assert evaluation.summary(verdicts)["identity"]["right"] == right  # type: ignore[index]
    json.dumps(groups)
    assert len(evaluation.table(groups).splitlines()) == len(groups)


def test_crops_do_not_depend_on_place_and_resolution() -> None:
    image = torch.full((1, 3, 64, 64), 0.2)
    image[:, 0, 20:40, 24:44] = 0.9
    image[:, 1, 20:30, 24:44] = 0.7
    moved = image.roll((6, -9), (2, 3))
    torch.testing.assert_close(evaluation.crops(image), evaluation.crops(moved), atol=1e-4, rtol=0)
    larger = F.interpolate(image, scale_factor=2, mode="nearest")
    assert (evaluation.crops(image) - evaluation.crops(larger)).abs().mean() < 0.02


def test_sharpness_is_that_of_the_luma_wherever_things_lie() -> None:
    images = torch.full((2, 3, 128, 128), 0.25)
    images[:, 1, 20:100, 15:115] = 0.75
    images[1] = F.avg_pool2d(F.pad(images[1:], (1, 1, 1, 1), mode="replicate"), 3, stride=1)[0]
    (sharp, blurred), (steep, flat) = evaluation.sharpness(images)
    assert sharp > 2 * blurred
    assert steep > 2 * flat
    moved = evaluation.sharpness(images.roll((9, -7), (2, 3)))
    torch.testing.assert_close(torch.stack(moved)[:, 0], torch.stack([sharp, steep]))
    luma = (images[0].permute(1, 2, 0).double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)).numpy()
    centre = luma[1:-1, 1:-1]
    laplacian = luma[2:, 1:-1] + luma[:-2, 1:-1] + luma[1:-1, 2:] + luma[1:-1, :-2] - 4 * centre
    assert float(sharp) == pytest.approx(math.sqrt((laplacian**2).mean()), rel=1e-4)
    slopes = np.hypot(np.diff(luma, axis=0)[:, :-1], np.diff(luma, axis=1)[:-1])
    assert float(steep) == pytest.approx(np.sort(slopes.ravel())[-322:].mean(), rel=1e-4)  # of 127 x 127


def test_grain_and_marks_are_deviations_of_the_frame_in_levels() -> None:
    images = torch.full((2, 3, 128, 128), 100 / 255)
    images[:, :, 4:-4, 4:-4] = 1  # what is inside does not count
    assert evaluation.frames(images) == (0, 0)
    images[0, 0, -1, -1] = 50 / 255
    grain, marks = evaluation.frames(images)
    assert grain == pytest.approx(math.sqrt(50**2 / (2 * 3 * 4 * 124 * 4)), rel=1e-4)
    assert marks == pytest.approx(25, rel=1e-4)


def test_the_distance_of_features_is_frechets() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(60, 5)), random.normal(size=(40, 5)) @ random.normal(size=(5, 5)) + 1
    x, y = np.cov(a.T), np.cov(b.T)
    roots = np.sqrt(np.linalg.eigvals(x @ y).real)
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(x) + np.trace(y) - 2 * roots.sum()
    assert evaluation.frechet(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(wanted)
    assert evaluation.frechet(torch.from_numpy(a), torch.from_numpy(a)) == pytest.approx(0, abs=1e-9)


# ---- with the font --------------------------------------------------------------------------------------------------


@needs_font
@pytest.mark.slow
def test_a_scene_depends_on_its_index_alone() -> None:
    scene = emoji.scenes(64, two=0.3)
    again = pickle.loads(pickle.dumps(scene))
    assert len(pickle.dumps(emoji.scenes(64, emoji=66))) < 10_000
    backwards = {i: again(i) for i in reversed(range(30))}
    for i in range(30):
        image, text = scene(i)
        assert (image.size, image.mode) == ((64, 64), "RGB")
        assert text == backwards[i][1]
        assert image.tobytes() == backwards[i][0].tobytes()
    assert len({scene(i)[1] for i in range(200)}) > 190


@needs_font
@pytest.mark.parametrize("resolution", [32, 64, 128])
def test_the_border_is_of_the_colour_that_the_caption_names(resolution: int) -> None:
    scene = emoji.scenes(resolution, emoji=66, two=0.3)
    plain = 0
    for i in range(120):
        image, text = scene(i)
        words = text.replace(",", "").removesuffix(" background").split()
        before = words[words.index("background") - 1] if "background" in words else words[-1]
        named = before if before in emoji.COLOURS else "white"
        plain += before not in emoji.COLOURS
        pixels, m = np.asarray(image), max(1, resolution // 32)
        for side in (pixels[:m], pixels[-m:], pixels[:, :m], pixels[:, -m:]):
            assert (side == emoji.COLOURS[named]).all()
    assert 10 < plain < 50


@needs_font
def test_freer_words_name_the_same_colour_and_none_of_those_kept_for_evaluation() -> None:
    scene = emoji.scenes(32, emoji=66, jitter=0.0, free=1.0)
    held_out = {"standing", "room", "snapshot", "surroundings", "scenery", "pictogram"}
    for i in range(100):
        image, text = scene(i)
        words = set(text.replace(",", "").split())
        [colour] = [name for name, value in emoji.COLOURS.items() if image.getpixel((0, 0)) == value]
        assert colour in words or colour == "white"
        assert not words & held_out


@needs_font
def test_left_is_left_and_right_is_right() -> None:
    scene = emoji.Scenes(128, emoji.vocabulary(20), two=1.0, jitter=0.0, font=None)
    names = {name: entry.character for entry in emoji.vocabulary(20) for name in entry.names}
    layouts = set()
    for i in range(40):
        image, text = scene(i)
        rng = np.random.default_rng(i)
        rng.random()
        layout = scene.several(rng, two=True).layout
        layouts.add(layout)
        places = sorted((text.find(name), -len(name), name) for name in names if name in text)
        turned = any(words in text for words in (" right of ", " below ", " under ", "at the bottom and", "right and"))
        first = names[places[0][2]]
        corner, (x, y) = image.getpixel((0, 0)), emoji.LAYOUTS[layout][turned]
        assert isinstance(corner, tuple)
        alone = emoji.render(first, corner, 128, size=emoji.SEVERAL, centre=(x, y))  # type: ignore[arg-type]
        box = (int(128 * x) - 32, int(128 * y) - 32, int(128 * x) + 32, int(128 * y) + 32)
        assert image.crop(box).tobytes() == alone.crop(box).tobytes(), text
    assert layouts == {"beside", "stacked"}


@needs_font
def test_two_or_three_of_a_kind() -> None:
    scene, seen = emoji.scenes(64, emoji=200, counts=1.0, jitter=0.0), set()
    for i in range(20):
        image, text = scene(i)
        count = 2 if {"two", "2", "pair"} & set(text.split()) else 3
        seen.add(count)
        pixels = np.asarray(image)
        quarters = [pixels[32:, :32], pixels[32:, 32:]] if count == 3 else [pixels[16:48, :32], pixels[16:48, 32:]]
        assert (quarters[0] == quarters[1]).all()
        assert (quarters[0] != pixels[0, 0]).any()
    assert seen == {2, 3}


@needs_font
def test_objects_have_the_colour_that_the_caption_names() -> None:
    entries = {entry.names[0]: entry for entry in emoji.vocabulary(200)}
    assert emoji.tints(entries["balloon"])["blue"] == "blue balloon"
    assert "blue" not in emoji.tints(entries["red car"])  # "blue car" is the name of another emoji
    assert not emoji.tints(entries["grinning face"])
    for colour in emoji.TINTS:
        main = np.median(np.asarray(emoji.tinted("🎈", colour)).reshape(-1, 4)[:, :3], 0)
        assert min(emoji.TINTS, key=lambda name: math.dist(emoji.COLOURS[name], main)) == colour


@pytest.mark.slow
@needs_font
def test_what_is_held_out_is_never_drawn_for_training() -> None:
    def what(split: str) -> set[tuple[object, ...]]:
        shares = {"counts": 0.2, "tinted": 0.3, "sized": 0.3, "gradients": 0.3}
        scenes = emoji.Scenes(16, emoji.vocabulary(200), 0.3, 0.0, None, **shares, split=split)  # type: ignore[arg-type]
        combinations = set[tuple[object, ...]]()
        for i in range(150):
            rng = np.random.default_rng(i)
            kind = rng.random()
            scene = scenes.several(rng, kind < 0.3) if kind < 0.5 else scenes.one(rng)
            characters = [scenes.entries[thing.label].character for thing in scene.things]
            if len(set(characters)) == 2:
                combinations.add(tuple(sorted(characters)))
            elif len(characters) > 1:
                combinations.add((characters[0], len(characters)))
            else:
                tint, particulars = scene.things[0].tint, list[tuple[object, ...]]()
                particulars += [(characters[0], "tint", tint)] if tint else []
                particulars += [(characters[0], "size", scene.size)] if scene.size else []
                particulars += [("gradient", scene.colour, scene.second)] if scene.second else []
                particulars += [] if scene.second else [(characters[0], scene.colour)]
                combinations.update(particulars[:1] if split == "held_out" else particulars)
        return combinations

    assert all(emoji.in_split("train", *combination) for combination in what("train"))
    assert all(emoji.in_split("held_out", *combination) for combination in what("held_out"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pictures of the second style: a disc in a square's hole, of another colour for each of the first 200 emoji."""
    folder = tmp_path_factory.mktemp("pictures")
    for k, entry in enumerate(emoji.vocabulary(200)):
        image = Image.new("RGBA", (256, 256))
        draw = ImageDraw.Draw(image)
        draw.ellipse((20, 30, 236, 226), fill=(*np.random.default_rng(k).integers(0, 256, 3).tolist(), 255))
        image.save(folder / f"{ord(entry.character):04x}{'-fe0f' if k % 2 else ''}.webp", lossless=True)
    return str(folder)


def test_a_picture_of_the_second_style_is_cropped_and_reduced(pictures: str, tmp_path: Path) -> None:
    character = emoji.vocabulary(1)[0].character
    image = emoji.glyph(character, pictures)
    assert image.mode == "RGBA"
    assert all(abs(side - wanted * 144 / 256) < 3 for side, wanted in zip(image.size, (217, 197), strict=True))
    with pytest.raises(ValueError, match=r"has no picture of U\+1F34E: expected 1f34e.webp"):
        emoji.glyph(character, str(tmp_path))
    (tmp_path / "1f34e.webp").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="unpack the pictures again"):
        emoji.glyph(character, str(tmp_path))


@needs_font
def test_captions_say_the_style_and_only_those_of_the_second_say_3d(pictures: str) -> None:
    scenes, seen = emoji.scenes(64, 200, 0.3, 0.0, solid=0.5, pictures=pictures, counts=0.2, free=0.5), set()
    assert isinstance(scenes, emoji.Scenes)
    for i in range(80):
        rng = np.random.default_rng(i)
        kind = rng.random()
        scene = scenes.several(rng, kind < 0.3) if kind < 0.5 else scenes.one(rng)
        image, text = scenes(i)
        assert text == scene.caption
        assert (scene.style == "3d") == ("3d" in text.replace(":", "").replace(",", "").split())
        flat = dataclasses.replace(scene, style=emoji.FLAT)
        assert (scenes.draw(flat, rng).tobytes() == image.tobytes()) == (scene.style == emoji.FLAT)
        seen.add((scene.style, scene.layout == "one"))
    assert len(seen) == 4


def test_the_font_comes_from_the_environment() -> None:
    code = "import render_emoji, sys; sys.exit(render_emoji.FONT != 'mine.ttf')"
    environment = {**os.environ, "EMOJI_FONT": "mine.ttf", "PYTHONPATH": os.path.dirname(emoji.__file__)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@needs_font
def test_pictures_come_from_the_environment(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emoji.PICTURES, pictures)
    named = emoji.scenes(32, 200, solid=1.0, pictures=pictures)
    assert emoji.scenes(32, 200, solid=1.0) == named
    assert pickle.loads(pickle.dumps(named))(3)[0].tobytes() == named(3)[0].tobytes()


def test_gradients_go_from_the_first_colour_to_the_second() -> None:
    red, blue = emoji.COLOURS["red"], emoji.COLOURS["blue"]
    down, across = (emoji.ground("red", 64, "blue", across) for across in (False, True))
    assert [down.getpixel(at) for at in ((0, 0), (63, 0), (0, 63), (63, 63))] == [red, red, blue, blue]
    assert [across.getpixel(at) for at in ((0, 0), (63, 0), (0, 63), (63, 63))] == [red, blue, red, blue]
    middle = [(a + b) / 2 for a, b in zip(red, blue, strict=True)]
    assert math.dist(np.asarray(down)[31:33].mean((0, 1)), middle) < 4


@needs_font
def test_captions_of_gradients_name_both_colours_in_order_and_say_when_they_go_across() -> None:
    scenes = emoji.scenes(32, 66, 0.3, 0.0, gradients=1.0, free=0.3, counts=0.2)
    assert isinstance(scenes, emoji.Scenes)
    for i in range(60):
        image, text = scenes(i)
        pixels = np.asarray(image)
        first, last = tuple(pixels[0, 0]), tuple(pixels[-1, -1])
        [start] = [name for name, value in emoji.COLOURS.items() if value == first]
        [end] = [name for name, value in emoji.COLOURS.items() if value == last]
        words = text.replace(",", "").split()
        assert start != end
        assert {start, end} <= set(words)
        across = bool((pixels[0, 0] != pixels[0, -1]).any())
        sides = rf"horizontal|{start} (on|at) (the|its) left|{start} left |left {start}|towards|left edge|from left to"
        assert across == (re.search(sides, text) is not None), text


@needs_font
def test_small_is_small_and_large_is_large() -> None:
    scenes, seen = emoji.scenes(128, 66, jitter=0.5, sized=0.7), set()
    assert isinstance(scenes, emoji.Scenes)
    for i in range(60):
        rng = np.random.default_rng(i)
        rng.random()
        scene = scenes.one(rng)
        words = set(scene.caption.replace(",", "").split())
        assert (scene.size == "small") == bool({"small", "tiny", "little"} & words)
        assert (scene.size == "large") == bool({"large", "big", "huge"} & words)
        pixels = torch.from_numpy(np.asarray(scenes(i)[0]).copy()).permute(2, 0, 1) / 255
        assert evaluation.size_of(pixels) == scene.size
        seen.add(scene.size)
    assert seen == {"", "small", "large"}


def test_scenes_of_the_first_twelve_colours_are_on_these_alone() -> None:
    world = evaluation.World(emoji.vocabulary(66), colours=12)
    names = list(emoji.COLOURS)[:12]
    assert evaluation.nearest_colour(torch.tensor([emoji.COLOURS["navy"]]) / 255, 12)[0] in names
    assert world.scenes(64, 0.0).colours == 12


def test_the_background_of_a_gradient_is_found_from_its_corners() -> None:
    for across in (False, True):
        image = torch.from_numpy(np.asarray(emoji.ground("red", 64, "blue", across)).copy()).permute(2, 0, 1) / 255
        filled = image.clone()
        filled[:, 16:48, 20:40] = 0
        assert (evaluation.ground_of(filled[None])[0] - image).abs().max() < 0.1
        assert evaluation.nearest_colour(evaluation.end_colours(filled, across)) == ["red", "blue"]
        apart = evaluation.crops(filled[None])[0, 6]
        assert (apart > 0.1).float().mean() > 0.5  # the crop is of the object, not of the whole gradient


@needs_font
def test_verdicts_on_style_size_and_gradient(pictures: str) -> None:
    world = evaluation.World(emoji.vocabulary(200), styles=evaluation.STYLES, pictures=pictures)
    prompts = evaluation.all_prompts(world, ["one", "sized", "gradient", "tinted"], 80, 0)
    assert {prompt.style for prompt in prompts} == set(evaluation.STYLES)
    assert all(
        ("3d" in prompt.text.replace(":", "").replace(",", "").split()) == (prompt.style == "3d") for prompt in prompts
    )
    scenes, images = world.scenes(128, 0.0), []
    for prompt in prompts:
        scene = prompt.scene or emoji.Scene(prompt.things, "one", False, prompt.colour, "", "", "", prompt.style)
        drawn = scenes.draw(scene, np.random.default_rng(0))
        images.append(torch.from_numpy(np.asarray(drawn).copy()).permute(2, 0, 1) / 255)
    labels = [prompt.label for prompt in prompts]
    verdicts = evaluation.judge(torch.stack(images), prompts, lambda x: torch.tensor(labels))
    assert all(verdict.background for verdict in verdicts)
    assert all(verdict.sized for verdict in verdicts if verdict.prompt.kind == "sized")
    assert sum(verdict.styled for verdict in verdicts) == sum(prompt.style == emoji.FLAT for prompt in prompts)
    summary = evaluation.summary(verdicts)
    assert {"style", "size", "colour", "background", "identity"} <= set(summary)
    moved = dataclasses.replace(verdicts[45], second="white")
    assert verdicts[45].prompt.kind == "gradient"
    assert not dataclasses.replace(moved, second="").background


@needs_font
def test_jitter_and_counts() -> None:
    still = emoji.scenes(64, emoji=1, jitter=0.0)
    shapes = {
        tuple(np.argwhere((np.asarray(still(i)[0]) != still(i)[0].getpixel((0, 0))).any(-1)).min(0)) for i in range(9)
    }
    assert len(shapes) == 1
    assert all("apple" in emoji.scenes(64, emoji=1)(i)[1] for i in range(20))


@pytest.mark.slow
@needs_font
def test_every_emoji_has_a_glyph_that_can_be_seen_and_told_apart() -> None:
    looks = []
    for entry in emoji.VOCABULARY:
        assert "white" in (seen := emoji.backgrounds(entry.character)) or len(seen) >= 8
        assert len(seen) >= 3
        glyph, sides = emoji.glyph(entry.character), []
        for colour in ((255, 255, 255), (0, 128, 0)):
            square = Image.new("RGB", (max(glyph.size),) * 2, colour)
            square.paste(glyph, tuple((square.width - side) // 2 for side in glyph.size), glyph)  # type: ignore[arg-type]
            sides.append(np.asarray(square.resize((24, 24), Image.Resampling.BOX), np.float32).ravel() / 255)
        looks.append(np.concatenate(sides))
    x = torch.from_numpy(np.stack(looks))
    distance = torch.cdist(x, x) / x.shape[1] ** 0.5
    distance.fill_diagonal_(1)
    assert distance.min() > 0.057


@needs_font
def test_render_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="expected one of white, black"):
        emoji.render("🍎", "mauve", 64)
    with pytest.raises(ValueError, match="no glyph"):
        emoji.glyph("\u200b")


@needs_font
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emoji.main([str(tmp_path), "--count", "12", "--resolution", "32", "--emoji", "66", "--two", "0.5"]) == 0
    assert "12 scenes" in capsys.readouterr().out
    assert len(list(tmp_path.glob("0*.png"))) == len(list(tmp_path.glob("*.txt"))) == 12
    image, text = emoji.scenes(32, 66, 0.5)(7)
    assert (tmp_path / "00007.txt").read_text(encoding="utf-8") == text + "\n"
    assert Image.open(tmp_path / "00007.png").convert("RGB").tobytes() == image.tobytes()
    assert (tmp_path / "contact-sheet.png").exists()


@needs_font
def test_held_out_prompts_of_every_kind() -> None:
    entries = emoji.vocabulary(200)
    world = evaluation.World(entries)
    prompts = evaluation.all_prompts(world, evaluation.KINDS, 80, 0, split="held_out")
    assert prompts == evaluation.all_prompts(world, evaluation.KINDS, 80, 0, split="held_out")
    assert len({prompt.seed for prompt in prompts}) == 80
    for prompt in prompts:
        characters = [entries[thing.label].character for thing in prompt.things]
        what: dict[str, tuple[object, ...]] = {
            "one": (characters[0], prompt.colour),
            "tinted": (characters[0], "tint", prompt.things[0].tint),
            "two": tuple(sorted(characters)),
            "counted": (characters[0], len(characters)),
            "sized": (characters[0], "size", prompt.scene.size if prompt.scene else ""),
            "gradient": ("gradient", prompt.colour, prompt.scene.second if prompt.scene else ""),
        }
        assert emoji.in_split("held_out", *what[prompt.kind])
        assert prompt.colour == "white" or prompt.colour in prompt.text
    assert {prompt.kind for prompt in prompts} == set(evaluation.KINDS)
    assert {prompt.group for prompt in prompts} == {"trained wording", "new wording"}


@needs_font
def test_every_object_is_judged_at_its_place() -> None:
    pair = (emoji.Thing(0, "", "red apple"), emoji.Thing(1, "", "cat"))
    for layout in ("beside", "stacked"):
        scene = emoji.Scene(pair, layout, True, "blue", "", "", "")
        drawn = emoji.Scenes(128, emoji.VOCABULARY, 1.0, 0.0, None).draw(scene, np.random.default_rng(0))
        image = torch.from_numpy(np.asarray(drawn).copy()).permute(2, 0, 1) / 255
        first, second = evaluation.places(image, layout)
        prompt = evaluation.Prompt("", "", 0, "blue", 0, "two", scene)

        def classify(cuts: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0 if torch.equal(cut, first) else 1 for cut in cuts])  # noqa: B023

        verdict = evaluation.judge(image[None], [prompt], classify)[0]
        assert not torch.equal(first, second)
        assert (verdict.background, verdict.identity, verdict.labels) == (True, True, (0, 1))
        swapped = dataclasses.replace(verdict, labels=(1, 0))
        assert not swapped.identity
        unsided = dataclasses.replace(prompt, scene=dataclasses.replace(scene, sided=False))
        assert dataclasses.replace(swapped, prompt=unsided).identity
        assert not dataclasses.replace(verdict, layout="three").placed


@needs_font
def test_the_colour_of_an_object_is_the_nearest_of_its_own() -> None:
    entry = next(entry for entry in emoji.vocabulary(200) if entry.names[0] == "balloon")
    for colour in ("blue", "yellow", "purple"):
        image = torch.from_numpy(np.asarray(emoji.render(entry.character, "white", 64, tint=colour)).copy())
        assert evaluation.nearest_tint(image.permute(2, 0, 1) / 255, entry, True, "white", None) == colour
    red = torch.from_numpy(np.asarray(emoji.render(entry.character, "white", 64)).copy()).permute(2, 0, 1) / 255
    assert evaluation.nearest_tint(red, entry, True, "white", None, "red") == "red"  # its own colour, asked for
    assert evaluation.nearest_tint(red, entry, True, "white", None, "blue") == ""


@needs_font
def test_looks_of_renders_are_those_of_renders(bundled: Pipeline) -> None:
    """Those of the renders themselves, and of what is left of them when they are blurred."""
    world = evaluation.World(emoji.vocabulary(40))
    prompts = evaluation.all_prompts(world, ("one",), 3, 0)
    torch.manual_seed(0)
    classify = evaluation.Descriptor(evaluation.network(40).eval(), 1, 1, evaluation.layout_network(), world)
    x = evaluation.renders_of(prompts, world)
    same, sheet = evaluation.looks(bundled, prompts, x, x, classify)
    assert (same["laplacian"], same["gradients"], same["grain"], same["marks"]) == (1, 1, 0, 0)
    assert same["fid"] == pytest.approx(0, abs=1e-4)
    assert same["fid_renders"] > 1e-5
    assert 24 < same["psnr_350"] + 4 < same["psnr"] < 40
    assert np.array_equal(np.asarray(sheet)[2:130, 2:130], np.asarray(to_pil(2 * x[0] - 1)))
    blurred = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    worse, _ = evaluation.looks(bundled, prompts, x, blurred, classify)
    assert max(worse["laplacian"], worse["gradients"]) < 0.8
    assert worse["psnr"] == same["psnr"]
    assert worse["fid"] > 1e-5


@pytest.mark.slow
@needs_font
def test_layouts_are_told_apart() -> None:
    entries, names = emoji.vocabulary(200), list(emoji.LAYOUTS)
    torch.manual_seed(0)
    net, right = evaluation.train_layouts(evaluation.World(entries), 600), 0
    scenes = emoji.Scenes(128, entries, 0.0, 0.3, None, gradients=0.3)
    for k in range(60):
        rng = np.random.default_rng(k)
        scene = scenes.several(rng, k % 3 == 0) if k % 2 else scenes.one(rng)
        image = torch.from_numpy(np.asarray(scenes.draw(scene, rng)).copy()).permute(2, 0, 1)[None] / 255
        right += names[int(net(evaluation.occupied(image)).argmax())] == scene.layout
    assert right >= 55


@needs_font
def test_the_judge_is_right_on_true_renders() -> None:
    names = list(emoji.COLOURS)
    pictures = [np.asarray(emoji.render("🐶", name, 64)) for name in names]
    images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    assert evaluation.nearest_colour(evaluation.border_colour(images)) == names
