"""The formulas of a step: the learning rate, the EMA, the optimiser's settings."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import CONFIG, Grey, Squares, trainer

from ldm_lite.train.trainer import Trainer, learning_rate

HALF = 0.8535533905932737  # (1 + cos(pi / 4)) / 2, and the other half is 1 less that


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"warmup": 2}, [0.5, 1, 1, HALF, 0.5, 1 - HALF]),
        ({"warmup": 0.26}, [0.5, 1, 1, HALF, 0.5, 1 - HALF]),
        ({"warmup": 0}, [1, 0.9330127018922193, 0.75, 0.5, 0.25, 0.0669872981077807]),
        ({"warmup": 2, "lr_schedule": "constant"}, [0.5, 1, 1, 1, 1, 1]),
        ({"warmup": 2, "lr_schedule": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"warmup": 2, "lr_cycles": 2}, [0.5, 1, 1, 0.5, 1, 0.5]),
        ({"warmup": 3}, [1 / 3, 2 / 3, 1, 1, 0.75, 0.25]),
    ],
)
def test_the_learning_rate_over_the_steps(settings: dict[str, Any], wanted: list[float], tmp_path: Path) -> None:
    """That of each step of a run, as the optimiser has it."""
    run, rates = trainer(tmp_path, steps=6, lr=0.2, **settings), list[float]()
    run.fit(Grey(), lambda step, loss: rates.append(run.optimizer.param_groups[0]["lr"]), lambda step: None)
    assert rates == pytest.approx([0.2 * factor for factor in wanted])


def test_the_learning_rate_ends_at_0() -> None:
    assert learning_rate(999, 0.05, 1000) == pytest.approx(0, abs=1e-5)
    assert learning_rate(1000, 0.05, 1000) == pytest.approx(0, abs=1e-12)
    assert [learning_rate(step, 1, 1) for step in (0, 1)] == [1, 1]


def test_the_learning_rate_follows_the_minutes_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes a second.  A run that goes on is where its schedule was, and steps may still end it earlier."""

    def rates(seconds: float, steps: int = 100, resume: bool = False, warmup: float = 2) -> list[float]:
        clock = itertools.count()
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
        limits = {"minutes": seconds / 60, "steps": steps, "lr_by_time": True, "lr_schedule": "linear"}
        run, seen = trainer(tmp_path, warmup=warmup, lr=1.0, **limits), list[float]()
        if resume:
            run.resume()
        run.fit(Grey(), lambda step, loss: seen.append(run.optimizer.param_groups[0]["lr"]), lambda step: None)
        return seen

    assert rates(5) == pytest.approx([0.5, 1, 0.6, 0.4, 0.2, 0])
    assert rates(3) == pytest.approx([0.5, 1, 1 / 3, 0])
    assert rates(8, resume=True) == pytest.approx([0.5, 3 / 8, 2 / 8, 1 / 8, 0])
    assert rates(100, steps=6) == pytest.approx([0.5, 1, 0.98, 0.75, 0.5, 0.25])
    # A share of the steps that the minutes do not reach is one of the minutes.
    assert rates(5, steps=1000, warmup=0.5) == pytest.approx([1 / 500, 0.4, 0.8, 0.4, 0.2, 0])


def test_learned_weights_of_noise_levels_have_a_rate_of_their_own_and_do_not_decay(tmp_path: Path) -> None:
    loss = Squares()
    loss.networks["weighting"] = torch.nn.Linear(1, 1)
    network, weighting = Trainer(loss, dataclasses.replace(CONFIG, weight_decay=0.5), tmp_path).optimizer.param_groups
    assert len(network["params"]) == len(weighting["params"]) == 2
    assert (network["weight_decay"], weighting["weight_decay"], weighting["peak"]) == (0.5, 0.0, 0.01)


@pytest.mark.parametrize("decay", [0.25, 0.999])
def test_the_average_of_the_weights(decay: float, tmp_path: Path) -> None:
    """ema = d ema + (1 - d) w with d = min(decay, (1 + n) / (10 + n)) after n steps before: 1/10, 2/11, 3/12, 4/13."""
    run = trainer(tmp_path, steps=4, ema_decay=decay, warmup=0, lr=0.1)
    wanted, seen = run.ema["unet"].weight.clone(), list[Tensor]()
    run.fit(
        Grey(), lambda step, loss: seen.append(run.loss.networks["unet"].weight.detach().clone()), lambda step: None
    )
    for value, rising in zip(seen, (0.1, 2 / 11, 0.25, 4 / 13), strict=True):
        d = min(decay, rising)
        wanted = d * wanted + (1 - d) * value
    torch.testing.assert_close(run.ema["unet"].weight, wanted)
    assert not torch.equal(wanted, seen[-1])
