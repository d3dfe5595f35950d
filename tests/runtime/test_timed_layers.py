"""Layers that compute in another way where that is timed to be faster, with a clock of the test's own."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.ops import GEGLU
from ldm_lite.runtime import timed_layers, timing
from ldm_lite.runtime.patching import follow, patch_of, runs_as_written

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that each way is said to take, by its name in the log; each way still runs."""
    seconds: dict[str, float] = {}

    def fastest(what: str, key: object, ways: dict[str, Callable[[], object]], device: torch.device) -> str:
        monkeypatch.setattr(timing, "_seconds", lambda way, device: (way(), seconds[names[way]])[1])
        names = {way: name for name, way in ways.items()}
        return timing.fastest(what, key, ways, device)

    monkeypatch.setattr(timing, "_CHOICES", {})
    monkeypatch.setattr(timing, "_read", dict)
    monkeypatch.setattr(timed_layers, "fastest", fastest)
    monkeypatch.setattr(timed_layers, "_suits", lambda x: not torch.is_grad_enabled())
    return seconds


@pytest.mark.parametrize("size", [(4, 5), (1, 1), (1, 3), (16, 16)])
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_is_a_product(size: tuple[int, int], last: bool) -> None:
    x, weight, bias = toy.normal(1, 2, 12, *size), toy.normal(2, 20, 12, 3, 3), toy.normal(3, 20)
    if last:
        x, weight = (each.to(memory_format=torch.channels_last) for each in (x, weight))
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    found = timed_layers.as_product(x, weight, bias)
    assert toy.relative_error(found, wanted.numpy()) < 1e-6
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("product", "taken"), [(0.5, True), (0.98, False), (2.0, False)])
@torch.no_grad()
def test_small_maps_take_the_faster_way(product: float, taken: bool, clock: dict[str, float]) -> None:
    clock |= {"convolution": 1.0, "product": product}
    conv, x = toy.fill(nn.Conv2d(8, 8, 3, padding=1)), toy.normal(1, 2, 8, 6, 6)
    network = nn.Sequential(conv, nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 1))
    wanted = conv(x)
    timed_layers.use_convolutions(network)
    assert [patch_of(each) for each in network] == [timed_layers._convolve, None, None]
    assert runs_as_written(network)
    assert toy.relative_error(conv(x), wanted.numpy()) < 1e-6
    assert vars(conv)["takes_product"] is taken
    large = toy.normal(1, 1, 8, 16, 17)
    assert torch.equal(conv(large), F.conv2d(large, conv.weight, conv.bias, padding=1)), "beyond SMALL"  # type: ignore[arg-type]
    assert vars(conv)["takes_product"] is False


@torch.no_grad()
def test_compiled_code_has_what_was_chosen(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock |= {"convolution": 1.0, "product": 0.1}
    conv, x, calls = toy.fill(nn.Conv2d(8, 8, 3, padding=1)), toy.normal(1, 2, 8, 6, 6), []
    timed_layers.use_convolutions(conv)
    product = timed_layers.as_product
    monkeypatch.setattr(timed_layers, "as_product", lambda *args: calls.append(1) or product(*args))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    conv(x)
    assert not calls, "nothing is known yet, and nothing is timed while code is traced"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    conv(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    calls.clear()
    conv(x)
    assert calls == [1]


class Kernels:
    """Stands for the Triton kernel: GEGLU by its formula."""

    TILES = {(64, 64): (4, 4), (128, 64): (4, 3)}  # noqa: RUF012

    def __init__(self) -> None:
        self.tiles: list[tuple[int, int]] = []

    def launch(self, x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
        self.tiles.append((rows, columns))
        value, gate = (x @ weight.T + bias).chunk(2, -1)
        return value * gate * torch.special.ndtr(gate.float()).to(x.dtype)


@pytest.mark.parametrize(("fast", "taken"), [("128x64", (128, 64)), ("linear", None)])
@torch.no_grad()
def test_geglu_takes_the_fastest_tile(
    fast: str, taken: Any, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock |= dict.fromkeys(("linear", "64x64", "128x64"), 1.0) | {fast: 0.5}
    kernels, layer, x = Kernels(), toy.fill(GEGLU(8, 12)).bfloat16(), toy.normal(1, 2, 5, 8).bfloat16()
    wanted = layer(x)
    monkeypatch.setattr("importlib.import_module", lambda name: kernels)
    timed_layers.use_geglu(layer)
    assert toy.relative_error(layer(x).float(), wanted.float().numpy()) < 2e-2
    assert vars(layer)["tile"] == taken
    kernels.tiles.clear()
    layer(x)
    assert kernels.tiles == ([taken] if taken else [])
    assert layer(x.new_zeros(0, 5, 8)).shape == (0, 5, 12)


@torch.no_grad()
def test_a_way_that_does_not_run_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise TypeError("no compiler\nmore")

    with caplog.at_level(logging.INFO, "ldm_lite"):
        assert timing.fastest("a product", object(), {"plain": lambda: None, "broken": broken}, CPU) == "plain"
    assert "a product: broken does not run here (no compiler)" in caplog.text
    with pytest.raises(TypeError):
        timing.fastest("a product", object(), {"broken": broken}, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        timing.fastest("a product", object(), {"plain": lambda: None, "large": functools.partial(_too_large)}, CPU)


def _too_large() -> None:
    raise torch.OutOfMemoryError("too large")


def test_a_controlnet_follows_its_unet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: Kernels())
    first, second, other = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), GEGLU(4, 4)) for _ in range(3))
    timed_layers.use_convolutions(first)
    timed_layers.use_geglu(first)
    follow(second, first)
    assert [patch_of(each) for each in second] == [timed_layers._convolve, timed_layers._gate]
    follow(second, other)
    assert all(patch_of(each) is None for each in other)
