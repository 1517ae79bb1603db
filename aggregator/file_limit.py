"""How many files a server's process may open."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_file_limit"]


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where the system has a lower limit than it says, the present one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
