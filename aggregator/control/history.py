"""What a run has done, as far as a status shows it: curves, events, shares of time, the pace.

All of it is bounded, whatever members do and however long a run lasts: a curve that is full keeps every second point.
"""

from __future__ import annotations

import logging
import math
import statistics
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping

from aggregator.run_feed import (
    EventLines,
    MemberChanged,
    OrderGiven,
    PeerReported,
    RoundReport,
    RunEvent,
    StepCommitted,
)
from edit.records import Verdict
from edit.rounds.deadlines import PeerPhase
from edit.view.state import Steps
from editpb.limits import MAX_SHOWN, one_line
from editpb.run_status import KEPT_EVENTS, SHARES, Curve, Event, PeerRound

__all__ = ["History", "Line"]

_POINTS = 256  # of a curve, at most
_POINTS_IN_ALL = 1 << 15  # that a status has
_WORDS = 500  # characters of an event
_PACED = 20  # outer steps whose pace counts
HELD_OUT = "held_out"  # the metric of a peer that is drawn as its held-out loss
_SILENT_S = 60.0  # longer than that between two reports, nobody knows what a peer did
_SHARES = {
    PeerPhase.COMPUTE: "computing",
    PeerPhase.DOWNLOAD: "exchanging",
    PeerPhase.UPLOAD: "exchanging",
    PeerPhase.WAITING: "waiting",
}


class Line:
    """The points of a curve in order of time. Once there are `most`, every second one is dropped, and of later ones too."""

    def __init__(self, most: int = _POINTS) -> None:
        self._most, self._every, self._count = most, 1, 0
        self._x, self._t, self._y, self._numbers = array("d"), array("d"), array("d"), array("Q")
        self._last = (0.0, 0.0, 0.0)
        self._thinned = 0  # the number of the point with which points were dropped last

    def add(self, x: float, t: float, y: float, number: int = 0) -> None:
        """Add a point; what is not finite, or as large as no float32 is, is left out.

        number: of the point among those of all lines, ascending.
        """
        if not (abs(x) <= MAX_SHOWN and abs(y) <= MAX_SHOWN):
            return
        self._last = (x, t, y)
        if self._count % self._every == 0:
            for values, value in zip((self._x, self._t, self._y), self._last, strict=True):
                values.append(value)
            self._numbers.append(number)
            if len(self._x) >= self._most:
                self._x, self._t, self._y = self._x[::2], self._t[::2], self._y[::2]
                self._numbers = self._numbers[::2]
                self._every *= 2
                self._thinned = number
        self._count += 1

    def curve(self, kind: str, peer_id: str, most: int = _POINTS, after: int = 0) -> Curve:
        """Return at most so many of its points, the newest among them.

        after: the number of the last point that was added before it was told with the same `most`: of the points that it had
        then and still has, only the count is told, as `Curve.kept`. 0: it was not told.
        """
        had = bisect_right(self._numbers, after) if after and self._thinned <= after else 0
        step, before = (max(1, math.ceil(count / max(1, most - 1))) for count in (len(self._x), had))
        kept = math.ceil(had / step) if step == before else 0
        x, t, y = (tuple(values[kept * step :: step]) for values in (self._x, self._t, self._y))
        if self._count and self._t[(len(self._t) - 1) // step * step] != self._last[1]:
            x, t, y = ((*values, last) for values, last in zip((x, t, y), self._last, strict=True))
        return Curve(kind=kind, peer_id=peer_id, x=x, t=t, y=y, kept=kept)


class History:
    """Remembers what was published. Subscribe `on_event`.

    Args:
        tokens: merged so far.
    """

    def __init__(self, tokens: Callable[[], int]) -> None:
        self._tokens = tokens
        self._lines = EventLines()
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._numbered = 0
        self._curves: dict[tuple[str, str], Line] = {}  # by kind and peer_id
        self._steps: dict[str, Steps] = {}
        self._trained: dict[str, int] = {}  # inner steps of the last point of each peer's loss
        self._evaluated: dict[str, int] = {}  # outer step of the last point of each peer's held-out loss
        self._away: set[str] = set()
        self._seen: dict[str, float] = {}  # when each peer reported last
        self._shares: dict[str, dict[str, float]] = {}  # seconds by share, by peer_id
        self._spent: dict[str, float] = {}  # the same of all peers together, since the last commit
        self._verdicts: dict[str, PeerRound] = {}
        self._paced: deque[tuple[float, int, int]] = deque(maxlen=_PACED + 1)  # t, outer step, tokens of the last commits
        self._bytes = [0, 0]  # in, out
        self._bytes_before = (0, 0)  # of earlier starts
        self.committed = self.aborted = 0  # rounds
        self.points = 0  # that were added to curves: as long as it is the same, no curve has changed
        self._most, self._narrowed = _POINTS, 0  # how many points of each curve are told; what `points` was when that changed

    def begin_with(self, earlier: History) -> None:
        """Take the curves, events and verdicts of earlier starts; before any event of this one.

        Counters and the pace are this process's: nothing was counted while it did not run.
        """
        self._events, self._numbered = earlier._events, earlier._numbered
        self._curves, self._steps, self._trained = earlier._curves, earlier._steps, earlier._trained
        self._evaluated, self._verdicts, self._bytes_before = earlier._evaluated, earlier._verdicts, earlier.traffic
        self._shares = earlier._shares
        self.points = earlier.points

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Take an event of the run's feed."""
        match event:
            case PeerReported(peer_id, heartbeat, phase):
                self._share(peer_id, phase, unix)
                steps = self._steps.setdefault(peer_id, Steps()).update(heartbeat.inner_steps)
                if steps > self._trained.get(peer_id, 0):
                    self._trained[peer_id] = steps
                    self._add("loss", peer_id, steps, unix, heartbeat.loss)
                held_out, step = heartbeat.metrics.get(HELD_OUT), heartbeat.outer_step
                committed = self._paced[-1][1] if self._paced else 0
                if held_out is not None and self._evaluated.get(peer_id, 0) < step <= committed:  # above that it cannot be
                    self._evaluated[peer_id] = step
                    self._add(HELD_OUT, peer_id, step, unix, held_out)
            case RoundReport():
                self._round(event, unix)
            case MemberChanged(peer_id, "training" | "exchanging", live=True) if peer_id in self._away:
                self._away.discard(peer_id)
                self._note(unix, "member", peer_id, f"{peer_id} is back", "good")
            case StepCommitted():
                return
            case _:
                if isinstance(event, MemberChanged) and (not event.live or event.state == "starting"):
                    self._seen.pop(event.peer_id, None)  # what it does until its next report, nobody sees
                if isinstance(event, MemberChanged) and not event.live:
                    self._away.add(event.peer_id)
                if (line := self._lines.line(event, unix)) is not None:
                    self._say(event, *line, unix)

    def _say(self, event: RunEvent, level: int, text: str, unix: float) -> None:
        """Note an event in the words of the log."""
        peer_id = str(getattr(event, "peer_id", ""))
        kind = "order" if isinstance(event, OrderGiven) else "member" if peer_id else "run"
        lost = isinstance(event, MemberChanged) and event.state in ("lost", "evicted")
        self._note(unix, kind, peer_id, text, "bad" if lost or level >= logging.WARNING else "info")

    def _note(self, unix: float, kind: str, peer_id: str, text: str, tone: str) -> None:
        self._numbered += 1
        event = Event(number=self._numbered, t=unix, kind=kind, peer_id=peer_id, text=one_line(text, _WORDS), tone=tone)
        self._events.append(event)

    def _round(self, report: RoundReport, unix: float) -> None:
        """Take a closed round."""
        self.committed += report.committed
        self.aborted += not report.committed
        if not report.committed:
            if self._lines.line(report, unix) is not None:
                self._note(unix, "round", "", f"round {report.number} aborted: {report.reason}", "info")
            return
        step, peers = report.outer_step, report.peers
        for index, count in enumerate((report.bytes_in, report.bytes_out)):
            self._bytes[index] += count
        of_run = {"norm": report.norm, "cosine": report.cosine, "round_s": report.seconds}
        bytes_in, bytes_out = (sum(each) for each in zip(self._bytes_before, self._bytes, strict=True))
        for kind, value in {**of_run, "bytes_in": bytes_in, "bytes_out": bytes_out}.items():
            if value is not None:
                self._add(kind, "", step, unix, value)
        if (whole := sum(self._spent.values())) > 0:
            for kind in SHARES:
                self._add(kind, "", step, unix, self._spent.get(kind, 0.0) / whole)
            self._spent.clear()
        for peer in peers:
            self._verdicts[peer.peer_id] = peer
            if peer.fragments:
                self._add("norm", peer.peer_id, step, unix, peer.norm)
            if peer.verdict not in (Verdict.OK.value, "absent", "carried"):
                where = "" if peer.rejected == peer.fragments else " in some fragments"
                text = f"outer step {step}: {peer.peer_id} has weight 0{where}: {peer.reason}"
                self._note(unix, "rejected", peer.peer_id, text, "info" if peer.verdict == Verdict.IDLE.value else "bad")
        self._paced.append((unix, step, self._tokens()))

    def _add(self, kind: str, peer_id: str, x: float, t: float, y: float) -> None:
        """Add a point to a curve."""
        self.points += 1
        self._curves.setdefault((kind, peer_id), Line()).add(x, t, y, self.points)

    def _share(self, peer_id: str, phase: PeerPhase | None, unix: float) -> None:
        """Count the time since the last report as spent in what the peer does now."""
        since, self._seen[peer_id] = self._seen.get(peer_id), unix
        if since is None or phase is None or not 0 < unix - since < _SILENT_S:
            return
        for seconds in (self._shares.setdefault(peer_id, {}), self._spent):
            seconds[_SHARES[phase]] = seconds.get(_SHARES[phase], 0.0) + unix - since

    # ---- what a status shows --------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of committed rounds: received by the aggregator, and sent to one peer."""
        return self._bytes[0], self._bytes[1]

    def shares(self, peer_id: str) -> Mapping[str, float]:
        """Return which share of its time a peer was computing, exchanging, waiting; empty: not known."""
        seconds = self._shares.get(peer_id, {})
        whole = sum(seconds.values())
        return {name: value / whole for name, value in seconds.items()} if whole > 0 else {}

    def verdict(self, peer_id: str) -> PeerRound | None:
        """Return what became of this peer in the last round that it was expected in."""
        return self._verdicts.get(peer_id)

    def events(self, after: int = 0) -> tuple[Event, ...]:
        """Return the last events whose number is above `after`."""
        return tuple(event for event in self._events if event.number > after) if after else tuple(self._events)

    def curves(self, after: int = 0) -> tuple[Curve, ...]:
        """Return all curves, with fewer points of each where there are many peers.

        after: what `points` was when they were told before: only the points since then, as `Line.curve` says. 0: they were not.
        """
        most = max(16, min(_POINTS, _POINTS_IN_ALL // max(1, len(self._curves))))
        if most != self._most:
            self._most, self._narrowed = most, self.points
        after = after if after >= self._narrowed else 0
        return tuple(line.curve(kind, peer_id, most, after) for (kind, peer_id), line in sorted(self._curves.items()))

    def eta_s(self, outer_steps: int, stop_tokens: int, unix: float, position: Callable[[int], int] = int) -> float | None:
        """Return the seconds until the run's end at the median pace of the last outer steps; None: not known yet.

        The end is `outer_steps`, or `stop_tokens` (0: no bound), whichever comes first. position: of an outer step in the run,
        in what takes equally long each: inner steps, where H changes.
        """
        if len(self._paced) < 2:
            return None
        (begun, first, before), (last, step, tokens) = self._paced[0], self._paced[-1]
        pairs = zip(self._paced, list(self._paced)[1:], strict=False)
        pace = statistics.median((b[0] - a[0]) / max(1, position(b[1]) - position(a[1])) for a, b in pairs)
        left = float(max(0, position(outer_steps) - position(step)))
        if stop_tokens and tokens > before:
            left = min(left, max(0, stop_tokens - tokens) / (tokens - before) * (position(step) - position(first)))
        return max(0.0, left * pace - max(0.0, unix - last)) if last > begun else None
