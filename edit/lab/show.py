"""The show: when the demo kills whom and starts it again. Sans-IO: progress and `now` come in, cues go out.

Owns: the order of the kills, so that one process is away at a time and each is away long enough to be missed. Must not know:
processes, signals, the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edit.lab.plan import ShowPlan

__all__ = ["Cue", "Part", "Show"]

COORDINATOR = "coordinator"


class Part(Enum):
    """What to do with the process of a cue."""

    KILL = "kill"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Cue:
    """Kill or restart the process called `name`."""

    part: Part
    name: str


class Show:
    """`due(outer_step, now)` says what to do now.

    A killed peer comes back after `away_s` AND once the others have committed a round without it (or, should they not, after
    `patience_s`); a killed coordinator after `coordinator_away_s`.
    """

    def __init__(
        self, plan: ShowPlan, *, away_s: float = 3.0, patience_s: float = 30.0, coordinator_away_s: float = 1.5
    ) -> None:
        kills = [(plan.kill_at, plan.killed), (plan.coordinator_kill_at, COORDINATOR if plan.coordinator_kill_at else None)]
        self._kills = [(step, name) for step, name in kills if name is not None]
        self._away_s, self._patience_s, self._coordinator_away_s = away_s, patience_s, coordinator_away_s
        self._gone: tuple[str, int, float] | None = None

    @property
    def over(self) -> bool:
        return not self._kills and self._gone is None

    def due(self, outer_step: int, now: float) -> tuple[Cue, ...]:
        """At most one cue: the end of an absence, or the next kill whose outer step is reached."""
        if self._gone is not None:
            return self._return(*self._gone, outer_step, now)
        if self._kills and outer_step >= self._kills[0][0]:
            _, name = self._kills.pop(0)
            self._gone = (name, outer_step, now)
            return (Cue(Part.KILL, name),)
        return ()

    def _return(self, name: str, gone_at_step: int, gone_at: float, outer_step: int, now: float) -> tuple[Cue, ...]:
        away = now - gone_at
        if name == COORDINATOR:
            back = away >= self._coordinator_away_s
        else:
            back = away >= self._patience_s or (away >= self._away_s and outer_step > gone_at_step)
        if not back:
            return ()
        self._gone = None
        return (Cue(Part.RESTART, name),)
