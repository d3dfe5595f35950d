"""Kernels that the compiler writes for a step of Stable Diffusion's UNet on an H100, which need not be there.

python scripts/count_compiled_kernels.py

The step is traced with fake tensors and lowered by Inductor, whose questions about the GPU get fixed answers; what it
has written is counted, and nothing is run.  Needs a torch that was built for CUDA (tried with 2.11), and diffusers for
its line; takes ten minutes.  Attention is taken for one flash kernel.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ldm_lite.diffusion.guidance import Conditioning, Guidance
from ldm_lite.diffusion.step import Row
from ldm_lite.models.unet import UNet
from ldm_lite.runtime import compile as tiers
from ldm_lite.runtime import fused_norm
from ldm_lite.zoo.families import FAMILIES

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)
CALL = re.compile(r"(triton|extern_kernels|torch\.ops\.aten)[\w.]*\(")


class Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Written(Exception):
    """Inductor's source."""


def as_if_there() -> ExitStack:
    """Within it the compiler finds an H100, and raises its source instead of running it."""
    importlib.import_module("triton.runtime").driver.set_active(Driver())
    graph = importlib.import_module("torch._inductor.graph").GraphLowering
    codegen = graph.codegen

    def write(lowering: Any) -> None:
        source = codegen(lowering)[0]
        raise Written(getattr(source, "value", source))

    cuda = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    cuda |= {"get_device_properties": H100, "_get_device_properties": H100, "_exchange_device": 0, "_lazy_init": None}
    cuda |= {"_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    stack = ExitStack()
    for name, value in cuda.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock(return_value=value), create=True))
    stack.enter_context(mock.patch.object(graph, "codegen", write))
    passes = importlib.import_module("torch._inductor.fx_passes.joint_graph")  # their patterns are traced on the GPU
    stack.enter_context(mock.patch.object(passes, "lazy_init", mock.Mock()))
    config: Any = importlib.import_module("torch._inductor.config")
    stack.enter_context(config.patch(fx_graph_cache=False, joint_graph_constant_folding=False, compile_threads=1))
    return stack


def report(name: str, mode: FakeTensorMode, network: nn.Module, run: Callable[..., Any], *inputs: Any) -> None:
    """Lower run(network, *inputs), and print how many kernels that took."""
    weights = dict(network.named_parameters()) | dict(network.named_buffers())

    def function(values: list[Tensor], *inputs: Any) -> Any:
        given = dict(zip(weights, values, strict=True))
        return run(lambda *args, **options: torch.func.functional_call(network, given, args, options), *inputs)

    arguments = [list(weights.values()), *inputs]
    compiler = importlib.import_module("torch._inductor.compile_fx")
    with mode, torch.no_grad():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments)
        try:
            with as_if_there():
                compiler.compile_fx(traced, arguments)(*arguments)
        except Exception as error:
            source = error
            while not isinstance(source, Written):
                if source.__cause__ is None and source.__context__ is None:
                    raise
                source = source.__cause__ or source.__context__
    text = str(source).split("def call(")[1]
    kinds = Counter(match.group(1) for match in CALL.finditer(text))
    print(f"{name}: {kinds.total()} ({kinds['triton']} of them written, the others libraries')", flush=True)


def on_cuda(mode: FakeTensorMode, network: nn.Module) -> nn.Module:
    """A network on meta -> its weights on the GPU, half precision, channels last."""
    with mode:
        for module in network.modules():
            for kept in (module._parameters, module._buffers):
                for name, value in kept.items():
                    if value is not None:
                        layout = torch.channels_last if value.ndim == 4 else torch.contiguous_format
                        fresh = torch.empty(value.shape, dtype=torch.half, device="cuda", memory_format=layout)
                        kept[name] = nn.Parameter(fresh, requires_grad=False) if kept is module._parameters else fresh
    return network.eval()


def ours(name: str, *, fixed: bool, folded: bool = True, written_out: bool = True) -> None:
    """The whole step, for fixed sizes or any."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=False)
    with torch.device("meta"):
        unet: Any = UNet(FAMILIES["sd1"].unet)
        probe = torch.empty(3, 77, *((8, 9) if folded else (64, 72)))
    on_cuda(mode, unet)
    if written_out:
        fused_norm.use(unet)
    batch, tokens, h, w = 1, 77, *((8, 8) if folded else (64, 64))
    if not fixed:
        source = importlib.import_module("torch._dynamo.source").ConstantSource("sizes")
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4)
        batch, tokens, h, w = mode.from_tensor(probe, symbolic_context=dynamic, source=source).shape
    with mode, torch.no_grad(), torch.device("cuda"):
        side = (h, 8, w, 8) if folded else (h, w)
        registers, noise = torch.empty(5, batch, 4, *side), torch.empty(batch, 4, *side)
        row = Row(torch.empty(()), torch.empty(2), torch.empty(2), torch.empty(5, 7), torch.empty(()))
        context = torch.empty(2 * batch, tokens, 768).half()
        text = Conditioning(context, cache=unet.text_cache(context))
        inputs = (registers, row, noise, text, Guidance(torch.empty(2), None, None))
    report(name, mode, unet, lambda model, *args: tiers._unfolded_step(model, *args, torch.half), *inputs)


def theirs() -> None:
    """diffusers' UNet alone, for fixed sizes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=False)
    diffusers = importlib.import_module("diffusers")
    with torch.device("meta"):
        unet = on_cuda(mode, diffusers.UNet2DConditionModel(cross_attention_dim=768))
    with mode, torch.device("cuda"):
        inputs = (torch.empty(2, 4, 64, 64).half(), torch.empty(2), torch.empty(2, 77, 768).half())
    name = f"diffusers {diffusers.__version__}, its UNet alone, one size"
    report(name, mode, unet, lambda model, *args: model(*args, return_dict=False)[0], *inputs)


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """One kernel."""
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v)[0]
    return result


def main() -> None:
    """All lines."""
    torch.nn.functional.scaled_dot_product_attention = attention
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes.init_gpu_context = lambda device: None
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # as it is where dynamo traces
        ours("a step for one size", fixed=True)
        ours("a step for one size, PyTorch's norms", fixed=True, written_out=False)
        ours("a step for all sizes", fixed=False)
        ours("a step for all sizes, not folded", fixed=False, folded=False)
        ours("a step for all sizes, not folded, PyTorch's norms", fixed=False, folded=False, written_out=False)
    theirs()


if __name__ == "__main__":
    main()
