"""Count kernels and time parts of the networks.

    python scripts/profiling.py kernels            # operators of a forward of Stable Diffusion 1's UNet, and diffusers'
    python scripts/profiling.py compiled-kernels   # kernels that the compiler writes for a step on an H100; 10 minutes
    python scripts/profiling.py text-cache         # a step with and without the text's cached keys and values
    python scripts/profiling.py convolutions       # 3x3 convolutions on a CPU, PyTorch's and Winograd's
    python scripts/profiling.py attention          # a step on a CPU with PyTorch's attention, and with ours
    python scripts/profiling.py operators          # where a step on a CPU spends its time
    python scripts/profiling.py strips             # the decoder on a CPU, whole and in strips

The counts need no GPU; their lines for diffusers need `pip install diffusers`.  (Not named profile.py: scripts that
import torch would find it in place of Python's own module.)
"""

import argparse
import functools
import importlib.util
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda import to_cuda
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ldm_lite
from ldm_lite import generate
from ldm_lite.bench.checkpoints import random_checkpoint
from ldm_lite.bench.measure import alternating
from ldm_lite.checkpoint.reader import load_weights, on_meta, split
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.diffusion.guidance import Conditioning, Guidance, classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.step import Row
from ldm_lite.models.ops import GEGLU
from ldm_lite.models.transformer import CrossAttention
from ldm_lite.models.unet import UNet
from ldm_lite.models.vae_kl import AutoencoderKL
from ldm_lite.runtime import attention as attention_backends
from ldm_lite.runtime import compile as tiers
from ldm_lite.runtime import fused_norm, timed_layers, timing
from ldm_lite.runtime.cpu import attention as cpu_attention
from ldm_lite.runtime.cpu import convolutions as cpu_convolutions
from ldm_lite.runtime.setup import keep_freed_memory, prepare
from ldm_lite.runtime.tiling import tiled
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.networks import build

SD1 = FAMILIES["sd1"]


# ---- operators ------------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operators by name, without those that return a view of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def one_operator(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Stand in for attention: one operator, with the memory layout of the fused kernels' result."""
    return q.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def kernels(args: argparse.Namespace) -> None:
    """Operators of a UNet's forward that compute or copy, a kernel each or a few; nothing is computed (meta device)."""
    with mock.patch.object(F, "scaled_dot_product_attention", one_operator), torch.device("meta"):
        x, t, context = torch.empty(2, 4, 64, 64), torch.empty(2), torch.empty(2, 77, 768)
        unet: Any = UNet(SD1.unet).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            cache = unet.text_cache(context)
        count("ours", lambda: unet(x, t, context))
        count("ours, the text's keys and values cached", lambda: unet(x, t, context, cache=cache))
        if importlib.util.find_spec("diffusers") is None:
            return
        diffusers = importlib.import_module("diffusers")
        peer = diffusers.UNet2DConditionModel(cross_attention_dim=768).to(memory_format=torch.channels_last)
        count(f"diffusers {diffusers.__version__}", lambda: peer(x, t, context))


def count(name: str, forward: Callable[[], object]) -> None:
    """Print the number of operators, and the most frequent ones."""
    with torch.no_grad(), Counted() as counted:
        forward()
    most = ", ".join(f"{number} {operator}" for operator, number in counted.calls.most_common(8))
    print(f"{name}: {counted.calls.total()} ({most}, ...)")


# ---- compiled kernels -----------------------------------------------------------------------------------------------

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
    """Answers what Triton asks a driver before it compiles."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Written(Exception):
    """Inductor's source."""


def pretended_h100() -> ExitStack:
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


def lower(name: str, mode: FakeTensorMode, network: nn.Module, run: Callable[..., Any], *inputs: Any) -> None:
    """Lower run(network, *inputs) and print the number of its kernels."""
    weights = dict(network.named_parameters()) | dict(network.named_buffers())

    def function(values: list[Tensor], *inputs: Any) -> Any:
        given = dict(zip(weights, values, strict=True))
        return run(lambda *args, **options: torch.func.functional_call(network, given, args, options), *inputs)

    arguments = [list(weights.values()), *inputs]
    compiler = importlib.import_module("torch._inductor.compile_fx")
    with mode, torch.no_grad():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments)
        try:
            with pretended_h100():
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


HALF: Any = {"device": "cuda", "dtype": torch.half}


def fake_mode() -> FakeTensorMode:
    """Fake tensors whose sizes may be symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=False)


def our_step(name: str, *, fixed: bool, folded: bool = True, written_out: bool = True, kernels: str = "plain") -> None:
    """The whole step with cached text, for fixed sizes or any; kernels are those of runtime.setup."""
    mode = fake_mode()
    with torch.device("meta"):
        unet: Any = UNet(SD1.unet)
        probe = torch.empty(3, 77, *((8, 9) if folded else (64, 72)))
    with mode:
        to_cuda(unet, torch.half, channels_last=True)
    if written_out:
        fused_norm.use(unet, triton="norm" in kernels)
    if "geglu" in kernels:
        timed_layers.use_geglu(unet)
    with mode:
        for module in unet.modules():
            if isinstance(module, CrossAttention) and module.to_k.in_features != 768 and "qkv" in kernels:
                module.qkv = nn.Parameter(torch.empty(3 * module.to_q.in_features, module.to_q.in_features, **HALF))
            elif isinstance(module, GEGLU) and "geglu" in kernels:
                module.tile = (128, 64)  # as if it had been timed
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
    lower(name, mode, unet, lambda model, *args: tiers._unfolded_step(model, *args, torch.half), *inputs)


def diffusers_unet() -> None:
    """diffusers' UNet alone, for fixed sizes."""
    mode, diffusers = fake_mode(), importlib.import_module("diffusers")
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768)
    with mode, torch.device("cuda"):
        to_cuda(unet, torch.half, channels_last=True)
        inputs = (torch.empty(2, 4, 64, 64).half(), torch.empty(2), torch.empty(2, 77, 768).half())
    name = f"diffusers {diffusers.__version__}, its UNet alone, one size"
    lower(name, mode, unet, lambda model, *args: model(*args, return_dict=False)[0], *inputs)


def flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attention as one kernel."""
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v)[0]
    return result


def compiled_kernels(args: argparse.Namespace) -> None:
    """Kernels that Inductor writes for a step of Stable Diffusion 1 on an H100, which need not be there.

    The step is traced with fake tensors; Inductor's questions about the GPU get fixed answers, and nothing is run.
    Needs a torch that was built for CUDA (tested with 2.11).
    """
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes.init_gpu_context = lambda device: None
    with mock.patch.object(F, "scaled_dot_product_attention", flash):
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # as dynamo sets it
            our_step("a step for one size, qkv, norm, geglu", fixed=True, kernels="qkv,norm,geglu")
            our_step("a step for one size, qkv, norm", fixed=True, kernels="qkv,norm")
            our_step("a step for one size, qkv", fixed=True, kernels="qkv")
            our_step("a step for one size", fixed=True)
            our_step("a step for one size, PyTorch's norms", fixed=True, written_out=False)
            our_step("a step for all sizes", fixed=False)
            our_step("a step for all sizes, not folded", fixed=False, folded=False)
            our_step("a step for all sizes, not folded, PyTorch's norms", fixed=False, folded=False, written_out=False)
        diffusers_unet()


# ---- times ----------------------------------------------------------------------------------------------------------

Times = dict[str, list[float]]


def timed(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Time some works in turn, in reverse order every other round, after a round of warm-up; seconds by name."""
    times: Times = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in alternating(list(works.items()), number):
            start = clock()
            work()
            if number > 0:
                times[name].append(clock() - start)
    return times


def print_times(times: Times, unit: str, scale: float = 1.0) -> None:
    """Print medians with quartiles, and the median ratio of the second work to the first."""
    for name, seconds in times.items():
        low, median, high = statistics.quantiles([scale * each for each in seconds], n=4)
        print(f"{name}: {median:.2f} {unit}, quartiles {low:.2f} to {high:.2f}")
    first, second = times.values()
    print(f"ratio {statistics.median(b / a for a, b in zip(first, second, strict=True)):.3f}")


def text_cache(args: argparse.Namespace) -> None:
    """Guided steps of DDIM with and without the text's cached keys and values, on the bundled model or --ckpt."""
    pipe, steps = ldm_lite.load(args.ckpt), 20
    spec, side = pipe.family.unet, pipe.family.resolution
    assert spec.context_dim is not None
    noise = torch.randn(1, *pipe.latent_shape(side, side))
    cond, uncond = (Conditioning(torch.randn(1, 77, spec.context_dim)) for _ in range(2))
    plan, branches = make_plan("ddim", pipe.schedule, steps), classifier_free(cond, uncond, 5.0)

    def cached() -> None:
        generate.denoise(pipe, noise, branches, plan).cpu()

    def not_cached() -> None:
        hook = pipe.unet.register_forward_pre_hook(lambda module, args: None)  # a hook turns the cache off
        cached()
        hook.remove()

    times = timed({"made at every step": not_cached, "cached": cached}, args.rounds)
    print_times(times, "ms a step", 1e3 / steps)


def strips(args: argparse.Namespace) -> None:
    """Stable Diffusion's decoder on a CPU, the whole image at once and strip by strip."""
    dtype = getattr(torch, args.dtype)
    whole = AutoencoderKL(SD1.vae).eval().to(dtype)
    prepare({"vae": whole}, RuntimeOptions(), torch.device("cpu"))
    in_strips = tiled(whole)
    z = torch.randn(1, 4, args.size // 8, args.size // 8, dtype=dtype)
    with torch.inference_mode():
        wanted = whole.decode(z)
        print(f"relative difference {float((in_strips.decode(z) - wanted).norm() / wanted.norm()):.1e}")
        times = timed({"whole": lambda: whole.decode(z), "in strips": lambda: in_strips.decode(z)}, args.rounds)
    print_times(times, "s")


# (B, C, K, side): of a guided step at 512 px, then of the decoder
SHAPES = [
    (2, 320, 320, 64),
    (2, 960, 320, 64),
    (2, 640, 640, 32),
    (2, 1920, 640, 32),
    (2, 1280, 1280, 32),
    (2, 1280, 1280, 16),
    (2, 1280, 1280, 4),
    (2, 1280, 1280, 8),
    (2, 2560, 1280, 8),
    (1, 512, 512, 64),
    (1, 512, 512, 128),
    (1, 256, 256, 256),
    (1, 128, 128, 512),
]


@torch.no_grad()
def convolutions(args: argparse.Namespace) -> None:
    """3x3 convolutions of Stable Diffusion's sizes, and the decoder at 256 px.

    On one thread in its CPU time, which other processes disturb less than the clock's; with --threads 2 or more by the
    clock.  The fastest of --rounds.
    """
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    with on_meta():
        vae: Any = build(SD1.networks["vae"])
    weights = split(random_checkpoint("sd1", SD1))["vae"]
    load_weights(vae, weights, "vae", torch.device("cpu"), torch.float32)
    latents = torch.randn(1, 4, 32, 32)
    # The decoder first, and in this order: keep_freed_memory cannot be undone.
    setups = {"PyTorch's": None, "memory kept": keep_freed_memory, "and ours": lambda: cpu_convolutions.use(vae)}
    for name, setup in setups.items():
        if setup is not None:
            setup()
        times = timed({name: lambda: vae.decode(latents)}, args.rounds, clock)
        print(f"decoder at 256 px, {name}: {min(times[name]):.2f} s", flush=True)

    print("shape, way, plain ms, ours ms, ratio, relative difference")
    for batch, channels, num_out, side in SHAPES:
        x = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
        weight, bias = torch.randn(num_out, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(num_out)
        last = weight.to(memory_format=torch.channels_last)
        way = cpu_convolutions.way(x, last)
        ours = functools.partial(cpu_convolutions.WAYS[way], x, last, bias)
        if x.numel() < weight.numel():
            x = x.contiguous()  # else the plain one would take longer still
        works: dict[str, Callable[[], Tensor]] = {
            "plain": functools.partial(F.conv2d, x, weight, bias, padding=1),
            "ours": ours,
        }
        plain, fast = (1e3 * min(seconds) for seconds in timed(works, args.rounds, clock).values())
        wanted, found = (work() for work in works.values())
        difference = (found - wanted).norm() / wanted.norm()
        shape = f"{batch} x {channels} -> {num_out}, {side} x {side}"
        print(f"{shape}, {way}, {plain:.1f}, {fast:.1f}, {fast / plain:.2f}, {difference:.1e}", flush=True)


def sd1_step() -> tuple[Any, Tensor, Tensor, Tensor]:
    """Stable Diffusion's UNet on the CPU with random weights, and its inputs for a guided step at 512 px."""
    with on_meta():
        unet: Any = build(SD1.networks["unet"])
    load_weights(unet, split(random_checkpoint("sd1", SD1))["unet"], "unet", torch.device("cpu"), torch.float32)
    prepare({"unet": unet}, RuntimeOptions(), torch.device("cpu"))
    return unet, torch.randn(2, 4, 64, 64), torch.tensor([500.0, 500.0]), torch.randn(2, 77, 768)


@torch.no_grad()
def operators(args: argparse.Namespace) -> None:
    """Seconds by operator of a guided forward of Stable Diffusion's UNet on a CPU, after one of warm-up."""
    unet, *inputs = sd1_step()
    unet(*inputs)
    with torch.profiler.profile() as profile:
        unet(*inputs)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=60))


@torch.no_grad()
def attention(args: argparse.Namespace) -> None:
    """A guided forward of Stable Diffusion's UNet on a CPU with PyTorch's attention, and with ours for 4096 tokens."""
    unet, *inputs = sd1_step()

    def run(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        for layer in attention_backends.layers(unet).values():
            layer.attention = function
        out: Tensor = unet(*inputs)
        return out

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (cpu_attention.blocked if k.shape[2] >= 4096 else F.scaled_dot_product_attention)(q, k, v)

    works = {"PyTorch's": lambda: run(F.scaled_dot_product_attention), "ours": lambda: run(ours)}
    print(timing.machine())
    print_times(timed(works, args.rounds), "s")


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    measurements = {
        "kernels": kernels,
        "compiled-kernels": compiled_kernels,
        "text-cache": text_cache,
        "convolutions": convolutions,
        "attention": attention,
        "operators": operators,
        "strips": strips,
    }
    added = {}
    for name, measure in measurements.items():
        added[name] = commands.add_parser(name, description=measure.__doc__)
        added[name].set_defaults(measure=measure)
    for name, rounds in (("text-cache", 40), ("convolutions", 5), ("attention", 5), ("strips", 12)):
        added[name].add_argument("--rounds", type=int, default=rounds)
    added["text-cache"].add_argument("--ckpt")
    added["convolutions"].add_argument("--threads", type=int, default=1)
    added["strips"].add_argument("--size", type=int, default=512)
    added["strips"].add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.measure(args)


if __name__ == "__main__":
    main()
