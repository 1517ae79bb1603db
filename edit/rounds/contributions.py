"""Which contribution of each peer is held, across rounds. At most one per peer; rules 11 to 13 of `edit.rounds.machine`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from edit.records import round_number
from edit.rounds.work_claims import WorkBounds

__all__ = ["ContributionBook", "InFlightContribution"]


@dataclass(slots=True)
class InFlightContribution:
    """One peer's contribution, from its first header until it is merged or dropped."""

    round_id: int  # the round that was open when it began
    outer_step: int  # the outer step it was computed against
    began_at: float  # when its first header came
    arrived: set[int] = field(default_factory=set)  # the fragments that are in
    whole: bool = False  # every fragment is in
    bounds: WorkBounds | None = None  # what of its claims is believed; None: all
    steady: bool = True  # the peer was not lost since it began, so its times count
    received_bytes: int = 0  # as the shell reported last
    total_bytes: int = 0  # as the shell reported last
    left_out_with: tuple[int, int] = (0, 0)  # bytes and fragments that were in when a round left it out last

    def moved(self) -> bool:
        """Whether anything came since this was asked last: when a round leaves it out."""
        before, self.left_out_with = self.left_out_with, (self.received_bytes, len(self.arrived))
        return self.left_out_with != before

    def ends_at(self, now: float) -> float:
        """When all of it will be in, at the rate so far; inf before there is one."""
        if not 0 < self.received_bytes <= self.total_bytes:
            return math.inf
        return self.began_at + (now - self.began_at) * self.total_bytes / self.received_bytes


class ContributionBook:
    """The contributions that are held, by peer.

    Args:
        max_staleness: how many outer steps may lie between the one that a contribution was computed against and the one that it
            is merged at. 0: it is merged in the round that it names, or never.
        first_round_id: the first round of this start of the coordinator.
    """

    def __init__(self, max_staleness: int, first_round_id: int) -> None:
        self._max_staleness = max_staleness
        self._first_round_id = first_round_id
        self._in_hand: dict[str, InFlightContribution] = {}
        self._merged: dict[str, tuple[int, int]] = {}  # peer_id -> the round it named, the outer step it became part of

    @property
    def carries(self) -> bool:
        """Whether a contribution may outlive the round that it names."""
        return self._max_staleness > 0

    def get(self, peer_id: str, round_id: int | None = None) -> InFlightContribution | None:
        """Return what is held of this peer, or None; with `round_id` only if it names that round."""
        known = self._in_hand.get(peer_id)
        return known if round_id is None or (known is not None and known.round_id == round_id) else None

    def peers(self) -> tuple[str, ...]:
        """Return the peers whose contributions are held, sorted, so that no order depends on who came first."""
        return tuple(sorted(self._in_hand))

    def arrived(self) -> Iterator[tuple[str, int]]:
        """Return (peer_id, fragment_id) of each fragment that is in, sorted."""
        return ((peer_id, fragment_id) for peer_id in self.peers() for fragment_id in sorted(self._in_hand[peer_id].arrived))

    def refusal(self, peer_id: str, round_id: int, outer_step: int, newest_round_id: int, run_step: int) -> str:
        """Return why a contribution is late or early (rules 11 to 13), or ''.

        newest_round_id: the last round that was opened; run_step: the outer step of the run.
        """
        known, merged = self._in_hand.get(peer_id), self._merged.get(peer_id)
        if not self._first_round_id <= round_id <= newest_round_id:
            return f"round {round_number(round_id)} was never opened since the coordinator started; contribute to a new one"
        if outer_step > run_step:
            return f"computed against outer step {outer_step}; the run is at {run_step}"
        if run_step - outer_step > self._max_staleness:
            return self._too_stale(outer_step, run_step)
        if merged is not None and round_id <= merged[0]:
            return f"a contribution to round {round_number(merged[0])} is part of outer step {merged[1]} already"
        if known is None or (known.round_id, known.outer_step) == (round_id, outer_step):
            return ""
        if known.whole:
            return f"the contribution to round {round_number(known.round_id)} is in and waits to be merged"
        if known.round_id > round_id:
            return f"a newer contribution, to round {round_number(known.round_id)}, has come"
        return ""

    def begin(self, peer_id: str, round_id: int, outer_step: int, now: float) -> InFlightContribution | None:
        """Take in a contribution that is not refused, in place of an older one; None if this very one is held already."""
        known = self._in_hand.get(peer_id)
        if known is not None and (known.round_id, known.outer_step) == (round_id, outer_step):
            return None
        begun = self._in_hand[peer_id] = InFlightContribution(round_id, outer_step, now)
        return begun

    def drop(self, *peers: str) -> None:
        """Forget these peers' contributions."""
        for peer_id in peers:
            self._in_hand.pop(peer_id, None)

    def merged(self, peers: Collection[str], outer_step: int) -> None:
        """Remember that these peers' contributions are part of the commit TO `outer_step`; they are no longer held."""
        for peer_id in peers:
            if (done := self._in_hand.pop(peer_id, None)) is not None:
                self._merged[peer_id] = done.round_id, outer_step

    def end_round(self, run_step: int) -> list[tuple[str, str]]:
        """Keep what may outlive the round that is over; return (peer_id, reason) of each that is too stale from now on."""
        if not self.carries:
            self._in_hand.clear()
        stale = [
            (peer_id, self._too_stale(self._in_hand[peer_id].outer_step, run_step))
            for peer_id in self.peers()
            if run_step - self._in_hand[peer_id].outer_step > self._max_staleness
        ]
        self.drop(*(peer_id for peer_id, _ in stale))
        return stale

    def clear(self) -> None:
        """Forget all of them: the run is over."""
        self._in_hand.clear()

    def _too_stale(self, outer_step: int, run_step: int) -> str:
        return f"computed against outer step {outer_step}; the run is at {run_step}, max_staleness = {self._max_staleness}"
