"""Images of several requests in one run of the network: joined projections, and steps in CUDA graphs."""

from typing import Any

import pytest
import torch
import toy
from pretended_cuda import PretendedCuda
from random_checkpoint import SMALL
from steps import guidance
from torch import Tensor

from ldm_lite.core.plan import device_rows
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas
from ldm_lite.runtime import joined, together
from ldm_lite.runtime.compile import CompiledStep
from ldm_lite.runtime.together import Together

SCHEDULE = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def unet() -> Any:
    network = toy.network(SMALL.unet).requires_grad_(False)
    joined.use(network)
    return network


def inputs(batch: int) -> list[Any]:
    """A row of a guided step."""
    [row, *_] = device_rows(named_plan("ddim", SCHEDULE, 4), torch.device("cpu"))
    registers, noise = toy.normal(0, NUM_REGISTERS, batch, 4, 8, 8), torch.zeros(batch, 4, 8, 8)
    return [registers, row, noise, *guidance(toy.normal(2, 2 * batch, 5, SMALL.unet.context_dim), 3.0)]


def test_joined_projections_stay_joined_and_each_image_has_its_bits(unet: Any) -> None:
    layers = list(joined.joined_layers(unet))
    batches = Together(unet)
    registers, row, noise, guided, *how = inputs(2)
    for _ in range(3):
        batch = batches(unet, registers, row, noise, guided, *how)
        for image in range(2):
            rows = guided._replace(conditioning={k: part[image::2] for k, part in guided.conditioning.items()})
            alone = batches(unet, registers[:, image : image + 1], row, noise[:1], rows, *how)
            assert torch.equal(batch[:, image : image + 1], alone)
    assert len(layers) == 4
    assert all(map(joined.is_joined, layers))
    assert list(joined.joined_layers(unet)) == layers


def test_a_layer_that_comes_apart_is_measured_again(unet: Any) -> None:
    batches, [layer, *_] = Together(unet), list(joined.joined_layers(unet))
    batches(unet, *inputs(2))
    layer.to_q.weight.data = layer.to_q.weight.data.clone()
    batches(unet, *inputs(2))
    assert {key[1] for key in batches._same if key[0] == id(layer)} == {(True,), (False,)}  # type: ignore[index]


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_batch_runs_as_a_graph_unless_a_graph_for_each_image_is_faster(
    is_faster: bool, unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is captured at its third call, and both are timed once they are replayed."""
    cuda, timed = PretendedCuda(monkeypatch), together._timed

    def pretended(run: Any, *args: Any) -> tuple[Tensor, float]:
        return timed(run, *args)[0], 1.0 if (run.__name__ == "_whole") == is_faster else 2.0

    monkeypatch.setattr(together, "_timed", pretended)
    step = CompiledStep("graph", unet, "eager")
    batches, args = Together(unet, step), inputs(2)
    wanted = Together(unet)(unet, *args)
    for _ in range(4):
        assert torch.equal(batches(unet, *args), wanted)
    assert cuda.log.count("capture") == 2, "of a batch, and of one image"
    cuda.replayed.clear()
    assert torch.equal(batches(unet, *args), wanted)
    assert len(cuda.replayed) == (1 if is_faster else 2)
    assert step.failure is None
