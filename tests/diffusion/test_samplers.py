"""Plans, run in float64: against trajectories of the originals, k-diffusion and diffusers, and closed forms."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toy
from plan_runner import NUM_REGISTERS, Array, Model, run, toy_model

from ldm_lite import Pipeline
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SPACINGS, spaced_levels
from ldm_lite.diffusion.webui import OFFERED

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "samplers.npz")
DETERMINISTIC = {  # and the order that it converges with, as measured
    "ddim": 1.0,
    "euler": 1.0,
    "heun": 2.0,
    "dpm2": 2.0,
    "plms": 2.0,
    "dpmpp_2m": 2.0,
    "unipc": 3.0,
    "deis": 3.0,
    "lms": 3.7,
}
STOCHASTIC = {  # and the order that its variance converges with
    "ddpm": 1,
    "ddim": 1,
    "euler_a": 1,
    "dpm2_a": 2,
    "dpmpp_2s_a": 2,
    "dpmpp_sde": 2,
    "dpmpp_2m_sde": 2,
    "dpmpp_2m_sde_heun": 2,
    "dpmpp_3m_sde": 2,
}
# Spacings that are not of any number of steps: for flows; of A1111's number, and not all strictly descending; sections.
SPECIAL = ("flow", "flow_by_steps", "flow_sd3", "webui_ddim", "webui_unipc", "ddim_uniform")
SPECIAL += tuple(name for name in SPACINGS if re.fullmatch(r"(fast|smart|super)\d+", name))
ANY_COUNT = [name for name in SPACINGS if name not in SPECIAL]
OWN_ENDS = ("restart", "dpm_fast", "dpm_adaptive", "tcd")  # and sometimes levels of their own
OWN_STEPS = ("restart", "dpm_fast", "dpm_adaptive")
TWO_CALLS = ["heun", "dpm2", "dpm2_a", "dpmpp_2s_a", "dpmpp_sde"]


def own_spacing(sampler: str) -> str:
    return str(inspect.signature(SAMPLERS[sampler]).parameters["spacing"].default)


def has(sampler: str, option: str) -> bool:
    return option in inspect.signature(SAMPLERS[sampler]).parameters


# ---- goldens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy.RUNS)
def test_trajectories_are_those_of_the_originals(name: str, predicting: Callable[..., Pipeline]) -> None:
    case = toy.RUNS[name]
    pipe = predicting(case.prediction, **{"zero_snr": True} if case.zero_snr else {})
    plan = pipe.plan(case.sampler, case.steps, eta=case.eta, churn=case.churn, spacing=case.spacing)
    noises = iter(toy.noises(40))
    ours = run(plan, toy_model(case.scale), next(noises) * plan.initial, noises)
    if f"{name}.x" in GOLDEN:
        theirs = GOLDEN[f"{name}.x"]
        ours = ours if case.clean else ours[:-1]
        if f"{name}.t" in GOLDEN:
            assert plan.t[: len(ours) - 1] == pytest.approx(GOLDEN[f"{name}.t"], rel=1e-10, abs=1e-10)
    else:
        sigmas = GOLDEN[f"{name}.sigma"]
        sees = np.append(np.diff(plan.step, prepend=-1) > 0, True)  # the first call of every step, and the end
        a, s = np.concatenate([plan.level, [[plan.end.a, plan.end.s]]])[sees].T
        assert s / a == pytest.approx(sigmas, rel=1e-10)
        theirs = GOLDEN[f"{name}.y"] / np.sqrt(1 + sigmas[:, None, None, None, None] ** 2)
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-10


def test_every_sampler_has_a_golden() -> None:
    offered = {sampler.key for sampler in OFFERED.values()} - {"ddim_cfgpp"}  # in test_webui.py, as CFG++ and TCD
    assert {case.sampler for case in toy.RUNS.values()} | offered | {"ddim_cfgpp", "tcd", "dpmpp_2m_sd3"} == set(
        SAMPLERS
    )


def test_the_goldens_tell_samplers_apart() -> None:
    ends = [GOLDEN[key][-1] for key in GOLDEN.files if key.endswith((".x", ".y"))]
    assert min(toy.relative_error(a, b) for i, a in enumerate(ends) for b in ends[:i]) > 1e-2


# ---- closed forms ---------------------------------------------------------------------------------------------------

MEAN, DEVIATION = 0.7, 0.5  # of the Gaussian data, for which the best denoiser is linear in x


def gaussian_eps(level: Any, deviation: float) -> tuple[float, float]:
    """(k, b): the noise to expect in x at a level is k x + b."""
    k = level.s / (level.a**2 * deviation**2 + level.s**2)
    return k, -k * level.a * MEAN


def order_errors(sd: Pipeline, sampler: str, counts: list[int], without: float = 0.0) -> list[float]:
    """Errors against the exact solution of the ODE at the last level before clean (where the step is first order).

    A share of the steps, the first ones, may be left out.
    """
    errors = []
    for steps in counts:
        skip = round(without * (steps - 1))
        levels = spaced_levels("karras", sd.schedule, steps)[skip:]
        plan = sd.plan(sampler, steps, spacing="karras", last=steps - skip)

        def model(x: Array, t: float) -> Array:
            k, b = gaussian_eps(sd.schedule.between(t), DEVIATION)
            return k * x + b

        start, end = levels[0], levels[-2]
        x = np.array(0.4 * start.a + 1.3 * start.s)
        ratio = np.hypot(end.a * DEVIATION, end.s) / np.hypot(start.a * DEVIATION, start.s)
        exact = end.a * MEAN + (x - start.a * MEAN) * ratio
        errors.append(float(abs(run(plan, model, x, iter(()))[-2] - exact)))
    return errors


@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_order_of_convergence(sd: Pipeline, sampler: str) -> None:
    """Halving the step divides the error by 2^order."""
    errors = order_errors(sd, sampler, [26, 51, 101, 201])
    measured = [np.log2(before / after) for before, after in pairwise(errors)]
    assert measured == pytest.approx([DETERMINISTIC[sampler]] * 3, abs=0.25)
    assert errors[-1] < (1e-2 if DETERMINISTIC[sampler] == 1 else 1e-4)


def moments(plan: Plan, start: Any, deviation: float, steps: int) -> tuple[float, float]:
    """Mean and variance after so many steps, exactly: every row is linear in the registers and the noise."""
    mean, covariance = np.zeros(NUM_REGISTERS), np.zeros((NUM_REGISTERS, NUM_REGISTERS))
    mean[0], covariance[0, 0] = start.a * MEAN, start.a**2 * deviation**2 + start.s**2
    for level, (p, q), mix, step in zip(plan.level, plan.h_of_out, plan.mix, plan.step, strict=True):
        if step >= steps:
            break
        k, b = gaussian_eps(SimpleNamespace(a=level[0], s=level[1]), deviation)
        inputs = np.eye(NUM_REGISTERS + 2, NUM_REGISTERS)  # registers -> [registers, H, noise]
        inputs[NUM_REGISTERS, 0] = p + q * k
        row = mix @ inputs
        mean = row @ mean + mix[:, -2] * q * b
        covariance = row @ covariance @ row.T + np.outer(mix[:, -1], mix[:, -1])
    return float(mean[0]), float(covariance[0, 0])


def variance_errors(
    sd: Pipeline, sampler: str, spacing: str, counts: list[int], **options: float | None
) -> list[float]:
    """Relative errors of the variance; the mean is exact.

    The jump from the least sigma to clean does not become smaller with the step, so that it is left out.
    """
    errors = []
    for steps in counts:
        levels = spaced_levels(spacing, sd.schedule, steps)
        kept = steps - (levels[-1].s == 0)
        end = levels[kept]
        plan = sd.plan(sampler, steps, spacing=spacing, **options)
        mean, variance = moments(plan, levels[0], DEVIATION, kept)
        assert mean == pytest.approx(end.a * MEAN, abs=1e-9)
        errors.append(abs(variance / (end.a**2 * DEVIATION**2 + end.s**2) - 1))
    return errors


@pytest.mark.parametrize(
    ("sampler", "eta"), [(name, eta) for name in STOCHASTIC for eta in (None, 0.5) if eta is None or has(name, "eta")]
)
def test_stochastic_samplers_make_the_mean_and_the_variance_of_the_data(
    sd: Pipeline, sampler: str, eta: float | None
) -> None:
    """In the limit of many steps, with the sampler's order."""
    order = STOCHASTIC[sampler]
    options = {"eta": 1.0 if sampler == "ddim" else None} if eta is None else {"eta": eta}
    errors = variance_errors(sd, sampler, "karras", [63, 125, 250], **options)
    assert [np.log2(before / after) for before, after in pairwise(errors)] == pytest.approx([order] * 2, abs=0.2)
    assert errors[-1] < (0.05 if order == 1 else 1e-3)
    coarse, fine = variance_errors(sd, sampler, own_spacing(sampler), [250, 500], **options)
    assert fine < 0.6 * coarse < 0.1


# ---- every count ----------------------------------------------------------------------------------------------------


def moments_of_one_image(plans: Sequence[Plan], starts: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Mean and variance (P,) at the end of P plans, if the data is the one value MEAN and the network knows it.

    starts are their first levels (a, s).
    """
    num, size, eye = max(len(plan.t) for plan in plans), NUM_REGISTERS, np.eye(NUM_REGISTERS, NUM_REGISTERS + 2)
    means, covariances = np.zeros((len(plans), size, 2)), np.zeros((len(plans), size, size))
    means[:, 0] = [(a * MEAN, s) for a, s in starts]  # the mean, and the share of the first noise
    mixes, biases = np.tile(eye, (num, len(plans), 1, 1)), np.zeros((num, len(plans), size))
    for i, plan in enumerate(plans):
        (a, s), (p, q), rows = plan.level.T, plan.h_of_out.T, len(plan.t)
        mixes[:rows, i] = plan.mix
        mixes[:rows, i, :, 0] += plan.mix[:, :, size] * (p + q / s)[:, None]  # eps is (x - a MEAN) / s
        biases[:rows, i] = plan.mix[:, :, size] * (-q * a * MEAN / s)[:, None]
    for mix, bias in zip(mixes, biases, strict=True):
        row, noise = mix[:, :, :size], mix[:, :, -1]
        means = row @ means
        means[:, :, 0] += bias
        covariances = row @ covariances @ row.transpose(0, 2, 1) + noise[:, :, None] * noise[:, None, :]
    return means[:, 0, 0], means[:, 0, 1] ** 2 + covariances[:, 0, 0]


# All counts up to 100, then every eleventh, which takes all remainders of 20 in turn, and some that divide 1000.
MANY = sorted({*range(1, 101), *range(101, 1000, 11), 125, 200, 250, 500, 999, 1000})


@pytest.mark.slow
@pytest.mark.parametrize("steps", MANY)
def test_every_sampler_makes_every_number_of_steps_in_every_spacing(sd: Pipeline, steps: int) -> None:
    """Exactly as many as asked for, and if the data is one image, the result is it, exactly.

    For such data every step from level to level is exact, in mean and in variance, but LCM's: its boundary condition
    lets some of x pass.  Above 50 steps every sampler and every spacing is taken, but of their pairs a fifth, above 100
    a twentieth, others for each count.
    """
    cases, plans, starts = [], [], []
    every = 20 if steps > 100 else 5 if steps > 50 else 1
    for i, spacing in enumerate(ANY_COUNT):
        try:
            levels = spaced_levels(spacing, sd.schedule, steps)
        except ValueError:
            assert spacing == "original"
            continue
        count = len(range(0, 1000, 1000 // steps)) if spacing == "original" else steps
        for k, sampler in enumerate(SAMPLERS):
            if (steps + i + k) % every:
                continue
            if sampler.startswith("dpm_") and spacing == "original":  # makes the number of calls that it is asked for
                continue
            plan = sd.plan(sampler, steps, spacing=lambda schedule, steps, levels=levels: levels)
            case = f"{sampler} {spacing}"
            assert plan.num_steps == count == len(levels) - 1, case
            assert plan.end == levels[-1] or sampler in OWN_ENDS or spacing == "kl_optimal", case
            assert (plan.step[0], plan.step[-1]) == (0, count - 1), case
            assert set(np.diff(plan.step)) <= {0, 1}, case
            clean = plan.end.s == 0
            calls = (
                count * 2 - clean if sampler in TWO_CALLS else count + (sampler == "plms" and (count > 1 or not clean))
            )
            assert len(plan.t) == calls or (sampler == "restart" and count <= len(plan.t) <= 2 * count), case
            for name in ("t", "level", "h_of_out", "x0_of_out", "mix"):
                assert np.isfinite(getattr(plan, name)).all(), f"{case}: {name}"
            assert (plan.t >= 0).all(), case
            assert (plan.t <= 999).all(), case
            assert not (clean and plan.adds_noise[-1]), case
            if sampler not in ("lcm", "lcm_webui"):
                cases.append(case)
                plans.append(plan)
                starts.append(plan.level[0])
    means, variances = moments_of_one_image(plans, starts)
    for case, plan, mean, variance in zip(cases, plans, means, variances, strict=True):
        assert mean == pytest.approx(plan.end.a * MEAN, abs=1e-9), case
        assert variance == pytest.approx(plan.end.s**2, rel=1e-8, abs=1e-11), case


def test_lcm_ends_close_to_a_single_image(sd: Pipeline) -> None:
    for steps in (1, 4, 8, 50):
        plan = sd.plan("lcm", steps)
        (mean,), (variance,) = moments_of_one_image([plan], [plan.level[0]])
        assert mean == pytest.approx(MEAN, abs=1e-5)
        assert variance < 1e-8


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "karras", "beta"])
@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_deterministic_samplers_keep_the_image_and_the_noise_if_both_are_constant(
    sd: Pipeline, sampler: str, spacing: str, steps: int
) -> None:
    """If the network always sees the same noise, x = a x0 + s eps holds after every step, with the same x0."""
    levels = spaced_levels(spacing, sd.schedule, steps)
    plan = sd.plan(sampler, steps, spacing=spacing)
    assert not plan.adds_noise.any()
    x0, eps = np.array([0.7, -1.1]), np.array([-0.4, 1.9])
    trajectory = run(plan, lambda x, t: eps, levels[0].a * x0 + levels[0].s * eps, iter(()))
    assert np.array(trajectory) == pytest.approx(np.array([level.a * x0 + level.s * eps for level in levels]), abs=1e-9)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_where_sampling_starts(sd: Pipeline, sampler: str) -> None:
    """k-diffusion's samplers take y = sigma noise, so x = s noise; others unit noise for x."""
    initial = sd.plan(sampler, 10).initial
    unit = sampler in ("ddim", "ddim_cfgpp", "ddpm", "plms", "lcm", "tcd", "unipc_bh1")
    assert initial == (1 if unit else pytest.approx(np.sqrt(1 - sd.schedule.alpha_bar[-1]), rel=1e-12))


def test_a_single_step_of_plms_to_timestep_0_sees_no_other_timestep(sd: Pipeline) -> None:
    assert sd.plan("plms", 1, spacing="leading").t.tolist() == [1, 1]
    assert sd.plan("plms", 2, spacing="leading").t.tolist() == [501, 1, 1]


# ---- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 10, 50])
@pytest.mark.parametrize("prediction", ["v", "x0"])
# The model below knows the levels of schedule.between alone; other samplers have others.
@pytest.mark.parametrize(
    "name", [*sorted(set(SAMPLERS) - {"unipc_bh1", "lcm_webui"}), "dpmpp_2m karras", "unipc_bh1 karras"]
)
def test_the_same_denoiser_gives_the_same_trajectory_whatever_it_predicts(
    predicting: Callable[..., Pipeline], name: str, prediction: str, steps: int
) -> None:
    eps_model, sd = toy_model(None), predicting("eps")

    def model(x: Array, t: float) -> Array:
        level = sd.schedule.between(t)
        eps = eps_model(x, t)
        x0 = (x - level.s * eps) / level.a
        return level.a * eps - level.s * x0 if prediction == "v" else x0

    def trajectory(pipe: Pipeline, used: Model) -> list[Array]:
        noises = iter(toy.noises(120))
        return run(pipe.plan(name, steps), used, next(noises), noises)

    wanted = trajectory(sd, eps_model)
    got = trajectory(predicting(prediction), model)
    assert max(toy.relative_error(a, b) for a, b in zip(got, wanted, strict=True)) < 1e-10


# ---- churn, zero terminal SNR ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm2"])
def test_churn_raises_each_level_with_fresh_noise(sd: Pipeline, sampler: str) -> None:
    levels = spaced_levels("karras", sd.schedule, 10)
    plain, churned = (sd.plan(sampler, 10, spacing="karras", churn=churn) for churn in (None, 2.0))
    first = np.diff(churned.step, prepend=-1) > 0
    a, s = churned.level[first].T
    assert s / a == pytest.approx([1.2 * level.sigma for level in levels[:-1]], rel=1e-12)
    assert churned.adds_noise.sum() == 9
    assert churned.initial == pytest.approx(s[0], rel=1e-12)
    (mean,), (variance,) = moments_of_one_image([churned], [(a[0], s[0])])
    assert (mean, variance) == pytest.approx((MEAN, 0), abs=1e-9)
    most = sd.plan(sampler, 10, spacing="karras", churn=10.0).level[0]
    assert most[1] / most[0] == pytest.approx(np.sqrt(2) * levels[0].sigma, rel=1e-12)  # at most
    assert np.array_equal(sd.plan(sampler, 10, spacing="karras", churn=0.0).mix, plain.mix)


@pytest.mark.slow
@pytest.mark.parametrize("prediction", ["v", "x0"])
def test_every_sampler_is_finite_at_zero_terminal_snr_or_says_that_it_is_undefined(
    predicting: Callable[..., Pipeline], prediction: str
) -> None:
    """Undefined is PLMS, which keeps eps in the scale of x, where the first level is exactly a = 0."""
    pipe = predicting(prediction, zero_snr=True)
    for spacing in ANY_COUNT:
        for steps in (
            (1, 2, 5, 20) if spacing != "leading" else (1, 2, 5, 20, 999)
        ):  # of 999, the first is the last level
            try:
                levels = spaced_levels(spacing, pipe.schedule, steps)
            except ValueError:
                assert spacing == "original"
                continue
            for sampler in SAMPLERS:
                case = f"{sampler} {spacing} {steps}"
                if sampler == "plms" and levels[0].a == 0:
                    with pytest.raises(ValueError, match="undefined at zero terminal SNR: use a model with v"):
                        pipe.plan(sampler, steps, spacing=spacing)
                    continue
                plan = pipe.plan(sampler, steps, spacing=spacing)
                for name in ("t", "h_of_out", "x0_of_out", "mix"):
                    assert np.isfinite(getattr(plan, name)).all(), f"{case}: {name}"
                assert abs(plan.mix).max() < 1e6, case


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_takes_the_image_out_of_pure_noise(predicting: Callable[..., Pipeline], eta: float) -> None:
    """With v prediction, which there is -x0, and for one image: exact after every step."""
    pipe = predicting("v", zero_snr=True)
    for steps in (1, 3, 20):
        levels = spaced_levels("trailing", pipe.schedule, steps)
        assert (levels[0].a, levels[0].s) == (0, 1)
        plan = pipe.plan("ddim", steps, spacing="trailing", eta=eta)
        level_at = {level.t: level for level in levels}

        def model(x: Array, t: float, level_at: dict[float, Any] = level_at) -> Array:
            _, a, s = level_at[t]
            return a * (x - a * MEAN) / s - s * MEAN

        noises = iter(toy.noises(30))
        trajectory = run(plan, model, next(noises), noises)
        assert trajectory[-1] == pytest.approx(np.full(toy.SHAPE, MEAN), abs=1e-12)


@pytest.mark.parametrize("name", SAMPLERS)
def test_eps_prediction_is_refused_at_zero_terminal_snr(sd: Pipeline, name: str) -> None:
    betas = sd.schedule.betas.copy()
    betas[-1] = 1.0
    pipe = replace(sd, schedule=type(sd.schedule).from_betas(betas, "eps"))
    with pytest.raises(ValueError, match="undefined at zero terminal SNR: use"):
        pipe.plan(name, 10, spacing="trailing")
    with pytest.raises(ValueError, match="undefined at zero terminal SNR: use"):
        sd.schedule.zero_terminal_snr()


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_one_step_of_plms_to_clean_is_ddim(predicting: Callable[..., Pipeline], prediction: str) -> None:
    plans = [predicting(prediction).plan(name, 1, spacing="trailing") for name in ("plms", "ddim")]
    x = toy.noises(1)[0]
    ends = [run(plan, toy_model(None), x, iter(()))[-1] for plan in plans]
    assert toy.relative_error(*ends) < 1e-12
    assert [len(plan.t) for plan in plans] == [1, 1]


# ---- a part of the steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spacing", [None, "karras"])
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in (*OWN_STEPS, "lcm_webui")])
def test_the_last_steps_begin_where_the_whole_would_be(sd: Pipeline, sampler: str, spacing: str | None) -> None:
    whole = sd.plan(sampler, 20, spacing=spacing)
    for last in (1, 2, 7, 20):
        part = sd.plan(sampler, 20, spacing=spacing, last=last)
        assert part.num_steps == last
        first = int(np.argmax(whole.step == 20 - last))
        assert part.t[0] == whole.t[first]
        assert np.array_equal(part.level[0], whole.level[first])
        assert part.end == whole.end
    for last in (0, 21):
        with pytest.raises(ValueError, match=f"got the last {last} of 20 steps, expected 1 to 20"):
            sd.plan(sampler, 20, last=last)


@pytest.mark.parametrize("sampler", ["ddim", "euler", "heun", "dpm2", "euler_a", "dpmpp_2s_a"])
def test_the_last_steps_of_samplers_without_memory_are_the_whole_s_rows(sd: Pipeline, sampler: str) -> None:
    whole, part = sd.plan(sampler, 12), sd.plan(sampler, 12, last=5)
    assert np.array_equal(part.mix, whole.mix[-len(part.t) :])
    assert np.array_equal(part.h_of_out, whole.h_of_out[-len(part.t) :])


@pytest.mark.parametrize(
    "sampler", ["plms", "lms", "deis", "dpmpp_2m", "unipc", "unipc_bh1", "dpmpp_2m_sde", "dpmpp_3m_sde"]
)
def test_multistep_samplers_begin_the_last_steps_without_a_history(sd: Pipeline, sampler: str) -> None:
    """No row may weight a prediction that was never made; and a table cut in the middle would do just that."""
    whole, part = sd.plan(sampler, 12), sd.plan(sampler, 12, last=5)
    for num_past, mix in enumerate(part.mix):
        assert not np.any(mix[0, 2 + num_past : NUM_REGISTERS])
    cut = whole.mix[int(np.argmax(whole.step == 7))]
    assert np.any(cut[0, 2:NUM_REGISTERS])


@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_a_part_converges(sd: Pipeline, sampler: str) -> None:
    """With its order up to 2: a multistep method's first steps are of lower order, and here they matter."""
    errors = order_errors(sd, sampler, [51, 101, 201], without=0.4)
    measured = [np.log2(before / after) for before, after in pairwise(errors)]
    assert min(measured) > min(DETERMINISTIC[sampler], 2.0) - 0.25
