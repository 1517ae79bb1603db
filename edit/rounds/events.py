"""The round machine's input (events) and output (effects): frozen values. `edit.rounds.machine` has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Arrived",
    "Close",
    "Commit",
    "CommitSucceeded",
    "Drain",
    "Effect",
    "EndRun",
    "Event",
    "Faulted",
    "MemberLost",
    "MemberReady",
    "Offered",
    "Pause",
    "Phase",
    "Progress",
    "Quarantined",
    "Reduce",
    "Reduced",
    "Refused",
    "Restricted",
    "Resume",
    "RoundClosed",
    "RoundFailed",
    "RoundOpened",
    "RunFinished",
    "Tick",
    "Withdrawn",
]


class Phase(Enum):
    """What the machine is doing (see its table)."""

    GATHERING = "gathering"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    PAUSED = "paused"
    FINISHED = "finished"


# -- events ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A live peer reports its outer step. Sent whenever that changes, and as often as the peer reports."""

    peer_id: str
    outer_step: int  # of the peer's outer parameters
    step_s: float = 0.0  # seconds per inner step as the peer measured them; 0: not measured


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The peer is gone: its lease is over, its stream closed, it left or was evicted."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offered:
    """The header of a contribution came. Unless the answer has a Refused, its bytes are welcome."""

    peer_id: str
    round_id: int  # the round that was open when the contribution began
    outer_step: int  # the outer step it was computed against
    fragment_id: int
    inner_steps: int = 0  # the work behind it, as the peer claims; 0: it says nothing


@dataclass(frozen=True, slots=True)
class Arrived:
    """One fragment of a contribution is here: whole, checked and measured."""

    peer_id: str
    round_id: int  # as offered
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of a contribution are coming in."""

    peer_id: str
    round_id: int  # as offered
    received_bytes: int  # so far, over all its fragments
    total_bytes: int  # about so many in all


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The shell dropped what it had of this peer's contribution. It is not the peer's fault, which may start again."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Faulted:
    """The peer's bytes were bad."""

    peer_id: str
    round_id: int  # the round that the bad contribution names
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
    tokens: int = 0  # merged with it


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A Reduce or a Commit could not be carried out, for whatever reason; nothing was applied."""

    round_id: int
    reason: str
    blamed: tuple[str, ...] = ()  # the peers whose fault it is known to be


@dataclass(frozen=True, slots=True)
class Restricted:
    """With masks: only these peers can contribute to the round, since they share its keys."""

    round_id: int
    peers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Close:
    """The shell ends the open collection with what is complete, as the deadline would. Ignored before the quorum."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The operator wants no rounds."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The operator wants rounds again, after a Pause or a Drain. Faults are forgotten."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The operator wants the run to end at an outer step, or before, with a round that commits nothing."""

    outer_step: int = 0  # 0: the one that the open round leads to


@dataclass(frozen=True, slots=True)
class EndRun:
    """The shell can merge nothing more after the round that is being merged, if there is one: the run is over for good."""

    reason: str


Event = (
    MemberReady
    | MemberLost
    | Offered
    | Progress
    | Arrived
    | Withdrawn
    | Faulted
    | Reduced
    | CommitSucceeded
    | RoundFailed
    | Restricted
    | Close
    | Tick
    | Pause
    | Resume
    | Drain
    | EndRun
)


# -- effects ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round began: contributions that name it are welcome."""

    round_id: int
    outer_step: int  # it tries to advance from here
    expected: frozenset[str]  # the peers it waits for
    deadline: float  # on the clock of `now`; inf when nobody is waited for


@dataclass(frozen=True, slots=True)
class Refused:
    """A contribution is not taken.

    As the answer to an Offered or Arrived: this one is not taken, and nothing else happened. As an effect of any other event:
    what was taken of this peer is to be dropped.
    """

    peer_id: str
    reason: str
    stale: bool  # the peer is late or early, not wrong: it should look at the newest view


@dataclass(frozen=True, slots=True)
class Quarantined:
    """This peer's bytes were bad too often: nothing is taken of it, and nobody waits for it, for so long."""

    peer_id: str
    seconds: float
    reason: str  # of its last fault


@dataclass(frozen=True, slots=True)
class Reduce:
    """Merge this fragment of these peers; answer with Reduced or RoundFailed."""

    round_id: int
    fragment_id: int
    peers: tuple[str, ...]  # sorted


@dataclass(frozen=True, slots=True)
class Commit:
    """Every fragment is reduced: advance TO `outer_step`; answer with CommitSucceeded or RoundFailed."""

    round_id: int
    outer_step: int
    reason: str  # why the collection closed
    missing: tuple[str, ...]  # who was expected and is not part of it, sorted


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The round is over."""

    round_id: int
    outer_step: int  # the one it advanced to, or tried to
    committed: bool
    reason: str
    missing: tuple[str, ...]  # who was expected and is not part of it, sorted
    seconds: float  # since it opened
    carried: tuple[str, ...] = ()  # whose contributions, whole or not, are kept for the next round; drop all others


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is over: the last outer step or token is merged, the operator drained it, or the shell has ended it."""

    outer_step: int


Effect = RoundOpened | Refused | Quarantined | Reduce | Commit | RoundClosed | RunFinished
