"""Words that a text encoder was not trained on are said, and token tables are whole again."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_sd1 import CLIP_PREFIX, METADATA, weights
from safetensors.torch import save_file
from torch import Tensor

from ldm_lite.core import Pipeline, load
from ldm_lite.core.family import PREFIX
from ldm_lite.core.words import main, unknown_words

LIST = (
    "🍎 red apple, apple\n🌶 chili pepper\n🎱 8 ball, eight ball\n🍀 four-leaf clover\n"
    "colours: white\nbesides: a, on, 2, t-shirt"
)
TABLE = f"{CLIP_PREFIX}embeddings.token_embedding.weight"
ROWS = TABLE.replace("weight", "rows")


@pytest.mark.parametrize(
    "text",
    ["", "A red APPLE, on white!", "🍎🍎 (2)", "🌶️", "🌶", "a T-shirt -- on", "2 Eight ball", "a four leaf clover"],
)
def test_words_of_the_list_are_known(text: str) -> None:
    assert unknown_words(text, LIST) == ""
    assert unknown_words(f"{text} zeppelin", "") == "", "without a list nothing is known of words"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Albert Einstein on an aple", ["'Albert', 'Einstein', 'an', 'aple'", "nearest: apple"]),
        ("12 apple", ["'12'"]),
        ("eight apple, 8 on a ball of four", ["with 'eight', '8', 'of', 'four', which"]),  # "8" is known in "8 ball"
        ("🍎🧬", ["with '🧬', which"]),
        ("été, 猫", ["'été', '猫'"]),
        ("b c d e f g", ["'f', ..., which"]),
    ],
)
def test_other_words_are_said_with_those_that_are_spelled_alike(text: str, parts: list[str]) -> None:
    message = unknown_words(text, LIST)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    assert ".words` lists what it knows" in message


def test_a_model_says_what_it_was_not_trained_with(small: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    taught = replace(small, family=replace(small.family, words=LIST))
    taught.encode_prompt(["a red apple", "a zeppelin"])
    [message] = caplog.messages
    assert message.startswith(f"{small.name} was not trained with 'zeppelin', ")


def write(path: Path, content: dict[str, Tensor]) -> Path:
    """Write tensors with the list of words."""
    save_file(content, path, METADATA | {f"{PREFIX}words": LIST})
    return path


def rows_alone(content: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """The same content with rows of its token table alone."""
    return {**content, TABLE: content[TABLE][rows], ROWS: torch.tensor(rows, dtype=torch.int32)}


def test_a_table_of_learned_rows_is_the_whole_one(tmp_path: Path) -> None:
    content = weights()
    rows = [0, 3, 500, len(content[TABLE]) - 1]
    packed = load(write(tmp_path / "packed.safetensors", rows_alone(content, rows)))
    table = packed.networks["clip"].embeddings.token_embedding.weight
    assert torch.equal(table[rows], content[TABLE][rows].to(table.dtype))
    assert int(table.any(dim=1).sum()) == len(rows)
    assert packed.family.words == LIST

    packed.save(tmp_path / "saved.safetensors")
    again = load(tmp_path / "saved.safetensors")
    assert torch.equal(again.networks["clip"].embeddings.token_embedding.weight, table)
    assert again.family == packed.family


@pytest.mark.parametrize("rows", [[3, 0], [0, 0], [-1, 5], [0, 2**21], [0]])
def test_rows_without_rising_numbers_are_one_line(rows: list[int], tmp_path: Path) -> None:
    content = rows_alone(weights(), [0, 1])
    content[ROWS] = torch.tensor(rows, dtype=torch.int32)
    path = write(tmp_path / "packed.safetensors", content)
    with pytest.raises(ValueError, match=r"packed\.safetensors the row numbers of .* do not ascend"):
        load(path)


def test_the_command_lists_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "listed.safetensors", {"x": torch.ones(1)})
    for name, status, out in ((path, 0, LIST), (tmp_path / "none.safetensors", 1, "")):
        monkeypatch.setattr(sys, "argv", ["words", str(name)])
        assert main() == status
        printed = capsys.readouterr()
        assert printed.out.strip() == out
        assert bool(printed.err) == bool(status)
    monkeypatch.setattr(sys, "argv", ["words", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "usage: python -m ldm_lite.core.words [-h] [file]" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "end"), [(76, "dropped: apple"), (2000, "apple appl...")])
def test_the_end_of_a_prompt_that_is_too_long_is_shown_in_part(
    words: int, end: str, small: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    small.encode_prompt(" ".join(["apple"] * words))
    [message] = caplog.messages
    assert message.startswith("the prompt is too long, dropped: apple")
    assert message.endswith(end)
    assert len(message) < 200
