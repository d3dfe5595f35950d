"""What can be known before a model is read is said before: its weights may take minutes and all of the memory."""

import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import compare_samplers
import pytest
from PIL import Image
from runs import status_of
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import img2img, inpaint, txt2img, upscale
from ldm_lite.checkpoint import loading
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.zoo.family import Hint

CASES: list[tuple[ModuleType, str, str]] = [
    (txt2img, "", "no prompt: give one"),
    (txt2img, "a --H 65", "expected multiples of 8"),
    (txt2img, "a --spacing nonsense", "nonsense"),
    (txt2img, "a --prompt-syntax A1111", "got --prompt-syntax 'A1111': use a1111"),
    (txt2img, "(a:1000000000) --prompt-syntax a1111", "got a prompt with the weight 1e+09, expected at most"),
    (compare_samplers, "--spacing nonsense", "unknown spacing 'nonsense'"),
    (txt2img, "a --x nonsense=1", "got 'nonsense' as an axis"),
    (txt2img, "a --x steps=1,2 --y height=64,65", "expected multiples of 8"),
    (txt2img, "a --regions 0,0,0.5,1", "the regions leave part of the image out"),
    (txt2img, "a --regions 0,0,0.5,1;0.5,0,1,1", "got 2 --regions, but the prompt has 1 part"),
    (txt2img, "a --embedding FOLDER/none.pt", "none.pt: no such file"),
    (txt2img, "a --embedding FOLDER/bad.pt", "bad.pt: is not a checkpoint"),
    (txt2img, "a --control FOLDER/none.pt:FOLDER/a.png", "none.pt: no such file"),
    (txt2img, "a --control FOLDER/bad.pt:FOLDER/bad.png", "bad.png: is not an image that can be read"),
    (txt2img, "a --control FOLDER/bad.pt:FOLDER/a.png --clip-vision FOLDER/none.pt", "none.pt: no such file"),
    (txt2img, "a --refiner FOLDER/none.pt", "none.pt: no such file"),
    (txt2img, "a --hires 2 --hires-esrgan FOLDER/none.pt", "none.pt: no such file"),
    (txt2img, "a --hires 2 --hires-sampler ddim --hires-strength 0.001 --steps 2", "expected at most 1000"),
    (txt2img, "a --preview FOLDER/none.pt", "none.pt: no such file"),
    (txt2img, "a --depth FOLDER/a.png", "got a depth map, but"),
    (txt2img, "a --aesthetic-score 3", "does not use"),
    (txt2img, "a --image-embedding FOLDER/none.npy", "none.npy"),
    (txt2img, "a --attention sliced:0", "unknown attention 'sliced:0'"),
    (txt2img, "a --compile on --offload model", "compiled code needs its weights in place"),
    (txt2img, "a --kernels nonsense", "got --kernels 'nonsense'"),
    (img2img, "--init-img FOLDER/a.png", "no prompt: give one"),
    (img2img, "a --init-img FOLDER/bad.png", "bad.png: is not an image that can be read"),
    (img2img, "a --init-img FOLDER/a.png --image-scale 2", "is not InstructPix2Pix"),
    (inpaint, "a --init-img FOLDER/a.png --mask FOLDER/bad.png", "bad.png: is not an image that can be read"),
    (upscale, "a --init-img FOLDER/a.png", "which upscale cannot use"),
]


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weights of a network fails the test."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", fail)


@pytest.mark.parametrize(("command", "arguments", "message"), CASES, ids=[arguments for _, arguments, _ in CASES])
def test_errors_come_before_weights_are_read(
    command: ModuleType, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    words = [word.replace("FOLDER", str(tmp_path)) for word in arguments.split()]
    assert status_of(command.main, *words, "--device", "cpu", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_a_task_that_is_right_gets_as_far_as_the_weights(tmp_path: Path) -> None:
    for words in (
        ["a"],
        ["a (b:1.2) AND c", "--prompt-syntax", "a1111", "--regions", "all;0,0,0.5,1"],
        ["a", "--hires", "2"],
    ):
        for more in ([], ["--seamless", "xy"], ["--noise", "a1111"], ["--guidance-interval", "0.1-0.8"]):
            with pytest.raises(AssertionError, match="weights were read"):
                txt2img.main([*words, *more, "--device", "cpu", "--out", str(tmp_path / "out"), "--debug"])


def test_hints_at_another_family_come_before_weights_are_read(
    small_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_checkpoint(small_path)
    path = tmp_path / "sd-turbo.safetensors"  # of a family that has no hints itself
    save_file({key: file[key].contiguous() for key in file}, path, dict(file.metadata))
    real = loading.recognise_file

    def with_hint(*arguments: Any) -> Any:
        family, *rest = real(*arguments)
        return (replace(family, hints=(Hint("turbo", "sdxl_turbo"),)), *rest)

    monkeypatch.setattr(loading, "recognise_file", with_hint)
    with pytest.raises(AssertionError, match="weights were read"), caplog.at_level(logging.WARNING):
        ldm_lite.load(path, device="cpu")
    assert "its name suggests Turbo: weights of sdxl_turbo have the same shapes" in caplog.text
