"""Give memory back to the system: pages of memory-mapped files, and free blocks of the heap."""

import ctypes
import mmap
import sys

from torch import Tensor


class MappedPages:
    """Gives back the memory of tensors in memory-mapped files.

    For tensors that were cast, copied or moved: a mapping lives as long as any tensor in it, and keeps the pages that
    were read.  Reading such a tensor again reads the file.  The mappings are those of the process at the
    first release.  On Linux only: other systems take such memory back when they need it.
    """

    def __init__(self) -> None:
        self._mappings: list[tuple[int, int]] = []

    def release(self, tensor: Tensor) -> None:
        """Give back the whole pages of a tensor if it lies in a mapped file; else do nothing."""
        if sys.platform != "linux":
            return
        self._mappings = self._mappings or _private_files()
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= stop for begin, stop in self._mappings):
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED))


def trim_heap() -> None:
    """Return the free memory of the C library's heap to the system.  Without glibc this does nothing."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _private_files() -> list[tuple[int, int]]:
    """Address ranges (begin, end) of this process's private file mappings, which is how torch and safetensors map."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, permissions, _, _, inode = line.split(maxsplit=5)[:5]
            if permissions[3] == "p" and inode != "0":
                begin, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, stop))
    return found
