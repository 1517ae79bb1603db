"""What a coordinator's trackers are told of its run: the values of each committed round, by outer step."""

from __future__ import annotations

import math
from statistics import median
from typing import Protocol

from aggregator.run_feed import PeerReported, RoundReport, RunEvent

__all__ = ["Tracking"]


class _Log(Protocol):
    def log(self, step: int, values: dict[str, float | str]) -> None: ...


class Tracking:
    """A subscriber of the run's feed.

    A peer's loss is what it says: so the run's is the median of those that the commit has a contribution of, and one that lies
    moves it no further than the next honest one.
    """

    def __init__(self, trackers: _Log) -> None:
        self._trackers = trackers
        self._losses: dict[str, float] = {}  # last reported
        self._aborted = 0  # since this process started

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Log a commit's values; note a loss, and an aborted round."""
        match event:
            case PeerReported(peer_id, heartbeat):
                self._losses[peer_id] = heartbeat.loss
            case RoundReport(committed=False):
                self._aborted += 1
            case RoundReport():
                self._trackers.log(event.outer_step, self._values(event))

    def _values(self, report: RoundReport) -> dict[str, float | str]:
        peers = report.peers
        merged = [peer for peer in peers if peer.weight > 0]
        values: dict[str, float | str] = {
            "edit/round_s": report.seconds,
            "edit/merged": len(merged),
            "edit/rejected": sum(peer.rejected > 0 for peer in peers),
            "edit/missing": len(report.missing),
            "edit/aborted": self._aborted,
            "edit/merged_norm": report.norm,
            "edit/received_mb": report.bytes_in / 1e6,
            "edit/update_mb": report.bytes_out / 1e6,
        }
        losses = [loss for peer in merged if math.isfinite(loss := self._losses.get(peer.peer_id, math.nan))]
        if losses:
            values["loss"] = median(losses)
        if norms := [peer.norm for peer in merged if math.isfinite(peer.norm)]:
            values["edit/norm"] = median(norms)
        if (cosine := report.cosine) is not None:
            values["edit/cosine"] = cosine
        return values
