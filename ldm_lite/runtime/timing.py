"""The fastest of several ways to compute the same, timed once a process for each device, dtype and size."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

log = logging.getLogger("ldm_lite")

CALLS = 10  # in a row on a GPU, where a small kernel is over before the next starts
MARGIN = 0.97  # of the default's time that another way must beat
_CHOICES: dict[Hashable, str] = {}


def fastest(what: str, key: Hashable, ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """Return the name of the fastest way; the first is the default, which another must clearly beat.

    what names it in the log, key tells sizes and dtype.  A way that raises is left out, unless it is the default.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    full_key = (what, name, key)
    if full_key not in _CHOICES:
        seconds, default = dict.fromkeys(ways, math.inf), next(iter(ways))
        for number in range(4):  # in turn; the first round warms up
            for each, way in list(ways.items()):
                try:
                    taken = _seconds(way, device)
                except Exception as error:  # compilers raise anything
                    if each == default or isinstance(error, torch.OutOfMemoryError):
                        raise
                    log.info("%s: %s does not run here (%s)", what, each, str(error).partition("\n")[0][:150])
                    ways = {other: ways[other] for other in ways if other != each}
                    continue
                seconds[each] = min(seconds[each], taken) if number else math.inf
        best = min(ways, key=seconds.__getitem__)
        _CHOICES[full_key] = best if seconds[best] < MARGIN * seconds[default] else default
        times = ", ".join(f"{each} {1e6 * seconds[each]:.0f} us" for each in ways)
        log.info("%s: %s (%s)", what, _CHOICES[full_key], times)
    return _CHOICES[full_key]


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call."""
    if device.type != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(CALLS):
        way()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / CALLS


@contextlib.contextmanager
def measured_convolutions() -> Iterator[None]:
    """Let cuDNN measure all of its algorithms in this block."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
