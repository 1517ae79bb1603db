"""`edit-lab chaos --swarm`: members of a swarm on hosts of their own, under faults, checked from outside.

Each member is a peer with its host beside it, in a network namespace of its own behind a link: a cable is pulled, and members
are cut off, at the switch, so that nobody's connection breaks. The last member has no listening port that others reach. What is
checked is read from files alone: the peers' metrics, the owners', each member's council.json.

A fault is a generator: it yields while it waits. One whose members are not free, or that could cost what the swarm needs, is
skipped, and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from aggregator.swarm.admission import invite
from aggregator.swarm.host_folder import identity_of
from aggregator.swarm.member_folder import MemberFolder
from edit.config.run import RunConfig
from edit.council.record import Record, peer_of
from edit.errors import ConfigError, EditError, StorageError
from edit.lab import procfs
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.invariants import Violation
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.swarm_rules import SwarmHistory
from edit.lab.chaos.testbed import marked_processes
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.network import Network
from edit.lab.processes import ChildDied, Exit, Programs, Supervisor
from edit.lab.run_toml import to_toml
from edit.lab.swarm_observer import part_on_disk
from edit.lab.tail import JsonLines

__all__ = ["SwarmChaos", "SwarmReport", "as_json"]

_POLL_S = 0.1
_SLOW_POLL_S = 0.5  # records, memory, rules
_LOG_LINES = 25
_MBIT = 1000.0
_PATIENCE_S = 30.0
_ENDS_S = 120.0  # until all have ended once the run is drained
_EVICTED, _UNAVAILABLE = 4, 69  # exit codes
_TRY_AGAIN_S = 1.0


class _Broken(EditError):
    """A rule was broken: `SwarmReport.violation` says which."""


@dataclass(slots=True)
class SwarmReport:
    """The result of a chaos run of a swarm."""

    options: ChaosOptions
    schedule: tuple[Fault, ...]
    history: SwarmHistory
    seconds: float = 0.0
    violation: Violation | None = None
    done: Counter[Kind] = field(default_factory=Counter)  # faults that were injected
    skipped: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # exit codes by member
    evidence: dict[str, tuple[str, ...]] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)  # with their times


@dataclass(slots=True)
class _Member:
    """One place in the swarm. name: of the member that is there now; another one after an eviction."""

    slot: str
    name: str
    invitation: str = ""
    ends_with: tuple[int, ...] = ()  # the exit codes that are expected now; none: it is to run
    busy: bool = False  # with a fault


class SwarmChaos:
    """One run; call `run` once. say: prints a line of progress; unix: the clock."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None], unix: Callable[[], float] = time.time) -> None:
        self._options, self._say, self._unix, self._programs = options, say, unix, Programs()
        if not procfs.available():
            raise ConfigError("edit-lab chaos needs /proc, which this system does not have")
        self._history = SwarmHistory(options.peer_ids, options.parts)
        self.report = SwarmReport(options, options.schedule(), self._history)
        self._folder = DemoFolder(options.out, "chaos")
        self._supervisor = Supervisor(self._folder.logs, patience_s=_PATIENCE_S)
        self._network = Network(options.peer_ids, _MBIT)
        self._members = {slot: _Member(slot, slot) for slot in options.peer_ids}
        self._lines = {slot: JsonLines(self._metrics(slot)) for slot in options.peer_ids}
        self._owner_lines: dict[tuple[str, int], JsonLines] = {}
        self._last_slow_poll = self._began = 0.0
        self._behind_s = 0.0  # the schedule, because faults waited
        self._orders = 0

    def run(self) -> SwarmReport:
        """Run to the end, or to the first broken rule, and return the report. Raises ChildDied, ConfigError."""
        with ExitStack() as stack:
            stack.enter_context(self._folder.claim())
            left = stack.enter_context(marked_processes())
            stack.enter_context(self._network)
            stack.enter_context(self._supervisor)
            try:
                self._found()
                self._inject_faults()
                self._wait_for_recovery()
                self._finish()
            except _Broken:
                self._keep_evidence()
            self.report.seconds = self._unix() - self._began if self._began else 0.0
        if left and self.report.violation is None:
            self.report.violation = Violation("no process is left behind", self._unix(), "; ".join(left))
        return self.report

    # ---- processes ------------------------------------------------------------------------------------------------------

    @property
    def _founder(self) -> _Member:
        return next(iter(self._members.values()))

    def _home(self, member: _Member) -> Path:
        return self._folder.home(member.name)

    def _metrics(self, slot: str) -> Path:
        return self._folder.path / "metrics" / f"{slot}.jsonl"

    def _start(self, member: _Member) -> None:
        """Start a member, also again; without an invitation to a new folder it is invited first."""
        home, host = self._home(member), self._network.hosts[member.slot]
        reached = host.address if member.slot != self._options.peer_ids[-1] else ""
        argv = ["--home", str(home), "--data", str(self._folder.data / "text.py"), "--threads", "1", "--advertise", reached]
        argv += ["--metrics", str(self._metrics(member.slot)), "--throttle", str(self._options.throttle)]
        if member is self._founder:
            argv = ["start", str(self._folder.run_toml), "--name", member.name, "--invite", "", *argv]
        else:
            if not member.invitation:
                made = invite(self._home(self._founder), member.name, hours=24.0, now=time.time())
                member.invitation = made.encode()
            argv = ["join", member.invitation, *argv]
        member.ends_with = ()
        self._supervisor.start(member.slot, host.command((*self._programs.peer, "swarm", *argv)))
        self._history.started(member.slot)

    def _found(self) -> None:
        """Found the swarm, let all join, and wait until each has taken outer steps."""
        options = self._options
        self._say(f"founding a swarm of {options.peers} members in {options.out}; {options.peer_ids[-1]} accepts no connection")
        self._folder.run_toml.write_text(to_toml(options.run()), encoding="utf-8")
        self._folder.data.mkdir()
        (self._folder.data / "text.py").write_bytes(Path(argparse.__file__).read_bytes())
        self._start(self._founder)
        begun = self._unix()
        while not MemberFolder(self._home(self._founder)).port():
            for end in self._supervisor.ended():
                raise ChildDied(str(end))
            if self._unix() - begun > options.begin_s:
                raise ChildDied(f"the founder does not serve within {options.begin_s:.0f} s")
            time.sleep(_POLL_S)
        for member in [*self._members.values()][1:]:
            self._start(member)
        self._until(lambda: self._formed() and len(self._history.stepped) == options.peers, options.begin_s, "the run begins")
        self._began = self._unix()
        self._history.advanced = dict.fromkeys(range(options.parts), self._began)
        self._say(f"all vote and train after {self._began - begun:.1f} s; {len(self.report.schedule)} faults follow")

    def _record(self, member: _Member) -> Record | None:
        """Return the record in a member's folder; None where there is none."""
        try:
            saved = MemberFolder(self._home(member)).saved()
        except StorageError:  # it is being wiped
            return None
        return saved.record if saved is not None else None

    def _formed(self) -> bool:
        """Whether all members vote, by the newest record that is on any disk."""
        found = [record for member in self._members.values() if (record := self._record(member)) is not None]
        newest = max(found, key=lambda record: record.stamp, default=None)
        wanted = {member.name for member in self._members.values()}
        return newest is not None and not newest.before and {*map(peer_of, newest.voters)} == wanted

    # ---- phases ---------------------------------------------------------------------------------------------------------

    def _inject_faults(self) -> None:
        """Inject and repair faults as scheduled, until the time is up."""
        waiting, under_way = [*self.report.schedule], list[Iterator[None]]()
        end = self._began + self._options.seconds
        while waiting or under_way or self._unix() < end:
            while waiting and self._is_due(waiting[0]):
                if (effect := self._begin(waiting.pop(0))) is not None:
                    under_way.append(effect)
            under_way = [each for each in under_way if next(each, self) is not self]
            self._poll()

    def _is_due(self, fault: Fault) -> bool:
        """Whether it is time for a fault.

        One that costs what a voter has on disk waits, and all after it, until all members vote again: else there might be no
        quorum that has everything. It does not wait for ever; then it is skipped.
        """
        late_s = self._unix() - self._began - self._behind_s - fault.at_s
        if late_s < 0:
            return False
        if fault.kind in (Kind.WIPE, Kind.EVICT):
            if (self._history.out or not self._formed()) and late_s < self._options.swarm_bounds.return_s:
                return False
            self._behind_s += late_s
        return True

    def _begin(self, fault: Fault) -> Iterator[None] | None:
        """Return the fault as what is still to be done, or None when it is skipped."""
        members = self._hit(fault)
        needs_all = fault.kind in (Kind.WIPE, Kind.EVICT)  # each costs what one voter had on disk
        why = ""
        if busy := [member.slot for member in members if member.busy or self._supervisor.running(member.slot) is False]:
            why = f"{', '.join(busy)} is not back"
        elif needs_all and (self._history.out or not self._formed()):
            why = "not all members vote"
        if why:
            self.report.skipped += 1
            self._say(f"{fault}: skipped, {why}")
            return None
        self._say(str(fault))
        self.report.done[fault.kind] += 1
        self.report.incidents.append(f"{self._unix() - self._began:.1f} s: {fault}")
        return self._carry_out(fault, members)

    def _hit(self, fault: Fault) -> list[_Member]:
        if fault.kind is Kind.POWER_CUT:
            return [*self._members.values()]
        first = self._members[fault.target]
        if fault.kind is not Kind.PARTITION:
            return [first]
        slots = [*self._members]
        return [first, self._members[slots[(slots.index(fault.target) + 1) % len(slots)]]]

    def _carry_out(self, fault: Fault, members: list[_Member]) -> Iterator[None]:
        starting = members[0].slot in self._history.out  # a signal may come before it is ready for any
        for member in members:
            member.busy = True
            self._history.disturbed(member.slot, self._unix())
        try:
            yield from self._effect(fault, members, starting)
        finally:
            for member in members:
                member.busy = False
                self._history.repair(member.slot, self._unix())

    def _effect(self, fault: Fault, members: list[_Member], starting: bool) -> Iterator[None]:
        member, ends = members[0], self._unix() + fault.lasts_s
        match fault.kind:
            case Kind.KILL_PEER | Kind.POWER_CUT:
                for each in members:
                    self._kill(each)
                yield from self._wait_until(ends)
                for each in members:
                    self._start(each)
            case Kind.KILL_HOST:
                for pid in procfs.children(self._supervisor.pid(member.slot)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case Kind.STOP_PEER:
                self._supervisor.send_signal(member.slot, signal.SIGSTOP)
                yield from self._wait_until(ends)
                self._supervisor.send_signal(member.slot, signal.SIGCONT)
            case Kind.SLOW:
                self._network.limit(member.slot, fault.level / 1e6)
                yield from self._wait_until(ends)
                self._network.limit(member.slot, _MBIT)
            case Kind.CABLE | Kind.PARTITION:
                for each in members:
                    self._network.move(each.slot, "" if fault.kind is Kind.CABLE else "other")
                yield from self._wait_until(ends)
                for each in members:
                    self._network.move(each.slot)
            case Kind.LEAVE:
                yield from self._end(member, (0, -signal.SIGTERM) if starting else (0,))
                yield from self._wait_until(ends)
                self._start(member)
            case Kind.WIPE:
                self._kill(member)
                self._forget(member, member.name)
                yield from self._wait_until(ends)
                self._start(member)
            case Kind.EVICT:
                yield from self._evict(member)
                yield from self._wait_until(ends)
                name, _, number = member.name.partition("_")
                self._forget(member, f"{name}_{int(number or 1) + 1}")
                self._start(member)

    def _wait_until(self, t: float) -> Iterator[None]:
        while self._unix() < t:
            yield

    def _kill(self, member: _Member) -> None:
        member.ends_with = (-signal.SIGKILL,)
        self._read_lines()
        self._supervisor.kill(member.slot)
        self._read_lines()

    def _end(self, member: _Member, codes: tuple[int, ...]) -> Iterator[None]:
        """Ask a member to end, and wait until it has. Fails when it ends otherwise, or not at all."""
        member.ends_with, give_up = codes, self._unix() + _ENDS_S
        self._supervisor.signal_leader(member.slot, signal.SIGTERM)
        while self._supervisor.running(member.slot):
            self._check_ends(member, give_up)
            yield

    def _check_ends(self, member: _Member, give_up: float) -> None:
        if self._unix() > give_up:
            self._fail(Violation("processes end", give_up, f"{member.slot} has not within {_ENDS_S:.0f} s", (member.slot,)))

    def _evict(self, member: _Member) -> Iterator[None]:
        """Have the founder's folder evict a member, again until it is done, and wait until the member has ended."""
        member.ends_with, give_up = (_EVICTED,), self._unix() + _ENDS_S
        command = (*self._programs.peer, "swarm", "evict", member.name, "--home", str(self._home(self._founder)))
        while True:
            self._orders += 1
            order = f"order-{self._orders}"
            self._supervisor.start(order, self._network.hosts[self._founder.slot].command(command))
            while self._supervisor.running(order):
                self._check_ends(member, give_up)
                yield
            record = self._record(self._founder)
            if record is not None and member.name in record.evicted:
                break
            yield from self._wait_until(self._unix() + _TRY_AGAIN_S)
            self._check_ends(member, give_up)
        while self._supervisor.running(member.slot):
            self._check_ends(member, give_up)
            yield

    def _forget(self, member: _Member, name: str) -> None:
        """Put a member's folder away, as if its disk were lost, and begin anew under a name."""
        home = self._home(member)
        for part in range(self._options.parts):
            self._owner_lines.pop((member.slot, part), None)
        home.rename(home.with_name(f"{home.name}.lost-{secrets.token_hex(3)}"))
        member.name, member.invitation = name, ""

    def _wait_for_recovery(self) -> None:
        self._say("all faults are repaired; every member must take outer steps again")
        bounds = self._options.swarm_bounds
        since = self._unix()
        self._until(lambda: not self._history.out and self._formed(), 2 * bounds.return_s, "all members are back")
        self._say(f"all members vote and train after {self._unix() - since:.1f} s")

    def _finish(self) -> None:
        """Drain the run: all end by themselves, with one state on all disks, which has all that was reported."""
        self._say("draining: all members end by themselves")
        for member in self._members.values():
            member.ends_with = (0,)
        home = str(self._home(self._founder))
        host = self._network.hosts[self._founder.slot]
        self._supervisor.call({"drain": host.command((*self._programs.peer, "swarm", "drain", "--home", home))})
        give_up = self._unix() + _ENDS_S
        while running := [slot for slot in self._members if self._supervisor.running(slot)]:
            if self._unix() > give_up:
                text = f"{', '.join(running)} have not within {_ENDS_S:.0f} s of the drain"
                self._fail(Violation("processes end", give_up, text, tuple(running)))
            self._poll(late=False)
        self._poll(late=False)
        self._compare_folders()
        self._check(self._history.at_end(self._unix()))

    def _compare_folders(self) -> None:
        config, run_id = RunConfig.from_toml(self._folder.run_toml), identity_of(self._home(self._founder)).run_id
        for part in range(self._options.parts):
            found = {}
            for slot, member in self._members.items():
                try:
                    outer = part_on_disk(self._home(member), run_id, config, part).outer
                except EditError as error:
                    self._fail(Violation("no commit is lost", self._unix(), f"{slot}: {error}", (slot,)))
                found[slot] = (outer.outer_step, outer.digest[:12])
                if not all(bool(fragment.isfinite().all()) for fragment in outer.theta):
                    self._fail(Violation("theta stays finite", self._unix(), f"part {part} at {slot}", (slot,)))
            if len({*found.values()}) != 1 or min(found.values())[0] < self._history.reached.get(part, 0):
                text = f"part {part}: {found}; {self._history.reached.get(part)} was reported"
                self._fail(Violation("all folders have the same state", self._unix(), text, tuple(found)))

    # ---- looking --------------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], bound_s: float, what: str) -> None:
        give_up = self._unix() + bound_s
        while not done():
            if self._unix() > give_up:
                text = f"not within {bound_s:.0f} s; out: {', '.join(self._history.out) or 'nobody'}"
                self._fail(Violation(what, give_up, text, self._history.members))
            self._poll()

    def _poll(self, late: bool = True) -> None:
        """Read new lines; every half second also the records and sizes, and check the rules; then wait."""
        self._read_lines()
        for end in self._supervisor.ended():
            self._ended(end)
        if self._unix() - self._last_slow_poll >= _SLOW_POLL_S:
            self._last_slow_poll = self._unix()
            self._read_records()
            logs = sum(path.stat().st_size for path in self._folder.logs.glob("*.log"))
            self._check(self._history.sizes(self._unix(), logs, self._largest_host()))
            if late and self._began:
                self._check(self._history.late(self._options.swarm_bounds, self._unix()))
        time.sleep(_POLL_S)

    def _read_lines(self) -> None:
        for slot, lines in self._lines.items():
            for line in lines.read():
                self._check(self._history.peer_line(slot, line))
        for slot, member in self._members.items():
            for part in range(self._options.parts):
                path = MemberFolder(self._home(member)).engine(part) / "metrics.jsonl"
                for line in self._owner_lines.setdefault((slot, part), JsonLines(path)).read():
                    self._check(self._history.owner_line(slot, part, line))

    def _read_records(self) -> None:
        steps: dict[int, int] = {}
        for member in self._members.values():
            if (record := self._record(member)) is not None:
                for part, each in enumerate(record.parts):
                    steps[part] = max(steps.get(part, 0), each.outer_step)
        self._check(self._history.records(steps, self._unix()))

    def _largest_host(self) -> int:
        running = [self._supervisor.pid(slot) for slot in self._members if self._supervisor.running(slot)]
        hosts = [child for pid in running for child in procfs.children(pid)]
        return max((procfs.resident_bytes(pid) or 0 for pid in hosts), default=0)

    def _ended(self, end: Exit) -> None:
        """A process has ended: as it was told to; or because nobody let it in yet, then it is started again."""
        member = self._members.get(end.name)
        if member is None:
            return  # an order
        self.report.ended[end.name] = end.returncode
        if end.returncode in member.ends_with:
            return
        if end.returncode == _UNAVAILABLE and member.slot in self._history.out and not member.ends_with:
            self._say(f"{member.slot} found nobody to join; it is started again, as a supervisor would")
            self._start(member)
            return
        self._fail(Violation("no process ends by itself", self._unix(), str(end), (end.name,)))

    def _check(self, violations: Iterable[Violation]) -> None:
        if (first := next(iter(violations), None)) is not None:
            self._fail(first)

    def _fail(self, violation: Violation) -> NoReturn:
        self.report.violation = violation
        raise _Broken(str(violation))

    def _keep_evidence(self) -> None:
        violation = self.report.violation
        assert violation is not None
        for name in violation.who:
            self.report.evidence[name] = self._supervisor.last_lines(name, _LOG_LINES)


def as_json(report: SwarmReport) -> dict[str, Any]:
    """Return flat, stable names for scripts; times in seconds."""
    history = report.history
    return {
        "seed": report.options.seed,
        "seconds": round(report.seconds, 1),
        "members": report.options.peers,
        "violation": str(report.violation) if report.violation is not None else None,
        "faults": {kind.name.lower(): count for kind, count in sorted(report.done.items())},
        "skipped": report.skipped,
        "schedule": [str(fault) for fault in report.schedule],
        "injected": report.incidents,
        "outer_steps": dict(sorted(history.reached.items())),
        "aborted": history.aborted,
        "digests_compared": history.reports,
        "back_s": _spread(history.recovery_s),
        "longest_pause_s": round(max(history.pauses_s, default=0.0), 2),
        "host_bytes": {"median": sorted(history.memory)[len(history.memory) // 2], "max": max(history.memory)}
        if history.memory
        else None,
        "exit_codes": report.ended,
    }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"median": round(sorted(seconds)[len(seconds) // 2], 2), "max": round(max(seconds), 2)}
