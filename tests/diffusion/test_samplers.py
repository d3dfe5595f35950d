"""Plans, run in float64: against the originals' and k-diffusion's trajectories, and against closed forms."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from ldm_lite.diffusion.samplers import ALIASES, NUM_REGISTERS, SAMPLERS, Plan, label, make_plan, resolve
from ldm_lite.diffusion.schedule import SPACINGS, Array, Level, Prediction, Schedule, linear_betas, original

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "samplers.npz")
BETAS = linear_betas(0.00085, 0.012)
SD = Schedule.from_betas(BETAS, "eps")
COUNTS = [1, 2, 3, 4, 5, 7, 10, 30, 50, 101, 333, 501, 999, 1000]
DETERMINISTIC = ["ddim", "plms", "euler", "dpmpp_2m"]
STOCHASTIC = [("ddim", 1.0), ("ddim", 0.5), ("euler_a", None), ("euler_a", 0.5)]

Model = Callable[[Array, float], Array]  # (x, t) -> the raw output


def run(plan: Plan, model: Model, x: Array, noises: Iterator[Array]) -> list[Array]:
    """The latent at the start and after every step: each row is registers' = mix @ [registers, H, noise]."""
    registers = np.zeros((NUM_REGISTERS, *x.shape))
    registers[0] = x
    trajectory = [x]
    for i, (t, (p, q), mix) in enumerate(zip(plan.t, plan.to_prediction, plan.mix, strict=True)):
        prediction = p * registers[0] + q * model(registers[0], t)
        noise = next(noises) if plan.draws[i] else np.zeros_like(x)
        registers = np.einsum("rk,k...->r...", mix, np.stack([*registers, prediction, noise]))
        if i + 1 == len(plan.t) or plan.step[i + 1] != plan.step[i]:
            trajectory.append(registers[0])
    return trajectory


def levels_of(sampler: str, steps: int, spacing: str | None) -> list[Level]:
    return SPACINGS[spacing or {"ddim": "leading", "plms": "leading"}.get(sampler, "linspace")](SD, steps)


# ---- goldens --------------------------------------------------------------------------------------------------------


def toy_model(scale: float | None) -> Model:
    """toy.denoiser, guided if there is a scale."""
    uncond, cond = map(torch.from_numpy, toy.contexts())

    def model(x: Array, t: float) -> Array:
        ts = torch.full((len(x),), t, dtype=torch.float64)
        if scale is None:
            return toy.denoiser(torch.from_numpy(x), ts).numpy()
        before, after = (toy.denoiser(torch.from_numpy(x), ts, context).numpy() for context in (uncond, cond))
        return before + scale * (after - before)

    return model


@pytest.mark.parametrize("name", toy.RUNS)
def test_trajectories_are_those_of_the_originals(name: str) -> None:
    case = toy.RUNS[name]
    schedule = Schedule.from_betas(BETAS, case.prediction)  # type: ignore[arg-type]
    plan = make_plan(case.sampler, schedule, case.steps, eta=case.eta, spacing=case.spacing)
    noises = iter(toy.noises(40))
    ours = run(plan, toy_model(case.scale), next(noises) * plan.initial, noises)
    if f"{name}.x" in GOLDEN:
        theirs = GOLDEN[f"{name}.x"]
    else:
        sigmas = GOLDEN[f"{name}.sigma"]
        levels = SPACINGS[case.spacing](schedule, case.steps)
        assert [level.sigma for level in levels] == pytest.approx(sigmas, rel=1e-10)
        theirs = GOLDEN[f"{name}.y"] / np.sqrt(1 + sigmas[:, None, None, None, None] ** 2)
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-10


def test_the_goldens_tell_samplers_apart() -> None:
    ends = [GOLDEN[key][-1] for key in GOLDEN.files if key.endswith((".x", ".y"))]
    assert min(toy.relative_error(a, b) for i, a in enumerate(ends) for b in ends[:i]) > 1e-2


# ---- closed forms ---------------------------------------------------------------------------------------------------

MEAN, DEVIATION = 0.7, 0.5  # of the Gaussian data, for which the best denoiser is linear in x


def gaussian_eps(level: Level, deviation: float) -> tuple[float, float]:
    """(k, b): the noise to expect in x at a level is k x + b."""
    k = level.s / (level.a**2 * deviation**2 + level.s**2)
    return k, -k * level.a * MEAN


def order_errors(sampler: str, counts: list[int]) -> list[float]:
    """Errors against the exact solution of the ODE at the last level before clean (where the step is first order)."""
    errors = []
    for steps in counts:
        levels = levels_of(sampler, steps, "karras")
        plan = make_plan(sampler, SD, steps, spacing="karras")

        def model(x: Array, t: float) -> Array:
            k, b = gaussian_eps(SD.between(t), DEVIATION)
            return k * x + b

        start, end = levels[0], levels[-2]
        x = np.array(0.4 * start.a + 1.3 * start.s)
        ratio = np.hypot(end.a * DEVIATION, end.s) / np.hypot(start.a * DEVIATION, start.s)
        exact = end.a * MEAN + (x - start.a * MEAN) * ratio
        errors.append(float(abs(run(plan, model, x, iter(()))[-2] - exact)))
    return errors


@pytest.mark.parametrize(("sampler", "order"), [("ddim", 1), ("euler", 1), ("plms", 2), ("dpmpp_2m", 2)])
def test_order_of_convergence(sampler: str, order: int) -> None:
    """Halving the step divides the error by 2^order."""
    errors = order_errors(sampler, [26, 51, 101, 201])
    measured = [np.log2(before / after) for before, after in pairwise(errors)]
    assert measured == pytest.approx([order] * 3, abs=0.1)
    assert errors[-1] < (1e-2 if order == 1 else 1e-4)


def moments(plan: Plan, start: Level, deviation: float, rows: int | None = None) -> tuple[float, float]:
    """Mean and variance after all (or so many) rows, exactly: every row is linear in the registers and the noise."""
    mean, covariance = np.zeros(NUM_REGISTERS), np.zeros((NUM_REGISTERS, NUM_REGISTERS))
    mean[0], covariance[0, 0] = start.a * MEAN, start.a**2 * deviation**2 + start.s**2
    for t, (p, q), mix in zip(plan.t[:rows], plan.to_prediction[:rows], plan.mix[:rows], strict=True):
        k, b = gaussian_eps(SD.between(t), deviation)
        inputs = np.eye(NUM_REGISTERS + 2, NUM_REGISTERS)  # registers -> [registers, H, noise]
        inputs[NUM_REGISTERS, 0] = p + q * k
        row = mix @ inputs
        mean = row @ mean + mix[:, -2] * q * b
        covariance = row @ covariance @ row.T + np.outer(mix[:, -1], mix[:, -1])
    return float(mean[0]), float(covariance[0, 0])


@pytest.mark.parametrize(("sampler", "eta"), STOCHASTIC)
@pytest.mark.parametrize("spacing", [None, "karras"])
def test_stochastic_samplers_make_the_mean_and_the_variance_of_the_data(
    sampler: str, eta: float | None, spacing: str | None
) -> None:
    """In the limit of many steps: halving the step nearly halves the error.

    The jump from the least sigma to clean does not become smaller, so that it is left out.
    """
    errors = []
    for steps in (125, 250, 500, 1000):
        levels = levels_of(sampler, steps, spacing)
        kept = steps - (levels[-1].s == 0)
        end = levels[kept]
        plan = make_plan(sampler, SD, steps, eta=eta, spacing=spacing)
        mean, variance = moments(plan, levels[0], DEVIATION, rows=kept)
        assert mean == pytest.approx(end.a * MEAN, abs=1e-9)
        errors.append(abs(variance / (end.a**2 * DEVIATION**2 + end.s**2) - 1))
    assert all(after < 0.6 * before for before, after in pairwise(errors))
    assert errors[-1] < 0.02


@pytest.mark.parametrize("steps", COUNTS)
@pytest.mark.parametrize("spacing", [None, "karras"])
@pytest.mark.parametrize(("sampler", "eta"), STOCHASTIC)
def test_stochastic_samplers_end_at_the_last_level_exactly_for_a_single_image(
    sampler: str, eta: float | None, spacing: str | None, steps: int
) -> None:
    """If the data is one image, every step from level to level is exact, in mean and variance."""
    levels = levels_of(sampler, steps, spacing)
    plan = make_plan(sampler, SD, steps, eta=eta, spacing=spacing)
    mean, variance = moments(plan, levels[0], deviation=0.0)
    assert mean == pytest.approx(levels[-1].a * MEAN, abs=1e-9)
    assert variance == pytest.approx(levels[-1].s ** 2, rel=1e-9, abs=1e-12)
    assert plan.num_steps == len(levels) - 1 == steps
    assert plan.draws[:-1].all()
    assert plan.draws[-1] == (levels[-1].s > 0)


@pytest.mark.parametrize("steps", COUNTS)
@pytest.mark.parametrize("spacing", ["leading", "linspace", "karras"])
@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_deterministic_samplers_end_at_the_last_level_exactly_for_constant_noise(
    sampler: str, spacing: str, steps: int
) -> None:
    """If the network always sees the same noise, x = a x0 + s eps holds after every step, with the same x0."""
    levels = levels_of(sampler, steps, spacing)
    plan = make_plan(sampler, SD, steps, spacing=spacing)
    assert np.isfinite(plan.mix).all()
    assert not plan.draws.any()
    x0, eps = np.array([0.7, -1.1]), np.array([-0.4, 1.9])
    trajectory = run(plan, lambda x, t: eps, levels[0].a * x0 + levels[0].s * eps, iter(()))
    assert np.array(trajectory) == pytest.approx(np.array([level.a * x0 + level.s * eps for level in levels]), abs=1e-9)
    assert plan.num_steps == len(trajectory) - 1 == steps
    assert len(plan.t) == steps + (sampler == "plms")
    assert (np.diff(plan.step) >= 0).all()
    assert (plan.step[0], plan.step[-1]) == (0, steps - 1)


@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_where_sampling_starts(sampler: str) -> None:
    """DDIM and PLMS take unit noise for x; k-diffusion's samplers take y = sigma noise, so x = s noise."""
    initial = make_plan(sampler, SD, 10).initial
    assert initial == (1 if sampler in ("ddim", "plms") else pytest.approx(np.sqrt(1 - SD.alpha_bar[-1]), rel=1e-12))


def test_original_spacing_takes_the_originals_number_of_steps() -> None:
    for sampler in ("ddim", "plms"):
        assert make_plan(sampler, SD, 30, spacing="original").num_steps == 31
        assert make_plan(sampler, SD, 60, spacing="original").num_steps == 63
    with pytest.raises(ValueError, match="fail with 27 steps"):
        original(SD, 27)


# ---- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 10, 50])
@pytest.mark.parametrize("prediction", ["v", "x0"])
@pytest.mark.parametrize("name", [*SAMPLERS, "dpmpp_2m karras"])
def test_the_same_denoiser_gives_the_same_trajectory_whatever_it_predicts(
    name: str, prediction: Prediction, steps: int
) -> None:
    eps_model = toy_model(None)

    def model(x: Array, t: float) -> Array:
        level = SD.between(t)
        eps = eps_model(x, t)
        x0 = (x - level.s * eps) / level.a
        return level.a * eps - level.s * x0 if prediction == "v" else x0

    def trajectory(schedule: Schedule, used: Model) -> list[Array]:
        noises = iter(toy.noises(60))
        return run(make_plan(name, schedule, steps), used, next(noises), noises)

    wanted = trajectory(SD, eps_model)
    got = trajectory(Schedule.from_betas(BETAS, prediction), model)
    assert max(toy.relative_error(a, b) for a, b in zip(got, wanted, strict=True)) < 1e-10


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ddim", ("ddim", None)),
        ("DDIM", ("ddim", None)),
        ("plms", ("plms", None)),
        ("pndm", ("plms", None)),
        ("k_euler", ("euler", None)),
        ("Euler", ("euler", None)),
        ("Euler a", ("euler_a", None)),
        ("euler-ancestral", ("euler_a", None)),
        (" k_euler_a ", ("euler_a", None)),
        ("Euler a Karras", ("euler_a", "karras")),
        ("DPM++ 2M", ("dpmpp_2m", None)),
        ("DPM++ 2M Karras", ("dpmpp_2m", "karras")),
        ("dpm++ 2m karras", ("dpmpp_2m", "karras")),
        ("dpmpp_2m_karras", ("dpmpp_2m", "karras")),
    ],
)
def test_names(name: str, wanted: tuple[str, str | None]) -> None:
    assert resolve(name) == wanted


def test_every_alias_and_label_names_a_sampler() -> None:
    assert set(ALIASES.values()) <= set(SAMPLERS)
    assert not set(ALIASES) & set(SAMPLERS)
    for key in SAMPLERS:
        for suffix, spacing in (("", None), (" Karras", "karras")):
            assert resolve(label(key + suffix)) == (key, spacing)
    assert label("k_dpmpp_2m karras") == "DPM++ 2M Karras"


@pytest.mark.parametrize(("name", "near"), [("dpmpp_3m", "dpmpp_2m"), ("eulr", "euler"), ("DDIMM", "ddim")])
def test_an_unknown_name_lists_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown sampler '{name}': did you mean {near}") as error:
        make_plan(name, SD, 10)
    assert ", ".join(SAMPLERS) in str(error.value)


def test_a_name_like_nothing_lists_all() -> None:
    with pytest.raises(ValueError, match="did you mean ddim or plms or euler"):
        resolve("###")


def test_the_named_spacing_is_used_unless_another_is_given() -> None:
    karras = make_plan("DPM++ 2M Karras", SD, 10)
    assert np.array_equal(karras.t, make_plan("dpmpp_2m", SD, 10, spacing="karras").t)
    linspace = make_plan("DPM++ 2M Karras", SD, 10, spacing="linspace")
    assert np.array_equal(linspace.t, make_plan("dpmpp_2m", SD, 10).t)
    assert not np.array_equal(linspace.t, karras.t)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "got 0 steps, wanted 1 to 1000"),
        ({"steps": 1001}, "got 1001 steps, wanted 1 to 1000"),
        ({"spacing": "cubic"}, "unknown spacing 'cubic': wanted one of leading"),
        ({"name": "plms", "eta": 0.5}, "got eta 0.5, but plms adds no noise"),
    ],
)
def test_make_plan_says_what_it_wants(arguments: dict[str, object], message: str) -> None:
    given = {"name": "ddim", "steps": 10, **arguments}
    with pytest.raises(ValueError, match=message):
        make_plan(given.pop("name"), SD, given.pop("steps"), **given)  # type: ignore[arg-type]


def test_eta_0_is_allowed_everywhere() -> None:
    assert np.array_equal(make_plan("plms", SD, 10, eta=0.0).mix, make_plan("plms", SD, 10).mix)
    assert not make_plan("euler_a", SD, 10, eta=0.0).draws.any()
    assert np.allclose(make_plan("euler_a", SD, 10, eta=0.0).mix, make_plan("euler", SD, 10).mix)
