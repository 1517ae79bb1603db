"""One swap of two peers (gossip), as one of them sees it: when it takes the step with its partner, and when alone. Sans-IO.

1. Each side sends its offer: a contribution and its outer parameters, of all fragments that are due at their outer step.
2. Who has the whole offer of the other judges it, and says `Have`, once, with the fragments that it found good.
3. Who has said Have and heard the other's takes the fragments that both found good together, and the others alone.
4. At the deadline, when the stream breaks, or where the other breaks these rules, all are taken alone.
5. What is decided stays. So every swap ends, by rule 3 or rule 4, and no rule waits for anything but the deadline.

No message can make two sides certain of each other: where the last Have is lost, one takes the step together and the other,
which hears none, alone. Then the mean of all peers' outer parameters moves by what one gained and the other did not lose.
Whoever goes alone after its own Have is IN DOUBT: that may have happened.

state     event                       what follows                                    state then
--------  --------------------------  ----------------------------------------------  ----------
OFFERED   Came, some are missing      nothing                                         OFFERED
OFFERED   Came, the last one          Judge                                           JUDGING
JUDGING   Judged, no Have yet         SendHave                                        WAITING
JUDGING   Judged, Have was heard      SendHave, Decided: those that both found good   DECIDED
OFFERED   Have                        it is kept                                      OFFERED
JUDGING   Have                        it is kept                                      JUDGING
WAITING   Have                        Decided: those that both found good             DECIDED
before    Failed                      Decided: none; in doubt if Have was sent        DECIDED
before    what breaks the rules       as Failed, with the partner's fault             DECIDED
DECIDED   anything                    nothing                                         DECIDED
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

__all__ = ["Came", "Decided", "Effect", "Event", "Failed", "Have", "Judge", "Judged", "SendHave", "State", "Swap"]


class State(Enum):
    """How far a swap is."""

    OFFERED = "offered"
    JUDGING = "judging"
    WAITING = "waiting"
    DECIDED = "decided"


# What happens.


@dataclass(frozen=True, slots=True)
class Came:
    """The partner's offer of one fragment is here, whole."""

    fragment_id: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The partner's offer is judged: which of its fragments are good."""

    good: frozenset[int]


@dataclass(frozen=True, slots=True)
class Have:
    """The partner has this peer's offer, and found these fragments good."""

    good: frozenset[int]


@dataclass(frozen=True, slots=True)
class Failed:
    """The swap cannot go on: the deadline has passed, the stream broke, the partner refused or sent what cannot be read."""

    reason: str


Event = Came | Judged | Have | Failed


# What is to be done.


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge all fragments of the partner's offer, and say so with `Judged`."""


@dataclass(frozen=True, slots=True)
class SendHave:
    """Say `Have` to the partner."""

    good: frozenset[int]


@dataclass(frozen=True, slots=True)
class Decided:
    """Take the step: these fragments together, the others alone."""

    together: frozenset[int]
    # Why all are taken alone; empty where the swap came to its end.
    reason: str = ""
    # Whether the partner may have taken together what this peer takes alone.
    in_doubt: bool = False


Effect = Judge | SendHave | Decided


class Swap:
    """One peer's side of one swap. due: the fragments that the outer step exchanges."""

    def __init__(self, due: Collection[int]) -> None:
        self.state = State.OFFERED
        self._due = frozenset(due)
        self._missing = set(due)
        self._own: frozenset[int] | None = None
        self._theirs: frozenset[int] | None = None

    def handle(self, event: Event) -> list[Effect]:
        """Return what follows from an event, to be done in this order."""
        if self.state is State.DECIDED:
            return []
        match event:
            case Came(fragment_id):
                return self._came(fragment_id)
            case Judged(good):
                return self._judged(good)
            case Have(good):
                return self._heard(good)
            case Failed(reason):
                return self._alone(reason)

    def _came(self, fragment_id: int) -> list[Effect]:
        if fragment_id not in self._missing:
            return self._alone(f"offered fragment {fragment_id}, which is not due or was offered before")
        self._missing.remove(fragment_id)
        if self._missing:
            return []
        self.state = State.JUDGING
        return [Judge()]

    def _judged(self, good: frozenset[int]) -> list[Effect]:
        self._own, self.state = good & self._due, State.WAITING
        return [SendHave(self._own), *self._agree()]

    def _heard(self, good: frozenset[int]) -> list[Effect]:
        if self._theirs is not None or not good <= self._due:
            return self._alone("said twice what it found good" if self._theirs is not None else "found good what is not due")
        self._theirs = good
        return self._agree() if self.state is State.WAITING else []

    def _agree(self) -> list[Effect]:
        if self._own is None or self._theirs is None:
            return []
        self.state = State.DECIDED
        return [Decided(self._own & self._theirs)]

    def _alone(self, reason: str) -> list[Effect]:
        self.state = State.DECIDED
        return [Decided(frozenset(), reason, in_doubt=bool(self._own))]
