"""Hypernetworks of the web UI: equal outputs, exact removal, and files that are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from hypernetworks import KINDS, content
from random_checkpoint import SMALL
from torch import Tensor

import ldm_lite
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.compile import compiled_step

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "hypernetwork.npz")
RUN: dict[str, Any] = {"steps": 2, "seed": 3, "height": 64, "width": 64, "output": "tensor"}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hypernetwork") / "model.safetensors"
    random_checkpoint.write(path, SMALL)
    return path


@pytest.fixture
def pipe(ckpt: Path) -> Pipeline:
    return ldm_lite.load(ckpt, device="cpu")


def _written(folder: Path, kind: str = "relu", widths: tuple[int, ...] = (64, 32), **others: Any) -> Path:
    path = folder / f"{kind}.pt"
    torch.save(content(KINDS[kind], widths) | others, path)
    return path


def _out(pipe: Pipeline) -> Tensor:
    x, context, _ = toy.unet_inputs(SMALL.unet)
    with torch.no_grad():
        return pipe.unet(x, toy.T.expand(2), context)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_web_ui_s(pipe: Pipeline, tmp_path: Path, kind: str) -> None:
    before = _out(pipe)
    with pipe.lora(_written(tmp_path, kind), 0.7):
        made = _out(pipe)
    assert toy.relative_error(made.numpy(), GOLDEN[kind]) < 1e-5
    assert toy.relative_error(before.numpy(), GOLDEN[kind]) > 1e-3
    torch.testing.assert_close(_out(pipe), before, rtol=0, atol=0)


def test_images_change_with_the_text_s_cache_and_with_quantised_weights(ckpt: Path, tmp_path: Path) -> None:
    """Named when the model is loaded, merged later, and beside another one."""
    file, other = _written(tmp_path, "mish"), _written(tmp_path, "linear")
    pipe = ldm_lite.load(ckpt, device="cpu")
    [plain] = pipe.txt2img("a cat", **RUN)
    with pipe.lora(file, 0.5):
        [first] = pipe.txt2img("a cat", **RUN)
        with pipe.lora(other, 0.5):
            [both] = pipe.txt2img("a cat", **RUN)
    [loaded] = ldm_lite.load(ckpt, device="cpu", lora=[f"{file}:0.5"]).txt2img("a cat", **RUN)
    [eight] = ldm_lite.load(ckpt, device="cpu", lora=[f"{file}:0.5"], storage="int8").txt2img("a cat", **RUN)
    torch.testing.assert_close(loaded, first, rtol=0, atol=0)
    assert (first - plain).abs().max() > 0.01 < (both - first).abs().max()
    assert (eight - first).abs().mean() < 0.25 * (first - plain).abs().mean()


def test_weights_of_blocks_choose_attentions(pipe: Pipeline, tmp_path: Path) -> None:
    """SMALL has attention in IN01, M00, and OUT02 and OUT03."""
    file = _written(tmp_path)
    before = _out(pipe)
    with pipe.lora(file, "1:lbw=0,0,0,0,0"):
        torch.testing.assert_close(_out(pipe), before, rtol=0, atol=1e-6)
    with pipe.lora(file, "1:lbw=0,0,1,0,0"):
        assert (_out(pipe) - before).abs().max() > 1e-3


@pytest.mark.slow
def test_a_compiled_step_has_what_was_loaded_and_refuses_what_comes_later(ckpt: Path, tmp_path: Path) -> None:
    file = _written(tmp_path)
    with pytest.raises(ValueError, match="compiled code does not see a hypernetwork"):
        ldm_lite.load(ckpt, device="cpu", compile="step").lora(file)
    pipe = ldm_lite.load(ckpt, device="cpu", lora=[str(file)])
    traced = dataclasses.replace(pipe, step=compiled_step("step", pipe.unet, backend="eager"))
    [plain], [compiled] = (each.txt2img("a cat", **RUN) for each in (pipe, traced))
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_func": "prelu"}, "has the activation 'prelu', wanted one of"),
        ({64: ({"linear.0.weight": torch.ones(64, 64)}, {})}, "its layer 0 for the width 64 does not fit"),
        ({64: ({"linear.0.weight": torch.ones(32, 64), "linear.0.bias": torch.ones(32)}, {})}, "width 64 is not whole"),
        ({64: ({"linear.0.gain": torch.ones(3)}, {})}, "holds hypernetwork.64.0.linear.0.gain"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, changes: dict[Any, Any], message: str) -> None:
    path = tmp_path / "damaged.pt"
    torch.save(content(KINDS["relu"]) | changes, path)
    with pytest.raises(ValueError, match=message) as caught:
        ldm_lite.open_lora(path)
    assert "\n" not in str(caught.value)
    assert "damaged.pt" in str(caught.value)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made = content(KINDS["relu"])
    made[64][1]["linear.0.bias"][3] = float("nan")
    torch.save(made, tmp_path / "nan.pt")
    with pytest.raises(ValueError, match=r"nan.pt: hypernetwork.64.1.linear.0.bias holds NaN"):
        ldm_lite.open_lora(tmp_path / "nan.pt")


def test_a_hypernetwork_for_another_model_is_refused(
    pipe: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"relu.pt: is for another model: .* widths of 48, but .* read 32, 64"):
        pipe.lora(_written(tmp_path, widths=(48,)))
    with pipe.lora(_written(tmp_path, widths=(48, 64))):
        pass
    assert "widths of 48 have no effect" in caplog.text


def test_a_hypernetwork_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hypernetwork") as caught:
        ldm_lite.load(_written(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)
