"""What saves memory changes no step but for rounding: frozen weights in half precision or 8 bits, or on their way."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from training import load_options, losses, options, train

import ldm_lite
from ldm_lite.cli.options import LoadOptions
from ldm_lite.models.unet import LDMUNet
from ldm_lite.train import run

LORA: dict[str, Any] = {"lora_rank": 2, "steps": 2, "sample_every": 0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, folder: Path, small_path: Path) -> dict[str, Any]:
    """The state of a LoRA's run in float32."""
    out = tmp_path_factory.mktemp("plain")
    train(options(folder, out, **LORA), load_options(small_path, dtype="fp32"))
    state: dict[str, Any] = torch.load(out / "state.pt", weights_only=True)
    return state


def gradients(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat([values["exp_avg"].flatten() for _, values in sorted(state["optimizer"]["state"].items())])


@pytest.mark.parametrize(
    ("load", "more", "most"),
    [
        ({"offload": "sequential"}, {}, 1e-5),
        ({"offload": "model"}, {"lora_text": True}, None),
        ({"storage": "int8"}, {}, 0.1),
        ({"storage": "fp8", "offload": "sequential"}, {}, 0.3),
        ({"dtype": "bf16"}, {}, 0.2),
        ({"dtype": "fp16"}, {}, 0.05),
    ],
)
def test_a_step_through_frozen_weights_in_less_memory(
    load: dict[str, str], more: dict[str, Any], most: float | None,
    folder: Path, small_path: Path, tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The averages of the gradients after two steps are those of float32; blocks are read once more going back."""
    monkeypatch.setattr(run, "has_fast_bf16", lambda device: False)
    hidden: list[bool] = []
    forward = LDMUNet.forward

    def watched(network: LDMUNet, *args: Any, **named: Any) -> Any:
        out = forward(network, *args, **named)
        hidden.append(any("weight" in vars(part) for part in network.modules()))
        return out

    monkeypatch.setattr(LDMUNet, "forward", watched)
    train(options(folder, tmp_path, **LORA | more), load_options(small_path, **load))
    assert not any(hidden)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    if most is None:
        assert len(state["optimizer"]["state"]) > len(plain["optimizer"]["state"]), "of the text encoder too"
        return
    got, wanted = gradients(state), gradients(plain)
    assert float((got - wanted).norm() / wanted.norm()) < most
    assert bool(state["scaler"]) is (load.get("dtype") == "fp16")
    with pytest.raises(ValueError, match="`(dtype|storage)` was" if "offload" not in load else "beyond|`storage` was"):
        train(options(folder, tmp_path, **LORA | {"resume": True, "steps": 1}), load_options(small_path, dtype="fp32"))


def test_frozen_networks_are_in_the_precision_of_the_device(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in bfloat16, or in float16 where that is emulated; what is trained, and the autoencoder, in float32."""
    loads: list[str] = []

    def loaded(options: Any) -> Any:
        loads.append(f"{options.device} {options.dtype}")
        raise EOFError

    monkeypatch.setattr(run, "load_model", loaded)
    for fast in (True, False):
        monkeypatch.setattr(run, "has_fast_bf16", lambda device, fast=fast: fast)
        for settings in ({"lora_rank": 2}, {}, {"train_text": True}, {"stage": "embedding"}):
            with pytest.raises(EOFError):
                run.make_model(options(small_path, small_path, **settings), LoadOptions(device="cuda"))
        assert run.precision_of(LoadOptions(device="cuda"), torch.device("cuda")) == (
            torch.bfloat16 if fast else torch.float16
        )
    half = ["bf16"] * 4 + ["fp16"] * 4
    wanted = ["{},vae=fp32", "{},unet=fp32,vae=fp32", "fp32", "fp32,unet={}"] * 2
    assert loads == ["cuda " + text.format(kind) for text, kind in zip(wanted, half, strict=True)]


def test_a_lora_has_no_average_unless_it_is_asked_for(folder: Path, small_path: Path, tmp_path: Path) -> None:
    train(options(folder, tmp_path / "none", **LORA), load_options(small_path))
    train(options(folder, tmp_path / "some", **LORA, ema_decay=0.9), load_options(small_path))
    none, some = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("none", "some"))
    assert set(some) - set(none) == {"average"}
    assert losses(tmp_path / "none") == losses(tmp_path / "some")
    train(options(folder, tmp_path / "none", **LORA | {"steps": 3, "resume": True}), load_options(small_path))


@pytest.mark.slow
def test_samples_that_cannot_be_drawn_do_not_end_the_run(
    folder: Path, small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without memory for them trains on, and does not draw them first when it is resumed."""
    drawn: list[int] = []

    def full(*args: Any, **named: Any) -> Any:
        drawn.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(ldm_lite.Pipeline, "txt2img", full)
    arguments = {"lora_rank": 2, "steps": 2, "save_every": 1}
    train(options(folder, tmp_path / "run", **arguments), load_options(small_path))
    assert len(drawn) == 2
    assert "step 2 has no samples (CUDA out of memory.): the run continues; `sample_every=0` skips them" in caplog.text
    assert not list(tmp_path.rglob("samples*"))
    assert (tmp_path / "run" / "lora.safetensors").is_file()
    monkeypatch.undo()
    train(options(folder, tmp_path / "run", **arguments | {"steps": 3, "resume": True}), load_options(small_path))
    names = sorted(path.name for path in (tmp_path / "run").glob("samples*"))
    assert names[-1] == "samples-0000003.png"
    for every, wanted in ((0, []), (2, ["samples-0000002.png", "samples-0000003.png"])):
        out = tmp_path / str(every)
        train(options(folder, out, **arguments | {"steps": 3, "sample_every": every}), load_options(small_path))
        assert sorted(path.name for path in out.glob("samples*")) == wanted
    assert os.listdir(tmp_path)


def test_older_checkpoints_are_kept(folder: Path, small_path: Path, tmp_path: Path) -> None:
    """The last ones, each under the number of its step; without `keep` one alone."""
    arguments = LORA | {"steps": 5, "save_every": 1}
    train(options(folder, tmp_path / "two", **arguments, keep=2), load_options(small_path))
    names = sorted(path.name for path in (tmp_path / "two").glob("*.safetensors"))
    assert names == ["lora-0000004.safetensors", "lora-0000005.safetensors", "lora.safetensors"]
    last, older = ((tmp_path / "two" / name).read_bytes() for name in (names[1], names[0]))
    assert last == (tmp_path / "two" / "lora.safetensors").read_bytes() != older
    train(options(folder, tmp_path / "one", **arguments), load_options(small_path))
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["lora.safetensors"]
