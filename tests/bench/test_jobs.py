"""What is measured is the work that the commands do, and its amount is what is known of Stable Diffusion 1.x."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from random_checkpoint import SMALL

import ldm_lite
from ldm_lite.bench.configurations import CONFIGURATIONS, OURS, REFERENCE, Models, sharing
from ldm_lite.bench.contender import Unable
from ldm_lite.bench.jobs import SECTIONS, Cell, Ours, Setting, inputs, work
from ldm_lite.bench.run import Course, measure
from ldm_lite.bench.subjects import random_checkpoint, subject
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.compile import compiled_step
from ldm_lite.zoo.families import SD1

CPU = torch.device("cpu")
SETTING = Setting(height=64, width=64, prompt="a", sampler="plms", steps=3, n_iter=2, scale=7.5, seed=1)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(random_checkpoint("small", SMALL), CPU)


def test_a_random_checkpoint_is_one_from_a_file(models: Models, small_path: str) -> None:
    ours, file = models.loaded(torch.float32), ldm_lite.load(small_path, device="cpu")
    assert ours.family == file.family == SMALL
    for role, network in file.networks.items():
        other = ours.networks[role].state_dict()
        assert all(torch.equal(value, other[key]) for key, value in network.state_dict().items())
    with pytest.raises(ValueError, match="unknown size 'sd9': wanted bundled, or one of sd1"):
        subject("sd9", None)


def test_the_step_that_is_compared_is_the_mean_of_both_halves(models: Models) -> None:
    pipe = models.loaded(torch.float32)
    given = inputs(pipe.family, SETTING, 2)
    t = torch.full((2,), 999.0)
    halves = [pipe.unet(given.noise, t, context) for context in (given.uncond, given.context)]
    result = Ours(pipe, SETTING, None).job("step", 2).check()
    assert torch.allclose(result, torch.stack(halves).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("section", [*SECTIONS, "img2img", "inpaint"])
def test_every_section_runs_and_does_not_depend_on_the_batch(models: Models, section: str) -> None:
    ours = Ours(models.loaded(torch.float32), SETTING, None)
    job = ours.job(section, 2)
    job.run(1)
    result = job.check()
    assert len(result) == 2
    assert torch.isfinite(result).all()
    if section == "inpaint":  # half of the picture stays, as far as the autoencoder keeps it
        kept = ours.pipe.vae.decode(ours.pipe.vae.encode(inputs(SMALL, SETTING, 2).picture)[0]).clamp(-1, 1)
        assert (result - kept)[..., :16].abs().mean() < (result - kept)[..., -16:].abs().mean()
    if section == "decode":
        assert result.shape == (2, 3, 64, 64)
        given = inputs(SMALL, SETTING, 2).noise
        assert torch.allclose(result, ours.pipe.vae.decode(given).clamp(-1, 1), atol=1e-5)


def test_the_work_of_stable_diffusion_is_what_was_counted() -> None:
    setting = replace(SETTING, height=512, width=512)
    assert work(SD1, setting, Cell("step", "fp32", 1)) == (2 * 803_273_441_280, 1)
    assert work(SD1, setting, Cell("decode", "fp32", 2)) == (2 * 2_514_518_933_504, 2)
    assert work(SD1, setting, Cell("text", "fp32", 1)) == (13_298_503_680, 1)
    calls = 4 * 2 * 803_273_441_280 + 2_514_518_933_504 + 2 * 13_298_503_680  # 3 steps of PLMS are 4 calls
    assert work(SD1, setting, Cell("image", "fp32", 2)) == (2 * 2 * calls, 4)


def test_a_perturbed_network_fails_the_gate(models: Models) -> None:
    def contender(name: str, change: Callable[[Pipeline], None]) -> object:
        made = models.contender(name, OURS, SETTING)
        jobs = made._make("fp32")
        assert isinstance(jobs, Ours)
        change(jobs.pipe)
        made._jobs["fp32"] = jobs
        return made

    def perturb(pipe: Pipeline) -> None:
        layer = pipe.unet.input_blocks[0][0]
        layer.weight = torch.nn.Parameter(layer.weight * 1.01, requires_grad=False)  # its own: weights are shared

    entrants = [contender("right", lambda pipe: None), contender("wrong", perturb)]
    cell = Cell("step", "fp32", 1)
    course = Course(models.contender("reference", REFERENCE, SETTING), entrants, 2, 0.0, None)
    timings = measure(cell, work(SMALL, SETTING, cell), course, 0.0).timings
    assert timings["right"].passes
    assert timings["wrong"].passes is False


def test_what_could_not_be_compiled_is_not_timed_as_if_it_were(models: Models) -> None:
    made = models.contender("compiled", replace(OURS, compile="step"), SETTING)
    jobs = made._make("fp32")
    assert isinstance(jobs, Ours)
    broken = compiled_step("step", jobs.pipe.unet, backend="no such one")
    made._jobs["fp32"] = Ours(replace(jobs.pipe, step=broken), SETTING, None)
    with pytest.raises(Unable, match="could not be compiled"):
        made.first(Cell("step", "fp32", 1))


def test_configurations_share_weights_and_not_settings(models: Models) -> None:
    pipe = models.loaded(torch.float32)
    copy = sharing(pipe.unet)
    assert all(a is b for a, b in zip(copy.parameters(), pipe.unet.parameters(), strict=True))
    assert copy.input_blocks[0] is not pipe.unet.input_blocks[0]
    assert list(CONFIGURATIONS)[:5] == ["original", "original-efficient", "math", "efficient", "compiled"]


def test_half_precision_of_the_original_is_autocast(models: Models) -> None:
    original = models.contender("original", CONFIGURATIONS["original"], SETTING)._make("bf16")
    ours = models.contender("math", CONFIGURATIONS["math"], SETTING)._make("bf16")
    assert isinstance(original, Ours)
    assert isinstance(ours, Ours)
    assert original.pipe.dtype == torch.float32
    assert all(each.requires_grad and each.is_leaf and not each._is_view() for each in original.pipe.unet.parameters())
    assert not any(each.requires_grad for each in models.loaded(torch.float32).unet.parameters())
    assert ours.pipe.dtype == torch.bfloat16
    result = original.job("step", 1).check()
    exact = Ours(models.loaded(torch.float32), SETTING, None).job("step", 1).check()
    error = float((result - exact).norm() / exact.norm())
    assert 1e-4 < error < 5e-2  # computed in bfloat16, and right
