"""Whether a fragment of a contribution is taken now: one pure question, answered with the refusal or None. Sans-IO.

Owns: the words of a refusal, and whether the peer is late (stale) or wrong. Must not know: events other than the answer, time.
With max_staleness = 0 a contribution is taken in its own round only; otherwise as `edit.rounds.contributions` says.
"""

from __future__ import annotations

from typing import NamedTuple

from edit.rounds.contributions import ContributionBook
from edit.rounds.events import Offered, Phase, Refused
from edit.rounds.open_round import OpenRound

__all__ = ["Standing", "refusal"]


class Standing(NamedTuple):
    """Where the run is. idle: the phase while no round is open, else None; due: the fragments of the present outer step;
    newest_round_id: the last one that was opened."""

    current: OpenRound | None
    idle: Phase | None
    outer_step: int
    due: tuple[int, ...]
    newest_round_id: int

    @property
    def collecting(self) -> OpenRound | None:
        """The round that takes contributions, or None."""
        return self.current if self.current is not None and not self.current.close_reason else None


def refusal(offered: Offered, run: Standing, hand: ContributionBook) -> Refused | None:
    """Why it is not taken; None: it is."""
    if late := _carried(offered, run, hand) if hand.carries else _of_another_round(offered, run):
        return Refused(offered.peer_id, late, stale=True)
    if wrong := _wrong(offered, run):
        return Refused(offered.peer_id, wrong, stale=False)
    current = run.current
    if hand.carries or current is None or not current.close_reason or offered.peer_id in current.delivered[offered.fragment_id]:
        return None
    return Refused(offered.peer_id, f"round {offered.round_id} is closed: {current.close_reason}", stale=True)


def _carried(offered: Offered, run: Standing, hand: ContributionBook) -> str:
    if run.idle is Phase.FINISHED:
        return "the run is finished"
    return hand.refusal(offered.peer_id, offered.round_id, offered.outer_step, run.newest_round_id, run.outer_step)


def _of_another_round(offered: Offered, run: Standing) -> str:
    if run.current is None:
        return f"no round is open: the run is {run.idle.value if run.idle else 'over'}"
    if offered.round_id != run.current.round_id:
        return f"round {offered.round_id} is not open; round {run.current.round_id} is"
    if offered.outer_step != run.outer_step:
        return f"computed against outer step {offered.outer_step}; the run is at {run.outer_step}"
    return ""


def _wrong(offered: Offered, run: Standing) -> str:
    if offered.fragment_id not in run.due:
        due = f"{', '.join(map(str, run.due))} {'are' if len(run.due) > 1 else 'is'}"
        return f"fragment {offered.fragment_id} is not exchanged from outer step {offered.outer_step}; {due}"
    if run.current is not None and offered.peer_id in run.current.faults:
        return f"out of round {run.current.round_id}: {run.current.faults[offered.peer_id]}"
    return ""
