"""Samplers, run in float64: against trajectories of the originals, and loops that write out the papers' updates."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from in_float64 import DEVIATION, MEAN, NOISES, best_eps, network, order, run
from references import SAMPLERS, arrays, error
from torch import Tensor

import ldm_lite.core
from ldm_lite.core import sampler
from ldm_lite.core.denoise import Branch, Inputs, run_plan
from ldm_lite.core.plan import ASIDE, H1, NOISE, H, Plan, Rows, X, device_rows
from ldm_lite.core.samplers import make_plan
from ldm_lite.core.schedule import CLEAN, Array, Schedule, levels_of, scaled_linear_betas

SD = Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
V = Schedule(SD.alpha_bar, "v")
GOLDEN = arrays("samplers.npz")  # trajectories of CompVis' samplers and k-diffusion's on `network`, in float64


# ---- the originals --------------------------------------------------------------------------------------------------

RUNS: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "ddim": (SD, {"name": "ddim", "steps": 20}),
    "ddim.eta1": (SD, {"name": "ddim", "steps": 20, "eta": 1.0}),
    "ddim.eta0.3": (SD, {"name": "ddim", "steps": 20, "eta": 0.3}),
    "plms": (SD, {"name": "plms", "steps": 20}),
    "euler.linspace": (SD, {"name": "euler", "steps": 13}),
    "euler.karras": (SD, {"name": "Euler Karras", "steps": 20}),
    "euler_a.linspace": (SD, {"name": "euler_a", "steps": 13}),
    "euler_a.karras": (SD, {"name": "euler_a_karras", "steps": 20}),
    "euler_a.karras.eta0.3": (SD, {"name": "euler_a", "steps": 20, "spacing": "karras", "eta": 0.3}),
    "euler_a.linspace.v": (V, {"name": "euler_a", "steps": 13}),
    "dpmpp_2m.linspace": (SD, {"name": "dpmpp_2m", "steps": 13}),
    "dpmpp_2m.karras": (SD, {"name": "DPM++ 2M Karras", "steps": 20}),
    "dpmpp_2m.karras.v": (V, {"name": "dpmpp_2m", "steps": 20, "spacing": "karras"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_trajectories_are_those_of_compvis_and_k_diffusion(name: str) -> None:
    schedule, arguments = RUNS[name]
    plan = make_plan(schedule=schedule, **arguments)
    ours = run(plan)
    if f"{name}.x" in GOLDEN:
        theirs = GOLDEN[f"{name}.x"]
    else:
        sigmas = GOLDEN[f"{name}.sigma"]
        theirs = GOLDEN[f"{name}.y"] / np.sqrt(1 + sigmas[:, None, None, None, None] ** 2)
    assert len(ours) == len(theirs)
    assert max(error(mine, golden) for mine, golden in zip(ours, theirs, strict=True)) < 1e-10


def test_every_sampler_has_such_a_run() -> None:
    assert set(SAMPLERS) <= ldm_lite.core.SAMPLERS.keys()
    assert {name.partition(".")[0] for name in RUNS} == set(SAMPLERS)


# ---- the papers' updates, written out -------------------------------------------------------------------------------


def ddim(schedule: Schedule, steps: int, eta: float, noises: Iterator[Array]) -> Array:
    """Song et al. 2021, eq. 12, at timesteps 1 + i * 1000 / steps and then 0."""
    timesteps = [*range(1, 1001, 1000 // steps)][::-1]
    x = NOISES[0]
    for t, before in zip(timesteps, [*timesteps[1:], 0], strict=True):
        alpha, next_alpha = schedule.alpha_bar[t], schedule.alpha_bar[before]
        eps = network(x, t)
        x0 = (x - math.sqrt(1 - alpha) * eps) / math.sqrt(alpha)
        sigma = eta * math.sqrt((1 - next_alpha) / (1 - alpha)) * math.sqrt(1 - alpha / next_alpha)
        x = math.sqrt(next_alpha) * x0 + math.sqrt(1 - next_alpha - sigma**2) * eps
        x = x + sigma * next(noises) if eta else x
    return x


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim(eta: float) -> None:
    wanted = ddim(SD, 25, eta, iter(NOISES[1:]))
    assert error(run(make_plan("ddim", SD, 25, eta=eta))[-1], wanted) < 1e-12


def sigmas_and_x0(schedule: Schedule, steps: int) -> tuple[list[float], Callable[[Array, float], Array]]:
    """k-diffusion's sigmas, and its denoiser of y = x0 + sigma eps for `network`, which predicts eps."""
    sigmas = [level.sigma for level in levels_of("karras", schedule, steps)]

    def denoised(y: Array, sigma: float) -> Array:
        t = float(np.interp(np.log(sigma), np.log(schedule.sigmas), np.arange(1000)))
        return y - sigma * network(y / math.sqrt(1 + sigma**2), t)

    return sigmas, denoised


def test_euler() -> None:
    """Karras et al. 2022, algorithm 1 without noise and correction."""
    sigmas, denoised = sigmas_and_x0(SD, 9)
    y = NOISES[0] * sigmas[0]
    for now, after in pairwise(sigmas):
        y = y + (after - now) * (y - denoised(y, now)) / now
    assert error(run(make_plan("euler", SD, 9, spacing="karras"))[-1] / math.hypot(1, sigmas[-1]), y) < 1e-12


def test_dpmpp_2m() -> None:
    """Lu et al. 2022b, algorithm 2, in lambda = -log sigma."""
    sigmas, denoised = sigmas_and_x0(SD, 9)
    y, earlier, h_before = NOISES[0] * sigmas[0], None, 0.0
    for now, after in pairwise(sigmas):
        x0 = denoised(y, now)
        if after == 0:
            y = x0
            break
        h = math.log(now / after)
        direction = x0
        if earlier is not None:
            r = h_before / h
            direction = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * earlier
        y = after / now * y - math.expm1(-h) * direction
        earlier, h_before = x0, h
    assert error(run(make_plan("dpmpp_2m", SD, 9, spacing="karras"))[-1], y) < 1e-12


# ---- closed forms: Gaussian data, for which the best prediction is known --------------------------------------------


@pytest.mark.parametrize(("name", "wanted"), [("ddim", 1), ("euler", 1), ("plms", 2), ("dpmpp_2m", 2)])
def test_samplers_converge_to_the_exact_solution(name: str, wanted: float) -> None:
    assert order(lambda steps: make_plan(name, SD, steps, spacing="karras"), SD) > 0.85 * wanted


@pytest.mark.parametrize(("name", "eta"), [("ddim", 1.0), ("euler_a", 1.0), ("euler_a", 0.5)])
def test_noise_restores_the_variance_of_the_data(name: str, eta: float) -> None:
    """Means and variances of a linear plan are exact: no samples are drawn."""
    predict, plan = best_eps(SD), make_plan(name, SD, 400, eta=eta, spacing="linspace")
    mean, variance = 0.0, plan.initial**2
    for i in range(len(plan.t)):
        bias = float(predict(np.array(0.0), plan.t[i]))
        slope = float(predict(np.array(1.0), plan.t[i])) - bias
        x, h, noise = plan.mix[i, 0, 0], plan.mix[i, 0, -2], plan.mix[i, 0, -1]
        gain = x + h * (plan.h_of_out[i, 0] + plan.h_of_out[i, 1] * slope)
        mean, variance = gain * mean + h * plan.h_of_out[i, 1] * bias, gain**2 * variance + noise**2
    assert mean == pytest.approx(MEAN, abs=0.02)
    assert math.sqrt(variance) == pytest.approx(DEVIATION, rel=0.02)


# ---- the loop -------------------------------------------------------------------------------------------------------


def toy(x: Tensor, t: Tensor, shift: Tensor) -> Tensor:
    """`network` in torch, with a conditioning (B,1,1,1)."""
    return 0.9 * x + 0.3 * torch.sin(2 * x - x.roll(1, dims=-1) + t.view(-1, 1, 1, 1) / 100 + shift)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("schedule", [SD, V], ids=["eps", "v"])
def test_the_loop_runs_the_table(name: str, schedule: Schedule) -> None:
    plan = make_plan(name, schedule, 11)
    noises = iter(torch.from_numpy(NOISES[1:]).float())
    inputs = Inputs(toy, (Branch({"shift": torch.zeros(2, 1, 1, 1)}),))
    x = torch.from_numpy(NOISES[0]).float() * plan.initial
    states = list(run_plan(x, plan, lambda call: inputs, lambda: next(noises)))
    assert [state.step for state in states] == list(range(1, 12))
    for state, wanted in zip(states, run(plan)[1:], strict=True):
        assert error(state.latents, wanted) < 1e-4
    if plan.end == CLEAN:  # then the result is what the last call predicted
        assert error(states[-1].x0, states[-1].latents) < 1e-5


def test_guidance_is_that_of_the_paper() -> None:
    plan, scale = make_plan("ddim", SD, 5), 4.0
    branches = Branch({"shift": torch.zeros(2, 1, 1, 1)}, positive=False), Branch({"shift": torch.ones(2, 1, 1, 1)})
    x = torch.from_numpy(NOISES[0]).float()
    *_, state = run_plan(x, plan, lambda call: Inputs(toy, branches, scale), lambda: x)

    def guided(x: Array, t: float) -> Array:
        uncond = 0.9 * x + 0.3 * np.sin(2 * x - np.roll(x, 1, axis=-1) + t / 100)
        cond = 0.9 * x + 0.3 * np.sin(2 * x - np.roll(x, 1, axis=-1) + t / 100 + 1)
        return uncond + scale * (cond - uncond)

    assert error(state.latents, run(plan, guided)[-1]) < 1e-4


def test_a_preview_is_of_the_call_that_is_remembered() -> None:
    """The first step of PLMS makes two calls, and the second one's H is an average that joins no history."""
    read: list[Tensor] = []

    def watched(x: Tensor, t: Tensor, shift: Tensor) -> Tensor:
        read.append(x)
        return toy(x, t, shift)

    plan = make_plan("plms", SD, 3)
    inputs = Inputs(watched, (Branch({"shift": torch.zeros(2, 1, 1, 1)}),))
    x = torch.from_numpy(NOISES[0]).float()
    states = list(run_plan(x, plan, lambda call: inputs, lambda: x))
    assert plan.remembers.tolist() == [True, False, True, True]
    for state, call in zip(states, (0, 2, 3), strict=True):
        (a, s), eps = plan.level[call], toy(read[call], torch.tensor([plan.t[call]] * 2), torch.zeros(2, 1, 1, 1))
        assert torch.equal(state.before, read[call])
        assert error(state.x0, (read[call] - s * eps) / a) < 1e-5


def test_latents_are_constrained_before_each_call_and_at_the_end() -> None:
    numbers: list[int] = []
    read: list[Tensor] = []

    def constrain(number: int, x: Tensor) -> Tensor:
        numbers.append(number)
        return torch.full_like(x, float(number))

    def watched(x: Tensor, t: Tensor, shift: Tensor) -> Tensor:
        read.append(x)
        return toy(x, t, shift)

    inputs = Inputs(watched, (Branch({"shift": torch.zeros(2, 1, 1, 1)}),))
    x = torch.from_numpy(NOISES[0]).float()
    states = list(run_plan(x, make_plan("plms", SD, 3), lambda call: inputs, lambda: x, constrain))
    assert numbers == [0, 1, 2, 3, 4]
    assert [float(latents.mean()) for latents in read] == [0, 1, 2, 3]
    assert states[-1].latents.eq(4).all()
    assert states[0].x0.eq(4).all()  # clean latents, as at the end
    assert states[0].latents.ne(2).any()  # constrained before the next call


def test_branches_are_joined_again_when_they_change() -> None:
    """A source may give other branches, or another scale, in each call."""
    shifts: list[list[float]] = []

    def watched(x: Tensor, t: Tensor, shift: Tensor) -> Tensor:
        shifts.append(shift.flatten().tolist())
        return toy(x, t, shift)

    def branch(value: float, positive: bool = True) -> Branch:
        return Branch({"shift": torch.full((1, 1, 1, 1), value)}, positive=positive)

    kept = branch(0.0, positive=False), branch(1.0)
    sources = [(kept, 2.0), (kept, 1.0), (kept, 2.0), ((branch(0.0), branch(3.0)), 2.0)]
    seen: list[list[float]] = []

    def inputs_of(call: Any) -> Inputs:
        branches, scale = sources[call.number]

        def adjust(out: Tensor, outputs: Any) -> Tensor:
            seen.append(outputs.weights.flatten().tolist())
            return out

        return Inputs(watched, branches, scale, adjust=(adjust,))

    x = torch.from_numpy(NOISES[0][:1]).float()
    list(run_plan(x, make_plan("ddim", SD, 4), inputs_of, lambda: x))
    assert shifts == [[0, 1], [1], [0, 1], [0, 3]]
    assert [weights[-1] for weights in seen] == [2, 1, 2, 2]


def test_rows_are_float32_and_plans_tell_their_size() -> None:
    plan = make_plan("plms", SD, 3)
    assert repr(plan) == "Plan(3 steps, 4 calls of the network)"
    rows = device_rows(plan, torch.device("cpu"))
    assert len(rows) == 4
    for number, row in enumerate(rows):
        assert {column.dtype for column in row} == {torch.float32}
        assert float(row.t) == plan.t[number]
        np.testing.assert_allclose(row.mix, plan.mix[number], rtol=1e-6)
        np.testing.assert_allclose(row.level, plan.level[number], rtol=1e-6)


def test_noise_of_another_shape_is_refused() -> None:
    inputs = Inputs(toy, (Branch({"shift": torch.zeros(2, 1, 1, 1)}),))
    x = torch.from_numpy(NOISES[0]).float()
    with pytest.raises(ValueError, match=r"got noise of shape \(1, 2, 3, 3\) from `draw`, expected \(2, 2, 3, 3\)"):
        list(run_plan(x, make_plan("euler_a", SD, 3), lambda call: inputs, lambda: x[:1]))


def test_no_copy_reads_memory_that_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not wait is one from pinned memory: temporary tensors are not, and are freed at once."""
    plain = Tensor.to
    copies: list[bool] = []

    def watched(tensor: Tensor, *arguments: Any, **more: Any) -> Tensor:
        copies.append(bool(more.get("non_blocking")) and not tensor.is_pinned())
        return plain(tensor, *arguments, **more)

    monkeypatch.setattr(Tensor, "to", watched)
    shift = torch.zeros(2, 1, 1, 1)
    inputs = Inputs(toy, (Branch({"shift": shift}, positive=False), Branch({"shift": shift + 1})), 4.0)
    x = torch.from_numpy(NOISES[0]).float()
    list(run_plan(x, make_plan("euler_a", SD, 3), lambda call: inputs, lambda: torch.randn(x.shape)))
    assert len(copies) >= 3
    assert not any(copies)


# ---- names, and tables of one's own ---------------------------------------------------------------------------------


def test_names_of_samplers() -> None:
    for name, like in {"DPM++ 2M Karras": "dpmpp_2m_karras", "Euler a": "euler_a", " ddim ": "ddim"}.items():
        assert np.array_equal(make_plan(name, SD, 4).mix, make_plan(like, SD, 4).mix)
    karras = make_plan("euler", SD, 4, spacing="karras")
    assert np.array_equal(make_plan("euler_karras", SD, 4).mix, karras.mix)
    assert np.array_equal(make_plan("euler", SD, 4, spacing=lambda s, n: levels_of("karras", s, n)).mix, karras.mix)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dimm", "steps": 5}, "unknown sampler 'dimm': did you mean ddim"),
        ({"name": "ddim", "steps": 0}, "got 0 steps, expected 1 to 1000"),
        ({"name": "ddim", "steps": 1001}, "got 1001 steps, expected 1 to 1000"),
        ({"name": "euler", "steps": 5, "eta": 0.5}, "got eta 0.5 for euler, expected 0 to 1, with one of ddim"),
        ({"name": "ddim", "steps": 5, "eta": 1.5}, "got eta 1.5 for ddim"),
        ({"name": "ddim", "steps": 5, "spacing": "none"}, "unknown spacing 'none'"),
    ],
)
def test_errors_of_plans_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make_plan(schedule=SD, **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_last_steps_are_those_of_the_whole_plan(name: str) -> None:
    whole, part = make_plan(name, SD, 10), make_plan(name, SD, 10, last=4)
    _, first_calls = np.unique(part.step, return_index=True)  # the first step of plms makes two
    assert np.array_equal(part.t[first_calls], whole.t[-4:])
    assert part.end == whole.end
    assert part.num_steps == 4


def test_a_table_of_ones_own() -> None:
    """The docstring of Plan: Euler's method at four chosen timesteps, which is DDIM's update."""
    levels = [SD.at(t) for t in (999, 750, 500, 250)] + [CLEAN]
    rows = Rows(SD, h="x0")
    for step, (now, after) in enumerate(pairwise(levels)):
        eps = (X - now.a * H) / now.s
        rows.add(step, now, after.a * H + after.s * eps)
    plan = rows.plan(end=CLEAN)
    x = NOISES[0] * levels[0].s
    for now, after in pairwise(levels):
        eps = network(x, now.t)
        x = after.a * (x - now.s * eps) / now.a + after.s * eps
    assert error(run(plan)[-1], x) < 1e-12


def test_registers_keep_a_latent_and_earlier_predictions() -> None:
    rows = Rows(SD, h="eps")
    rows.add(0, SD.at(900), X, aside=2 * X)
    rows.add(1, SD.at(800), ASIDE + H1 + 3 * NOISE, remember=False)
    rows.add(2, SD.at(700), H1 - ASIDE)
    *_, first, second, third = run(rows.plan(end=SD.at(600), initial=1.0))
    eps = network(NOISES[0], 900)
    assert error(second, 2 * NOISES[0] + eps + 3 * NOISES[1]) < 1e-12
    assert error(first, NOISES[0]) < 1e-12
    assert error(third, eps - 2 * NOISES[0]) < 1e-12


def test_tables_that_cannot_run_are_refused() -> None:
    rows = Rows(SD, h="x0")
    with pytest.raises(ValueError, match="a plan needs rows"):
        rows.plan(end=CLEAN)
    rows.add(0, SD.at(900), X, remember=False)
    with pytest.raises(ValueError, match="the first must remember its H"):
        rows.plan(end=CLEAN)
    for vector in (ASIDE, H1):
        rows = Rows(SD, h="x0")
        rows.add(0, SD.at(900), X + vector)
        with pytest.raises(ValueError, match="the first row reads ASIDE, H1, H2 or H3, which no call before"):
            rows.plan(end=CLEAN)


def test_a_sampler_of_ones_own_joins_by_its_name(tables: None) -> None:
    @sampler
    def halved(schedule: Schedule, steps: int, spacing: str = "karras") -> Plan:
        return make_plan("euler", schedule, 2 * steps, spacing=spacing)

    assert make_plan("halved", SD, 3).num_steps == 6
    assert make_plan("Halved linspace", SD, 3).t[0] == 999
    with pytest.raises(ValueError, match=r"sampler plain\(schedule, steps\): .*; expected \(schedule, steps, "):

        @sampler
        def plain(schedule: Schedule, steps: int) -> Plan:
            raise AssertionError


def test_a_spacing_must_fall_in_as_many_steps(pipe: ldm_lite.core.Pipeline) -> None:
    at = pipe.schedule.at
    wrong: list[list[Any]] = [
        [at(900), CLEAN],
        [at(900), at(600), at(300), at(1), CLEAN],
        [at(100), at(500), at(900), CLEAN],
        [at(900), at(500), at(500), CLEAN],
        [900, 500, 100, 0],
    ]
    for levels in wrong:
        with pytest.raises(ValueError, match="expected 4 Levels for 3 steps, the noisiest first"):
            make_plan("euler", pipe.schedule, 3, spacing=lambda schedule, steps, levels=levels: levels)
    for last in (-2, 99):
        with pytest.raises(ValueError, match=f"got the last {last} of 3 steps"):
            make_plan("euler", pipe.schedule, 3, last=last)


def test_a_sampler_with_capitals(tables: None, pipe: ldm_lite.core.Pipeline) -> None:
    @sampler
    def Mine2(schedule: Schedule, steps: int, spacing: str = "karras") -> Plan:
        return ldm_lite.core.SAMPLERS["euler"](schedule, steps, spacing)

    assert pipe.plan("Mine2", 3).num_steps == pipe.plan("mine2 trailing", 3).num_steps == 3
