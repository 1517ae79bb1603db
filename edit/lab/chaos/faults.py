"""The faults of a chaos run: which kind, which target, when and for how long.

All are drawn from a seed before anything starts, so that a failing seed can be repeated. Not here: duplicated and reordered
chunks, which TCP and TLS exclude (the tests of the upload buffer have them); jumps of the wall clock, which cannot be faked for
one process (a test gives the coordinator such a clock).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from edit.errors import ConfigError
from edit.lab.processes import COORDINATOR

__all__ = ["SWARM_KINDS", "Fault", "Kind", "draw_schedule", "kinds_for"]

_RECOVERY_S = 4.0  # between two faults of one target, so that it can recover
_LONGEST_GAP = 4.0  # times the mean
_RATES = (128e3, 256e3, 1e6)  # bits per second
_LOSSES = (0.02, 0.05, 0.1)  # of the pieces; each lost piece resets its connection


class Kind(StrEnum):
    """The kind of a fault; the value is its name for people."""

    KILL_PEER = "SIGKILL of a peer"
    KILL_RANK = "SIGKILL of a rank"
    KILL_COORDINATOR = "SIGKILL of the coordinator"
    STOP_PEER = "SIGSTOP of a peer"
    STOP_COORDINATOR = "SIGSTOP of the coordinator"
    CUT = "connections cut and refused"
    SILENCE = "connections silent"
    SLOW = "slow link"
    LOSSY = "lossy link"
    FULL_DISK = "full disk"
    # only in a swarm, where KILL_PEER and STOP_PEER are of a member with its host, and SLOW is of its whole link
    KILL_HOST = "SIGKILL of a member's host"
    CABLE = "cable pulled"
    PARTITION = "two members cut off together"
    POWER_CUT = "SIGKILL of all members"
    LEAVE = "a member leaves and joins again"
    WIPE = "a member's disk is lost"
    EVICT = "a member is evicted, a new one invited"

    @property
    def of_coordinator(self) -> bool:
        """Whether it stops the whole run: no commit is possible meanwhile."""
        return self in (Kind.KILL_COORDINATOR, Kind.STOP_COORDINATOR, Kind.FULL_DISK)

    @property
    def kills(self) -> bool:
        """Whether it kills a process."""
        return self in (Kind.KILL_PEER, Kind.KILL_RANK, Kind.KILL_COORDINATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planned fault."""

    number: int
    at_s: float  # after the beginning of the chaos
    kind: Kind
    target: str
    lasts_s: float  # until it is repaired; a killed process is then restarted
    level: float = 0.0  # of a slow link: bits per second; of a lossy one: share of the pieces that reset their connection

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        how = {Kind.SLOW: f", {self.level / 1e3:.0f} kbit/s", Kind.LOSSY: f", {self.level:.0%} of the pieces"}
        return (
            f"#{self.number} at {self.at_s:.1f} s: {self.kind}, {self.target}, for {self.lasts_s:.1f} s{how.get(self.kind, '')}"
        )


SWARM_KINDS = (
    Kind.KILL_PEER,
    Kind.STOP_PEER,
    Kind.SLOW,
    Kind.KILL_HOST,
    Kind.CABLE,
    Kind.PARTITION,
    Kind.POWER_CUT,
    Kind.LEAVE,
    Kind.WIPE,
    Kind.EVICT,
)
_ONLY_SWARM = {kind for kind in SWARM_KINDS if kind not in (Kind.KILL_PEER, Kind.STOP_PEER, Kind.SLOW)}


def kinds_for(sharded: bool) -> tuple[Kind, ...]:
    """Return every kind of a run with a coordinator; a rank can only be killed where a replica has several."""
    return tuple(kind for kind in Kind if kind not in _ONLY_SWARM and (sharded or kind is not Kind.KILL_RANK))


def draw_schedule(
    seed: int,
    seconds: float,
    peers: Sequence[str],
    *,
    sharded: str | None = None,
    kinds: Iterable[Kind] | None = None,
    gap_s: float = 5.0,
    longest_s: float = 6.0,
) -> tuple[Fault, ...]:
    """Return the faults of `seconds`, all repaired by then. sharded: the peer with several ranks; gap_s: mean time between two.

    Kinds come from a shuffled deck, so that each occurs once before any occurs again. Gaps are exponential. A target never
    has two faults at a time; different targets may. Raises ConfigError when there is nothing to draw from.
    """
    deck = tuple(kinds) if kinds is not None else kinds_for(sharded is not None)
    if not deck or not peers:
        raise ConfigError("chaos: needs at least one kind of fault and one peer")
    chance = random.Random(seed)
    free_at = dict.fromkeys((*peers, COORDINATOR), 0.0)
    faults: list[Fault] = []
    dealt: list[Kind] = []
    at = min(chance.expovariate(1 / gap_s), _LONGEST_GAP * gap_s)
    while at < seconds:
        if not dealt:
            dealt = chance.sample(deck, len(deck))
        kind = dealt.pop()
        target = chance.choice(_targets(kind, peers, sharded))
        lasts = 0.0 if kind is Kind.KILL_RANK else chance.uniform(0.2, longest_s)  # its torchrun restarts it at once
        level = chance.choice(_LOSSES if kind is Kind.LOSSY else _RATES) if kind in (Kind.SLOW, Kind.LOSSY) else 0.0
        begins = round(max(at, free_at[target]), 2)
        fault = Fault(number=0, at_s=begins, kind=kind, target=target, lasts_s=round(lasts, 2), level=level)
        if fault.ends_s <= seconds:
            faults.append(fault)
            free_at[target] = fault.ends_s + _RECOVERY_S
        at += min(chance.expovariate(1 / gap_s), _LONGEST_GAP * gap_s)
    in_order = sorted(faults, key=lambda fault: fault.at_s)
    return tuple(replace(fault, number=number) for number, fault in enumerate(in_order, 1))


def _targets(kind: Kind, peers: Sequence[str], sharded: str | None) -> Sequence[str]:
    if kind.of_coordinator:
        return (COORDINATOR,)
    if kind is Kind.KILL_RANK:
        assert sharded is not None
        return (sharded,)
    if kind in (Kind.WIPE, Kind.EVICT):
        return peers[1:]  # the first one invites
    return peers
