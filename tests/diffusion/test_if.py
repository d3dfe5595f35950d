"""What DeepFloyd IF adds to sampling, against the original: respacing, learned variance, the threshold's limit."""

from pathlib import Path
from unittest import mock

import numpy as np
import plan_runner
import pytest
import torch
import toy
from steps import guidance, one_step
from torch import Tensor

from ldm_lite import Pipeline
from ldm_lite.core.plan import Row, device_rows
from ldm_lite.diffusion.adjustments import dynamic_threshold
from ldm_lite.diffusion.learned_variance import with_learned_variance
from ldm_lite.diffusion.plan import NUM_REGISTERS
from ldm_lite.diffusion.samplers import SAMPLERS

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "if.npz")


@pytest.fixture(scope="module")
def deepfloyd(sd: Pipeline) -> Pipeline:
    return plan_runner.cosine(sd)


def test_the_cosine_schedule_is_the_originals(deepfloyd: Pipeline) -> None:
    assert deepfloyd.schedule.betas[0] == pytest.approx(4.12842248e-5, rel=1e-8)
    assert deepfloyd.schedule.alpha_bar[250] == pytest.approx(0.84588799, rel=1e-8)
    assert deepfloyd.schedule.alpha_bar[-1] == pytest.approx(2.43e-9, rel=1e-2)


@pytest.mark.parametrize("name", [key.removeprefix("timesteps.") for key in GOLDEN if key.startswith("timesteps.")])
def test_timesteps_are_the_originals(deepfloyd: Pipeline, name: str) -> None:
    wanted = GOLDEN[f"timesteps.{name}"].tolist()
    plan = deepfloyd.plan("ddpm", len(wanted), spacing="respaced" if name.isdigit() else name)
    assert plan.t.tolist() == wanted
    assert plan.end.s == 0


def test_a_table_has_its_own_number_of_steps(deepfloyd: Pipeline) -> None:
    with pytest.raises(ValueError, match="got 20 steps, but the spacing smart27 has 27: leave steps out"):
        deepfloyd.plan("ddpm", 20, spacing="smart27")


def trajectory(deepfloyd: Pipeline, name: str, dtype: torch.dtype) -> list[Tensor]:
    respacing, percentile, limit, scale = toy.IF_RUNS[name]
    steps, spacing = (int(respacing), "respaced") if respacing.isdigit() else (27, respacing)
    plan = deepfloyd.plan("ddpm", steps, spacing=spacing)
    fresh = iter(torch.from_numpy(toy.noises(60)).to(dtype))
    uncond, cond = (torch.from_numpy(value).to(dtype) for value in toy.contexts())
    context = torch.zeros(2, 1, 1, dtype=dtype) if scale is None else torch.cat([uncond, cond])
    guided, *how = guidance(context, scale, None, percentile, limit)
    guided = guided._replace(weights=guided.weights.to(dtype))
    registers = torch.cat([next(fresh)[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE, dtype=dtype)])
    seen = []
    for i, draws in enumerate(plan.adds_noise):
        row = Row(*(torch.tensor(getattr(plan, name)[i], dtype=dtype) for name in Row._fields))
        noise = next(fresh) if draws else torch.zeros(toy.SHAPE, dtype=dtype)
        step = with_learned_variance(float(plan.stretch[i]))
        registers = step(toy.denoiser_with_variance, registers, row, noise, guided, *how)
        seen.append(registers[0])
    return seen


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", toy.IF_RUNS)
def test_equals_the_original_at_every_step(
    deepfloyd: Pipeline, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """With its learned variance, taken from the conditional branch alone, and its clamped threshold.

    In float64, where the step's own casts to float32 are left out; in float32 the first steps, at a signal of 5e-5,
    leave a few digits less.
    """
    with mock.patch.object(Tensor, "float", lambda self: self.to(dtype)):
        ours = trajectory(deepfloyd, name, dtype)
    for state, theirs in zip(ours, GOLDEN[f"run.{name}"], strict=True):
        assert toy.relative_error(state, theirs) < tolerance


def test_other_samplers_leave_the_variance_out(deepfloyd: Pipeline) -> None:
    x = torch.from_numpy(toy.noises(1)[0]).float()
    registers = torch.cat([x[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE)])
    plan, nothing = deepfloyd.plan("euler_a", 10), torch.zeros(2, 1, 1)
    row, step = device_rows(plan, torch.device("cpu"))[3], with_learned_variance(0.0)
    plain = one_step(toy.denoiser, registers, row, x, nothing)
    variance = one_step(toy.denoiser_with_variance, registers, row, x, nothing, step=step)
    assert torch.equal(plain, variance)


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"ddpm"}))
def test_only_ddpm_stretches_its_noise(sd: Pipeline, sampler: str) -> None:
    assert hasattr(sd.plan("ddpm", 10), "stretch")
    assert not hasattr(sd.plan(sampler, 10), "stretch")


def test_the_stretch_goes_from_the_posteriors_variance_to_beta(deepfloyd: Pipeline) -> None:
    """Ho et al. 2020, sec. 3.2: sigma^2 = beta, and beta (1 - alpha_bar') / (1 - alpha_bar)."""
    plan, schedule = deepfloyd.plan("ddpm", 1000, spacing="respaced"), deepfloyd.schedule
    sigma = plan.mix[:-1, 0, -1]
    betas, alpha_bar = schedule.betas[:0:-1], schedule.alpha_bar[::-1]
    np.testing.assert_allclose(sigma**2, betas * (1 - alpha_bar[1:]) / (1 - alpha_bar[:-1]), rtol=1e-6)
    np.testing.assert_allclose((sigma * np.exp(plan.stretch[:-1])) ** 2, betas, rtol=1e-6)


def test_the_threshold_has_a_limit() -> None:
    x0 = torch.linspace(-4, 4, 9).view(1, 1, 3, 3)
    for limit in (1.0, 1.5):
        out = dynamic_threshold(x0, torch.tensor(0.95), torch.tensor(limit))
        torch.testing.assert_close(out, x0.clamp(-limit, limit) / limit)
