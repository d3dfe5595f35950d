"""The workloads do what the commands do, at the known cost of Stable Diffusion 1.x."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_checkpoint import SMALL

import ldm_lite
from ldm_lite.bench.benchmark import Comparison
from ldm_lite.bench.checkpoints import open_model, random_checkpoint
from ldm_lite.bench.options import SECTIONS, BenchOptions
from ldm_lite.bench.ours import CONFIGURATIONS, REFERENCE, OurWorkload, configuration
from ldm_lite.bench.work import Cell, Unavailable, cost, inputs
from ldm_lite.bench.worker import InProcessBackend
from ldm_lite.families.sd1 import SD1
from ldm_lite.runtime.compile import compiled_step

CPU = torch.device("cpu")
OPTIONS = BenchOptions(device="cpu", height=64, width=64, prompt="a", steps=3)


@pytest.fixture
def options(small_path: Path) -> BenchOptions:
    return replace(OPTIONS, ckpt=str(small_path))


def test_a_random_checkpoint_is_one_from_a_file(small_path: str) -> None:
    ours, file = (ldm_lite.load(source, device="cpu") for source in (random_checkpoint("small", SMALL), small_path))
    assert ours.family == file.family == SMALL
    for role, network in file.networks.items():
        weights = ours.networks[role].state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())
    with pytest.raises(ValueError, match="unknown size 'sd9': expected bundled, or one of sd1"):
        open_model("sd9", None)


def test_random_weights_do_not_depend_on_the_order_in_which_they_are_read() -> None:
    forwards, backwards = random_checkpoint("small", SMALL), random_checkpoint("small", SMALL)
    weights = dict(forwards)
    assert all(torch.equal(backwards[key], weights[key]) for key in reversed(list(backwards)))
    assert len({float(value.sum()) for value in weights.values()}) == len(weights)


@pytest.mark.parametrize("prediction", ["eps", "v"])
@torch.no_grad()
def test_the_step_that_is_compared_is_the_mean_of_both_halves(prediction: str, options: BenchOptions) -> None:
    workload = OurWorkload(CONFIGURATIONS["efficient"], options, "fp32")
    workload.pipe = pipe = ldm_lite.load(options.ckpt, device="cpu", prediction=prediction)
    inputs = workload.inputs(2)
    t = torch.full((2,), 999.0)
    halves = [pipe.unet(inputs.noise, t, context) for context in (inputs.uncond, inputs.context)]
    assert torch.allclose(workload.prediction(inputs), torch.stack(halves).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("section", SECTIONS)
@torch.no_grad()
def test_every_section_runs_and_does_not_depend_on_the_batch(section: str, options: BenchOptions) -> None:
    ours = OurWorkload(CONFIGURATIONS["efficient"], options, "fp32")
    backend = InProcessBackend("ours", CPU, lambda dtype: ours)
    result = backend.first(Cell(section, "fp32", 2)).result
    assert backend.seconds(Cell(section, "fp32", 2), 1) > 0
    assert len(result) == 2
    assert torch.isfinite(result).all()
    if section == "decode":
        assert result.shape == (2, 3, 64, 64)
        assert torch.allclose(result, ours.pipe.vae.decode(inputs(SMALL, OPTIONS, 2).noise).clamp(-1, 1), atol=1e-5)


def test_whole_images_are_those_of_txt2img(options: BenchOptions) -> None:
    """The last of n_iter batches, with the seeds that follow each other."""
    ours = OurWorkload(CONFIGURATIONS["efficient"], options, "fp32")
    images = ours.image(ours.inputs(2))
    last = ours.pipe.txt2img("a", seed=4, sampler="plms", steps=3, scale=7.5, n_iter=1, batch_size=1, output="tensor")
    assert torch.allclose(images[1], last[0], atol=1e-4)


@pytest.mark.slow
def test_the_work_of_stable_diffusion_is_what_was_counted() -> None:
    setting = replace(OPTIONS, height=512, width=512)
    assert cost(SD1, setting, Cell("step", "fp32", 1)) == (2 * 803_273_441_280, 1)
    assert cost(SD1, setting, Cell("decode", "fp32", 2)) == (2 * 2_514_518_933_504, 2)
    calls = 4 * 2 * 803_273_441_280 + 2_514_518_933_504 + 2 * 13_298_503_680  # 3 steps of PLMS are 4 calls
    assert cost(SD1, setting, Cell("image", "fp32", 2)) == (2 * 2 * calls, 4)


@pytest.mark.slow
def test_a_perturbed_network_fails_the_gate(options: BenchOptions) -> None:
    def backend(name: str, change: Callable[[OurWorkload], None]) -> InProcessBackend:
        workload = OurWorkload(CONFIGURATIONS["efficient"], options, "fp32")
        change(workload)
        return InProcessBackend(name, CPU, lambda dtype: workload)

    def perturb(workload: OurWorkload) -> None:
        layer = workload.pipe.unet.input_blocks[0][0]
        layer.weight = torch.nn.Parameter(layer.weight * 1.01, requires_grad=False)

    backends = [backend("right", lambda workload: None), backend("wrong", perturb)]
    reference = InProcessBackend("reference", CPU, lambda dtype: OurWorkload(REFERENCE, options, dtype))
    comparison = Comparison(reference, backends, lambda cell: cost(SMALL, options, cell), 2, 0.0, None)
    timings = comparison.measure(Cell("step", "fp32", 1), 0.0).timings
    assert timings["right"].passes
    assert timings["wrong"].passes is False


def test_what_could_not_be_compiled_is_not_timed_as_if_it_were(options: BenchOptions) -> None:
    workload = OurWorkload(CONFIGURATIONS["compiled"], options, "fp32")
    broken = compiled_step("step", workload.pipe.unet, backend="no such one")
    workload.pipe = replace(workload.pipe, run_row=broken)
    backend = InProcessBackend("compiled", CPU, lambda dtype: workload)
    with pytest.raises(Unavailable, match="could not be compiled"):
        backend.first(Cell("step", "fp32", 1))


def test_the_first_five_are_the_articles_and_a_plus_changes_one() -> None:
    assert tuple(CONFIGURATIONS)[:5] == BenchOptions().configs
    changed = configuration("max+pdl+cudnn")
    assert changed == replace(
        CONFIGURATIONS["max"], title="ours, everything, pdl, cudnn", kernels="qkv,pdl", attention="cudnn"
    )
    for name in ("max+fast", "original+pdl", "+pdl"):
        with pytest.raises(ValueError, match=r"unknown '.*\+.*' in `configs`: expected some of original, .*\+pdl"):
            configuration(name)


def test_half_precision_of_the_original_is_autocast(options: BenchOptions) -> None:
    original, ours, exact = (
        OurWorkload(row, options, dtype)
        for row, dtype in (
            (CONFIGURATIONS["original"], "bf16"),
            (CONFIGURATIONS["math"], "bf16"),
            (REFERENCE, "fp32"),
        )
    )
    assert original.pipe.dtype == torch.float32
    assert all(
        parameter.requires_grad and parameter.is_leaf and not parameter._is_view()
        for parameter in original.pipe.unet.parameters()
    )
    assert ours.pipe.dtype == torch.bfloat16
    result = original.prediction(original.inputs(1))
    wanted = exact.prediction(exact.inputs(1))
    error = float((result - wanted).norm() / wanted.norm())
    assert 1e-4 < error < 5e-2  # computed in bfloat16, and right
