"""How the lab calls the coordinator and a peer, and what it calls the coordinator's process."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

__all__ = ["COORDINATOR", "Programs"]

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """How `edit-coordinator` and `edit-peer` are called; tests put their own in."""

    coordinator: tuple[str, ...] = field(default_factory=lambda: (sys.executable, "-m", "aggregator"))
    peer: tuple[str, ...] = field(default_factory=lambda: (sys.executable, "-m", "peers"))
