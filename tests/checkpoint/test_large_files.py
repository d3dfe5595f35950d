"""Files larger than the memory are read tensor by tensor; networks that cannot fit are one line, told early."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ldm_lite
from ldm_lite.checkpoint import loading
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.formats.unmapped import open_safetensors
from ldm_lite.runtime.memory import physical_memory


def sparse(path: Path, size: int) -> Path:
    """Write a safetensors file of a UNet's first layer and of zeros, which take no place on the disk."""
    first, rows = 320 * 36 * 2, size // 8192
    header = {
        "model.diffusion_model.input_blocks.0.0.weight": {
            **{"dtype": "F16", "shape": [320, 4, 3, 3], "data_offsets": [0, first]}
        },
        "large": {"dtype": "F16", "shape": [rows, 4096], "data_offsets": [first, first + rows * 8192]},
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + first + rows * 8192)
    return path


def test_a_file_larger_than_the_memory_is_opened(tmp_path: Path) -> None:
    memory = physical_memory()
    if memory is None:
        pytest.skip("the system does not tell its memory")
    file = open_checkpoint(sparse(tmp_path / "large.safetensors", 3 * memory))
    assert file["model.diffusion_model.input_blocks.0.0.weight"].shape == (320, 4, 3, 3)


def test_reading_without_a_map_gives_the_same_values(tmp_path: Path) -> None:
    values = {
        **{str(dtype): torch.randn(3, 5).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(3.0),
    }
    path = tmp_path / "file.safetensors"
    save_file(values, path, {"about": "it"})
    file = open_safetensors(path)
    assert file.metadata == {"about": "it"}
    assert file.shapes.keys() == values.keys()
    for key, value in values.items():
        tensor = file[key]
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        assert torch.equal(tensor.float(), value.float())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is truncated: the values of"):
        [open_safetensors(path)[key] for key in values]


@pytest.mark.parametrize(("share", "half"), [(0.01, ""), (0.7, r'`dtype="bf16"`, which takes 0 GiB or ')])
def test_networks_that_do_not_fit_are_one_line(
    share: float, half: str, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named with their sizes; half precision is only where it fits."""
    model = ldm_lite.load(small_path, device="cpu", dtype="fp32")
    needed = 4 * sum(parameter.numel() for network in model.networks.values() for parameter in network.parameters())
    monkeypatch.setattr(loading, "physical_memory", lambda: int(share * needed))
    monkeypatch.setattr(loading, "load_weights", lambda *arguments: pytest.fail("weights were read"))
    sizes = r"the networks take 0 GiB in fp32 \(unet 0.0.*\)"
    with pytest.raises(ValueError, match=rf"{sizes}, but this machine has 0 GiB of memory: use {half}GGUF") as caught:
        ldm_lite.load(small_path, device="cpu", dtype="fp32")
    assert "\n" not in str(caught.value)
