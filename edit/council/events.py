"""What members say to each other (messages), and the council's input (events) and output (effects): frozen values.

`edit.council.machine` has the rules. A message raises ValueError when it is made with values that no member may send, so what
comes from the wire is bounded before anybody acts on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edit.council.record import (
    MOST_PARTS,
    Enrolled,
    Member,
    PartState,
    Phase,
    Record,
    Root,
    Saved,
    Stamp,
    Update,
    check_count,
    check_id,
    check_text,
)

__all__ = [
    "Accepted",
    "Adopt",
    "Append",
    "Applied",
    "Ask",
    "Cease",
    "Claim",
    "Committed",
    "Connected",
    "Damaged",
    "Disconnected",
    "Disputed",
    "Effect",
    "Ended",
    "Entrust",
    "Event",
    "Evict",
    "Failed",
    "Fetch",
    "Held",
    "Hello",
    "Here",
    "Hold",
    "Leave",
    "LeaveAsked",
    "Made",
    "Message",
    "News",
    "Noticed",
    "Offered",
    "Received",
    "Refused",
    "Release",
    "Save",
    "Send",
    "SendOffer",
    "Serve",
    "SetPhase",
    "Stall",
    "Supersede",
    "Tick",
    "Vote",
    "Wanted",
]


# -- messages --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Here I am; let me in, or tell me what I missed. Said until a leader's record has this member in this life."""

    stamp: Stamp  # of the sender's record
    member: Member

    def __post_init__(self) -> None:
        _check_stamp(self.stamp)


@dataclass(frozen=True, slots=True)
class News:
    """My record is newer than yours. It may not be committed."""

    record: Record


@dataclass(frozen=True, slots=True)
class Ask:
    """Vote for me in this term. A trial changes nothing: would you?"""

    term: int
    stamp: Stamp  # of the candidate's record
    trial: bool
    sent: float = 0.0  # on the sender's clock, for it to measure the round trip

    def __post_init__(self) -> None:
        check_count("term", self.term)
        _check_stamp(self.stamp)
        _check_times(self.sent)


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer. term: the one that was asked for when it is granted, else the sender's."""

    term: int
    granted: bool
    trial: bool
    echo: float = -math.inf  # `sent` of the Ask

    def __post_init__(self) -> None:
        check_count("term", self.term)
        _check_times(self.echo)


@dataclass(frozen=True, slots=True)
class Append:
    """I lead: this is the record, and so far it is committed. Sent to every member at each heartbeat."""

    stamp: Stamp  # of the leader's record; its term is the leader's
    committed: Stamp
    record: Record | None = None  # left out when the receiver is known to have it
    sent: float = 0.0

    def __post_init__(self) -> None:
        _check_stamp(self.stamp)
        _check_stamp(self.committed)
        if self.committed > self.stamp or (self.record is not None and self.record.stamp != self.stamp):
            raise ValueError(f"an Append of {self.stamp} with other stamps in it")
        _check_times(self.sent)


@dataclass(frozen=True, slots=True)
class Accepted:
    """This is on my disk. The answer to Append, and said to the leader whenever an update is held."""

    term: int
    stamp: Stamp
    states: tuple[PartState, ...]
    echo: float = -math.inf  # `sent` of the Append

    def __post_init__(self) -> None:
        check_count("term", self.term)
        _check_stamp(self.stamp)
        if len(self.states) > MOST_PARTS:
            raise ValueError(f"{len(self.states)} parts")
        _check_times(self.echo)


@dataclass(frozen=True, slots=True)
class Release:
    """From the owner: I do not serve this grant. From others: what its owner offers is wrong, or, if not `away`, that cannot be
    told here. Another grant is needed.
    """

    part: int
    grant: int
    reason: str
    away: bool  # whether others should have the part, if they can

    def __post_init__(self) -> None:
        _check_counts(self.part, self.grant)
        check_text(self.reason)


@dataclass(frozen=True, slots=True)
class Ended:
    """From the owner's engine, and on to the leader: the part's last outer step is taken, or it was drained."""

    part: int
    grant: int

    def __post_init__(self) -> None:
        _check_counts(self.part, self.grant)


@dataclass(frozen=True, slots=True)
class Leave:
    """Go on without me."""


@dataclass(frozen=True, slots=True)
class Claim:
    """From a holder of the authority's key, and on to the leader: somebody would redeem this invitation for this key."""

    peer_id: str  # whom the invitation is for
    enrolled: Enrolled

    def __post_init__(self) -> None:
        check_id(self.peer_id)


@dataclass(frozen=True, slots=True)
class Stall:
    """To all voters, again and again: the owner of this grant should have made the update that follows this outer step."""

    part: int
    grant: int
    outer_step: int  # that the part stands at
    waits: bool  # whether a peer beside the sender waits for it; else the sender believes others who say so

    def __post_init__(self) -> None:
        _check_counts(self.part, self.grant, self.outer_step)


Message = Hello | News | Ask | Vote | Append | Accepted | Release | Ended | Leave | Claim | Stall


# -- events ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message came.

    sender: the peer of its certificate, in the life that it said when the connection began (`name_of`); never what the message
    says.
    key: SHA-256 of the public key that the sender has shown, or was reached with; "": the shell does not say.
    """

    sender: str
    message: Message
    key: str = ""


@dataclass(frozen=True, slots=True)
class Connected:
    """Messages to this peer have a way."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The last connection to this peer broke."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Offered:
    """An owner's update is here whole; its hashes are those of its id. `Council.why_refused` is asked before its bytes come."""

    sender: str  # as in Received
    update: Update


@dataclass(frozen=True, slots=True)
class Made:
    """An engine of this member merged a round: the update to the next outer step is here."""

    update: Update


@dataclass(frozen=True, slots=True)
class Held:
    """A Hold was carried out: the update is computed, finite, leads to its digest, and is on disk."""

    update: Update


@dataclass(frozen=True, slots=True)
class Applied:
    """An Adopt or Fetch was carried out: the part is at this outer step, on disk."""

    part: int
    outer_step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A Hold, Adopt or Fetch came to nothing. Each is answered once, after a time that the shell bounds."""

    part: int
    work: Hold | Adopt | Fetch
    reason: str
    is_wrong: bool = False  # of a Hold: no member can hold this update, and its owner is to blame
    is_unclear: bool = False  # of a Hold: whether it may be held cannot be told here, and nobody is to blame
    is_late: bool = False  # of a Hold: the part is at this update already, or past it
    judged_by: Stamp | None = None  # of a Hold: the record whose keys counted
    is_forked: bool = False  # of a Fetch: the state here is whole, and not among those that lead to what the record names


@dataclass(frozen=True, slots=True)
class Damaged:
    """What this member has of the part is not what the others have of the same outer step: it needs a snapshot."""

    part: int
    outer_step: int
    digest: str  # by which it is known from now on


@dataclass(frozen=True, slots=True)
class Disputed:
    """The owner's update is not what this member computed, who verifies the part, or is no update at all."""

    part: int
    grant: int
    reason: str  # becomes that of a Release, whose bounds hold
    is_unclear: bool = False  # that cannot be told here, and nobody is to blame
    judged_by: Stamp | None = None  # the record whose keys counted; None: no keys were looked at


@dataclass(frozen=True, slots=True)
class Wanted:
    """The peer beside this member has contributed to a part, and waits for the update. Said again and again."""

    part: int
    outer_step: int  # that the peer is at; the update leads to the next


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator evicts a peer, or a name that was only invited.

    Like SetPhase and Entrust given to the leader, by a shell that checked who gives it.
    """

    peer_id: str
    reason: str

    def __post_init__(self) -> None:
        check_text(self.reason)


@dataclass(frozen=True, slots=True)
class Entrust:
    """An operator is about to give a copy of the authority's key to a member: the record says so first."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Supersede:
    """An operator puts another authority in the place of the present one, whose key one member has: this one."""

    root: Root
    peer_id: str


@dataclass(frozen=True, slots=True)
class SetPhase:
    """An operator pauses, resumes or drains the run."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Here:
    """This member is to be found elsewhere now, in the same life."""

    member: Member


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This member wants to leave. It has left when a Committed record neither has it as a member nor as a voter."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Received
    | Connected
    | Disconnected
    | Offered
    | Made
    | Held
    | Applied
    | Failed
    | Damaged
    | Ended
    | Disputed
    | Claim
    | Entrust
    | Supersede
    | Evict
    | SetPhase
    | Here
    | LeaveAsked
    | Wanted
    | Tick
)


# -- effects ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Write this to disk, synced, before any later effect of the same call. If that fails, stop: nothing more may be said."""

    saved: Saved


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to a peer, if there is a connection; else drop it. Whatever matters is said again."""

    peer_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Committed:
    """All members agree on this record, for good. Whatever a shell does by the record, it does by this one."""

    record: Record


@dataclass(frozen=True, slots=True)
class Hold:
    """Stage this update and journal it, synced, in place of any other that is held of this part. Answer: Held or Failed."""

    update: Update


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take the outer step with the update that is held: all fragments of the part at once. Answer: Applied or Failed."""

    part: int
    outer_step: int
    update: str
    digest: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the part to this outer step from a peer: by updates that it keeps, or a snapshot, which may be of a later one.

    Answer: Applied or Failed.
    """

    part: int
    outer_step: int
    update: str
    digest: str
    source: str  # peer_id
    snapshot: bool  # the state here is damaged: updates do not help


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Stream the update to every other member. Said again until the record moves: leave out who has it, or is getting it."""

    update: Update


@dataclass(frozen=True, slots=True)
class Serve:
    """Own this part: start its engine from the state that is here. Its round ids begin with the grant."""

    part: int
    grant: int
    outer_step: int


@dataclass(frozen=True, slots=True)
class Cease:
    """Own this part no longer: stop its engine."""

    part: int
    grant: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The event was not taken."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """For the log, and for `status`."""

    text: str


Effect = Save | Send | Committed | Hold | Adopt | Fetch | SendOffer | Serve | Cease | Refused | Noticed


def _check_stamp(stamp: Stamp) -> None:
    for count in stamp:
        check_count("stamp", count)


def _check_times(*times: float) -> None:
    """Any number will do: the receiver gives it back, or judges the difference."""
    if not all(type(time) in (int, float) for time in times):
        raise ValueError(f"times {times!r:.80}")


def _check_counts(*counts: int) -> None:
    for count in counts:
        check_count("number", count)
