"""The workloads do what the commands do, at the known cost of Stable Diffusion 1.x."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from random_checkpoint import SMALL

import ldm_lite
from ldm_lite.bench.backends import InProcessBackend, Unavailable
from ldm_lite.bench.checkpoints import open_model, random_checkpoint
from ldm_lite.bench.comparison import Comparison
from ldm_lite.bench.configurations import CONFIGURATIONS, OURS, REFERENCE, Models, shared_copy
from ldm_lite.bench.inference import OurWorkload
from ldm_lite.bench.workload import SECTIONS, TRAIN, Cell, Setting, cost, inputs
from ldm_lite.checkpoint.model import Model
from ldm_lite.runtime.compile import compiled_step
from ldm_lite.zoo.families import SD1

CPU = torch.device("cpu")
SETTING = Setting(height=64, width=64, prompt="a", sampler="plms", steps=3, n_iter=2, scale=7.5, seed=1)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(random_checkpoint("small", SMALL), CPU)


def test_a_random_checkpoint_is_one_from_a_file(models: Models, small_path: str) -> None:
    ours, file = models.loaded(), ldm_lite.load(small_path, device="cpu")
    assert ours.family == file.family == SMALL
    for role, network in file.networks.items():
        other = ours.networks[role].state_dict()
        assert all(torch.equal(value, other[key]) for key, value in network.state_dict().items())
    with pytest.raises(ValueError, match="unknown size 'sd9': wanted bundled, or one of sd1"):
        open_model("sd9", None)


def test_the_step_that_is_compared_is_the_mean_of_both_halves(models: Models) -> None:
    pipe = models.loaded()
    given = inputs(pipe.family, SETTING, 2)
    t = torch.full((2,), 999.0)
    halves = [pipe.unet(given.noise, t, context) for context in (given.uncond, given.context)]
    result = OurWorkload(pipe, SETTING, None).job("step", 2).check()
    assert torch.allclose(result, torch.stack(halves).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("section", [*SECTIONS, "img2img", "inpaint"])
def test_every_section_runs_and_does_not_depend_on_the_batch(models: Models, section: str) -> None:
    ours = OurWorkload(models.loaded(), SETTING, None)
    job = ours.job(section, 2)
    job.run(1)
    result = job.check()
    assert len(result) == 2
    assert torch.isfinite(result).all()
    if section == "inpaint":  # the left half stays, up to the autoencoder's loss
        kept = ours.model.vae.decode(ours.model.vae.encode(inputs(SMALL, SETTING, 2).image)[0]).clamp(-1, 1)
        assert (result - kept)[..., :16].abs().mean() < (result - kept)[..., -16:].abs().mean()
    if section == "decode":
        assert result.shape == (2, 3, 64, 64)
        given = inputs(SMALL, SETTING, 2).noise
        assert torch.allclose(result, ours.model.vae.decode(given).clamp(-1, 1), atol=1e-5)


@pytest.mark.slow
def test_the_work_of_stable_diffusion_is_what_was_counted() -> None:
    setting = replace(SETTING, height=512, width=512)
    assert cost(SD1, setting, Cell("step", "fp32", 1)) == (2 * 803_273_441_280, 1)
    assert cost(SD1, setting, Cell("decode", "fp32", 2)) == (2 * 2_514_518_933_504, 2)
    assert cost(SD1, setting, Cell("text", "fp32", 1)) == (13_298_503_680, 1)
    calls = 4 * 2 * 803_273_441_280 + 2_514_518_933_504 + 2 * 13_298_503_680  # 3 steps of PLMS are 4 calls
    assert cost(SD1, setting, Cell("image", "fp32", 2)) == (2 * 2 * calls, 4)
    flops, items = cost(SD1, setting, Cell(TRAIN, "fp32", 4))  # forward and backward are three forwards
    assert flops == pytest.approx(4 * 2_406_773_063_680, rel=2e-3)
    assert items == 4


@pytest.mark.slow
def test_a_perturbed_network_fails_the_gate(models: Models) -> None:
    def backend(name: str, change: Callable[[Model], None]) -> InProcessBackend:
        workload = models.workload(OURS, SETTING, "fp32")
        change(workload.model)
        return InProcessBackend(name, CPU, lambda dtype: workload)

    def perturb(model: Model) -> None:
        layer = model.unet.input_blocks[0][0]
        layer.weight = torch.nn.Parameter(layer.weight * 1.01, requires_grad=False)  # its own: weights are shared

    backends = [backend("right", lambda model: None), backend("wrong", perturb)]
    reference = models.backend("reference", REFERENCE, SETTING)
    comparison = Comparison(reference, backends, lambda cell: cost(SMALL, SETTING, cell), 2, 0.0, None)
    timings = comparison.measure(Cell("step", "fp32", 1), 0.0).timings
    assert timings["right"].passes
    assert timings["wrong"].passes is False


def test_what_could_not_be_compiled_is_not_timed_as_if_it_were(models: Models) -> None:
    workload = models.workload(replace(OURS, compile="step"), SETTING, "fp32")
    broken = compiled_step("step", workload.model.unet, backend="no such one")
    workload = replace(workload, model=replace(workload.model, step=broken))
    made = InProcessBackend("compiled", CPU, lambda dtype: workload)
    with pytest.raises(Unavailable, match="could not be compiled"):
        made.first(Cell("step", "fp32", 1))


def test_configurations_share_weights_and_not_settings(models: Models) -> None:
    pipe = models.loaded()
    copy = shared_copy(pipe.unet)
    assert all(a is b for a, b in zip(copy.parameters(), pipe.unet.parameters(), strict=True))
    assert copy.input_blocks[0] is not pipe.unet.input_blocks[0]
    assert list(CONFIGURATIONS)[:5] == ["original", "original-efficient", "math", "efficient", "compiled"]


def test_half_precision_of_the_original_is_autocast(models: Models) -> None:
    original = models.workload(CONFIGURATIONS["original"], SETTING, "bf16")
    ours = models.workload(CONFIGURATIONS["math"], SETTING, "bf16")
    assert original.model.dtype == torch.float32
    assert all(each.requires_grad and each.is_leaf and not each._is_view() for each in original.model.unet.parameters())
    assert not any(each.requires_grad for each in models.loaded().unet.parameters())
    assert ours.model.dtype == torch.bfloat16
    result = original.job("step", 1).check()
    exact = OurWorkload(models.loaded(), SETTING, None).job("step", 1).check()
    error = float((result - exact).norm() / exact.norm())
    assert 1e-4 < error < 5e-2  # computed in bfloat16, and right
