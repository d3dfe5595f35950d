"""Adapters of LyCORIS's kinds: what layers compute with them, files that are damaged, and what training writes."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters import kinds
from ldm_lite.adapters.lora import file_names, targets
from ldm_lite.train.additions import ADDITIONS, LoKr

DATA = Path(__file__).parents[1] / "data" / "lycoris.npz"


@cache
def goldens() -> dict[str, dict[str, Tensor]]:
    """Tensors of LyCORIS by case, such as "conv/loha": the adapter's, and y, the layer's output for x."""
    by_name: dict[str, dict[str, Tensor]] = {}
    with np.load(DATA) as data:
        for name, value in data.items():
            case, _, part = name.rpartition("/")
            by_name.setdefault(case, {})[part] = torch.from_numpy(value)
    return by_name


def cases() -> list[str]:
    """The cases, but for the layers themselves."""
    return [case for case in goldens() if "/" in case]


def write(path: Path, tensors: Mapping[str, Tensor], module: str = "lora_unet_layer") -> Path:
    """Write the tensors of one module, but for its output."""
    save_file({f"{module}.{part}": value.contiguous() for part, value in tensors.items() if part != "y"}, path)
    return path


@pytest.mark.parametrize("case", cases())
def test_a_layer_computes_what_lycoris_computes(case: str, tmp_path: Path) -> None:
    where = case.partition("/")[0]
    weight, x = (goldens()[where][name] for name in ("weight", "x"))
    file = ldm_lite.open_lora(write(tmp_path / "a.safetensors", goldens()[case]))
    change = file.modules["lora_unet_layer"]["weight"]
    assert kinds.fits(change.shape, weight.shape)
    assert not kinds.fits(change.shape, (weight.shape[0] + 1, weight.shape[1] + 1, *weight.shape[2:]))
    changed = weight + change.change(weight).reshape(weight.shape)
    y = F.linear(x, changed) if where == "linear" else F.conv2d(x, changed, padding=1)
    wanted = goldens()[case]["y"]
    assert float((y - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("kind", sorted(ADDITIONS))
def test_what_training_writes_is_merged(kind: str, tmp_path: Path, bundled: Pipeline) -> None:
    module = next(name for name in targets(bundled.unet) if name.endswith("attn1.to_q"))
    layer, name = bundled.unet.get_submodule(module), file_names("unet", bundled.unet)[module][0]
    weight = layer.get_parameter("weight")
    options: dict[str, Any] = {"factor": 4} if ADDITIONS[kind] is LoKr else {}
    torch.manual_seed(1)
    trained = ADDITIONS[kind](weight.detach(), 2, 1.0, torch.Generator(), **options)
    for parameter in trained.parameters():
        nn.init.normal_(parameter, 0.5, 0.2)
    x = torch.randn(3, weight.shape[1])
    with torch.no_grad():
        base = x @ weight.T
        wanted = base + trained(x, weight, base, None)
        before = weight.clone()
        with bundled.lora(write(tmp_path / "a.safetensors", trained.state_dict(), name)):
            torch.testing.assert_close(x @ weight.T, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(weight, before)
        with bundled.lora(tmp_path / "a.safetensors", 0.5):
            torch.testing.assert_close(x @ weight.T, (base + wanted) / 2, rtol=1e-4, atol=1e-4)


def test_dora_as_peft_writes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, up, down, lengths = torch.randn(6, 5), torch.randn(6, 2), torch.randn(2, 5), torch.rand(6) + 0.5
    prefix = "base_model.model.layer."
    save_file(
        {
            f"{prefix}lora_A.weight": down,
            f"{prefix}lora_B.weight": up,
            f"{prefix}lora_magnitude_vector": lengths,
        },
        tmp_path / "a.safetensors",
    )
    change = ldm_lite.open_lora(tmp_path / "a.safetensors").modules["layer"]["weight"]
    total = weight + up @ down
    wanted = lengths[:, None] * total / total.norm(dim=1, keepdim=True)
    torch.testing.assert_close(weight + change.change(weight), wanted, rtol=1e-5, atol=1e-5)


LOHA = {f"hada_w{i}_{side}": torch.ones(*shape) for i in (1, 2) for side, shape in (("a", (6, 2)), ("b", (2, 5)))}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({k: v for k, v in LOHA.items() if k != "hada_w2_b"}, "lacks its part hada_w2_b"),
        (LOHA | {"hada_w2_b": torch.ones(3, 5)}, "do not fit together"),
        (LOHA | {"hada_w2_b": torch.ones(2, 7)}, "do not fit together"),
        (LOHA | {"hada_w1_a": torch.ones(6)}, "do not fit together"),
        (LOHA | {"hada_t1": torch.ones(2, 2, 3, 3)}, "do not fit together"),
        (LOHA | {"lokr_w1": torch.ones(2, 2)}, "changes its weight twice"),
        (LOHA | {"lora_up.weight": torch.ones(6, 2), "lora_down.weight": torch.ones(2, 5)}, "changes its weight twice"),
        (LOHA | {"dora_scale": torch.ones(5, 1)}, "do not fit together"),
        (LOHA | {"hada_w1_a": torch.full((6, 2), float("nan"))}, "holds NaN"),
        ({"lokr_w1": torch.ones(2, 2)}, "lacks its part lokr_w2_a"),
        ({"lokr_w1": torch.ones(2), "lokr_w2": torch.ones(3, 3)}, "do not fit together"),
        ({"lokr_w2": torch.ones(3, 3), "lokr_w1_a": torch.ones(2, 2)}, "lacks its part lokr_w1_b"),
        ({"dora_scale": torch.ones(5, 1)}, "lacks its up and down weights"),
        ({"oft_blocks": torch.ones(3, 2, 4)}, "do not fit together"),
        ({"oft_blocks": torch.ones(4)}, "do not fit together"),
        ({"oft_blocks": torch.ones(2, 3, 3, 3)}, "do not fit together"),
        ({"oft_blocks": torch.zeros(2, 3, 3), "rescale": torch.ones(5)}, "do not fit together"),
        ({"rescale": torch.ones(6)}, "lacks its part oft_blocks"),
        ({"a1.weight": torch.ones(5, 2)}, "lacks its part glora_a2"),
        ({"on_input": torch.tensor(1)}, "lacks its part ia3"),
        ({"weight": torch.ones(5)}, "lacks its part on_input"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ldm_lite.open_lora(write(tmp_path / "a.safetensors", tensors))
    assert "\n" not in str(error.value)
    assert str(tmp_path / "a.safetensors") in str(error.value)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("base_model.model.layer.oft_R", "OFT in another layout"),
        ("base_model.model.layer.lora_E", "AdaLoRA"),
    ],
)
def test_layouts_of_peft_are_named(key: str, what: str, tmp_path: Path) -> None:
    save_file({key: torch.ones(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=what):
        ldm_lite.open_lora(tmp_path / "a.safetensors")
