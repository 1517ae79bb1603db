"""`edit-lab chaos --exact`: one run twice, left alone and then under faults; both must end with the same bits.

The run has `sync.strict`, and every peer is needed in each outer step. What it trains with is drawn from the seed: the mode of
synchronization, codecs, optimizers, groups. Compared are the digest after each outer step, the outer state that the coordinator
has at the end, and each peer's last checkpoint: parameters, moments, residuals, random numbers, position in the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.errors import EditError
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.invariants import Violation
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.testbed import Testbed
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.processes import COORDINATOR
from edit.lab.tail import JsonLines
from peers.training.checkpoint_files import last_checkpoint

__all__ = ["Ending", "ExactChaos", "ExactReport", "as_json", "differences", "tables"]

ALONE, DISTURBED = "alone", "disturbed"  # the folders of the two runs

_POLL_S = 0.1
_LOG_LINES = 25
_MAX_NAMED = 4  # differences that are named


class _Broken(EditError):
    """The two runs differ, or one does not come to its end: `ExactReport.violation` says how."""


@dataclass(slots=True)
class Ending:
    """What is left of a run that has ended."""

    digests: dict[int, str] = field(default_factory=dict)  # by outer step, of the coordinator and of all peers
    outer: dict[str, Tensor] = field(default_factory=dict)  # the coordinator's outer state, by name
    peers: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = field(default_factory=dict)  # last checkpoints
    seconds: float = 0.0


@dataclass(slots=True)
class ExactReport:
    """The result of both runs."""

    options: ChaosOptions
    schedule: tuple[Fault, ...]
    incidents: list[Fault] = field(default_factory=list)  # those that were injected
    alone: Ending = field(default_factory=Ending)
    disturbed: Ending = field(default_factory=Ending)
    violation: Violation | None = None
    seconds: float = 0.0  # of both
    evidence: dict[str, tuple[str, ...]] = field(default_factory=dict)  # last lines of logs by name


class ExactChaos:
    """Both runs; call `run` once. say: prints a line of progress; unix: the clock, seconds since 1970."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None], unix: Callable[[], float] = time.time) -> None:
        self._options, self._say, self._unix = options, say, unix
        self.report = ExactReport(options, options.schedule())

    def run(self) -> ExactReport:
        """Make both runs, compare them, and return the report. Raises ChildDied when one cannot begin."""
        with DemoFolder(self._options.out, "chaos").claim():
            self._run()
        return self.report

    def _run(self) -> None:
        began = self._unix()
        try:
            self._make(ALONE, (), self.report.alone)
            self._make(DISTURBED, self.report.schedule, self.report.disturbed)
            found = list(differences(self.report.alone, self.report.disturbed))
            if found:
                more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
                self._fail("both runs end with the same bits", "; ".join(found[:_MAX_NAMED]) + more)
        except _Broken:
            pass
        finally:
            self.report.seconds = self._unix() - began

    def _make(self, name: str, schedule: tuple[Fault, ...], ending: Ending) -> None:
        """Make one run in a folder of its own, and read what it ends with."""
        testbed = Testbed(replace(self._options, out=self._options.out / name))
        with ExitStack() as stack:
            stack.enter_context(testbed)
            self._say(f"{name}: a run of {self._options.peers} peers of about {self._options.outer_steps} outer steps")
            testbed.found()
            began = self._unix()
            for peer in self._options.peer_ids:
                testbed.start(peer)
            try:
                self._until_all_have_ended(testbed, schedule, began)
                ending.seconds = self._unix() - began
                self._say(f"{name}: every peer has ended after {ending.seconds:.1f} s")
                self._stop(testbed)
                self._read(testbed, ending)
            except _Broken:
                who = self.report.violation.who if self.report.violation is not None else ()
                known = (COORDINATOR, *self._options.peer_ids)
                for each in dict.fromkeys((*who, COORDINATOR)):
                    if each in known:
                        self.report.evidence[each] = testbed.last_lines(each, _LOG_LINES)
                raise
        if testbed.left_behind:
            self._fail("no process is left behind", "; ".join(testbed.left_behind))

    def _until_all_have_ended(self, testbed: Testbed, schedule: tuple[Fault, ...], began: float) -> None:
        """Inject and repair faults as scheduled from the first commit on, until each peer has ended with its run."""
        agenda: list[tuple[float, int, Fault, bool]] = []  # when, and whether it is injected already
        lines, committed = JsonLines(testbed.metrics(COORDINATOR)), False
        there = set(self._options.peer_ids)  # peers that have not ended
        fallen = False  # whether a full disk ended the coordinator
        give_up = began + self._options.ends_within_s(self.report.alone.seconds)
        while there:
            if not committed and any(map(_is_commit, lines.read())):
                committed = True
                for fault in schedule:
                    heappush(agenda, (self._unix() + fault.at_s, fault.number, fault, False))
            for end in testbed.unexpected_ends():
                if end.name == COORDINATOR and self._full(agenda):
                    fallen = True
                elif end.name not in there or end.returncode != 0:
                    self._fail("no process ends before the run does", str(end), end.name)
                else:
                    there.discard(end.name)
            while agenda and agenda[0][0] <= self._unix():
                _, number, fault, injected = heappop(agenda)
                if injected:
                    testbed.repair(fault)
                elif fault.target == COORDINATOR or fault.target in there:
                    self._say(str(fault))
                    testbed.inject(fault)
                    self.report.incidents.append(fault)
                    heappush(agenda, (self._unix() + fault.lasts_s, number, fault, True))
            if fallen and not self._full(agenda):
                testbed.start(COORDINATOR)
                fallen = False
            if self._unix() > give_up:
                self._fail("the run comes to its end", f"not within {give_up - began:.0f} s", *sorted(there))
            time.sleep(_POLL_S)
        for _, _, fault, injected in agenda:
            if injected and fault.kind is not Kind.KILL_COORDINATOR:
                testbed.repair(fault)

    @staticmethod
    def _full(agenda: list[tuple[float, int, Fault, bool]]) -> bool:
        return any(injected and fault.kind is Kind.FULL_DISK for _, _, fault, injected in agenda)

    def _stop(self, testbed: Testbed) -> None:
        serves = testbed.running(COORDINATOR) and testbed.served()
        end = testbed.finish(COORDINATOR)
        if serves and end.returncode != 0:
            self._fail("a process that is asked to stop exits as promised", str(end), COORDINATOR)

    def _read(self, testbed: Testbed, ending: Ending) -> None:
        try:
            for name in (COORDINATOR, *self._options.peer_ids):
                for line in JsonLines(testbed.metrics(name)).read():
                    self._digest(ending, name, line)
            outer = load_outer(StateFolder(testbed.folder.state))
            ending.outer = {name: tensor.clone() for name, tensor in outer.to_tensors().items()}  # not mapped from the disk
            ending.digests.setdefault(outer.outer_step, outer.digest)
            for name in self._options.peer_ids:
                ending.peers[name] = _last(testbed.folder.home(name) / "checkpoints")
        except _Broken:
            raise
        except EditError as error:
            self._fail("what is on disk can be read", str(error))

    def _digest(self, ending: Ending, name: str, line: Mapping[str, Any]) -> None:
        """Take a line of a metrics file: of a round that was committed, or of an outer step that a peer has taken."""
        if _is_commit(line) or (line.get("kind") == "outer" and name != COORDINATOR):
            step, digest = int(line["outer_step"]), str(line["digest"])
            if ending.digests.setdefault(step, digest) != digest:
                self._fail("all digests of an outer step are equal", f"{name} has {digest[:12]} at outer step {step}", name)

    def _fail(self, rule: str, text: str, *who: str) -> NoReturn:
        self.report.violation = Violation(rule, self._unix(), text, who)
        raise _Broken(str(self.report.violation))


def _is_commit(line: Mapping[str, Any]) -> bool:
    return line.get("kind") == "round" and bool(line["committed"])


def _last(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the scalars and tensors of the newest checkpoint in a peer's folder. Raises StorageError, FormatError."""
    saved = last_checkpoint(folder)
    files = sorted(saved.path.glob("*.safetensors"))
    return saved.scalars, {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def differences(one: Ending, other: Ending) -> Iterator[str]:
    """Yield how the endings of two runs differ, in words; nothing when each bit is the same."""
    for step in sorted(one.digests.keys() ^ other.digests.keys()):
        yield f"outer step {step} is in one of the two runs only"
        break
    for step in sorted(one.digests.keys() & other.digests.keys()):
        if one.digests[step] != other.digests[step]:
            yield f"outer step {step} has the digest {other.digests[step][:12]}, not {one.digests[step][:12]}"
            break  # all that follow do
    yield from (f"the coordinator's {text}" for text in _tensors(one.outer, other.outer))
    for peer, (scalars, tensors) in one.peers.items():
        theirs, their_tensors = other.peers[peer]
        yield from (f"{peer}'s {text}" for text in _scalars(scalars, theirs, ""))
        yield from (f"{peer}'s {text}" for text in _tensors(tensors, their_tensors))


def _tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(one.keys() ^ other.keys()):
        yield f"{name} is in one of the two runs only"
    for name in sorted(one.keys() & other.keys()):
        mine, theirs = one[name], other[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            yield f"{name} has another shape or dtype"
        elif not torch.equal(mine.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)):
            yield f"{name} has other bits"


def _scalars(one: object, other: object, name: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() ^ other.keys()):
            yield f"{name}.{key}".lstrip(".") + " is in one of the two runs only"
        for key in sorted(one.keys() & other.keys()):
            yield from _scalars(one[key], other[key], f"{name}.{key}".lstrip("."))
    elif repr(one) != repr(other):  # NaN is not equal to itself, and -0.0 is to 0.0
        yield f"{name} is {other}, not {one}"


def as_json(report: ExactReport) -> dict[str, Any]:
    """Return flat, stable names for scripts; times in seconds."""
    settings = report.options.run()
    kinds = [fault.kind.name.lower() for fault in report.incidents]
    return {
        "seed": report.options.seed,
        "seconds": round(report.seconds, 1),
        "peers": report.options.peers,
        "settings": {name: settings[name] for name in ("sync", "codec", "outer", "inner", "penalty")},
        "outer_steps": max(report.alone.digests, default=0),
        "alone_s": round(report.alone.seconds, 1),
        "disturbed_s": round(report.disturbed.seconds, 1),
        "faults": {kind: kinds.count(kind) for kind in sorted({*kinds})},
        "schedule": [str(fault) for fault in report.schedule],
        "digests_compared": len(report.alone.digests.keys() & report.disturbed.digests.keys()),
        "tensors_compared": len(report.disturbed.outer) + sum(len(tensors) for _, tensors in report.disturbed.peers.values()),
        "violation": str(report.violation) if report.violation is not None else None,
    }


def tables(report: ExactReport) -> RenderableType:
    """Return the same as `as_json`, as tables."""
    values = as_json(report)
    faults = Table("fault", "count", box=None, header_style="dim", title_justify="left")
    for kind in Kind:
        if count := values["faults"].get(kind.name.lower()):
            faults.add_row(str(kind), str(count))
    facts = Table(box=None, show_header=False)
    settings = (f"{section}.{key} = {value}" for section, of in values["settings"].items() for key, value in of.items())
    for name, text in (
        ("settings", ", ".join(settings)),
        (
            "outer steps",
            f"{values['outer_steps']}, in {values['alone_s']:.0f} s alone, {values['disturbed_s']:.0f} s disturbed",
        ),
        ("digests compared", f"{values['digests_compared']}"),
        ("tensors compared", f"{values['tensors_compared']}, of the outer state and of the peers' last checkpoints"),
        ("result", "the same bits" if report.violation is None else "see below"),
    ):
        facts.add_row(name, text)
    return Group(faults, "", facts)
