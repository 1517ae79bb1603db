"""What the coordinator works with: disk, buffers, threads, clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.run_feed import RunFeed
from aggregator.security.members import Members
from aggregator.storage.high_water import HighWaterMark
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.privacy_budget import PrivacyBudget
from aggregator.storage.store import Store
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.worker_thread import Background
from edit.fragments.schema import Schema

__all__ = ["Clock", "Resources"]


@dataclass(frozen=True, slots=True)
class Clock:
    """Injected time. monotonic: seconds for leases and deadlines; unix: seconds since 1970 for people."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one run works with."""

    store: Store  # the outer state on disk
    uploads: UploadBuffer  # bytes on their way in
    members: Members  # who may be here
    orders: OperatorFlags  # whether the operator paused or drained the run
    background: Background  # the worker thread, and tasks beside it
    feed: RunFeed  # the run's events, for every subscriber
    mark: HighWaterMark | None = None  # below which a restart does not go on; None keeps none
    deadlines: Path | None = None  # the file of the peers' measured times; None keeps none
    privacy: PrivacyBudget | None = None  # with privacy.level = "organisation"
    # Is given the schema of what is recovered; raises ConfigError where the settings do not fit it.
    fits: Callable[[Schema], None] = lambda schema: None
    # Returns the role for which a name has an open invitation; '': it has none.
    invited: Callable[[str], str] = lambda peer_id: ""
    # Makes the settings those of the next start, too: once they fit what is recovered, before anything is written with them.
    keep_settings: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=Clock)
