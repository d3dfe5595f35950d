"""Texts of any size and shape: each works or is refused within a second or two."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.conditioning import inputs
from ldm_lite.img2img import main as img2img
from ldm_lite.text.bert import BERTTokenizer
from ldm_lite.text.caption import clean
from ldm_lite.train.data import open_folder
from ldm_lite.txt2img import main as txt2img

N = 20_000  # more are refused
SHAPES = {
    "a word": "a" * N,
    "commas": "," * N,
    "brackets": "(" * N,
    "open brackets": "(a" * (N // 2),
    "nested brackets": "(a" * (N // 3) + ")" * (N // 3),
    "both brackets": "([" * (N // 2),
    "square brackets": "[a" * (N // 2),
    "weights": "(a:1" * (N // 4),
    "a long weight": "(a:" + "1" * (N - 3),
    "a long gap": "(a:" + " " * (N - 3),
    "breaks": "BREAK " * (N // 6),
    "backslashes": "\\" * N,
    "emoji": "\U0001f600" * N,
    "accents": "a" + "\u0301" * (N - 1),
    "dots": "a." * (N // 2),
    "entities": "&amp;" * (N // 5),
}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 10  # on a slow machine


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thin(3)
def test_texts_of_every_shape_end_soon(name: str, sd: Pipeline, bundled: Pipeline) -> None:
    text = SHAPES[name]
    for pipe in (sd, bundled):
        pipe.encode_prompt(text)
    refused = pytest.raises(ValueError, match=r"expected at most 100|more than 100 brackets")
    with contextlib.nullcontext() if name in ("a word", "a long gap", "entities") else refused:
        sd.encode_prompt(text, prompt_syntax="a1111")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thin(3)
def test_texts_for_other_encoders_end_soon(name: str) -> None:
    BERTTokenizer()([SHAPES[name]])
    clean(SHAPES[name][:2000])


@pytest.mark.slow
def test_longer_texts_are_refused(small_path: Path) -> None:
    pipe: Pipeline = ldm_lite.load(small_path, device="cpu")
    for text in ("a" * 10**8, "a " * 10**7):
        wanted = f"got a text of {len(text):,} characters, expected at most 20,000"
        for syntax in ("plain", "a1111"):
            with pytest.raises(ValueError, match=wanted):
                pipe.txt2img(text, prompt_syntax=syntax)
            with pytest.raises(ValueError, match=wanted):
                pipe.txt2img(["a cat", text], prompt_syntax=syntax)
            with pytest.raises(ValueError, match=wanted):
                pipe.encode_prompt(text, prompt_syntax=syntax)
        with pytest.raises(ValueError, match=wanted):
            pipe.txt2img("a cat", negative_prompt=text)


def test_weights_are_finite(sd: Pipeline) -> None:
    contexts = [sd.encode_prompt(text, prompt_syntax="a1111").context for text in ("(a:2.)", "(a:2)", "a")]
    assert torch.equal(contexts[0], contexts[1])
    assert not torch.equal(contexts[0], contexts[2])
    for text in (f"(a:{'9' * 400})", "((((a:1000):1000):1000):1000)"):
        with pytest.raises(ValueError, match=r"got a prompt with the weight .*, expected at most 1000000"):
            sd.encode_prompt(text, prompt_syntax="a1111")


@pytest.mark.parametrize("command", [txt2img, img2img])
def test_files_of_prompts_are_regular_and_their_lines_limited(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "line").write_bytes(b"a" * 10**7)
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**28 + 1)
    cases = {"pipe": "is a pipe", "line": "characters, expected at most 20,000", "noise": "is not text in UTF-8"}
    cases |= {"huge": "is too large", "/dev/urandom": "is a device", "/dev/zero": "is a device"}
    for name, wanted in cases.items():
        argv = ["--from-file", str(tmp_path / name), *(["--init-img", str(tmp_path)] if command is img2img else [])]
        (tmp_path / "a.png").touch()
        assert command(argv) == 2  # type: ignore[operator]
        error = capsys.readouterr().err
        assert wanted in error
        assert error.count("\n") == 1


def test_other_texts_and_numbers_are_regular_files(tmp_path: Path) -> None:
    """Boxes, embeddings and captions."""
    for path in (tmp_path / "pipe.npy", tmp_path / "pipe.pt"):
        os.mkfifo(path)
        with pytest.raises(ValueError, match="is a pipe"):
            inputs.read_boxes(path)
        with pytest.raises(ValueError, match="is a pipe"):
            inputs.read_image_embedding(path)
    (tmp_path / "deep.json").write_text("[" * 10**6)
    with pytest.raises(ValueError, match="is not a list of boxes"):
        inputs.read_boxes(tmp_path / "deep.json")
    (tmp_path / "a.png").touch()
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="is a pipe"):
        open_folder(tmp_path, 8)
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "a.txt").write_text("a" * 20_001)
    with pytest.raises(ValueError, match=r"a\.png: its caption has 20,001 characters, expected at most 20,000"):
        open_folder(tmp_path, 8)
