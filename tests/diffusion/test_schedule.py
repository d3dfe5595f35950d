"""The noise schedule against values of arbitrary precision; the spacings against the original scripts and others."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from ldm_lite import Pipeline
from ldm_lite.diffusion.flow import FlowSchedule
from ldm_lite.diffusion.schedule import SPACINGS, AnyPrediction, NoiseSchedule, scaled_linear_betas, spaced_levels

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "samplers.npz")
COUNTS = range(1, 1001)
# By 40-digit arithmetic: alpha_bar at 0, 500 and 999, and the least and greatest sigma.
REFERENCE = {
    (0.00085, 0.012): (0.99915, 0.27633268382297, 4.6600985130772e-3, 0.02916715815172, 14.614641229334),
    (0.0015, 0.0195): (0.9985, 0.11492200085532, 1.4230397519202e-4, 0.038758913556369, 83.822494473029),
    (0.0015, 0.0155): (0.9985, 0.15007005094222, 6.686651737398e-4, 0.038758913556369, 38.658980827873),
    (0.0015, 0.0205): (0.9985, 0.1076767539006, 9.6910866811475e-5, 0.038758913556369, 101.57637642409),
    (0.0015, 0.015): (0.9985, 0.15529055629043, 8.1251847112864e-4, 0.038758913556369, 35.067666752591),
    (0.0001, 0.02): (0.9999, 0.33127457951726, 7.3341245958081e-4, 0.010000500037503, 36.91191195165),
}


@pytest.mark.parametrize("betas", REFERENCE)
def test_alpha_bar_and_sigmas(betas: tuple[float, float]) -> None:
    schedule = NoiseSchedule.from_betas(scaled_linear_betas(*betas), "eps")
    constants = [*schedule.alpha_bar[[0, 500, 999]], schedule.sigmas[0], schedule.sigmas[-1]]
    assert constants == pytest.approx(REFERENCE[betas], rel=1e-11)
    assert schedule.alpha_bar.shape == (1000,)
    assert schedule.alpha_bar.dtype == np.float64
    assert (np.diff(schedule.sigmas) > 0).all()


@pytest.mark.parametrize("t", [0.0, 0.5, 333.3, 998.75, 999.0])
def test_at_sigma_is_the_inverse_of_between(sd: Pipeline, t: float) -> None:
    level = sd.schedule.between(t)
    assert sd.schedule.at_sigma(level.sigma) == pytest.approx(level, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("betas", REFERENCE)
def test_zero_terminal_snr(betas: tuple[float, float]) -> None:
    """sqrt(alpha_bar) is the old one, linearly mapped so that it keeps its start and ends at 0.  Lin et al. 2024."""
    plain = NoiseSchedule.from_betas(scaled_linear_betas(*betas), "v")
    schedule = plain.zero_terminal_snr()
    before, after = np.sqrt(plain.alpha_bar), np.sqrt(schedule.alpha_bar)
    assert after[-1] == 0
    assert after[0] == pytest.approx(before[0], rel=1e-15)
    assert after == pytest.approx(before[0] * (before - before[-1]) / (before[0] - before[-1]), rel=1e-12)
    assert (schedule.at(999).a, schedule.at(999).s) == (0, 1)
    assert schedule.sigmas[-1] == 4096
    assert (np.diff(schedule.sigmas) > 0).all()
    assert schedule.prediction == "v"
    with pytest.raises(ValueError, match="eps prediction is undefined at zero terminal SNR"):
        NoiseSchedule(plain.alpha_bar, "eps").zero_terminal_snr()


# ---- spacings -------------------------------------------------------------------------------------------------------


def formula(steps: int) -> list[int]:
    """The original scripts' timesteps, ascending."""
    return [t + 1 for t in range(0, 1000, 1000 // steps)]


def test_leading_gives_every_count_and_where_it_divides_1000_the_originals_timesteps(sd: Pipeline) -> None:
    for steps in COUNTS:
        *levels, end = spaced_levels("leading", sd.schedule, steps)
        ts = [level.t for level in levels]
        assert len(ts) == steps
        assert all(before > after for before, after in pairwise(ts))
        assert all(0 <= t < 1000 and t == int(t) for t in ts)
        assert end.sigma < levels[-1].sigma
        if steps < 1000:
            assert end == sd.schedule.at(0)
        if 1000 % steps == 0 and steps < 1000:
            assert ts == formula(steps)[::-1]
    assert [level.t for level in spaced_levels("leading", sd.schedule, 1000)] == [*range(999, -1, -1), 0]
    assert spaced_levels("leading", sd.schedule, 1000)[-1] == (0, 1, 0)


def test_original_is_the_formula_or_fails_where_it_leaves_the_table(sd: Pipeline) -> None:
    failures = 0
    for steps in COUNTS:
        ts = formula(steps)
        if ts[-1] >= 1000:
            failures += 1
            with pytest.raises(ValueError, match=f"fail with {steps} steps"):
                spaced_levels("original", sd.schedule, steps)
            continue
        levels = spaced_levels("original", sd.schedule, steps)
        assert [level.t for level in levels] == [*ts[::-1], 0]
        assert levels[-1] == sd.schedule.at(0)
    # The numbers that docs/samplers.md states.
    assert failures == 599
    assert {30: 31, 60: 63}.items() <= {steps: len(formula(steps)) for steps in COUNTS}.items()
    assert sum(len(formula(steps)) != steps for steps in COUNTS) == 984


@pytest.mark.parametrize(("spacing", "steps"), [(name, n) for name, counts in toy.SPACINGS.items() for n in counts])
def test_levels_are_those_of_others(sd: Pipeline, spacing: str, steps: int) -> None:
    """Sigmas as in k-diffusion, trailing timesteps as in diffusers, and timesteps of beta by scipy's quantiles."""
    theirs = GOLDEN[f"spacing.{spacing}.{steps}"]
    levels = spaced_levels(spacing, sd.schedule, steps)
    if spacing == "trailing":
        assert [level.t for level in levels[:-1]] == theirs.tolist()
    elif spacing == "beta":
        assert [level.t for level in levels[:-1]] == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    else:
        assert [level.sigma for level in levels] == pytest.approx(theirs, rel=1e-10)
    assert levels[-1] == (0, 1, 0)


def test_sgm_uniform_is_linspace_of_one_more_without_the_least(sd: Pipeline) -> None:
    for steps in (1, 7, 30):
        wanted = spaced_levels("linspace", sd.schedule, steps + 1)
        assert spaced_levels("sgm_uniform", sd.schedule, steps) == [*wanted[:-2], (0, 1, 0)]
        # generative-models: np.linspace(num - 1, 0, steps, endpoint=False), cut to integers
        ts = [int(level.t + 1e-9) for level in spaced_levels("sgm_uniform", sd.schedule, steps)[:-1]]
        assert ts == np.linspace(999, 0, steps, endpoint=False).astype(int).tolist()


@pytest.mark.slow
def test_trailing_starts_at_999_for_every_count(sd: Pipeline) -> None:
    for steps in COUNTS:
        ts = [level.t for level in spaced_levels("trailing", sd.schedule, steps)[:-1]]
        assert len(ts) == steps
        assert ts[0] == 999
        assert all(before > after >= 0 for before, after in pairwise(ts))


def test_lcm_takes_from_the_50_timesteps_of_its_training(sd: Pipeline) -> None:
    trained = set(range(19, 1000, 20))
    for steps in COUNTS[:50]:
        ts = [level.t for level in spaced_levels("lcm", sd.schedule, steps)[:-1]]
        assert len(set(ts)) == steps
        assert ts[0] == 999
        assert set(ts) <= trained
    assert [level.t for level in spaced_levels("lcm", sd.schedule, 4)] == [999, 759, 499, 259, 0]
    assert [level.t for level in spaced_levels("lcm", sd.schedule, 8)] == [999, 879, 759, 639, 499, 379, 259, 139, 0]
    assert spaced_levels("lcm", sd.schedule, 51) == spaced_levels("trailing", sd.schedule, 51)


# Spacings that may make another number of levels, and those of flows.
OTHER_COUNTS = r"original|webui_ddim|webui_unipc|ddim_uniform|(fast|smart|super)\d+|flow|flow_by_steps|flow_sd3"


@pytest.mark.parametrize("spacing", [name for name in SPACINGS if not re.fullmatch(OTHER_COUNTS, name)])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50, 999, 1000])
def test_levels_descend(sd: Pipeline, spacing: str, steps: int) -> None:
    levels = spaced_levels(spacing, sd.schedule, steps)
    assert len(levels) == steps + 1
    assert all(before.sigma > after.sigma for before, after in pairwise(levels))
    assert all(-1e-9 <= level.t <= 999 + 1e-9 for level in levels)


@pytest.mark.parametrize("prediction", ["eps", "v", "x0", "flow", "reverse_flow"])
def test_the_target_of_training_gives_x0_and_eps_back(sd: Pipeline, prediction: AnyPrediction) -> None:
    """Schedule.coefficients undoes target, for every prediction, at the levels that `noised` adds noise of."""
    flow = "flow" in prediction
    schedule = FlowSchedule.of(3.0, prediction=prediction) if flow else replace(sd.schedule, prediction=prediction)
    x0, eps = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0, 500, 999])
    x, out = schedule.noised(x0, eps, t), schedule.target(x0, eps, t)
    for i, level in enumerate(map(schedule.at, t.tolist())):
        for keep, wanted in (("x0", x0), ("eps", eps)):
            p, q = schedule.coefficients(keep, level)
            torch.testing.assert_close(p * x[i] + q * out[i], wanted[i])
