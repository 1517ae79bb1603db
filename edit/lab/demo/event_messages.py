"""Says in one line what just happened to the run: verdicts, aborted rounds, peers that go and come back.

Owns: which changes are worth a line, and its words. Must not know: the clock, files, why anything was done to a process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from edit.lab.demo.state import Cell, DemoState, Event, RoundRow

__all__ = ["EventMessages"]

_DAMAGE = 10.0  # times the others' norm
_AWAY = ("lost", "left", "evicted")


class EventMessages:
    """`tell(record, board)` after the board has taken the record; returns the events that follow from it."""

    def __init__(self) -> None:
        self._away: set[str] = set()

    def tell(self, record: Mapping[str, Any], board: DemoState) -> list[Event]:
        kind, peer_id = record.get("kind"), str(record.get("peer_id"))
        if kind == "round" and board.rounds:
            return _round(board.rounds[-1])
        if kind == "member" and peer_id in board.peers:
            return self._member(peer_id, board, float(record.get("t", 0.0)))
        if kind == "peer" and peer_id in self._away and board.peers[peer_id].state in ("training", "exchanging"):
            self._away.discard(peer_id)
            row = board.peers[peer_id]
            return [Event(row.t, f"{peer_id} is back: snapshot of outer step {row.outer_step}, training on", "good")]
        return []

    def _member(self, peer_id: str, board: DemoState, t: float) -> list[Event]:
        row = board.peers[peer_id]
        if row.state not in _AWAY or board.outer_step >= board.outer_steps:
            return []
        self._away.add(peer_id)
        return [Event(t, f"{peer_id} is {row.state}: {row.reason}", "info")]


def _round(row: RoundRow) -> list[Event]:
    if not row.committed:
        return [Event(row.t, f"round {row.round_id % 1_000_000} aborted: {row.reason}", "info")]
    usual = [cell.norm for cell in row.cells.values() if cell.verdict == "ok"]
    return [
        Event(row.t, f"outer step {row.outer_step}: {peer_id} {_blame(cell, usual)}: {_extent(cell)}", _tone(cell, usual))
        for peer_id, cell in row.cells.items()
        if cell.verdict != "ok"
    ]


def _tone(cell: Cell, usual: list[float]) -> str:
    """Damage that was kept out is good news; a norm that is merely unusual is no news."""
    damaged = cell.verdict == "nonfinite" or (usual and cell.norm > _DAMAGE * statistics.median(usual))
    return "good" if damaged else "info"


def _extent(cell: Cell) -> str:
    where = "weight 0" if cell.bad == cell.parts else f"weight 0 in {cell.bad} of {cell.parts} fragments"
    return f"{where}, the others' are merged"


def _blame(cell: Cell, usual: list[float]) -> str:
    if cell.verdict == "nonfinite":
        return "sent NaN or infinite values"
    if not usual or not math.isfinite(cell.norm):
        return f"sent an {cell.verdict} pseudo-gradient"
    ratio = cell.norm / max(statistics.median(usual), 1e-12)
    return f"sent a pseudo-gradient of {ratio:.3g} times the others' norm"
