"""The show: when the demo kills whom and starts it again. Sans-IO: progress and `now` come in, cues go out.

Owns: the order of the kills, so that one process is away at a time and each is away long enough to be missed. Must not know:
processes, signals, the clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from edit.lab.demo.plan import ShowPlan
from edit.lab.programs import COORDINATOR

__all__ = ["Cue", "FaultSchedule", "Part"]


class Part(Enum):
    """What to do with the process of a cue."""

    KILL = "kill"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Cue:
    """Kill or restart the process called `name`."""

    part: Part
    name: str


@dataclass(frozen=True, slots=True)
class _Absence:
    name: str
    since_step: int
    since: float
    restarted: bool = False


class FaultSchedule:
    """`due(outer_step, training, now)` says what to do now.

    A killed peer is started again after `away_s`, once the others have committed an outer step without it; a killed coordinator
    after `coordinator_away_s`. The next kill waits until the killed peer trains again. No wait is longer than `patience_s`.
    """

    def __init__(
        self, plan: ShowPlan, *, away_s: float = 2.0, patience_s: float = 40.0, coordinator_away_s: float = 0.5
    ) -> None:
        kills = [(plan.kill_at, plan.killed), (plan.coordinator_kill_at, COORDINATOR if plan.coordinator_kill_at else None)]
        self._kills = [(step, name) for step, name in kills if name is not None]
        self._away_s, self._patience_s, self._coordinator_away_s = away_s, patience_s, coordinator_away_s
        self._absence: _Absence | None = None

    @property
    def over(self) -> bool:
        return not self._kills and self._absence is None

    def due(self, outer_step: int, training: Collection[str], now: float) -> tuple[Cue, ...]:
        """At most one cue: the end of an absence, or the next kill whose outer step is reached. training: peers that do."""
        if self._absence is not None:
            return self._go_on(self._absence, outer_step, training, now)
        if self._kills and outer_step >= self._kills[0][0]:
            _, name = self._kills.pop(0)
            self._absence = _Absence(name, outer_step, now)
            return (Cue(Part.KILL, name),)
        return ()

    def _go_on(self, absence: _Absence, outer_step: int, training: Collection[str], now: float) -> tuple[Cue, ...]:
        late = now - absence.since >= self._patience_s
        if absence.restarted:
            if absence.name == COORDINATOR or absence.name in training or late:
                self._absence = None
            return ()
        if not late and not self._missed(absence, outer_step, now):
            return ()
        self._absence = _Absence(absence.name, outer_step, now, restarted=True)
        return (Cue(Part.RESTART, absence.name),)

    def _missed(self, absence: _Absence, outer_step: int, now: float) -> bool:
        if absence.name == COORDINATOR:
            return now - absence.since >= self._coordinator_away_s
        return now - absence.since >= self._away_s and outer_step > absence.since_step
