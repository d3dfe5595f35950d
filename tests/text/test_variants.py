"""Templates of prompts: dynamicprompts' syntax, draws by the seed, files of wildcards, hostile texts."""

import contextlib
import json
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.features.templates import Templates
from ldm_lite.text.variants import Prompts, parse
from ldm_lite.txt2img import main

# What the package dynamicprompts 0.31 (CombinatorialPromptGenerator) makes of each, sorted.
GOLDENS: dict[str, list[str]] = json.loads((Path(__file__).parents[1] / "data" / "variants.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "colour.txt").write_text("red\n# no\nblue  # the sky's\n\n")
    (tmp_path / "sub" / "animal.txt").write_text("cat\ndog __colour__\n")
    return tmp_path


@pytest.mark.parametrize("text", GOLDENS)
def test_all_prompts_are_those_of_dynamicprompts(text: str, folder: Path) -> None:
    prompts = Prompts(folder)
    assert sorted(set(prompts.all(text))) == GOLDENS[text]
    drawn = {prompts.one(text, seed) for seed in range(len(GOLDENS[text]) * 30)}
    assert sorted(drawn) == GOLDENS[text]


def test_a_seed_always_draws_the_same() -> None:
    text = "{a|b|c} {2$$x|y|z}"
    assert [Prompts(None).one(text, seed) for seed in range(9)] == [Prompts(None).one(text, seed) for seed in range(9)]


def test_weights_are_shares() -> None:
    counts = Counter(Prompts(None).one("{3::a|b|0::c}", seed) for seed in range(4000))
    assert counts.keys() == {"a", "b"}
    assert abs(counts["a"] / 4000 - 0.75) < 0.03


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a \{b\|c\} \__x__", "a {b|c} __x__"),
        ("a|b $5 snake_case __ x", "a|b $5 snake_case __ x"),
        ("{a $$ b}", "a $$ b"),
        ("(a:1.3) [b]", "(a:1.3) [b]"),
        ("", ""),
    ],
)
def test_ordinary_text_stays(text: str, expected: str) -> None:
    assert Prompts(None).all(text) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a {b|c", "has an opening brace without a closing one"),
        ("a b}", "has a closing brace without an opening one"),
        ("{3-1$$a|b}", "takes 3-1 variants"),
        ("__none__", "holds no line for the wildcard __none__, expected none.txt"),
        ("__../secret__", "expected a name inside"),
        ("__/etc/passwd__", "expected a name inside"),
        ("__loop__", "does a wildcard contain itself"),
        ("{" * 21 + "}" * 21, "deep, expected at most"),
    ],
)
def test_errors_are_one_line(sd: Pipeline, text: str, message: str, folder: Path) -> None:
    (folder / "loop.txt").write_text("a __loop__\n")
    (folder.parent / "secret.txt").write_text("x\n")
    for dynamic in ("random", "all"):
        with pytest.raises(ValueError, match=message):
            sd.txt2img(text, wildcards=folder, dynamic=dynamic)
    with pytest.raises(ValueError, match="give one with `wildcards=DIR`"):
        sd.txt2img("__colour__", dynamic="random")
    with pytest.raises(ValueError, match="is not a folder"):
        sd.txt2img("a", wildcards=folder / "colour.txt")


@pytest.mark.parametrize(
    "text",
    [
        *("{a|b}" * 4000, "{" * 20000, "}" * 20000, "|" * 20000, "{a|" * 6000, "_" * 20000, "{" + " " * 19000),
        *("{9$$" + "a|" * 9000 + "}", "{" + "{a|b}" * 30 + "}", "{a|{b|" * 9 + "{c|d}" * 30 + "}}" * 9),
        *("{2-9999$$" + "{a|b}|" * 1000 + "}", "{a|b}" * 12 + "a" * 19000, "{7$$" + "{a|b}|" * 12 + "}"),
        *("{5000$$__many__}", "{1-5000$$__many__}", "__many__" * 2000, "{2$$__many__}" * 1000, "__nested__"),
        *("{5000$$" + "1|2::b|" * 2500 + "}", "__**/**/**/**/many__", "__" + "*" * 5000 + "x__"),
    ],
)
def test_hostile_texts_take_no_time_and_little_memory(text: str, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("\n".join("x" * (i % 50 + 1) for i in range(20_000)))
    (tmp_path / "nested.txt").write_text("__nested2__" * 1000 + "\n" + "__many__" * 1000)
    (tmp_path / "nested2.txt").write_text("{|}__nested3__" * 1000)
    (tmp_path / "nested3.txt").write_text("{{|}|}" * 1000)
    prompts = Prompts(tmp_path)
    prompts.lines("many")
    start = time.process_time()
    with contextlib.suppress(ValueError):
        assert len(prompts.one(text, 0)) <= 40_000
    with contextlib.suppress(ValueError):
        assert len(prompts.all(text)) <= 10_000
    assert time.process_time() - start < 10
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        prompts.all(text)
    assert tracemalloc.get_traced_memory()[1] < 60e6
    tracemalloc.stop()


def test_prompts_are_counted_before_any_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts(folder)
    for text in (*GOLDENS, "{0$$a|b}", "{0-2$$ and $$a|bb|{c|dd}} x", "{1-3$$__*__} {2::a|__colour__}"):
        variants = prompts.all(text)
        assert prompts._size(parse(text), 0) == (len(variants), sum(map(len, variants)))
    monkeypatch.setattr(Prompts, "_every", None)
    for text in ("{a|b}" * 14, "{8$$a|b|c|d|e|f|g|h}", "{a|b}" * 13 + "a" * 3000):
        with pytest.raises(ValueError, match="makes more than 10000 prompts, or 10000000 characters: draw some"):
            prompts.all(text)


def test_lines_of_a_wildcard_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x\n" * 300)
    (tmp_path / "b.txt").write_text("x\n" * 300)
    monkeypatch.setattr("ldm_lite.text.variants.MOST_LINES", 500)
    assert len(Prompts(tmp_path).lines("a")) == 300
    with pytest.raises(ValueError, match="more than 500 lines for the wildcard __\\*__"):
        Prompts(tmp_path).lines("*")
    monkeypatch.setattr("ldm_lite.text.variants.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"b\.txt: is too large"):
        Prompts(tmp_path).lines("*")
    with pytest.raises(ValueError, match=r"^got the wildcard __y{40}\.\.\., expected at most 100 characters$"):
        Prompts(tmp_path).lines("y" * 20_000)


def test_each_image_draws_by_its_own_seed() -> None:
    template = "{a|b|c|d} and {a|b|c|d}"
    options = Templates(dynamic="random").check(Txt2imgOptions(template, seed=5, batch_size=4, n_iter=2))
    assert options.prompt == tuple(Prompts(None).one(template, seed) for seed in range(5, 13))


@pytest.mark.slow
def test_images_take_their_own_prompts(small_path: Path, folder: Path) -> None:
    pipe: Pipeline = ldm_lite.load(small_path, device="cpu")
    run: dict[str, Any] = {"steps": 1, "seed": 5, "output": "result", "wildcards": folder}
    result = pipe.txt2img("a __colour__ {car|bus}", batch_size=3, n_iter=2, **run)
    assert {picture.prompt for picture in result} <= {"a red car", "a red bus", "a blue car", "a blue bus"}
    assert len({picture.prompt for picture in result}) > 1
    for k in (0, 5):  # each by its own seed
        [again] = pipe.txt2img("a __colour__ {car|bus}", **run | {"seed": 5 + k})
        assert again.prompt == result[k].prompt
    assert [picture.seed for picture in result] == [5, 6, 7, 8, 9, 10]
    assert all(picture.parameters.startswith(picture.prompt) for picture in result)
    alone = pipe.txt2img(result[4].prompt, steps=1, seed=9, output="numpy")[0]
    assert np.abs(alone.astype(int) - result[4].array).max() <= 1
    every = pipe.txt2img("a __colour__ {car|bus}", dynamic="all", **run)
    assert [picture.prompt for picture in every] == ["a red car", "a red bus", "a blue car", "a blue bus"]
    image = np.zeros((64, 64, 3), np.uint8)
    assert len(pipe.img2img("{a|b}", [image, image], dynamic="all", steps=2, output="result")) == 4
    with pytest.raises(ValueError, match="take prompts as they are"):
        pipe.txt2img("{a|b}", dynamic="all", compat=True)
    assert pipe.txt2img("{a|b}", steps=1, output="result")[0].prompt == "{a|b}"


def test_the_command(small_path: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ckpt", str(small_path), "--device", "cpu", "--steps", "1", "--out", str(tmp_path / "out")]
    assert main(["a {b|c} __colour__", *arguments, "--wildcards", str(folder), "--dynamic", "all", "--skip_grid"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["a {b|c", *arguments, "--dynamic", "random"]) == 2
    assert "opening brace without a closing one" in capsys.readouterr().err
