"""The fastest of several ways to compute the same, timed once for each device, dtype and size.

On a GPU choices last as long as the process.  Those of a CPU are kept in a file, by its model, threads and version of
torch, so that later processes neither time again nor choose otherwise, which would change the last bits of images.
"""

import contextlib
import functools
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("ldm_lite")

CALLS = 10  # in a row on a GPU, where a small kernel is over before the next starts
MARGIN = 0.97  # fraction of the default's time that another way must beat
CPU_MARGIN = 0.9  # times vary more on a CPU that runs other programs
_CHOICES: dict[Hashable, str] = {}
_TIMES = threading.RLock()  # one thread times at a time: two would slow each other; a timed function may time its parts
CAPTURES = threading.Lock()  # one thread of the process captures a CUDA graph at a time


def fastest(
    label: str, shape_key: Hashable, candidates: Mapping[str, Callable[[], object]], device: torch.device
) -> str:
    """Return the name of the fastest way; the first is the default, which another must clearly beat.

    label names it in the log, shape_key tells sizes and dtype.  A candidate that raises is left out, unless it is the
    default.
    """
    on_cpu = device.type == "cpu"
    full_key = label, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, shape_key
    if full_key in _CHOICES:
        return _CHOICES[full_key]
    with _TIMES:
        if full_key not in _CHOICES:
            known = _kept(f"{label}, {shape_key}", candidates) if on_cpu else None
            _CHOICES[full_key] = known or _time(label, f"{label}, {shape_key}", candidates, device)
        return _CHOICES[full_key]


def _time(label: str, size: str, candidates: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """Time the candidates, and return the choice; a CPU's is written to the file."""
    if not _CHOICES:
        log.info("timing kernels for this %s (once)", "CPU" if device.type == "cpu" else "GPU")
    on_cpu, seconds, default = device.type == "cpu", dict.fromkeys(candidates, math.inf), next(iter(candidates))
    for number in range(7 if on_cpu else 4):  # in turn, of which the best counts; the first round warms up
        for name, way in list(candidates.items()):
            try:
                taken = _seconds(way, device)
            except Exception as error:  # compilers raise anything
                if name == default:
                    raise
                log.info("%s: %s does not run here (%s)", label, name, str(error).partition("\n")[0][:150])
                candidates = {key: candidate for key, candidate in candidates.items() if key != name}
                continue
            seconds[name] = min(seconds[name], taken) if number else math.inf
    best = min(candidates, key=seconds.__getitem__)
    chosen = best if seconds[best] < (CPU_MARGIN if on_cpu else MARGIN) * seconds[default] else default
    if on_cpu:
        chosen = _remember(size, chosen, candidates)
    log.debug("%s: %s (%s)", label, chosen, ", ".join(f"{name} {1e6 * seconds[name]:.0f} us" for name in candidates))
    return chosen


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call; on a GPU those of a replayed CUDA graph, without the launches from Python."""
    if device.type != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    way()  # one-time work must not be captured
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # Around the capture, which does not restore the stream if it fails.
    with CAPTURES, torch.cuda.stream(stream), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            way()
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / CALLS


def cache_folder() -> Path:
    """Return the folder that keeps what was measured or compiled: $XDG_CACHE_HOME/ldm_lite, usually in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ldm_lite"


def choices_file() -> Path:
    """Return the file of choices for CPUs: lines of the machine, what was timed and the fastest way, between tabs."""
    return cache_folder() / "kernels.txt"


def machine() -> str:
    """Describe what the choices for this CPU depend on: model, instructions, threads and version of torch."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{_cpu_model()}, {instructions}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@functools.cache
def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def summary() -> str:
    """Say in one line how many choices for this CPU are kept, and where."""
    timed = _read()
    return f"{len(timed)} kernels timed, {choices_file()}" if timed else "no kernels timed yet"


def _read() -> dict[str, list[str]]:
    """Return the file's entries for this machine: label, and the fastest candidates, the oldest first."""
    try:
        lines = [line.split("\t") for line in choices_file().read_text("utf-8", "replace").splitlines()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning("%s cannot be read (%s): kernels are timed again", choices_file(), error)
        return {}
    names: dict[str, list[str]] = {}
    for line in lines:
        if len(line) == 3 and line[0] == machine():
            names.setdefault(line[1], []).append(line[2])
    return names


def _kept(size: str, candidates: Collection[str]) -> str | None:
    """Return the first choice of the file that is one of these candidates, or None."""
    return next((name for name in _read().get(size, ()) if name in candidates), None)


def _remember(size: str, name: str, candidates: Collection[str]) -> str:
    """Add a choice to the file, and return it; if another process was first, return its choice if it is a candidate."""
    path = choices_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a full disk or a crash
        with open(path, "a", encoding="utf-8") as file:  # the system appends whole lines, also of several processes
            file.write("\n" * is_cut + f"{machine()}\t{size}\t{name}\n")
    except OSError as error:
        log.warning("%s cannot be written (%s): each process times its kernels again", path, error)
        return name
    return _kept(size, candidates) or name


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
