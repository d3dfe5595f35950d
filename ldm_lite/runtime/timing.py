"""The fastest of several ways to compute the same, timed once for each device, dtype and size.

On a GPU choices last as long as the process.  Those of a CPU are kept in a file, by its model, threads and version of
torch, so that later processes neither time again nor choose otherwise, which would change the last bits of images.
"""

import contextlib
import functools
import json
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("ldm_lite")

CALLS = 10  # in a row on a GPU, where a small kernel is over before the next starts
MARGIN = 0.97  # of the default's time that another way must beat
CPU_MARGIN = 0.93  # times on a CPU that others use vary more
_CHOICES: dict[Hashable, str] = {}
_TIMES = threading.RLock()  # one thread times at a time: two would slow each other; what it times may time its parts
CAPTURES = threading.Lock()  # one thread of the process captures a CUDA graph at a time


def fastest(what: str, key: Hashable, ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """Return the name of the fastest way; the first is the default, which another must clearly beat.

    what names it in the log, key tells sizes and dtype.  A way that raises is left out, unless it is the default.
    """
    on_cpu = device.type == "cpu"
    full_key = what, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, key
    if full_key in _CHOICES:
        return _CHOICES[full_key]
    with _TIMES:
        if full_key not in _CHOICES:
            line = f"{what}, {key}"  # of the file
            known = _read().get(machine(), {}).get(line, "") if on_cpu else ""
            _CHOICES[full_key] = known if known in ways else _time(what, line, ways, device)
        return _CHOICES[full_key]


def _time(what: str, line: str, ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """Time the ways, and return the choice; that of a CPU goes to the file."""
    on_cpu, seconds, default = device.type == "cpu", dict.fromkeys(ways, math.inf), next(iter(ways))
    for number in range(3 if on_cpu else 4):  # in turn; the first round warms up
        for name, way in list(ways.items()):
            try:
                taken = _seconds(way, device)
            except Exception as error:  # compilers raise anything
                if name == default or isinstance(error, torch.OutOfMemoryError):
                    raise
                log.info("%s: %s does not run here (%s)", what, name, str(error).partition("\n")[0][:150])
                ways = {other: ways[other] for other in ways if other != name}
                continue
            seconds[name] = min(seconds[name], taken) if number else math.inf
    best = min(ways, key=seconds.__getitem__)
    chosen = best if seconds[best] < (CPU_MARGIN if on_cpu else MARGIN) * seconds[default] else default
    if on_cpu:
        chosen = _remember(line, chosen, ways)
    log.info("%s: %s (%s)", what, chosen, ", ".join(f"{name} {1e6 * seconds[name]:.0f} us" for name in ways))
    return chosen


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call; on a GPU those of a replayed CUDA graph, without the launches from Python."""
    if device.type != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    way()  # what happens once must not be captured
    graph = torch.cuda.CUDAGraph()
    with CAPTURES, torch.cuda.graph(graph, capture_error_mode="thread_local"):
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
    """Return the file of choices for CPUs, JSON: {machine: {what was timed: name of the fastest way}}."""
    return cache_folder() / "kernels.json"


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
    lines = _read().get(machine(), {})
    return f"{len(lines)} kernels timed, {choices_file()}" if lines else "no kernels timed yet"


def _read() -> dict[str, dict[str, str]]:
    """Return the file of choices; nothing if it is missing or broken."""
    try:
        machines = json.loads(choices_file().read_text())
        return {str(name): {str(k): str(v) for k, v in dict(lines).items()} for name, lines in dict(machines).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s): kernels are timed anew", choices_file(), error)
        return {}


def _remember(line: str, name: str, ways: Collection[str]) -> str:
    """Add a choice to the file, and return it; if another process was first, return its choice if it is a way."""
    path = choices_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            machines = _read()
            lines = machines.setdefault(machine(), {})
            chosen = lines[line] = lines[line] if lines.get(line) in ways else name
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(machines, indent=1))
            fresh.replace(path)
        return chosen
    except OSError as error:
        log.warning("%s cannot be written (%s): every process times its kernels", path, error)
        return name


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
