"""Memory beside the heaps of the C library, for what is large; and those heaps, where that is glibc: few, and trimmed.

glibc gives each thread a heap of its own, which keeps what is free in it, for as long as anything above it is in use. A large
block is a mapping of its own, which goes back as soon as it is free; but each that is freed raises what counts as large, up to
32 MiB, so after the first vectors the next ones come from the heaps, too, and leave holes there that others do not fit into.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

__all__ = ["MAPPED_BYTES", "limit_heaps", "map_large_blocks", "mapping", "return_free_memory"]

MAPPED_BYTES = 1 << 20  # what is to be kept out of the heaps is at least so large: a mapping costs more than a block

_M_ARENA_MAX, _HEAPS = -8, 2  # of mallopt(3)
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2 << 20


def mapping(size: int) -> mmap.mmap:
    """Return so many bytes, zero at first, that are in no heap and go back to the system with the last view of them.

    In huge pages where the system has them: its small ones cost more CPU time than filling them does.
    """
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            made.madvise(mmap.MADV_HUGEPAGE)
    return made


def limit_heaps() -> None:
    """Let the threads of this process share two heaps; call it before they start.

    gRPC receives a message in any of its threads, so large messages, one after the other, would fill the heaps of all.
    """
    if (mallopt := _function("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, _HEAPS)


def map_large_blocks() -> None:
    """Let each block of 2 MiB or more be a mapping of its own, also after others were freed.

    That costs page faults: for a process that allocates few of them. Messages of 1 MiB and pieces of vectors are not large.
    """
    if (mallopt := _function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Give what is free in all heaps back. What is allocated next costs page faults: call it after something rare and large."""
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of the C library, or None where it does not have it."""
    found: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), name, None)
    return found
