"""What an operator sees, or a regional aggregator: the run's state as a value. Owns the mapping; changes nothing."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from aggregator.control.membership import Member
from aggregator.control.run import Run
from aggregator.metrics import RoundReport
from edit.rounds.deadlines import MEASURED
from editpb import control_pb2 as pb
from editpb.control_messages import fragment_verdicts_to_pb, heartbeat_to_pb, view_to_pb
from editpb.messages import InjectionState

__all__ = ["injection_state", "peak_memory_bytes", "status_reply"]


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far, in bytes.

    From /proc where there is one: on Linux, ru_maxrss begins with the peak of the process that started this one.
    """
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(line.split()[1]) * 1024


def injection_state(run: Run) -> InjectionState:
    """The run as its regional aggregator sees it. Raises StaleError before the founding."""
    rounds, published = run.rounds, run.published
    return InjectionState(
        outer_step=published.outer_step,
        phase=run.view(None).phase,
        tokens=rounds.machine.tokens,
        injected=published.injected,
        accepted=rounds.accepted,
    )


def status_reply(run: Run, rounds_after: int) -> pb.StatusReply:
    """The run as it stands; `rounds_after`: only rounds with a larger id."""
    machine, now = run.machine, run.clock.monotonic()
    deadline = machine.deadline if machine is not None else None
    return pb.StatusReply(
        run_id=run.run_id,
        view=view_to_pb(run.view(None)),
        members=_members(run, now),
        rounds=[_round(report) for report in run.metrics.rounds if report.round_id > rounds_after],
        outer_steps=run.config.sync.outer_steps,
        parameters=run.outer.schema.numel if run.outer is not None else 0,
        peak_memory_bytes=peak_memory_bytes(),
        expected=sorted(machine.expected) if machine is not None else [],
        arrived=sorted(machine.arrived) if machine is not None else [],
        deadline_in_s=deadline - now if deadline is not None else -1.0,
        tokens=machine.tokens if machine is not None else 0,
        stop_tokens=run.config.sync.tokens,
    )


def _members(run: Run, now: float) -> list[pb.MemberStatus]:
    seen = run.membership.members
    rows = []
    for identity in run.members.all():
        member = seen.get(identity.peer_id)
        if identity.role != "peer" and member is None:
            continue
        rows.append(
            _member(identity.peer_id, identity.role, member, now, run)
            if member is not None
            else pb.MemberStatus(peer_id=identity.peer_id, role=identity.role, state="invited", reason="never attended")
        )
    return rows


def _member(peer_id: str, role: str, member: Member, now: float, run: Run) -> pb.MemberStatus:
    row = pb.MemberStatus(
        peer_id=peer_id,
        role=role,
        state=member.state.value,
        reason=member.reason,
        silent_s=max(0.0, now - member.last_seen),
        heartbeat=heartbeat_to_pb(member.heartbeat) if member.heartbeat is not None else None,
        contributions=member.contributions,
        rejections=member.rejections,
        absences=member.absences,
    )
    if run.machine is not None:
        _add_pace(row, run)
    return row


def _add_pace(row: pb.MemberStatus, run: Run) -> None:
    """Where this member is in the round, and what it is given."""
    rounds, peer_id = run.rounds, row.peer_id
    machine, phase = rounds.machine, rounds.machine.peer_phase(peer_id)
    row.phase = phase.value if phase is not None else ""
    row.deadline_s = machine.expected_s(peer_id) or 0.0
    row.upload_bytes, row.upload_total_bytes = rounds.upload(peer_id)
    row.download_s, row.compute_s, row.upload_s = (machine.deadlines.allowed_s(peer_id, each) for each in MEASURED)


def _round(report: RoundReport) -> pb.RoundStatus:
    return pb.RoundStatus(
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
    )
