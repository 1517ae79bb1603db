"""How many files a server's process may open."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["files_for_connections", "raise_file_limit"]

_RESERVED = 256  # descriptors for the store, the logs and the libraries


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
