"""One-line messages about what happened in the run: verdicts, aborted rounds, peers that leave and return."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from edit.records import round_number
from edit.view.state import Cell, Event, RoundRow, RunState

__all__ = ["EventMessages"]

_DAMAGE = 10.0  # times the median norm of the others
_AWAY = ("lost", "left", "evicted")


class EventMessages:
    """Derive events from the lines of the metrics files."""

    def __init__(self) -> None:
        self._away: set[str] = set()

    def events_of(self, record: Mapping[str, Any], state: RunState) -> list[Event]:
        """Return the events that follow from `record`, which `state` has applied already."""
        kind, peer_id = record.get("kind"), str(record.get("peer_id"))
        if kind == "round" and state.rounds:
            return _round(state.rounds[-1])
        if kind == "member" and peer_id in state.peers:
            return self._member(peer_id, state, float(record.get("t", 0.0)))
        if kind == "peer" and peer_id in self._away and state.peers[peer_id].state in ("training", "exchanging"):
            self._away.discard(peer_id)
            row = state.peers[peer_id]
            return [Event(row.t, f"{peer_id} is back at outer step {row.outer_step}, training on", "good")]
        return []

    def _member(self, peer_id: str, state: RunState, t: float) -> list[Event]:
        row = state.peers[peer_id]
        if row.state not in _AWAY or state.outer_step >= state.outer_steps:
            return []
        self._away.add(peer_id)
        return [Event(t, f"{peer_id} is {row.state}: {row.reason}", "info")]


def _round(row: RoundRow) -> list[Event]:
    if not row.committed:
        return [Event(row.t, f"round {round_number(row.round_id)} aborted: {row.reason}", "info")]
    usual = [cell.norm for cell in row.cells.values() if cell.verdict == "ok"]
    return [
        Event(row.t, f"outer step {row.outer_step}: {peer_id} {_blame(cell, usual)}: {_extent(cell)}", _tone(cell, usual))
        for peer_id, cell in row.cells.items()
        if cell.verdict != "ok"
    ]


def _tone(cell: Cell, usual: list[float]) -> str:
    """Return "good" for damage that was rejected, "info" for a norm that is only unusual."""
    damaged = cell.verdict == "nonfinite" or (usual and cell.norm > _DAMAGE * statistics.median(usual))
    return "good" if damaged else "info"


def _extent(cell: Cell) -> str:
    where = "weight 0" if cell.bad == cell.fragments else f"weight 0 in {cell.bad} of {cell.fragments} fragments"
    return f"{where}, the others' are merged"


def _blame(cell: Cell, usual: list[float]) -> str:
    if cell.verdict == "nonfinite":
        return "sent NaN or infinite values"
    if not usual or not math.isfinite(cell.norm):
        return f"sent an {cell.verdict} pseudo-gradient"
    ratio = cell.norm / max(statistics.median(usual), 1e-12)
    return f"sent a pseudo-gradient of {ratio:.3g} times the others' norm"
