"""Linears of the same input by one product: the same numbers, the same weights, and when not."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import toy
from random_checkpoint import SMALL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from waiting import at_once

from ldm_lite.core.unet import Attention, BasicTransformerBlock
from ldm_lite.runtime import joined, patching
from ldm_lite.runtime.compile import CompiledStep


@pytest.fixture
def layer() -> Attention:
    attention = toy.fill(Attention(32, 32, 4))
    assert isinstance(attention, Attention)
    joined.join_projections(attention)
    return attention


X = toy.normal(1, 2, 6, 32)


def products(layer: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[int]]:
    """The layer's result, and the width of each product."""
    widths, linear = list[int](), F.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(len(weight))
        return linear(x, weight, bias)

    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", counted)
        return layer(x, x), widths


def by_formula(layer: Attention, x: Tensor) -> Tensor:
    q, k, v = (
        (x @ projection.weight.T).unflatten(-1, (4, 8)).transpose(1, 2)
        for projection in (layer.to_q, layer.to_k, layer.to_v)
    )
    out = (torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v).transpose(1, 2).flatten(2)
    return out @ layer.to_out[0].weight.T + layer.to_out[0].bias  # type: ignore[operator]


@torch.no_grad()
def test_one_product_in_place_of_three(layer: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    output, widths = products(layer, X, monkeypatch)
    assert widths == [96, 32]
    torch.testing.assert_close(output, by_formula(layer, X), rtol=1e-5, atol=1e-5)
    assert sorted(layer.state_dict()) == sorted(toy.fill(Attention(32, 32, 4)).state_dict())
    assert len(list(layer.parameters())) == 5
    assert not list(layer.buffers())


@torch.no_grad()
def test_changes_in_place_are_seen(layer: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    for projection in (layer.to_q, layer.to_k, layer.to_v):
        projection.weight += 0.1
    layer.load_state_dict({key: value * 1.5 for key, value in layer.state_dict().items()})
    output, widths = products(layer, X, monkeypatch)
    assert widths == [96, 32]
    torch.testing.assert_close(output, by_formula(layer, X), rtol=1e-5, atol=1e-5)


class Double(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replaced(layer: Attention) -> None:
    layer.to_k = toy.fill(Double(32, 32, bias=False))  # type: ignore[assignment]


def by_data(layer: Attention) -> None:
    layer.to_v.weight.data = layer.to_v.weight.data * 2


def by_parameter(layer: Attention) -> None:
    layer.to_q.weight = nn.Parameter(layer.to_q.weight.data * 2, requires_grad=False)


def assigned(layer: Attention) -> None:
    layer.load_state_dict({key: value * 2 for key, value in layer.state_dict().items()}, assign=True)


def hooked(layer: Attention) -> None:
    layer.to_q.register_forward_hook(lambda module, args, out: 2 * out)


def patched(layer: Attention) -> None:
    layer.to_q.forward = lambda x: 2 * F.linear(x, layer.to_q.weight)  # type: ignore[method-assign]


def swapped(layer: Attention) -> None:
    layer.to_q.weight, layer.to_k.weight = layer.to_k.weight, layer.to_q.weight


BREAKS: list[Callable[[Attention], None]] = [replaced, by_data, by_parameter, assigned, hooked, patched, swapped]


@pytest.mark.parametrize("change", BREAKS)
@torch.no_grad()
def test_other_weights_take_three_products(change: Any, layer: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy.fill(Attention(32, 32, 4))
    for attention in (layer, plain):
        change(attention)
    output, widths = products(layer, X, monkeypatch)
    assert len(widths) == 4
    assert torch.equal(output, plain(X, X))


@torch.no_grad()
def test_moved_cast_and_copied_layers_hold_no_other_memory(layer: Attention) -> None:
    wanted = layer(X, X)
    copied = copy.deepcopy(layer)
    assert not joined.is_joined(copied)
    torch.testing.assert_close(copied(X, X), wanted)
    copied.to_q.weight.zero_()
    assert joined.is_joined(layer), "a copy has weights of its own"
    assert torch.equal(layer(X, X), wanted)
    shared = patching.twin(layer)
    assert joined.is_joined(shared), "a copy with the same weights has them joined"
    cast = layer.double()
    cast(X.double(), X.double())
    assert "joined" not in vars(cast), "nor is its memory kept"
    torch.testing.assert_close(cast(X.double(), X.double()).float(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_three_weights(layer: Attention) -> None:
    plain = toy.fill(Attention(32, 32, 4))
    for attention in (layer, plain):
        attention.requires_grad_(True)
        attention(X, X).square().sum().backward()
    for name, weight in plain.named_parameters():
        assert weight.grad is not None
        assert torch.equal(layer.get_parameter(name).grad, weight.grad), name  # type: ignore[arg-type]


def test_files_are_as_without(layer: Attention, tmp_path: Any) -> None:
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    for key, value in load_file(tmp_path / "layer.safetensors").items():
        assert torch.equal(value, layer.state_dict()[key])


def test_what_cannot_be_joined_is_left_alone() -> None:
    for attention in (Attention(32, 24, 4), Attention(32, 32, 4)):
        # a fork's, with a bias
        attention.to_q = nn.Linear(32, 32) if attention.to_k.in_features == 32 else attention.to_q
        joined.join_projections(attention)
        assert not joined.is_joined(attention)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_steps_notice_replaced_weights() -> None:
    """Compiled code cannot see addresses, so the step looks before it runs."""
    block, plain = (toy.fill(BasicTransformerBlock(32, 24, 4)) for _ in range(2))
    inputs = (X, toy.normal(2, 2, 5, 24))
    layer, step = block.get_submodule("attn1"), CompiledStep("regional", block, "eager")
    assert isinstance(layer, Attention)
    joined.join_projections(layer)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)
    step._check_joined(block)
    assert joined.is_joined(layer)
    for network in (block, plain):
        network.get_parameter("attn1.to_q.weight").data = toy.normal(7, 32, 32)
    step._check_joined(block)
    assert not joined.is_joined(layer)
    torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)


# ---- linears of several layers --------------------------------------------------------------------------------------


@pytest.fixture
def unets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A network whose linears share memory, another one, and the widths of the first one's products so far."""
    shared, plain = (toy.network(SMALL.unet).requires_grad_(False) for _ in range(2))
    joined.use(shared)
    widths, linear = list[int](), F.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    return shared, plain, widths


INPUTS = toy.normal(1, 2, 4, 8, 8), torch.tensor([5.0, 700.0])
TEXT = toy.normal(2, 2, 5, SMALL.unet.context_dim)


def shared_linears(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear) and joined.is_shared(layer)]


def assert_same(networks: Any, text: Tensor = TEXT) -> None:
    shared, plain, _ = networks
    torch.testing.assert_close(shared(*INPUTS, text), plain(*INPUTS, text), rtol=1e-4, atol=1e-5)
    layers = shared_linears(shared)
    assert len(layers) > 4
    assert not any(vars(layer)["part"].shared in joined._products.kept for layer in layers), "kept after a forward"


@torch.no_grad()
def test_texts_and_timesteps_take_a_product_each(unets: Any) -> None:
    shared, plain, widths = unets
    layers = shared_linears(shared)
    blocks = sum(type(module) is BasicTransformerBlock for module in shared.modules())
    timesteps = [layer.out_features for layer in layers if layer.bias is not None]
    texts = [layer.out_features for layer in layers if layer.bias is None]
    assert len(texts) == 2 * blocks
    plain(*INPUTS, TEXT)
    num_plain = len(widths)
    widths.clear()
    shared(*INPUTS, TEXT)
    assert len(widths) == num_plain - 2 * blocks - len(layers) + 2
    assert {sum(texts), sum(timesteps)} <= {*widths}
    assert_same(unets)
    assert list(shared.state_dict()) == list(plain.state_dict())


@torch.no_grad()
def test_shared_products_follow_texts_and_weights_in_place(unets: Any) -> None:
    """The text of every forward, though it is the same tensor as before; and the weights that a LoRA changes."""
    shared, plain, _ = unets
    text = TEXT.clone()
    for _ in range(2):
        assert_same(unets, text)
        text += 1
        for network in (shared, plain):
            for weight in network.parameters():
                weight *= 1.1
    assert len(shared_linears(shared)) > 4


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("change", ["weight", "dtype of all", "hook", "forward", "class"])
@torch.no_grad()
def test_changed_linears_take_products_of_their_own(change: str, place: int, unets: Any) -> None:
    names = [name for name, layer in unets[0].named_modules() if layer in shared_linears(unets[0])]
    name = [name for name in names if "attn2" in name][place]
    for network in unets[:2]:
        layer: Any = network.get_submodule(name)
        if change == "weight":
            layer.weight.data = 2 * layer.weight.data
        elif change == "dtype of all":
            network.double()
        elif change == "hook":
            layer.register_forward_hook(lambda module, args, out: 2 * out)
        elif change == "forward":
            layer.forward = lambda x, layer=layer: 2 * F.linear(x, layer.weight)
        else:
            double = Double(layer.in_features, layer.out_features, bias=False)
            double.weight = layer.weight
            network.set_submodule(name, double)
    number = len(shared_linears(unets[0]))
    for _ in range(2):
        shared, plain, _ = unets
        torch.testing.assert_close(shared(*INPUTS, TEXT), plain(*INPUTS, TEXT), rtol=1e-4, atol=1e-5)
    if change == "weight":
        assert 0 < len(shared_linears(shared)) < number, "those of the timestep remain"
    elif change == "dtype of all":
        assert not any("part" in vars(layer) for layer in shared.modules())


@torch.no_grad()
def test_a_forward_that_fails_leaves_nothing_to_the_next(unets: Any) -> None:
    for network in unets[:2]:
        handle = network.middle_block.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            network(*INPUTS, TEXT)
        handle.remove()
        for weight in network.parameters():
            weight *= 1.1
    assert_same(unets)


@torch.no_grad()
def test_threads_do_not_read_the_products_of_one_another(unets: Any) -> None:
    shared, plain, _ = unets
    turn = threading.Barrier(2)
    for block in (shared.input_blocks[1], shared.middle_block):
        block.register_forward_pre_hook(lambda *args: print(turn.wait(60)))

    def work(seed: int) -> Tensor:
        with torch.no_grad():
            return shared(*INPUTS, seed * TEXT)

    for seed, result in enumerate(at_once(partial(work, 1), partial(work, 2)), 1):
        torch.testing.assert_close(result, plain(*INPUTS, seed * TEXT), rtol=1e-4, atol=1e-5)


def test_copies_share_with_nothing_and_twins_with_the_network(unets: Any) -> None:
    shared, plain, _ = unets
    copied, twin, number = copy.deepcopy(shared), patching.twin(shared), len(shared_linears(shared))
    assert not shared_linears(copied)
    assert len(shared_linears(twin)) == number
    for weight in copied.parameters():
        weight.data.zero_()
    with torch.no_grad():
        assert_same((twin, plain, None))
    gradients = []
    for network in (shared, plain):
        network.requires_grad_(True)
        network(*INPUTS, TEXT).square().mean().backward()
        gradients.append([weight.grad for weight in network.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_shared_linears_compile(unets: Any) -> None:
    compiled = torch.compile(unets[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*INPUTS, TEXT), unets[1](*INPUTS, TEXT), rtol=1e-4, atol=1e-5)
