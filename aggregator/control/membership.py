"""Who is here: attendance, leases and states of the members, each change with its reason. Sans-IO: every call takes `now`, in
seconds of one monotonic clock.

state                           event                            next
------------------------------  -------------------------------  -----------------------------------------------------
any but EVICTED                 attended                         STARTING  (a new attendance; an older one counts no more)
STARTING, TRAINING, EXCHANGING  heartbeat                        as the heartbeat says
LOST (silence)                  heartbeat, progress              as the (last) heartbeat says: the same attendance, back again
STARTING, TRAINING, EXCHANGING  tick, silent for > lease_s       LOST      "no heartbeat for N s"
any live, LOST                  closed, polite                   LEFT
any live                        closed, not polite               LOST      at once, with the reason
any                             evict                            EVICTED   (final)
The newest attendance of an identity counts. A heartbeat of an older one is refused, and its end has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from edit.config.run import MembershipConfig
from edit.errors import EvictedError, RefusedError

if TYPE_CHECKING:
    from editpb.messages import Heartbeat

__all__ = ["REPLACED", "Change", "Member", "MemberState", "Membership", "digest_mismatch"]

REPLACED = "replaced by a newer connection of the same identity"


class MemberState(Enum):
    """Where a member stands. The first three are live; they have the names of `editpb.messages.PeerState`."""

    STARTING = "starting"
    TRAINING = "training"
    EXCHANGING = "exchanging"
    LOST = "lost"
    LEFT = "left"
    EVICTED = "evicted"

    @property
    def live(self) -> bool:
        """Whether a member in this state can take part in rounds."""
        return self in (MemberState.STARTING, MemberState.TRAINING, MemberState.EXCHANGING)


@dataclass(frozen=True, slots=True)
class Change:
    """A member's state changed, and why."""

    peer_id: str
    state: MemberState
    reason: str

    @property
    def live(self) -> bool:
        """Whether the new state is live."""
        return self.state.live


@dataclass(slots=True)
class Member:
    """One identity."""

    peer_id: str
    state: MemberState
    reason: str  # of the last change of state
    last_seen: float  # when it last gave a sign of life, on the clock of `now`
    attendance: int = 0  # number of the connection that counts; 0: none
    heartbeat: Heartbeat | None = None  # the last one of this attendance
    contributions: int = 0  # committed rounds that merged it with a weight
    rejections: int = 0  # committed rounds that merged it with weight 0
    absences: int = 0  # rounds committed without it while it was expected

    @property
    def live(self) -> bool:
        """Whether its state is live."""
        return self.state.live


class Membership:
    """All members of one run.

    Args:
        evicted: identities that were evicted earlier, with the reasons.
    """

    def __init__(self, config: MembershipConfig, evicted: Mapping[str, str] = MappingProxyType({})) -> None:
        self._config = config
        self._attendances = 0
        self._members = {
            peer_id: Member(peer_id=peer_id, state=MemberState.EVICTED, reason=reason, last_seen=float("-inf"))
            for peer_id, reason in evicted.items()
        }

    @property
    def members(self) -> Mapping[str, Member]:
        """Everybody ever seen, by peer_id; for reading only."""
        return MappingProxyType(self._members)

    def attended(self, peer_id: str, now: float) -> tuple[int, list[Change]]:
        """Take a connection of this identity that opened. Return the number of its attendance, larger than any before.

        Raises EvictedError.
        """
        member = self._members.get(peer_id)
        if member is None:
            member = self._members[peer_id] = Member(peer_id=peer_id, state=MemberState.LOST, reason="", last_seen=now)
        if member.state is MemberState.EVICTED:
            raise EvictedError(member.reason)
        reason = REPLACED if member.attendance else "attends"
        self._attendances += 1
        member.attendance, member.last_seen, member.heartbeat = self._attendances, now, None
        # its process may be a new one, which has not what the one before had: it is lost first
        changes = _change(member, MemberState.LOST, reason) if member.live else []
        return self._attendances, changes + _change(member, MemberState.STARTING, "attends")

    def heartbeat(self, peer_id: str, attendance: int, heartbeat: Heartbeat, now: float) -> list[Change]:
        """Take a report of the peer. Raises RefusedError when this attendance counts no more."""
        member = self._counting(peer_id, attendance)
        if member is None:
            raise RefusedError(REPLACED)
        known, lost = member.heartbeat, member.state is MemberState.LOST
        member.last_seen, member.heartbeat = now, heartbeat
        if known is not None and known.state is heartbeat.state and not lost:
            return []
        reason = "heard again" if lost else "heartbeat"
        return _change(member, MemberState[heartbeat.state.name], reason)

    def progress(self, peer_id: str, now: float) -> list[Change]:
        """Renew the lease because bytes of this peer arrive on the data plane: a busy link is not silence."""
        member = self._members.get(peer_id)
        if member is None or not member.attendance:
            return []
        member.last_seen = now
        if member.state is not MemberState.LOST:
            return []
        state = MemberState[member.heartbeat.state.name] if member.heartbeat else MemberState.STARTING
        return _change(member, state, "heard again")

    def closed(self, peer_id: str, attendance: int, reason: str, *, polite: bool = False) -> list[Change]:
        """Take the end of a connection; without effect when its attendance counts no more. polite: the peer said goodbye."""
        member = self._counting(peer_id, attendance)
        if member is None:
            return []
        member.attendance = 0
        if polite:
            return _change(member, MemberState.LEFT, reason)
        return _change(member, MemberState.LOST, reason) if member.live else []

    def tick(self, now: float, among: Iterable[str] | None = None) -> list[Change]:
        """Lose the members that were silent for longer than the lease. among: look at these only; None: at everybody."""
        changes = []
        for member in self._members.values() if among is None else [self._members[peer_id] for peer_id in among]:
            silent = now - member.last_seen
            if silent > self._config.lease_s and member.live:
                changes += _change(member, MemberState.LOST, f"no heartbeat for {silent:.1f} s")
        return changes

    def evict(self, peer_id: str, reason: str, now: float) -> list[Change]:
        """Evict an identity for good, also one that was never here."""
        member = self._members.get(peer_id)
        if member is None:
            member = self._members[peer_id] = Member(peer_id=peer_id, state=MemberState.LOST, reason="", last_seen=now)
        member.attendance = 0
        return _change(member, MemberState.EVICTED, reason)

    def count(self, *, merged: Iterable[str] = (), rejected: Iterable[str] = (), absent: Iterable[str] = ()) -> None:
        """Count one committed round: contributions, rejections, absences. Unknown identities are ignored."""
        for member in self._known(merged):
            member.contributions += 1
        for member in self._known(rejected):
            member.rejections += 1
        for member in self._known(absent):
            member.absences += 1

    def _known(self, peers: Iterable[str]) -> Iterator[Member]:
        return (self._members[peer_id] for peer_id in peers if peer_id in self._members)

    def _counting(self, peer_id: str, attendance: int) -> Member | None:
        member = self._members.get(peer_id)
        return member if member is not None and attendance and member.attendance == attendance else None


def digest_mismatch(reported: str, outer_step: int, own: str) -> str:
    """Return why a peer that reports this digest for `outer_step` must take a snapshot, or ''.

    An empty digest on either side is not compared. own: the run's digest of that step.
    """
    if not reported or not own or reported == own:
        return ""
    return f"digest {reported[:12]} at outer step {outer_step}, the run has {own[:12]}"


def _change(member: Member, state: MemberState, reason: str) -> list[Change]:
    """Enter `state`; without effect, also on the reason, when the member is in it already."""
    if member.state is state:
        return []
    member.state, member.reason = state, reason
    return [Change(member.peer_id, state, reason)]
