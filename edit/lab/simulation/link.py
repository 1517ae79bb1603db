"""Links in virtual time: when bytes that begin to travel now arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["HubLink", "Line"]


@dataclass(slots=True)
class HubLink:
    """One direction of the aggregator's own link: transfers take their turn in the order in which they begin."""

    bytes_per_s: float = math.inf
    free_at: float = 0.0

    def carry(self, count: int, now: float) -> float:
        """Return when `count` bytes that begin at `now` are through."""
        if self.bytes_per_s == math.inf:
            return now
        self.free_at = max(self.free_at, now) + count / self.bytes_per_s
        return self.free_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One peer's link."""

    up: float  # bytes/s
    down: float  # bytes/s
    latency_s: float  # one way
    into: HubLink  # of the aggregator
    out_of: HubLink  # of the aggregator

    def send(self, count: int, now: float) -> float:
        """Return when `count` bytes are in whose header reached the aggregator at `now`."""
        alone, shared = now + count / self.up, self.into.carry(count, now)
        return alone if alone > shared else shared

    def fetch(self, count: int, now: float) -> float:
        """Return when `count` bytes are here that are asked for at `now`."""
        asked = now + self.latency_s
        alone, shared = asked + count / self.down, self.out_of.carry(count, asked)
        return (alone if alone > shared else shared) + self.latency_s
