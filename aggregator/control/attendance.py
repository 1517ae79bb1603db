"""Who attends: one open stream per rank of a peer, and the membership that streams, heartbeats and transfers make up.

A peer's replica has one or more ranks. Rank 0 is the member: it holds the lease, reports, and may found the run. The others
attend for the views only. When the stream of one of them breaks, the replica is lost to the open round at once, until rank 0
reports again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from aggregator.control.membership import REPLACED, Change, Membership, digest_mismatch
from aggregator.run_feed import Advised, MemberChanged, PeerReported, RankLost, ResyncChanged, RunFeed
from edit.config.run import MembershipConfig
from edit.errors import EvictedError, RefusedError, TransportError
from edit.fragments.schema import Schema
from edit.records import Commit
from edit.rounds.deadlines import PeerPhase
from editpb.messages import Heartbeat
from editpb.validity import INVITE_OR_SET, Validity, over

__all__ = ["Attendance", "Attendances"]

_REPORT_S = 1.0  # at most one PeerReported per stream in this time


def _never() -> float:
    return math.inf


def _not_known(peer_id: str) -> PeerPhase | None:
    return None


@dataclass(slots=True)
class Attendance:
    """One rank's open stream."""

    peer_id: str
    rank: int
    schema: Schema
    expires: Callable[[], float] = _never  # until when its connection counts, in seconds since 1970; see Authorizer
    number: int = 0  # of the membership's attendance; 0 for ranks other than 0, which are no members
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set when this rank is to be sent something
    expelled: EvictedError | RefusedError | TransportError | None = None  # the stream ends with this
    over: bool = False  # the coordinator stops; the peer connects again
    resync: str = ""  # why this peer must take a snapshot, or empty
    reported_at: float = -math.inf  # when PeerReported was last published
    unreported: Heartbeat | None = None  # the last one, where it is not published yet

    def expel(self, error: EvictedError | RefusedError | TransportError) -> None:
        """End the stream with this error."""
        self.expelled = error
        self.changed.set()


class Attendances:
    """All open streams of one run, and its membership. Every change of a member is published on the feed.

    Args:
        now: monotonic seconds.
        phase_of: what a peer does now; None: not known.
    """

    def __init__(
        self,
        config: MembershipConfig,
        feed: RunFeed,
        now: Callable[[], float],
        phase_of: Callable[[str], PeerPhase | None] = _not_known,
    ) -> None:
        self.membership = Membership(config)
        self._feed, self._now, self._phase_of = feed, now, phase_of
        self._open: dict[tuple[str, int], Attendance] = {}  # by peer_id and rank
        self._ranks: dict[str, int] = {}  # of each peer's replica, as the last Hello of one of them said

    def __iter__(self) -> Iterator[Attendance]:
        return iter(list(self._open.values()))

    def get(self, peer_id: str, rank: int = 0) -> Attendance | None:
        """Return the open stream of this rank, or None."""
        return self._open.get((peer_id, rank))

    def ranks(self, peer_id: str) -> int:
        """Return how many ranks the peer's replica has, as it said on attending; 1 before it did."""
        return self._ranks.get(peer_id, 1)

    def members(self) -> list[str]:
        """Return the peers whose rank 0 attends."""
        return [peer_id for peer_id, rank in self._open if rank == 0]

    def of(self, peer_id: str) -> list[Attendance]:
        """Return the open streams of all ranks of a peer."""
        return [attendance for attendance in self._open.values() if attendance.peer_id == peer_id]

    def open(self, peer_id: str, schema: Schema, rank: int, ranks: int, expires: Callable[[], float] = _never) -> Attendance:
        """Add a rank's stream; it replaces an older one of the same rank. Raises EvictedError.

        A new rank 0 also expels the ranks that its replica no longer has.
        """
        if (older := self.get(peer_id, rank)) is not None:
            older.expel(RefusedError(REPLACED))
        attendance = Attendance(peer_id, rank, schema, expires)
        changes: Iterable[Change] = ()
        if rank == 0:
            attendance.number, changes = self.membership.attended(peer_id, self._now())
            for stale in self.of(peer_id):
                if stale.rank >= ranks:
                    stale.expel(RefusedError(f"the replica has {ranks} ranks now; rank {stale.rank} is none of them"))
        self._open[peer_id, rank] = attendance
        self._ranks[peer_id] = ranks
        self._publish(changes)
        return attendance

    def close(self, attendance: Attendance, reason: str, *, polite: bool) -> bool:
        """Remove a stream that ended. Return whether it still counted, that is, was not replaced before.

        One that `end` has ended loses nobody: the peer attends again, at the engine or the process that comes after this one.

        Args:
            reason: the peer's goodbye, "the connection broke", or what was wrong with its messages.
            polite: the peer said goodbye.
        """
        peer_id, rank = attendance.peer_id, attendance.rank
        counted = self.get(peer_id, rank) is attendance
        if counted:
            del self._open[peer_id, rank]
        if rank == 0:
            if counted:
                self._report(attendance)  # what it said last would otherwise be in no file
            changes = self.membership.closed(peer_id, attendance.number, reason, polite=polite)
            self._publish(changes if polite or not attendance.over else ())
        elif counted and not polite and not attendance.over and attendance.expelled is None:
            self._feed.publish(RankLost(peer_id, f"rank {rank}: {reason}"))
        return counted

    def heartbeat(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """Take the report of a rank 0. Raises RefusedError when the stream was replaced."""
        now = self._now()
        self._publish(self.membership.heartbeat(attendance.peer_id, attendance.number, heartbeat, now))
        attendance.unreported = heartbeat
        if now - attendance.reported_at >= _REPORT_S:
            attendance.reported_at = now
            self._report(attendance)

    def _report(self, attendance: Attendance) -> None:
        if (heartbeat := attendance.unreported) is not None:
            attendance.unreported = None
            self._feed.publish(PeerReported(attendance.peer_id, heartbeat, self._phase_of(attendance.peer_id)))

    def check_digest(self, attendance: Attendance, heartbeat: Heartbeat, digest: str) -> None:
        """Compare the reported digest with the run's of the same outer step: a peer whose digest differs takes a snapshot."""
        resync = digest_mismatch(heartbeat.digest, heartbeat.outer_step, digest)
        if resync != attendance.resync:
            attendance.resync = resync
            self._feed.publish(ResyncChanged(attendance.peer_id, resync))
            attendance.changed.set()

    def progress(self, peer_id: str) -> None:
        """Renew the lease of a peer whose bytes arrive: a slow link is not a dead peer."""
        if changes := self.membership.progress(peer_id, self._now()):
            self._publish(changes)

    def tick(self) -> None:
        """Look at the leases."""
        self._publish(self.membership.tick(self._now()))

    def end_expired(self, unix: float) -> None:
        """End the streams whose certificate is over, and warn of it: the clock here may be wrong. The peer connects again, and
        is let in with a new one, or once the clock is right.
        """
        for attendance in self._open.values():
            if (ends := attendance.expires()) <= unix and attendance.expelled is None:
                attendance.expel(TransportError(over(attendance.peer_id, ends, unix, "the aggregator's clock")))
                if attendance.rank == 0:
                    expired = Validity(-math.inf, ends).text(unix)
                    self._feed.publish(Advised(attendance.peer_id, f"its certificate {expired}; {INVITE_OR_SET}"))

    def end_replaced(self, peer_id: str, reason: str) -> None:
        """End the streams of a peer whose certificate counts no more, since the peer has another key."""
        for attendance in self.of(peer_id):
            if attendance.expires() == 0.0:
                attendance.expel(RefusedError(reason))

    def count(self, commit: Commit, missing: Iterable[str]) -> None:
        """Count what each member had in a commit; missing: who was expected and is not part of it."""
        weights: dict[str, float] = {}
        for fragment in commit.fragments:
            for verdict in fragment.verdicts:
                weights[verdict.peer_id] = weights.get(verdict.peer_id, 0.0) + verdict.weight
        self.membership.count(
            merged=[peer_id for peer_id, weight in weights.items() if weight > 0],
            rejected=[peer_id for peer_id, weight in weights.items() if weight == 0],
            absent=missing,
        )

    def evict(self, peer_id: str, reason: str) -> None:
        """End the membership for good, and the streams of all ranks."""
        self._publish(self.membership.evict(peer_id, reason, self._now()))
        for attendance in self.of(peer_id):
            attendance.expel(EvictedError(reason))

    def other_models(self, schema: Schema) -> list[Schema]:
        """Return the models that attend and are not this one, each once."""
        models = {attendance.schema.schema_hash: attendance.schema for attendance in self}
        return [model for schema_hash, model in models.items() if schema_hash != schema.schema_hash]

    def expel_other_models(self, schema: Schema, differences: Mapping[str, str]) -> None:
        """End the streams of peers whose model is not the run's. differences: in words, by schema_hash, as far as known."""
        for attendance in self:
            if (schema_hash := attendance.schema.schema_hash) != schema.schema_hash:
                attendance.expel(RefusedError(f"another model: {differences.get(schema_hash, 'its schema_hash differs')}"))

    def wake(self) -> None:
        """Let every stream send its view."""
        for attendance in self._open.values():
            attendance.changed.set()

    def end(self) -> None:
        """End every stream; the peers connect again until somebody answers."""
        for attendance in self._open.values():
            attendance.over = True
            attendance.changed.set()

    def _publish(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._feed.publish(MemberChanged(change.peer_id, change.state.value, change.reason, change.live))
