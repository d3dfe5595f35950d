"""Training steps in all ways learn alike, from the same weights, which they leave as they were."""

import pytest
import torch
from random_checkpoint import SMALL

from ldm_lite.bench.configurations import Models
from ldm_lite.bench.jobs import TRAIN, Cell, Setting, work
from ldm_lite.bench.run import Course, measure
from ldm_lite.bench.subjects import random_checkpoint
from ldm_lite.bench.training import STEPS, WAYS, contenders
from ldm_lite.zoo.families import SD1

SETTING = Setting(height=64, width=64, prompt="a", sampler="ddim", steps=3, n_iter=1, scale=7.5, seed=1)
CELL = Cell(TRAIN, "fp32", 2)


def test_the_ways_have_the_losses_of_the_first() -> None:
    models = Models(random_checkpoint("small", SMALL), torch.device("cpu"))
    before = {key: value.clone() for key, value in models.loaded(torch.float32).unet.state_dict().items()}
    names = [name for name in WAYS if name != "compiled"]  # the compiler takes long
    reference, made = contenders(models, SETTING, names)
    table = measure(CELL, work(SMALL, SETTING, CELL), Course(reference, made, 2, 0.0, None), 0.0)
    assert all(timing.passes and len(timing.samples) == 2 for timing in table.timings.values())
    losses = made[0].first(CELL).result
    assert losses.shape == (STEPS,)
    assert losses[-1] < losses[0]
    assert torch.equal(losses, made[0].first(CELL).result)  # however much was trained in between
    after = models.loaded(torch.float32).unet.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_work_of_a_training_step_is_three_forwards() -> None:
    setting = Setting(**{**SETTING.__dict__, "height": 512, "width": 512})
    flops, items = work(SD1, setting, Cell(TRAIN, "fp32", 4))
    assert flops == pytest.approx(4 * 2_406_773_063_680, rel=2e-3)
    assert items == 4
