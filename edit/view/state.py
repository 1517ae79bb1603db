"""Everything that a screen shows of a run: from its status, or built up from the lines of a demo's metrics files.

Kinds of lines: member, round, peer (coordinator); step, outer (peers); lone (the lone peer); event, validation (the lab). Every
line has its own time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edit.config.algorithm import SyncConfig
from edit.config.validation import build
from edit.errors import ConfigError
from edit.plain_text import parse_json, printable
from edit.view.observations import Point, Status, SwarmStatus
from edit.view.overlaid import mean
from editpb.run_status import DAMAGE, Curve, MemberStatus, RoundReport, RunStatus

__all__ = ["Cell", "Event", "PeerRow", "RoundRow", "RunState", "Total"]

Record = Mapping[str, Any]
_RATED_S = 0.4  # a rate is over at least so long
_EVERY_DIGITS = 15  # of H; no run has more
_BAD_ORDER = (
    "nonfinite",
    "anomalous",
    "harmful",
    "copied",
    "outlier",
    "idle",
)  # a round's cell shows the worst verdict over its fragments


class Total:
    """The sum over all processes of a counter that restarts from zero with each process."""

    def __init__(self) -> None:
        self._before, self._last = 0, 0

    def update(self, count: int) -> None:
        if count < self._last:
            self._before += self._last
        self._last = count

    @property
    def value(self) -> int:
        return self._before + self._last


class Steps:
    """The inner steps of a peer over all of its processes.

    A process that begins counts from 0, or from its checkpoint, which is a little before where the last one was killed; which
    of the two, its count does not say. So what it counts first is taken as where the peer was.
    """

    def __init__(self) -> None:
        self._offset, self._last = 0, 0

    def update(self, count: int) -> int:
        """Take what the present process counts; return the steps in all."""
        if count < self._last:
            self._offset += self._last - count
        self._last = count
        return self.value

    @property
    def value(self) -> int:
        """The steps in all, which never fall."""
        return self._offset + self._last


@dataclass(frozen=True, slots=True)
class Event:
    """One message."""

    t: float
    text: str
    tone: str = "info"  # info, fault (injected), good (overcome), bad (not overcome)


@dataclass(frozen=True, slots=True)
class Cell:
    """One peer in one round, over all fragments."""

    verdict: str  # the worst one
    weight: float  # the mean
    norm: float  # of the whole pseudo-gradient
    bad: int  # fragments whose verdict is not ok
    fragments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One closed round."""

    t: float
    round_id: int
    outer_step: int  # the step it advanced to, or tried to
    committed: bool
    reason: str
    seconds: float
    bytes_in: int
    bytes_out: int  # of one peer's download
    digests: Mapping[int, str]  # by part of the model; without a swarm there is one
    cells: Mapping[str, Cell]


@dataclass(slots=True)
class PeerRow:
    """One peer: its last report, its totals over all its processes, and its loss curve."""

    peer_id: str
    state: str = "invited"
    reason: str = ""
    outer_step: int = 0
    loss: float = math.nan
    tokens_per_s: float = 0.0
    t: float = 0.0
    merged: int = 0
    rejected: int = 0
    shares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of its time: computing, exchanging, waiting
    verdict: str = ""  # on its last contribution, in words
    sent_rate: float = 0.0
    received_rate: float = 0.0
    steps: Steps = field(default_factory=Steps)
    curve: list[Point] = field(default_factory=list)
    _logged: Steps = field(default_factory=Steps)
    _sent: dict[int, Total] = field(default_factory=dict)  # by part, each of which has a connection of its own
    _received: dict[int, Total] = field(default_factory=dict)
    _reported: dict[int, float] = field(default_factory=dict)  # when
    _rated: tuple[float, int, int] = (0.0, 0, 0)  # when the rates were computed, and what had been sent and received

    @property
    def sent(self) -> int:
        """Bytes, of all parts and processes."""
        return sum(total.value for total in self._sent.values())

    @property
    def received(self) -> int:
        """Bytes, of all parts and processes."""
        return sum(total.value for total in self._received.values())

    def report(self, record: Record) -> None:
        """Apply a heartbeat, from the file of the coordinator or of a part's owner.

        An owner that is no more has written lines that are read after those of the next one: what is older is left out.
        """
        t, part = float(record["t"]), int(record.get("part", 0))
        if t < self._reported.get(part, 0.0):
            return
        self._reported[part] = t
        self._sent.setdefault(part, Total()).update(int(record.get("bytes_sent", 0)))
        self._received.setdefault(part, Total()).update(int(record.get("bytes_received", 0)))
        if t < self.t:
            return
        self.state, self.outer_step, self.t = str(record["state"]), int(record["outer_step"]), t
        self.tokens_per_s = _number(record.get("tokens_per_s"), 0.0)
        self.steps.update(int(record.get("inner_steps", 0)))
        since, sent, received = self._rated
        if t - since >= _RATED_S:
            if since:
                self.sent_rate = (self.sent - sent) / (t - since)
                self.received_rate = (self.received - received) / (t - since)
            self._rated = t, self.sent, self.received
        self.loss = _number(record.get("loss"), self.loss)

    def step(self, record: Record) -> None:
        """Apply a line of the peer's own file."""
        self._logged.update(int(record["step"]))
        if record.get("loss") is not None:
            self.curve.append(Point(float(record["t"]), self._logged.value, float(record["loss"])))

    def stand(self, member: MemberStatus, loss: Curve | None) -> None:
        """Take how this member stands."""
        self.state, self.reason, self.outer_step = printable(member.state), printable(member.reason), member.outer_step
        self.loss = _number(member.loss, math.nan)
        self.tokens_per_s = _number(member.tokens_per_s, 0.0)
        self.merged, self.rejected = member.contributions, member.rejections
        self.shares, self.verdict = (member.computing, member.exchanging, member.waiting), printable(member.verdict_reason)
        self.steps.update(member.inner_steps)
        self._sent.setdefault(0, Total()).update(member.bytes_sent)
        self._received.setdefault(0, Total()).update(member.bytes_received)
        self.curve = _points(loss) if loss is not None else []
        if member.state in ("lost", "left", "evicted"):
            self.gone()

    def gone(self) -> None:
        """Reset its rates: it no longer trains or sends."""
        self.tokens_per_s = self.sent_rate = self.received_rate = 0.0


class RunState:
    """The state that the screen and the report show. `apply` takes one line of any file; `of` makes one of a status."""

    def __init__(self, peer_ids: Iterable[str], outer_steps: int, sync_every: int) -> None:
        self.peers = {peer_id: PeerRow(peer_id) for peer_id in peer_ids}
        self.outer_steps, self.sync_every = outer_steps, sync_every
        self.planned = outer_steps * sync_every  # inner steps
        self.rounds: list[RoundRow] = []
        self.events: list[Event] = []
        self.forgotten = 0  # events before those
        self.lone: list[Point] = []
        self.validation: dict[str, list[Point]] = {}
        self.status: Status | None = None
        self.digest_reports: set[tuple[str, int, int, str]] = set()  # peer_id, part, outer step, digest

    @classmethod
    def of(cls, status: RunStatus) -> RunState:
        """Return what a screen shows of a run that stands so."""
        settings = {setting.name: setting.value for setting in status.settings}
        every = _every(settings)
        trains = [one for one in status.members if one.role in ("peer", "region")]
        state = cls([printable(one.peer_id) for one in trains], status.outer_steps, every)
        if (planned := _planned(settings, status.outer_steps)) is not None:
            state.planned = planned
        state.status = Status(
            phase=printable(status.phase),
            outer_step=status.outer_step,
            digest=status.digest,
            parameters=status.parameters,
            deadline_s=status.deadline_in_s,
            arrived=len(status.arrived),
            expected=len(status.expected),
            memory_bytes=status.peak_memory_bytes,
            tokens=status.tokens,
            waiting_for=printable(status.waiting_for),
            eta_s=status.eta_s,
            swarm=_swarm(status),
        )
        curves = {(curve.kind, curve.peer_id): curve for curve in status.curves}
        for one in trains:
            state.peers[printable(one.peer_id)].stand(one, curves.get(("loss", one.peer_id)))
        state.rounds = [_row(report) for report in status.rounds]
        state.events = [Event(each.t, printable(each.text), each.tone) for each in status.events]
        state.forgotten = status.events[0].number - 1 if status.events else 0
        if (held_out := mean([curve for curve in status.curves if curve.kind == "held_out" and curve.x])) is not None:
            state.validation["outer"] = _by_inner_steps(_points(held_out), [row.curve for row in state.peers.values()])
        return state

    @property
    def outer_step(self) -> int:
        """The last committed outer step."""
        committed = max((row.outer_step for row in self.rounds if row.committed), default=0)
        return max(committed, self.status.outer_step if self.status is not None else 0)

    @property
    def last_step(self) -> int:
        """The inner step at which curves end: the run's last one, or, of a run that is far from it, as far as they reach."""
        reached = max((point.step for row in self.peers.values() for point in row.curve), default=0)
        return self.planned if self.planned and reached > self.planned // 4 else max(reached, 1)

    @property
    def digests(self) -> dict[tuple[int, int], str]:
        """The digest of each part and committed outer step."""
        rows = [row for row in self.rounds if row.committed]
        return {(part, row.outer_step): digest for row in rows for part, digest in row.digests.items()}

    def apply(self, record: Record) -> None:
        """Apply one line. Lines of an unknown kind, or with missing values, are ignored."""
        take = {
            "member": self._member,
            "round": self._round,
            "peer": self._peer,
            "step": self._step,
            "outer": self._outer,
            "lone": self._lone,
            "event": self._event,
            "validation": self._validation,
        }.get(str(record.get("kind")))
        if take is None:
            return
        try:
            take(record)
        except DAMAGE:
            return

    def _member(self, record: Record) -> None:
        row = self.peers.get(str(record["peer_id"]))
        if row is None:
            return
        row.state, row.reason = _words(record["state"]), _words(record.get("reason", ""))
        if row.state in ("lost", "left", "evicted"):
            row.gone()

    def _peer(self, record: Record) -> None:
        row = self.peers.get(str(record["peer_id"]))
        if row is None:
            return
        row.report(record)
        self._outer(record)

    def _step(self, record: Record) -> None:
        row = self.peers.get(str(record["peer_id"]))
        if row is not None:
            row.step(record)

    def _outer(self, record: Record) -> None:
        """Note the digest that a peer reports: in a heartbeat, or in its own file for every outer step."""
        row = self.peers.get(str(record["peer_id"]))
        if row is not None and record.get("digest"):
            row.outer_step = int(record["outer_step"])
            part = int(record.get("part", record.get("aggregator", 0)))
            self.digest_reports.add((row.peer_id, part, row.outer_step, str(record["digest"])))

    def _round(self, record: Record) -> None:
        row = RoundRow(
            t=float(record["t"]),
            round_id=int(record["round_id"]),
            outer_step=int(record["outer_step"]),
            committed=bool(record["committed"]),
            reason=_words(record["reason"]),
            seconds=float(record["seconds"]),
            bytes_in=int(record["bytes_in"]),
            bytes_out=int(record["bytes_out"]),
            digests={int(part): str(each) for part, each in record.get("digests", {0: record.get("digest", "")}).items()},
            cells=_cells(record.get("verdicts", ())),
        )
        self.rounds.append(row)
        for peer_id, cell in row.cells.items():
            if peer_id in self.peers:
                self.peers[peer_id].merged += cell.weight > 0
                self.peers[peer_id].rejected += cell.verdict != "ok"

    def _lone(self, record: Record) -> None:
        self.lone.append(Point(float(record["t"]), int(record["step"]), float(record["loss"])))

    def _event(self, record: Record) -> None:
        self.events.append(Event(float(record["t"]), _words(record["text"]), str(record.get("tone", "info"))))

    def _validation(self, record: Record) -> None:
        point = Point(float(record["t"]), int(record["step"]), float(record["loss"]))
        self.validation.setdefault(str(record["who"]), []).append(point)


def _cells(fragments: Iterable[Record]) -> dict[str, Cell]:
    """Return each peer's cell of a round."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for fragment in fragments:
        for peer_id, (verdict, norm, weight) in fragment["peers"].items():
            found.setdefault(peer_id, []).append((str(verdict), _number(norm, math.inf), _number(weight, 0.0)))
    return {peer_id: _cell(each) for peer_id, each in sorted(found.items())}


def _cell(fragments: list[tuple[str, float, float]]) -> Cell:
    verdicts = [verdict for verdict, _, _ in fragments]
    worst = next((bad for bad in _BAD_ORDER if bad in verdicts), "ok")
    return Cell(
        verdict=worst,
        weight=sum(weight for _, _, weight in fragments) / len(fragments),
        norm=math.hypot(*(norm for _, norm, _ in fragments)),
        bad=sum(verdict != "ok" for verdict in verdicts),
        fragments=len(fragments),
    )


def _every(settings: Mapping[str, str]) -> int:
    """Return H of a run; 0: it does not say it, or what it says cannot be."""
    text = settings.get("sync.every", "")
    return int(text) if text.isdecimal() and len(text) <= _EVERY_DIGITS else 0


def _planned(settings: Mapping[str, str], outer_steps: int) -> int | None:
    """Return the inner steps of a run; None: its coordinator does not say them, or what it says cannot be."""
    try:
        values = {key: parse_json(settings[f"sync.{key}"]) for key in ("every", "groups", "milestones")}
        sync = build(SyncConfig, {**values, "outer_steps": outer_steps}, "sync.")
    except (KeyError, ValueError, ConfigError):
        return None
    return sync.inner_steps_before(outer_steps)


def _row(report: RoundReport) -> RoundRow:
    """Return a round as the table has it."""
    cells = {
        printable(each.peer_id): Cell(each.verdict, each.weight, _number(each.norm, math.inf), each.rejected, each.fragments)
        for each in report.peers
        if each.verdict != "absent"
    }
    return RoundRow(
        t=report.t,
        round_id=report.round_id,
        outer_step=report.outer_step,
        committed=report.committed,
        reason=printable(report.reason),
        seconds=report.seconds,
        bytes_in=report.bytes_in,
        bytes_out=report.bytes_out,
        digests={0: report.digest},
        cells=cells,
    )


def _swarm(status: RunStatus) -> SwarmStatus | None:
    """Return how a swarm stands; None: there is a coordinator."""
    if (told := status.council) is None:
        return None
    return SwarmStatus(
        leader=printable(told.leader),
        owners=tuple(printable(part.owner) for part in told.parts),
        steps=tuple(part.outer_step for part in told.parts),
        quorum=printable(told.quorum),
        has_quorum=not told.lost,
        away={printable(one.peer_id): printable(one.why) for one in told.members if one.state == "away"},
    )


def _by_inner_steps(points: Iterable[Point], curves: Iterable[Sequence[Point]]) -> list[Point]:
    """Return points whose steps are outer ones, each at the inner steps that the first peer had taken at that time."""
    taken = sorted((point.t, point.step) for curve in curves for point in curve)
    times, most = [t for t, _ in taken], [*itertools.accumulate((step for _, step in taken), max)]
    places = ((point, bisect_right(times, point.t)) for point in points)
    return [replace(point, step=most[place - 1] if place else 0) for point, place in places]


def _points(curve: Curve) -> list[Point]:
    return [Point(t, int(x), y) for x, t, y in zip(curve.x, curve.t, curve.y, strict=True)]


def _words(value: Any) -> str:
    """Return what a member may have written, as one line for screens."""
    return printable(str(value))


def _number(value: Any, otherwise: float) -> float:
    """Return `value`, or `otherwise` for null, which writers put for NaN and infinity."""
    return otherwise if value is None or not math.isfinite(float(value)) else float(value)
