"""How the coordinator hears of one simulated peer: attendances, heartbeats, and how they end."""

from __future__ import annotations

from functools import partial

from edit.lab.simulation.coordinator import Coordinator
from edit.lab.simulation.event_queue import EventQueue

__all__ = ["Presence"]


class Presence:
    """`outer_step`: as this process reported last; -1: not yet."""

    __slots__ = (
        "_attendance",
        "_coordinator",
        "_heartbeat_s",
        "_hung_up",
        "_latency_s",
        "_peer_id",
        "_queue",
        "_sent",
        "outer_step"
    )  # fmt: skip

    def __init__(self, peer_id: str, heartbeat_s: float, latency_s: float, queue: EventQueue, coordinator: Coordinator) -> None:
        self.outer_step = -1
        self._peer_id, self._heartbeat_s, self._latency_s = peer_id, heartbeat_s, latency_s
        self._queue, self._coordinator = queue, coordinator
        self._attendance = 0
        self._sent = 0.0
        self._hung_up = False

    def attend(self) -> None:
        """The stream reached the coordinator; an older one counts no more."""
        self._attendance = self._coordinator.attend(self._peer_id)
        self.outer_step, self._hung_up = -1, False

    def report(self, outer_step: int, step_s: float = 0.0) -> None:
        """Report the outer step, once one inner step of so many seconds is taken. From the first report on the coordinator
        expects more."""
        if self.outer_step < 0:
            self._coordinator.here(self._peer_id)
        self.outer_step, self._sent = outer_step, self._queue.now + step_s
        self._queue.at(self._sent + self._latency_s, partial(self._say, self._attendance, outer_step, step_s))

    def hang_up(self, reason: str, *, silent: bool, polite: bool) -> None:
        """The process is gone; silent: nothing but the lease tells."""
        self._hung_up = True
        if not silent:
            call = partial(self._coordinator.hung_up, self._peer_id, self._attendance, reason, polite)
            self._queue.at(self._queue.now + self._latency_s, call)
        elif self.outer_step >= 0:
            self._coordinator.vanished(self._peer_id, self._heard_last(self._queue.now))

    def _say(self, attendance: int, outer_step: int, step_s: float) -> None:
        if not self._hung_up:
            self._coordinator.heartbeat(self._peer_id, attendance, outer_step, step_s)

    def _heard_last(self, now: float) -> float:
        """When the last of the heartbeats up to `now` arrived; they go out at equal distances from the last report."""
        first = self._sent + self._latency_s
        return now if now <= first else first + (now - first) // self._heartbeat_s * self._heartbeat_s
