"""The compiled step: how many graphs it needs, on a UNet with every kind of layer, and on the bundled one.

With fixed shapes: one graph for every row of every sampler, step count, eta, spacing and guidance scale.  Turning
guidance, rescale or thresholding on is another graph each, since the code differs.
With the batch, height and width marked by mark_dynamic: one graph for all batches and image sizes, and one more for a
batch of one, since the compiler takes a size of 1 for a constant.  (On a CPU, convolution itself tells a UNet batch of
16 or more from smaller ones.)
Not promised: dynamic=True.  It makes the sizes and offsets of the rows symbolic too, takes those that happen to equal a
size of the latents for the same, and compiles again whenever that ends.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from random_checkpoint import SMALL
from steps import guidance
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import ldm_lite
from ldm_lite.core.denoise import run_row
from ldm_lite.core.plan import device_rows
from ldm_lite.diffusion.names import has, named_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["small", pytest.param("bundled", marks=pytest.mark.slow)])
def pipe(request: pytest.FixtureRequest) -> Any:
    """What these tests read of a pipeline: the spec of a UNet, the UNet and the schedule."""
    if request.param == "bundled":
        return ldm_lite.load(device="cpu")
    spec = replace(
        SMALL.unet, transformer_depth=(0, 0)
    )  # a transformer in the middle; the fewest layers compile soonest
    schedule = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
    return SimpleNamespace(family=SimpleNamespace(unet=spec), unet=toy.network(spec), schedule=schedule)


@pytest.fixture(autouse=True)
def _no_grad(fresh_compiler: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def inputs(pipe: Any, seed: int, batch: int, h: int, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """Registers, noise and text of a guided batch."""
    spec = pipe.family.unet
    shape = (batch, spec.in_channels, h, w)
    context = toy.normal(seed, 2 * batch, 77, spec.context_dim)
    return toy.normal(seed + 1, NUM_REGISTERS, *shape), toy.normal(seed + 2, *shape), context


@pytest.mark.slow
def test_one_graph_serves_every_row_sampler_count_and_scale(pipe: Any) -> None:
    counter = CompileCounter()
    compiled = torch.compile(run_row, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, name in enumerate(SAMPLERS):
            eta = 0.5 if has(name, "eta") else None
            plan = named_plan(name, pipe.schedule, 3 + seed, spacing=(None, "karras")[seed % 2], eta=eta)
            table = device_rows(plan, CPU)
            registers, noise, text = inputs(pipe, seed, 2, 4, 4)
            if seed == 0:  # as CompiledStep does: the first plain step lays weights out
                run_row(pipe.unet, registers, table[0], noise, *guidance(text, 0.0))
            for i in range(len(table)) if name in ("plms", "unipc") else (0, len(table) - 1):
                out = compiled(pipe.unet, registers, table[i], noise, *guidance(text, 0.0 + seed))
            if seed % 6 == 0:
                wanted = run_row(pipe.unet, registers, table[i], noise, *guidance(text, 0.0 + seed))
                torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_every_kind_of_guidance_is_one_graph() -> None:
    """On the toy denoiser, which is quick to compile."""
    counter = CompileCounter()
    compiled = torch.compile(run_row, fullgraph=True, backend=counter)
    registers, noise, context = (
        toy.normal(0, NUM_REGISTERS, *toy.SHAPE),
        toy.normal(1, *toy.SHAPE),
        toy.normal(2, 4, 1, 1),
    )
    schedule = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
    table = device_rows(named_plan("ddim", schedule, 10), CPU)
    kinds = [((None,), (None,)), ((7.5,), (2.0,)), ((7.5, 0.7), (3.0, 0.5)), ((7.5, 0.7, 0.9), (5.0, 0.1, 0.99))]
    if torch.__version__.startswith("2.6."):  # cannot compile a quantile whose place is a tensor
        kinds.pop()
    for count, values in enumerate(kinds, start=1):
        for i, value in enumerate(values):
            arguments = (registers, table[i], noise, *guidance(context if value[0] else context[:2], *value))
            out = compiled(toy.denoiser, *arguments)
            torch.testing.assert_close(out, run_row(toy.denoiser, *arguments), rtol=1e-5, atol=1e-5)
        assert counter.frame_count == count


@pytest.mark.slow
@pytest.mark.parametrize("pipe", ["small"], indirect=True)
def test_marked_sizes_need_one_graph_and_a_batch_of_one_another(pipe: Any) -> None:
    counter = CompileCounter()
    compiled = torch.compile(run_row, fullgraph=True, backend=counter)
    table = device_rows(named_plan("dpmpp_2m", pipe.schedule, 10), CPU)
    sizes = [(batch, h, w) for batches in ((2, 3, 4), (1,)) for h, w in ((8, 8), (8, 12)) for batch in batches]
    graphs = []
    for i, (batch, h, w) in enumerate(sizes):
        registers, noise, text = inputs(pipe, i, batch, h, w)
        guided, *how = guidance(text, 7.5)
        for tensor, axes in ((registers, (1, 3, 4)), (noise, (0, 2, 3)), (guided.conditioning["context"], (0,))):
            for axis in axes if batch > 1 else axes[1:]:
                torch._dynamo.mark_dynamic(tensor, axis)
        compiled(pipe.unet, registers, table[i], noise, guided, *how)
        graphs.append(counter.frame_count)
    assert graphs == [1] * 6 + [2] * 2
