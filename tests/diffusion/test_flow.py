"""Rectified flow: every sampler in float64, against diffusers' schedulers (goldens) and the originals' loops."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from plan_runner import Array, flowing, run
from steps import one_step

from ldm_lite import Pipeline
from ldm_lite.core.plan import device_rows
from ldm_lite.diffusion.flow import shifted
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import GENERAL, SPACINGS, spaced_levels

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "flow.npz")
REFUSED = {"plms", "restart", "dpm_fast", "dpm_adaptive", "lcm_webui", "tcd"}
DEFINED = sorted(set(SAMPLERS) - REFUSED)
STOCHASTIC = ("ddpm", "dpm2_a", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_2s_a", "dpmpp_3m_sde", "dpmpp_sde")
STOCHASTIC += ("euler_a", "lcm")
STORED = {"euler_karras": "euler"}


@pytest.fixture(scope="module")
def sd3(sd: Pipeline) -> Pipeline:
    """A pipeline with the schedule of Stable Diffusion 3."""
    return flowing(sd, 3.0, clock="1000 s", spacing="flow_sd3")


@pytest.fixture(scope="module")
def flux(sd: Pipeline) -> Pipeline:
    """A pipeline with the schedule of FLUX.1 dev."""
    return flowing(sd, by_size=(0.5, 1.15))


def velocity(x: Array, t: float) -> Array:
    """The network of the goldens, at 1000 s = t."""
    times = torch.full((len(x),), t, dtype=torch.float64)
    return toy.denoiser(torch.from_numpy(x), times).numpy()


def steps_of(plan: Plan) -> list[Array]:
    noises = iter(toy.noises(60))
    return run(plan, velocity, next(noises) * plan.initial, noises)


def sigmas_of(sigmas: Array) -> Callable[[Any, int], list[Any]]:
    """A spacing with these sigmas."""
    return lambda schedule, steps: [schedule.at_noise(float(s)) for s in sigmas]


# ---- diffusers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run_of", sorted({key.rsplit(".", 1)[0] for key in GOLDEN.files if not key.startswith("run.")} - {"made_with"})
)
def test_trajectories_are_those_of_diffusers(sd3: Pipeline, run_of: str) -> None:
    name, steps = run_of.split(".")
    sigmas, theirs = GOLDEN[f"{run_of}.sigmas"], GOLDEN[f"{run_of}.x"]
    if name == "heun":  # two calls a step but in the last, with a sigma for each
        sigmas = np.append(sigmas[0:1], np.append(sigmas[1:-1:2], 0)) if int(steps) > 1 else sigmas
    plan = sd3.plan(STORED.get(name, name), len(sigmas) - 1, spacing=sigmas_of(sigmas))
    ours = [x.flatten()[: theirs.shape[1]] for x in steps_of(plan)]
    if name == "heun":
        theirs = np.concatenate([theirs[:1], theirs[2:-1:2], theirs[-1:]])
    if name == "deis":  # lowers the order of its last two steps below 15
        ours, theirs = ours[: -2 if int(steps) < 15 else None], theirs[: -2 if int(steps) < 15 else None]
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert toy.relative_error(mine, wanted) < 1e-9


# ---- the originals' loops, written again ----------------------------------------------------------------------------


def bfl(x: Array, sigmas: Array) -> list[Array]:
    """black-forest-labs/flux, sampling.py, denoise: Euler's method; Z-Image's is the same, with two signs turned."""
    kept = [x]
    for now, after in pairwise(sigmas):
        kept.append(kept[-1] + (after - now) * velocity(kept[-1], 1000 * now))
    return kept


def sd3_dpmpp_2m(x: Array, sigmas: Array) -> list[Array]:
    """Stability-AI/sd3.5, sd3_impls.py, sample_dpmpp_2m, on x0 = x - sigma v."""
    kept, old = [x], x
    for i, (now, after) in enumerate(pairwise(sigmas)):
        x0 = kept[-1] - now * velocity(kept[-1], 1000 * now)
        with np.errstate(divide="ignore"):
            h = -np.log(after) + np.log(now)
        mixed = x0
        if i > 0 and after > 0:
            r = (-np.log(now) + np.log(sigmas[i - 1])) / h
            mixed = (1 + 1 / (2 * r)) * x0 - old / (2 * r)
        kept.append(after / now * kept[-1] - np.expm1(-h) * mixed)
        old = x0
    return kept


def comfy_ancestral(x: Array, sigmas: Array, middle: str | None, eta: float = 1.0) -> list[Array]:
    """ComfyUI, k_diffusion/sampling.py: sample_euler_ancestral_RF, dpm_2 ("s") and dpmpp_2s ("lambda") alike."""
    kept, noises = [x], iter(toy.noises(60)[1:])
    for now, after in pairwise(sigmas):
        x, down = kept[-1], after * (1 + (after / now - 1) * eta)
        v = velocity(x, 1000 * now)
        if down > 0 and middle is not None:
            mid = np.sqrt(now * down)
            if middle == "lambda":
                ratio = np.sqrt(now * down / ((1 - now) * (1 - down))) if now < 1 else 9999
                mid = ratio / (1 + ratio)
            v = velocity(x + (mid - now) * v, 1000 * mid) if middle == "s" else v
            if middle == "lambda":
                u = x + (mid - now) * v
                x0 = u - mid * velocity(u, 1000 * mid)
                v = (x - x0) / now
        x = x + (down - now) * v
        if after > 0:
            grown = (1 - after) / (1 - down)
            x = grown * x + np.sqrt(after**2 - (grown * down) ** 2) * next(noises)
        kept.append(x)
    return kept


ORIGINALS: dict[str, Callable[[Array, Array], list[Array]]] = {
    "euler": bfl,
    "ddim": bfl,
    "dpmpp_2m_sd3": sd3_dpmpp_2m,
    "euler_a": lambda x, sigmas: comfy_ancestral(x, sigmas, None),
    "dpm2_a": lambda x, sigmas: comfy_ancestral(x, sigmas, "s"),
    "dpmpp_2s_a": lambda x, sigmas: comfy_ancestral(x, sigmas, "lambda"),
}


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("steps", [1, 2, 4, 28])
@pytest.mark.parametrize("family", ["sd3", "schnell"])
def test_trajectories_are_those_of_the_originals(sd3: Pipeline, name: str, steps: int, family: str) -> None:
    pipe = sd3 if family == "sd3" else flowing(sd3, clock="1000 s")
    plan = pipe.plan(name, steps)
    sigmas = np.array([level.s for level in spaced_levels(pipe.schedule.spacing, pipe.schedule, steps)])
    theirs = ORIGINALS[name](toy.noises(1)[0], sigmas)
    for mine, wanted in zip(steps_of(plan), theirs, strict=True):
        assert toy.relative_error(mine, wanted) < 1e-12


def sd3_sigmas(steps: int, shift: float) -> Array:
    """Stability-AI/sd3.5, sd3_infer.py, get_sigmas: shifted from the least sigma, which is shifted already."""

    def sigma(t: Array) -> Array:
        return shift * t / 1000 / (1 + (shift - 1) * t / 1000)

    least = 1000 * float(sigma(np.array(1.0)))
    return np.append(sigma(np.linspace(1000, least, steps)), 0.0)


def flux_sigmas(steps: int, tokens: int, schnell: bool) -> Array:
    """black-forest-labs/flux, sampling.py, get_schedule."""
    t = np.linspace(1, 0, steps + 1)
    mu = 0.5 + (1.15 - 0.5) / (4096 - 256) * (tokens - 256)
    with np.errstate(divide="ignore"):
        return t if schnell else np.exp(mu) / (np.exp(mu) + (1 / t - 1))


@pytest.mark.parametrize("steps", [1, 2, 4, 20, 28, 50, 999, 1000])
def test_schedules_are_those_of_the_originals(sd3: Pipeline, flux: Pipeline, steps: int) -> None:
    def levels(name: str, schedule: Any) -> list[float]:
        return [level.s for level in spaced_levels(name, schedule, steps)]

    assert levels("flow_sd3", sd3.schedule) == pytest.approx(sd3_sigmas(steps, 3.0), abs=1e-14)
    assert levels("flow_sd3:shift=1.5", sd3.schedule) == pytest.approx(sd3_sigmas(steps, 1.5), abs=1e-14)
    for tokens in (256, 1024, 4096, 9216):
        assert levels("flow", flux.schedule.sized(tokens)) == pytest.approx(
            flux_sigmas(steps, tokens, False), abs=1e-14
        )
    assert levels("flow", flowing(sd3).schedule) == pytest.approx(flux_sigmas(steps, 256, True), abs=1e-14)


@pytest.mark.parametrize(("clock", "wanted"), [("s", [1, 0.5]), ("1000 s", [1000, 500]), ("1 - s", [0, 0.5])])
def test_the_network_is_given_the_time_of_its_original(sd: Pipeline, clock: str, wanted: list[float]) -> None:
    assert flowing(sd, clock=clock).plan("euler", 2).t == pytest.approx(wanted)


def test_a_reversed_velocity_makes_the_same_images(sd: Pipeline) -> None:
    """Z-Image predicts x0 - eps."""
    plan = flowing(sd, 3.0, clock="1000 s", prediction="reverse_flow").plan("dpmpp_2m", 5)
    noise = toy.noises(1)[0]
    theirs = run(plan, lambda x, t: -velocity(x, t), noise, iter(()))
    ours = run(flowing(sd, 3.0, clock="1000 s").plan("dpmpp_2m", 5), velocity, noise, iter(()))
    assert toy.relative_error(ours[-1], theirs[-1]) < 1e-14


# ---- closed forms ---------------------------------------------------------------------------------------------------

MEAN, DEVIATION = 0.7, 0.5


def exact(s: float) -> tuple[float, float]:
    """Mean and deviation of x at s, for Gaussian data."""
    return (1 - s) * MEAN, float(np.hypot((1 - s) * DEVIATION, s))


def gaussian_velocity(x: Array, t: float) -> Array:
    """The best prediction of eps - x0 for Gaussian data, at s = t."""
    mean, deviation = exact(t)
    centred = (x - mean) / deviation**2
    return t * centred - (MEAN + (1 - t) * DEVIATION**2 * centred)


@pytest.mark.parametrize("name", [name for name in DEFINED if name not in STOCHASTIC])
def test_all_samplers_solve_the_same_equation(sd: Pipeline, name: str) -> None:
    """Of Gaussian data, the flow's map from noise to images is known."""
    plan = flowing(sd, 3.0).plan(name, 100)
    assert not plan.adds_noise.any()
    x = np.array([-1.5, 0.3, 1.1])
    end = run(plan, gaussian_velocity, x, iter(()))[-1]
    if name != "ddim_cfgpp":
        assert np.abs(end - (MEAN + DEVIATION * x)).max() < (0.06 if name in ("ddim", "euler", "deis") else 0.02)


# ---- every count, every spacing, float32 ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEFINED)
def test_every_step_count(sd3: Pipeline, flux: Pipeline, name: str) -> None:
    """All coefficients are finite, the levels fall to 0, and float32 suffices: rows add up what is of order 1."""
    sized = replace(flux, schedule=flux.schedule.sized(1024))
    for pipe in (sd3, sized, flowing(sd3, 12.0)):
        for steps in (1, 2, 3, 7, 28):
            check_plan(pipe.plan(name, steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFINED)
def test_step_counts_up_to_1000(sd3: Pipeline, name: str) -> None:
    for steps in (333, 999, 1000):
        check_plan(sd3.plan(name, steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("spacing", ["flow", "flow_sd3"])
def test_every_step_count_has_its_levels(sd3: Pipeline, spacing: str) -> None:
    for steps in range(1, 1001):
        sigmas = np.array([level.s for level in spaced_levels(spacing, sd3.schedule, steps)])
        assert len(sigmas) == steps + 1
        assert (sigmas[0], sigmas[-1]) == (1, 0)
        assert (np.diff(sigmas) < 0).all()


def check_plan(plan: Plan, steps: int) -> None:
    assert plan.num_steps == steps
    assert np.isfinite(plan.mix).all()
    assert plan.end.s == 0
    firsts = plan.level[np.append(True, np.diff(plan.step) > 0)]
    assert (np.diff(firsts[:, 1]) < 0).all()
    assert np.allclose(plan.level.sum(axis=1), 1)


@pytest.mark.parametrize("name", DEFINED)
def test_float32_is_enough(sd: Pipeline, name: str) -> None:
    """The step in float32 ends where float64 does."""
    plan = flowing(sd, 3.0, clock="1000 s").plan(name, 8)
    noises = iter(toy.noises(60))
    start = next(noises) * plan.initial
    wanted = run(plan, velocity, start, iter(list(noises)))[-1]
    noises = iter(toy.noises(60)[1:])
    x = torch.from_numpy(start).float()
    registers = torch.cat([x[None], x.new_zeros(NUM_REGISTERS - 1, *x.shape)])
    for i, row in enumerate(device_rows(plan, x.device)):
        fresh = torch.from_numpy(next(noises)).float() if plan.adds_noise[i] else torch.zeros_like(x)
        registers = one_step(toy.denoiser, registers, row, fresh, torch.zeros(len(x), 1, 1))
    assert toy.relative_error(registers[0], wanted) < 5e-4


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_samplers_that_make_no_sense_are_refused(sd3: Pipeline, name: str) -> None:
    with pytest.raises(ValueError, match=r"not defined for rectified flow .*use euler"):
        sd3.plan(name, 4)


@pytest.mark.parametrize("spacing", sorted(GENERAL))
def test_spacings_that_only_need_a_range(flux: Pipeline, spacing: str) -> None:
    plan = replace(flux, schedule=flux.schedule.sized(1024)).plan("euler", 7, spacing=spacing)
    assert (np.diff(plan.level[:, 1]) < 0).all()
    assert (plan.end.s, plan.num_steps) == (0, 7)


@pytest.mark.parametrize("spacing", sorted(SPACINGS.keys() - GENERAL))
def test_spacings_of_betas_are_refused(flux: Pipeline, spacing: str) -> None:
    with pytest.raises(ValueError, match="not for rectified flow: use one of beta"):
        flux.plan("euler", 7, spacing=spacing)


@pytest.mark.parametrize("spacing", ["flow", "flow_sd3"])
def test_spacings_of_flows_are_refused_elsewhere(sd: Pipeline, spacing: str) -> None:
    with pytest.raises(ValueError, match="is for rectified flow"):
        sd.plan("euler", 4, spacing=spacing)


def test_what_is_refused(sd3: Pipeline) -> None:
    for shift in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a number above 0"):
            flowing(sd3, shift)
    with pytest.raises(ValueError, match="`churn` is not defined for rectified flow"):
        sd3.plan("euler", 4, churn=1.0)


def test_a_shift_is_undone_by_its_inverse() -> None:
    assert shifted(shifted(np.array(0.3), 3.0), 1 / 3) == pytest.approx(0.3)


def test_a_range_of_noise_levels_ends_at_1(sd3: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"got sigmas from 0\.1 to 10, expected a range above 0, at most 1"):
        sd3.plan("euler", 5, spacing="karras:sigma_min=0.1:sigma_max=10")


def test_a_first_level_that_a_rounding_error_lifts_above_1(sd3: Pipeline) -> None:
    """s of timestep 999 is 1 + 2e-16 for SD3's shift: sigma is minus infinity, nearly."""
    plan = sd3.plan("dpmpp_2s_a", 5, spacing="normal")
    assert plan.level[0, 0] < 0
    assert plan.level[1] == pytest.approx(sd3.plan("dpmpp_2s_a", 5, spacing="simple").level[1], rel=1e-3)
