"""What the coordinator works with: disk, buffers, worker, clock. Values only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.run_feed import RunFeed
from aggregator.security.members import Members
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.store import Store
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.worker_thread import Background

__all__ = ["Clock", "Resources"]


@dataclass(frozen=True, slots=True)
class Clock:
    """Injected time. monotonic: seconds for leases and deadlines; unix: seconds since 1970 for people."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """store: the state on disk; intake: bytes on their way in; members: who may be here; orders: the operator's that
    stand; background: the worker thread; deadlines: the file of the measured times, None keeps none."""

    store: Store
    intake: UploadBuffer
    members: Members
    orders: OperatorFlags
    background: Background
    feed: RunFeed
    deadlines: Path | None = None
    clock: Clock = field(default_factory=Clock)
