"""The processes of one demo, with the command lines that a user would type."""

from __future__ import annotations

from collections.abc import Callable

from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import DemoOptions, FaultPlan
from edit.lab.demo.recorder import LONE
from edit.lab.processes import COORDINATOR, ChildDied, Programs, Supervisor

__all__ = ["DemoDaemons"]


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
        printed = self._supervisor.call(
            {f"invite-{name}": (*self._programs.coordinator, "invite", "--state", state, name) for name in names}
        )
        joins = {}
        for name in names:
            text = printed[f"invite-{name}"]
            invitation = next((line for line in text.splitlines() if line.startswith("edit1.")), None)
            if invitation is None:
                raise ChildDied(f"edit-coordinator invite {name} printed no invitation: {text.strip()[:200]}")
            joins[f"join-{name}"] = (*self._programs.peer, "join", invitation, "--home", str(self._folder.home(name)))
        self._supervisor.call(joins)

    def start(self, name: str) -> None:
        """Start the process called `name` (coordinator, a peer, lone), also again after it ended."""
        if name == COORDINATOR:
            argv = (*self._programs.coordinator, "serve", "--state", str(self._folder.state))
        elif name == LONE:
            argv = (*self._programs.peer, *self._lone())
        else:
            argv = (*self._programs.peer, *self._peer(name))
        self._supervisor.start(name, argv)

    def _peer(self, name: str) -> tuple[str, ...]:
        home = self._folder.home(name)
        argv = ["run", "--home", str(home), "--data", str(self._folder.data / name)]
        argv += ["--metrics", str(home / "metrics.jsonl"), "--threads", "1"]
        if name == self._faults.slow:
            argv += ["--throttle", "2"]
        if name == self._faults.damaged:
            argv += ["--fault", f"nan@{self._faults.nan_at},huge@{self._faults.huge_at}"]
        return tuple(argv)

    def _lone(self) -> tuple[str, ...]:
        folder, options = self._folder, self._options
        steps = str(options.lone_steps)
        data = str(folder.data / options.peer_ids[0])
        argv = ("alone", "--run", str(folder.run_toml), "--data", data, "--steps", steps)
        return (*argv, "--out", str(folder.lone), "--threads", "1")

    def kill(self, name: str) -> int:
        """Send SIGKILL; return the id of the process that is gone."""
        pid = self._supervisor.pid(name)
        self._supervisor.kill(name)
        return pid

    def running(self, name: str) -> bool:
        return self._supervisor.running(name)

    def check(self, finished: bool) -> None:
        """Raise ChildDied if a process ended that should run: peers may exit with 0, but only when the run has finished."""
        for end in self._supervisor.ended():
            if end.expected or (end.returncode == 0 and (finished or end.name == LONE) and end.name != COORDINATOR):
                continue
            raise ChildDied(str(end))
