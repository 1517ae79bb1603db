"""The processes of one demo, with the command lines that a user would type."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from aggregator.swarm.member_folder import MemberFolder
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import DemoOptions, FaultPlan
from edit.lab.demo.recorder import LONE
from edit.lab.processes import COORDINATOR, ChildDied, Programs, Supervisor

__all__ = ["DemoDaemons", "SwarmDaemons"]


class DemoDaemons:
    """Start and end this demo's processes. pause: waits a moment between two looks at a file."""

    def __init__(
        self,
        programs: Programs,
        supervisor: Supervisor,
        folder: DemoFolder,
        options: DemoOptions,
        faults: FaultPlan,
        pause: Callable[[], None],
    ) -> None:
        self._programs, self._supervisor, self._folder = programs, supervisor, folder
        self._options, self._faults, self._pause = options, faults, pause

    def found(self) -> None:
        """Create the run and serve it; return when the coordinator listens. Raises ChildDied."""
        folder = self._folder
        init = ("init", "--state", str(folder.state), "--config", str(folder.run_toml))
        self._supervisor.call({"init": (*self._programs.coordinator, *init)})
        self.start(COORDINATOR)
        while not folder.addresses.exists():
            for end in self._supervisor.ended():
                raise ChildDied(str(end))
            self._pause()

    def enrol(self) -> None:
        """Invite every peer and join it with its invitation. Raises ChildDied."""
        names = self._options.peer_ids
        state = str(self._folder.state)
        invitations = self._invitations(
            {name: (*self._programs.coordinator, "invite", "--state", state, name) for name in names}
        )
        joins = {
            f"join-{name}": (*self._programs.peer, "join", invitation, "--home", str(self._folder.home(name)))
            for name, invitation in invitations.items()
        }
        self._supervisor.call(joins)

    def _invitations(self, commands: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Run commands that invite, and return what they print, by name. Raises ChildDied."""
        printed = self._supervisor.call({f"invite-{name}": command for name, command in commands.items()})
        found = {}
        for name, command in commands.items():
            text = printed[f"invite-{name}"]
            invitation = next((line for line in text.splitlines() if line.startswith("edit1.")), None)
            if invitation is None:
                raise ChildDied(f"{' '.join(command)} printed no invitation: {text.strip()[:200]}")
            found[name] = invitation
        return found

    def start(self, name: str) -> None:
        """Start the process called `name` (coordinator, a peer, lone), also again after it ended."""
        if name == COORDINATOR:
            argv = (*self._programs.coordinator, "serve", "--keep-serving", "--state", str(self._folder.state))
        elif name == LONE:
            argv = (*self._programs.peer, *self._lone())
        else:
            argv = (*self._programs.peer, *self._peer(name))
        self._supervisor.start(name, argv)

    def _peer(self, name: str) -> tuple[str, ...]:
        return ("run", *self._trains(name))

    def _trains(self, name: str) -> tuple[str, ...]:
        home = self._folder.home(name)
        argv = ["--home", str(home), "--data", str(self._folder.data / name)]
        argv += ["--metrics", str(home / "metrics.jsonl"), "--threads", "1"]
        if name == self._faults.slow:
            argv += ["--throttle", "2"]
        if name == self._faults.damaged:
            argv += ["--fault", f"nan@{self._faults.nan_at},huge@{self._faults.huge_at}"]
        if name in self._faults.attacks:
            argv += ["--fault", f"{self._faults.attacks[name]}@0+"]
        return tuple(argv)

    def _lone(self) -> tuple[str, ...]:
        folder, options = self._folder, self._options
        steps = str(options.lone_steps)
        data = str(folder.data / options.peer_ids[0])
        argv = ("alone", "--run", str(folder.run_toml), "--data", data, "--steps", steps)
        return (*argv, "--out", str(folder.lone), "--threads", "1")

    def kill(self, name: str) -> list[int]:
        """Send SIGKILL; return the ids of the processes that are gone."""
        pids = self._supervisor.processes(name) or [self._supervisor.pid(name)]
        self._supervisor.kill(name)
        return pids

    def stop(self, name: str) -> None:
        """Send SIGSTOP."""
        self._supervisor.send_signal(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Send SIGCONT."""
        self._supervisor.send_signal(name, signal.SIGCONT)

    def end(self, name: str) -> None:
        """End the process, if it runs."""
        if self.running(name):
            self._supervisor.stop(name)

    def running(self, name: str) -> bool:
        return self._supervisor.running(name)

    def check(self, finished: bool) -> None:
        """Raise ChildDied if a process ended that should run: peers may exit with 0, but only when the run has finished."""
        for end in self._supervisor.ended():
            if end.expected or (end.returncode == 0 and (finished or end.name == LONE) and end.name != COORDINATOR):
                continue
            raise ChildDied(str(end))


class SwarmDaemons(DemoDaemons):
    """The same without a coordinator: each peer has a host beside it, which it starts. The first one founds the swarm."""

    _invited: Mapping[str, str] = {}

    def found(self) -> None:
        """Start the founder; return when others can be invited. Raises ChildDied."""
        founder = self._options.peer_ids[0]
        self.start(founder)
        while not MemberFolder(self._folder.home(founder)).port():
            for end in self._supervisor.ended():
                raise ChildDied(str(end))
            self._pause()

    def enrol(self) -> None:
        """Invite every other member. Each redeems its invitation when it starts. Raises ChildDied."""
        founder, *others = self._options.peer_ids
        home = str(self._folder.home(founder))
        self._invited = self._invitations(
            {name: (*self._programs.peer, "swarm", "invite", name, "--home", home) for name in others}
        )

    def start(self, name: str) -> None:
        """See above. The founder runs already."""
        if not self.running(name):
            super().start(name)

    def _peer(self, name: str) -> tuple[str, ...]:
        if name == self._options.peer_ids[0]:
            return ("swarm", "start", str(self._folder.run_toml), "--name", name, "--invite", "", *self._trains(name))
        return ("swarm", "join", self._invited[name], *self._trains(name))
