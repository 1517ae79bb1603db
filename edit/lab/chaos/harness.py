"""One chaos run: found it, inject and repair faults, check the invariants, stop at the first broken rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NoReturn

from edit.errors import EditError, StorageError
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.fork import Fork, ForkResult
from edit.lab.chaos.history import Files, History, Incident, Memory
from edit.lab.chaos.invariants import Violation, broken, broken_at_end, journal_differs, may_not_start
from edit.lab.chaos.options import SHARDED, ChaosOptions
from edit.lab.chaos.testbed import Testbed
from edit.lab.observer import Observer, open_observer
from edit.lab.processes import COORDINATOR
from edit.lab.tail import JsonLines

__all__ = ["Chaos", "Report", "RuleBroken"]

_POLL_S = 0.1  # lines of files, ended processes
_SLOW_POLL_S = 0.5  # status, memory, rules
_LOG_LINES = 25
_TORCHRUN_STOPPED = 1  # the exit code of a torchrun that got SIGTERM, whatever its ranks returned


class RuleBroken(EditError):
    """A rule of the run was broken."""

    exit_code = 1


@dataclass(slots=True)
class Report:
    """The result of a chaos run."""

    options: ChaosOptions
    schedule: tuple[Fault, ...]
    history: History
    disk: str = ""  # which kind of disk the coordinator had
    seconds: float = 0.0  # of chaos
    fork: ForkResult | None = None  # of a run that ends with one
    violation: Violation | None = None
    ended: dict[str, int] = field(default_factory=dict)  # exit codes by name
    evidence: dict[str, tuple[str, ...]] = field(default_factory=dict)  # last lines of logs by name


class Chaos:
    """One chaos run; call `run` once. say: prints a line of progress; unix: the clock, seconds since 1970."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None], unix: Callable[[], float] = time.time) -> None:
        self._options, self._say, self._unix = options, say, unix
        schedule = options.schedule()
        self._testbed = Testbed(options)
        self._history = History(options.peer_ids, options.step_tokens, options.hostile_ids)
        self.report = Report(options, schedule, self._history)
        names = (COORDINATOR, *options.peer_ids)
        self._lines = {name: JsonLines(self._testbed.metrics(name)) for name in names}
        self._observer: Observer | None = None
        self._last_slow_poll = self._began = 0.0
        self._coordinator_began = 0.0  # its last start
        self._status_step = 0

    def run(self) -> Report:
        """Run to the end, or to the first broken rule, and return the report. Raises ChildDied when the run cannot begin."""
        try:
            with ExitStack() as stack:
                stack.enter_context(self._testbed)
                self.report.disk = self._testbed.disk.kind
                try:
                    self._found()
                    stack.callback(self._close_observer)
                    self._inject_faults()
                    self._wait_for_recovery()
                    self._finish()
                    if self._options.forked:
                        self._fork()
                except RuleBroken:
                    self._keep_evidence()
        finally:
            self.report.seconds = self._unix() - self._began if self._began else 0.0
        if self._testbed.left_behind and self.report.violation is None:
            text = "; ".join(self._testbed.left_behind)
            self.report.violation = Violation("no process is left behind", self._unix(), text)
        return self.report

    # ---- the four phases ------------------------------------------------------------------------------------------------

    def _found(self) -> None:
        beside = f" and {self._options.hostile} hostile members" if self._options.hostile else ""
        self._say(
            f"founding a run of {self._options.peers} peers{beside} in {self._options.out}; full disk: {self.report.disk}"
        )
        self._testbed.found()
        self._history.started(COORDINATOR)
        self._coordinator_began = self._unix()
        self._observer = replace(open_observer(self._testbed.folder.state), timeout_s=0.5)
        for name in self._options.peer_ids:
            self._testbed.start(name)
            self._history.started(name)
        for name in self._options.hostile_ids:
            self._testbed.start(name)
        since = self._unix()
        self._until(lambda: self._all_in(since), self._options.begin_s, "the run begins")
        self._began = self._unix()
        self._say(f"all peers are in a commit after {self._began - since:.1f} s; {len(self.report.schedule)} faults follow")

    def _inject_faults(self) -> None:
        """Inject and repair faults as scheduled, until the time is up."""
        agenda: list[tuple[float, int, Fault, Incident | None]] = []
        for fault in self.report.schedule:
            heappush(agenda, (self._began + fault.at_s, fault.number, fault, None))
        end = self._began + (0.0 if self._options.kills else self._options.seconds)
        while agenda or self._unix() < end:
            while agenda and agenda[0][0] <= self._unix():
                _, number, fault, incident = heappop(agenda)
                if incident is None:
                    incident = self._inject(fault)
                    heappush(agenda, (incident.began + fault.lasts_s, number, fault, incident))
                else:
                    self._repair(incident)
            self._poll()

    def _wait_for_recovery(self) -> None:
        """Wait until all peers are in a commit again."""
        since = self._unix()
        self._say("all faults are repaired; every peer must be in a commit again")
        bounds = self._options.bounds
        self._until(lambda: self._all_in(since), bounds.return_s, "all peers are in a commit after the last repair")
        self._say(f"all peers are in a commit after {self._unix() - since:.1f} s")

    def _finish(self) -> None:
        ends = [self._testbed.finish(name) for name in (*self._options.hostile_ids, *self._options.peer_ids)]
        self._read_status()
        ends.append(self._testbed.finish(COORDINATOR))
        self.report.ended = {end.name: end.returncode for end in ends}
        self._read_lines()
        for end in ends:
            if end.returncode != (_TORCHRUN_STOPPED if end.name == SHARDED else 0):
                self._fail(Violation("a process that is asked to stop exits as promised", self._unix(), str(end), (end.name,)))
        self._read_dead_folder()
        self._check(broken_at_end(self._history, self._options.bounds, self._unix()))

    def _fork(self) -> None:
        """Let two coordinators serve the run that has just been stopped, and end the processes that are left."""
        assert self._observer is not None
        fork = Fork(self._options, self._testbed, self._observer, self._fail, self._say, self._unix)
        self.report.fork = fork.result
        fork.run()

    # ---- steps of a phase -----------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> Incident:
        self._say(str(fault))
        self._poll()
        incident = Incident(fault, self._unix())
        self._history.incidents.append(incident)
        self._testbed.inject(fault)
        if fault.kind.kills:
            self._history.was_killed(fault.target)
        if fault.kind is Kind.KILL_COORDINATOR:
            self._read_dead_folder()
        return incident

    def _repair(self, incident: Incident) -> None:
        self._poll()
        if incident.fault.kind.kills:
            self._history.started(incident.fault.target)
        if incident.fault.kind is Kind.KILL_COORDINATOR:
            self._coordinator_began = self._unix()
        self._testbed.repair(incident.fault)
        incident.ended = self._unix()
        if incident.fault.kind is Kind.FULL_DISK and not self._testbed.running(COORDINATOR):
            self._start_again()

    def _start_again(self) -> None:
        """Start the coordinator, which ended on a full disk, once the disk has room; not one that is to stay dead for now."""
        if any(
            one.fault.kind in (Kind.FULL_DISK, Kind.KILL_COORDINATOR) and one.ended is None for one in self._history.incidents
        ):
            return  # the repair of that one starts it
        self._say("the coordinator could not start on the full disk; starting it again, as a supervisor would")
        self._history.started(COORDINATOR)
        self._coordinator_began = self._unix()
        self._testbed.start(COORDINATOR)

    def _read_dead_folder(self) -> None:
        try:
            self._history.recovered.append(self._testbed.read_folder())
        except EditError as error:
            self._fail(Violation("no commit is lost", self._unix(), str(error), (COORDINATOR,)))
        self._check(journal_differs(self._history, self._journalled(), self._unix()))

    def _journalled(self) -> dict[int, int]:
        try:
            return self._testbed.journalled()
        except StorageError as error:
            self._fail(Violation("no commit is lost", self._unix(), str(error), (COORDINATOR,)))

    def _until(self, done: Callable[[], bool], bound_s: float, what: str) -> None:
        give_up = self._unix() + bound_s
        while not done():
            if self._unix() > give_up:
                absent = tuple(
                    name for name in self._options.peer_ids if self._history.commit_after(give_up - bound_s, name) is None
                )
                text = f"not within {bound_s:.0f} s; missing: {', '.join(absent) or 'none'}"
                self._fail(Violation(what, give_up, text, (*absent, COORDINATOR)))
            self._poll()

    def _all_in(self, since: float) -> bool:
        return all(self._history.commit_after(since, name) is not None for name in self._options.peer_ids)

    def _poll(self) -> None:
        """Read new lines; every half second also ask for the status, measure the memory and check the rules; then wait."""
        self._read_lines()
        for end in self._testbed.unexpected_ends():
            if end.name == COORDINATOR and self._could_not_start():
                self._start_again()
                continue
            self._fail(Violation("no process ends by itself", self._unix(), str(end), (end.name, COORDINATOR)))
        if self._unix() - self._last_slow_poll >= _SLOW_POLL_S:
            self._last_slow_poll = self._unix()
            self._read_status()
            if (size := self._testbed.resident_bytes()) is not None and self._began:
                self._history.memory.append(Memory(self._unix(), size))
            self._history.files.append(Files(self._unix(), self._testbed.log_bytes(), self._testbed.state_bytes()))
            self._check(broken(self._history, self._options.bounds, self._unix()))
        time.sleep(_POLL_S)

    def _could_not_start(self) -> bool:
        return may_not_start(self._history.incidents, self._coordinator_began) and not self._testbed.served()

    def _read_lines(self) -> None:
        for name, lines in self._lines.items():
            for line in lines.read():
                self._history.take(name, line)

    def _read_status(self) -> None:
        """Ask the coordinator for its status, as an observer over the network."""
        assert self._observer is not None
        status = self._observer.status()
        if status is None or not status.digest:
            return
        self._history.answered = self._unix()
        if status.outer_step < self._status_step:
            text = f"the coordinator is at outer step {status.outer_step}, and was at {self._status_step}"
            self._fail(Violation("the outer step never decreases", self._unix(), text, (COORDINATOR,)))
        if status.tokens < self._history.tokens:
            text = f"{status.tokens} tokens are merged, and before there were {self._history.tokens}"
            self._fail(Violation("what is merged stays merged", self._unix(), text, (COORDINATOR,)))
        self._status_step, self._history.tokens = status.outer_step, status.tokens
        self._history.digest_reported(COORDINATOR, self._unix(), status.outer_step, status.digest)

    def _check(self, violations: Iterable[Violation]) -> None:
        if (first := next(iter(violations), None)) is not None:
            self._fail(first)

    def _fail(self, violation: Violation) -> NoReturn:
        self.report.violation = violation
        raise RuleBroken(str(violation))

    def _keep_evidence(self) -> None:
        """Keep the last lines of the logs, before the processes are ended."""
        violation = self.report.violation
        assert violation is not None
        for name in dict.fromkeys((*violation.who, COORDINATOR)):
            self.report.evidence[name] = self._testbed.last_lines(name, _LOG_LINES)

    def _close_observer(self) -> None:
        if self._observer is not None:
            self._observer.close()
