"""Many threads share few heaps of the C library, large blocks are not in them, and what is free goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes, sys, threading
from edit.heaps import limit_heaps
if sys.argv[1] == "limited":
    limit_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def allocate():
    together.wait()
    for _ in range(1000):
        libc.malloc(ctypes.c_size_t(5000))
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.restype = ctypes.c_void_p
out = libc.fdopen(1, b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fflush(ctypes.c_void_p(out))
"""


def heaps(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.count("<heap nr=")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_threads_share_two_heaps() -> None:
    assert heaps("as usual") > 2 >= heaps("limited") >= 1


FREED = """
import ctypes, sys
from edit.heaps import return_free_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
blocks = [libc.malloc(ctypes.c_size_t(100_000)) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
full = anonymous()
for block in blocks[:-1]:  # the last one keeps the rest from shrinking by itself
    libc.free(ctypes.c_void_p(block))
kept = anonymous()
return_free_memory()
print(full - kept, full - anonymous())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_free_memory_goes_back_although_something_above_it_is_in_use() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=100)
    by_itself, returned = map(int, done.stdout.split())  # KiB
    assert by_itself < 10_000 and returned > 90_000


LARGE = """
import ctypes, sys
from edit.heaps import map_large_blocks
if sys.argv[1] == "mapped":
    map_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(20 << 20))))
blocks = [libc.malloc(ctypes.c_size_t(4 << 20)) for _ in range(20)]
above = libc.malloc(ctypes.c_size_t(1_000_000))  # keeps the heap from shrinking
for block in blocks:
    ctypes.memset(block, 1, 4 << 20)
full = anonymous()
for block in blocks:
    libc.free(ctypes.c_void_p(block))
print(full - anonymous())
"""


def returned(how: str) -> int:
    """Return how many KiB of freed large blocks go back by themselves, after a larger one was freed."""
    done = subprocess.run([sys.executable, "-c", LARGE, how], capture_output=True, text=True, check=True, timeout=100)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_large_blocks_go_back_as_soon_as_they_are_free() -> None:
    assert returned("as usual") < 10_000 and returned("mapped") > 75_000
