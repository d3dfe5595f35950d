"""Noise schedules and spacings, against closed forms and published numbers."""

import logging
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from random_sd1 import normal
from references import SPACINGS

from ldm_lite.core.family import SD1
from ldm_lite.core.samplers import make_plan
from ldm_lite.core.schedule import (
    CLEAN,
    Schedule,
    ancestral,
    karras,
    levels_of,
    linspace,
    scaled_linear_betas,
)

SD = Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
V = Schedule(SD.alpha_bar, "v")


def zero_terminal_snr(schedule: Schedule) -> Schedule:
    """Lin et al. 2024, alg. 1."""
    root = np.sqrt(schedule.alpha_bar)
    return Schedule(((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2, schedule.prediction)


# ---- the schedule ---------------------------------------------------------------------------------------------------


def test_the_numbers_of_stable_diffusion() -> None:
    """As k-diffusion names them for Stable Diffusion 1.x, and the betas of its configuration."""
    assert SD.sigmas[[0, -1]] == pytest.approx([0.0292, 14.6146], abs=5e-5)
    assert SD.alpha_bar[[0, -1]] == pytest.approx([0.99915, 0.00466009], rel=1e-5)
    betas = scaled_linear_betas(0.00085, 0.012)
    assert betas[[0, 999]] == pytest.approx([0.00085, 0.012], rel=1e-12)
    assert np.diff(np.sqrt(betas)) == pytest.approx((0.012**0.5 - 0.00085**0.5) / 999, rel=1e-9)
    assert SD.alpha_bar[10] == pytest.approx(math.prod(1 - betas[:11]), rel=1e-12)
    assert (SD1.beta_start, SD1.beta_end, SD1.scale_factor, SD1.prediction) == (0.00085, 0.012, 0.18215, "eps")


def test_a_level_is_variance_preserving() -> None:
    for level in (SD.at(0), SD.at(999), SD.between(12.5), SD.at_sigma(3.0), CLEAN):
        assert level.a**2 + level.s**2 == pytest.approx(1, rel=1e-12)
        assert level.sigma == pytest.approx(level.s / level.a, rel=1e-12)
    assert SD.at(700).sigma == pytest.approx(SD.sigmas[700], rel=1e-12)


def test_sigma_and_fractional_timestep_are_inverse() -> None:
    for t in (0.0, 0.25, 500.0, 731.9, 999.0):
        assert SD.at_sigma(SD.between(t).sigma).t == pytest.approx(t, abs=1e-9)
    middle = SD.between(41.5).sigma
    assert middle == pytest.approx(math.sqrt(SD.sigmas[41] * SD.sigmas[42]), rel=1e-12)  # linear in log sigma


def test_a_sigma_outside_of_the_range_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert SD.at_sigma(14.6146).t == pytest.approx(999, abs=1e-3)
        assert not caplog.text
        assert [SD.at_sigma(float(SD.sigmas[i])).t for i in (0, -1)] == [0, 999]
        assert not caplog.records  # the ends are within
        assert SD.at_sigma(20.0).t == 999
        assert "sigma 20 is outside of the range that the network knows, 0.02917 to 14.61" in caplog.text
        assert SD.at_sigma(0.01).t == 0
    assert "sigma 0.01 is outside of the range" in caplog.text


@pytest.mark.parametrize(
    "alpha_bar", [[0.5, 0.6], [1.0, 0.5], [0.5, 0.5], [0.5, -0.1], [0.5, np.nan], [[0.5, 0.4], [0.3, 0.2]]]
)
def test_what_is_no_schedule_is_refused(alpha_bar: list[float]) -> None:
    with pytest.raises(ValueError, match="this is not a noise schedule: alpha_bar must fall"):
        Schedule(np.array(alpha_bar), "eps")


def test_noised_and_target_are_those_of_the_papers() -> None:
    x0, eps, t = normal(0, 3, 4, 5, 6), normal(1, 3, 4, 5, 6), torch.tensor([0, 500, 999])
    for i, step in enumerate(t.tolist()):
        a, s = math.sqrt(SD.alpha_bar[step]), math.sqrt(1 - SD.alpha_bar[step])
        torch.testing.assert_close(SD.noised(x0, eps, t)[i], a * x0[i] + s * eps[i])
        torch.testing.assert_close(V.target(x0, eps, t)[i], a * eps[i] - s * x0[i])
        torch.testing.assert_close(a * V.noised(x0, eps, t)[i] - s * V.target(x0, eps, t)[i], x0[i])
    assert torch.equal(SD.target(x0, eps, t), eps)
    assert V.noised(x0.half(), eps.half(), t).dtype == torch.float16


# ---- spacings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("name", SPACINGS)
def test_levels_fall_from_the_noisiest_to_the_end(name: str, steps: int) -> None:
    levels = levels_of(name, SD, steps)
    assert len(levels) == steps + 1
    assert all(after.sigma < now.sigma for now, after in pairwise(levels))
    assert levels[-1] == (SD.at(0) if name == "leading" and steps < 1000 else CLEAN)


def test_spacings_are_those_of_their_sources() -> None:
    assert [level.t for level in levels_of("leading", SD, 4)] == [751, 501, 251, 1, 0]
    assert [level.t for level in levels_of("trailing", SD, 4)] == [999, 749, 499, 249, 0]
    for levels in (levels_of("linspace", SD, 4), linspace(SD, 4)):  # the whole package has its own under the name
        assert [level.t for level in levels] == pytest.approx([999, 666, 333, 0, 0])
    # Karras et al. 2022, eq. 5, with rho 7
    low, high = SD.sigmas[0] ** (1 / 7), SD.sigmas[-1] ** (1 / 7)
    wanted = [(high + i / 3 * (low - high)) ** 7 for i in range(4)]
    for levels in (levels_of("karras", SD, 4), karras(SD, 4)):
        assert [level.sigma for level in levels] == pytest.approx([*wanted, 0], rel=1e-9)


def test_an_unknown_spacing_is_one_line() -> None:
    with pytest.raises(ValueError, match="unknown spacing 'cosine': expected one of leading, trailing"):
        levels_of("cosine", SD, 4)


def test_ancestral_steps_keep_the_variance() -> None:
    for now, after in ((10.0, 5.0), (0.5, 0.1)):
        down, up = ancestral(now, after)
        assert down**2 + up**2 == pytest.approx(after**2)
        assert up == pytest.approx(after * math.sqrt(now**2 - after**2) / now)
    assert ancestral(1.0, 0.0) == (0.0, 0.0)
    assert ancestral(2.0, 1.0, eta=0) == (1.0, 0.0)


# ---- zero terminal SNR ----------------------------------------------------------------------------------------------


def test_zero_terminal_snr_needs_v_prediction() -> None:
    for sampler in ("ddim", "euler", "dpmpp_2m"):
        plan = make_plan(sampler, zero_terminal_snr(V), 5, spacing="trailing")
        assert np.isfinite(plan.mix).all()
        with pytest.raises(ValueError, match="undefined at zero terminal SNR"):
            make_plan(sampler, zero_terminal_snr(SD), 5, spacing="trailing")
    with pytest.raises(ValueError, match="use a model with v prediction"):
        make_plan("plms", zero_terminal_snr(V), 5, spacing="trailing")


@pytest.mark.parametrize("prediction", ["epsilon", "V", "v_prediction", "x0"])
def test_an_unknown_prediction_is_refused(prediction: Any) -> None:
    with pytest.raises(ValueError, match=f"got prediction '{prediction}', expected eps or v"):
        Schedule(scaled_linear_betas(0.9, 0.1, 3), prediction)


def test_what_a_row_keeps_is_eps_or_x0() -> None:
    schedule = Schedule([0.9, 0.5, 0.1], "v")  # type: ignore[arg-type]  # a list is taken too
    for keep in ("v", "epsilon"):
        with pytest.raises(ValueError, match=f"got h='{keep}', expected eps or x0"):
            schedule.coefficients(keep, schedule.at(1))
