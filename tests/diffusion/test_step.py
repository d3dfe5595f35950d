"""The step, in float32: against the goldens."""

from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from steps import guidance, one_step
from torch import Tensor

from ldm_lite.core.denoise import run_row
from ldm_lite.core.plan import Row, device_rows
from ldm_lite.diffusion.adjustments import dynamic_threshold
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS, Plan
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas

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
