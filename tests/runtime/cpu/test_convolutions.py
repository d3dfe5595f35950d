"""3x3 convolutions on a CPU: which way is taken, and gradients."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.unet import Downsample, Upsample
from ldm_lite.runtime import cpu
from ldm_lite.runtime.patching import patch_of


def use(network: nn.Module, owns_weights: bool = False) -> int:
    """Give a network the kernels, and count its convolutions that have a choice."""
    cpu.use(network, owns_weights)
    return sum(patch_of(layer) is cpu._conv3x3 for layer in network.modules())


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_product_is_the_convolution(frozen: bool, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both layouts of the input and of the gradient; gradients too."""
    monkeypatch.setattr(cpu, "MIN_CHANNELS", 4)
    monkeypatch.setattr(cpu, "LARGE", 9)
    conv = nn.Conv2d(6, 4, 3, padding=1)
    exact = copy.deepcopy(conv).double()
    assert use(conv.requires_grad_(not frozen)) == 1
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    x, grad = toy.normal(0, 2, 6, 5, 7), toy.normal(1, 2, 4, 5, 7)
    if last:
        x, grad = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, grad))
    inputs = [x.requires_grad_(), *([] if frozen else conv.parameters())]
    out = conv(x)
    assert "Convolution" not in type(out.grad_fn).__name__
    double = x.detach().double().requires_grad_()
    wanted = exact(double)
    assert toy.relative_error(out.detach(), wanted.detach().numpy()) < 1e-6
    gradients = torch.autograd.grad(out, inputs, grad)
    for gradient, wanted_gradient in zip(
        gradients, torch.autograd.grad(wanted, [double, *exact.parameters()], grad.double()), strict=False
    ):
        assert toy.relative_error(gradient, wanted_gradient.numpy()) < 1e-6
    with torch.no_grad():
        assert toy.relative_error(conv(x), wanted.detach().numpy()) < 1e-6


@pytest.mark.parametrize("size", [(4, 5), (1, 1), (1, 3), (16, 16)])
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_is_a_product(size: tuple[int, int], last: bool) -> None:
    x, weight, bias = toy.normal(1, 2, 12, *size), toy.normal(2, 20, 12, 3, 3), toy.normal(3, 20)
    if last:
        x, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    product = cpu.as_product(x, weight, bias)
    assert toy.relative_error(product, wanted.numpy()) < 1e-6
    assert product.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The ways that convolutions took, and the sides of their maps."""
    calls: list[tuple[str, int]] = []

    def recorded(name: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        original = cpu.WAYS[name]

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            calls.append((name, x.shape[-1]))
            return original(x, weight, bias)

        return run

    for name in cpu.WAYS:
        monkeypatch.setitem(cpu.WAYS, name, recorded(name))
    return calls


def test_large_weights_on_small_maps_take_a_product(
    monkeypatch: pytest.MonkeyPatch, taken: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(cpu, "LARGE", 9 * 128 * 128)
    network = nn.ModuleList([nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 64, 3, padding=1)])
    before = {key: value.clone() for key, value in network.state_dict().items()}
    use(network.requires_grad_(False), owns_weights=True)
    with torch.no_grad():
        for conv in network:
            for side in (32, 4, 8, 16, 32):
                conv(toy.normal(0, 2, 128, side, side))
        small = network[0].half()(toy.normal(0, 2, 128, 4, 4).half())
    # The second has too few channels out.
    assert taken == [("tiles of 4", 32), ("product", 4), ("product", 8), ("tiles of 2", 16), ("tiles of 4", 32)]
    assert small.dtype == torch.float16
    assert all(torch.equal(value, before[key].to(value.dtype)) for key, value in network.state_dict().items())


@pytest.mark.skipif(not cpu.HALF, reason="this CPU does not multiply in bfloat16")
def test_in_bfloat16_large_weights_take_a_product(
    monkeypatch: pytest.MonkeyPatch, taken: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(cpu, "LARGE", 9 * 128 * 128)
    exact = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False)
    conv = copy.deepcopy(exact).bfloat16().to(memory_format=torch.channels_last)
    use(conv)
    for side in (4, 8, 16, 32):
        x = toy.normal(0, 2, 128, side, side)
        with torch.no_grad():
            assert toy.relative_error(conv(x.bfloat16()).float(), exact(x).numpy()) < 5e-3
    assert taken == [("product", 4), ("product", 8), ("plain", 16), ("plain", 32)]
    conv.requires_grad_()(toy.normal(0, 2, 128, 4, 4).bfloat16()).sum().backward()
    assert taken[4:] == [("plain", 4)]


def test_is_taken_where_it_is_faster(taken: list[tuple[str, int]]) -> None:
    network = nn.ModuleList([nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)])
    assert use(network) == 1
    wide, narrow = network
    before = list(network.state_dict())
    with torch.no_grad():
        wide(toy.normal(0, 1, 128, 32, 32))
        wide(toy.normal(0, 2, 128, 16, 16))
        wide(toy.normal(0, 1, 128, 8, 8))
        narrow(toy.normal(0, 1, 128, 32, 32))
    assert taken == [("tiles of 4", 32), ("tiles of 2", 16), ("plain", 8)]
    wide(toy.normal(0, 1, 128, 32, 32))  # with gradients it is too narrow
    assert taken[3:] == [("plain", 32)]
    assert list(network.state_dict()) == before


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the plain convolution in float64, for an input and weights of either layout in memory."""
    monkeypatch.setattr(cpu, "MIN_CHANNELS", 4)
    monkeypatch.setattr(cpu, "MIN_TRAINED", 4)
    conv = nn.Conv2d(6, 4, 3, padding=1)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(conv).double()
    assert use(conv) == 1
    conv.requires_grad_(not frozen)
    x, grad = toy.normal(0, 2, 6, 33, 35), toy.normal(1, 2, 4, 33, 35)
    inputs = [x.requires_grad_(), *([] if frozen else conv.parameters())]
    out = conv(x)
    assert "_Filtered" in type(out.grad_fn).__name__
    gradients = torch.autograd.grad(out, inputs, grad)
    double = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(double), [double, *exact.parameters()], grad.double())
    for gradient, wanted_gradient in zip(gradients, wanted, strict=False):
        assert toy.relative_error(gradient, wanted_gradient.numpy()) < 4e-6


def test_only_plain_convolutions_can_take_it() -> None:
    others = [
        Downsample(128),
        nn.Conv2d(128, 128, 1),
        nn.Conv2d(128, 128, 3, padding=2, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, groups=2),
        nn.Conv2d(128, 128, 3, padding=1, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular"),
    ]
    assert use(nn.ModuleList(others)) == 0
    assert use(nn.ModuleList([Upsample(128)])) == 1


def test_changed_weights_and_other_dtypes() -> None:
    conv = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False)
    use(conv)
    x = toy.normal(0, 2, 128, 32, 32)
    with torch.no_grad():
        conv.weight.mul_(3)
        wanted = F.conv2d(x, conv.weight, conv.bias, padding=1)
        assert toy.relative_error(conv(x), wanted.numpy()) < 5e-6
        assert torch.equal(conv.double()(x.double()), F.conv2d(x.double(), conv.weight, conv.bias, padding=1))


def test_weights_are_not_moved_while_a_thread_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with maps of two sizes: the large ones read the weight as it was, or as it is."""
    monkeypatch.setattr(cpu, "LARGE", 9 * 128 * 128)
    small, large = toy.normal(0, 2, 128, 4, 4), toy.normal(1, 2, 128, 48, 48)
    for seed in range(5):
        conv = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False)
        conv.weight.data = toy.normal(seed, 128, 128, 3, 3)
        wanted = [F.conv2d(x, conv.weight, conv.bias, padding=1) for x in (small, large)]
        use(conv, owns_weights=True)
        with ThreadPoolExecutor(6) as pool:
            outs = list(pool.map(conv, [small, large] * 12))
        for i, out in enumerate(outs):
            assert toy.relative_error(out, wanted[i % 2].numpy()) < 1e-5
        conv(small)
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
@pytest.mark.parametrize("side", [4, 8])
def test_a_batch_does_not_change_the_bits_of_what_comes_after(side: int) -> None:
    """PyTorch's convolution has other bits for other layouts of a weight, and a large batch wants another one."""
    conv = toy.fill(nn.Conv2d(128, 192, 3, padding=1)).requires_grad_(False)
    use(conv, owns_weights=True)
    x = toy.normal(0, 2, 128, side, side)
    images = [x, x.contiguous(memory_format=torch.channels_last)]
    before = [conv(image) for image in images]
    for count in (4, 8, 32):
        conv(toy.normal(1, count, 128, 2 * side, 2 * side))
    assert all(torch.equal(conv(image), bits) for image, bits in zip(images, before, strict=True))


def test_weights_that_others_move_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LARGE", 9 * 128 * 128)
    x = toy.normal(0, 2, 128, 4, 4)
    for owns_weights, learns in ((False, False), (True, True)):
        conv = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(learns)
        use(conv, owns_weights)
        with torch.no_grad():
            conv(x)
        assert not conv.weight.is_contiguous(memory_format=torch.channels_last)
