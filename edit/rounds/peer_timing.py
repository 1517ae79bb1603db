"""When each peer goes from one phase of its round to the next: the measurements that deadlines are made of."""

from __future__ import annotations

import math

from edit.rounds.contributions import ContributionBook, InFlightContribution
from edit.rounds.deadlines import Deadlines, PeerPhase
from edit.rounds.open_round import OpenRound

__all__ = ["PeerTimer"]


class PeerTimer:
    """Measures the peers' phases into `deadlines`.

    contributions: those that are held; overlap: `SyncConfig.overlap`, the inner steps that a peer trains behind an exchange.
    """

    def __init__(self, deadlines: Deadlines, contributions: ContributionBook, overlap: int) -> None:
        self._deadlines, self._contributions, self._overlap = deadlines, contributions, overlap
        self._published_at: float | None = None  # the last commit
        self._at_step: dict[str, float] = {}  # when each peer first reported the newest outer step
        self._computes_from: dict[str, float] = {}  # when each peer last ended an exchange, however many rounds ago

    def phase_of(self, peer_id: str, reported: int, outer_step: int) -> PeerPhase:
        """Return what the peer does; reported: the outer step that it reported last; outer_step: the run's."""
        if (contribution := self._contributions.get(peer_id)) is not None:
            return PeerPhase.WAITING if contribution.whole else PeerPhase.UPLOAD
        return PeerPhase.DOWNLOAD if reported < outer_step else PeerPhase.COMPUTE

    def published(self, now: float) -> None:
        """A commit is on disk; every peer fetches it from now on."""
        self._published_at = now
        self._at_step.clear()

    def appeared(self, peer_id: str, now: float) -> None:
        """The peer is live and was not before: what it computes it computes from now on, as far as is known here."""
        self._computes_from[peer_id] = now

    def applied(self, peer_id: str, now: float) -> None:
        """The peer was one outer step behind and reports the newest one: its download ends."""
        if not self._overlap:
            self._computes_from[peer_id] = now
        if self._published_at is not None and peer_id not in self._at_step:
            self._at_step[peer_id] = now
            self._deadlines.record(peer_id, PeerPhase.DOWNLOAD, now - self._published_at)

    def computed(self, peer_id: str, inner_steps: int, now: float) -> None:
        """A contribution begins, with so many inner steps behind it as are believed: measure the time of one of them."""
        since, self._computes_from[peer_id] = self._computes_from.get(peer_id), now
        if since is not None and inner_steps > 0:
            self._deadlines.record_step(peer_id, (now - since) / inner_steps)

    def began(self, peer_id: str, current: OpenRound, now: float) -> None:
        """The first byte of its contribution to the open collection is here: its compute ends."""
        if peer_id in current.punctual:
            self._deadlines.record(peer_id, PeerPhase.COMPUTE, now - self._computes_since(peer_id, current))

    def ended(self, peer_id: str, contribution: InFlightContribution, now: float) -> None:
        """The last byte of its contribution is here: its upload ends."""
        if contribution.steady:
            self._deadlines.record(peer_id, PeerPhase.UPLOAD, now - contribution.began_at)

    def free_until(self, peer_id: str) -> float:
        """Return by when the outcome must be out so that this peer, whose contribution is in, need not wait for it."""
        if not self._overlap or (contribution := self._contributions.get(peer_id)) is None:
            return -math.inf
        trains_s = self._overlap * self._deadlines.step_s(peer_id)
        return contribution.began_at + trains_s - self._deadlines.allowed_s(peer_id, PeerPhase.DOWNLOAD)

    def left_out(self, current: OpenRound, now: float) -> None:
        """The round stops waiting: each overdue peer took at least the time that it was given.

        Nothing is recorded of the other missing peers: how long they take is not known.
        """
        for peer_id in sorted(current.overdue(now) & current.punctual):
            contribution = self._contributions.get(peer_id)
            if contribution is None:
                self._deadlines.record(peer_id, PeerPhase.COMPUTE, now - self._computes_since(peer_id, current))
            elif not self._contributions.carries:  # else its upload goes on, and its end is measured
                self._deadlines.record(peer_id, PeerPhase.UPLOAD, now - contribution.began_at)

    def _computes_since(self, peer_id: str, current: OpenRound) -> float:
        return max(current.opened_at, self._at_step.get(peer_id, current.opened_at))
