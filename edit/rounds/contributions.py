"""The contributions that the coordinator has in hand, whole or on their way, across rounds: one per peer. Sans-IO.

Owns: what of whom is in, since when it travels, what may still be taken of it, what goes on into the next round. Must not know:
bytes, who is live, when a round closes. Rules, with max_staleness = S:
 1. A contribution is known by its peer, the round that was open when it began, and the outer step s it was computed against.
 2. S = 0: it is taken in its own round only, and is gone when that closes.
 3. S > 0: it is merged whole, in the first round that closes with it, at outer step t, as long as t - s <= S; until then it is
    CARRIED OVER from round to round, and its bytes may go on coming in while no round is open. After that it is refused.
 4. Once merged it is refused if it comes again: the commit has its verdict. So the rounds that a peer's contributions name
    strictly increase, and none of them is of an earlier start of the coordinator, which would know nothing of that.
 5. A newer contribution of the same peer replaces one that is not whole: the peer began anew. One that is whole stays, and the
    newer one is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

__all__ = ["ContributionBook", "InFlightContribution"]


@dataclass(slots=True)
class InFlightContribution:
    """One peer's contribution. began_at: when its first header came; arrived: the fragments that are in; steady: the peer was
    not lost since; received_bytes, total_bytes: as the shell said last."""

    round_id: int
    outer_step: int
    began_at: float
    arrived: set[int] = field(default_factory=set)
    whole: bool = False
    steady: bool = True
    received_bytes: int = 0
    total_bytes: int = 0

    def ends_at(self, now: float) -> float:
        """When it will be in, at the rate so far; inf before there is one."""
        if not 0 < self.received_bytes <= self.total_bytes:
            return float("inf")
        return self.began_at + (now - self.began_at) * self.total_bytes / self.received_bytes


class ContributionBook:
    """See the module's text. first_round_id: of this start of the coordinator; `carries`: what comes may outlive its round."""

    def __init__(self, max_staleness: int, first_round_id: int) -> None:
        self.carries = max_staleness > 0
        self._max = max_staleness
        self._first = first_round_id
        self._of: dict[str, InFlightContribution] = {}
        self._merged: dict[str, tuple[int, int]] = {}  # peer_id -> the round it named, the outer step it became part of

    def get(self, peer_id: str, round_id: int | None = None) -> InFlightContribution | None:
        """What is in hand of this peer, or None; round_id: only when it names that round."""
        known = self._of.get(peer_id)
        return known if round_id is None or (known is not None and known.round_id == round_id) else None

    def items(self) -> Iterator[tuple[str, InFlightContribution]]:
        """All, by peer_id, so that the order never depends on who came first."""
        return iter(sorted(self._of.items()))

    def arrived(self) -> Iterator[tuple[str, int]]:
        """(peer_id, fragment_id) of each fragment that is in, in a fixed order."""
        return ((peer_id, fragment_id) for peer_id, one in self.items() for fragment_id in sorted(one.arrived))

    def refusal(self, peer_id: str, round_id: int, outer_step: int, newest_round_id: int, run_step: int) -> str:
        """Why a contribution that may outlive its round is not taken (it is late or early), or ''. run_step: the run's t."""
        known, merged = self._of.get(peer_id), self._merged.get(peer_id)
        if not self._first <= round_id <= newest_round_id:
            return f"round {round_id} was never opened since the coordinator started; contribute to a new one"
        if outer_step > run_step:
            return f"computed against outer step {outer_step}; the run is at {run_step}"
        if run_step - outer_step > self._max:
            return self._too_stale(outer_step, run_step)
        if merged is not None and round_id <= merged[0]:
            return f"a contribution to round {merged[0]} is part of outer step {merged[1]} already"
        if known is None or (known.round_id, known.outer_step) == (round_id, outer_step):
            return ""
        if known.whole:
            return f"the contribution to round {known.round_id} is in and waits to be merged"
        if known.round_id > round_id:
            return f"a newer contribution, to round {known.round_id}, has come"
        return ""

    def begin(self, peer_id: str, round_id: int, outer_step: int, now: float) -> InFlightContribution | None:
        """A contribution that is not refused begins; None when it is in hand already. It replaces an older one."""
        known = self._of.get(peer_id)
        if known is not None and (known.round_id, known.outer_step) == (round_id, outer_step):
            return None
        begun = self._of[peer_id] = InFlightContribution(round_id, outer_step, now)
        return begun

    def drop(self, *peers: str) -> None:
        """Their bytes were bad, or could not be merged."""
        for peer_id in peers:
            self._of.pop(peer_id, None)

    def clear(self) -> None:
        """The run is over."""
        self._of.clear()

    def merged(self, peers: Collection[str], outer_step: int) -> None:
        """These are part of the commit TO outer_step."""
        for peer_id in peers:
            if (done := self._of.pop(peer_id, None)) is not None and self.carries:
                self._merged[peer_id] = done.round_id, outer_step

    def close(self, run_step: int) -> list[tuple[str, str]]:
        """A round is over: keep what is carried over; (peer_id, reason) of each that is refused from now on."""
        if not self.carries:
            self.clear()
            return []
        stale = [(peer_id, one) for peer_id, one in self.items() if run_step - one.outer_step > self._max]
        for peer_id, _ in stale:
            del self._of[peer_id]
        return [(peer_id, self._too_stale(one.outer_step, run_step)) for peer_id, one in stale]

    def _too_stale(self, outer_step: int, run_step: int) -> str:
        return f"computed against outer step {outer_step}; the run is at {run_step}, max_staleness = {self._max}"
