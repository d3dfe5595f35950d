"""What guidance makes of the network's outputs, and the x0 that a state has, told by runs of a miniature."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from runs import SAMPLERS, guided_outputs, unet_calls

from ldm_lite import Pipeline
from ldm_lite.diffusion.adjustments import mimicked

TRICKS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")
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


@pytest.mark.parametrize("percentile", [1.0, 0.9])
def test_mimicked_is_the_extensions(percentile: float) -> None:
    cond, uncond = toy.normal(10, 2, 4, 8, 8).double(), toy.normal(20, 2, 4, 8, 8).double()
    x0, of_lower = (uncond + scale * (cond - uncond) for scale in (12, 4))
    combined = mimicked(x0, of_lower, torch.tensor(percentile, dtype=torch.float64))
    np.testing.assert_allclose(combined.numpy(), TRICKS[f"mimic.{percentile}"], rtol=1e-12)


@pytest.mark.parametrize("percentile", [None, 0.9])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_a_mimic_scale_gives_x0_the_range_of_that_scale(
    predicting: Callable[..., Pipeline], prediction: str, percentile: float | None
) -> None:
    """Channel by channel, around its mean, whatever the network predicts."""
    pipe, options = predicting(prediction), {"scale": 12.0, "mimic_scale": 4.0, "dynamic_threshold": percentile}
    with unet_calls(pipe) as calls:
        states = list(pipe.stream("a cat", **options, **PROMPTS))
    for state, call, (p, q) in zip(states, calls, pipe.plan(steps=2).x0_of_out.tolist(), strict=True):
        uncond, cond = call.out.chunk(2)
        higher, lower = (p * call.x[:2] + q * (uncond + scale * (cond - uncond)) for scale in (12, 4))
        for channel, before, like in zip(*(x.flatten(0, 1) for x in (state.x0, higher, lower)), strict=True):
            span, of_lower = (float((x - x.mean()).abs().max()) for x in (before, like))
            after = float((channel - before.mean()).abs().max())  # clamping moves the mean
            assert after == pytest.approx(min(span, of_lower), rel=1e-3)


def test_a_mimic_scale_needs_guidance_by_one_prompt(sd: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="`dynamic_threshold` is the percentile of `mimic_scale`: give that too"):
        sd.txt2img("a cat", dynamic_threshold=0.9)
    with pytest.raises(ValueError, match="`mimic_scale` changes the guidance, but there is none"):
        sd.txt2img("a cat", mimic_scale=0.5, scale=1, steps=1)
    with pytest.raises(ValueError, match=r"a prompt with AND, .*, takes no `mimic_scale`"):
        sd.txt2img("a cat AND a dog", prompt_syntax="a1111", mimic_scale=7, steps=1, scale=9)
    [plain], [same] = (sd.txt2img("a", steps=1, scale=3, output="numpy", **more) for more in ({}, {"mimic_scale": 3}))
    assert np.abs(plain.astype(int) - same).max() <= 1
    assert "`mimic_scale` has no effect unless it is below `scale`: use a lower one" in caplog.messages
    sd.txt2img("a cat", mimic_scale=7, scale=9, steps=2, guidance_interval="-0.5")  # a step without guidance


@pytest.mark.parametrize("option", [{"apg": "parallel=0"}, {"guidance_schedule": "linear"}])
def test_what_changes_guidance_by_one_prompt_refuses_other_guidance(sd: Pipeline, option: dict[str, str]) -> None:
    [name] = option
    with pytest.raises(ValueError, match=f"a prompt with AND, .*, takes no `{name}`: leave it out"):
        sd.txt2img("a cat AND a dog", prompt_syntax="a1111", steps=1, **option)
    with pytest.raises(ValueError, match=f"got a `guidance` function and `{name}`: leave one of them out"):
        sd.txt2img("a cat", guidance=lambda step: 3.0, steps=1, **option)
    with pytest.raises(ValueError, match=f"DDIM CFG.. has guidance of its own: leave out `{name}`"):
        sd.txt2img("a cat", sampler="ddim_cfgpp", steps=2, **option)


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
