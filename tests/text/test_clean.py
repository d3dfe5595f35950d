"""Cleaned prompts against ftfy and open_clip's tokenizer (the goldens), and where they are cleaned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ldm_lite import Pipeline
from ldm_lite.conditioning.prompts import chunks
from ldm_lite.text import clean
from ldm_lite.text.bert import BERTTokenizer
from ldm_lite.text.tokenizer import FixingCLIPTokenizer, OpenCLIPTokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "clean.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(autouse=True)
def without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "_ftfy", lambda: None)


def test_is_ftfy_s_but_for_the_repair_of_encodings() -> None:
    for case in GOLDEN:
        assert clean.fix_as_ftfy(case["text"]) == case["plain"]


def test_what_ftfy_would_decode_again_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for text in [case["text"] for case in GOLDEN if "fixed" in case]:
        caplog.clear()
        clean.fix_as_ftfy(text)
        assert "may have been decoded with a wrong encoding" in caplog.text, ascii(text)
    caplog.clear()
    for text in (
        "don\u2019t \u201cstop\u201d",
        "na\u00efve fa\u00e7ade",
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u65e5\u672c",
    ):
        clean.fix_as_ftfy(text)
    assert not caplog.text


def test_ftfy_does_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(clean, "_ftfy", lambda: lambda text: text.replace("\u00c3\u00b6", "\u00f6"))
    assert clean.unescape("sch\u00c3\u00b6n &amp") == "sch\u00f6n &"
    assert not caplog.text


def test_ids_are_those_of_open_clip() -> None:
    tokenizer = OpenCLIPTokenizer()
    for case in GOLDEN:
        if "ids" in case and "'\u017f" not in case["plain"]:  # a long s after an apostrophe is an s there
            assert tokenizer.encode(tokenizer.clean(case["text"])) == case["ids"], ascii(case["text"])


def test_typographic_prompts_are_plain_ones(bundled: Pipeline) -> None:
    curly, straight = "don\u2019t \u201cstop\u201d &hearts;", 'don\'t "stop" \u2665'
    for syntax in ("plain", "a1111"):
        for tokenizer in (FixingCLIPTokenizer(), OpenCLIPTokenizer()):
            assert torch.equal(chunks(tokenizer, [curly], syntax).ids, chunks(tokenizer, [straight], syntax).ids)
    contexts = [bundled.encode_prompt(text).context for text in (curly, straight)]
    assert torch.equal(*contexts)


def test_only_open_clip_unescapes_without_semicolon_or_beside_a_tag() -> None:
    assert FixingCLIPTokenizer().clean("a &amp b <i> &gt;") == "a &amp b <i> &gt;"
    assert OpenCLIPTokenizer().clean("a &amp b <i> &gt;") == "a & b <i> >"
    assert BERTTokenizer().clean("don\u2019t") == "don\u2019t"


def test_names_of_embeddings_stay() -> None:
    tokenizer = replace(OpenCLIPTokenizer(), added=(("it\u2019s", (50000,)),))
    assert tokenizer.encode(tokenizer.clean("a it\u2019s \u201cb\u201d")) == [320, 50000, *tokenizer.encode('"b"')]
