"""Converts StatusReply and the verdicts of control.proto to and from records. Like the records, it needs no torch.

`x_to_pb(record)` never fails; `x_from_pb(message)` raises RemoteProtocolError with one line, and nothing else. Names, times and
the points of curves are bounded here, so views compute with them as they are; other text is made printable when it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb import control_pb2 as cpb
from editpb import limits as lim
from editpb.limits import check_id, fail, within
from editpb.run_status import Curve, Event, MemberStatus, RoundReport, RunStatus, Setting

__all__ = ["fragment_verdicts_from_pb", "fragment_verdicts_to_pb", "round_to_pb", "status_from_pb", "status_to_pb"]

_PHASE = "RUN_PHASE_"


def status_to_pb(status: RunStatus) -> cpb.StatusReply:
    """Return one aggregator's status as a message; `aggregator` and `aggregators` are known to who asks."""
    return cpb.StatusReply(
        run_id=status.run_id,
        view=cpb.View(
            phase=_PHASE + status.phase.upper(),
            outer_step=status.outer_step,
            round_id=status.round_id,
            digest=status.digest,
            reason=status.reason,
            draining=status.draining,
        ),
        members=[_member_to_pb(member) for member in status.members],
        rounds=[round_to_pb(report) for report in status.rounds],
        outer_steps=status.outer_steps,
        parameters=status.parameters,
        peak_memory_bytes=status.peak_memory_bytes,
        expected=status.expected,
        arrived=status.arrived,
        deadline_in_s=-1.0 if status.deadline_in_s is None else status.deadline_in_s,
        tokens=status.tokens,
        stop_tokens=status.stop_tokens,
        waiting_for=status.waiting_for,
        warnings=status.warnings,
        t=status.t,
        eta_s=-1.0 if status.eta_s is None else status.eta_s,
        curves=[
            cpb.Curve(kind=one.kind, peer_id=one.peer_id, x=one.x, t=one.t, y=one.y, kept=one.kept) for one in status.curves
        ],
        events=[cpb.StatusEvent(**one.as_json()) for one in status.events],  # type: ignore[arg-type]
        settings=[cpb.Setting(name=one.name, value=one.value, default=one.default) for one in status.settings],
        masks=status.masks,
        privacy=status.privacy,
        epsilon=status.epsilon,
        governance=status.governance,
        audit=status.audit,
        last_step=status.last_step,
    )


def status_from_pb(reply: cpb.StatusReply, aggregator: int = 0) -> RunStatus:
    """Return the status that the aggregator of this number answered.

    Losses and norms may be NaN or infinite, as they are in a run that diverges.
    """
    if reply.view.phase not in cpb.RunPhase.values():
        fail(f"run phase {reply.view.phase} is not known")
    return RunStatus(
        run_id=check_id("run_id", reply.run_id),
        phase=cpb.RunPhase.Name(reply.view.phase).removeprefix(_PHASE).lower(),
        outer_step=reply.view.outer_step,
        outer_steps=reply.outer_steps,
        round_id=reply.view.round_id,
        reason=reply.view.reason,
        waiting_for=reply.waiting_for,
        warnings=tuple(reply.warnings),
        draining=reply.view.draining,
        last_step=reply.last_step,
        tokens=reply.tokens,
        stop_tokens=reply.stop_tokens,
        digest=reply.view.digest,
        parameters=reply.parameters,
        peak_memory_bytes=reply.peak_memory_bytes,
        expected=_names("expected", reply.expected),
        arrived=_names("arrived", reply.arrived),
        deadline_in_s=_seconds_left("deadline_in_s", reply.deadline_in_s),
        members=tuple(_member_from_pb(row) for row in reply.members),
        rounds=tuple(_round_from_pb(row) for row in reply.rounds),
        t=_moment("t", reply.t),
        eta_s=_seconds_left("eta_s", reply.eta_s),
        curves=tuple(_curve_from_pb(row) for row in reply.curves),
        events=tuple(_event_from_pb(row) for row in reply.events),
        settings=tuple(Setting(name=row.name, value=row.value, default=row.default) for row in reply.settings),
        masks=reply.masks,
        privacy=reply.privacy,
        epsilon=_norm("epsilon", reply.epsilon) if reply.HasField("epsilon") else None,
        governance=reply.governance,
        audit=reply.audit,
        aggregator=aggregator,
    )


def _event_from_pb(row: cpb.StatusEvent) -> Event:
    peer_id = _name_or_run("peer_id of an event", row.peer_id)
    t = _moment("t of an event", row.t)
    return Event(number=row.number, t=t, kind=row.kind, peer_id=peer_id, text=row.text, tone=row.tone)


def _curve_from_pb(row: cpb.Curve) -> Curve:
    if not len(row.x) == len(row.t) == len(row.y):
        fail(f"curve {row.kind[:32]!r}: {len(row.x)}, {len(row.t)} and {len(row.y)} values")
    return Curve(
        kind=row.kind,
        peer_id=_name_or_run("peer_id of a curve", row.peer_id),
        x=_within("x of a curve", row.x, -lim.MAX_SHOWN, lim.MAX_SHOWN),
        t=_within("t of a curve", row.t, 0, lim.MAX_UNIX),
        y=_within("y of a curve", row.y, -lim.MAX_SHOWN, lim.MAX_SHOWN),
        kept=row.kept,
    )


def _member_to_pb(member: MemberStatus) -> cpb.MemberStatus:
    return cpb.MemberStatus(
        peer_id=member.peer_id,
        role=member.role,
        state=member.state,
        reason=member.reason,
        silent_s=member.silent_s,
        heartbeat=cpb.Heartbeat(
            outer_step=member.outer_step,
            inner_steps=member.inner_steps,
            loss=member.loss,
            tokens_per_s=member.tokens_per_s,
            step_s=member.step_s,
            bytes_sent=member.bytes_sent,
            bytes_received=member.bytes_received,
            metrics=member.metrics,
        ),
        contributions=member.contributions,
        rejections=member.rejections,
        absences=member.absences,
        deadline_s=member.deadline_s,
        phase=member.phase,
        upload_bytes=member.upload_bytes,
        upload_total_bytes=member.upload_total_bytes,
        download_s=member.download_s,
        compute_s=member.compute_s,
        upload_s=member.upload_s,
        optional=member.optional,
        quarantined_s=member.quarantined_s,
        expires=member.expires,
        device=member.device,
        computing=member.computing,
        exchanging=member.exchanging,
        waiting=member.waiting,
        verdict=member.verdict,
        verdict_reason=member.verdict_reason,
        consented=member.consented,
    )


def _member_from_pb(row: cpb.MemberStatus) -> MemberStatus:
    heartbeat = row.heartbeat
    return MemberStatus(
        peer_id=check_id("peer_id", row.peer_id),
        role=row.role,
        state=row.state,
        reason=row.reason,
        silent_s=row.silent_s,
        outer_step=heartbeat.outer_step,
        inner_steps=heartbeat.inner_steps,
        loss=heartbeat.loss if heartbeat.inner_steps else math.nan,  # earlier software says 0 of a member that never attended
        tokens_per_s=heartbeat.tokens_per_s,
        step_s=heartbeat.step_s,
        bytes_sent=heartbeat.bytes_sent,
        bytes_received=heartbeat.bytes_received,
        metrics=dict(heartbeat.metrics),
        contributions=row.contributions,
        rejections=row.rejections,
        absences=row.absences,
        deadline_s=row.deadline_s,
        phase=row.phase,
        upload_bytes=row.upload_bytes,
        upload_total_bytes=row.upload_total_bytes,
        download_s=row.download_s,
        compute_s=row.compute_s,
        upload_s=row.upload_s,
        optional=row.optional,
        quarantined_s=lim.check_number("quarantined_s", row.quarantined_s, 0, lim.MAX_SECONDS),
        expires=_moment("expires", row.expires),
        device=row.device,
        computing=lim.check_share("computing", row.computing),
        exchanging=lim.check_share("exchanging", row.exchanging),
        waiting=lim.check_share("waiting", row.waiting),
        verdict=row.verdict,
        verdict_reason=row.verdict_reason,
        consented=row.consented,
    )


def round_to_pb(report: RoundReport) -> cpb.RoundStatus:
    """Return a closed round as a message."""
    return cpb.RoundStatus(
        round_id=report.round_id,
        outer_step=report.outer_step,
        committed=report.committed,
        reason=report.reason,
        seconds=report.seconds,
        bytes_in=report.bytes_in,
        bytes_out=report.bytes_out,
        fragments=[fragment_verdicts_to_pb(fragment) for fragment in report.fragments],
        missing=report.missing,
        digest=report.digest,
        carried=report.carried,
        t=report.t,
        every=report.every,
        batch=report.batch,
        outer_lr=report.outer_lr,
        outer_momentum=report.outer_momentum,
    )


def _round_from_pb(row: cpb.RoundStatus) -> RoundReport:
    return RoundReport(
        round_id=row.round_id,
        outer_step=row.outer_step,
        committed=row.committed,
        reason=row.reason,
        seconds=row.seconds,
        bytes_in=row.bytes_in,
        bytes_out=row.bytes_out,
        missing=_names("missing", row.missing),
        digest=row.digest,
        fragments=tuple(fragment_verdicts_from_pb(fragment) for fragment in row.fragments),
        carried=_names("carried", row.carried),
        t=_moment("t of a round", row.t),
        every=row.every,
        batch=row.batch,
        outer_lr=row.outer_lr,
        outer_momentum=row.outer_momentum,
    )


def fragment_verdicts_to_pb(fragment: FragmentCommit) -> cpb.FragmentVerdicts:
    """Return what became of the contributions to one fragment; the payload is left out."""
    return cpb.FragmentVerdicts(
        fragment_id=fragment.fragment_id,
        verdicts=[
            cpb.PeerVerdict(peer_id=v.peer_id, verdict=v.verdict.value, norm=v.norm, weight=v.weight, staleness=v.staleness)
            for v in fragment.verdicts
        ],
        merged_norm=fragment.merged_norm,
        clip=fragment.clip,
    )


def fragment_verdicts_from_pb(message: cpb.FragmentVerdicts) -> FragmentCommit:
    """Return what became of the contributions to one fragment; the payload is None.

    Norms may be NaN or infinite (verdict NONFINITE).
    """
    lim.at_most("verdicts on a fragment", message.verdicts, lim.MAX_VERDICTS)
    verdicts = tuple(_verdict_from_pb(verdict) for verdict in message.verdicts)
    if len({verdict.peer_id for verdict in verdicts}) != len(verdicts):
        fail("two verdicts on one peer's contribution")
    return FragmentCommit(
        fragment_id=within("fragment_id", message.fragment_id, 0, lim.MAX_FRAGMENTS - 1),
        payload=None,
        verdicts=verdicts,
        merged_norm=_norm("merged_norm", message.merged_norm),
        clip=lim.check_share("clip", message.clip),
    )


def _verdict_from_pb(message: cpb.PeerVerdict) -> PeerVerdict:
    verdict = next((each for each in Verdict if each.value == message.verdict), None)
    if verdict is None:
        fail(f"verdict {message.verdict[:32]!r} is not known")
    return PeerVerdict(
        peer_id=check_id("peer_id", message.peer_id),
        verdict=verdict,
        norm=_norm("norm", message.norm),
        weight=lim.check_share("weight", message.weight),
        staleness=within("staleness", message.staleness, 0, lim.MAX_STEP),
    )


def _names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(check_id(field, name) for name in names)


def _name_or_run(field: str, name: str) -> str:
    """Return a peer's name, or '', which stands for the run."""
    return check_id(field, name) if name else name


def _moment(field: str, unix: float) -> float:
    return lim.check_number(field, unix, 0, lim.MAX_UNIX)


def _seconds_left(field: str, seconds: float) -> float | None:
    """Return the seconds until something; None: below 0, which stands for not known."""
    return lim.check_number(field, seconds, 0, lim.MAX_SECONDS) if not seconds < 0 else None


def _within(field: str, values: Iterable[float], low: float, high: float) -> tuple[float, ...]:
    """As `check_number` of each; a status has many of them."""
    found = tuple(values)
    if not all(low <= value <= high for value in found):
        lim.check_number(field, next(value for value in found if not low <= value <= high), low, high)
    return found


def _norm(field: str, value: float) -> float:
    return value if not value < 0 else fail(f"{field} is {value}, below 0")
