"""Runs plans, adds up what they came to, and makes one that fails as small as it can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edit.errors import EditError
from edit.lab.council.plan import Plan
from edit.lab.council.swarm import Swarm
from edit.lab.council.truth import Broken

__all__ = ["Result", "failure", "shrink"]


@dataclass(slots=True)
class Result:
    """What many seeds came to."""

    seeds: int = 0
    commits: int = 0
    events: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    prompt_s: list[float] = field(default_factory=list)  # from healing to two further commits, where the bound is 5 s
    slow: int = 0  # the other seeds
    slowest: float = 0.0  # of these: the largest part of its bound that one took

    def add(self, swarm: Swarm, recovery_s: float) -> None:
        """Count a swarm that was run."""
        self.seeds += 1
        self.commits += swarm.truth.commits
        self.events += swarm.events
        self.virtual_s += swarm.now
        self.faults += swarm.faults
        if swarm.plan.is_slow:
            self.slow, self.slowest = self.slow + 1, max(self.slowest, recovery_s / swarm.plan.recovery_s)
        else:
            self.prompt_s.append(recovery_s)


def failure(
    plan: Plan,
    make: Callable[..., Swarm] = Swarm,
    *,
    lines: list[str] | None = None,
    result: Result | None = None,
) -> str:
    """Run a plan; return what did not hold, or ''.

    Args:
        make: makes the swarm of a plan and `lines`.
        lines: gets the trace.
        result: gets what the run came to, if all held.
    """
    swarm = make(plan, lines=lines)
    try:
        recovery_s = swarm.run_all()
    except (Broken, EditError) as error:
        return str(error)
    if result is not None:
        result.add(swarm, recovery_s)
    return ""


def shrink(plan: Plan, make: Callable[..., Swarm] = Swarm) -> Plan:
    """Return a plan that fails as this one does, and from which no fault can be left out."""
    place = len(plan.faults)
    while place:
        place -= 1
        smaller = replace(plan, faults=plan.faults[:place] + plan.faults[place + 1 :])
        if failure(smaller, make):
            plan = smaller
    return plan
