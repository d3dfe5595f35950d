"""Memory of the process: pages of mapped files and free blocks of the heap, given back to the system or kept."""

import ctypes
import math
import mmap
import os
import sys

from torch import Tensor, nn

from ldm_lite.core.layers import channels_last


class MappedPages:
    """Gives back the memory of tensors in memory-mapped files.

    For tensors that were cast, copied or moved: a mapping lives as long as any tensor in it, and keeps the pages that
    were read.  Reading such a tensor again reads the file.  The mappings are read once, at the first
    release.  On Linux only: other systems take such memory back when they need it.
    """

    _mappings: list[tuple[int, int]] | None = None  # addresses (begin, end)

    def release(self, tensor: Tensor) -> None:
        """Give back the whole pages of a tensor in a mapped file; do nothing for others."""
        if sys.platform != "linux":
            return
        if self._mappings is None:
            self._mappings = []
            with open("/proc/self/maps") as file:
                for line in file:
                    addresses, permissions, _, _, inode = line.split(maxsplit=5)[:5]
                    if permissions[3] == "p" and inode != "0":  # a private file mapping, as torch and safetensors make
                        begin, stop = (int(address, 16) for address in addresses.split("-"))
                        self._mappings.append((begin, stop))
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= stop for begin, stop in self._mappings):
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED))


def physical_memory() -> int | None:
    """Return the bytes of the machine's memory; None where the system does not say."""
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not hasattr(os, "sysconf") or not {*names} <= os.sysconf_names.keys():
        return None
    return math.prod(map(os.sysconf, names))


def trim_heap() -> None:
    """Return the free memory of the C library's heap to the system.  Without glibc this does nothing."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def weights_channels_last(network: nn.Module) -> None:
    """Make the weights of a network's 2-D convolutions channels last; 3-D ones stay as they are."""
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = channels_last(parameter.data)


def keep_freed_memory() -> None:
    """Let the C library keep up to 2 GiB of freed memory; without glibc this does nothing.

    By default it returns large blocks to the system and gets them back zeroed, page by page: a twelfth of the
    decoder's time on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
