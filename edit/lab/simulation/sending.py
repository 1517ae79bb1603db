"""A simulated peer's contribution on its way to the coordinator: it stands for `peers.carriers.hub.uplink` at rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edit.lab.simulation.accounting import Share
from edit.lab.simulation.coordinator import Coordinator
from edit.lab.simulation.event_queue import EventQueue
from edit.lab.simulation.link import Line
from peers.carriers.hub.session import Sent, Session

__all__ = ["Pending", "Sending"]


@dataclass(slots=True)
class Pending:
    """A contribution whose outcome is not known. With max_staleness > 0 it may be carried past some commits."""

    sent: Sent  # as the session knows it
    shares: list[tuple[int, Share]]  # by fragment
    arrived: int = 0  # fragments that are in
    fetched_at: float | None = None  # when the update is here, once it was asked for


class Sending:
    """up_bytes: of one fragment; refused: called when the coordinator would not take it. `pending` is what is under way;
    fragments travel one after the other."""

    __slots__ = ("_coordinator", "_last_round", "_line", "_peer_id", "_queue", "_refused", "_up_bytes", "pending")

    def __init__(
        self,
        peer_id: str,
        up_bytes: int,
        queue: EventQueue,
        coordinator: Coordinator,
        line: Line,
        refused: Callable[[], None],
    ) -> None:
        self._refused = refused
        self.pending: Pending | None = None
        self._peer_id, self._up_bytes = peer_id, up_bytes
        self._queue, self._coordinator, self._line = queue, coordinator, line
        self._last_round = 0

    def begin(self, session: Session, outer_step: int, shares: list[tuple[int, Share]]) -> None:
        """Contribute what was computed against `outer_step`."""
        self.pending = Pending(Sent(0, outer_step), shares)
        self.advance(session)

    def advance(self, session: Session) -> None:
        """Begin to send what is pending, once a round is open for it."""
        pending = self.pending
        if pending is None or pending.sent.round_id:
            return
        if round_id := session.name_round(pending.sent, self._last_round):
            pending.sent = pending.sent._replace(round_id=round_id)
            self._queue.at(self._queue.now + self._line.latency_s, partial(self._offer, pending))

    def again(self, session: Session) -> None:
        """Its round was lost: send the same to a newer one."""
        if (pending := self.pending) is not None:
            self.drop()
            self.begin(session, pending.sent.outer_step, pending.shares)

    def drop(self) -> None:
        """It has its outcome: the next one goes to a newer round."""
        if self.pending is not None:
            self._last_round = max(self._last_round, self.pending.sent.round_id)
            self.pending = None

    def _offer(self, pending: Pending) -> None:
        if self.pending is not pending:
            return
        fragment_id, _ = pending.shares[pending.arrived]
        if self._coordinator.offered(self._peer_id, pending.sent.round_id, pending.sent.outer_step, fragment_id):
            self._queue.at(self._line.send(self._up_bytes, self._queue.now), partial(self._deliver, pending))
        else:
            self._refuse(pending)

    def _deliver(self, pending: Pending) -> None:
        if self.pending is not pending:
            return
        if not self._coordinator.arrived(self._peer_id, pending.sent.round_id, *pending.shares[pending.arrived]):
            self._refuse(pending)
            return
        pending.arrived += 1
        if pending.arrived < len(pending.shares):
            self._offer(pending)

    def _refuse(self, pending: Pending) -> None:
        """The answer travels back; only where contributions outlive their rounds does the view not say as much."""
        if not self._coordinator.carries:
            return
        sent = pending.sent._replace(refused_at=self._coordinator.machine.outer_step, reason="refused")
        self._queue.at(self._queue.now + self._line.latency_s, partial(self._hear, pending, sent))

    def _hear(self, pending: Pending, sent: Sent) -> None:
        if self.pending is pending:
            pending.sent = sent
            self._refused()
