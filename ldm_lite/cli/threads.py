"""What PyTorch's libraries read in the environment: how long threads spin, how many there are, what is kept.

At each of some 10,000 barriers of an image, threads of OpenMP spin until the last one comes: GNU's 300,000 times,
Intel's and LLVM's for 200 ms.  On a busy machine they occupy the core that the last one needs.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SPIN = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}  # docs/performance.md has the measurements
# By oneDNN, and by PyTorch's layer above it.
KERNELS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
_SPIN_OF_USERS = (*SPIN, "OMP_WAIT_POLICY", "KMP_LIBRARY")
_THREADS_OF_USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def prepare() -> None:
    """Set spins and threads for this process and for those that it starts, before it loads torch."""
    os.environ.update(settings())


def keep_no_kernels() -> None:
    """Keep no kernels of layers that have run, of which each library keeps 1024, unless the user has set a number."""
    for name, kernels in KERNELS_KEPT.items():
        os.environ.setdefault(name, kernels)


def settings(
    environment: Mapping[str, str] = os.environ,
    groups: Path = Path("/sys/fs/cgroup"),
    memberships: Path = Path("/proc/self/cgroup"),
) -> dict[str, str]:
    """Return the variables to set: none that the user has set, and none once torch is loaded, which has read them.

    groups and memberships are Linux's files about the control groups of this process and their limits.
    """
    result = dict[str, str]()
    if "torch" in sys.modules:
        return result
    if not any(name in environment for name in _SPIN_OF_USERS):
        result |= SPIN
    if not any(name in environment for name in _THREADS_OF_USERS):
        # OpenMP knows which cores a process may use (taskset), MKL what a core is, but neither knows a quota of time.
        cores = min(_quotas(groups, memberships), default=None)
        if cores is not None and cores < len(os.sched_getaffinity(0)):
            result["OMP_NUM_THREADS"] = str(math.ceil(cores))
    return result


def _quotas(groups: Path, memberships: Path) -> Iterator[float]:
    """The cores that may be used, as limited by each control group of this process and by those around it."""
    try:
        lines = os.fsdecode(memberships.read_bytes()).splitlines()  # groups may have any name
    except OSError:  # not Linux, or hidden
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers  # version 2 names no controller
        path = root / group.strip("/")  # a container may see its own group as the root alone
        for folder in (path, *path.parents[: len(path.parts) - len(root.parts)]):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                quota, period = map(int, (folder / "cpu.max").read_text().split())
                yield quota / period
            with contextlib.suppress(OSError, ValueError):  # version 1
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                if quota > 0:
                    yield quota / period
