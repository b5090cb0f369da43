"""Memory that nothing uses any more, given back to the system. Linux; elsewhere nothing is done."""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_MADV_PAGEOUT = 21
_MAPS = Path("/proc/self/maps")


def give_back(places: Sequence[tuple[int, int]]) -> None:
    """Gives back what was freed, and the pages of dropped weights that lie in mapped files.

    glibc keeps what was freed between blocks that are still in use, unless it is asked. Weights
    that transformers loads are pages of a mapped checkpoint, which stays mapped while any tensor of
    it is used; paging out is safe for whoever reads them still, since they are read again then. The
    kernel does it for files that the user owns or may write.

    Args:
        places: first address and bytes of each weight.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    files = _mapped_files()
    for start, size in places:
        if any(first <= start and start + size <= end for first, end in files):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_PAGEOUT)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def _mapped_files() -> list[tuple[int, int]]:
    """First and last address of every mapping of a file."""
    found = []
    for line in _MAPS.read_text().splitlines() if _MAPS.is_file() else ():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            first, end = addresses.split("-")
            found.append((int(first, 16), int(end, 16)))
    return found
