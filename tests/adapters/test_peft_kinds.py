"""LoHa, LoKr, OFT, BOFT and IA3 as PEFT stores them: as PEFT merges them, and files that make no sense."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.adapters.changes import ColumnBOFT, Settings

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "peft_kinds.npz"))
NAMES = [name.removesuffix(".about") for name in GOLDEN if name.endswith(".about")]
FC1 = "base_model.model.text_model.encoder.layers.0.mlp.fc1"  # of 64 columns and 256 rows


def folder(path: Path, tensors: dict[str, Tensor], config: object) -> Path:
    """A folder of PEFT; without a configuration if that is None."""
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def golden(path: Path, name: str) -> Path:
    about = json.loads(str(GOLDEN[f"{name}.about"]))
    return folder(path, {key: toy.of_adapter(key, tuple(s)) for key, s in about["shapes"].items()}, about["config"])


def error(pipe: Pipeline, name: str) -> float:
    if json.loads(str(GOLDEN[f"{name}.about"]))["role"] == "text":
        return toy.relative_error(pipe.text_encoder(torch.from_numpy(GOLDEN["ids"]))[:, ::5], GOLDEN[name])
    x, context, _ = toy.unet_inputs(SMALL.unet)
    return toy.relative_error(pipe.unet(x, toy.T, context), GOLDEN[name])


@pytest.mark.parametrize("name", NAMES)
def test_networks_compute_what_peft_computes(tmp_path: Path, pipe: Pipeline, name: str) -> None:
    before = [value.clone() for network in pipe.networks.values() for value in network.parameters()]
    assert error(pipe, name) > 1e-4
    with pipe.lora(golden(tmp_path, name)):
        assert error(pipe, name) < 1e-5
    after = [value for network in pipe.networks.values() for value in network.parameters()]
    assert all(map(torch.equal, before, after))


def test_several_stages_of_a_butterfly() -> None:
    stages, blocks, size, rows = 3, 8, 4, 6
    weight = toy.normal(0, rows, blocks * size)
    parts = {"boft_R": toy.normal(1, stages, blocks, size, size), "boft_s": 1 + 0.1 * toy.normal(2, rows, 1)}
    boft = ColumnBOFT.of(parts, Settings(float, {}))
    assert toy.relative_error(weight + boft.change(weight), GOLDEN["butterfly"]) < 1e-5


@pytest.mark.parametrize("name", ["lokr", "oft", "ia3"])
def test_quantised_weights_change_as_they_compute(tmp_path: Path, small_path: Path, name: str) -> None:
    quantised = ldm_lite.load(small_path, device="cpu", storage="int8", offload="sequential")
    with quantised.lora(golden(tmp_path, name)):
        changed = error(quantised, name)
    assert changed < 0.05 < error(quantised, name)


def test_a_folder_on_the_command_line(tmp_path: Path, small_path: Path) -> None:
    path, out = golden(tmp_path / "oft", "oft"), tmp_path / "a.png"
    size = ["--steps", "1", "--H", "64", "--W", "64", "--device", "cpu", "--out", str(out)]
    assert txt2img.main(["a cat", "--ckpt", str(small_path), "--lora", f"{path}:0.5", *size]) == 0
    assert out.is_file()


IA3_CONFIG = {"peft_type": "IA3", "feedforward_modules": ["fc1"]}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"oft_R.weight": torch.ones(8, 27)}, None, "do not fit together"),
        ({"oft_R.weight": torch.ones(8)}, None, "do not fit together"),
        ({"oft_R.weight": torch.zeros(4, 28)}, None, "is any x 32, here it is 256 x 64"),
        ({"oft_R.weight": torch.zeros(1, 3)}, None, "is any x a multiple of 3, here it is 256 x 64"),
        ({"oft_R.weight": torch.full((8, 28), float("nan"))}, None, "holds NaN"),
        ({"oft_R": torch.ones(8, 8, 8)}, None, "OFT in another layout than LyCORIS's and PEFT's since"),
        ({"boft_R": torch.ones(1, 8, 8, 8)}, None, "lacks its part boft_s"),
        ({"boft_R": torch.ones(1, 8, 8, 4), "boft_s": torch.ones(256, 1)}, None, "do not fit together"),
        ({"boft_R": torch.ones(9, 8, 8, 8), "boft_s": torch.ones(256, 1)}, None, "do not fit together"),
        ({"boft_R": torch.ones(1, 8, 8, 8), "boft_s": torch.ones(7, 1)}, None, "is 7 x 64, here it is 256 x 64"),
        ({"ia3_l": torch.ones(2, 64)}, IA3_CONFIG, "its part ia3_l is 2 x 64"),
        ({"ia3_l": torch.ones(1, 64, 1, 1)}, None, "keep it beside the file"),
        ({"ia3_l": torch.ones(1, 63)}, IA3_CONFIG, "is any x 63 x any, here it is 256 x 64"),
        ({"ia3_l": torch.ones(1, 64), "oft_R.weight": torch.ones(8, 28)}, None, "changes its weight twice"),
        ({"ia3_l": torch.ones(1, 64), "hada_w1_a": torch.ones(2, 2)}, None, "changes its weight twice"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, pipe: Pipeline, tensors: dict[str, Tensor], config: object, message: str
) -> None:
    path = folder(tmp_path / "a", {f"{FC1}.{part}": value for part, value in tensors.items()}, config)
    before = pipe.text_encoder.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    with pytest.raises(ValueError, match=message) as caught:
        pipe.lora(ldm_lite.open_lora(path))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in pipe.text_encoder.state_dict().items())
