"""Prompts that are written for other programs get a line; ordinary ones get none."""

from pathlib import Path

import pytest

import ldm_lite
from ldm_lite.text.other_syntax import SIGNS, signs_in

NATURAL = (Path(__file__).parents[1] / "data" / "natural_prompts.txt").read_text(encoding="utf-8").splitlines()
WEIGHTS, CHANGES = "`prompt_syntax=a1111` reads weights", "`prompt_syntax=a1111` reads prompts that change"
AND, BREAK = "`prompt_syntax=a1111` reads prompts joined by AND", "`prompt_syntax=a1111` reads BREAK"
CHOICE, LINES = "`dynamic=random` chooses one of them", "`wildcards=DIR` has its lines"
LORA, NAME = "leave it out, and give `lora=FILE:WEIGHT`", "give `embedding=FILE`, and write its name alone"
COMPEL = "compel's weights are (cat:1.3) with `prompt_syntax=a1111`"
BESIDE = "options are given beside the prompt: `width`, `height`, `seed`, `negative_prompt`"
FOREIGN = [
    ("(a cat:1.5) on a mat", "(a cat:1.5)", WEIGHTS),
    ("photo, (best quality:1.2), (8k:.9)", "(best quality:1.2)", WEIGHTS),
    ("((masterpiece)), 1girl", "((masterpiece))", WEIGHTS),
    (r"saber \(fate\), smile", r"\(", WEIGHTS),
    ("a [cat:dog:0.5] on a mat", "[cat:dog:0.5]", CHANGES),
    ("a mat [with a dog:10]", "[with a dog:10]", CHANGES),
    ("[cat::10] on a mat", "[cat::10]", CHANGES),
    ("a [cow|horse] in a field", "[cow|horse]", CHANGES),
    ("a cat AND a dog", "a cat AND a dog", AND),
    ("a red cat AND a blue dog AND two birds", "a red cat AND a blue dog AND two birds", AND),
    ("sea :1 AND a ship", "a :1 AND", AND),
    ("the sea AND a ship :0.8", "the sea AND a ship :0.8", AND),
    ("a girl in red, BREAK a boy in blue", ", BREAK a", BREAK),
    ("a girl in red\nBREAK\na boy", "BREAK", BREAK),
    ("a {red|blue} car", "{red|blue}", CHOICE),
    ("a {2$$red|blue|green} car", "{2$$red|blue|green}", CHOICE),
    ("a __colour__ car", "__colour__", LINES),
    ("a __cars/old-ones__ car", "__cars/old-ones__", LINES),
    ("a cat <lora:sketch:0.8>", "<lora:sketch:0.8>", LORA),
    ("a cat, embedding:bad-hands.pt", "embedding:bad-hands.pt", NAME),
    ("a (cat)++ on a mat", "(cat)++", COMPEL),
    ("a cat++ on a mat", "cat++", COMPEL),
    ("a (blue cat)-- on a mat", "(blue cat)--", COMPEL),
    ("a (blue cat)1.4 on a mat", "(blue cat)1.4", COMPEL),
    ('("a cat", "a dog").blend(0.5, 0.5)', '").blend(', COMPEL),
    ("a cat --ar 16:9 --v 6", "--ar 16:9", BESIDE),
    ("a cat --n blurry --w 512", "--n blurry", BESIDE),
]


@pytest.mark.parametrize(("prompt", "sign", "advice"), FOREIGN)
def test_what_is_written_for_another_program_gets_one_line(prompt: str, sign: str, advice: str) -> None:
    assert list(signs_in(prompt)) == [f"{sign} in the prompt is read as words: {advice}"]


def test_every_sign_is_tried() -> None:
    assert {sign.advice for sign in SIGNS} == {advice for _, _, advice in FOREIGN}


def test_ordinary_text_gets_none() -> None:
    assert len(NATURAL) >= 200
    assert {prompt: lines for prompt in NATURAL if (lines := list(signs_in(prompt)))} == {}
    assert list(signs_in("\n".join(NATURAL[:20]))) == []


def test_what_is_read_is_not_named() -> None:
    """In A1111's syntax; a text encoder without weights cannot be given some."""
    for prompt, _, advice in FOREIGN:
        assert (list(signs_in(prompt, "a1111")) == []) == (advice in (WEIGHTS, CHANGES, AND, BREAK))
    [line] = signs_in("(a cat:1.5)", has_weights=False)
    assert line == "(a cat:1.5) in the prompt is read as words: this model's text encoder cannot weight parts"


def test_a_long_prompt_is_quoted_in_part() -> None:
    [line] = signs_in(f"(a {'very ' * 50}small cat:1.5)")
    assert len(line) < 150


def test_a_pipeline_says_it(small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    pipe.txt2img("a (cat:1.5)", negative_prompt="(hands)++", steps=1)
    assert [record.getMessage() for record in caplog.records if "as words" in record.getMessage()] == [
        f"(cat:1.5) in the prompt is read as words: {WEIGHTS}",
        f"(hands)++ in the prompt is read as words: {COMPEL}",
    ]
    caplog.clear()
    pipe.txt2img("a (cat:1.5)", prompt_syntax="a1111", steps=1)
    pipe.txt2img("a {cat|dog}", dynamic="random", steps=1)
    assert "as words" not in caplog.text
