"""What the round machine is told and what it answers: plain frozen values. See `aggregator.rounds` for the rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Arrived",
    "Commit",
    "CommitSucceeded",
    "Effect",
    "Event",
    "Faulted",
    "MemberLost",
    "MemberReady",
    "Offered",
    "Pause",
    "Phase",
    "Reduce",
    "Reduced",
    "Refused",
    "Resume",
    "RoundClosed",
    "RoundFailed",
    "RoundOpened",
    "RunFinished",
    "Tick",
]


class Phase(Enum):
    """What the machine is doing (see the table)."""

    GATHERING = "gathering"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A live peer says that its outer parameters are at `outer_step`. Sent whenever that changes."""

    peer_id: str
    outer_step: int


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The peer is gone: lease over, stream closed, left or evicted."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offered:
    """The header of a contribution came; without a Refused in the answer its bytes are welcome."""

    peer_id: str
    round_id: int
    outer_step: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A fragment of a contribution is here: whole, checked and measured."""

    peer_id: str
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The peer's bytes were bad."""

    peer_id: str
    round_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The shell carried out a Reduce."""

    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """The shell carried out a Commit: the outer step is on disk."""

    round_id: int


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A Reduce or a Commit could not be carried out; nothing was applied."""

    round_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The operator wants no rounds."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The operator wants rounds again."""


Event = MemberReady | MemberLost | Offered | Arrived | Faulted | Reduced | CommitSucceeded | RoundFailed | Tick | Pause | Resume


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round to advance from `outer_step`; deadline: on the clock of `now`."""

    round_id: int
    outer_step: int
    expected: frozenset[str]
    deadline: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to an Offered or Arrived. stale: the peer is late or early, not wrong; it should look at the view."""

    peer_id: str
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class Reduce:
    """Merge this fragment of these peers (sorted); answer with Reduced or RoundFailed."""

    round_id: int
    fragment_id: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every fragment is reduced: advance TO `outer_step`; answer with CommitSucceeded or RoundFailed."""

    round_id: int
    outer_step: int
    reason: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The round is over. outer_step: the one it advanced to, or tried to; missing: expected and not complete."""

    round_id: int
    outer_step: int
    committed: bool
    reason: str
    missing: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last outer step is committed."""

    outer_step: int


Effect = RoundOpened | Refused | Reduce | Commit | RoundClosed | RunFinished
