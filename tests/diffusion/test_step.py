"""The step, in float32: against textbook loops of each sampler, the goldens, and what it promises about guidance."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ldm_lite.diffusion.guidance import classifier_free
from ldm_lite.diffusion.samplers import NUM_REGISTERS, SAMPLERS, Plan, make_plan
from ldm_lite.diffusion.schedule import SPACINGS, Array, Schedule, linear_betas
from ldm_lite.diffusion.step import denoise_step

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "samplers.npz")
BETAS = linear_betas(0.00085, 0.012)
SD = Schedule.from_betas(BETAS, "eps")
UNCOND, COND = (torch.from_numpy(value).float() for value in toy.contexts())
NOTHING = torch.zeros(toy.SHAPE[0], 1, 1)  # a context that changes nothing


def run(plan: Plan, context: Tensor, scale: float | None) -> list[Tensor]:
    """The latent at the start and after every row, from toy.noises."""
    noises = iter(torch.from_numpy(toy.noises(60)).float())
    x = next(noises) * plan.initial
    registers = torch.cat([x[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE)])
    seen = [x]
    factor = None if scale is None else torch.tensor(scale)
    for i in range(len(plan.t)):
        row = [torch.tensor(table[i], dtype=torch.float32) for table in (plan.t, plan.to_prediction, plan.mix)]
        noise = next(noises) if plan.draws[i] else torch.zeros(toy.SHAPE)
        registers = denoise_step(toy.denoiser, registers, *row, noise, context, factor)
        seen.append(registers[0])
    return seen


# ---- textbook loops, in float64 -------------------------------------------------------------------------------------


def eps_at(x: Array, t: float) -> Array:
    return toy.denoiser(torch.from_numpy(x), torch.full((len(x),), t, dtype=torch.float64)).numpy()


def ddim_to(x: Array, eps: Array, now: float, after: float) -> Array:
    """Song et al. 2021, eq. 12 with sigma 0, between two values of alpha_bar."""
    return np.sqrt(after) * (x - np.sqrt(1 - now) * eps) / np.sqrt(now) + np.sqrt(1 - after) * eps


def textbook_ddim(steps: int) -> list[Array]:
    noises = iter(toy.noises(60))
    seen = [next(noises)]
    ts = range(1, 1000, 1000 // steps)[::-1]
    for t, t_after in zip(ts, [*ts[1:], 0], strict=True):
        seen.append(ddim_to(seen[-1], eps_at(seen[-1], t), SD.alpha_bar[t], SD.alpha_bar[t_after]))
    return seen


def textbook_plms(steps: int) -> list[Array]:
    """Liu et al. 2022; the first step's two calls are both listed."""
    seen, history = [toy.noises(1)[0]], []
    x, ts = seen[0], range(1, 1000, 1000 // steps)[::-1]
    for t, t_after in zip(ts, [*ts[1:], 0], strict=True):
        now, after = SD.alpha_bar[t], SD.alpha_bar[t_after]
        history.insert(0, eps_at(x, t))
        if len(history) == 1:
            seen.append(ddim_to(x, history[0], now, after))
            eps = (history[0] + eps_at(seen[-1], t_after)) / 2
        else:
            weights = {2: [3, -1], 3: [23, -16, 5]}.get(len(history), [55, -59, 37, -9])
            eps = sum(w * e for w, e in zip(weights, history, strict=False)) / sum(weights)
        x = ddim_to(x, eps, now, after)
        seen.append(x)
    return seen


def variance_exploding(update: Callable[..., Array]) -> Callable[[int], list[Array]]:
    """A loop over y = x0 + sigma eps: update(y, x0, sigma, sigma after, memory, noises) -> y."""

    def loop(steps: int) -> list[Array]:
        levels = SPACINGS["linspace"](SD, steps)
        noises, memory = iter(toy.noises(60)), {}
        y = next(noises) * levels[0].sigma
        seen = [y / np.hypot(1, levels[0].sigma)]
        for now, after in pairwise(levels):
            x0 = y - now.sigma * eps_at(y / np.hypot(1, now.sigma), now.t)
            y = update(y, x0, now.sigma, after.sigma, memory, noises)
            seen.append(y / np.hypot(1, after.sigma))
        return seen

    return loop


def euler(y, x0, sigma, after, memory, noises):  # type: ignore[no-untyped-def]
    return y + (y - x0) / sigma * (after - sigma)


def euler_a(y, x0, sigma, after, memory, noises):  # type: ignore[no-untyped-def]
    up = after * np.sqrt(sigma**2 - after**2) / sigma
    y = y + (y - x0) / sigma * (np.sqrt(after**2 - up**2) - sigma)
    return y + up * next(noises) if after else y


def dpmpp_2m(y, x0, sigma, after, memory, noises):  # type: ignore[no-untyped-def]
    """Lu et al. 2022b, algorithm 2, in lambda = -log sigma."""
    guess = x0
    if memory and after:
        h, h_before = np.log(sigma / after), np.log(memory["sigma"] / sigma)
        guess = x0 + (x0 - memory["x0"]) * h / (2 * h_before)
    memory.update(x0=x0, sigma=sigma)
    return after / sigma * y + (1 - after / sigma) * guess


TEXTBOOK = {
    "ddim": textbook_ddim,
    "plms": textbook_plms,
    "euler": variance_exploding(euler),
    "euler_a": variance_exploding(euler_a),
    "dpmpp_2m": variance_exploding(dpmpp_2m),
}


@pytest.mark.parametrize("steps", [2, 4, 10, 50])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_row_equals_the_textbook(name: str, steps: int) -> None:
    ours, theirs = run(make_plan(name, SD, steps), NOTHING, None), TEXTBOOK[name](steps)
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("name", toy.RUNS)
def test_trajectories_in_float32_are_those_of_the_originals(name: str) -> None:
    case = toy.RUNS[name]
    schedule = Schedule.from_betas(BETAS, case.prediction)  # type: ignore[arg-type]
    plan = make_plan(case.sampler, schedule, case.steps, eta=case.eta, spacing=case.spacing)
    rows = run(plan, NOTHING if case.scale is None else torch.cat([UNCOND, COND]), case.scale)
    if f"{name}.x" in GOLDEN:
        theirs = GOLDEN[f"{name}.x"]
    else:
        sigmas = GOLDEN[f"{name}.sigma"][:, None, None, None, None]
        theirs = GOLDEN[f"{name}.y"] / np.sqrt(1 + sigmas**2)
    ours = [rows[0], *(x for i, x in enumerate(rows[1:]) if i + 1 == len(plan.t) or plan.step[i] != plan.step[i + 1])]
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


# ---- guidance -------------------------------------------------------------------------------------------------------


def test_guidance_extrapolates_from_the_unconditional_half() -> None:
    uncond, cond = toy.normal(0, 2, 4, 3, 3), toy.normal(1, 2, 4, 3, 3)
    out = torch.cat([uncond, cond])
    for scale in (0.0, 0.5, 1.0, 7.5):
        wanted = (1 - scale) * uncond + scale * cond
        torch.testing.assert_close(classifier_free(out, torch.tensor(scale)), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(classifier_free(out, torch.tensor(0.0)), uncond)


@pytest.mark.parametrize("name", SAMPLERS)
def test_scale_1_equals_no_guidance(name: str) -> None:
    plan = make_plan(name, SD, 10)
    plain, guided = run(plan, COND, None), run(plan, torch.cat([UNCOND, COND]), 1.0)
    assert max(toy.relative_error(a, b.numpy()) for a, b in zip(guided, plain, strict=True)) < 1e-5


def test_the_unconditional_half_comes_first_and_scale_0_is_it() -> None:
    plan = make_plan("ddim", SD, 10)
    guided, uncond = run(plan, torch.cat([UNCOND, COND]), 0.0), run(plan, UNCOND, None)
    assert all(torch.equal(a, b) for a, b in zip(guided, uncond, strict=True))


# ---- contract -------------------------------------------------------------------------------------------------------


def row_of(plan: Plan, i: int) -> list[Tensor]:
    return [torch.tensor(table[i], dtype=torch.float32) for table in (plan.t, plan.to_prediction, plan.mix)]


@pytest.mark.parametrize("guided", [False, True])
def test_the_model_computes_in_the_contexts_dtype_and_the_sampler_in_float32(guided: bool) -> None:
    seen = []

    def model(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        seen.append((x.dtype, tuple(x.shape), tuple(t.shape), context.dtype))
        return x

    context = (torch.cat([UNCOND, COND]) if guided else COND).bfloat16()
    registers = toy.normal(0, NUM_REGISTERS, *toy.SHAPE)
    before = registers.clone()
    scale = torch.tensor(7.5) if guided else None
    after = denoise_step(
        model, registers, *row_of(make_plan("ddim", SD, 10), 0), torch.zeros(toy.SHAPE), context, scale
    )
    batch = toy.SHAPE[0] * (1 + guided)
    assert seen == [(torch.bfloat16, (batch, *toy.SHAPE[1:]), (batch,), torch.bfloat16)]
    assert after.dtype == torch.float32
    assert after.shape == registers.shape
    assert torch.equal(registers, before)


@pytest.mark.parametrize("scale", [None, 7.5])
def test_reads_no_value_back_from_the_device(scale: float | None) -> None:
    """On the meta device there are no values: .item(), or a branch on a tensor, raises."""
    context = COND if scale is None else torch.cat([UNCOND, COND])
    row = row_of(make_plan("ddim", SD, 10), 0)
    arguments = [toy.normal(0, NUM_REGISTERS, *toy.SHAPE), *row, torch.zeros(toy.SHAPE), context]
    factor = None if scale is None else torch.tensor(scale, device="meta")
    after = denoise_step(toy.denoiser, *(value.to("meta") for value in arguments), factor)
    assert after.shape == (NUM_REGISTERS, *toy.SHAPE)


def test_one_compiled_step_serves_every_row_sampler_and_scale() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(denoise_step, fullgraph=True, backend=counter)
    context = torch.cat([UNCOND, COND])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, (name, scale) in enumerate(zip(SAMPLERS, (0.0, 1.0, 7.5, 3.0, 12.0), strict=True)):
            plan = make_plan(name, SD, 10 + seed)
            registers, noise = toy.normal(seed, NUM_REGISTERS, *toy.SHAPE), toy.normal(9 + seed, *toy.SHAPE)
            for i in (0, 1, len(plan.t) - 1):
                arguments = (registers, *row_of(plan, i), noise, context, torch.tensor(scale))
                torch.testing.assert_close(compiled(toy.denoiser, *arguments), denoise_step(toy.denoiser, *arguments))
    torch._dynamo.reset()
    assert counter.frame_count == 1
