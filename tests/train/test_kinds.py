"""LoRA, DoRA, LoHa and LoKr compute what LyCORIS does from the same parameters (goldens), gradients too."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ldm_lite.train.additions import ADDITIONS, AttachedLoRA, ChangedWeight, LoRA, factorised

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "kinds.npz"))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape))


@pytest.mark.parametrize("shape", ["linear", "conv"])
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "lokr_full"])
def test_a_change_is_lycoris(kind: str, shape: str) -> None:
    """DoRA holds its norm constant in gradients, as its paper and PEFT do, not LyCORIS: only its lengths' are equal."""
    layer: nn.Linear | nn.Conv2d = nn.Linear(36, 24) if shape == "linear" else nn.Conv2d(36, 24, 1)
    layer.double().requires_grad_(False)
    layer.weight.copy_(normal(1, *layer.weight.shape))
    assert layer.bias is not None
    layer.bias.copy_(normal(2, 24))
    rank, generator = 20 if kind == "lokr_full" else 2, torch.Generator()
    change = ADDITIONS[kind.removesuffix("_full")](layer.weight, rank, 3.0, generator).double()
    x = normal(3, 4, 36) if shape == "linear" else normal(3, 2, 36, 3, 2)
    attached = AttachedLoRA(LoRA({}, 1), {})

    def added() -> Tensor:
        return attached.added(ChangedWeight(layer), change, x, layer(x))

    assert added().abs().max() < 1e-5, "it is 0 at first"
    names = sorted(name for name, _ in change.named_parameters())
    prefix = f"{kind}.{shape}"
    assert names == sorted(key.removeprefix(f"{prefix}.shape.") for key in GOLDEN if key.startswith(f"{prefix}.shape."))
    for i, name in enumerate(names):
        parameter = change.get_parameter(name)
        assert list(parameter.shape) == GOLDEN[f"{prefix}.shape.{name}"].tolist()
        parameter.data = normal(10 + i, *parameter.shape)
    out = layer(x) + added()
    (out * normal(4, *out.shape)).sum().backward()
    assert np.allclose(out.detach().numpy(), GOLDEN[f"{prefix}.out"], rtol=1e-9, atol=1e-9)
    for name in names:
        if kind != "dora" or name == "dora_scale":
            grad = change.get_parameter(name).grad
            assert grad is not None
            assert np.allclose(grad.numpy(), GOLDEN[f"{prefix}.grad.{name}"], rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize(
    ("size", "factor", "wanted"),
    [
        (128, -1, (8, 16)),
        (127, -1, (1, 127)),
        (250, 4, (2, 125)),
        (360, 16, (15, 24)),
        (1024, 4, (4, 256)),
        (320, 64, (5, 64)),
    ],
)
def test_factors(size: int, factor: int, wanted: tuple[int, int]) -> None:
    """Those of lycoris.functional.factorization."""
    assert factorised(size, factor) == wanted
