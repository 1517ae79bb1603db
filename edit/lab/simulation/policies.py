"""Data-parallel training under failures, as simple policies in the same virtual time: what a simulated run is compared with.

data-parallel  a failure anywhere stops everybody for stop_s
elastic        a failure stops everybody for stop_s while the others regroup, and takes its slice away for away_s

A failure while everybody is stopped is dealt with in the same stop. Steps are exchanged without cost, and none is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from edit.lab.simulation.event_queue import EventQueue

__all__ = ["Policy", "policy_goodput", "stop_for"]

EVENTS = 1 << 20  # at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy; see the module's text."""

    failures_per_s: float  # of all chips together
    stop_s: float
    away_s: float = 0.0
    slices: int = 1  # how many there are


@dataclass(slots=True)
class _Fleet:
    present: int
    runs_from: float = 0.0
    counted_to: float = 0.0
    slice_seconds: float = 0.0

    def count(self, now: float) -> None:
        """Add the work of the present slices up to `now`."""
        begin = max(self.counted_to, self.runs_from)
        self.slice_seconds += max(0.0, now - begin) * self.present
        self.counted_to = now


def policy_goodput(policy: Policy, seconds: float, seed: int = 0) -> float:
    """Return the share of the slice-seconds of `seconds` that went into steps."""
    queue, random, fleet = EventQueue(), Random(seed), _Fleet(policy.slices)

    def returns() -> None:
        fleet.count(queue.now)
        fleet.present += 1

    def fails() -> None:
        queue.at(queue.now + random.expovariate(policy.failures_per_s), fails)
        if queue.now < fleet.runs_from:
            return
        fleet.count(queue.now)
        fleet.runs_from = queue.now + policy.stop_s
        if policy.away_s and fleet.present:
            fleet.present -= 1
            queue.at(queue.now + policy.away_s, returns)

    queue.at(random.expovariate(policy.failures_per_s), fails)
    queue.at(seconds, partial(fleet.count, seconds))
    while queue.run(seconds, EVENTS):
        pass
    return fleet.slice_seconds / (seconds * policy.slices)


def stop_for(goodput: float, failures_per_s: float) -> float:
    """Return the stop_s at which a fleet that stops at every failure has this goodput: 1 / (1 + failures_per_s * stop_s)."""
    return (1 / goodput - 1) / failures_per_s
