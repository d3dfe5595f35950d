"""A resumed run is the same run: what would make it another one is refused by name."""

import json
import os
import shutil
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from training import load_options, options, plain_options, train

from ldm_lite.train.options import _INPUTS, _OF_A_CALL, MAY_CHANGE, TrainOptions, settings_of
from ldm_lite.train.state import read_log

needs_prodigy = pytest.mark.skipif(find_spec("prodigyopt") is None, reason="prodigyopt is not installed")
BEGUN: dict[str, Any] = {"steps": 3, "minutes": 0.0, "lora_rank": 2, "lora_alpha": 1.0}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, folder: Path, small_path: Path) -> Path:
    """The folder of a run after its first step."""
    out = tmp_path_factory.mktemp("begun") / "run"
    train(options(folder, out, **BEGUN), load_options(small_path))
    return out


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"lora_alpha": 2.0}, "lora_alpha"),
        ({"lora_rank": 4}, "lora_rank"),
        ({"lora_kind": "dora"}, "lora_kind"),
        ({"lora_text": True}, "lora_text"),
        ({"min_snr": 5.0}, "min_snr"),
        ({"weighting": "debiased"}, "weighting"),
        ({"caption_dropout": 0.1}, "caption_dropout"),
        ({"masked": True}, "masked"),
        ({"buckets": True}, "buckets"),
        ({"resolution": 32}, "resolution"),
        ({"class_prompt": "a cat"}, "class_prompt"),
        ({"validation": "0.5"}, "validation"),
        ({"batch_size": 4}, "batch_size"),
        ({"accumulate": 2}, "batch_size"),
        ({"seed": 1}, "seed"),
        pytest.param({"optimizer": "prodigy"}, "optimizer", marks=needs_prodigy),
        ({"ema_decay": 0.5}, "ema_decay"),
        ({"data": "OTHER"}, "data"),
        ({"ckpt": "OTHER"}, "ckpt"),
        ({"zero_snr": True, "prediction": "v"}, "ckpt"),
    ],
)
def test_another_run_is_refused_by_name(
    changes: dict[str, Any], name: str, begun: Path, folder: Path, small_path: Path, tmp_path: Path
) -> None:
    """And nothing in its folder has changed, not even the latents, which may have taken hours."""
    out = tmp_path / "run"
    shutil.copytree(begun, out)
    ckpt, more, load = small_path, dict(changes), {}
    if changes.get("data"):  # one caption is another one
        more["data"] = os.fspath(shutil.copytree(folder, tmp_path / "data"))
        (tmp_path / "data" / "3.txt").write_text("pictures")
    if changes.get("ckpt"):
        ckpt = tmp_path / "other.safetensors"
        with safe_open(small_path, "pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        next(tensors[key] for key in tensors if key.endswith("final_layer_norm.weight"))[0] += 1
        save_file(tensors, ckpt, metadata)
        del more["ckpt"]
    for key in ("zero_snr", "prediction"):
        if key in more:
            load[key] = more.pop(key)

    def contents(run: Path) -> dict[Path, bytes]:
        files = (path for path in run.rglob("*") if path.is_file() and path.name != "lock")
        return {path.relative_to(run): path.read_bytes() for path in files}

    with pytest.raises(ValueError, match=rf"state\.pt: is not the state of this run.*`{name}` was .*, now it is "):
        train(replace(options(folder, out, **BEGUN, resume=True), **more), load_options(ckpt, **load))
    assert len(contents(begun)) > 5
    assert contents(out) == contents(begun)


def test_what_may_change_does(begun: Path, folder: Path, small_path: Path, tmp_path: Path) -> None:
    """Also the places of the data and of the checkpoint, if their content is the same, and how a batch is divided."""
    out, data = shutil.copytree(begun, tmp_path / "run"), shutil.copytree(folder, tmp_path / "data")
    ckpt = shutil.copyfile(small_path, tmp_path / "moved.safetensors")
    more = {
        "steps": 2,
        "lr": 1e-4,
        "batch_size": 1,
        "accumulate": 2,
        "max_grad_norm": 2.0,
        "samples": "b",
        "checkpointing": True,
    }
    train(options(data, out, **BEGUN | {"resume": True, "minutes": None} | more), load_options(ckpt))
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 2
    text = (out / "config.toml").read_text()
    assert "lr = 0.0001" in text
    assert f'ckpt = "{ckpt}"' in text


def test_a_new_run_has_nothing_of_one_that_left_no_state(
    folder: Path, small_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its log nor its samples and averages, and it keeps its own checkpoints; these are in another folder."""
    caplog.set_level("INFO")
    arguments = {"lora_rank": 2, "save_every": 1, "keep": 1, "ema_lengths": True, "ema_decay": 0.5}
    for name, (steps, resume) in {"first": (3, False), "second": (2, True), "third": (1, False)}.items():
        train(
            options(folder, tmp_path, **arguments | {"steps": steps}, seed=steps, resume=resume),
            load_options(small_path),
        )
        rows = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert rows == [*range(1, steps + 1)], name
        places = [
            path.name for pattern in ("lora-*", "samples-*", "averages/*0.05*") for path in tmp_path.glob(pattern)
        ]
        assert sorted(places) == sorted(
            [f"lora-000000{steps}.safetensors"]
            + [f"{step:07}-0.050.safetensors" for step in rows]
            + [f"samples-{step:07}.png" for step in rows]
        ), name
        (tmp_path / "state.pt").unlink()
    assert f"{tmp_path}: holds what a run without a state left, which is in {tmp_path / 'earlier-2'} now" in caplog.text
    for number, steps in ((1, 3), (2, 2)):
        before = tmp_path / f"earlier-{number}"
        assert [row["step"] for row in read_log(before / "log.jsonl")] == [*range(1, steps + 1)]
        assert len(list(before.glob("averages/*"))) == 2 * steps
        assert (before / f"lora-000000{steps}.safetensors").is_file()


def test_every_option_is_compared_or_may_change() -> None:
    """A new one is compared unless it is named."""
    compared = set(settings_of(plain_options(validation="0.5"))) - MAY_CHANGE
    names = {field.name for field in fields(TrainOptions)}
    assert names == compared | MAY_CHANGE | {*_OF_A_CALL, *_INPUTS, "accumulate"}
    assert compared & MAY_CHANGE == set()
    assert settings_of(plain_options(validation="a folder"))["validation"] is None, "its content is compared"
