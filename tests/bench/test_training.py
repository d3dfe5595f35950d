"""Training steps in all configurations have the same losses and leave the loaded weights unchanged."""

import pytest
import torch
from random_checkpoint import SMALL

from ldm_lite.bench.checkpoints import random_checkpoint
from ldm_lite.bench.comparison import Comparison
from ldm_lite.bench.configurations import Models
from ldm_lite.bench.training import STEPS, TRAIN_CONFIGURATIONS, train_backends
from ldm_lite.bench.workload import TRAIN, Cell, Setting, cost

SETTING = Setting(height=64, width=64, prompt="a", sampler="ddim", steps=3, n_iter=1, scale=7.5, seed=1)
CELL = Cell(TRAIN, "fp32", 2)


@pytest.mark.slow
def test_all_configurations_have_the_losses_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldm_lite.bench.measure.SAMPLE_S", 0.01)
    models = Models(random_checkpoint("small", SMALL), torch.device("cpu"))
    before = {key: value.clone() for key, value in models.loaded().unet.state_dict().items()}
    names = [name for name in TRAIN_CONFIGURATIONS if name != "compiled"]  # the compiler takes long
    reference, made = train_backends(models, SETTING, names)
    comparison = Comparison(reference, made, lambda cell: cost(SMALL, SETTING, cell), 2, 0.0, None)
    table = comparison.measure(CELL, 0.0)
    assert all(timing.passes and len(timing.samples) == 2 for timing in table.timings.values())
    losses = made[0].first(CELL).result
    assert losses.shape == (STEPS,)
    assert losses[-1] < losses[0]
    assert torch.equal(losses, made[0].first(CELL).result)  # however much was trained in between
    after = models.loaded().unet.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
