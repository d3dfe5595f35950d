"""Group norms in strips and written out, against float64, and when they run."""

import copy

import pytest
import torch
import toy
from torch import Tensor, nn

from ldm_lite.core.layers import channels_last
from ldm_lite.runtime import cpu, fused, tiling


def large(batch: int, h: int, w: int) -> Tensor:
    """Make a map whose mean and deviation change from line to line."""
    slope = torch.linspace(-2, 2, h)[:, None]
    return channels_last(toy.normal(0, batch, 32, h, w) * (1 + slope**2) + slope)


def norm(groups: int = 8) -> nn.GroupNorm:
    """Make a norm with weights other than ones and zeros."""
    layer = nn.GroupNorm(groups, 32, eps=1e-6)
    layer.weight.data, layer.bias.data = toy.normal(1, 32), toy.normal(2, 32)
    return layer.requires_grad_(False)


def error(normed: Tensor, plain: nn.GroupNorm, x: Tensor) -> float:
    return toy.relative_error(normed, plain.double()(x.double()).numpy())


# one image and two; lines that divide evenly, and a prime number of them
@pytest.mark.parametrize("shape", [(1, 512, 512), (2, 264, 272), (1, 257, 300)], ids=str)
def test_is_exact_where_the_plain_kernel_is_not(shape: tuple[int, int, int]) -> None:
    x, plain = large(*shape), norm()
    normed = tiling.normalised(plain, x, x.device)(slice(None))
    assert normed.shape == x.shape
    assert normed.is_contiguous(memory_format=torch.channels_last)
    assert error(normed, norm(), x) < 5e-7


def test_is_exact_where_the_mean_is_large() -> None:
    """As in the decoders of autoencoders, where it is up to five times the deviation."""
    x, plain = large(1, 264, 272) + 20, norm()
    assert error(tiling.normalised(plain, x, x.device)(slice(None)), norm(), x) < 2e-6


def test_is_taken_for_large_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(tiling, "normalised", lambda norm, x, device: calls.append(x.shape) or (lambda rows: x))
    network = nn.Sequential(norm())
    cpu.use(network)
    x = large(1, 264, 264)
    with torch.no_grad():
        network(x)
        assert len(calls) == 1
        for feature_map in (
            x[:, :, :256, :256].contiguous(memory_format=torch.channels_last),
            x.contiguous(),
            x.double(),
        ):
            network.to(feature_map.dtype)
            network(feature_map)
        assert len(calls) == 1
    network.float()(x)  # gradients are the plain way's
    assert len(calls) == 1
    assert list(network.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels last", "contiguous"])
def test_written_out_it_is_the_same(layout: torch.memory_format) -> None:
    x = large(2, 17, 24).contiguous(memory_format=layout)
    normed = fused.written_out(x, norm())
    assert normed.is_contiguous(memory_format=layout)
    assert error(normed, norm(), x) < 5e-7


def test_written_out_it_computes_in_float32() -> None:
    """The only error is rounding the result, even if all values are far from zero."""
    x, half = (large(2, 16, 16) + 20).half(), norm().half()
    normed = fused.written_out(x, half)
    assert normed.dtype == torch.float16
    assert error(normed, norm().half().float(), x.float()) < 5e-4


# positions few and many, of both layouts; channels of a group: 1 and 8
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize(("groups", "h"), [(32, 6), (4, 6), (4, 40)])
def test_training_in_bfloat16_has_the_same_gradients(groups: int, h: int, layout: torch.memory_format) -> None:
    """Both passes against float32, whose error is bfloat16's 8 bits; autocast keeps float32 weights."""
    plain = norm(groups).requires_grad_()
    ours = nn.Sequential(copy.deepcopy(plain))
    cpu.use(ours)
    x = (toy.normal(3, 3, 32, h, 40) * 2 + 1).bfloat16().contiguous(memory_format=layout)
    weights, results = toy.normal(4, 3, 32, h, 40), []
    for module, value in ((plain, x.float()), (ours, x)):
        value.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=module is ours):
            y = module(value)
        (y.float() * weights).sum().backward()
        results.append([y.detach().float(), value.grad.float(), *(p.grad for p in module.parameters())])
    for wanted, result in zip(*results, strict=True):
        assert (wanted - result).abs().max() < 0.02 * wanted.abs().max()
