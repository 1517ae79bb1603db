"""Rounds as OpenTelemetry's spans: collect, merge and commit; and a few numbers. A subscriber of the run's feed."""

from __future__ import annotations

from dataclasses import dataclass, field

from aggregator.run_feed import FragmentMerged, RoundChanged, RoundReport, RunEvent, StepCommitted
from edit.rounds.events import Phase
from edit.telemetry import Attributes, Span, Telemetry, trace_id
from editpb.limits import one_line

__all__ = ["RoundSpans"]

_MOST_MERGES = 1024  # spans of one round


@dataclass(slots=True)
class _Open:
    """The round that is open. Times are seconds since 1970."""

    round_id: int
    committing: float | None = None  # since when
    committed: float | None = None  # when it was on disk, applied and published
    merges: list[Span] = field(default_factory=list)


class RoundSpans:
    """Records each round when it has closed.

    Args:
        telemetry: takes the spans.
        run_id: of the run.
        part: of the model, in a swarm or of several aggregators; 0 otherwise.
    """

    def __init__(self, telemetry: Telemetry, run_id: str, part: int = 0) -> None:
        self._telemetry, self._run_id, self._part = telemetry, run_id, part
        self._open = _Open(0)

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Note when a step of a round began or ended; record a round that has closed."""
        match event:
            case RoundChanged(phase, round_id):
                if round_id and round_id != self._open.round_id:
                    self._open = _Open(round_id)
                if phase == Phase.COMMITTING.value and self._open.committing is None:
                    self._open.committing = unix
            case FragmentMerged(round_id, fragment_id, peers, seconds):
                if round_id == self._open.round_id and len(self._open.merges) < _MOST_MERGES:
                    attributes: Attributes = {"edit.fragment": fragment_id, "edit.peers": peers}
                    self._open.merges.append(Span(name="merge", start=unix - seconds, end=unix, attributes=attributes))
            case StepCommitted():
                self._open.committed = unix
            case RoundReport():
                self._closed(event, unix)

    def _closed(self, report: RoundReport, unix: float) -> None:
        of, self._open = self._open if self._open.round_id == report.round_id else _Open(report.round_id), _Open(0)
        begun = unix - report.seconds
        children = [Span(name="collect", start=begun, end=of.committing or unix), *of.merges]
        if of.committing is not None:
            children.append(Span(name="commit", start=of.committing, end=of.committed or unix))
        where: Attributes = {"edit.part": self._part}
        attributes: Attributes = {
            **where,
            "edit.run_id": self._run_id,
            "edit.round": report.number,
            "edit.outer_step": report.outer_step,
            "edit.committed": report.committed,
            "edit.reason": one_line(report.reason),
            "edit.merged": sum(peer.weight > 0 for peer in report.peers),
            "edit.missing": len(report.missing),
            "edit.received_bytes": report.bytes_in,
        }
        error = "" if report.committed else one_line(report.reason)
        span = Span(name="round", start=begun, end=unix, attributes=attributes, error=error, children=children)
        self._telemetry.record(span, trace_id(self._run_id, report.outer_step))
        self._telemetry.measure("edit.round.duration", "s", report.seconds, {**where, "edit.committed": report.committed})
        self._telemetry.add("edit.round.received", "By", report.bytes_in, where)
