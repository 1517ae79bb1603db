"""Many threads of the coordinator share few heaps of the C library."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes, sys, threading
from aggregator.server import limit_heaps
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
