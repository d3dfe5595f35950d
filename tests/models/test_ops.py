"""The pieces that every network is made of, against their formulas."""

import math

import pytest
import torch

from ldm_lite.core.layers import merge_heads, sdpa, sinusoids, split_heads
from ldm_lite.core.unet import GEGLU


@pytest.mark.parametrize(
    ("t", "dim", "wanted"),
    [  # at indices 0, 1, half-1, half, half+1, last; from the formula in float64
        (981.0, 320, [0.67995719, -0.79843003, 0.99460592, 0.73325181, 0.60208760, 0.10372589]),
        (1024.0, 256, [0.98735362, -0.53761032, 0.99395172, -0.15853338, -0.84319342, 0.10981790]),
    ],
)
def test_timestep_embedding_vectors(t: float, dim: int, wanted: list[float]) -> None:
    row = sinusoids(torch.tensor([t]), dim)[0]
    half = dim // 2
    # An angle of 1000 radians has an error of 6e-5 in float32.
    assert row[[0, 1, half - 1, half, half + 1, dim - 1]].tolist() == pytest.approx(wanted, abs=6e-5)


def test_timestep_embedding_of_any_kind_of_timestep() -> None:
    assert sinusoids(torch.tensor([0.5]), 4)[0].tolist() == pytest.approx(
        [math.cos(0.5), math.cos(0.005), math.sin(0.5), math.sin(0.005)]
    )
    integers, floats = torch.tensor([0, 981]), torch.tensor([0.0, 981.0], dtype=torch.float64)
    assert torch.equal(sinusoids(integers, 32), sinusoids(floats, 32))
    assert sinusoids(integers, 32).dtype == torch.float32


def test_geglu_gates_the_first_half_with_the_exact_gelu_of_the_second() -> None:
    layer = GEGLU(1, 2)
    layer.load_state_dict({"proj.weight": torch.tensor([[2.0], [5.0], [3.0], [-1.0]]), "proj.bias": torch.zeros(4)})

    def gelu(x: float) -> float:
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))

    wanted = [2 * gelu(3.0), 5 * gelu(-1.0)]  # the tanh approximation would be 4e-4 away
    assert layer(torch.ones(1, 1, 1)).flatten().tolist() == pytest.approx(wanted, rel=1e-6)


def test_heads_are_split_and_merged_in_the_order_of_channels() -> None:
    x = torch.arange(2 * 3 * 12).reshape(2, 3, 12)
    split = split_heads(x, 4)  # (B, H, N, D)
    assert split.shape == (2, 4, 3, 3)
    assert all(
        split[b, h, n, d] == x[b, n, 3 * h + d] for b in (0, 1) for h in range(4) for n in range(3) for d in range(3)
    )
    assert torch.equal(merge_heads(split), x)


def test_attention_is_a_softmax_over_the_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (5, 7, 7))
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / math.sqrt(8)
    weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    torch.testing.assert_close(sdpa(q, k, v), torch.einsum("bhnm,bhmd->bhnd", weights, v), rtol=1e-12, atol=1e-12)
