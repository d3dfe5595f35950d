"""Returning memory to the system: pages of memory-mapped files that were read, and free memory of the heap."""

import ctypes
import mmap
import sys
from collections.abc import Callable

from torch import Tensor


def releaser() -> Callable[[Tensor], None]:
    """Return a function that releases the pages of a tensor in a memory-mapped file; other tensors are ignored.

    Call it for tensors that were cast, copied or moved: a mapping lives as long as one tensor in it, and would keep all
    pages that were read.  Reading the tensor again reads the file.  Mappings are looked up at the first call.  Only on
    Linux: other systems reclaim such pages themselves.
    """
    if sys.platform != "linux":
        return lambda tensor: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    mappings: list[tuple[int, int]] = []

    def release(tensor: Tensor) -> None:
        if not mappings:
            mappings.extend(_private_files())
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE  # whole pages
        if first < last and any(begin <= first and last <= stop for begin, stop in mappings):
            madvise(first, last - first, mmap.MADV_DONTNEED)

    return release


def trim_heap() -> None:
    """Return the free memory of the C library's heap to the system; without glibc this does nothing."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _private_files() -> list[tuple[int, int]]:
    """Return the address ranges (from, to) of private file mappings, the kind that torch and safetensors make."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, permissions, _, _, inode = line.split(maxsplit=5)[:5]
            if permissions[3] == "p" and inode != "0":
                begin, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, stop))
    return found
