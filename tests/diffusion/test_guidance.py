"""What guidance makes of the network's outputs, and the x0 that a state has, told by runs of a miniature."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from runs import SAMPLERS, guided_outputs, unet_calls

from ldm_lite import Pipeline

PROMPTS = {"negative_prompt": "bad", "batch_size": 2, "steps": 2, "seed": 3}


@pytest.mark.parametrize("scale", [0.0, 0.5, 7.5])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_guidance_extrapolates_from_the_unconditional_half(
    predicting: Callable[..., Pipeline], prediction: str, scale: float
) -> None:
    for (uncond, cond), guided in guided_outputs(predicting(prediction), "a cat", scale=scale, **PROMPTS):
        torch.testing.assert_close(guided, (1 - scale) * uncond + scale * cond, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_rescaled_has_the_deviation_of_the_conditional_prediction(sd: Pipeline, share: float) -> None:
    """Lin et al. 2024, eqs. 15 and 16, image by image."""
    options = {"scale": 7.5, "guidance_rescale": share, **PROMPTS}
    for (uncond, cond), guided in guided_outputs(sd, "a cat", **options):
        plain = uncond + 7.5 * (cond - uncond)
        for image, before, like in zip(guided, plain, cond, strict=True):
            full = before * like.std() / before.std()
            torch.testing.assert_close(image, share * full + (1 - share) * before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.995])
@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_dynamic_threshold_clamps_at_the_percentile_and_divides_by_it(
    predicting: Callable[..., Pipeline], prediction: str, rescale: float, percentile: float
) -> None:
    """Saharia et al. 2022, sec. 2.3, image by image, after all other guidance, whatever the network predicts."""
    pipe, scale = predicting(prediction), 7.5
    options = {"scale": scale, "guidance_rescale": rescale, "dynamic_threshold": percentile, **PROMPTS}
    with unet_calls(pipe) as calls:
        states = list(pipe.stream("a cat", **options))
    for state, call, (p, q) in zip(states, calls, pipe.plan(steps=2).to_x0.tolist(), strict=True):
        uncond, cond = call.out.chunk(2)
        out = uncond + scale * (cond - uncond)
        deviations = [each.std(dim=(1, 2, 3), keepdim=True) for each in (cond, out)]
        out = rescale * out * deviations[0] / deviations[1] + (1 - rescale) * out
        before = (p * call.x[:2] + q * out).numpy()
        for image, x0 in zip(state.x0.numpy(), before, strict=True):
            s = max(1.0, np.quantile(abs(x0), percentile))
            assert image == pytest.approx(np.clip(x0, -s, s) / s, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("prediction", ["eps", "v"])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("dpm_adaptive", "ddim_cfgpp")])
@pytest.mark.thin(3)
def test_the_state_after_a_step_has_the_x0_that_it_predicted(
    predicting: Callable[..., Pipeline], name: str, prediction: str
) -> None:
    """Song et al. 2021, eq. 9, with what guidance makes of both outputs, of the last call; of the first in PLMS's first
    step, whose second is not remembered."""
    pipe = predicting(prediction)
    plan = pipe.plan(name, 6)
    with unet_calls(pipe) as calls:
        states = list(pipe.stream("a cat", negative_prompt="bad", sampler=name, steps=6, scale=3.0, seed=8))
    assert [state.step for state in states] == list(range(1, plan.num_steps + 1))
    assert len(calls) == len(plan.t)
    for state in states:
        of_step = np.flatnonzero(plan.step == state.step - 1)
        number = of_step[0] if name == "plms" and state.step == 1 else of_step[-1]
        (a, s), x, (uncond, cond) = plan.level[number].tolist(), calls[number].x[:1], calls[number].out.chunk(2)
        out = uncond + 3.0 * (cond - uncond)
        wanted = (x - s * out) / a if prediction == "eps" else a * x - s * out
        torch.testing.assert_close(state.x0, wanted, rtol=1e-4, atol=1e-3)
