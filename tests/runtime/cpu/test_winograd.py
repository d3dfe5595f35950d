"""Winograd's convolutions against the plain ones in float64, and when they run."""

import copy

import numpy as np
import pytest
import torch
import toy
from torch import nn
from torch.nn import functional as F

from ldm_lite.models.unet import Downsample, Upsample
from ldm_lite.runtime.cpu import winograd

# (B, C, K, h, w): one position, ragged tiles, several chunks of tiles
SHAPES = [(1, 3, 5, 1, 1), (2, 4, 8, 7, 9), (1, 33, 20, 13, 16), (2, 4, 6, 70, 66), (3, 2, 2, 5, 260)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_plain_convolution(shape: tuple[int, ...], m: int, bias: bool) -> None:
    b, c, k, h, w = shape
    x, weight, offset = toy.normal(0, b, c, h, w), toy.normal(1, k, c, 3, 3), toy.normal(2, k) if bias else None
    wanted = F.conv2d(x.double(), weight.double(), None if offset is None else offset.double(), padding=1)
    found = winograd.convolve(x, weight, offset, m)
    assert toy.relative_error(found, wanted.numpy()) < {2: 1e-6, 4: 4e-6}[m]
    last = winograd.convolve(x.contiguous(memory_format=torch.channels_last), weight, offset, m)
    assert torch.equal(found, last)


@pytest.fixture(scope="module")
def wide() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """An input and weights at the width of Stable Diffusion, and their convolution in float64."""
    x, weight = toy.normal(0, 1, 640, 8, 8), toy.normal(1, 640, 640, 3, 3) / 76
    return x, weight, F.conv2d(x.double(), weight.double(), padding=1).numpy()


@pytest.mark.parametrize(("m", "growth"), [(2, 2.2), (4, 12)])
def test_at_the_width_of_stable_diffusion(
    wide: tuple[torch.Tensor, torch.Tensor, np.ndarray], m: int, growth: float
) -> None:
    """Against the error of the plain sums by the same matrix products, whose order of summation is the CPU's own."""
    x, weight, wanted = wide
    columns = F.unfold(x, 3, padding=1).view(640, 9, 64).transpose(0, 1).contiguous()
    plain = torch.bmm(weight.view(640, 640, 9).permute(2, 0, 1).contiguous(), columns).sum(dim=0).view(1, 640, 8, 8)
    error = toy.relative_error(winograd.convolve(x, weight, None, m), wanted)
    # Measured: 1.75 for m = 2, and 3.3 (AVX-512) to 8.6 (SSE) for m = 4.
    assert error < growth * toy.relative_error(plain, wanted)


def test_the_points_are_better_than_the_usual_ones(
    wide: tuple[torch.Tensor, torch.Tensor, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of both depend on the CPU, their ratio does not: 0.61 with SSE, AVX2 and AVX-512."""
    x, weight, wanted = wide
    error = toy.relative_error(winograd.convolve(x, weight, None, 4), wanted)
    monkeypatch.setitem(winograd.TRANSFORMS, 4, winograd._transforms((0.0, 1.0, -1.0, 2.0, -2.0)))
    assert error < 0.66 * toy.relative_error(winograd.convolve(x, weight, None, 4), wanted)


def taken(module: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = winograd.convolve
    with monkeypatch.context() as patch:
        patch.setattr(winograd, "convolve", lambda *args: calls.append(args[-1]) or original(*args))
        module(x)
    return calls


def test_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.ModuleList([nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)])
    assert winograd.use(network) == 1
    wide, narrow = network
    before = list(network.state_dict())
    with torch.no_grad():
        assert taken(wide, toy.normal(0, 1, 128, 32, 32), monkeypatch) == [4]
        assert taken(wide, toy.normal(0, 2, 128, 16, 16), monkeypatch) == [2]
        assert taken(wide, toy.normal(0, 1, 128, 8, 8), monkeypatch) == []
        assert taken(narrow, toy.normal(0, 1, 128, 32, 32), monkeypatch) == []
    assert taken(wide, toy.normal(0, 1, 128, 32, 32), monkeypatch) == []  # with gradients it is too narrow
    assert list(network.state_dict()) == before


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the plain convolution in float64, for an input and weights of either layout in memory."""
    monkeypatch.setattr(winograd, "MIN_CHANNELS", 4)
    monkeypatch.setattr(winograd, "MIN_TRAINED", 4)
    conv = nn.Conv2d(6, 4, 3, padding=1)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(conv).double()
    assert winograd.use(conv) == 1
    conv.requires_grad_(not frozen)
    x, grad = toy.normal(0, 2, 6, 33, 35), toy.normal(1, 2, 4, 33, 35)
    inputs = [x.requires_grad_(), *([] if frozen else conv.parameters())]
    out = conv(x)
    assert "_Convolution" in type(out.grad_fn).__name__
    found = torch.autograd.grad(out, inputs, grad)
    double = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(double), [double, *exact.parameters()], grad.double())
    for one, other in zip(found, wanted, strict=False):
        assert toy.relative_error(one, other.numpy()) < 4e-6


def test_only_plain_convolutions_can_take_it() -> None:
    others = [
        Downsample(128),
        nn.Conv2d(128, 128, 1),
        nn.Conv2d(128, 128, 3, padding=2, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, groups=2),
        nn.Conv2d(128, 128, 3, padding=1, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular"),
    ]
    assert winograd.use(nn.ModuleList(others)) == 0
    assert winograd.use(nn.ModuleList([Upsample(128)])) == 1


def test_changed_weights_and_other_dtypes() -> None:
    conv = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False)
    winograd.use(conv)
    x = toy.normal(0, 2, 128, 32, 32)
    with torch.no_grad():
        conv.weight.mul_(3)
        wanted = F.conv2d(x, conv.weight, conv.bias, padding=1)
        assert toy.relative_error(conv(x), wanted.numpy()) < 5e-6
        assert torch.equal(conv.double()(x.double()), F.conv2d(x.double(), conv.weight, conv.bias, padding=1))
