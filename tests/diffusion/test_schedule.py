"""The noise schedule against values of arbitrary precision, and the spacings against the original scripts' formula."""

import math
from itertools import pairwise

import numpy as np
import pytest

from ldm_lite.diffusion.schedule import CLEAN, SPACINGS, Schedule, leading, linear_betas, linspace, original

SD = Schedule.from_betas(linear_betas(0.00085, 0.012), "eps")
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
    schedule = Schedule.from_betas(linear_betas(*betas), "eps")
    found = [*schedule.alpha_bar[[0, 500, 999]], schedule.sigmas[0], schedule.sigmas[-1]]
    assert found == pytest.approx(REFERENCE[betas], rel=1e-11)
    assert schedule.alpha_bar.shape == (1000,)
    assert schedule.alpha_bar.dtype == np.float64
    assert (np.diff(schedule.sigmas) > 0).all()


def test_a_level_is_variance_preserving_and_knows_its_sigma() -> None:
    for t in (0, 1, 500, 999):
        level = SD.at(t)
        assert level.t == t
        assert level.a**2 == pytest.approx(SD.alpha_bar[t], rel=1e-14)
        assert level.a**2 + level.s**2 == pytest.approx(1, rel=1e-14)
        assert level.sigma == pytest.approx(SD.sigmas[t], rel=1e-12)
        assert SD.between(t) == pytest.approx(level, rel=1e-12)
    assert CLEAN == (0, 1, 0)
    assert CLEAN.sigma == 0


def test_between_timesteps_log_sigma_is_linear() -> None:
    low, high = np.log(SD.sigmas[700]), np.log(SD.sigmas[701])
    assert math.log(SD.between(700.3).sigma) == pytest.approx(0.7 * low + 0.3 * high, rel=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.5, 333.3, 998.75, 999.0])
def test_at_sigma_is_the_inverse_of_between(t: float) -> None:
    level = SD.between(t)
    assert SD.at_sigma(level.sigma) == pytest.approx(level, rel=1e-9, abs=1e-9)


# ---- spacings -------------------------------------------------------------------------------------------------------


def formula(steps: int) -> list[int]:
    """The original scripts' timesteps, ascending."""
    return [t + 1 for t in range(0, 1000, 1000 // steps)]


def test_leading_gives_every_count_and_where_it_divides_1000_the_originals_timesteps() -> None:
    for steps in COUNTS:
        *levels, end = leading(SD, steps)
        ts = [level.t for level in levels]
        assert len(ts) == steps
        assert all(before > after for before, after in pairwise(ts))
        assert all(0 <= t < 1000 and t == int(t) for t in ts)
        assert end.sigma < levels[-1].sigma
        if steps < 1000:
            assert end == SD.at(0)
        if 1000 % steps == 0 and steps < 1000:
            assert ts == formula(steps)[::-1]
    assert [level.t for level in leading(SD, 1000)] == [*range(999, -1, -1), 0]
    assert leading(SD, 1000)[-1] == CLEAN


def test_original_is_the_formula_or_fails_where_it_leaves_the_table() -> None:
    failures = 0
    for steps in COUNTS:
        ts = formula(steps)
        if ts[-1] >= 1000:
            failures += 1
            with pytest.raises(ValueError, match=f"fail with {steps} steps"):
                original(SD, steps)
            continue
        levels = original(SD, steps)
        assert [level.t for level in levels] == [*ts[::-1], 0]
        assert levels[-1] == SD.at(0)
    # The numbers that docs/samplers.md states.
    assert failures == 599
    assert {30: 31, 60: 63}.items() <= {steps: len(formula(steps)) for steps in COUNTS}.items()
    assert sum(len(formula(steps)) != steps for steps in COUNTS) == 984


def test_linspace_spans_all_timesteps_and_ends_clean() -> None:
    levels = linspace(SD, 5)
    assert [level.t for level in levels] == [999, 749.25, 499.5, 249.75, 0, 0]
    assert levels[-1] == CLEAN
    assert [level.t for level in linspace(SD, 1)] == [999, 0]


def test_karras_is_linear_in_the_seventh_root_of_sigma() -> None:
    *levels, end = SPACINGS["karras"](SD, 11)
    roots = np.array([level.sigma for level in levels]) ** (1 / 7)
    assert np.diff(roots) == pytest.approx(np.full(10, (roots[-1] - roots[0]) / 10), rel=1e-9)
    assert levels[0].sigma == pytest.approx(SD.sigmas[-1], rel=1e-12)
    assert levels[-1].sigma == pytest.approx(SD.sigmas[0], rel=1e-12)
    assert (levels[0].t, levels[-1].t) == pytest.approx((999, 0), abs=1e-9)
    assert end == CLEAN


@pytest.mark.parametrize("spacing", ["leading", "linspace", "karras"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50, 999, 1000])
def test_levels_descend(spacing: str, steps: int) -> None:
    levels = SPACINGS[spacing](SD, steps)
    assert len(levels) == steps + 1
    assert all(before.sigma > after.sigma for before, after in pairwise(levels))
    assert all(-1e-9 <= level.t <= 999 + 1e-9 for level in levels)
