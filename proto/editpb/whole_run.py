"""One status of a run whose model is in parts, each with an aggregator of its own: the parts' statuses, merged.

In a swarm a part's aggregator is the engine of the part's owner; in a hub with further aggregators each has one part. Pure:
what asks them is elsewhere.

What an aggregator says is its word. It can lie about its own part, and about nothing else: each round names its part, members
that the caller does not know are left out, and what the council or the coordinator says goes before it. What is kept is bounded
as one aggregator's status is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from edit.records import ROUNDS_PER_START, Verdict
from editpb.run_status import (
    KEPT_EVENTS,
    KEPT_ROUNDS,
    WORST,
    Curve,
    Event,
    MemberStatus,
    RoundReport,
    RunStatus,
)

__all__ = ["continued", "merged_rounds", "whole_run"]

_LIVE = ("exchanging", "training", "starting")
_PHASES = ("founding", "committing", "collecting", "gathering", "paused", "stopped", "finished")  # the first one that is found
_DOING = ("upload", "download", "waiting", "compute")  # likewise, of a member
_VERDICTS = (*(one.value for one in WORST if one is not Verdict.OK), "absent", "carried", "ok")  # the worst one first
_MOST_MEMBERS = 1024
_SUMS = ("bytes_in", "bytes_out")  # curves that add up over the parts; of the others of the run, the mean or the norm


def continued(before: RunStatus | None, now: RunStatus) -> RunStatus:
    """Return a part's status with the past that its aggregator before has told: it has another owner, or was restarted."""
    if before is None or before.run_id != now.run_id:
        return now
    rounds = {report.round_id: report for report in (*before.rounds, *now.rounds)}
    began = min((each.t for each in now.events), default=now.t)
    return replace(
        now,
        rounds=tuple(rounds[each] for each in sorted(rounds))[-KEPT_ROUNDS:],
        events=(*(each for each in before.events if each.t < began), *now.events)[-KEPT_EVENTS:],
        curves=_continued_curves(before.curves, now.curves),
        settings=now.settings or before.settings,
    )


def _continued_curves(before: Sequence[Curve], now: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return the curves, each with its points before those that are told now."""
    curves = {(each.kind, each.peer_id): each for each in before}
    for each in now:
        old = curves.get((each.kind, each.peer_id))
        if old is not None and each.t:
            kept = sum(t < each.t[0] for t in old.t)
            base = old.y[kept - 1] if kept and each.kind in _SUMS else 0.0  # an aggregator counts from 0
            each = replace(
                each, x=old.x[:kept] + each.x, t=old.t[:kept] + each.t, y=old.y[:kept] + tuple(base + y for y in each.y)
            )
        curves[each.kind, each.peer_id] = each
    return tuple(_thinned(curves[key]) for key in sorted(curves))


def _thinned(curve: Curve, most: int = 1024) -> Curve:
    """Return a curve without every second point, where it has too many; its last point stays."""
    while len(curve.x) > most:
        first = (len(curve.x) - 1) % 2
        curve = replace(curve, x=curve.x[first::2], t=curve.t[first::2], y=curve.y[first::2])
    return curve


def whole_run(
    parts: Sequence[RunStatus | None],
    fragments: Sequence[Sequence[int]] | None = None,
    members: Collection[str] | None = None,
) -> RunStatus | None:
    """Return the status of the whole run; None while no aggregator has answered.

    Args:
        parts: what the aggregator of each part says; None: nothing yet.
        fragments: the ids of each part's fragments in the whole model; None: in the order of the parts.
        members: names of those that belong to the run; others are left out. None: all.

    A round is of the outer step, once every part has taken it: its id is the outer step's number. One that was aborted is of
    its part. A member's row has what it said last, and the worst of what became of it in any part; counts are those of the part
    with the most, bytes are summed up.
    """
    told = [(number, part) for number, part in enumerate(parts) if part is not None]
    if not told:
        return None
    known = [part for _, part in told]
    first = known[0]
    waits = [
        f"part {number}: {part.waiting_for}" if len(parts) > 1 else part.waiting_for
        for number, part in told
        if part.waiting_for
    ]
    reasons = [f"part {number}: {part.reason}" if len(parts) > 1 else part.reason for number, part in told if part.reason]
    deadlines = [part.deadline_in_s for part in known if part.deadline_in_s is not None]
    etas = [part.eta_s for part in known if part.eta_s is not None]
    complete = [set(part.arrived) for part in known if part.expected]
    arrived = set.intersection(*complete) if complete else set()
    phases = {part.phase for part in known}
    outer_step = min(part.outer_step for part in known)
    return replace(
        first,
        phase=next((phase for phase in _PHASES if phase in phases), first.phase),
        outer_step=outer_step,
        round_id=0 if all(part.round_id == 0 for part in known) else outer_step + 1,
        reason="; ".join(reasons),
        waiting_for="; ".join(dict.fromkeys(waits)),
        draining=any(part.draining for part in known),
        last_step=max(part.last_step for part in known),
        tokens=min(part.tokens for part in known),
        digest=first.digest if len(parts) == 1 else "",
        parameters=sum(part.parameters for part in known),
        peak_memory_bytes=max(part.peak_memory_bytes for part in known),
        expected=_names((name for part in known for name in part.expected), members),
        arrived=_names(arrived, members),
        deadline_in_s=min(deadlines, default=None),
        members=_members(known, members),
        rounds=merged_rounds(parts, fragments),
        warnings=tuple(dict.fromkeys(warning for part in known for warning in part.warnings)),
        t=max(part.t for part in known),
        eta_s=max(etas, default=None),
        curves=_curves(known, members),
        events=_events(told, len(parts) > 1),
        settings=next((part.settings for part in known if part.settings), ()),
        aggregator=0,
        aggregators=(),
    )


def _names(names: Iterable[str], members: Collection[str] | None) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if members is None or name in members}))[:_MOST_MEMBERS]


# ---- rounds --------------------------------------------------------------------------------------------------------------


def merged_rounds(
    parts: Sequence[RunStatus | None], fragments: Sequence[Sequence[int]] | None = None
) -> tuple[RoundReport, ...]:
    """Return one round for each outer step that all parts have taken, and those that were aborted; in the order of time."""
    if len(parts) == 1:
        return parts[0].rounds if parts[0] is not None else ()
    taken = min((part.outer_step for part in parts if part is not None), default=0)
    committed: dict[int, list[tuple[int, RoundReport]]] = {}
    aborted: dict[int, list[tuple[int, RoundReport]]] = {}
    for number, part in enumerate(parts):
        for report in part.rounds if part is not None else ():
            if not report.committed:
                aborted.setdefault(report.outer_step, []).append((number, report))
            elif report.outer_step <= taken:
                committed.setdefault(report.outer_step, []).append((number, report))
    rounds = [_outer_step(step, of, len(parts), fragments) for step, of in committed.items()]
    for step, of in aborted.items():
        for place, (number, report) in enumerate(sorted(of, key=lambda each: (each[1].t, each[0])), 1):
            reason = f"part {number}: {report.reason}"
            rounds.append(replace(report, round_id=step + place * ROUNDS_PER_START, reason=reason, fragments=()))
    return tuple(sorted(rounds, key=lambda report: (report.t, report.round_id)))[-KEPT_ROUNDS:]


def _outer_step(
    step: int, of: Sequence[tuple[int, RoundReport]], parts: int, fragments: Sequence[Sequence[int]] | None
) -> RoundReport:
    """Return one outer step's round. of: the parts' rounds that took it, of those whose aggregators still know it."""
    of = list({number: (number, report) for number, report in of}.values())  # of a part that took it twice, the later one
    reports = [report for _, report in of]
    reasons = dict.fromkeys(report.reason for report in reports)
    if len(reasons) > 1:
        reasons = dict.fromkeys(f"part {number}: {report.reason}" for number, report in of)
    if lacking := sorted(set(range(parts)) - {number for number, _ in of}):
        reasons[f"nothing is known of part {', '.join(map(str, lacking))}: who served it then does not answer"] = None
    verdicts, base = [], 0
    for number, report in of:
        ids: Sequence[int]
        if fragments is None:
            ids = range(base, base + 1 + max((each.fragment_id for each in report.fragments), default=-1))
            base += len(ids)
        else:
            ids = fragments[number]
        verdicts += [
            replace(each, fragment_id=ids[each.fragment_id]) for each in report.fragments if each.fragment_id < len(ids)
        ]
    took_part = {verdict.peer_id for each in verdicts for verdict in each.verdicts}
    return RoundReport(
        round_id=step,
        outer_step=step,
        committed=True,
        reason="; ".join(reasons),
        seconds=max(report.seconds for report in reports),
        bytes_in=sum(report.bytes_in for report in reports),
        bytes_out=sum(report.bytes_out for report in reports),
        missing=tuple(sorted({name for report in reports for name in report.missing} - took_part)),
        digest=reports[0].digest if parts == 1 else "",
        fragments=tuple(sorted(verdicts, key=lambda each: each.fragment_id)),
        carried=tuple(sorted({name for report in reports for name in report.carried})),
        t=max(report.t for report in reports),
        every=reports[0].every,
        batch=reports[0].batch,
        outer_lr=reports[0].outer_lr,
        outer_momentum=reports[0].outer_momentum,
    )


# ---- members -------------------------------------------------------------------------------------------------------------


def _members(parts: Sequence[RunStatus], members: Collection[str] | None) -> tuple[MemberStatus, ...]:
    rows: dict[str, list[MemberStatus]] = {}
    for part in parts:
        for row in part.members:
            if members is None or row.peer_id in members:
                rows.setdefault(row.peer_id, []).append(row)
    return tuple(_member(rows[peer_id]) for peer_id in sorted(rows)[:_MOST_MEMBERS])


def _member(rows: Sequence[MemberStatus]) -> MemberStatus:
    """Return one member's row. Where it is connected to some parts only, its state is that of these; what an aggregator says
    that has not seen it counts last."""

    def place(row: MemberStatus) -> tuple[int, bool, float]:
        return _LIVE.index(row.state) if row.state in _LIVE else len(_LIVE), row.state == "invited", row.silent_s

    last = min(rows, key=place)
    here = [row for row in rows if row.state in _LIVE] or list(rows)
    worst = min(rows, key=lambda row: _VERDICTS.index(row.verdict) if row.verdict in _VERDICTS else len(_VERDICTS))
    phases = {row.phase for row in here}
    return replace(
        last,
        silent_s=min(row.silent_s for row in here),
        outer_step=min(row.outer_step for row in here),
        inner_steps=max(row.inner_steps for row in here),
        bytes_sent=sum(row.bytes_sent for row in rows),
        bytes_received=sum(row.bytes_received for row in rows),
        contributions=max(row.contributions for row in rows),
        rejections=max(row.rejections for row in rows),
        absences=max(row.absences for row in rows),
        deadline_s=max(row.deadline_s for row in rows),
        phase=next((phase for phase in _DOING if phase in phases), last.phase),
        upload_bytes=sum(row.upload_bytes for row in rows),
        upload_total_bytes=sum(row.upload_total_bytes for row in rows),
        optional=any(row.optional for row in here),
        consented=all(row.consented for row in here),
        quarantined_s=max(row.quarantined_s for row in rows),
        expires=max(row.expires for row in rows),
        computing=_mean(row.computing for row in here),
        exchanging=_mean(row.exchanging for row in here),
        waiting=_mean(row.waiting for row in here),
        verdict=worst.verdict,
        verdict_reason=worst.verdict_reason,
    )


def _mean(shares: Iterable[float]) -> float:
    found = [share for share in shares if math.isfinite(share)]
    return sum(found) / len(found) if found else 0.0


# ---- curves, events ------------------------------------------------------------------------------------------------------


def _curves(parts: Sequence[RunStatus], members: Collection[str] | None) -> tuple[Curve, ...]:
    """Return the curves of the whole run: a peer's loss as the part that knows it longest has it; the others between the outer
    steps that all parts have, at those of the part with the fewest points. Each part drops points of a long curve by itself.
    """
    found: dict[tuple[str, str], list[Curve]] = {}
    for part in parts:
        for curve in part.curves:
            if curve.x and (members is None or not curve.peer_id or curve.peer_id in members):
                found.setdefault((curve.kind, curve.peer_id), []).append(curve)
    return tuple(_curve(kind, of) for (kind, _), of in sorted(found.items()))


def _curve(kind: str, of: Sequence[Curve]) -> Curve:
    if kind in ("loss", "held_out") or len(of) == 1:
        return max(of, key=lambda curve: (curve.x[-1], len(curve.x)))
    first, last = max(curve.x[0] for curve in of), min(curve.x[-1] for curve in of)
    fewest = min(of, key=lambda curve: len(curve.x)).x
    steps = sorted({first, last, *(step for step in fewest if first < step < last)}) if first <= last else []
    points = [[curve.at(step) for curve in of] for step in steps]
    ways: dict[str, Callable[[list[float]], float]] = {"round_s": max, "bytes_in": sum, "bytes_out": sum, "norm": _norm}
    joined = ways.get(kind, _mean)
    return replace(
        of[0],
        x=tuple(steps),
        t=tuple(max(t for t, _ in each) for each in points),
        y=tuple(joined([y for _, y in each]) for each in points),
    )


def _norm(norms: list[float]) -> float:
    """Return the norm of the whole of which these are the parts'."""
    return math.hypot(*norms)


def _events(parts: Sequence[tuple[int, RunStatus]], named: bool) -> tuple[Event, ...]:
    """Return all parts' events in the order of time. What several parts say in the same words within a minute is said once."""
    told = sorted(((each, number) for number, part in parts for each in part.events), key=lambda each: (each[0].t, each[1]))
    said: dict[tuple[str, str, str], tuple[float, int]] = {}  # when, and by which part
    events: list[Event] = []
    for event, number in told:
        key = (event.kind, event.peer_id, event.text)
        at, by = said.get(key, (-math.inf, number))
        if by != number and event.t - at < 60.0:
            continue
        said[key] = (event.t, number)
        text = event.text if not named or event.kind in ("member", "order") else f"part {number}: {event.text}"
        events.append(replace(event, number=len(events) + 1, text=text))
    return tuple(events[-KEPT_EVENTS:])
