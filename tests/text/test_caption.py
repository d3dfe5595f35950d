"""Prompts for DeepFloyd IF, cleaned as the original cleans them (the goldens)."""

import json
from pathlib import Path

import pytest
import toy

from ldm_lite.text.caption import clean

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "captions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "wanted"), list(zip(toy.CAPTIONS, GOLDEN, strict=True)))
def test_equals_the_original(text: str, wanted: str) -> None:
    assert clean(text) == wanted


def test_a_plain_prompt_stays_as_it_is_but_for_its_case() -> None:
    assert clean("A red apple on a blue background") == "a red apple on a blue background"


@pytest.mark.slow
def test_longer_texts_are_refused() -> None:
    for text in ("a" * 10**8, "a " * 10**7):
        with pytest.raises(ValueError, match="expected at most 2,000"):
            clean(text)
