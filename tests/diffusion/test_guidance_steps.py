"""Guidance that depends on the step, and APG, against the published formulas and diffusers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from runs import guided_outputs, run_latents, unet_calls

from ldm_lite import Pipeline
from ldm_lite.core.denoise import Outputs
from ldm_lite.core.plan import device_rows
from ldm_lite.features.apg import Projection

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")


def run(pipe: Pipeline, **options: Any) -> torch.Tensor:
    """The last latents of a guided run on two images."""
    cond, uncond = (toy.normal(seed, 2, 7, 64) for seed in (2, 3))
    arguments = {"cond": cond, "uncond": uncond, "noise": toy.normal(1, 2, 4, 8, 8), "batch_size": 2, "scale": 5.0}
    return run_latents(pipe, **arguments | options)


def guided_calls(pipe: Pipeline, interval: str, **options: Any) -> list[bool]:
    """Of each call of the network, whether the unconditional branch runs too."""
    with unet_calls(pipe) as calls:
        run(pipe, guidance_interval=interval, **options)
    return [len(call.x) == 4 for call in calls]


@pytest.mark.parametrize(
    ("text", "steps", "wanted"),
    [
        ("0.1-0.8", 10, range(1, 8)),
        ("0.15-0.79", 10, range(1, 7)),
        ("-0.5", 7, range(3)),
        ("0.5-", 7, range(3, 7)),
        ("-", 3, range(3)),
        (" 0 - 1 ", 3, range(3)),
        ("0.4-0.6", 2, range(1)),
    ],
)
def test_shares_of_the_steps_round_as_in_diffusers(text: str, steps: int, wanted: range, pipe: Pipeline) -> None:
    # skip_start_step = int(start * steps), skip_stop_step = int(stop * steps); diffusers/guiders
    active = guided_calls(pipe, text, sampler="euler", steps=steps)
    assert [step for step, on in enumerate(active) if on] == list(wanted)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_fast"])
def test_noise_levels_are_those_of_the_first_call(sampler: str, pipe: Pipeline) -> None:
    active, plan = guided_calls(pipe, "sigma=0.5-5", sampler=sampler, steps=10), pipe.plan(sampler, 10)
    for on, step in zip(active, plan.step, strict=True):
        a, s = plan.level[list(plan.step).index(step)]
        assert on == (0.5 < s / a <= 5)
    assert any(active)
    assert not all(active)


@pytest.mark.parametrize(
    "text", ["", "0.5", "0.8-0.1", "0.5-0.5", "1-2", "0-1.5", "sigma=5-1", ".-1", "a-b", "-0.1-0.5"]
)
def test_other_intervals_are_refused(pipe: Pipeline, text: str) -> None:
    with pytest.raises(ValueError, match="got `guidance_interval`"):
        pipe.txt2img("a", guidance_interval=text)


def test_the_unconditional_branch_stops(pipe: Pipeline) -> None:
    """Equal to a guidance function of scale 1 there, with half the rows."""
    options, active = {"sampler": "ddim", "steps": 5}, [False, True, True, False, False]
    assert guided_calls(pipe, "0.2-0.6", **options) == active
    steps: list[float] = []

    def combined(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        scale = 5.0 if active[len(steps)] else 1.0
        steps.append(scale)
        return uncond + scale * (cond - uncond)

    stopped, wanted = (
        run(pipe, guidance_interval="0.2-0.6", **options),
        run(pipe, guidance=combined, scale=None, **options),
    )
    torch.testing.assert_close(stopped, wanted, rtol=2e-5, atol=2e-5)


def test_scales_follow_the_paper(pipe: Pipeline) -> None:
    """Wang et al. 2024: total weight 7 * 11 for all but the powered; monotonic or not; clamped."""
    steps, weight = 11, 7.0
    progress = np.arange(steps) / 10
    wanted = {
        "linear": 2 * progress * weight,
        "falling": 2 * (1 - progress) * weight,
        "cosine": (np.cos(np.pi * (1 - progress)) + 1) * weight,
        "falling_cosine": (np.cos(np.pi * progress) + 1) * weight,
        "sine": np.sin(np.pi * progress) * np.pi / 2 * weight,
        "power_cosine": (1 - np.cos(np.pi * progress**4)) / 2 * weight,
        "power_cosine:power=2": (1 - np.cos(np.pi * progress**2)) / 2 * weight,
        "linear:least=3": np.maximum(2 * progress * weight, 3),
    }
    for name, weights in wanted.items():
        options = {"sampler": "ddim", "steps": steps, "scale": weight + 1}
        scales = []
        for outs, guided in guided_outputs(pipe, "a cat", guidance_schedule=name, **options):
            difference = outs[-1] - outs[0]  # scale 1 runs the branch of the prompt alone
            scales.append(
                float(((guided - outs[0]) * difference).sum() / (difference**2).sum()) if len(outs) == 2 else 1
            )
        np.testing.assert_allclose(scales, weights + 1, rtol=1e-4, atol=1e-3)
    for name in ("linear", "falling", "cosine", "falling_cosine"):
        assert math.isclose(sum(wanted[name]), weight * steps)


@pytest.mark.parametrize("text", ["", "steep", "linear:power=2", "power_cosine:power=0", "linear:least", "sine:most=2"])
def test_other_schedules_are_refused(pipe: Pipeline, text: str) -> None:
    with pytest.raises(ValueError, match="got `guidance_schedule`"):
        pipe.txt2img("a", guidance_schedule=text)


def test_apg_equals_diffusers_over_three_steps(pipe: Pipeline) -> None:
    """The goldens guide x0; here the network predicts eps at a level, from which x0 follows."""
    guide, weights = Projection(parallel=0.25, threshold=15.0, momentum=-0.5).begin(), torch.tensor([1.0, 7.5]).double()
    x, to_x0 = toy.normal(5, 2, 4, 8, 8).double(), torch.tensor([1.25, -0.75], dtype=torch.float64)
    row = device_rows(pipe.plan("euler", 1), torch.device("cpu"))[0]._replace(x0_of_out=to_x0)
    for k in range(3):
        x0s = (toy.normal(first + k, 2, 4, 8, 8).double() for first in (20, 10))
        outs = torch.stack([(x0 - 1.25 * x) / -0.75 for x0 in x0s])
        out = guide(Outputs(outs, weights[:, None, None, None, None], (False, True), x, row))
        np.testing.assert_allclose((1.25 * x - 0.75 * out).numpy(), GOLDENS[f"apg.{k}"], atol=1e-6)


def test_apg_with_the_whole_parallel_part_is_classifier_free(pipe: Pipeline) -> None:
    options = {"sampler": "dpmpp_2m", "steps": 4}
    plain = run(pipe, **options)
    for settings, same in (("parallel=1", True), ("parallel=0", False)):
        assert (toy.relative_error(run(pipe, apg=settings, **options), plain.numpy()) < 1e-4) == same
    # nothing is remembered from run to run
    first, second = (run(pipe, apg="parallel=0:momentum=0.5", **options) for _ in range(2))
    assert torch.equal(first, second)
