"""What a screen shows of a run's status, and the points of a loss curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Point", "Status", "SwarmStatus"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a loss curve."""

    t: float  # unix seconds
    step: int  # inner steps
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """How a swarm stands, by what its hosts last said."""

    leader: str  # peer_id; empty: nobody leads, or nobody who answers says so
    owners: tuple[str, ...]  # peer_id by part
    steps: tuple[int, ...]  # the last outer step by part
    quorum: str  # how many voters are here and how many are needed, in words
    has_quorum: bool
    away: Mapping[str, str]  # members that are not here, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The coordinator's last answer, or the hosts' of a swarm."""

    phase: str
    outer_step: int
    digest: str
    parameters: int
    deadline_s: float | None  # until the open round's deadline; None: no round is open
    arrived: int  # contributions in the open round
    expected: int
    memory_bytes: int  # the coordinator's peak
    tokens: int = 0
    swarm: SwarmStatus | None = None  # None: there is a coordinator
    waiting_for: str = ""  # in words
    eta_s: float | None = None  # until the run's end; None: not known
