"""When an open collection closes, and when it is given up: pure questions about one round, answered with a reason. Sans-IO.

Owns: rules 7 and 8 of `edit.rounds.machine`, and what merging = "arrivals" has in their place. Must not know: events, effects,
who is live beyond what it is told.
"""

from __future__ import annotations

from collections.abc import Set

from edit.config.run import RoundsConfig
from edit.rounds.open_round import OpenRound

__all__ = ["closing_reason", "giving_up_reason", "grace_over"]


def closing_reason(current: OpenRound, config: RoundsConfig, now: float) -> str:
    """Why the collection closes now with what is in, or ''."""
    present = len(current.complete)
    if config.merging == "arrivals":
        return f"{f'{present} contributions' if present > 1 else 'a contribution'} arrived" if present else ""
    if current.quorum_at is None:
        return ""
    if not current.missing:
        return f"{f'all {present} contributors' if present > 1 else 'the only contributor'} in{current.without()}"
    if now >= current.deadline:
        return f"deadline: {current.tally()}"
    return f"grace over: {current.tally()}" if now >= grace_over(current, config) else ""


def giving_up_reason(current: OpenRound, config: RoundsConfig, able: Set[str], now: float) -> str:
    """Why the round is given up now, or ''. able: the ready peers."""
    if config.merging == "arrivals":
        return f"bad bytes{current.without(merges=False)}" if current.faults and not current.complete else ""
    late = now >= current.deadline
    if len(current.complete) >= config.quorum or not (current.faults or late):
        return ""
    few = f"too few: {len(current.complete)} of quorum {config.quorum}"
    left = able - set(current.faults)
    if current.faults and len(current.complete | left) < config.quorum:
        return f"{few}{current.without(merges=False)}"
    return f"{few} at the deadline{current.without(merges=False)}" if late and left else ""


def grace_over(current: OpenRound, config: RoundsConfig) -> float:
    """When the missing are waited for no longer (rule 7); inf before the quorum."""
    if current.quorum_at is None:
        return float("inf")
    if config.wait == "slack":
        return max(current.quorum_at + config.grace_s, current.free_until)
    return max(current.quorum_at, current.counted_from + current.patience_s) + config.grace_s
