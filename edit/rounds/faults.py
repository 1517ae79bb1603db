"""Who is kept out of the rounds because of bad bytes, and how soon a round opens after one that came to nothing.

Rules 17 and 18 of `edit.rounds.machine`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Set

__all__ = ["Faults", "delay_s"]

_MOST = 3  # faults among a peer's last _OF outcomes until it is quarantined
_OF = 16
_FIRST_S, _LONGEST_S = 60.0, 3600.0  # a quarantine
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 60.0  # between two rounds


class Faults:
    """The peers whose bytes were bad: how often of late, and until when they are quarantined."""

    def __init__(self) -> None:
        self._outcomes: dict[str, deque[bool]] = {}  # of peers with a fault among them: whether each was a fault
        self._times: dict[str, int] = {}  # how often each was quarantined
        self._until: dict[str, float] = {}  # of those that are quarantined now

    @property
    def quarantined(self) -> Set[str]:
        """The peers that are quarantined."""
        return self._until.keys()

    def until(self, peer_id: str) -> float | None:
        """Return when the quarantine of this peer ends; None when it is in none."""
        return self._until.get(peer_id)

    def next_release(self) -> float:
        """Return when the first quarantine ends; inf when nobody is in one."""
        return min(self._until.values(), default=math.inf)

    def faulted(self, peer_id: str, now: float) -> float:
        """Count a fault; return how many seconds the peer is quarantined for, or 0."""
        outcomes = self._outcomes.setdefault(peer_id, deque(maxlen=_OF))
        outcomes.append(True)
        if sum(outcomes) < _MOST:
            return 0.0
        before = self._times.get(peer_id, 0)
        self._times[peer_id] = before + 1
        seconds = min(_FIRST_S * 2.0 ** min(before, 10), _LONGEST_S)
        self._until[peer_id] = now + seconds
        return seconds

    def merged(self, peers: Iterable[str]) -> None:
        """Count a contribution of each of these peers that became part of a commit."""
        for peer_id in peers:
            if (outcomes := self._outcomes.get(peer_id)) is None:
                continue
            outcomes.append(False)
            if not any(outcomes):
                del self._outcomes[peer_id]
                self._times.pop(peer_id, None)

    def release(self, now: float) -> None:
        """End the quarantines that are over."""
        if now >= self.next_release():
            self._until = {peer_id: until for peer_id, until in self._until.items() if until > now}

    def pardon(self) -> None:
        """Forget all faults."""
        self._outcomes.clear()
        self._times.clear()
        self._until.clear()


def delay_s(aborts: int) -> float:
    """Return the seconds until a round opens after so many in a row that faults brought to nothing: 0, 0.5, 1, ... 60."""
    return min(_FIRST_DELAY_S * 2.0 ** min(aborts - 2, 10), _LONGEST_DELAY_S) if aborts > 1 else 0.0
