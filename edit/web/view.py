"""What the page says of a run, worked out from one status: words, numbers as text, cells. No HTML, no I/O.

What members and coordinators wrote is made printable here, and escaped by the templates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from edit.plain_text import printable
from edit.view.explain import STAYS, TRACKERS, Leaving, leaving
from edit.view.status import draining
from edit.view.units import loss_text
from editpb.run_status import SHARES, Curve, MemberStatus, PeerRound, RoundReport, RunStatus
from editpb.validity import SOON_S, VERY_SOON_S, duration

__all__ = [
    "COLOURS",
    "STAYS",
    "TRACKERS",
    "VERDICTS",
    "Cell",
    "Council",
    "Grid",
    "MemberRow",
    "Overview",
    "charts",
    "council",
    "event_rows",
    "grid",
    "leaves",
    "member_rows",
    "overview",
    "round_details",
    "settings",
    "shares_losses",
]

COLOURS = 8  # of peers; the ninth has the first one's
MOST_ROWS, MOST_COLUMNS = 100, 120
HERE = ("starting", "training", "exchanging")

PHASES = {
    "founding": "Waiting for the first parameters",
    "gathering": "Gathering peers",
    "collecting": "Collecting contributions",
    "committing": "Merging",
    "paused": "Paused",
    "stopped": "Stopped",
    "finished": "Finished",
}

# The verdict on a contribution, in words; the worst of a peer's fragments is shown.
VERDICTS = {
    "ok": "merged",
    "carried": "carried into the next round",
    "unpaired": "no swap with this partner",
    "idle": "rejected: no work in it",
    "outlier": "far from most of the others, or away from the anchors",
    "harmful": "its last contributions did not lower the loss that scorers measure",
    "copied": "a copy of another one, or of the last update",
    "anomalous": "rejected: norm far above the usual",
    "rejected": "left out by the run's policy, or because nothing was merged",
    "nonfinite": "rejected: NaN or infinite",
    "absent": "absent",
    "aborted": "the round was aborted",
}
SHARE_LOSSES = "membership.share_losses"  # the setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The head of the page."""

    run_id: str
    phase: str  # of PHASES' keys
    headline: str
    waiting_for: str
    notes: tuple[str, ...]  # what the operator should read
    outer_step: int
    outer_steps: int
    left: str  # how long it still takes, in words
    tiles: tuple[tuple[str, str], ...]  # value, what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One member of the table."""

    peer_id: str
    role: str
    colour: int | None  # of its curves; None: it has none
    state: str
    tone: str  # good, quiet, fault, bad
    why: str
    where: str  # device, or nothing
    phase: str
    loss: str
    tokens_per_s: str
    step: str
    shares: tuple[tuple[str, float, float, str], ...]  # what it does, from and width in 0 to 100, in words
    verdict: str
    verdict_tone: str
    verdict_why: str
    counts: str
    traffic: str
    certificate: str
    certificate_tone: str
    consent: str
    evictable: bool


@dataclass(frozen=True, slots=True)
class Council:
    """Who agrees in a swarm, and who owns its parts."""

    leads: str
    quorum: str
    lost: bool
    members: tuple[tuple[str, str, str, str, str, str], ...]  # name, state, its tone, vote, parts, why
    parts: tuple[tuple[str, str, str, str, str], ...]  # number, owner, outer step, held by, what it waits for
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A peer in a round. strength: 1 to 4, of its weight; title: all of it in words."""

    peer_id: str
    round_id: int
    kind: str  # of VERDICTS' keys
    strength: int
    title: str


@dataclass(frozen=True, slots=True)
class Grid:
    """Peers by rounds. columns: (round_id, what stands above it, whether it was committed). kinds: of cells, for the key."""

    columns: tuple[tuple[int, str, bool], ...]
    rows: tuple[tuple[str, int | None, tuple[Cell, ...]], ...]  # peer_id, its colour, cells
    more: int  # peers that are not shown
    kinds: tuple[str, ...]


def overview(status: RunStatus, problem: str = "") -> Overview:
    """Return the head of the page. problem: why nothing newer comes."""
    peers = [row for row in status.members if row.role in ("peer", "region")]
    here = [row for row in peers if _is_here(row, status)]
    speed = sum(row.tokens_per_s for row in here if math.isfinite(row.tokens_per_s))
    trained = [row for row in peers if row.inner_steps and (row.state in HERE or status.phase == "finished")]
    losses = [row.loss for row in trained if math.isfinite(row.loss)]
    tiles = [
        (f"{status.outer_step:,}", f"of {status.outer_steps:,} outer steps"),
        (f"{len(here)} of {len(peers)}", "peers here"),
        (loss_text(sum(losses) / len(losses)) if losses else "–", "mean training loss"),
        (_short(speed) if speed else "–", "tokens per second"),
        (_short(status.tokens) if status.tokens else "–", "tokens merged"),
        (_short(status.parameters) if status.parameters else "–", "parameters"),
    ]
    problems = [problem] if status.phase != "finished" else []  # a coordinator may end with its run
    words = draining(status).capitalize() or PHASES.get(status.phase)
    return Overview(
        run_id=printable(status.run_id),
        phase=status.phase if status.phase in PHASES else "founding",
        headline=words or printable(status.phase),
        waiting_for=printable(status.waiting_for),
        notes=tuple(
            printable(note)
            for note in (
                *problems,
                status.reason,
                status.governance,
                *_masks(status),
                *_privacy(status),
                *_audit(status),
                *status.warnings,
            )
            if note
        ),
        outer_step=min(status.outer_step, status.outer_steps),
        outer_steps=max(1, status.outer_steps),
        left=_left(status),
        tiles=tuple(tiles),
    )


def _is_here(row: MemberStatus, status: RunStatus) -> bool:
    """Return whether a member takes part now: nobody does in a run that nobody serves."""
    return row.state in HERE and status.phase != "stopped"


def _masks(status: RunStatus) -> tuple[str, ...]:
    return (f"secure aggregation: {status.masks}",) if status.masks else ()


def _privacy(status: RunStatus) -> tuple[str, ...]:
    return (f"privacy: {status.privacy}",) if status.privacy else ()


def _audit(status: RunStatus) -> tuple[str, ...]:
    return (f"audit log: {status.audit}",) if status.audit else ()


def _left(status: RunStatus) -> str:
    eta_s = status.eta_s
    if status.phase == "finished" or eta_s is None:
        return ""
    return f"about {duration(eta_s)} left"


def colours(status: RunStatus) -> dict[str, int]:
    """Return the colour of each peer: a number that it keeps, whoever else comes or goes."""
    names = [row.peer_id for row in status.members if row.role in ("peer", "region")]
    seen = dict.fromkeys((*names, *(curve.peer_id for curve in status.curves if curve.peer_id)))
    return {name: place for place, name in enumerate(seen)}


def member_rows(status: RunStatus, now: float) -> list[MemberRow]:
    """Return a row for each member, those that train first. now: unix seconds."""
    colour = colours(status)
    rows = sorted(status.members, key=lambda row: (row.role not in ("peer", "region"), row.state == "evicted"))
    return [_member(row, colour.get(row.peer_id), status, now) for row in rows]


def _member(row: MemberStatus, colour: int | None, status: RunStatus, now: float) -> MemberRow:
    trains = row.role in ("peer", "region")
    here, stopped = _is_here(row, status), row.state in HERE and status.phase == "stopped"
    tones = {"lost": "bad", "evicted": "bad", "left": "quiet", "invited": "quiet", "starting": "fault"}
    straggles = here and (row.optional or row.quarantined_s > 0)
    sent = row.bytes_sent or row.bytes_received
    return MemberRow(
        peer_id=printable(row.peer_id),
        role=printable(row.role),
        colour=colour if trains else None,
        state=printable(row.state),
        tone="fault" if straggles else "quiet" if stopped else tones.get(row.state, "good"),
        why="when the run stopped" if stopped else printable(row.reason) if not here else "",
        where=printable(row.device),
        phase=_phase(row) if here else "",
        loss=_loss(row),
        tokens_per_s=_speed(row) if here else "",
        step=f"{row.outer_step:,}" if trains and row.outer_step else "",
        shares=_shares(row),
        verdict=VERDICTS.get(row.verdict, printable(row.verdict)),
        verdict_tone=_verdict_tone(row.verdict),
        verdict_why=printable(row.verdict_reason),
        counts=_counts(row),
        traffic=f"{_bytes(row.bytes_sent)} ↑\n{_bytes(row.bytes_received)} ↓" if sent else "",
        certificate=_certificate(row.expires, now),
        certificate_tone=_certificate_tone(row.expires, now),
        consent="its site consents" if row.consented else "",
        evictable=row.state != "evicted",
    )


def _phase(row: MemberStatus) -> str:
    words = {"compute": "computing", "download": "fetching", "upload": "sending", "waiting": "waiting for the others"}
    if row.quarantined_s > 0:
        return f"kept out for {row.quarantined_s:.0f} s: bad bytes"
    phase = words.get(row.phase, printable(row.phase))
    if row.upload_total_bytes and row.phase == "upload":
        phase += f" {100 * row.upload_bytes // row.upload_total_bytes} %"
    return f"{phase}; not waited for" if row.optional else phase


def _loss(row: MemberStatus) -> str:
    if not math.isfinite(row.loss):
        return "" if row.inner_steps == 0 else "not shared"
    return loss_text(row.loss) if row.inner_steps else ""


def _speed(row: MemberStatus) -> str:
    if row.tokens_per_s > 0:
        return _short(row.tokens_per_s)
    return "not shared" if row.inner_steps > 1 else ""


def _shares(row: MemberStatus) -> tuple[tuple[str, float, float, str], ...]:
    parts = (("computing", row.computing), ("exchanging", row.exchanging), ("waiting", row.waiting))
    whole = sum(share for _, share in parts)
    if not whole > 0 or not math.isfinite(whole):
        return ()
    shares, start = [], 0.0
    for name, share in parts:
        width = 100 * share / max(1.0, whole)
        shares.append((name, round(start, 2), round(width, 2), f"{width:.0f} % {name}"))
        start += width
    return tuple(shares)


def _verdict_tone(verdict: str) -> str:
    return {
        "": "quiet",
        "ok": "good",
        "carried": "good",
        "idle": "fault",
        "absent": "quiet",
        "unpaired": "fault",
        "outlier": "fault",
    }.get(verdict, "bad")


def _counts(row: MemberStatus) -> str:
    if row.role not in ("peer", "region") or not (row.contributions or row.rejections or row.absences):
        return ""
    parts = [f"{row.contributions} merged"]
    parts += [f"{row.rejections} rejected"] if row.rejections else []
    parts += [f"{row.absences} absent"] if row.absences else []
    return ", ".join(parts)


def _certificate(expires: float, now: float) -> str:
    if not expires:
        return ""
    return f"{duration(expires - now)}" if expires > now else "expired"


def _certificate_tone(expires: float, now: float) -> str:
    left = expires - now
    return "quiet" if not expires or left > SOON_S else "fault" if left > VERY_SOON_S else "bad"


def council(status: RunStatus) -> Council | None:
    """Return how those who agree in a swarm stand; None: there is a coordinator."""
    told = status.council
    if told is None:
        return None
    tones = {"leads": "good", "here": "good", "late": "fault", "away": "bad"}
    return Council(
        leads=f"{printable(told.leader)} leads" if told.leader else "Nobody is known to lead",
        quorum=printable(told.quorum),
        lost=told.lost,
        members=tuple(
            (
                printable(one.peer_id),
                printable(one.state),
                tones.get(one.state, "quiet"),
                "votes" if one.votes else "",
                ", ".join(map(str, one.owns)),
                printable(one.why),
            )
            for one in told.members
        ),
        parts=tuple(
            (
                str(one.part),
                printable(one.owner),
                f"{one.outer_step:,}",
                f"{one.held_by} of {len(told.members)}" if one.held_by >= 0 else "not known",
                printable(one.waiting_for),
            )
            for one in told.parts
        ),
        notes=tuple(map(printable, told.notes)),
    )


# ---- rounds --------------------------------------------------------------------------------------------------------------


def grid(status: RunStatus) -> Grid:
    """Return the peers by the last rounds, newest last."""
    colour = colours(status)
    rounds = status.rounds[-MOST_COLUMNS:]
    found = [{one.peer_id: one for one in report.peers} for report in rounds]
    known = dict.fromkeys((*colour, *(name for cells in found for name in cells)))
    names = [name for name in known if any(name in cells for cells in found)]
    fair = 1.0 / max(1, len(names))
    rows = tuple(
        (
            printable(name),
            colour.get(name),
            tuple(_cell(name, report, cells.get(name), fair) for report, cells in zip(rounds, found, strict=True)),
        )
        for name in names[:MOST_ROWS]
    )
    columns = tuple((report.number, str(report.outer_step) if report.committed else "×", report.committed) for report in rounds)
    there = {cell.kind for _, _, cells in rows for cell in cells}
    return Grid(columns, rows, max(0, len(names) - MOST_ROWS), tuple(kind for kind in VERDICTS if kind in there))


def _cell(name: str, report: RoundReport, found: PeerRound | None, fair: float) -> Cell:
    who = printable(name)
    if found is None:
        kind, words = ("none", "took no part") if report.committed else ("aborted", f"aborted: {printable(report.reason)}")
        return Cell(who, report.round_id, kind, 1, f"{who}, {_round(report)}: {words}")
    title = f"{who}, {_round(report)}: {_verdict(found)}"
    if found.fragments:
        title += f", weight {found.weight:.3f}" + ("" if math.isnan(found.norm) else f", norm {found.norm:.3g}")
    kind = found.verdict if found.verdict in VERDICTS else "rejected"
    strength = 1 + sum(found.weight >= share * fair for share in (0.5, 0.8, 1.5)) if kind == "ok" else 4
    return Cell(who, report.round_id, kind, strength, title)


def _verdict(found: PeerRound) -> str:
    """Return the verdict and why."""
    words, why = VERDICTS.get(found.verdict, printable(found.verdict)), printable(found.reason)
    return words if why in ("", words) else f"{words.split(':')[0]}: {why}"


def _round(report: RoundReport) -> str:
    return f"outer step {report.outer_step}" if report.committed else f"round {report.number}"


def round_details(report: RoundReport) -> dict[str, object]:
    """Return what a click on a cell shows: the round, and each peer's verdict on each fragment. Of JSON's types."""
    fragments: dict[str, list[list[object]]] = {}
    for fragment in report.fragments:
        for each in fragment.verdicts:
            words = VERDICTS[each.verdict.value]
            fragments.setdefault(each.peer_id, []).append(
                [fragment.fragment_id, words, f"{each.norm:.4g}", f"{each.weight:.4f}", each.staleness]
            )
    peers = {
        printable(one.peer_id): {
            "verdict": _verdict(one),
            "tone": _verdict_tone(one.verdict),
            "norm": f"{one.norm:.4g}" if one.fragments else "",
            "weight": f"{one.weight:.4f}" if one.fragments else "",
            "staleness": one.staleness,
            "fragments": fragments.get(one.peer_id, []),
        }
        for one in report.peers
    }
    return {
        "title": f"Round {report.number}" + (f", to outer step {report.outer_step}" if report.committed else ", aborted"),
        "facts": [
            ["closed because", printable(report.reason)],
            ["took", f"{report.seconds:.2f} s"],
            ["ended", f"{clock_text(report.t)} UTC" if report.t else ""],
            ["received", _bytes(report.bytes_in)],
            ["sent to each peer", _bytes(report.bytes_out)],
            ["H", str(report.every) if report.every else ""],
            ["batch", str(report.batch) if report.batch else ""],
            ["outer lr, momentum", f"{report.outer_lr:g}, {report.outer_momentum:g}" if report.every else ""],
            ["merged norm", f"{report.norm:.4g}" if report.fragments else ""],
            ["mean cosine to the merge", f"{report.cosine:.3f}" if report.cosine is not None else ""],
            ["digest", printable(report.digest[:16])],
        ],
        "peers": peers,
    }


# ---- curves --------------------------------------------------------------------------------------------------------------

CHARTS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    # id, kinds of curves, title, what x counts
    ("loss", ("loss",), "Training loss of each peer", "inner steps"),
    ("held-out", ("held_out",), "Held-out loss", "outer steps"),
    ("norm", ("norm",), "Norm of each pseudo-gradient", "outer steps"),
    ("cosine", ("cosine",), "Mean cosine of the contributions to the merge", "outer steps"),
    ("seconds", ("round_s",), "Seconds per round", "outer steps"),
    ("time", SHARES, "What the peers did, as shares of their time", "outer steps"),
    ("bytes", ("bytes_in", "bytes_out"), "Bytes so far", "outer steps"),
)
LOGARITHMIC = "norm"  # one that is rejected may be thousands of times the others
_KINDS = {
    "held_out": "held out",
    "round_s": "seconds",
    "norm": "merged",
    "cosine": "mean cosine",
    "bytes_in": "received from all",
    "bytes_out": "sent to each",
    **{kind: kind for kind in SHARES},
}
_TIME = {"computing": "--good", "exchanging": "--accent", "waiting": "--calm"}  # as in the table of members


def charts(status: RunStatus) -> list[dict[str, object]]:
    """Return the charts that have lines, as page.js draws them: x and y of each line, its name, and its colour.

    A colour is a peer's number, -1 that of text, or the name of a variable of page.css. Of JSON's types.
    """
    colour = colours(status)
    drawn: list[dict[str, object]] = []
    for name, kinds, title, unit in CHARTS:
        curves = [curve for curve in status.curves if curve.kind in kinds and curve.x]
        of_peers = any(curve.peer_id for curve in curves)
        lines = [
            {
                "name": printable(curve.peer_id) or _KINDS.get(curve.kind, "all"),
                "colour": _colour(curve, place if len(kinds) > 1 else colour.get(curve.peer_id, -1 if of_peers else 0)),
                "x": [_rounded(x) for x in curve.x],
                "y": [_rounded(y) if y > 0 or name != LOGARITHMIC else None for y in curve.y],
            }
            for place, curve in enumerate(curves)
        ]
        if lines:
            drawn.append({"id": name, "title": title, "unit": unit, "lines": lines, "log": name == LOGARITHMIC})
    return drawn


def _colour(curve: Curve, otherwise: int) -> int | str:
    """Return a line's colour, as `charts` says."""
    return _TIME[curve.kind] if curve.kind in _TIME and not curve.peer_id else otherwise


def _rounded(value: float) -> float:
    """Return a number with the digits that a chart can show."""
    return float(f"{value:.6g}")


# ---- settings, viewers, texts ------------------------------------------------------------------------------------------------


def settings(status: RunStatus) -> list[tuple[str, str, str, bool]]:
    """Return (name, value, default, whether they differ) of each setting."""
    return [(printable(each.name), printable(each.value), printable(each.default), each.changed) for each in status.settings]


def leaves(status: RunStatus) -> tuple[Leaving, ...]:
    """Return what leaves the site of a peer; nothing where the run did not say its settings."""
    return leaving(status, "peer", ()) if status.settings else ()


def shares_losses(status: RunStatus) -> bool:
    """Return whether the run's settings let members see each other's losses; no, where they do not say so."""
    return any(each.name == SHARE_LOSSES and each.value == "true" for each in status.settings)


def event_rows(status: RunStatus) -> list[tuple[str, str, str, str, str]]:
    """Return (moment in UTC, kind, peer_id, text, tone) of each event, newest first."""
    return [
        (clock_text(each.t), printable(each.kind), printable(each.peer_id), printable(each.text), _tone(each.tone))
        for each in reversed(status.events)
    ]


def _tone(tone: str) -> str:
    return tone if tone in ("info", "good", "fault", "bad") else "info"


def clock_text(t: float) -> str:
    """Return a moment in UTC; empty for 0."""
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S") if t else ""


def _short(count: float) -> str:
    """1234567 -> '1.23 M'."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
