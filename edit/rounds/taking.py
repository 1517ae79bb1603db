"""What comes in: headers, progress, whole fragments and bad bytes of contributions, as the open round and the hand take them.
Sans-IO.

Owns: what each of these events changes. Must not know: when a round opens or closes (`edit.rounds.machine`), why something
is not taken (`edit.rounds.acceptance`), who is live.
"""

from __future__ import annotations

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.rounds.acceptance import Standing, refusal
from edit.rounds.contributions import ContributionBook
from edit.rounds.events import Arrived, Faulted, Offered, Progress, Refused
from edit.rounds.open_round import OpenRound
from edit.rounds.peer_timing import PeerTimer
from edit.rounds.ready_peers import ReadyPeers

__all__ = ["Taking"]


class Taking:
    """`Refused` in an answer means that nothing else happened."""

    def __init__(self, config: RoundsConfig, hand: ContributionBook, phases: PeerTimer, ready: ReadyPeers) -> None:
        self._config, self._hand, self._phases, self._ready = config, hand, phases, ready

    def offered(self, event: Offered, run: Standing, now: float) -> Refused | None:
        """A header: its contribution begins, unless it is in hand already."""
        if refused := refusal(event, run, self._hand):
            return refused
        begun, collecting = self._hand.begin(event.peer_id, event.round_id, event.outer_step, now), run.collecting
        if begun and collecting:
            collecting.withdraw(event.peer_id)  # of an older contribution that this one replaces
            if event.round_id == collecting.round_id:
                self._phases.began(event.peer_id, collecting, now)
        self._ready.contributes(event.peer_id, event.outer_step)
        return None

    def arrived(self, event: Arrived, run: Standing, now: float) -> Refused | None:
        """A fragment is in. Raises LocalProtocolError for one of the open round that is not due."""
        peer_id, current = event.peer_id, run.current
        if current is not None and event.round_id == current.round_id and event.fragment_id not in run.due:
            raise LocalProtocolError(f"Arrived with fragment {event.fragment_id}; due are {current.due}")
        under = self._hand.get(peer_id, event.round_id)
        if under is None and self._hand.carries:
            return Refused(peer_id, f"the contribution to round {event.round_id} is no longer in hand", stale=True)
        outer_step = under.outer_step if under is not None else run.outer_step
        offered = Offered(peer_id, event.round_id, outer_step, event.fragment_id)
        if refused := refusal(offered, run, self._hand) if under is not None else self.offered(offered, run, now):
            return refused
        self._ready.contributes(peer_id, outer_step)
        under = under or self._hand.get(peer_id)
        if under is not None and not under.whole:
            under.arrived.add(event.fragment_id)
            under.whole = len(under.arrived) == len(run.due)
            if under.whole:
                self._phases.ended(peer_id, under, now)
        if (collecting := run.collecting) is not None:
            self._deliver(collecting, peer_id, event.fragment_id)
        return None

    def take_up(self, opened: OpenRound) -> None:
        """What was carried over is in from the opening on."""
        for peer_id, fragment_id in self._hand.arrived():
            self._deliver(opened, peer_id, fragment_id)

    def _deliver(self, collecting: OpenRound, peer_id: str, fragment_id: int) -> None:
        collecting.deliver(peer_id, fragment_id)
        if peer_id in collecting.complete:
            collecting.free_until = min(collecting.free_until, self._phases.free_until(peer_id))

    def progress(self, event: Progress, run: Standing, now: float) -> None:
        """Bytes come in: as long as they do, and end before the ceiling at their rate, they are waited for."""
        under, collecting = self._hand.get(event.peer_id, event.round_id), run.collecting
        if under is None or event.received_bytes <= under.received_bytes:
            return
        under.received_bytes, under.total_bytes = event.received_bytes, event.total_bytes
        if collecting is None:
            return
        seconds = under.ends_at(now) - collecting.counted_from
        if seconds <= self._config.ceiling_s:
            collecting.extend(event.peer_id, min(self._config.ceiling_s, seconds + self._config.floor_s))

    def faulted(self, event: Faulted, run: Standing) -> Refused | None:
        """Bytes were bad. What is being merged stays; Refused: the shell is to drop what it has."""
        peer_id, collecting = event.peer_id, run.collecting
        if not self._hand.carries:
            if collecting is not None and event.round_id == collecting.round_id:
                self._hand.drop(peer_id)
                collecting.fault(peer_id, event.reason)
            return None
        if self._hand.get(peer_id, event.round_id) is None or (run.current and _merges(run.current, peer_id)):
            return None
        self._hand.drop(peer_id)
        if collecting is not None:
            collecting.fault(peer_id, event.reason)
        return Refused(peer_id, event.reason, stale=False)


def _merges(current: OpenRound, peer_id: str) -> bool:
    return bool(current.close_reason) and peer_id in current.complete
