"""The DeepFloyd IF UNet against the original (the goldens), and its contract."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ldm_lite.models.unet_if import AttentionPooling, TextAttention, UNetIF
from ldm_lite.runtime.attention import record, use, vanilla

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "control.npz")


@pytest.mark.parametrize("name", toy.IF_STAGES)
def test_equals_the_original(name: str) -> None:
    x, context, y = toy.if_inputs(toy.IF_STAGES[name])
    out = toy.network(toy.IF_STAGES[name])(x, toy.T, context, y)
    assert toy.relative_error(out, GOLDEN[name]) < 1e-5


@pytest.mark.parametrize("name", toy.IF_STAGES)
def test_works_at_any_size(name: str) -> None:
    x, context, y = toy.if_inputs(toy.IF_STAGES[name], h=15, w=9)
    assert toy.network(toy.IF_STAGES[name])(x, toy.T, context, y).shape == (2, 6, 15, 9)


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_once")
def test_compiles_to_one_graph_for_all_steps() -> None:
    spec = replace(toy.IF_STAGES["if_II"], channel_mult=(1, 2), num_res_blocks=(1, 1), transformer_depth=(0, 1))
    network, counter = toy.network(spec), CompileCounter()
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    x, context, y = toy.if_inputs(spec)
    for t in (toy.T, toy.T_FRACTIONAL):
        torch.testing.assert_close(compiled(x, t, context, y), network(x, t, context, y))
    assert counter.frame_count == 1


def test_the_text_and_the_noise_of_the_small_image_matter() -> None:
    spec = toy.IF_STAGES["if_II"]
    x, context, y = toy.if_inputs(spec)
    network = toy.network(spec)
    out = network(x, toy.T, context, y)
    assert y is not None
    for changed in (network(x, toy.T, context.roll(1, dims=0), y), network(x, toy.T, context, y + 100)):
        assert toy.relative_error(changed, out.numpy()) > 1e-3


def test_its_attention_can_be_chosen_and_recorded() -> None:
    spec = toy.IF_STAGES["if_I"]
    x, context, _ = toy.if_inputs(spec)
    network = toy.network(spec)
    wanted = network(x, toy.T, context)
    use(network, "vanilla")
    chosen = {name for name, module in network.named_modules() if getattr(module, "attention", None) is vanilla}
    assert chosen == {
        name for name, module in network.named_modules() if isinstance(module, (TextAttention, AttentionPooling))
    }
    torch.testing.assert_close(network(x, toy.T, context), wanted, rtol=1e-4, atol=1e-5)
    calls = []

    def zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape[-1])
        return torch.zeros_like(q)

    use(network, zero)
    assert not torch.allclose(network(x, toy.T, context), wanted, rtol=1e-3)
    assert len(calls) == len(chosen)
    use(network, "sdpa")
    with record(network, "middle_block.*") as maps:
        assert toy.relative_error(network(x, toy.T, context), wanted.numpy()) < 1e-5
    [(name, [weights])] = maps.items()
    tokens = (x.shape[2] // 4) * (x.shape[3] // 4) + context.shape[1]
    assert (name, weights.shape[0], weights.shape[3]) == ("middle_block.1", len(x), tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))


def test_an_attention_that_it_cannot_have_is_an_error() -> None:
    with torch.device("meta"):
        network = UNetIF(toy.IF_STAGES["if_I"])
    with pytest.raises(ValueError, match=r"'mha' needs layers with to_q, to_k and to_v; .* has none"):
        use(network, "mha")
