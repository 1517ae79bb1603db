"""What the coordinator tells each peer about pace, and the operator about settings that cannot work. Pure functions.

Owns: DyLU (arXiv 2401.09135, section 5): H_m = max(1, floor(H * speed_m / fastest speed)), from the seconds per inner step that
the peers report. Must not know: views, connections, time.
"""

from __future__ import annotations

from collections.abc import Iterable

from edit.config.run import RoundsConfig, RunConfig

__all__ = ["dylu_steps", "fastest", "impossible", "too_slow"]


def fastest(step_s: Iterable[float]) -> float:
    """The smallest of the measured seconds per inner step; 0 when none is measured (above 0)."""
    return min((seconds for seconds in step_s if seconds > 0), default=0.0)


def dylu_steps(interval: int, step_s: float, fastest_s: float) -> int:
    """How many inner steps a peer is to take until its next contribution; 0, no word, before its speed is known."""
    if not step_s > 0 or not fastest_s > 0:
        return 0
    return max(1, min(interval, int(interval * fastest_s / step_s)))


def impossible(config: RoundsConfig, outer_step: int, members: int) -> str:
    """Why no round can ever commit (or open) with so many peers, or ''."""
    if config.merging == "arrivals":
        return ""
    for name in ("quorum", "start_peers") if outer_step == 0 else ("quorum",):
        if (wanted := getattr(config, name)) > members:
            have = f"{members} peers have" if members != 1 else "1 peer has"
            return f"rounds.{name} = {wanted}, but only {have} joined the run; invite more, or lower it in run.toml"
    return ""


def too_slow(config: RunConfig, step_s: float) -> str:
    """Why a member whose inner step takes so many seconds cannot keep the longest deadline, or ''.

    One that cannot do even one step in it is given that step: a shorter deadline could never be met.
    """
    rounds, sync = config.rounds, config.sync
    if rounds.merging == "arrivals":
        return ""
    if step_s > rounds.ceiling_s:
        return f"one inner step takes {step_s:.3g} s, but rounds.ceiling_s = {rounds.ceiling_s:.3g} s: it is given one step"
    by_time = sync.schedule == "time"
    phase_s = sync.interval_s if by_time else sync.interval * step_s
    if sync.dylu or phase_s < rounds.ceiling_s:  # DyLU gives it fewer steps
        return ""
    return (
        f"it computes {phase_s:.3g} s from one exchange to the next, but rounds.ceiling_s = {rounds.ceiling_s:.3g} s: no round "
        f"waits so long; raise it, or lower sync.{'time_s' if by_time else 'every'}"
    )
