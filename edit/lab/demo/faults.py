"""The demo's faults: when a process is killed and started again (`FaultSchedule`, sans-IO), and doing it (`FaultRunner`).

The kills follow one another: one process is away at a time, and long enough for the others to commit without it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from edit.lab.demo.daemons import DemoDaemons
from edit.lab.demo.plan import FaultPlan
from edit.lab.demo.recorder import Recorder
from edit.lab.demo.results import Restart
from edit.lab.observations import Status
from edit.lab.processes import COORDINATOR

__all__ = ["ActionKind", "FaultAction", "FaultRunner", "FaultSchedule"]


class ActionKind(Enum):
    """What to do with a process."""

    KILL = "kill"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class FaultAction:
    """Kill or restart the process called `name`."""

    kind: ActionKind
    name: str


@dataclass(frozen=True, slots=True)
class _Outage:
    """A process that was killed. since_step, since: the outer step and the time of the kill, then of the restart."""

    name: str
    since_step: int
    since: float
    restarted: bool = False


class FaultSchedule:
    """Decide what to do now. Sans-IO: the run's progress and `now` come in, actions go out.

    A killed peer is restarted after `away_s`, once the others have committed an outer step without it; a killed coordinator
    after `coordinator_away_s`. The next kill waits until the killed peer trains again. No wait is longer than `patience_s`.
    """

    def __init__(
        self, plan: FaultPlan, *, away_s: float = 2.0, patience_s: float = 40.0, coordinator_away_s: float = 0.5
    ) -> None:
        kills = [(plan.kill_at, plan.killed), (plan.coordinator_kill_at, COORDINATOR if plan.coordinator_kill_at else None)]
        self._kills = [(step, name) for step, name in kills if name is not None]
        self._away_s, self._patience_s, self._coordinator_away_s = away_s, patience_s, coordinator_away_s
        self._outage: _Outage | None = None

    @property
    def over(self) -> bool:
        """Whether every kill has happened and its process is back."""
        return not self._kills and self._outage is None

    def due(self, outer_step: int, training: Collection[str], now: float) -> tuple[FaultAction, ...]:
        """Return at most one action: restart the killed process, or the next kill once its outer step is reached.

        training: the peers that train or exchange; now: monotonic seconds.
        """
        if self._outage is not None:
            return self._continue(self._outage, outer_step, training, now)
        if self._kills and outer_step >= self._kills[0][0]:
            _, name = self._kills.pop(0)
            self._outage = _Outage(name, outer_step, now)
            return (FaultAction(ActionKind.KILL, name),)
        return ()

    def _continue(self, outage: _Outage, outer_step: int, training: Collection[str], now: float) -> tuple[FaultAction, ...]:
        late = now - outage.since >= self._patience_s
        if outage.restarted:
            if outage.name == COORDINATOR or outage.name in training or late:
                self._outage = None
            return ()
        if not late and not self._long_enough(outage, outer_step, now):
            return ()
        self._outage = _Outage(outage.name, outer_step, now, restarted=True)
        return (FaultAction(ActionKind.RESTART, outage.name),)

    def _long_enough(self, outage: _Outage, outer_step: int, now: float) -> bool:
        if outage.name == COORDINATOR:
            return now - outage.since >= self._coordinator_away_s
        return now - outage.since >= self._away_s and outer_step > outage.since_step


class FaultRunner:
    """Carry out the schedule on the real processes, and check that the coordinator comes back with the same outer parameters.

    restart: what the coordinator's restart showed; None before it.
    """

    def __init__(self, schedule: FaultSchedule, daemons: DemoDaemons, recorder: Recorder) -> None:
        self._schedule, self._daemons, self._recorder = schedule, daemons, recorder
        self._digests_before: dict[int, str] | None = None  # by outer step, when the coordinator was killed
        self._awaiting_restart = False
        self.restart: Restart | None = None

    def act(self, now: float) -> None:
        """Do what is due at the run's present outer step. Call it several times a second."""
        state = self._recorder.state
        training = [row.peer_id for row in state.peers.values() if row.state in ("training", "exchanging")]
        for action in self._schedule.due(state.outer_step, training, now):
            if action.kind is ActionKind.KILL:
                self._kill(action.name)
            else:
                self._restart(action.name)

    def _kill(self, name: str) -> None:
        pid = self._daemons.kill(name)
        if name in self._recorder.state.peers:
            self._recorder.state.peers[name].state = "killed"
        self._recorder.event(f"SIGKILL to {name} (process {pid}), as a power cut would", "fault")
        if name == COORDINATOR:
            self._recorder.poll()  # what it committed before it died
            self._digests_before = dict(self._recorder.state.digests)

    def _restart(self, name: str) -> None:
        self._daemons.start(name)
        if name == COORDINATOR:
            self._awaiting_restart = True
            self._recorder.event("coordinator started again; the peers reconnect by themselves")
        else:
            self._recorder.event(f"{name} started again with nothing but its certificate")

    def observe(self, status: Status) -> None:
        """Compare the coordinator's first answer after its restart with what it had committed before."""
        if not self._awaiting_restart or self._digests_before is None or not status.digest:
            return
        self._awaiting_restart = False
        before = self._digests_before.get(status.outer_step)
        if before is None:  # it has committed another step already: too late to compare
            self._recorder.event(f"coordinator is back and already at outer step {status.outer_step}", "good")
            return
        self.restart = Restart(status.outer_step, before, status.digest)
        same = f"{status.digest[:12]} as before the kill" if self.restart.equal else "NOT the one from before the kill"
        text = f"coordinator is back at outer step {status.outer_step}, digest {same}"
        self._recorder.event(text, "good" if self.restart.equal else "bad")
