"""One chaos run from its founding to its end: does what is due, looks, checks, and stops at the first broken rule.

Owns: the order and the times. Must not know: how harm is done (`site`), what is wrong (`invariants`), how results are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NoReturn

from edit.errors import EditError, StorageError
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.history import Blow, History, Memory
from edit.lab.chaos.invariants import Violation, broken, broken_at_end, journal_differs, may_not_start
from edit.lab.chaos.options import SHARDED, ChaosOptions
from edit.lab.chaos.site import Site
from edit.lab.observer import Observer, open_observer
from edit.lab.processes import COORDINATOR
from edit.lab.tail import JsonLines

__all__ = ["Broken", "Chaos", "Report"]

_LOOK_S = 0.1
_SLOW_LOOK_S = 0.5  # status, memory, rules
_LOG_LINES = 25
_TORCHRUN_TOLD = 1  # the exit code of a torchrun that was told to stop, whatever its ranks said


class Broken(EditError):
    """A rule was broken: the message is what a person needs to see of it."""

    exit_code = 1


@dataclass(slots=True)
class Report:
    """What a chaos run leaves. seconds: of chaos; ended: exit codes by name; evidence: last lines of logs, by name."""

    options: ChaosOptions
    schedule: tuple[Fault, ...]
    history: History
    disk: str
    seconds: float = 0.0
    violation: Violation | None = None
    ended: dict[str, int] = field(default_factory=dict)
    evidence: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Chaos:
    """Call `run` once. say: told in a line what happens; unix: seconds since 1970."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None], unix: Callable[[], float] = time.time) -> None:
        self._options, self._say, self._unix = options, say, unix
        self._site = Site(options)
        self._history = History(options.peer_ids, options.step_tokens)
        self.report = Report(options, options.schedule(), self._history, self._site.disk.kind)
        names = (COORDINATOR, *options.peer_ids)
        self._lines = {name: JsonLines(self._site.metrics(name)) for name in names}
        self._observer: Observer | None = None
        self._last_look = self._began = 0.0
        self._status_step = 0

    def run(self) -> Report:
        """To the end or to the first broken rule, which the report then has. Raises ChildDied when the run cannot begin."""
        try:
            with ExitStack() as stack:
                stack.enter_context(self._site)
                try:
                    self._found()
                    stack.callback(self._hang_up)
                    self._blows()
                    self._calm()
                    self._finish()
                except Broken:
                    self._keep_evidence()
        finally:
            self.report.seconds = self._unix() - self._began if self._began else 0.0
        if self._site.left_behind and self.report.violation is None:
            text = "; ".join(self._site.left_behind)
            self.report.violation = Violation("no process is left behind", self._unix(), text)
        return self.report

    # ---- the four acts --------------------------------------------------------------------------------------------------

    def _found(self) -> None:
        self._say(f"founding a run of {self._options.peers} peers in {self._options.out}; full disk: {self.report.disk}")
        self._site.found()
        self._history.started(COORDINATOR)
        self._observer = replace(open_observer(self._site.folder.state), timeout_s=0.5)
        for name in self._options.peer_ids:
            self._site.start(name)
            self._history.started(name)
        since = self._unix()
        self._until(lambda: self._all_in(since), self._options.begin_s, "the run begins")
        self._began = self._unix()
        self._say(f"all peers are in a commit after {self._began - since:.1f} s; {len(self.report.schedule)} faults follow")

    def _blows(self) -> None:
        """Strike and repair as scheduled, until the time is up."""
        agenda: list[tuple[float, int, Fault, Blow | None]] = []
        for fault in self.report.schedule:
            heappush(agenda, (self._began + fault.at_s, fault.number, fault, None))
        end = self._began + self._options.seconds
        while agenda or self._unix() < end:
            while agenda and agenda[0][0] <= self._unix():
                _, number, fault, blow = heappop(agenda)
                if blow is None:
                    blow = self._strike(fault)
                    heappush(agenda, (blow.began + fault.lasts_s, number, fault, blow))
                else:
                    self._repair(blow)
            self._look()

    def _calm(self) -> None:
        """With everything repaired, all peers are in a commit again, and agree."""
        since = self._unix()
        self._say("all is repaired; every peer must be in a commit again")
        bounds = self._options.bounds
        self._until(lambda: self._all_in(since), bounds.return_s, "all peers are in a commit after the last repair")
        self._say(f"all peers are in a commit after {self._unix() - since:.1f} s")

    def _finish(self) -> None:
        ends = [self._site.finish(name) for name in self._options.peer_ids]
        self._ask()
        ends.append(self._site.finish(COORDINATOR))
        self.report.ended = {end.name: end.returncode for end in ends}
        self._read()
        for end in ends:
            if end.returncode != (_TORCHRUN_TOLD if end.name == SHARDED else 0):
                self._fail(Violation("whoever is told to stop exits as promised", self._unix(), str(end), (end.name,)))
        self._check(journal_differs(self._history, self._journalled(), self._unix()))
        self._check(broken_at_end(self._history, self._options.bounds, self._unix()))

    # ---- what they are made of --------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> Blow:
        self._say(str(fault))
        self._look()
        blow = Blow(fault, self._unix())
        self._history.blows.append(blow)
        self._site.strike(fault)
        if fault.kind.kills:
            self._history.was_killed(fault.target)
        if fault.kind is Kind.KILL_COORDINATOR:
            self._folder_holds()
        return blow

    def _repair(self, blow: Blow) -> None:
        self._look()
        if blow.fault.kind.kills:
            self._history.started(blow.fault.target)
        self._site.repair(blow.fault)
        blow.ended = self._unix()
        dead = any(one.fault.kind is Kind.KILL_COORDINATOR and one.ended is None for one in self._history.blows)
        if blow.fault.kind is Kind.FULL_DISK and not dead and not self._site.running(COORDINATOR):
            self._say("the coordinator could not start on the full disk; starting it again, as a supervisor would")
            self._history.started(COORDINATOR)
            self._site.start(COORDINATOR)

    def _folder_holds(self) -> None:
        try:
            self._history.recovered.append(self._site.folder_holds())
        except EditError as error:
            self._fail(Violation("no commit is lost", self._unix(), str(error), (COORDINATOR,)))

    def _journalled(self) -> dict[int, int]:
        try:
            return self._site.journalled()
        except StorageError as error:
            self._fail(Violation("no commit is lost", self._unix(), str(error), (COORDINATOR,)))

    def _until(self, done: Callable[[], bool], bound_s: float, what: str) -> None:
        give_up = self._unix() + bound_s
        while not done():
            if self._unix() > give_up:
                absent = tuple(
                    name for name in self._options.peer_ids if self._history.commit_after(give_up - bound_s, name) is None
                )
                text = f"not within {bound_s:.0f} s; missing: {', '.join(absent) or 'nobody'}"
                self._fail(Violation(what, give_up, text, (*absent, COORDINATOR)))
            self._look()

    def _all_in(self, since: float) -> bool:
        return all(self._history.commit_after(since, name) is not None for name in self._options.peer_ids)

    def _look(self) -> None:
        """Read what is new; now and then ask, measure and check as well; then wait a moment."""
        self._read()
        for end in self._site.surprises():
            if end.name == COORDINATOR and may_not_start(self._history.blows) and not self._site.served():
                continue
            self._fail(Violation("nobody ends by himself", self._unix(), str(end), (end.name, COORDINATOR)))
        if self._unix() - self._last_look >= _SLOW_LOOK_S:
            self._last_look = self._unix()
            self._ask()
            if (size := self._site.resident_bytes()) is not None and self._began:
                self._history.memory.append(Memory(self._unix(), size))
            self._check(broken(self._history, self._options.bounds, self._unix()))
        time.sleep(_LOOK_S)

    def _read(self) -> None:
        for name, lines in self._lines.items():
            for line in lines.read():
                self._history.take(name, line)

    def _ask(self) -> None:
        """As an observer over the network: what the coordinator says of itself."""
        assert self._observer is not None
        status = self._observer.status()
        if status is None or not status.digest:
            return
        if status.outer_step < self._status_step:
            text = f"the coordinator is at outer step {status.outer_step}, and was at {self._status_step}"
            self._fail(Violation("the outer step never decreases", self._unix(), text, (COORDINATOR,)))
        if status.tokens < self._history.tokens:
            text = f"{status.tokens} tokens are merged, and {self._history.tokens} were"
            self._fail(Violation("what is merged stays merged", self._unix(), text, (COORDINATOR,)))
        self._status_step, self._history.tokens = status.outer_step, status.tokens
        self._history.told(COORDINATOR, self._unix(), status.outer_step, status.digest)

    def _check(self, violations: Iterable[Violation]) -> None:
        if (first := next(iter(violations), None)) is not None:
            self._fail(first)

    def _fail(self, violation: Violation) -> NoReturn:
        self.report.violation = violation
        raise Broken(str(violation))

    def _keep_evidence(self) -> None:
        """Before everything is ended: what the logs said last."""
        violation = self.report.violation
        assert violation is not None
        for name in dict.fromkeys((*violation.who, COORDINATOR)):
            self.report.evidence[name] = self._site.last_lines(name, _LOG_LINES)

    def _hang_up(self) -> None:
        if self._observer is not None:
            self._observer.close()
