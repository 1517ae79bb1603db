"""metrics.jsonl as a subscriber of the run's feed: one JSON object per line.

A disk that refuses a line never stops the run: the first refusal is logged, later lines are tried again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from aggregator.run_feed import MemberChanged, PeerReported, RoundReport, RunEvent

__all__ = ["MetricsLog"]

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends lines to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complained = False

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Write the line of an event that has one: a closed round, a member's change, a peer's report."""
        match event:
            case RoundReport():
                self.line("round", unix, event.as_json())
            case MemberChanged(peer_id, state, reason):
                self.line("member", unix, {"peer_id": peer_id, "state": state, "reason": reason})
            case PeerReported(peer_id, heartbeat):
                self.line("peer", unix, {"peer_id": peer_id, **heartbeat.as_json()})

    def line(self, kind: str, unix: float, fields: Mapping[str, object]) -> None:
        """Append one line; `unix`: seconds since 1970."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "t": round(unix, 3), **fields}) + "\n")
        except OSError as error:
            if not self._complained:
                _log.warning("metrics: %s cannot be written (%s); the run goes on without", self._path, error.strerror)
            self._complained = True
