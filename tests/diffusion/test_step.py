"""The step, in float32: against textbook loops of each sampler and the goldens."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from steps import guidance, one_step
from torch import Tensor

from ldm_lite.core.denoise import run_row
from ldm_lite.core.plan import Row, device_rows
from ldm_lite.diffusion.adjustments import dynamic_threshold, rescaled
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SPACINGS, Array, NoiseSchedule, scaled_linear_betas

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "samplers.npz")
BETAS = scaled_linear_betas(0.00085, 0.012)
SD = NoiseSchedule.from_betas(BETAS, "eps")
UNCOND, COND = (torch.from_numpy(value).float() for value in toy.contexts())
NOTHING = torch.zeros(toy.SHAPE[0], 1, 1)  # a context that changes nothing


CPU = torch.device("cpu")


def run(plan: Plan, context: Tensor, scale: float | None = None) -> list[Tensor]:
    """The latent at the start and after every row, from toy.noises."""
    noises = iter(torch.from_numpy(toy.noises(120)).float())
    x = next(noises) * plan.initial
    registers = torch.cat([x[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE)])
    seen = [x]
    for row, draws in zip(device_rows(plan, CPU), plan.adds_noise, strict=True):
        noise = next(noises) if draws else torch.zeros(toy.SHAPE)
        registers = one_step(toy.denoiser, registers, row, noise, context, scale)
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
@pytest.mark.parametrize("name", TEXTBOOK)
def test_every_row_equals_the_textbook(name: str, steps: int) -> None:
    ours, theirs = run(named_plan(name, SD, steps), NOTHING), TEXTBOOK[name](steps)
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("name", toy.RUNS)
def test_trajectories_in_float32_are_those_of_the_originals(name: str) -> None:
    case = toy.RUNS[name]
    schedule = NoiseSchedule.from_betas(BETAS, case.prediction)  # type: ignore[arg-type]
    schedule = schedule.zero_terminal_snr() if case.zero_snr else schedule
    plan = named_plan(case.sampler, schedule, case.steps, eta=case.eta, churn=case.churn, spacing=case.spacing)
    xs = run(plan, NOTHING if case.scale is None else torch.cat([UNCOND, COND]), case.scale)
    if f"{name}.x" in GOLDEN:
        theirs = GOLDEN[f"{name}.x"]
    else:
        sigmas = GOLDEN[f"{name}.sigma"][:, None, None, None, None]
        theirs = GOLDEN[f"{name}.y"] / np.sqrt(1 + sigmas**2)
    ours = [xs[0], *(x for i, x in enumerate(xs[1:]) if i + 1 == len(plan.t) or plan.step[i] != plan.step[i + 1])]
    ours = ours if case.clean else ours[:-1]
    assert len(ours) == len(theirs)
    assert max(toy.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


# ---- guidance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
def test_scale_1_equals_no_guidance(name: str) -> None:
    plan = named_plan(name, SD, 10)
    plain, guided = run(plan, COND), run(plan, torch.cat([UNCOND, COND]), 1.0)
    assert max(toy.relative_error(a, b.numpy()) for a, b in zip(guided, plain, strict=True)) < 1e-5


def test_the_unconditional_half_comes_first_and_scale_0_is_it() -> None:
    plan = named_plan("ddim", SD, 10)
    guided, uncond = run(plan, torch.cat([UNCOND, COND]), 0.0), run(plan, UNCOND)
    assert all(torch.equal(a, b) for a, b in zip(guided, uncond, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_rescaled_has_the_deviation_of_the_conditional_prediction(share: float) -> None:
    """Lin et al. 2024, eqs. 15 and 16, image by image."""
    cond, guided = toy.normal(0, 3, 4, 5, 5), 3 * toy.normal(1, 3, 4, 5, 5) + 1
    images = rescaled(guided, cond, torch.tensor(share))
    for image, before, wanted in zip(images.numpy(), guided.numpy(), cond.numpy(), strict=True):
        full = before * wanted.std(ddof=1) / before.std(ddof=1)
        assert image == pytest.approx(share * full + (1 - share) * before, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.995])
def test_dynamic_threshold_clamps_at_the_percentile_and_divides_by_it(percentile: float) -> None:
    """Saharia et al. 2022, sec. 2.3, image by image; nothing is changed where the percentile is below 1."""
    x0 = toy.normal(0, 3, 4, 5, 5) * torch.tensor([0.2, 1.5, 4.0])[:, None, None, None]
    images = dynamic_threshold(x0, torch.tensor(percentile), torch.tensor(np.inf)).numpy()
    for image, before in zip(images, x0.numpy(), strict=True):
        s = max(1.0, np.quantile(abs(before), percentile))
        assert image == pytest.approx(np.clip(before, -s, s) / s, rel=1e-5, abs=1e-6)
    assert torch.equal(torch.from_numpy(images[0]), x0[0].clamp(-1, 1))


# ---- contract -------------------------------------------------------------------------------------------------------


def row_of(plan: Plan, i: int) -> Row:
    return device_rows(plan, CPU)[i]


def test_rows_are_the_plan_in_float32() -> None:
    plan = named_plan("unipc", SD, 10)
    table = device_rows(plan, CPU)
    assert len(table) == len(plan.t)
    for i, row in enumerate(table):
        for name in Row._fields:
            value, wanted = getattr(row, name), getattr(plan, name, np.zeros(len(plan.t)))  # no stretch
            assert value.dtype == torch.float32
            assert np.array_equal(value.numpy(), wanted[i].astype(np.float32))


@pytest.mark.parametrize("guided", [False, True])
def test_the_network_gets_all_branches_at_once_and_the_sampler_computes_in_float32(guided: bool) -> None:
    seen = []

    def network(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        seen.append((tuple(x.shape), tuple(t.shape), context.dtype))
        return x.bfloat16()

    context = (torch.cat([UNCOND, COND]) if guided else COND).bfloat16()
    registers = toy.normal(0, NUM_REGISTERS, *toy.SHAPE)
    before = registers.clone()
    row, noise = row_of(named_plan("ddim", SD, 10), 0), torch.zeros(toy.SHAPE)
    after = one_step(network, registers, row, noise, context, 7.5 if guided else None)
    batch = toy.SHAPE[0] * (1 + guided)
    assert seen == [((batch, *toy.SHAPE[1:]), (batch,), torch.bfloat16)]
    assert after.dtype == torch.float32
    assert after.shape == registers.shape
    assert torch.equal(registers, before)


@pytest.mark.parametrize("values", [(), (7.5,), (7.5, 0.7), (None, None, 0.9), (7.5, 0.7, 0.9)])
def test_reads_no_value_back_from_the_device(values: tuple[float | None, ...]) -> None:
    """On the meta device there are no values: .item(), or a branch on a tensor, raises."""
    guided, combine, adjust = guidance(torch.cat([UNCOND, COND]) if values and values[0] else COND, *values)
    conditioning = {name: part.to("meta") for name, part in guided.conditioning.items()}
    *_, adjust = guidance({"context": torch.zeros(2, 1, 1, device="meta")}, *values)
    guided = guided._replace(conditioning=conditioning, weights=guided.weights.to("meta"))
    row = Row(*(value.to("meta") for value in row_of(named_plan("ddim", SD, 10), 0)))
    registers, noise = (
        value.to("meta") for value in (toy.normal(0, NUM_REGISTERS, *toy.SHAPE), torch.zeros(toy.SHAPE))
    )
    after = run_row(toy.denoiser, registers, row, noise, guided, combine, adjust)
    assert after.shape == (NUM_REGISTERS, *toy.SHAPE)
