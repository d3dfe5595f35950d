"""Guidance that depends on the step, and APG, against the published formulas and diffusers."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

import ldm_lite
from ldm_lite.diffusion.guidance import Branches, Conditioning, classifier_free
from ldm_lite.diffusion.guidance_steps import Interval, scheduled, within
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.projected import Projection
from ldm_lite.generate import denoise
from ldm_lite.pipeline import Pipeline

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def plan(pipe: Pipeline, name: str = "euler", steps: int = 10) -> Plan:
    return make_plan(name, pipe.schedule, steps)


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
    active = Interval.read(text).steps(plan(pipe, steps=steps))
    assert [step for step, on in enumerate(active) if on] == list(wanted)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_fast"])
def test_noise_levels_are_those_of_the_first_call(sampler: str, pipe: Pipeline) -> None:
    made = plan(pipe, sampler)
    active = Interval.read("sigma=0.5-5").steps(made)
    for step, on in enumerate(active):
        a, s = made.level[list(made.step).index(step)]
        assert on == (0.5 < s / a <= 5)
    assert any(active)
    assert not all(active)


@pytest.mark.parametrize(
    "text", ["", "0.5", "0.8-0.1", "0.5-0.5", "1-2", "0-1.5", "sigma=5-1", ".-1", "a-b", "-0.1-0.5"]
)
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="got `guidance_interval`"):
        Interval.read(text)


class Counting(torch.nn.Module):
    """A UNet that counts the rows it computes."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.unet, self.rows = unet, []

    def forward(self, x: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        self.rows.append(len(x))
        return self.unet(x, *args, **more)


def two() -> Branches:
    cond, uncond = (Conditioning(toy.normal(seed, 2, 7, 64)) for seed in (2, 3))
    return classifier_free(cond, uncond, 5.0)


def test_the_unconditional_branch_stops(pipe: Pipeline) -> None:
    """Equal to a guidance function of scale 1 there, with half the rows."""
    noise, run, active = toy.normal(1, 2, 4, 8, 8), plan(pipe, "ddim", 5), (False, True, True, False, False)
    counted = Counting(pipe.unet)
    made = denoise(dataclasses.replace(pipe, unet=counted), noise, within(two(), active), run)
    assert counted.rows == [2, 4, 4, 2, 2]

    def combined(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        scale = 5.0 if active[len(steps)] else 1.0
        steps.append(scale)
        return uncond + scale * (cond - uncond)

    steps: list[float] = []
    cond, uncond = two().conditionings[::-1]
    wanted = denoise(pipe, noise, classifier_free(cond, uncond, combined), run)
    torch.testing.assert_close(made, wanted, rtol=2e-5, atol=2e-5)


def test_scales_follow_the_paper() -> None:
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
        made = [scheduled(name, 8.0, steps)(step) for step in range(steps)]
        np.testing.assert_allclose(made, weights + 1, atol=1e-12)
    for name in ("linear", "falling", "cosine", "falling_cosine"):
        assert math.isclose(sum(wanted[name]), weight * steps)


@pytest.mark.parametrize("text", ["", "steep", "linear:power=2", "power_cosine:power=0", "linear:least", "sine:most=2"])
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="got `guidance_schedule`"):
        scheduled(text, 8.0, 10)


def test_apg_equals_diffusers_over_three_steps() -> None:
    """The goldens guide x0; here the network predicts eps at a level, from which x0 follows."""
    guide = Projection(parallel=0.25, threshold=15.0, momentum=-0.5).begin()
    x, to_x0 = toy.normal(5, 2, 4, 8, 8).double(), torch.tensor([1.25, -0.75], dtype=torch.float64)
    for k in range(3):
        x0s = (toy.normal(first + k, 2, 4, 8, 8).double() for first in (20, 10))
        outs = torch.stack([(x0 - 1.25 * x) / -0.75 for x0 in x0s])
        out = guide(outs, torch.tensor(7.5, dtype=torch.float64), x, to_x0)
        np.testing.assert_allclose((1.25 * x - 0.75 * out).numpy(), GOLDENS[f"apg.{k}"], atol=1e-6)


def test_apg_with_the_whole_parallel_part_is_classifier_free(pipe: Pipeline) -> None:
    noise, run = toy.normal(1, 2, 4, 8, 8), plan(pipe, "dpmpp_2m", 4)
    plain = denoise(pipe, noise, two(), run)
    for settings, same in ((Projection(parallel=1.0), True), (Projection(), False)):
        made = denoise(pipe, noise, dataclasses.replace(two(), combine=settings), run)
        assert (toy.relative_error(made, plain.numpy()) < 1e-4) == same
    # nothing is remembered from run to run
    remembering = dataclasses.replace(two(), combine=Projection(momentum=0.5))
    assert torch.equal(denoise(pipe, noise, remembering, run), denoise(pipe, noise, remembering, run))
