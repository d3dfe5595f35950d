"""Time, memory and arithmetic: the instruments of every measurement.

A sample is the time of several calls in a row, on CUDA between two events with one synchronisation at the end.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")
SAMPLE_S = 0.2  # duration of a sample: long against the clock's resolution
MAX_CALLS = 50


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work() takes on the device until it has finished."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):  # events belong to the current device
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        work()
        after.record()
        torch.cuda.synchronize(device)
    return before.elapsed_time(after) / 1000


def calls_in_sample(seconds: float) -> int:
    """Return the number of calls, each of this duration, in one sample."""
    return max(1, min(MAX_CALLS, round(SAMPLE_S / max(seconds, 1e-6))))


def alternating(items: Sequence[T], round_number: int) -> Sequence[T]:
    """Return A B C in even rounds, C B A in odd ones, so that a machine that slows down affects all equally."""
    return items if round_number % 2 == 0 else items[::-1]


def spread(samples: Sequence[float]) -> float:
    """Return half the interquartile range, as a share of the median; 0 for fewer than three samples."""
    if len(samples) < 3:
        return 0.0
    low, median, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / median


def status(name: str) -> int | None:
    """Return a size in bytes from Linux's /proc/self/status; None on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best TFLOP/s of large square matmuls: this machine's current limit in this dtype."""
    best = 0.0
    for side in (1024, 2048, 4096, 8192):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        once = min(clock(lambda: a @ b, device) for _ in range(3))  # noqa: B023 (called at once)
        count = calls_in_sample(once)
        seconds = min(clock(lambda: [a @ b for _ in range(count)], device) / count for _ in range(3))  # noqa: B023
        best = max(best, 2 * side**3 / seconds / 1e12)
        if once > SAMPLE_S / 4:  # large enough; larger ones would take long
            break
    return best


def flops(work: Callable[[], object]) -> int:
    """Count the floating-point operations of work(), 2 per multiply-add; on the meta device nothing is computed.

    Convolutions, matmuls and attention products are counted; the rest is below a thousandth.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
