"""Winograd's convolutions against the plain ones in float64, and when they run."""

import numpy as np
import pytest
import torch
import toy
from torch.nn import functional as F

from ldm_lite.runtime import cpu

# (B, C, K, h, w): one position, ragged tiles, several chunks of tiles
SHAPES = [(1, 3, 5, 1, 1), (2, 4, 8, 7, 9), (1, 33, 20, 13, 16), (2, 4, 6, 70, 66), (3, 2, 2, 5, 260)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_plain_convolution(shape: tuple[int, ...], m: int, bias: bool) -> None:
    b, c, k, h, w = shape
    x, weight, offset = toy.normal(0, b, c, h, w), toy.normal(1, k, c, 3, 3), toy.normal(2, k) if bias else None
    wanted = F.conv2d(x.double(), weight.double(), None if offset is None else offset.double(), padding=1)
    convolved = cpu.filtered(x, weight, offset, m)
    assert toy.relative_error(convolved, wanted.numpy()) < {2: 1e-6, 4: 4e-6}[m]
    last = cpu.filtered(x.contiguous(memory_format=torch.channels_last), weight, offset, m)
    assert torch.equal(convolved, last)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("shape", [(2, 4, 7, 9, 8), (2, 4, 7, 70, 66)], ids=str)
def test_weights_in_parts(shape: tuple[int, ...], m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one strip of tiles, and of several, which read the whole; the gradient of the input too."""
    b, c, k, h, w = shape
    x, weight, grad = toy.normal(0, b, c, h, w), toy.normal(1, k, c, 3, 3), toy.normal(2, b, k, h, w)
    wanted = F.conv2d(x.double(), weight.double(), padding=1)
    of_input = F.conv_transpose2d(grad.double(), weight.double(), padding=1)
    for part in (1, 3 * (m + 2) ** 2 * c, 2**25):
        monkeypatch.setattr(cpu, "PART", part)
        for tensor in (weight, weight.contiguous(memory_format=torch.channels_last)):
            assert toy.relative_error(cpu.filtered(x, tensor, None, m), wanted.numpy()) < 4e-6
            assert toy.relative_error(cpu.filtered(grad, tensor, None, m, of_input=True), of_input.numpy()) < 4e-6


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
    error = toy.relative_error(cpu.filtered(x, weight, None, m), wanted)
    # Measured: 1.75 for m = 2, and 3.3 (AVX-512) to 8.6 (SSE) for m = 4.
    assert error < growth * toy.relative_error(plain, wanted)


def test_the_points_are_better_than_the_usual_ones(
    wide: tuple[torch.Tensor, torch.Tensor, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of both depend on the CPU, their ratio does not: 0.61 with SSE, AVX2 and AVX-512."""
    x, weight, wanted = wide
    error = toy.relative_error(cpu.filtered(x, weight, None, 4), wanted)
    monkeypatch.setitem(cpu.POINTS, 4, (0.0, 1.0, -1.0, 2.0, -2.0))
    assert error < 0.66 * toy.relative_error(cpu.filtered(x, weight, None, 4), wanted)
