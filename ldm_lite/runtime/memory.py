"""Giving memory back: that through which tensors of memory-mapped files were read, and what the heap has left."""

import ctypes
import mmap
import sys
from collections.abc import Callable

from torch import Tensor


def releaser() -> Callable[[Tensor], None]:
    """-> a function that gives back the memory of a tensor that is of no more use, where it is a mapped file's.

    It is for tensors that were cast, copied or moved: a mapping lives as long as one tensor in it, and what was read
    through it would stay as long.  Whatever reads the tensor again reads the file.  The mappings are those at the first
    call.  On Linux alone: other systems take such memory back when they want it.
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
    """Give back what is free in the C library's heap, after work whose tensors are gone; without glibc nothing."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _private_files() -> list[tuple[int, int]]:
    """Where in this process's memory files are mapped for it alone, as torch and safetensors map them: (from, to)."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, permissions, _, _, inode = line.split(maxsplit=5)[:5]
            if permissions[3] == "p" and inode != "0":
                begin, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, stop))
    return found
