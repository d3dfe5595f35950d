"""Time the kernels of a guided step one by one, as JSON.

    python scripts/gpu_kernels.py OUT.json [--toy] [--device D]

Attention at the sizes of Stable Diffusion's layers with every kernel; its convolutions as PyTorch runs them, measured
by cuDNN, and as a matrix product; group norms; queries, keys and values as three products or one; and GEGLU.  Triton's
kernels are checked against PyTorch's before they are timed, and run on a GPU alone.  With --probe
only what the machine is: versions, rates of matmul and copy.
"""

import argparse
import functools
import importlib
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.bench.measure import alternating, calls_in_sample, ceiling, clock, median
from ldm_lite.models.ops import GEGLU
from ldm_lite.runtime import attention
from ldm_lite.runtime.fused_norm import written_out
from ldm_lite.runtime.precision import short_name
from ldm_lite.runtime.timed_layers import as_product
from ldm_lite.runtime.timing import measured_convolutions

ROUNDS = 7
# (tokens, tokens of the context, channels a head), at 512 px with eight heads
ATTENTION = [(4096, 4096, 40), (1024, 1024, 80), (256, 256, 160), (4096, 77, 40), (1024, 77, 80), (64, 64, 160)]
# (channels in, out, side)
CONVOLUTIONS = [
    *((320, 320, 64), (640, 320, 64), (960, 320, 64), (320, 640, 32), (640, 640, 32), (1920, 640, 32)),
    *((640, 1280, 16), (1280, 1280, 16), (2560, 1280, 16), (1280, 1280, 8), (2560, 1280, 8), (4, 320, 64)),
]
Times = dict[str, float | str]


def times(works: Mapping[str, Callable[[], object]], device: torch.device) -> Times:
    """Return the median microseconds of works that are timed in turn, or why one cannot run."""
    found: Times = {}
    able: dict[str, tuple[Callable[[], object], int]] = {}
    for name, work in works.items():
        try:
            work()
            able[name] = work, calls_in_sample(20 * clock(work, device))  # samples of about 10 ms
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0][:80]
    samples: dict[str, list[float]] = {name: [] for name in able}
    for number in range(ROUNDS):
        for name, (work, calls) in alternating(list(able.items()), number):
            samples[name].append(clock(lambda: [work() for _ in range(calls)], device) / calls)  # noqa: B023
    return found | {name: round(1e6 * median(each), 2) for name, each in samples.items()}


def probe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return what the machine is, and its rates."""
    cuda = device.type == "cuda"
    large = torch.empty(2**28 if cuda else 2**24, dtype=torch.uint8, device=device)
    other, seconds = torch.empty_like(large), []
    for _ in range(5):
        seconds.append(clock(lambda: other.copy_(large), device))
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "attention": attention.available(device, dtype),
        "matmul, TFLOP/s": round(ceiling(device, dtype), 2),
        "copy, GB/s": round(2 * large.numel() / min(seconds) / 1e9, 1),
    }


def attentions(device: torch.device, dtype: torch.dtype, batch: int, scale: int) -> dict[str, Times]:
    """Every kernel at the sizes of a guided step; the queries, keys and values are views, as the layers make them."""
    rows = {}
    for n, m, d in ATTENTION:
        n, m = max(1, n // scale), max(1, m // scale)
        q, k, v = (torch.randn(2 * batch, length, 8, d, device=device, dtype=dtype) for length in (n, m, m))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        works = {
            name: lambda function=attention._FUNCTIONS[name]: function(q, k, v)  # noqa: B023
            for name in attention.CANDIDATES
        }
        rows[f"{n} to {m}, {d} a head"] = times(works, device)
    return rows


def convolutions(device: torch.device, dtype: torch.dtype, batch: int, scale: int) -> dict[str, Times]:
    """PyTorch's choice, cuDNN's fastest, and a matrix product."""
    rows = {}
    for c, k, side in CONVOLUTIONS:
        c, k = max(4, c // scale), max(4, k // scale)
        x = torch.randn(2 * batch, c, side, side, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        weight = torch.randn(k, c, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last) / c
        plain = {"heuristic": lambda: F.conv2d(x, weight, padding=1), "matmul": lambda: as_product(x, weight, None)}  # noqa: B023
        row = times(plain, device)
        if device.type == "cuda":
            with measured_convolutions():
                row |= times({"measured": plain["heuristic"]}, device)
        rows[f"{c} to {k}, {side} x {side}"] = row
    return rows


def checked(ways: Mapping[str, Callable[[], Tensor]]) -> dict[str, Callable[[], object]]:
    """The ways, where one that is wrong raises instead."""
    found: dict[str, Callable[[], object]] = {}
    (first, right), *rest = ways.items()
    wanted = right().float()
    for name, way in rest:
        try:
            away = float((way().float() - wanted).norm() / wanted.norm())
            error = None if away < 1e-2 else RuntimeError(f"wrong by {away:.1e}")
        except Exception as raised:  # compilers raise anything
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        found[name] = way if error is None else functools.partial(_fail, error)
    return {first: right, **found}


def _fail(error: RuntimeError) -> None:
    raise error


def others(device: torch.device, dtype: torch.dtype, batch: int, scale: int) -> dict[str, Times]:
    """Group norms and GEGLU of each width, and queries, keys and values."""
    rows = {}
    for width, side in ((320, 64), (640, 32), (1280, 16)):
        width = max(32, width // scale // 32 * 32)
        norm = nn.GroupNorm(32, width, device=device, dtype=dtype)
        x = torch.randn(2 * batch, width, side, side, device=device, dtype=dtype)
        x = x.to(memory_format=torch.channels_last)
        ways = {"PyTorch": lambda: F.silu(norm(x)), "written out": lambda: F.silu(written_out(x, norm))}  # noqa: B023
        gate, long = GEGLU(width, 4 * width).to(device, dtype), x.permute(0, 2, 3, 1).flatten(1, 2)
        gates = {"PyTorch": lambda: gate(long)}  # noqa: B023
        if device.type == "cuda":
            by_triton, given = importlib.import_module("ldm_lite.runtime.norm_kernels").launch, (norm.weight, norm.bias)
            ways["Triton"] = lambda: by_triton(x, *given, 32, norm.eps, True)[0]  # noqa: B023
            geglu = importlib.import_module("ldm_lite.runtime.geglu_kernel")
            for tile in geglu.TILES:
                gates["Triton, {} x {}".format(*tile)] = functools.partial(
                    geglu.launch, long, gate.proj.weight, gate.proj.bias, *tile
                )
        rows[f"group norm, {width}, {side} x {side}"] = times(checked(ways), device)
        rows[f"GEGLU, {width}, {side} x {side}"] = times(checked(gates), device)
        three = [torch.randn(width, width, device=device, dtype=dtype) for _ in range(3)]
        one, tokens = torch.cat(three), x.permute(0, 2, 3, 1).flatten(1, 2)
        rows[f"q, k, v, {width}, {side} x {side}"] = times(
            {
                "three": lambda: [F.linear(tokens, weight) for weight in three],  # noqa: B023
                "one": lambda: F.linear(tokens, one).chunk(3, dim=-1),  # noqa: B023
            },
            device,
        )
    return rows


def main() -> None:
    """Measure and write the file after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="small sizes, for a test of this script")
    parser.add_argument("--probe", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here that torch can use: give --device cpu")
    dtype, scale = (torch.float16, 1) if device.type == "cuda" else (torch.float32, 16)
    result: dict[str, Any] = {"dtype": short_name(dtype), "probe": probe(device, dtype)}
    parts = {"attention": attentions, "3x3 convolutions": convolutions, "norms and projections": others}
    with torch.no_grad():
        for batch in () if args.probe else (1,) if args.toy else (1, 16):
            for title, part in parts.items():
                result[f"{title}, batch {batch}"] = part(device, dtype, batch, scale)
                args.out.write_text(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
