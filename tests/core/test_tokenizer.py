"""CLIP's tokens against transformers' and open_clip's, the cleaning of prompts against ftfy's, and odd texts."""

import json
import re

import pytest
import torch
from references import DATA

from ldm_lite.core.tokenizer import END, START, CLIPTokenizer, fix_text

CASES = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))["cases"]
CLEANED = json.loads((DATA / "clean.json").read_text(encoding="utf-8"))["cases"]


def test_ids_are_those_of_transformers() -> None:
    """Of all texts that cleaning leaves as they are: transformers' fast tokenizer does not clean."""
    tokenizer, count = CLIPTokenizer(), 0
    for case in CASES:
        text = case["pattern"] * case["repeat"]
        if fix_text(text) == text:
            assert tokenizer([text]).tolist() == [case["ids"] + [END] * (77 - len(case["ids"]))], ascii(text[:40])
            assert (tokenizer.dropped(text) == "") == (case["total"] <= 77), ascii(text[:40])
            assert text.strip().endswith(tokenizer.dropped(text)), ascii(text[:40])
            count += 1
    assert count > 115


# What is not done here: entities that are none or in capitals, and the repetition until nothing changes.
REST = ("&notanentity;", "&EACUTE;", "&amp;amp;", "&gt;&gt;&amp", "\x1b\uff3b", "\n")


def test_cleaning_is_that_of_ftfy() -> None:
    """But for the repair of encodings, and for capitals, which make no difference to tokens."""
    cases = [case for case in CLEANED if not any(text in case["text"] for text in REST)]
    assert len(cases) > 65
    for case in cases:
        assert fix_text(case["text"]).lower() == case["plain"].lower(), ascii(case["text"])
        wanted = [START, *case.get("ids", ())[:75], END]
        if "ids" in case and not re.search("&|'\u017f", case["plain"]):  # open_clip reads these in ways of its own
            assert CLIPTokenizer()([case["text"]])[0, : len(wanted)].tolist() == wanted, ascii(case["text"])


def test_a_batch_is_its_rows() -> None:
    texts, tokenizer = [case["pattern"] for case in CASES], CLIPTokenizer()
    assert torch.equal(tokenizer(texts), torch.cat([tokenizer([text]) for text in texts]))
    assert tokenizer([]).shape == (0, 77)


def test_length_and_padding() -> None:
    astronaut = [START, 320, 1125, 539, 550, 18376, END]
    text = "a photo of an astronaut"
    assert CLIPTokenizer(pad=0)([text]).tolist() == [astronaut + [0] * 70]
    assert CLIPTokenizer(length=8)([text]).tolist() == [[*astronaut, END]]
    assert CLIPTokenizer(length=5)([text]).tolist() == [[*astronaut[:4], END]]
    assert CLIPTokenizer(length=5).dropped(text) == "an astronaut"
    assert CLIPTokenizer(length=2).dropped(" a photo") == "a photo"


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("a " * 75, ""),
        ("a " * 75 + "Red  Fox \n", "Red  Fox"),  # as it was written: neither lower case nor one space
        ("a " * 74 + "don't", "'t"),
        ("\U0001f34e " * 75 + "\U0001f98a fox", "\U0001f98a fox"),
        ("a " * 74 + "\u65e5\u672c\u8a9e", "\u672c\u8a9e"),
        ("a " * 75 + "\u201cred\u201d", '"red"'),
        ("<|endoftext|>" * 76, "<|endoftext|>"),
    ],
)
def test_what_does_not_fit_is_told(text: str, dropped: str) -> None:
    assert CLIPTokenizer().dropped(text) == dropped


def test_errors_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"got a text with a lone surrogate, 'a \\ud800', expected valid Unicode"):
        CLIPTokenizer()(["a \ud800"])
    with pytest.raises(ValueError, match="got a text of 20,001 characters, expected at most 20,000"):
        CLIPTokenizer()(["x" * 20_001])
