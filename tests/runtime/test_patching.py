"""Patched forwards: found again, undone, copied; and whether a network runs as written."""

import copy
import functools
import threading
from types import MethodType

import pytest
import torch
import toy
from random_checkpoint import SMALL
from torch import Tensor, nn

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.layers import sdpa
from ldm_lite.core.unet import Attention
from ldm_lite.runtime import cpu, fused
from ldm_lite.runtime.attention import Fastest, record, use
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.patching import is_unmodified, kernel, patch, patch_like, patch_of, twin, unpatch, unpatched
from ldm_lite.runtime.setup import prepare_networks

CPU = torch.device("cpu")


def doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(layer, x)


@kernel
def product(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.t() + layer.bias


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(4, 4).requires_grad_(False)


def test_a_patch_is_found_and_undone(layer: nn.Linear) -> None:
    x = toy.normal(0, 2, 4)
    plain = layer(x)
    assert patch_of(layer) is None
    patch(layer, doubled)
    assert torch.equal(layer(x), 2 * plain)
    assert patch_of(layer) is doubled
    with unpatched(layer):
        assert torch.equal(layer(x), plain)
        assert patch_of(layer) is None
    assert torch.equal(layer(x), 2 * plain)
    patch(layer, product)
    assert patch_of(layer) is product
    unpatch(layer)
    unpatch(layer)
    assert torch.equal(layer(x), plain)


def test_a_deep_copy_computes_with_its_own_weights(layer: nn.Linear) -> None:
    x, network = toy.normal(0, 2, 4), nn.Sequential(layer)
    patch(layer, doubled)
    wanted, copied = network(x), copy.deepcopy(network)
    copied[0].weight.zero_()
    assert torch.equal(copied(x), 2 * layer.bias.expand(2, 4))
    assert torch.equal(network(x), wanted)
    assert patch_of(copied[0]) is doubled
    unpatch(copied[0])
    assert torch.equal(network(x), wanted)


def test_only_kernels_leave_a_network_as_written(layer: nn.Linear) -> None:
    network = nn.Sequential(layer)
    assert is_unmodified(network)
    patch(layer, product)
    assert is_unmodified(network)
    assert is_unmodified(copy.deepcopy(network))
    assert not is_unmodified(copy.copy(layer)), "it computes with the other one's attributes"
    patch(layer, doubled)
    assert not is_unmodified(network)
    for foreign in (MethodType(doubled, layer), functools.partial(doubled, layer), lambda x: x):
        layer.forward = foreign
        assert not is_unmodified(network)
    unpatch(layer)
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert not is_unmodified(network)
        handle.remove()
    assert is_unmodified(network)


def test_which_of_our_own_networks_run_as_written() -> None:
    """Kernels do; another attention layer and the hooks of the offloader do not."""
    unet = toy.network(SMALL.unet)
    prepare_networks({"unet": unet}, RuntimeOptions(), CPU)
    assert any(patch_of(module) for module in unet.modules())
    assert is_unmodified(unet)
    use(unet, "mha")
    assert not is_unmodified(unet)
    with record(unet):
        assert is_unmodified(unet)
    assert not is_unmodified(unet)
    use(unet, "vanilla")
    assert is_unmodified(unet)
    Offloader({"unet": unet}, CPU, offload="model")
    assert is_unmodified(unet)
    Offloader({"unet": unet}, CPU, offload="sequential")
    assert not is_unmodified(unet)


def test_copies_of_networks_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_CHANNELS", 4)
    vae = toy.network(SMALL.vae)
    cpu.use(vae)
    assert {patch_of(layer) for layer in vae.modules()} >= {cpu._conv3x3, cpu._group_norm}
    z = toy.normal(0, 1, 4, 8, 8)
    with torch.no_grad():
        wanted, copied = vae.decode(z), copy.deepcopy(vae)
        for parameter in copied.decoder.parameters():
            parameter.zero_()
        assert copied.decode(z).abs().max() == 0
        assert torch.equal(vae.decode(z), wanted)


def test_a_controlnet_follows_its_unet() -> None:
    first, second = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)) for _ in range(2))
    fused.use(first)
    patch_like(second, first)
    assert [patch_of(layer) for layer in second] == [None, fused._forward]


def test_a_twin_has_the_same_attention() -> None:
    """An object that remembers, and cannot be copied; `fastest`, which changes its layer, is the twin's own."""

    class Recorder:
        def __init__(self) -> None:
            self.lock, self.calls = threading.Lock(), 0

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls += 1
            return sdpa(q, k, v)

    layer, x = Attention(8, 8, 2), toy.normal(0, 1, 5, 8)
    recorder = Recorder()
    use(layer, recorder)
    twin(layer)(x, x)
    assert recorder.calls == 1
    use(layer, "fastest")
    copied = twin(layer)
    with torch.no_grad():
        copied(x, x)
    assert isinstance(layer.attention, Fastest)
    assert not isinstance(copied.attention, Fastest)
