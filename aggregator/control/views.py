"""What a rank sees of the run, and what its regional aggregator sees. Pure functions of the run's parts."""

from __future__ import annotations

from aggregator.control.attendance import Attendance
from aggregator.data.round_runner import RoundRunner
from edit.rounds.events import Phase
from editpb.messages import InjectionState, RunPhase, View

__all__ = ["founded_view", "founding_view", "injection_state", "phase_of"]

_PHASES = {
    Phase.GATHERING: RunPhase.GATHERING,
    Phase.COLLECTING: RunPhase.COLLECTING,
    Phase.COMMITTING: RunPhase.COMMITTING,
    Phase.PAUSED: RunPhase.PAUSED,
    Phase.FINISHED: RunPhase.FINISHED,
}


def phase_of(rounds: RoundRunner | None) -> RunPhase:
    """Return the run's phase; without rounds it is not founded yet."""
    return _PHASES[rounds.machine.phase] if rounds is not None else RunPhase.FOUNDING


def founding_view(attendance: Attendance, founder: str | None, sequence: int, held_up: str, waiting_for: str) -> View:
    """Return what a rank sees of a run without parameters: rank 0 of the founder is told to send them."""
    found = attendance.rank == 0 and attendance.peer_id == founder
    return View(sequence=sequence, phase=RunPhase.FOUNDING, found=found, reason=held_up, waiting_for=waiting_for)


def founded_view(
    attendance: Attendance,
    rounds: RoundRunner,
    sequence: int,
    held_up: str,
    waiting_for: str,
    inner_steps: int,
    ahead_bytes: int,
) -> View:
    """Return what a rank sees of a run that has parameters.

    Args:
        held_up: why no round comes, or ''.
        waiting_for: for how many peers the first round waits, in words, or ''.
        inner_steps: how many this peer is to take until its next contribution; 0: as configured.
        ahead_bytes: of its contribution, that it may have on their way without a receipt.
    """
    machine, published = rounds.machine, rounds.published
    last_round_id, last_committed, last_reason = rounds.last_closed
    return View(
        sequence=sequence,
        phase=phase_of(rounds),
        outer_step=published.outer_step,
        round_id=machine.round_id,
        digest=published.digest,
        oldest_update=published.oldest_update,
        last_round_id=last_round_id,
        last_committed=last_committed,
        last_reason=last_reason,
        resync=attendance.resync,
        reason=held_up,
        inner_steps=inner_steps,
        draining=machine.draining,
        ahead_bytes=ahead_bytes,
        waiting_for=waiting_for,
    )


def injection_state(rounds: RoundRunner) -> InjectionState:
    """Return what the regional aggregator sees of a run that has parameters."""
    return InjectionState(
        outer_step=rounds.published.outer_step,
        phase=phase_of(rounds),
        tokens=rounds.machine.tokens,
        injected=rounds.published.injected,
        accepted=rounds.accepted,
    )
