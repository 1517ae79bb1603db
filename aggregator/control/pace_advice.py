"""What the members' measured speeds and the settings mean together.

How many inner steps each member is to take, which member is too slow for the settings, and why no round can ever commit. The
functions are pure. `PaceAdvice` keeps the speed that sets the pace, and of which members was said that they are too slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from aggregator.control.membership import Member
from edit.config.robust import RobustConfig
from edit.config.run import RoundsConfig, RunConfig
from edit.merging.robust import organisation

_OF_TWO = 8.0
_FASTER = 4.0  # a member claims to be so many times faster than was measured here at most: the measurement has waits in it

__all__ = ["PaceAdvice", "dylu_steps", "fastest", "impossible", "too_slow", "unanchored"]


class PaceAdvice:
    """Advice on one run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._too_slow: set[str] = set()  # members that were reported as too slow
        self._fastest_s = 0.0

    def update(self, members: Iterable[Member], measured_s: Callable[[str], float]) -> None:
        """Take the members' reports: the fast ones among the live ones set the pace of DyLU.

        measured_s: a member's seconds per inner step as they were measured here; 0 before any measurement: a member that never
        contributed sets nobody's pace.
        """
        self._fastest_s = fastest(
            max(one.heartbeat.step_s, measured_s(one.peer_id) / _FASTER)
            for one in members
            if one.live and one.heartbeat is not None and one.heartbeat.step_s > 0 and measured_s(one.peer_id) > 0
        )

    def inner_steps(self, member: Member | None) -> int:
        """Return how many inner steps this member is to take until its next contribution (DyLU); 0: as configured."""
        if not self._config.sync.dylu or member is None or member.heartbeat is None:
            return 0
        return dylu_steps(self._config.sync.interval, member.heartbeat.step_s, self._fastest_s)

    def new_warning(self, peer_id: str, step_s: float, outer_step: int = 0) -> str:
        """Return why this member is too slow for the longest deadline, once per member; '' afterwards, and when it is not.

        outer_step: of the run, which H depends on.
        """
        if peer_id in self._too_slow:
            return ""
        warning = too_slow(self._config, step_s, outer_step)
        if warning:
            self._too_slow.add(peer_id)
        return warning


def fastest(step_s: Iterable[float]) -> float:
    """Return the time of an inner step, in seconds, of those that set the pace; 0 when none is known (above 0).

    A low quantile (a quarter), from three members on not the smallest: a single claim sets nobody's pace. Of two, where nobody
    knows which one is odd, the faster one, but at most eight times as fast as the other.
    """
    known = sorted(seconds for seconds in step_s if seconds > 0)
    if not known:
        return 0.0
    if len(known) > 2:
        return known[max(1, len(known) // 4)]
    return max(known[0], known[-1] / _OF_TWO)


def dylu_steps(interval: int, step_s: float, fastest_s: float) -> int:
    """Return how many inner steps a member is to take until its next contribution; 0 before its speed is known.

    DyLU (arXiv 2401.09135, section 5): H_m = max(1, floor(H * speed_m / fastest speed)).

    Args:
        interval: H, the configured number of inner steps.
        step_s, fastest_s: seconds per inner step of this member and of those that set the pace (`fastest`).
    """
    if not step_s > 0 or not fastest_s > 0:
        return 0
    return max(1, min(interval, int(interval * fastest_s / step_s)))


def impossible(config: RoundsConfig, outer_step: int, members: int) -> str:
    """Return why no round can ever commit (or open) when so many peers have joined, or ''."""
    if config.merging == "arrivals":
        return ""
    for name in ("quorum", "start_peers") if outer_step == 0 else ("quorum",):
        if (wanted := getattr(config, name)) > members:
            have = f"{members} peers have" if members != 1 else "1 peer has"
            return f"rounds.{name} = {wanted}, but only {have} joined the run; invite more, or lower it in run.toml"
    return ""


def unanchored(config: RobustConfig, members: Collection[str]) -> str:
    """Return why every round comes to nothing with these peers, none of which is an anchor, or ''."""
    if not config.anchored or {organisation(peer_id) for peer_id in members} & set(config.anchors):
        return ""
    named = ", ".join(config.anchors)
    return f"robust.anchors names {named}, and no peer of theirs has joined: every outer step is rolled back without one"


def too_slow(config: RunConfig, step_s: float, outer_step: int = 0) -> str:
    """Return why a member whose inner step takes `step_s` seconds cannot keep the longest deadline at an outer step, or ''.

    That of a single step that takes longer is believed only once it was measured here (`edit.rounds.deadlines`).
    """
    rounds, sync = config.rounds, config.sync
    if rounds.merging == "arrivals":
        return ""
    if step_s > rounds.ceiling_s:
        limit = f"rounds.ceiling_s = {rounds.ceiling_s:.3g} s"
        return f"one inner step takes {step_s:.3g} s, but {limit}: no round waits so long for a claim; raise it"
    by_time = sync.schedule == "time"
    phase_s = sync.interval_s if by_time else sync.interval_at(outer_step) * step_s
    if sync.dylu or phase_s < rounds.ceiling_s:  # DyLU gives it fewer steps
        return ""
    setting = "time_s" if by_time else "every" if sync.every_at(outer_step) == sync.every else "milestones"
    return (
        f"it computes {phase_s:.3g} s from one exchange to the next, but rounds.ceiling_s = {rounds.ceiling_s:.3g} s: no round "
        f"waits so long; raise it, or lower sync.{setting}"
    )
