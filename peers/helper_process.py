"""Programs of the aggregator's that answer a question, each a process of its own: none outlives the process that asked."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

from edit.command_line import ENDS_WITH

__all__ = ["ends_with_this"]


@contextlib.contextmanager
def ends_with_this(**environment: str) -> Iterator[dict[str, Any]]:
    """Yield arguments of `subprocess.run` for `python -m aggregator.swarm`: it ends with this process, however that ends, and
    at the latest with the context. environment: more variables for it.
    """
    its, own = os.pipe()  # nobody writes; the system closes `own` when this process ends
    if its <= 2:  # where stdin or stdout was closed (`<&-`): in the program, that number is another file
        low, its = its, fcntl.fcntl(its, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    try:
        yield {"pass_fds": (its,), "env": {**os.environ, **environment, ENDS_WITH: str(its)}}
    finally:
        os.close(own)
        os.close(its)
