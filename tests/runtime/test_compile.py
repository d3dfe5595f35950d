"""Compilation tiers: one graph for everything that a job can vary, and plain steps if compilation fails."""

import contextlib
import copy
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from pretended_cuda import PretendedCuda
from random_checkpoint import SMALL
from safetensors.torch import save_file
from steps import guidance
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ldm_lite
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import LoadOptions, RuntimeOptions
from ldm_lite.core.denoise import Branch, Combine, Inputs, Outputs, run_plan, run_row, weighted
from ldm_lite.core.plan import device_rows
from ldm_lite.core.unet import ResBlock, SpatialTransformer
from ldm_lite.diffusion.adjustments import rescaling
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import NUM_REGISTERS
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas
from ldm_lite.features.apg import read_projection
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet
from ldm_lite.models.unet import LDMUNet, LDMUNetSpec
from ldm_lite.runtime import attention, cpu, cuda_graphs, joined, setup
from ldm_lite.runtime import compile as tiers
from ldm_lite.runtime.compile import TIERS, CompiledStep, compiled_step, regions
from ldm_lite.runtime.patching import kernel, patch, unpatch
from ldm_lite.runtime.shortened import Run, Shortcuts

CPU = torch.device("cpu")
MIDDLE = replace(SMALL.unet, transformer_depth=(0, 0))  # a transformer in the middle
PLAIN = replace(  # quick to compile
    SMALL.unet,
    channel_mult=(1,),
    num_res_blocks=(1,),
    transformer_depth=(0,),
    cross_only=(False,),
    middle_depth=0,
)
ATTENDING = replace(PLAIN, transformer_depth=(1,), middle_depth=1)  # four transformers of one kind
SCHEDULE = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")


@pytest.fixture(autouse=True)
def _no_grad(fresh_compiler: None) -> Iterator[None]:
    with torch.no_grad():
        yield


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x).tanh()


class Tiny(nn.Module):
    """What is quick to compile, and reads all that a UNet reads."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x + t[:, None, None, None] / 1000 + context.mean((1, 2))[:, None, None, None]


@pytest.fixture
def tiny() -> nn.Module:
    return toy.fill(Tiny())


def arguments(seed: int, batch: int, h: int, w: int, tokens: int = 5, sampler: str = "dpmpp_2m") -> list[object]:
    """A row of a guided step with everything that varies between jobs."""
    registers, noise = toy.normal(seed, NUM_REGISTERS, batch, 4, h, w), toy.normal(seed + 1, batch, 4, h, w)
    table = device_rows(named_plan(sampler, SCHEDULE, 5 + seed), CPU)
    context = toy.normal(seed + 2, 2 * batch, tokens, SMALL.unet.context_dim)
    return [
        registers,
        table[seed % len(table)],
        noise,
        *guidance(context, 2.0 + seed),
    ]


def with_inputs(args: list[Any], control: ControlInputs | None, **more: Tensor | None) -> list[Any]:
    """The same arguments with further conditioning, and with what controls read."""
    conditioning = {**args[3].conditioning, **{name: part for name, part in more.items() if part is not None}}
    guided = args[3]._replace(conditioning=conditioning)
    return [*args[:3], guided, *args[4:], {"control": control}]


VARIED = [
    arguments(0, 2, 8, 8),
    arguments(1, 2, 8, 12, sampler="ddim"),
    arguments(2, 3, 12, 8, tokens=10),
    arguments(3, 4, 20, 28, sampler="plms"),
]
EIGHTS = [  # the sizes that images usually have
    arguments(0, 2, 16, 16),
    arguments(1, 2, 16, 24, sampler="ddim"),
    arguments(2, 3, 40, 16, tokens=10),
    arguments(3, 4, 32, 32, sampler="plms"),
]


@pytest.mark.parametrize("sizes", [VARIED, EIGHTS], ids=["any", "eights"])
@pytest.mark.parametrize("kind", ["tiny", pytest.param("unet", marks=pytest.mark.slow)])
def test_step_is_one_graph_for_batches_sizes_prompts_and_samplers(
    kind: str, sizes: list[list[object]], tiny: nn.Module
) -> None:
    network = tiny if kind == "tiny" else toy.network(MIDDLE)
    counter = CompileCounter()
    step = CompiledStep("step", network, counter)  # type: ignore[arg-type]
    for size in sizes:
        torch.testing.assert_close(step(network, *size), run_row(network, *size), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert counter.frame_count == 1
    if kind == "tiny":  # the compiler takes a size of one for a constant
        for i in range(2):
            least = min(sizes[0][0].shape[-1], sizes[0][0].shape[-2])  # type: ignore[attr-defined]
            step(network, *arguments(i, 1, least, least + i * least // 2))
        assert counter.frame_count == 2


def test_weights_that_plain_steps_lay_out_do_not_compile_again() -> None:
    """Compiled code checks how weights lie."""
    unet, counter = toy.network(replace(PLAIN, model_channels=128)).requires_grad_(False), CompileCounter()
    cpu.use(unet, owns_weights=True)
    step = CompiledStep("step", unet, counter)  # type: ignore[arg-type]
    args = arguments(0, 2, 8, 8)
    step(unet, *args)
    assert counter.frame_count == 1
    run_row(unet, *args)  # type: ignore[arg-type]
    step(unet, *args)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_the_compiler_knows_that_sizes_can_be_halved() -> None:
    """Where they are multiples of 8, no size within the UNet is rounded."""
    three = {"channel_mult": (1, 1, 1), "num_res_blocks": (1, 1, 1), "transformer_depth": (0, 0, 0)}
    unet = toy.network(replace(PLAIN, **three, cross_only=(False, False, False)))  # type: ignore[arg-type]
    shapes: list[str] = []

    def backend(module: Any, inputs: object) -> Any:
        values = [node.meta.get("example_value") for node in module.graph.nodes]
        shapes.append(" ".join(str(tuple(value.shape)) for value in values if isinstance(value, Tensor)))
        return module.forward

    for args in (EIGHTS[1], VARIED[1]):
        CompiledStep("step", unet, backend)(unet, *args)  # type: ignore[arg-type]
    assert ["//" in text for text in shapes] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [replace(PLAIN, vector_dim=24), MIDDLE],
    ids=["plain", "unet"],
)
def test_a_step_with_controls_is_one_graph_for_weights_steps_and_images(spec: LDMUNetSpec) -> None:
    """Also over jobs, each of which has a network of its own around the same UNet."""
    shares = (2,) if spec.vector_dim else (1, 2)
    unet, nets = toy.network(spec), [toy.fill(ControlNet(spec), f"{i}.") for i in range(len(shares))]
    counter = CompileCounter()
    step = CompiledStep("step", unet, counter)  # type: ignore[arg-type]
    num = 2 * len(spec.channel_mult) + 1
    for varied, weights in zip(VARIED[:3], ((1.0, 0.5), (0.0, -1.0), (0.7, 0.0)), strict=True):
        args: list[Any] = list(varied)
        h, w = args[0].shape[3:]
        hints = [
            ControlInput(toy.normal(share, 1, spec.model_channels, h, w), torch.full((num,), weight), share, pool=False)
            for weight, share in zip(weights, shares, strict=False)
        ]
        features = (None, toy.normal(3, 1, spec.model_channels, h, w), *[None] * (num - 2))
        y = toy.normal(4, len(args[3].conditioning["context"]), spec.vector_dim) if spec.vector_dim else None
        args = with_inputs(args, ControlInputs(tuple(hints), features), y=y)
        steered = ControlledUNet(unet, nets)  # type: ignore[arg-type]
        torch.testing.assert_close(step(steered, *args), run_row(steered, *args), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_captured_steps_are_those_of_one_network_and_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    unet: Any = toy.network(PLAIN)
    nets: list[Any] = [toy.fill(ControlNet(PLAIN), f"{i}.") for i in range(2)]
    graphs, outs = cuda_graphs.Graphs(run_row), []
    for net in nets:  # of the same shapes, around the same UNet
        steered = ControlledUNet(unet, [net])
        for weight in (1.0, 0.0, -0.5):
            hint = ControlInput(toy.normal(5, 1, 32, 8, 8), torch.full((3,), weight), 1, pool=False)
            args = with_inputs(arguments(0, 2, 8, 8), ControlInputs((hint,), None))
            outs.append(graphs(steered, *args))
            assert torch.equal(outs[-1], run_row(steered, *args))
    assert cuda.log.count("capture") == 2
    assert torch.equal(outs[1], outs[4])
    assert not torch.equal(outs[0], outs[3])
    again = ControlledUNet(unet, [net])  # as the next run makes one
    assert torch.equal(graphs(again, *args), run_row(again, *args))
    assert cuda.log.count("capture") == 2
    del steered, again, net
    nets.pop()
    gc.collect()
    another: Any = ControlledUNet(unet, [toy.fill(ControlNet(PLAIN), "2.")])
    assert torch.equal(graphs(another, *args), run_row(another, *args))
    [held] = graphs._graphs.values()
    assert (cuda.log.count("capture"), len(held)) == (3, 2)  # that of the deleted net is gone
    del another, unet
    nets.clear()
    gc.collect()
    assert len(graphs._graphs) == 0


@pytest.mark.slow
def test_a_session_of_many_jobs_compiles_six_times(small_path: Path, tmp_path: Path) -> None:
    """Once for a batch of one, and once for all larger ones; for one branch, rescaled guidance, and controls; sizes,
    prompts, samplers, LoRAs, the layout of an encoded image and inference mode need no code of their own."""
    pipe = ldm_lite.load(small_path, device="cpu", kernels="plain")
    counter, photo = CompileCounter(), toy.photo(128, 128)
    fast = replace(pipe, run_row=CompiledStep("step", pipe.unet, counter))  # type: ignore[arg-type]
    tensors = {}
    for name, layer in pipe.unet.named_modules():
        if name.endswith(("attn2.to_q", "attn2.to_v")):
            (rows, columns), key = layer.weight.shape, "lora_unet_" + name.replace(".", "_")
            tensors[f"{key}.lora_up.weight"] = toy.normal(1, rows, 2)
            tensors[f"{key}.lora_down.weight"] = toy.normal(2, 2, columns)
    save_file(tensors, tmp_path / "lora.safetensors")
    net = {f"control_model.{key}": value for key, value in toy.control(SMALL.unet).items()}
    save_file(net, tmp_path / "net.safetensors")
    Image.fromarray(photo).save(tmp_path / "photo.png")
    control = [f"{tmp_path / 'net.safetensors'}:{tmp_path / 'photo.png'}:0.7"]
    counts = {}

    def run(title: str, task: str = "txt2img", *images: Any, **options: Any) -> None:
        before = counter.frame_count
        getattr(fast, task)("a", *images, **{"steps": 4, "width": 128, "height": 128} | options)
        counts[title] = counter.frame_count - before

    run("one image")
    run("another sampler", steps=5, sampler="euler_a")
    run("batch 4", batch_size=4)
    run("batch 2", batch_size=2)
    run("another size", width=192)
    run("another size, batch 4", width=192, batch_size=4)
    run("one branch", scale=1.0)
    run("rescaled", guidance_rescale=0.7)
    run("scheduled", guidance_schedule="cosine")
    run("img2img", "img2img", photo)
    run("inpaint", "inpaint", photo, np.full(photo.shape[:2], 255, np.uint8))
    with fast.lora(tmp_path / "lora.safetensors", 0.8):
        run("LoRA")
    run("control", control=control)
    run("control again", control=control)
    run("control, batch 4", control=control, batch_size=4)
    with torch.inference_mode():
        run("inference mode")
        run("inference mode, batch 4", batch_size=4)
    run("the first again")
    assert fast.run_row.failure is None  # type: ignore[attr-defined]
    assert sum(counts.values()) <= 6, counts


def test_only_what_has_changed_is_copied_into_a_captured_steps_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, copy_all = [0, 0], torch._foreach_copy_

    def counted(into: list[Tensor], values: list[Tensor]) -> None:
        for buffer in into:
            counts[next(i for i, kept_buffer in enumerate(buffers) if kept_buffer is buffer)] += 1
        copy_all(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)

    class Sum:
        def replay(self) -> None:
            torch.add(*buffers, out=out)

    values = [torch.zeros(2), torch.zeros(2)]
    buffers, out = tuple(value.clone() for value in values), torch.zeros(2)
    captured = cuda_graphs.Captured(Sum(), buffers, out)

    def run() -> tuple[float, int, int]:
        return float(captured.replay(values)[0]), counts[0], counts[1]

    assert [run(), run()] == [(0, 1, 1), (0, 1, 1)]
    values[0] += 1  # the same tensor with another value
    assert run() == (1, 2, 1)
    values[1][0] = 3  # by a view
    assert run() == (4, 2, 2)
    values[0] = values[0].clone()  # the same value in another tensor
    assert [run(), run()] == [(4, 3, 2), (4, 3, 2)]
    values[0] = torch.ones(2) * 5  # where the last one was, perhaps
    assert run() == (8, 4, 2)
    with torch.inference_mode():  # there versions are not counted
        values[1] = torch.ones(2)
        run()
        values[1] += 1
        assert run()[0] == 7


def test_a_replay_waits_for_the_last_result_to_be_copied(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    """Two threads compute on streams of their own, and share the buffers."""
    cuda = PretendedCuda(monkeypatch)
    graphs = cuda_graphs.Graphs(run_row)
    graphs(tiny, *VARIED[0])
    cuda.current = cuda.Stream("another thread")
    graphs(tiny, *VARIED[0])
    assert cuda.log == [
        *("clear", "capture", "clear"),  # the workspace of the matmuls belongs to the graph
        *("outside waits for event 1", "event 1 recorded"),
        *("another thread waits for event 1", "event 1 recorded"),
    ]


def test_max_measures_cudnns_convolutions(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    """In the thread that captures, from its warm-up on, and in no other tier: cuDNN keeps choices by threads."""
    PretendedCuda(monkeypatch)
    kept = [10]  # a torch without cuDNN keeps no limit
    limit = property(lambda cudnn: kept[-1], lambda cudnn, value: kept.append(value))
    monkeypatch.setattr(type(torch.backends.cudnn), "benchmark_limit", limit)
    seen: list[tuple[bool, bool]] = []

    def step(*args: Any) -> Tensor:
        seen.append((torch.backends.cudnn.benchmark, threading.current_thread() is threading.main_thread()))
        return run_row(*args)

    for measured in (False, True):
        cuda_graphs.Graphs(step, measured)(tiny, *VARIED[0])
    assert seen == [(False, True)] * 4 + [(True, False)] * 2
    assert not torch.backends.cudnn.benchmark
    assert kept == [10, 0, 10], "all algorithms, in this block only"


def test_max_does_not_tune_kernels_one_after_the_other() -> None:
    """For minutes; torch's own variable asks for it."""
    options = tiers._options("max", "cuda")
    assert options["max_autotune"]
    assert "coordinate_descent_tuning" not in options


def test_each_device_has_its_own_stream_and_memory(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    """A network that has moved to another device; meta stands for it."""
    cuda, streams = PretendedCuda(monkeypatch), []

    def step(*args: Any) -> Tensor:
        streams.append(cuda.current)
        return run_row(*args)

    graphs = cuda_graphs.Graphs(step)
    graphs(tiny, *VARIED[0])
    moved = copy.deepcopy(tiny).to("meta")
    graphs(moved, *cuda_graphs.mapped(tuple(VARIED[0]), lambda x: x.to("meta")))
    assert cuda.pools == [None, None]
    assert streams[0] is not streams[-1]
    assert [captured.out.device.type for graph in graphs._graphs.values() for captured in graph.values()] == [
        "cpu",
        "meta",
    ]


def test_captured_steps_share_their_memory(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    cuda, streams = PretendedCuda(monkeypatch), []

    def step(*args: Any) -> Tensor:
        streams.append(cuda.current)
        return run_row(*args)

    graphs = cuda_graphs.Graphs(step)
    for args in (*VARIED[:3], VARIED[0]):
        graphs(tiny, *args)
    assert cuda.pools == [None, "pool 0", "pool 0"]
    assert len(streams) == 9  # three times each: once before, to compile
    captured = [stream for number, stream in enumerate(streams) if number % 3]
    assert all(stream is captured[0] is not cuda.outside for stream in captured)
    with torch.inference_mode():
        graphs(tiny, *VARIED[3])
    graphs(tiny, *VARIED[3])


def test_a_capture_that_fails_leaves_the_thread_in_its_stream(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    cuda = PretendedCuda(monkeypatch)

    @contextlib.contextmanager
    def graph(*args: Any, stream: Any, **others: Any) -> Iterator[None]:
        yield
        cuda.current = stream  # as torch.cuda.graph leaves it
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(RuntimeError, match="capturing"):
        cuda_graphs.Graphs(run_row)(tiny, *VARIED[0])
    assert cuda.current is cuda.outside


def test_max_is_compiled_for_each_size(tiny: nn.Module) -> None:
    counter = CompileCounter()
    step = CompiledStep("max", tiny, counter)  # type: ignore[arg-type]
    for side in (8, 12, 16, 8):
        args = arguments(0, 2, side, side)
        torch.testing.assert_close(step(tiny, *args), run_row(tiny, *args), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert counter.frame_count == 3


def test_regional_compiles_each_kind_of_block_once(tiny: nn.Module) -> None:
    counter = CompileCounter()
    step = CompiledStep("regional", tiny, counter)  # type: ignore[arg-type]
    for args in VARIED:
        torch.testing.assert_close(step(tiny, *args), run_row(tiny, *args), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert counter.frame_count == 1
    assert list(tiny.state_dict()) == list(Tiny().state_dict())


@pytest.mark.slow
def test_regional_compiles_the_blocks_of_what_steers_too() -> None:
    unet, nets = toy.network(PLAIN), [toy.fill(ControlNet(PLAIN), "0.")]
    step = CompiledStep("regional", unet, "eager")
    args: list[Any] = arguments(0, 2, 8, 8)
    step(unet, *args)
    assert all(block._compiled_call_impl is not None for block in regions(unet))
    hint = ControlInput(
        toy.normal(3, 1, PLAIN.model_channels, 8, 8), torch.ones(2 * len(PLAIN.channel_mult) + 1), 1, pool=False
    )
    args = with_inputs(args, ControlInputs((hint,), None))
    steered = ControlledUNet(unet, nets)  # type: ignore[arg-type]
    torch.testing.assert_close(step(steered, *args), run_row(steered, *args), rtol=1e-4, atol=1e-4)
    assert all(block._compiled_call_impl is not None for block in regions(steered))


def test_the_blocks_of_a_unet_are_its_regions() -> None:
    with torch.device("meta"):
        blocks = list(regions(LDMUNet(SMALL.unet)))
    assert {type(module) for module in blocks} == {ResBlock, SpatialTransformer}


def test_weights_change_in_place(tiny: nn.Module) -> None:
    step = CompiledStep("step", tiny, "eager")
    args = arguments(0, 2, 8, 8)
    before = step(tiny, *args)
    for parameter in tiny.parameters():
        parameter.mul_(0.9)
    with torch._dynamo.config.patch(error_on_recompile=True):
        after = step(tiny, *args)
    torch.testing.assert_close(after, run_row(tiny, *args), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert not torch.allclose(before, after)


@pytest.mark.slow
def test_a_failed_compilation_is_one_line_and_plain_steps(tiny: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler\nand a long story")

    args = arguments(0, 2, 8, 8)
    for tier in ("regional", "step", "max"):
        torch._dynamo.reset()
        caplog.clear()
        step = CompiledStep(tier, tiny, broken)  # type: ignore[arg-type]
        for _ in range(2):
            assert torch.equal(step(tiny, *args), run_row(tiny, *args))  # type: ignore[arg-type]
        [line] = [record.getMessage() for record in caplog.records if record.name == "ldm_lite"]
        assert line.startswith("compilation failed (")
        assert "\n" not in line


def test_the_users_own_error_stays(tiny: nn.Module) -> None:
    args = arguments(0, 2, 8, 8)
    args[3] = args[3]._replace(conditioning={"context": toy.normal(0, 3, 5, 3)})
    step = CompiledStep("step", tiny, "eager")
    with pytest.raises(RuntimeError, match="must match"):
        step(tiny, *args)
    assert torch.isfinite(step(tiny, *arguments(0, 2, 8, 8))).all()


def test_break_even_is_reported(tiny: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ldm_lite"):
        CompiledStep("step", tiny, "eager")(tiny, *arguments(0, 2, 8, 8))
    assert "compiled in " in caplog.text
    assert tiers._verdict(60, 0.020, 0.012).endswith("12.0 ms in place of 20.0 ms, which pays off from 7,500 steps on")
    assert "does not pay" in tiers._verdict(60, 0.020, 0.021)


def test_auto_waits_as_long_as_a_compilation_takes(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    step = CompiledStep("auto", tiny, counter)  # type: ignore[arg-type]
    now = [100.0]
    monkeypatch.setattr(tiers.time, "perf_counter", lambda: now[0])
    for passed, graphs in ((0, 0), (tiers.COLD_START_S - 1, 0), (2, 1), (1, 1)):
        now[0] += passed
        step(tiny, *arguments(0, 2, 8, 8))
        assert counter.frame_count == graphs


def test_a_step_of_more_than_the_network_runs_as_it_is(tiny: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(0, 2, 8, 8)
    step = CompiledStep("step", tiny, "eager")
    with caplog.at_level(logging.INFO, "ldm_lite"):
        for _ in range(2):
            step(lambda x, t, **inputs: tiny(x, t, **inputs), *args)
    assert [record.getMessage()[:23] for record in caplog.records if record.name == "ldm_lite"] == [
        "the model is a function"
    ]


def test_tiers(tiny: nn.Module) -> None:
    assert compiled_step("off", tiny) is compiled_step("auto", tiny) is run_row  # auto never compiles on a CPU
    with pytest.raises(ValueError, match="unknown compile tier 'fast': expected one of off, auto"):
        compiled_step("fast", tiny)


def test_the_flag_reaches_the_loop(small_path: Path) -> None:
    options = LoadOptions(ckpt=str(small_path), device="cpu", compile="step")
    assert isinstance(load_model(options, CheckpointModel).run_row, CompiledStep)
    assert isinstance(ldm_lite.load(small_path, device="cpu", compile="step").run_row, CompiledStep)
    assert set(TIERS) >= {"off", "auto", "regional", "step", "max"}
    assert ldm_lite.load(small_path, device="cpu").run_row is run_row


@pytest.mark.slow
@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("tier", ["regional", "step", "max"])
def test_inductor(tier: str, tiny: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    step = CompiledStep(tier, tiny, "inductor")
    for args in VARIED[:2]:
        torch.testing.assert_close(step(tiny, *args), run_row(tiny, *args), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert "failed" not in caplog.text


# ---- what a graph must not repeat -----------------------------------------------------------------------------------


def test_graphs_start_at_the_third_call_of_a_shape(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    """Runs of one or two steps do not pay for them."""
    cuda = PretendedCuda(monkeypatch)
    graphs = cuda_graphs.Graphs(run_row, plain_calls=tiers.PLAIN_CALLS)
    for number, args in enumerate((VARIED[0], VARIED[1], VARIED[0], VARIED[1], VARIED[0], VARIED[0])):
        graphs(tiny, *args)
        assert cuda.log.count("capture") == (number >= 4)


@pytest.mark.parametrize("change", ["hook", "attention of one's own", "forward of one's own", "recorded maps"])
def test_python_code_in_a_network_keeps_it_out_of_graphs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would repeat kernels and not call it; before and after, steps are captured."""
    cuda, calls = PretendedCuda(monkeypatch), list[str]()
    unet: Any = toy.network(ATTENDING)
    graphs, args = cuda_graphs.Graphs(run_row), arguments(0, 2, 8, 8)
    layer = next(iter(attention.layers(unet).values()))
    sdpa = layer.attention
    graphs(unet, *args)
    assert cuda.log.count("capture") == 1
    with contextlib.ExitStack() as undo:
        if change == "hook":
            handle = unet.out.register_forward_hook(lambda *args: calls.append(change))
            undo.callback(handle.remove)
        elif change == "attention of one's own":
            layer.attention = lambda q, k, v: calls.append(change) or sdpa(q, k, v)
            undo.callback(setattr, layer, "attention", sdpa)
        elif change == "forward of one's own":
            patch(unet.out, lambda module, x: calls.append(change) or type(module).forward(module, x))
            undo.callback(unpatch, unet.out)
        else:
            maps = undo.enter_context(attention.record(unet))
            undo.callback(lambda: calls.extend([change] * len(next(iter(maps.values())))))
        for _ in range(2):
            graphs(unet, *args)
    assert len(calls) == 2
    assert cuda.log.count("capture") == 1
    graphs(unet, *args)
    assert cuda.log.count("capture") == 1, "as it was before"
    attention.use(unet, "vanilla")
    graphs(unet, *args)
    assert cuda.log.count("capture") == 2, "other kernels"


def test_weights_in_other_memory_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads them at their address; joined ones come apart."""
    cuda, unet = PretendedCuda(monkeypatch), toy.network(ATTENDING).requires_grad_(False)
    joined.use(unet)
    step, args = CompiledStep("graph", unet, "eager"), arguments(0, 2, 8, 8)
    [layer, *_] = joined.joined_layers(unet)
    for weight in (layer.to_q.weight, unet.out[2].weight):
        for _ in range(4):
            step(unet, *args)
        weight.data = weight.data * 2
        for _ in range(4):
            assert torch.equal(step(unet, *args), run_row(unet, *args))  # type: ignore[arg-type]
    assert cuda.log.count("capture") == 3
    assert not joined.is_joined(layer)


@pytest.mark.parametrize("change", ["module", "weight", "module without weights"])
def test_replaced_parts_are_captured_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, unet = PretendedCuda(monkeypatch), toy.network(ATTENDING).requires_grad_(False)
    graphs, args = cuda_graphs.Graphs(run_row), arguments(0, 2, 8, 8)
    before = graphs(unet, *args)
    if change == "module":
        unet.out[2] = copy.deepcopy(unet.out[2])
        unet.out[2].weight.mul_(2)
    elif change == "weight":
        unet.out[2].weight = nn.Parameter(unet.out[2].weight * 2, requires_grad=False)
    else:
        unet.out[1] = nn.Tanh()
    assert torch.equal(graphs(unet, *args), run_row(unet, *args))  # type: ignore[arg-type]
    assert not torch.equal(graphs(unet, *args), before)
    assert cuda.log.count("capture") == 2


def test_what_is_looked_at_before_a_replay_keeps_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedCuda(monkeypatch)
    graphs, unet = cuda_graphs.Graphs(run_row), toy.network(ATTENDING).requires_grad_(False)
    patch(unet, kernel(lambda module, *args, **named: type(module).forward(module, *args, **named)))
    graphs(unet, *arguments(0, 2, 8, 8))
    reference = weakref.ref(unet)
    del unet
    gc.collect()
    assert reference() is None
    assert len(graphs._codes) == len(graphs._graphs) == 0


def test_guidance_of_ones_own_is_called_in_every_step(monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    cuda, calls = PretendedCuda(monkeypatch), list[int]()
    graphs, args = cuda_graphs.Graphs(run_row), arguments(0, 2, 8, 8)

    def combine(outputs: Outputs) -> Tensor:
        calls.append(len(calls))
        return weighted(outputs)

    for _ in range(3):
        graphs(tiny, *args[:4], combine, *args[5:])
    assert calls == [0, 1, 2]
    assert "capture" not in cuda.log
    graphs(tiny, *args[:4], weighted, (rescaling(0.7, CPU),))
    assert "capture" in cuda.log


def test_a_capture_that_another_thread_disturbed_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tiny: nn.Module
) -> None:
    cuda = PretendedCuda(monkeypatch)
    graph, failures, words = cuda.graph, iter([True, False]), list[str]()

    @contextlib.contextmanager
    def disturbed(*args: Any, **options: Any) -> Iterator[None]:
        with graph(*args, **options):
            words.append(tiers.compiling())
            yield
        if next(failures):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", disturbed)
    graphs = cuda_graphs.Graphs(run_row)
    graphs(tiny, *VARIED[0])
    assert cuda.log.count("capture") == 2
    [captured] = graphs._graphs.values()
    assert len(captured) == 1
    assert words == ["capturing", "capturing"]
    assert tiers.compiling() == ""


@pytest.mark.parametrize("tier", ["step", "regional"])
def test_a_bad_call_does_not_drop_what_is_compiled(tier: str, tiny: nn.Module) -> None:
    counter = CompileCounter()
    step, args = CompiledStep(tier, tiny, counter), arguments(0, 2, 8, 8)  # type: ignore[arg-type]
    step(tiny, *args)
    compiled = counter.frame_count
    bad = list(args)
    bad[2] = toy.normal(0, 2, 4, 9, 9)  # noise of another size
    with pytest.raises(RuntimeError):
        step(tiny, *bad)
    assert step.failure is None
    step(tiny, *args)
    assert counter.frame_count == compiled


def test_the_default_is_a_graph_where_launches_bound_a_step(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(setup, "compiled_step", lambda tier, unet: asked.append(tier) or run_row)
    unet, cuda = toy.network(SMALL.unet), torch.device("cuda")
    setup.prepare_networks({"unet": unet}, RuntimeOptions(), cuda)
    assert asked == ["graph"]
    for options in (RuntimeOptions(compile="off"), RuntimeOptions(kernels="plain"), RuntimeOptions(offload="model")):
        with monkeypatch.context() as patched:
            patched.setattr(setup, "Offloader", lambda *args, **options: None)
            setup.prepare_networks({"unet": unet}, options, cuda)
    setup.prepare_networks({"unet": unet}, RuntimeOptions(), CPU)
    monkeypatch.setattr(setup, "LAUNCH_BOUND", 1)
    setup.prepare_networks({"unet": unet}, RuntimeOptions(), cuda)
    assert asked == ["graph"]
    assert compiled_step("graph", unet) is run_row, "without CUDA"


# ---- what remembers, and what changes the network -------------------------------------------------------------------

LEVELS = replace(
    PLAIN,
    channel_mult=(1, 1),
    num_res_blocks=(1, 1),
    transformer_depth=(0, 0),
    cross_only=(False, False),
    middle_depth=1,
)
APG, MOMENTUM = "parallel=0:threshold=5", "parallel=0.5:momentum=-0.5"
# Two jobs of the same kind, and the number of networks that they run.
KINDS: dict[str, tuple[tuple[dict[str, Any], dict[str, Any]], int]] = {
    "deep_cache": (({"every": 2}, {"every": 3}), 2),
    "freeu": (({"free": (1.5, 1.6, 0.9, 0.2)}, {"free": (1.2, 1.3, 0.8, 0.4)}), 1),
    "apg": (({"combine": APG}, {"combine": "parallel=0.5"}), 1),
    "apg with momentum": (({"combine": MOMENTUM}, {"combine": "parallel=0:momentum=0.3"}), 1),
    "guidance of one's own": (({"combine": 3.0}, {"combine": 2.0}), 1),
    "all": (({"every": 2, "free": (1.5, 1.6, 0.9, 0.2), "combine": MOMENTUM}, {"every": 3, "free": (1, 1, 0, 0)}), 3),
}


def job(unet: Any, step: cuda_graphs.Step, seed: int, combine: str | float | None = None, **shortcuts: Any) -> Tensor:
    """The latents of a guided run of eight steps."""
    plan = named_plan("ddim", SCHEDULE, 8)
    context = toy.normal(seed, 2, 2, 5, SMALL.unet.context_dim)
    branches = Branch({"context": context[0]}, positive=False), Branch({"context": context[1]})
    mix: Combine = weighted
    if isinstance(combine, str):
        mix = read_projection(combine).begin()
    elif combine is not None:
        mix = lambda outputs: torch.lerp(*outputs.outs, combine)  # noqa: E731
    inputs = Inputs(unet, branches, 4.0, mix, run_row=step)
    source = Run(unet, Shortcuts(**shortcuts), plan).wrapped(lambda call: inputs) if shortcuts else lambda call: inputs
    *_, last = run_plan(toy.normal(seed + 1, 2, 4, 8, 8), plan, source, lambda: torch.zeros(2, 4, 8, 8))
    return last.latents


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", ["step", pytest.param("max", marks=pytest.mark.slow)])
def test_each_network_of_a_trick_is_one_graph_for_all_steps_and_jobs(tier: str, kind: str) -> None:
    (jobs, networks), unet, counter = KINDS[kind], toy.network(LEVELS), CompileCounter()
    step, counts = CompiledStep(tier, unet, counter), []  # type: ignore[arg-type]
    for seed, settings in enumerate((*jobs, *jobs)):
        wanted = job(unet, run_row, seed, **settings)
        torch.testing.assert_close(job(unet, step, seed, **settings), wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(job(unet, run_row, seed), wanted, atol=1e-3)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1] == networks
    assert step.failure is None


def test_regional_compiles_the_blocks_of_what_is_shortened() -> None:
    unet, settings = toy.network(LEVELS), {"every": 2, "free": (1.5, 1.6, 0.9, 0.2)}
    step = CompiledStep("regional", unet, "eager")
    compiled, wanted = (job(unet, how, 3, **settings) for how in (step, run_row))  # type: ignore[arg-type]
    torch.testing.assert_close(compiled, wanted, rtol=1e-4, atol=1e-4)
    assert step.of_network.failure is None
    assert all(block._compiled_call_impl is not None for block in regions(unet))


@pytest.mark.parametrize("kind", KINDS)
def test_each_network_of_a_trick_is_captured_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    (jobs, networks), unet = KINDS[kind], toy.network(LEVELS)
    step = CompiledStep("graph", unet, "eager")
    for seed, settings in enumerate((*jobs, *jobs)):
        assert torch.equal(job(unet, step, seed, **settings), job(unet, run_row, seed, **settings))
    assert cuda.log.count("capture") == (2 if kind == "apg" else networks), (
        "APG has a CUDA graph for each of its numbers"
    )
    assert step.failure is None
