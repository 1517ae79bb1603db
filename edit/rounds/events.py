"""What the round machine is told and what it answers: plain frozen values. See `edit.rounds.machine` for the rules.

Those of which every contribution makes some are named tuples: they are made in a third of the time, and a simulation makes
many millions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = [
    "Arrived",
    "Commit",
    "CommitSucceeded",
    "Drain",
    "Effect",
    "Event",
    "Faulted",
    "MemberLost",
    "MemberReady",
    "Offered",
    "Pause",
    "Phase",
    "Progress",
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

    __hash__ = object.__hash__  # an Enum's own takes longer than what is done with it

    GATHERING = "gathering"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    PAUSED = "paused"
    FINISHED = "finished"


class MemberReady(NamedTuple):
    """A live peer says that its outer parameters are at `outer_step`. Sent whenever that changes.

    step_s: seconds per inner step as it measured them, 0 when it has not.
    """

    peer_id: str
    outer_step: int
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The peer is gone: lease over, stream closed, left or evicted."""

    peer_id: str
    reason: str


class Offered(NamedTuple):
    """The header of a contribution came; without a Refused in the answer its bytes are welcome."""

    peer_id: str
    round_id: int
    outer_step: int
    fragment_id: int


class Arrived(NamedTuple):
    """A fragment of a contribution is here: whole, checked and measured."""

    peer_id: str
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of a contribution are coming in: so many so far, over all its fragments, of about `total_bytes`."""

    peer_id: str
    round_id: int
    received_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The peer's bytes were bad; round_id: the one its contribution names."""

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
    """The shell carried out a Commit: the outer step is on disk. tokens: merged with it."""

    round_id: int
    tokens: int = 0


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
    """The operator wants rounds again, after a Pause or a Drain."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The operator wants the run to end with the open round."""


Event = (
    MemberReady
    | MemberLost
    | Offered
    | Progress
    | Arrived
    | Faulted
    | Reduced
    | CommitSucceeded
    | RoundFailed
    | Tick
    | Pause
    | Resume
    | Drain
)


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round to advance from `outer_step`; deadline: on the clock of `now`, inf when nobody is waited for."""

    round_id: int
    outer_step: int
    expected: frozenset[str]
    deadline: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A contribution is not taken. stale: the peer is late or early, not wrong; it should look at the view.

    The answer to an Offered or Arrived; to any other event: what was taken of this peer is dropped.
    """

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
    """The round is over. outer_step: the one it advanced to, or tried to; missing: expected and not complete.

    carried: whose contributions, whole or not, go on into the next round; those of all others are to be dropped.
    """

    round_id: int
    outer_step: int
    committed: bool
    reason: str
    missing: tuple[str, ...]
    seconds: float
    carried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is over: the last outer step or token is merged, or the operator drained it."""

    outer_step: int


Effect = RoundOpened | Refused | Reduce | Commit | RoundClosed | RunFinished
