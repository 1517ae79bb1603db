"""Which phase each peer is in, and since when: what the deadlines are measured from. Sans-IO.

Owns: the moments between two phases. Must not know: when a round closes, what a deadline is made of (`edit.rounds.deadlines`).
"""

from __future__ import annotations

import math

from edit.rounds.contributions import ContributionBook, InFlightContribution
from edit.rounds.deadlines import Deadlines, PeerPhase
from edit.rounds.open_round import OpenRound

__all__ = ["PeerTimer"]


class PeerTimer:
    """See the module's text. Times are seconds of one monotonic clock; overlap: `SyncConfig.overlap`, inner steps."""

    def __init__(self, deadlines: Deadlines, hand: ContributionBook, overlap: int) -> None:
        self._deadlines, self._hand, self._overlap = deadlines, hand, overlap
        self._published_at: float | None = None
        self._at_step: dict[str, float] = {}  # when it first reported the newest outer step

    def phase_of(self, peer_id: str, reported: int, outer_step: int) -> PeerPhase:
        """reported: the peer's last word about its outer step."""
        if (under := self._hand.get(peer_id)) is not None:
            return PeerPhase.WAITING if under.whole else PeerPhase.UPLOAD
        return PeerPhase.DOWNLOAD if reported < outer_step else PeerPhase.COMPUTE

    def published(self, now: float) -> None:
        """A commit is on disk; everybody fetches it."""
        self._published_at = now
        self._at_step.clear()

    def applied(self, peer_id: str, now: float) -> None:
        """The peer was one outer step behind and reports the newest one."""
        if self._published_at is not None and peer_id not in self._at_step:
            self._at_step[peer_id] = now
            self._deadlines.record(peer_id, PeerPhase.DOWNLOAD, now - self._published_at)

    def began(self, peer_id: str, current: OpenRound, now: float) -> None:
        """The first byte of its contribution to the open collection is here."""
        if peer_id in current.punctual:
            self._deadlines.record(peer_id, PeerPhase.COMPUTE, now - self._computes_since(peer_id, current))

    def ended(self, peer_id: str, under: InFlightContribution, now: float) -> None:
        """The last byte of its contribution is here."""
        if under.steady:
            self._deadlines.record(peer_id, PeerPhase.UPLOAD, now - under.began_at)

    def free_until(self, peer_id: str) -> float:
        """Until when the outcome may be out and this peer, whose contribution is here, still has it in time."""
        if not self._overlap or (under := self._hand.get(peer_id)) is None:
            return -math.inf
        trains_s = self._overlap * self._deadlines.step_s(peer_id)
        return under.began_at + trains_s - self._deadlines.allowed_s(peer_id, PeerPhase.DOWNLOAD)

    def left_out(self, current: OpenRound, now: float) -> None:
        """A close does not wait for these any longer: the overdue took at least the time they were given. Of others it says
        nothing how long they take."""
        for peer_id in sorted(current.overdue(now) & current.punctual):
            under = self._hand.get(peer_id)
            if under is None:
                self._deadlines.record(peer_id, PeerPhase.COMPUTE, now - self._computes_since(peer_id, current))
            elif not self._hand.carries:  # else it goes on, and its end is measured
                self._deadlines.record(peer_id, PeerPhase.UPLOAD, now - under.began_at)

    def _computes_since(self, peer_id: str, current: OpenRound) -> float:
        return max(current.opened_at, self._at_step.get(peer_id, current.opened_at))
