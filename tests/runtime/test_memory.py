"""Pages read through a memory-mapped file are returned to the system, and nothing else."""

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ldm_lite.bench.measure import status
from ldm_lite.checkpoint.reader import load_weights, on_meta, open_checkpoint
from ldm_lite.runtime.memory import MappedPages, keep_freed_memory, trim_heap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that this process has in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def weights() -> dict[str, Tensor]:
    return {f"{i}.weight": torch.randn(256, 1024) for i in range(4)}  # 1 MiB each


@pytest.fixture(params=["safetensors", "ckpt"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"file.{request.param}"
    save_file(weights(), path) if request.param == "safetensors" else torch.save(weights(), path)
    return path


def test_a_tensor_is_given_back_and_can_be_read_again(path: Path) -> None:
    file, release = open_checkpoint(path), MappedPages().release
    values = {key: file.read(key) for key in file.shapes}
    before = {key: value.clone() for key, value in values.items()}
    assert resident(path) > 3.9 * 2**20
    values["1.weight"].mul_(2)  # as a LoRA is merged: in memory, not in the file
    for key in ("0.weight", "2.weight", "3.weight"):
        release(values[key])
    assert 0.9 * 2**20 < resident(path) < 1.1 * 2**20
    assert all(torch.equal(values[key], before[key]) for key in ("0.weight", "2.weight", "3.weight"))
    assert torch.equal(values["1.weight"], 2 * before["1.weight"])


def test_what_is_no_file_is_left_alone(path: Path) -> None:
    file, release = open_checkpoint(path), MappedPages().release
    release(file.read("0.weight"))
    value = torch.randn(1024, 1024)
    before = value.numpy().copy()
    release(value)
    release(value[::2, ::3])
    release(torch.empty(0))
    assert (value.numpy() == before).all()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.1), (torch.float32, 4.1)])
def test_weights_that_are_cast_leave_nothing_of_the_file_in_memory(path: Path, dtype: torch.dtype, most: float) -> None:
    file = open_checkpoint(path)
    with on_meta():
        network = nn.Sequential(*(nn.Linear(1024, 256, bias=False) for _ in range(4)))
    held = file.read("0.weight")  # so that the file stays mapped
    load_weights(network, file, "network", torch.device("cpu"), dtype)
    assert all(torch.isfinite(value).all() for value in network.parameters())
    assert (most - 0.2) * 2**20 < resident(path) < most * 2**20
    assert all(torch.equal(value, file.read(key).to(dtype)) for key, value in network.state_dict().items())
    assert held.shape == (256, 1024)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)
def test_the_heap_gives_back_what_is_free() -> None:
    keep_freed_memory()
    blocks = [torch.ones(2**20) for _ in range(32)]  # 4 MiB each
    del blocks
    before = status("RssAnon")
    trim_heap()
    after = status("RssAnon")
    assert before is not None
    assert after is not None
    assert before - after > 100 * 2**20
