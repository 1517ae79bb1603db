"""How the run stands, as one plain record. Reads the run and changes nothing."""

from __future__ import annotations

import resource
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aggregator.control.membership import Member
from aggregator.control.run import Run
from aggregator.control.views import phase_of
from aggregator.data.round_runner import RoundRunner
from aggregator.security.members import MemberRecord
from edit.rounds.deadlines import MEASURED
from edit.rounds.events import Phase
from editpb.messages import RunPhase
from editpb.run_status import MemberStatus, RunStatus

__all__ = ["peak_memory_bytes", "run_status"]

_NAMED = 8  # of the peers that are waited for


def run_status(
    run: Run, rounds_after: int = 0, events_after: int = 0, *, brief: bool = False, peak_bytes: int | None = None
) -> RunStatus:
    """Return how the run stands now.

    Args:
        rounds_after, events_after: only with the recent rounds whose id, and the events whose number is above that.
        brief: without curves and settings.
        peak_bytes: what `peak_memory_bytes` has returned; None: it is asked now, which takes as long as three members.
    """
    phase = phase_of(run.rounds if run.founded else None)
    running = phase not in (RunPhase.FOUNDING, RunPhase.PAUSED, RunPhase.FINISHED)
    rounds = run.rounds if run.founded else None
    machine = rounds.machine if rounds is not None else None
    now = run.clock.monotonic()
    deadline = machine.deadline if machine is not None else None
    return RunStatus(
        run_id=run.run_id,
        phase=phase.value,
        outer_step=rounds.published.outer_step if rounds is not None else 0,
        outer_steps=run.config.sync.outer_steps,
        round_id=machine.round_id if machine is not None else 0,
        reason=run.held_up() or run.rolled_back(),
        draining=machine.draining if machine is not None else False,
        last_step=(machine.last_step or 0) if machine is not None else 0,
        tokens=machine.tokens if machine is not None else 0,
        stop_tokens=run.config.sync.tokens,
        digest=rounds.published.digest if rounds is not None else "",
        parameters=rounds.published.schema.numel if rounds is not None else 0,
        peak_memory_bytes=peak_memory_bytes() if peak_bytes is None else peak_bytes,
        expected=tuple(sorted(machine.expected)) if machine is not None else (),
        arrived=tuple(sorted(machine.arrived)) if machine is not None else (),
        deadline_in_s=max(0.0, deadline - now) if deadline is not None else None,
        waiting_for=_waiting_for(run, rounds),
        warnings=(*run.warnings, *(rounds.misfits.values() if rounds is not None else ())),
        members=tuple(_members(run, rounds, now)),
        rounds=tuple(report for report in run.recent_rounds if report.round_id > rounds_after)
        if rounds_after
        else (*run.recent_rounds,),
        t=run.clock.unix(),
        eta_s=_eta_s(run, machine.last_step if machine is not None else None) if running else None,
        curves=() if brief else run.history.curves(),
        events=run.history.events(events_after),
        settings=() if brief else run.settings,
        masks=_masks(rounds),
        privacy=run.privacy.text if run.privacy is not None else "",
        epsilon=run.privacy.epsilon if run.privacy is not None else None,
        governance=run.governance,
        audit=run.audit,
    )


def _eta_s(run: Run, last_step: int | None) -> float | None:
    """Return the seconds until the run's last outer step, or until the one at which a drain ends it."""
    sync = run.config.sync
    position = sync.inner_steps_before if sync.milestones else int
    return run.history.eta_s(last_step or sync.outer_steps, sync.tokens, run.clock.unix(), position)


def _waiting_for(run: Run, rounds: RoundRunner | None) -> str:
    """Say in words what has to happen before the run goes on."""
    if rounds is None:
        return "; ".join(filter(None, (run.peers_awaited(), run.founding.waiting_for(), _consents(run))))
    wanted = run.config.rounds
    machine = rounds.machine
    match machine.phase:
        case Phase.PAUSED:
            return "the operator: resume"
        case Phase.COMMITTING:
            return "the merge and the disk"
        case Phase.GATHERING if machine.held_back:
            return "the next attempt"
        case Phase.GATHERING if awaited := run.peers_awaited():
            return "; ".join(filter(None, (awaited, _consents(run))))
        case Phase.GATHERING if machine.round_id == 0 and machine.enough > 1:
            ready = f"peers that are here: {len(machine.ready)} of {machine.enough} are ready"
            return "; ".join(filter(None, (ready, _consents(run))))
        case Phase.GATHERING:
            return "; ".join(filter(None, ("a peer that is ready", _consents(run))))
        case Phase.COLLECTING if machine.deadline is None:
            return "a contribution"
        case Phase.COLLECTING:
            few = f"{len(machine.arrived)} in, quorum {wanted.quorum}"
            return f"{_names(machine.expected - machine.arrived) or 'more contributions'} ({few})"
    return ""


def _consents(run: Run) -> str:
    """Say in words whose consent is waited for; '': nobody's, or the run asks for none."""
    awaited = run.consents_awaited()
    return f"the consent of {_names(awaited)}" if awaited else ""


def _masks(rounds: RoundRunner | None) -> str:
    """Say in words how far the masked round is; '' without masks, or while none is open."""
    status = rounds.masked.status if rounds is not None and rounds.masked is not None else None
    return status.text if status is not None else ""


def _names(peers: Collection[str]) -> str:
    """Return the first peers by name, and how many others there are."""
    first, others = sorted(peers)[:_NAMED], len(peers) - _NAMED
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far, in bytes.

    From /proc where there is one: on Linux, ru_maxrss begins with the peak of the process that started this one.
    """
    try:
        with Path("/proc/self/status").open("rb", buffering=0) as file:
            _, _, line = file.read().partition(b"VmHWM:")
        return int(line.split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _members(run: Run, rounds: RoundRunner | None, now: float) -> list[MemberStatus]:
    """Every peer that was ever enrolled, and every other identity that attended."""
    attended = run.attendances.membership.members
    return [
        _member(run, rounds, one, attended.get(one.peer_id), now)
        for one in run.members.all()
        if one.role == "peer" or one.peer_id in attended
    ]


def _member(run: Run, rounds: RoundRunner | None, record: MemberRecord, member: Member | None, now: float) -> MemberStatus:
    """Return one member, made in one call: watchers have all members made again for each message."""
    peer_id = record.peer_id
    last, shares = run.history.verdict(peer_id), run.history.shares(peer_id)
    return MemberStatus(
        peer_id=peer_id,
        role=record.role,
        **(_attended(member, now) if member is not None else _awaited(run)),
        **(_pace(peer_id, rounds, now) if member is not None and rounds is not None else {}),
        expires=record.expires,
        computing=shares.get("computing", 0.0),
        exchanging=shares.get("exchanging", 0.0),
        waiting=shares.get("waiting", 0.0),
        verdict=last.verdict if last is not None else "",
        verdict_reason=last.reason if last is not None else "",
        consented=peer_id in run.consents,
    )


def _awaited(run: Run) -> dict[str, Any]:
    """Return the state of a member that this process has not seen; an earlier one may have."""
    who = "coordinator" if run.members.knows_all else "aggregator"
    return {"state": "invited", "reason": f"has not attended since the {who} started"}


def _attended(member: Member, now: float) -> dict[str, Any]:
    """Return what a member has said, and what has become of its contributions."""
    found: dict[str, Any] = {
        "state": member.state.value,
        "reason": member.reason,
        "silent_s": max(0.0, now - member.last_seen),
        "contributions": member.contributions,
        "rejections": member.rejections,
        "absences": member.absences,
    }
    if (heartbeat := member.heartbeat) is not None:
        found.update(
            outer_step=heartbeat.outer_step,
            inner_steps=heartbeat.inner_steps,
            loss=heartbeat.loss,
            tokens_per_s=heartbeat.tokens_per_s,
            step_s=heartbeat.step_s,
            bytes_sent=heartbeat.bytes_sent,
            bytes_received=heartbeat.bytes_received,
            device=heartbeat.device,
            metrics=heartbeat.metrics,
        )
    return found


def _pace(peer_id: str, rounds: RoundRunner, now: float) -> dict[str, Any]:
    """Return where a member is in the round, and what it is given."""
    machine, phase = rounds.machine, rounds.machine.peer_phase(peer_id)
    upload_bytes, upload_total_bytes = rounds.upload(peer_id)
    until = machine.quarantined_until(peer_id)
    download_s, compute_s, upload_s = (machine.deadlines.allowed_s(peer_id, each) for each in MEASURED)
    return {
        "phase": phase.value if phase is not None else "",
        "deadline_s": machine.expected_s(peer_id) or 0.0,
        "upload_bytes": upload_bytes,
        "upload_total_bytes": upload_total_bytes,
        "download_s": download_s,
        "compute_s": compute_s,
        "upload_s": upload_s,
        "optional": machine.is_optional(peer_id),
        "quarantined_s": max(0.0, until - now) if until is not None else 0.0,
    }
