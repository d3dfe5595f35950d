"""Queries, keys and values of self-attention by one product: the same numbers, the same weights, and when not."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.transformer import BasicTransformerBlock, CrossAttention
from ldm_lite.runtime.compile import CompiledStep


@pytest.fixture
def layer() -> CrossAttention:
    made = toy.fill(CrossAttention(32, 32, 4))
    assert isinstance(made, CrossAttention)
    made.join()
    return made


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


def by_formula(layer: CrossAttention, x: Tensor) -> Tensor:
    q, k, v = (
        (x @ each.weight.T).unflatten(-1, (4, 8)).transpose(1, 2) for each in (layer.to_q, layer.to_k, layer.to_v)
    )
    out = (torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v).transpose(1, 2).flatten(2)
    return out @ layer.to_out[0].weight.T + layer.to_out[0].bias  # type: ignore[operator]


@torch.no_grad()
def test_one_product_in_place_of_three(layer: CrossAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    found, widths = products(layer, X, monkeypatch)
    assert widths == [96, 32]
    torch.testing.assert_close(found, by_formula(layer, X), rtol=1e-5, atol=1e-5)
    assert sorted(layer.state_dict()) == sorted(toy.fill(CrossAttention(32, 32, 4)).state_dict())
    assert len(list(layer.parameters())) == 5
    assert not list(layer.buffers())


@torch.no_grad()
def test_changes_in_place_are_seen(layer: CrossAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (layer.to_q, layer.to_k, layer.to_v):
        each.weight += 0.1
    layer.load_state_dict({key: value * 1.5 for key, value in layer.state_dict().items()})
    found, widths = products(layer, X, monkeypatch)
    assert widths == [96, 32]
    torch.testing.assert_close(found, by_formula(layer, X), rtol=1e-5, atol=1e-5)


class Double(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replaced(layer: CrossAttention) -> None:
    layer.to_k = toy.fill(Double(32, 32, bias=False))  # type: ignore[assignment]


def by_data(layer: CrossAttention) -> None:
    layer.to_v.weight.data = layer.to_v.weight.data * 2


def by_parameter(layer: CrossAttention) -> None:
    layer.to_q.weight = nn.Parameter(layer.to_q.weight.data * 2, requires_grad=False)


def assigned(layer: CrossAttention) -> None:
    layer.load_state_dict({key: value * 2 for key, value in layer.state_dict().items()}, assign=True)


def hooked(layer: CrossAttention) -> None:
    layer.to_q.register_forward_hook(lambda module, args, out: 2 * out)


def patched(layer: CrossAttention) -> None:
    layer.to_q.forward = lambda x: 2 * F.linear(x, layer.to_q.weight)  # type: ignore[method-assign]


def swapped(layer: CrossAttention) -> None:
    layer.to_q.weight, layer.to_k.weight = layer.to_k.weight, layer.to_q.weight


BREAKS: list[Callable[[CrossAttention], None]] = [replaced, by_data, by_parameter, assigned, hooked, patched, swapped]


@pytest.mark.parametrize("change", BREAKS)
@torch.no_grad()
def test_other_weights_take_three_products(change: Any, layer: CrossAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy.fill(CrossAttention(32, 32, 4))
    for each in (layer, plain):
        change(each)
    found, widths = products(layer, X, monkeypatch)
    assert len(widths) == 4
    assert torch.equal(found, plain(X, X))


@torch.no_grad()
def test_moved_cast_and_copied_layers_hold_no_other_memory(layer: CrossAttention) -> None:
    wanted = layer(X, X)
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.qkv is None
        torch.testing.assert_close(other(X, X), wanted)
        other.to_q.weight.zero_()
        assert layer.is_joined(), "a copy has weights of its own"
    assert torch.equal(layer(X, X), wanted)
    cast = layer.double()
    assert cast.qkv is None
    torch.testing.assert_close(cast(X.double(), X.double()).float(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_three_weights(layer: CrossAttention) -> None:
    plain = toy.fill(CrossAttention(32, 32, 4))
    for each in (layer, plain):
        each.requires_grad_(True)
        each(X, X).square().sum().backward()
    for name, weight in plain.named_parameters():
        assert weight.grad is not None
        assert torch.equal(layer.get_parameter(name).grad, weight.grad), name  # type: ignore[arg-type]


def test_files_are_as_without(layer: CrossAttention, tmp_path: Any) -> None:
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    for key, value in load_file(tmp_path / "layer.safetensors").items():
        assert torch.equal(value, layer.state_dict()[key])


def test_what_cannot_be_joined_is_left_alone() -> None:
    for other in (CrossAttention(32, 24, 4), CrossAttention(32, 32, 4)):
        other.to_q = nn.Linear(32, 32) if other.to_k.in_features == 32 else other.to_q  # a fork's, with a bias
        other.join()
        assert other.qkv is None


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_notice_replaced_weights() -> None:
    """Compiled code cannot see addresses, so the step looks before it runs."""
    torch._dynamo.reset()
    block, plain = (toy.fill(BasicTransformerBlock(32, 24, 4, False)) for _ in range(2))
    given = (X, toy.normal(2, 2, 5, 24))
    layer, step = block.get_submodule("attn1"), CompiledStep("regional", block, "eager")
    assert isinstance(layer, CrossAttention)
    layer.join()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), plain(*given), rtol=1e-5, atol=1e-5)
    step._check_joined(block)
    assert layer.qkv is not None
    for network in (block, plain):
        network.get_parameter("attn1.to_q.weight").data = toy.normal(7, 32, 32)
    step._check_joined(block)
    assert layer.qkv is None
    torch.testing.assert_close(compiled(*given), plain(*given), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
