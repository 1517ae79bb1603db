"""The demo's faults: when a process is killed and started again (`FaultSchedule`, sans-IO), and doing it (`FaultRunner`).

The kills follow one another: one process is away at a time, and long enough for the others to commit without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from edit.lab.demo.daemons import DemoDaemons
from edit.lab.demo.plan import LEADER, OWNER, FaultPlan
from edit.lab.demo.recorder import Recorder
from edit.lab.demo.results import Restart, Takeover
from edit.lab.demo.swarm import SwarmRounds
from edit.lab.processes import COORDINATOR
from edit.view.observations import Status, SwarmStatus

__all__ = ["ActionKind", "FaultAction", "FaultRunner", "FaultSchedule"]


class ActionKind(Enum):
    """What to do with a process."""

    KILL = "kill"
    RESTART = "restart"
    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class FaultAction:
    """Kill, restart, stop or continue the process called `name`."""

    kind: ActionKind
    name: str


@dataclass(frozen=True, slots=True)
class _Outage:
    """A process that was killed or stopped. since_step, since: the outer step and the time of that, then of its return."""

    name: str
    since_step: int
    since: float
    stopped: bool
    restarted: bool = False


class FaultSchedule:
    """Decide what to do now. Sans-IO: the run's progress and `now` come in, actions go out.

    A killed peer is restarted after `away_s`, once the others have committed an outer step without it; a killed coordinator
    after `coordinator_away_s`. The next kill waits until the killed peer trains again. No wait is longer than `patience_s`.
    One that is stopped goes on as one that is killed is restarted.
    """

    def __init__(
        self, plan: FaultPlan, *, away_s: float = 2.0, patience_s: float = 40.0, coordinator_away_s: float = 0.5
    ) -> None:
        kills = [
            (plan.kill_at, plan.killed),
            (plan.coordinator_kill_at, COORDINATOR if plan.coordinator_kill_at else None),
            (plan.leader_stop_at, LEADER if plan.leader_stop_at else None),
            (plan.owner_kill_at, OWNER if plan.owner_kill_at else None),
        ]
        self._kills = [(step, name) for step, name in kills if name is not None]
        self._away_s, self._patience_s, self._coordinator_away_s = away_s, patience_s, coordinator_away_s
        self._outage: _Outage | None = None

    @property
    def over(self) -> bool:
        """Whether every kill has happened and its process is back."""
        return not self._kills and self._outage is None

    def due(
        self, outer_step: int, training: Collection[str], now: float, roles: Mapping[str, str] | None = None
    ) -> tuple[FaultAction, ...]:
        """Return at most one action: bring the process back that is away, or the next fault once its outer step is reached.

        training: the peers that train or exchange; now: monotonic seconds; roles: who leads a swarm and who owns a part, as far
        as that is known; else such a fault waits.
        """
        if self._outage is not None:
            return self._continue(self._outage, outer_step, training, now)
        if self._kills and outer_step >= self._kills[0][0]:
            wanted = self._kills[0][1]
            name = (roles or {}).get(wanted, "") if wanted in (LEADER, OWNER) else wanted
            if name:
                self._kills.pop(0)
                self._outage = _Outage(name, outer_step, now, stopped=wanted == LEADER)
                return (FaultAction(ActionKind.STOP if wanted == LEADER else ActionKind.KILL, name),)
        return ()

    def _continue(self, outage: _Outage, outer_step: int, training: Collection[str], now: float) -> tuple[FaultAction, ...]:
        late = now - outage.since >= self._patience_s
        if outage.restarted:
            if outage.name == COORDINATOR or outage.name in training or late:
                self._outage = None
            return ()
        if not late and not self._long_enough(outage, outer_step, now):
            return ()
        self._outage = _Outage(outage.name, outer_step, now, stopped=outage.stopped, restarted=True)
        return (FaultAction(ActionKind.CONTINUE if outage.stopped else ActionKind.RESTART, outage.name),)

    def _long_enough(self, outage: _Outage, outer_step: int, now: float) -> bool:
        if outage.name == COORDINATOR:
            return now - outage.since >= self._coordinator_away_s
        return now - outage.since >= self._away_s and outer_step > outage.since_step


class FaultRunner:
    """Carry out the schedule on the real processes, and check that the run goes on as it should.

    rounds: of a swarm. restart: what the coordinator's restart showed; None before it. takeovers: how long the members of a
    swarm took to go on.
    """

    def __init__(
        self, schedule: FaultSchedule, daemons: DemoDaemons, recorder: Recorder, plan: FaultPlan, rounds: SwarmRounds | None
    ) -> None:
        self._schedule, self._daemons, self._recorder, self._plan, self._rounds = schedule, daemons, recorder, plan, rounds
        self._digests_before: dict[tuple[int, int], str] | None = None  # when the coordinator was killed
        self._awaiting_restart = False
        self._struck: tuple[float, str, str] | None = None  # when a member was taken from the swarm, who, and how
        self.restart: Restart | None = None
        self.takeovers: list[Takeover] = []

    def act(self, now: float) -> None:
        """Do what is due at the run's present outer step. Call it several times a second."""
        state = self._recorder.state
        training = [row.peer_id for row in state.peers.values() if row.state in ("training", "exchanging")]
        roles = self._roles(state.status.swarm) if state.status is not None and state.status.swarm is not None else {}
        for action in self._schedule.due(state.outer_step, training, now, roles):
            match action.kind:
                case ActionKind.KILL:
                    self._kill(action.name)
                case ActionKind.RESTART:
                    self._restart(action.name)
                case ActionKind.STOP:
                    self._stop(action.name)
                case ActionKind.CONTINUE:
                    self._daemons.go_on(action.name)
                    self._recorder.event(f"SIGCONT to {action.name}: it learns what the others agreed on meanwhile")

    def _roles(self, swarm: SwarmStatus) -> dict[str, str]:
        """Return who leads, and a member that owns a part: rather one to which nothing else happens."""
        owners = [peer_id for peer_id in sorted({*swarm.owners}) if peer_id != swarm.leader]
        owners.sort(key=lambda peer_id: peer_id in (self._plan.slow, self._plan.damaged))
        return {LEADER: swarm.leader, OWNER: owners[0] if owners else ""}

    def _does(self, name: str) -> str:
        """Say what a member of the swarm has to do for all."""
        status = self._recorder.state.status
        swarm = status.swarm if status is not None else None
        if swarm is None:
            return ""
        owns = [str(part) for part, owner in enumerate(swarm.owners) if owner == name]
        does = ["leads"] * (name == swarm.leader) + ([f"owns part{'s' * (len(owns) > 1)} {', '.join(owns)}"] if owns else [])
        return f", which {' and '.join(does)}" if does else ""

    def _kill(self, name: str) -> None:
        does, now = self._does(name), self._recorder.now()
        pids = self._daemons.kill(name)
        if name in self._recorder.state.peers:
            self._recorder.state.peers[name].state = "killed"
        which = f"process {pids[0]}" if len(pids) == 1 else f"processes {' and '.join(map(str, pids))}"
        self._recorder.event(f"SIGKILL to {name} ({which}){does}, as a power cut would", "fault")
        self._strike(now, name, "SIGKILL", does)
        if name == COORDINATOR:
            self._recorder.poll()  # what it committed before it died
            self._digests_before = dict(self._recorder.state.digests)

    def _stop(self, name: str) -> None:
        does, now = self._does(name), self._recorder.now()
        self._daemons.stop(name)
        self._recorder.state.peers[name].state = "stopped"
        self._recorder.event(f"SIGSTOP to {name}{does}: it says nothing, and no connection breaks", "fault")
        self._strike(now, name, "SIGSTOP", does)

    def _strike(self, now: float, name: str, how: str, does: str) -> None:
        if self._rounds is not None:
            self._struck = now, name, f"{how} to {name}{does}"

    def _restart(self, name: str) -> None:
        self._daemons.start(name)
        if name == COORDINATOR:
            self._awaiting_restart = True
            self._recorder.event("coordinator started again; the peers reconnect by themselves")
        elif self._rounds is not None:
            self._recorder.event(f"{name} started again: its host asks the others for what it missed")
        else:
            self._recorder.event(f"{name} started again with nothing but its certificate")

    def look(self, parts: int) -> None:
        """Note how long the members of a swarm took until each part had another outer step. Call it several times a second."""
        if self._struck is None or self._rounds is None:
            return
        since, name, what = self._struck
        later = [t for t in self._rounds.last.values() if t > since]
        if len(later) == parts:
            self._struck = None
            self.takeovers.append(Takeover(what, name, max(later) - since))
            self._recorder.event(
                f"{max(later) - since:.1f} s later all parts are at another outer step, without {name}", "good"
            )

    def observe(self, status: Status) -> None:
        """Compare the coordinator's first answer after its restart with what it had committed before."""
        if not self._awaiting_restart or self._digests_before is None or not status.digest:
            return
        self._awaiting_restart = False
        before = self._digests_before.get((0, status.outer_step))
        if before is None:  # it has committed another step already: too late to compare
            self._recorder.event(f"coordinator is back and already at outer step {status.outer_step}", "good")
            return
        self.restart = Restart(status.outer_step, before, status.digest)
        same = f"{status.digest[:12]} as before the kill" if self.restart.equal else "NOT the one from before the kill"
        text = f"coordinator is back at outer step {status.outer_step}, digest {same}"
        self._recorder.event(text, "good" if self.restart.equal else "bad")
