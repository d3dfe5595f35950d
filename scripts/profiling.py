"""Count kernels and time parts of the networks.

    python scripts/profiling.py kernels            # operators of a forward of Stable Diffusion 1's UNet, and diffusers'
    python scripts/profiling.py convolutions       # 3x3 convolutions on a CPU, PyTorch's and Winograd's
    python scripts/profiling.py attention          # a step on a CPU with PyTorch's attention, and with ours
    python scripts/profiling.py operators          # where a step spends its time, on a CPU or a GPU
    python scripts/profiling.py attention-kernels  # each kernel of attention, by shape, on a CPU or a GPU
    python scripts/profiling.py roofline           # kernels of a step in tier graph, and estimates of their times
    python scripts/profiling.py strips             # the decoder on a CPU, whole and in strips
    python scripts/profiling.py training           # operators and time of a training step, plain, compiled, captured

The counts need no GPU; their lines for diffusers need `pip install diffusers`.  (Not named profile.py: scripts that
import torch would find it in place of Python's own module.)
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ldm_lite.cli import threads

os.environ.update(threads.settings())  # before torch is loaded

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ldm_lite
from ldm_lite.bench.checkpoints import open_model, random_checkpoint
from ldm_lite.bench.measure import alternating
from ldm_lite.checkpoint.reader import load_weights, on_meta, parts_of
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.denoise import Guided, run_row
from ldm_lite.core.networks import pick_device
from ldm_lite.core.plan import NUM_REGISTERS, Row
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.models.unet import LDMUNet
from ldm_lite.runtime import attention as attention_backends
from ldm_lite.runtime import cpu, fused, joined, timing
from ldm_lite.runtime.memory import keep_freed_memory, weights_channels_last
from ldm_lite.runtime.patching import unpatch
from ldm_lite.runtime.setup import prepare_networks
from ldm_lite.runtime.tiling import tiled
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

SD1 = FAMILY_ROWS["sd1"]


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
        unet: Any = LDMUNet(SD1.unet).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        count("ours", lambda: unet(x, t, context))
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


# ---- an estimate for a GPU ------------------------------------------------------------------------------------------
# What a guided step of Stable Diffusion 1 runs in tier graph, counted on meta tensors, with an H100's rates.  CUDA does
# what meta does not: group norm makes NCHW, convolutions make NHWC again, and add their bias in a kernel of its own.

CLASSES = {  # of kernels, by what is in their names; the first that fits counts, and pointwise if none does
    "copies": r"nchwtonhwc|nhwctonchw|converttensor|transpose|memcpy|memset|copy|cat|clone|_to_copy|contiguous",
    "attention": r"flash|fmha|sdpa|attention|mha",
    "norms": r"norm|moments|fusedparams",
    "convolutions": r"fprop|conv|winograd|implicit|dgrad|wgrad",
    "products": r"gemm|nvjet|cutlass|cublas|splitk|matmul|gemv|addmm|bmm|::mm|triton_mm|triton_tem",
}
FLOPS, BYTES, LAUNCH_US, LEAST_US = 650e12, 2.6e12, 1.2, 1.5  # rates that large kernels reach; between two; of one


def class_of(name: str) -> str:
    """Return the class of a kernel, or of an operator, by its name."""
    names = (kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE))
    return next(names, "pointwise")


class Estimated(TorchDispatchMode):
    """Sums kernels and microseconds by class, as CUDA would run the operators of a block on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, list[float]] = {name: [0, 0.0] for name in (*CLASSES, "pointwise")}

    def add(self, kind: str, size: float, flops: float = 0.0, least_us: float = LEAST_US) -> None:
        """Add a kernel that moves so many bytes."""
        row = self.sums[kind]
        row[0] += 1
        row[1] += LAUNCH_US + max(least_us, 1e6 * size / BYTES, 1e6 * flops / FLOPS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if func.is_view or name in ("_unsafe_view", "empty", "new_empty", "empty_strided", "empty_like", "detach"):
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors)
        if name == "native_group_norm":
            x, result = args[0], out[0]
            if not x.is_contiguous():
                self.add("copies", 2 * x.nbytes, least_us=2.0)
            self.add("norms", x.nbytes, least_us=3.0 + x.nbytes / x.element_size() / 64 / 512 * 0.25)  # 64 blocks
            self.add("norms", 0, least_us=2.0)
            self.add("norms", 2 * x.nbytes)
            return result.contiguous(), *out[1:]
        if name == "convolution":
            x, weight, bias = args[:3]
            if not x.is_contiguous(memory_format=torch.channels_last):
                self.add("copies", 2 * x.nbytes, least_us=2.0)
            flops = 2.0 * out.numel() * weight[0].numel()
            self.add("convolutions", size, flops, 1.0 + weight[0].numel() / 200)  # tiles are too few for all SMs
            if bias is not None:
                self.add("pointwise", 2 * out.nbytes)
            return out.contiguous(memory_format=torch.channels_last)
        if name in ("mm", "addmm", "bmm", "linear"):
            inner = args[1 if name == "addmm" else 0].shape[-1]
            self.add("products", size, 2.0 * out.numel() * inner, 2.5 + inner / 800)
        elif name == "group_norm" and args[0][0, 0].numel() > fused.MOST_POSITIONS:  # statistics, and the result
            self.add("norms", args[0].nbytes)
            self.add("norms", 2 * args[0].nbytes)
        elif name == "_estimated_attention":
            q, k = args[:2]
            padded = (64 if q.shape[-1] <= 64 else 128 if q.shape[-1] <= 128 else 192) / q.shape[-1]
            flops = 4.0 * q.numel() * k.shape[2] * padded
            self.add("attention", size, flops * FLOPS / 450e12, 4.0)
        else:
            self.add("pointwise" if name == "biased_sum" else class_of(name), size)
        return out


@torch.library.custom_op("ldm_lite_scripts::_estimated_attention", mutates_args=())
def _estimated_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return one_operator(q, k, v)


@_estimated_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@torch.no_grad()
def estimate(batch: int) -> dict[str, list[float]]:
    """Return kernels, and microseconds, of a guided step in tier graph, by class."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return _estimated_attention(q, k, v)

    with mock.patch.object(F, "scaled_dot_product_attention", attention), torch.device("meta"):
        unet: Any = LDMUNet(SD1.unet).half().requires_grad_(False)
        weights_channels_last(unet)
        fused.use(unet)
        joined.use(unet)
        row = Row(*(torch.empty(shape) for shape in ((), (2,), (2,), (2,), (NUM_REGISTERS, NUM_REGISTERS + 2))))
        noise, registers = torch.empty(batch, 4, 64, 64), torch.empty(NUM_REGISTERS, batch, 4, 64, 64)
        context = {"context": torch.empty(2 * batch, 77, 768, dtype=torch.float16)}
        guided = Guided(context, torch.empty(2, 1, 1, 1, 1), (False, True))
        with Estimated() as estimated:
            run_row(unet, registers, row, noise, guided)
    return estimated.sums


def print_classes(measured: Mapping[str, Sequence[float]], estimated: Mapping[str, Sequence[float]]) -> None:
    """Print kernels and milliseconds by class, measured beside estimated."""
    print("| class | kernels | ms | estimated kernels | ms |\n|---|---:|---:|---:|---:|")
    for name in dict.fromkeys((*measured, *estimated)):
        cells = [
            f"{rows[name][0]:.0f} | {rows[name][1]:.2f}" if name in rows else " | " for rows in (measured, estimated)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    sums = [
        f"{sum(r[0] for r in rows.values()):.0f} | {sum(r[1] for r in rows.values()):.2f}"
        for rows in (measured, estimated)
    ]
    print(f"| sum | {' | '.join(sums)} |", flush=True)


def roofline(args: argparse.Namespace) -> None:
    """Kernels of a guided step of Stable Diffusion 1 at 512 px in tier graph, and an estimate of an H100's time."""
    print_classes({}, {name: (count, us / 1e3) for name, (count, us) in estimate(args.batch).items()})


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
        low, median, high = statistics.quantiles([scale * second for second in seconds], n=4)
        print(f"{name}: {median:.2f} {unit}, quartiles {low:.2f} to {high:.2f}")
    first, second = times.values()
    print(f"ratio {statistics.median(b / a for a, b in zip(first, second, strict=True)):.3f}")


def strips(args: argparse.Namespace) -> None:
    """Stable Diffusion's decoder on a CPU, the whole image at once and strip by strip."""
    dtype = getattr(torch, args.dtype)
    whole = AutoencoderKL(SD1.vae).eval().to(dtype)
    prepare_networks({"vae": whole}, RuntimeOptions(), torch.device("cpu"))
    unpatch(whole.decoder)  # which takes strips by itself
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
        vae: Any = build_network(SD1.specs["vae"])
    weights = parts_of(random_checkpoint("sd1", SD1))["vae"]
    load_weights(vae, weights, "vae", torch.device("cpu"), torch.float32)
    latents = torch.randn(1, 4, 32, 32)
    # The decoder first, and in this order: keep_freed_memory cannot be undone.
    setups = {"PyTorch's": None, "memory kept": keep_freed_memory, "and ours": lambda: cpu.use(vae)}
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
        way = cpu.way(x, last)
        ours = functools.partial(cpu.WAYS[way], x, last, bias)
        if x.numel() < weight.numel():
            x = x.contiguous()  # else the plain one would take longer still
        works: dict[str, Callable[[], Tensor]] = {
            "plain": functools.partial(F.conv2d, x, weight, bias, padding=1),
            "ours": ours,
        }
        plain, fast = (1e3 * min(seconds) for seconds in timed(works, args.rounds, clock).values())
        wanted, output = (work() for work in works.values())
        difference = (output - wanted).norm() / wanted.norm()
        shape = f"{batch} x {channels} -> {num_out}, {side} x {side}"
        print(f"{shape}, {way}, {plain:.1f}, {fast:.1f}, {fast / plain:.2f}, {difference:.1e}", flush=True)


def sd1_step() -> tuple[Any, Tensor, Tensor, Tensor]:
    """Stable Diffusion's UNet on the CPU with random weights, and its inputs for a guided step at 512 px."""
    with on_meta():
        unet: Any = build_network(SD1.specs["unet"])
    load_weights(unet, parts_of(random_checkpoint("sd1", SD1))["unet"], "unet", torch.device("cpu"), torch.float32)
    prepare_networks({"unet": unet}, RuntimeOptions(), torch.device("cpu"))
    return unet, torch.randn(2, 4, 64, 64), torch.tensor([500.0, 500.0]), torch.randn(2, 77, 768)


def operators(args: argparse.Namespace) -> None:
    """Time by operator, on a GPU by kernel, of guided steps at the model's size, after a warm-up.

    The difference between the clock and the sum of the kernels is the gaps between them.
    """
    pipe = ldm_lite.load(open_model(args.size, None, args.device or str(pick_device(None))), device=args.device,
                         compile=args.compile)  # fmt: skip
    width = pipe.family.unet.context_dim
    noise, cond, uncond = pipe.noise(1), *(Conditioning(torch.randn(1, 77, width)) for _ in range(2))

    def run(steps: int) -> float:
        start = time.perf_counter()
        pipe.denoise(noise, cond, uncond, pipe.plan("ddim", steps)).cpu()
        return time.perf_counter() - start

    run(5)  # a CUDA graph is captured at the third step
    print(f"{1e3 * run(args.steps) / args.steps:.2f} ms a step by the clock, without the profiler", flush=True)
    with torch.profiler.profile() as profile:
        seconds = run(args.steps)
    on_cuda = pipe.device.type == "cuda"
    by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    if args.classes:
        kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
        events = [event for event in profile.key_averages() if event.device_type == kind]
        sums: Times = {name: [0.0, 0.0] for name in (*CLASSES, "pointwise")}
        for event in events:
            row = sums[class_of(event.key)]
            row[0], row[1] = row[0] + event.count / args.steps, row[1] + getattr(event, by) / 1e3 / args.steps
        gaps = 1e3 * seconds / args.steps - sum(ms for _, ms in sums.values())
        estimates = {name: (count, us / 1e3) for name, (count, us) in estimate(1).items()} if args.size == "sd1" else {}
        print_classes({**sums, "gaps": [0.0, gaps]}, estimates)
    print(profile.key_averages().table(sort_by=by, row_limit=args.rows, max_name_column_width=80))
    print(f"{1e3 * seconds / args.steps:.2f} ms a step by the clock, profiled")


@torch.no_grad()
def attention_kernels(args: argparse.Namespace) -> None:
    """Microseconds of each kernel of attention, in half precision on a GPU, at Stable Diffusion's sizes by batch."""
    device = pick_device(None)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    for batch in (1,) if args.toy else (1, 4, 16):
        for side, channels in ((64, 40), (32, 80), (16, 160), (8, 160))[2 if args.toy else 0 :]:
            for tokens in (side * side, 77):
                q = torch.randn(2 * batch, 8, side * side, channels, device=device, dtype=dtype)
                k = torch.randn(2 * batch, 8, tokens, channels, device=device, dtype=dtype)
                print(f"batch {batch}, {side * side} to {tokens} tokens, {channels} channels: ", end="")
                for name in attention_backends.CANDIDATES:
                    # Zeros between the channels and the next power of two change nothing but the time.
                    padded = [F.pad(x, (0, (64 if channels <= 64 else 128) - channels)) for x in (q, k)]
                    ways = {name: (q, k)} | ({f"{name}, padded": padded} if channels < 128 and name != "math" else {})
                    for label, (query, key) in ways.items():
                        try:
                            function = attention_backends.attention_function(name, device, dtype, query.shape[-1])
                            seconds = timing._seconds(functools.partial(function, query, key, key), device)
                            print(f"{label} {1e6 * seconds:.0f}", end="; ", flush=True)
                        except Exception as error:  # any error is a result
                            print(f"{label} - ({type(error).__name__})", end="; ", flush=True)
                print()


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
        return (cpu.blocked if k.shape[2] >= 4096 else F.scaled_dot_product_attention)(q, k, v)

    works = {"PyTorch's": lambda: run(F.scaled_dot_product_attention), "ours": lambda: run(ours)}
    print(timing.machine())
    print_times(timed(works, args.rounds), "s")


def training(args: argparse.Namespace) -> None:
    """A training step of the bundled model in bfloat16: its operators, and milliseconds; on a GPU compiled ones too."""
    # Here, since they take seconds to import, which other measurements on a GPU do without.
    from ldm_lite.train.batches import Batch
    from ldm_lite.train.losses import DiffusionLoss
    from ldm_lite.train.options import TrainOptions
    from ldm_lite.train.trainer import Trainer

    device, numbers = pick_device(None), tuple(range(args.batch))
    ways: dict[str, dict[str, Any] | None] = {"plain": None}
    if device.type == "cuda":
        ways |= {"compiled": {}, "compiled, in CUDA graphs": {"mode": "reduce-overhead"}}
    for name, how in ways.items():
        model = ldm_lite.load(device=device, dtype="fp32", compile="off", kernels="plain")
        unet, (_, channels, *sides) = model.unet, model.noise(1).shape
        if how is not None:
            unet.compile(**how)
        moments = torch.zeros(args.batch, 2 * channels, *sides)
        text = torch.zeros(args.batch, 77, model.family.unet.context_dim)
        loss = DiffusionLoss(model, {"unet": unet}, empty={"context": text[:1]})
        config = TrainOptions(steps=10**6, batch_size=args.batch, lr=1e-5, warmup=0, ema_decay=0.999, save_every=10**6,
                              data_workers=0)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            trainer: Any = Trainer(loss, config, Path(folder), torch.bfloat16)
            trainer._kernels = contextlib.nullcontext  # attention as on a GPU

            def step(trainer: Any = trainer, text: Tensor = text, moments: Tensor = moments) -> None:
                trainer._step(iter([Batch(moments, [""] * args.batch, text, numbers)]))
                trainer.step += 1

            start = time.perf_counter()
            step()
            trainer.read()
            print(f"{name}: the first step took {time.perf_counter() - start:.1f} s", flush=True)
            if how is None:
                with Counted() as whole:
                    step()
                inputs = (moments[:, :channels].to(device), torch.zeros(args.batch, device=device))
                with Counted() as of_network, trainer.autocast():
                    out = unet(*inputs, text.to(device))
                    out.sum().backward()
                print(f"{whole.calls.total()} operators, of which {of_network.calls.total()} the network's")
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            trainer.read()
            print(f"{name}: {1e3 * (time.perf_counter() - start) / args.steps:.1f} ms a step", flush=True)


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    measurements = {
        "kernels": kernels,
        "convolutions": convolutions,
        "attention": attention,
        "operators": operators,
        "attention-kernels": attention_kernels,
        "roofline": roofline,
        "strips": strips,
        "training": training,
    }
    added = {}
    for name, measure in measurements.items():
        added[name] = commands.add_parser(name, description=measure.__doc__)
        added[name].set_defaults(measure=measure)
    for name, rounds in (("convolutions", 5), ("attention", 5), ("strips", 12)):
        added[name].add_argument("--rounds", type=int, default=rounds)
    added["convolutions"].add_argument("--threads", type=int, default=1)
    added["strips"].add_argument("--size", type=int, default=512)
    added["strips"].add_argument("--dtype", default="float32")
    added["operators"].add_argument("--device")
    added["operators"].add_argument("--size", default="sd1", help="sd1, another family with random weights, or bundled")
    added["operators"].add_argument("--compile")
    added["operators"].add_argument("--steps", type=int, default=1)
    added["operators"].add_argument("--rows", type=int, default=12)
    added["operators"].add_argument("--classes", action="store_true", help="sums by class of kernel too")
    added["attention-kernels"].add_argument("--toy", action="store_true", help="few sizes")
    added["roofline"].add_argument("--batch", type=int, default=1)
    added["training"].add_argument("--batch", type=int, default=512)
    added["training"].add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.measure(args)


if __name__ == "__main__":
    main()
