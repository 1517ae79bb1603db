"""How many files and threads the system lets this process have.

gRPC's C core ends a process by a signal, without a line, where the system refuses it a descriptor or a thread while it begins.
So whoever is about to use it asks for them first.
"""

from __future__ import annotations

import contextlib
import resource
import threading

from edit.errors import ConfigError

__all__ = ["LEAST_FILES", "LEAST_THREADS", "check_limits", "files_for_connections", "raise_file_limit"]

LEAST_FILES = 24  # that a process may have open, to train or to serve a few peers
LEAST_THREADS = 16  # those of gRPC, of the event loop, of torch, of the disk
_RESERVED = 256  # descriptors for the store, the logs and the libraries


def check_limits() -> None:
    """Raise ConfigError where this process may have too few files or threads to begin with. It takes a millisecond."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        raise ConfigError(f"this process may open {files} files, and needs {LEAST_FILES} at least; raise its limit (ulimit -n)")
    over, begun = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(LEAST_THREADS):
            thread = threading.Thread(target=over.wait, name="limit", daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError as error:
        raise ConfigError(
            f"the system lets this process begin {len(begun)} more threads, and it needs {LEAST_THREADS} at least; raise the "
            "limit of its user (ulimit -u) or of its container"
        ) from error
    finally:
        over.set()
        for thread in begun:
            thread.join()


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where the system has a lower limit than it says, the present one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def files_for_connections() -> int:
    """Return how many connections this process may have, so that descriptors are left for the disk."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = 1 << 20
    return max(2, files - _RESERVED if files > 2 * _RESERVED else files // 2)
