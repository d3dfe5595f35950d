"""What DeepFloyd IF adds to sampling, against the original: respacing, learned variance, the threshold's limit."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import toy
from torch import Tensor

from ldm_lite.diffusion.guidance import Conditioning, Guidance, dynamic_threshold
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS, LearnedVariancePlan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import Schedule, cosine_betas, levels_of, scaled_linear_betas
from ldm_lite.diffusion.spacings import SECTIONS
from ldm_lite.diffusion.step import Row, denoise_step, rows

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "if.npz")
IF = Schedule.from_betas(cosine_betas(), "eps")


def test_the_cosine_schedule_is_the_originals() -> None:
    assert IF.betas[0] == pytest.approx(4.12842248e-5, rel=1e-8)
    assert IF.alpha_bar[250] == pytest.approx(0.84588799, rel=1e-8)
    assert IF.alpha_bar[-1] == pytest.approx(2.43e-9, rel=1e-2)


@pytest.mark.parametrize("name", [*SECTIONS, *map(str, toy.IF_STEPS)])
def test_timesteps_are_the_originals(name: str) -> None:
    steps = sum(SECTIONS[name]) if name in SECTIONS else int(name)
    levels = levels_of(name if name in SECTIONS else "respaced", IF, steps)
    assert [level.t for level in levels[:-1]] == GOLDEN[f"timesteps.{name}"].tolist()
    assert levels[-1].s == 0


def test_a_table_has_its_own_number_of_steps() -> None:
    with pytest.raises(ValueError, match="got 20 steps, but the spacing smart27 has 27: leave steps out"):
        make_plan("ddpm", IF, 20, spacing="smart27")


def trajectory(name: str, dtype: torch.dtype) -> list[Tensor]:
    respacing, percentile, limit, scale = toy.IF_RUNS[name]
    spacing = respacing if respacing in SECTIONS else "respaced"
    steps = sum(SECTIONS[spacing]) if spacing in SECTIONS else int(respacing)
    plan = make_plan("ddpm", IF, steps, spacing=spacing)
    fresh = iter(torch.from_numpy(toy.noises(60)).to(dtype))
    uncond, cond = (torch.from_numpy(value).to(dtype) for value in toy.contexts())
    context = torch.zeros(2, 1, 1, dtype=dtype) if scale is None else torch.cat([uncond, cond])
    weights = None if scale is None else torch.tensor([1 - scale, scale], dtype=dtype)
    guidance = Guidance(weights, None, torch.tensor(percentile, dtype=dtype), limit=torch.tensor(limit, dtype=dtype))
    registers = torch.cat([next(fresh)[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE, dtype=dtype)])
    seen = []
    for i, draws in enumerate(plan.adds_noise):
        row = Row(*(torch.tensor(getattr(plan, name)[i], dtype=dtype) for name in Row._fields))
        noise = next(fresh) if draws else torch.zeros(toy.SHAPE, dtype=dtype)
        given = row, noise, Conditioning(context), guidance, dtype
        registers = denoise_step(toy.denoiser_with_variance, registers, *given)
        seen.append(registers[0])
    return seen


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", toy.IF_RUNS)
def test_equals_the_original_at_every_step(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """With its learned variance, taken from the conditional branch alone, and its clamped threshold.

    In float64, where the step's own casts to float32 are left out; in float32 the first steps, at a signal of 5e-5,
    leave a few digits less.
    """
    with mock.patch.object(Tensor, "float", lambda self: self.to(dtype)):
        ours = trajectory(name, dtype)
    for state, theirs in zip(ours, GOLDEN[f"run.{name}"], strict=True):
        assert toy.relative_error(state, theirs) < tolerance


def test_other_samplers_leave_the_variance_out() -> None:
    x = torch.from_numpy(toy.noises(1)[0]).float()
    registers = torch.cat([x[None], torch.zeros(NUM_REGISTERS - 1, *toy.SHAPE)])
    nothing = Conditioning(torch.zeros(2, 1, 1))
    row = rows(make_plan("euler_a", IF, 10), torch.device("cpu"))[3]
    plain, variance = (
        denoise_step(model, registers, row, x, nothing, Guidance(None, None, None))
        for model in (lambda x, t, c, y: toy.denoiser(x, t, c), toy.denoiser_with_variance)
    )
    assert torch.equal(plain, variance)


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"ddpm"}))
def test_only_ddpm_stretches_its_noise(sampler: str) -> None:
    sd = Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
    assert not isinstance(make_plan(sampler, sd, 10), LearnedVariancePlan)


def test_the_stretch_goes_from_the_posteriors_variance_to_beta() -> None:
    """Ho et al. 2020, sec. 3.2: sigma^2 = beta, and beta (1 - alpha_bar') / (1 - alpha_bar)."""
    plan = make_plan("ddpm", IF, 1000, spacing="respaced")
    assert isinstance(plan, LearnedVariancePlan)
    sigma = plan.mix[:-1, 0, -1]
    betas, alpha_bar = IF.betas[:0:-1], IF.alpha_bar[::-1]
    np.testing.assert_allclose(sigma**2, betas * (1 - alpha_bar[1:]) / (1 - alpha_bar[:-1]), rtol=1e-6)
    np.testing.assert_allclose((sigma * np.exp(plan.stretch[:-1])) ** 2, betas, rtol=1e-6)


def test_the_threshold_has_a_limit() -> None:
    x0 = torch.linspace(-4, 4, 9).view(1, 1, 3, 3)
    for limit in (1.0, 1.5):
        out = dynamic_threshold(x0, torch.tensor(0.95), torch.tensor(limit))
        torch.testing.assert_close(out, x0.clamp(-limit, limit) / limit)
