"""`edit-lab demo`: run a coordinator, or a swarm, peers and a lone peer as real processes, inject faults, measure, and write a
report.

The demo uses only what a user has: command lines, the daemons' files, and the operator's connection.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from rich.console import Console
from torch import Tensor

from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from aggregator.swarm.host_folder import Settings, identity_of
from aggregator.swarm.member_folder import MemberFolder
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.gpt import gpt_schema
from edit.fragments.schema import Schema
from edit.lab.demo.corpus import plan_corpus, standard_library, write_corpus
from edit.lab.demo.daemons import DemoDaemons, SwarmDaemons
from edit.lab.demo.evaluate import FINAL_BATCHES, Evaluator, Measurer, SnapshotSource
from edit.lab.demo.faults import FaultRunner, FaultSchedule
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import ATTACKS, DemoOptions, plan_faults, plan_run
from edit.lab.demo.recorder import LONE, Recorder
from edit.lab.demo.report import render_report, results_table
from edit.lab.demo.results import Agreement, Losses, Results, collect
from edit.lab.demo.swarm import SwarmRounds, changes
from edit.lab.observer import open_observer
from edit.lab.processes import Programs, Supervisor, terminated_as_interrupt
from edit.lab.run_toml import to_toml
from edit.lab.swarm_observer import SwarmObserver, part_on_disk
from edit.plain_text import json_text
from edit.records import Snapshot
from edit.view.display import Display, open_display
from edit.view.observations import Status, SwarmStatus
from edit.view.screen import Frame
from edit.view.state import RunState
from edit.view.units import bytes_text

__all__ = ["Demo", "Dependencies", "RunView", "run_demo"]

_LEAVE_S = 15.0  # how long peers may take to exit once the run has finished
_MEMBERS_LEAVE_S = 40.0  # the same in a swarm: hosts stay until all have the last outer step
_AWAY_POLLS = 5  # a member that has been away for so many polls is said to be
_SAMPLE_BYTES = 400
_LISTEN = "127.0.0.1:0"  # port 0: the coordinator chooses its ports, writes them to addresses.json and keeps them over restarts


class RunView(Protocol):
    """The connection to a coordinator, or to the hosts of a swarm."""

    def status(self) -> Status | None: ...

    def close(self) -> None: ...


class SwarmView(RunView, SnapshotSource, Protocol):
    """The connection to the hosts of a swarm."""


def committed_on_disk(state: Path) -> Snapshot:
    """Return what the coordinator of this folder has committed last. Raises ConfigError, StorageError."""
    outer = load_outer(StateFolder(state))
    return Snapshot(outer.outer_step, outer.digest, tuple(outer.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What the demo depends on outside itself; tests replace it."""

    programs: Programs = field(default_factory=Programs)
    connect: Callable[[Path], RunView] = open_observer
    connect_swarm: Callable[[Mapping[str, Path]], SwarmView] = SwarmObserver
    committed: Callable[[Path], Snapshot] = committed_on_disk
    evaluator: Callable[[RunConfig, Path], Evaluator] = Evaluator
    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    pause: Callable[[], None] = lambda: time.sleep(0.2)  # between two polls


def run_demo(options: DemoOptions, console: Console, dependencies: Dependencies | None = None) -> Results:
    """Run the whole demo, print and write its results. Raises ConfigError, ChildDied, and KeyboardInterrupt on Ctrl-C.

    Before it returns or raises, every process has ended and everything measured so far is on disk.
    """
    torch.set_num_threads(1)
    folder = DemoFolder(options.out)
    with folder.claim():
        return _run(Demo(options, folder, dependencies or Dependencies(), console), folder, console)


def _run(demo: Demo, folder: DemoFolder, console: Console) -> Results:
    """See `run_demo`."""
    with terminated_as_interrupt():
        try:
            with demo:
                demo.prepare()
                demo.start()
                demo.follow()
                demo.measure()
        except BaseException:
            demo.write()
            console.print(f"\nall processes have ended; partial results are in {folder.path}", soft_wrap=True, highlight=False)
            raise
    results = demo.write()
    console.print(results_table(results))
    console.print(f"\n{folder.report}\n{folder.results}", soft_wrap=True, highlight=False)
    return results


class Demo:
    """One demo: call `prepare`, `start`, `follow`, `measure`; `write` at any time. On exit it ends every process."""

    def __init__(self, options: DemoOptions, folder: DemoFolder, dependencies: Dependencies, console: Console) -> None:
        self._options, self._folder, self._dependencies = options, folder, dependencies
        self._plan = plan_faults(options)
        self._state = RunState(options.peer_ids, options.outer_steps, options.sync_every)
        rounds = SwarmRounds(options.parts) if options.swarm else None
        self._recorder = Recorder(self._state, folder.metrics, dependencies.unix, rounds)
        self._supervisor = Supervisor(folder.logs)
        daemons = SwarmDaemons if options.swarm else DemoDaemons
        self._daemons = daemons(dependencies.programs, self._supervisor, folder, options, self._plan, dependencies.pause)
        self._fault_runner = FaultRunner(FaultSchedule(self._plan), self._daemons, self._recorder, self._plan, rounds)
        self._display: Display = open_display(console, self._frame)
        self._open = ExitStack()
        self._started, self._ended = dependencies.unix(), 0.0
        self._losses: Losses | None = None
        self._sample = ""
        self._swarm: SwarmStatus | None = None  # as it was at the last poll
        self._away: dict[str, int] = {}  # for how many polls a member has been away
        self._agreement: Agreement | None = None

    def __enter__(self) -> Demo:
        for resource in (self._recorder, self._supervisor, self._display):
            self._open.enter_context(resource)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended = self._dependencies.unix()
        self._open.__exit__(kind, error, trace)

    def prepare(self) -> None:
        """Write the corpus and run.toml."""
        options = self._options
        groups = plan_corpus(standard_library(), options.peers, options.seed)
        write_corpus(groups, self._folder.data)
        self._folder.run_toml.write_text(to_toml(plan_run(options, self._plan, _LISTEN, _LISTEN)), encoding="utf-8")
        smallest = bytes_text(min(sum(file.size for file in group.train) for group in groups))
        held_out = bytes_text(sum(file.size for group in groups for file in group.held_out))
        self._announce(f"text: a different part of Python's standard library for each peer, {smallest}; held out {held_out}")

    def start(self) -> None:
        """Create the run, enrol the peers, start them and the lone peer."""
        self._daemons.found()
        if self._options.swarm:
            self._announce("peer-0 founds a swarm: its own certificate authority, and the only vote; it invites the others")
            for name, part in itertools.product(self._options.peer_ids, range(self._options.parts)):
                self._recorder.follow_part(name, part, MemberFolder(self._folder.home(name)).engine(part) / "metrics.jsonl")
        else:
            self._announce("the coordinator serves; every peer exchanges its single-use invitation for a certificate")
            self._recorder.follow("coordinator", self._folder.state / "metrics.jsonl")
        self._daemons.enrol()
        for name in self._options.peer_ids:
            self._recorder.follow(name, self._folder.home(name) / "metrics.jsonl")
            self._daemons.start(name)
        text = f"{self._options.peers} peers train over gRPC with mutual TLS{', no coordinator' if self._options.swarm else ''}"
        if self._options.alone:
            self._recorder.follow(LONE, self._folder.lone / "alone.jsonl")
            self._daemons.start(LONE)
            text += "; a lone peer trains on peer-0's text without exchange"
        self._announce(text)
        for name, attack in self._plan.attacks.items():
            self._recorder.event(f"{name} {ATTACKS[attack]}: in every round, with the norm of an honest peer", "fault")

    def follow(self) -> None:
        """Poll until the last outer step is committed, the lone peer is done and the peers have left."""
        evaluator = self._dependencies.evaluator(RunConfig.from_toml(self._folder.run_toml), self._folder.data / "validation")
        self._measurer = Measurer(evaluator, self._recorder, points=5 if self._options.quick else 12)
        self._run, self._theta = self._connect()
        self._open.callback(self._run.close)
        self._measurer.initial()
        while not self._finished:
            self._poll()
        leave_by = self._dependencies.monotonic() + (_MEMBERS_LEAVE_S if self._options.swarm else _LEAVE_S)
        while self._daemons.running(LONE) or (self._any_peer and self._dependencies.monotonic() < leave_by):
            self._poll()

    def _connect(self) -> tuple[RunView, SnapshotSource]:
        """Return what says how the run is, and what gives its outer parameters."""
        if not self._options.swarm:
            state = self._folder.state
            return self._dependencies.connect(state), _OnDisk(state, self._dependencies.committed)
        hosts = self._dependencies.connect_swarm({name: self._folder.home(name) for name in self._options.peer_ids})
        return hosts, hosts

    @property
    def _finished(self) -> bool:
        ended = (
            self._state.status is not None and self._state.status.swarm is not None and self._state.status.phase == "finished"
        )
        return ended or self._state.outer_step >= self._state.outer_steps

    @property
    def _any_peer(self) -> bool:
        return any(self._daemons.running(name) for name in self._options.peer_ids)

    def _poll(self) -> None:
        """Read new lines, inject due faults, ask for the status, measure, draw, wait."""
        self._recorder.poll()
        self._daemons.check(self._finished)
        if not self._finished:
            self._fault_runner.act(self._dependencies.monotonic())
        status = self._run.status()
        if status is not None:
            self._state.status = status
            self._fault_runner.observe(status)
            if status.swarm is not None:
                self._follow_members(status.swarm)
            self._measurer.track(self._theta)
        self._display.draw(self._state)
        self._dependencies.pause()

    def _follow_members(self, now: SwarmStatus) -> None:
        """Tell of what has changed among the members of a swarm."""
        self._fault_runner.look(self._options.parts)
        if not self._finished:
            for event in changes(self._swarm, now, self._dependencies.unix()):
                self._recorder.event(event.text, event.tone)
            self._away = {peer_id: self._away.get(peer_id, 0) + 1 for peer_id in now.away}
            for peer_id, polls in self._away.items():
                if polls == _AWAY_POLLS:
                    self._recorder.member(peer_id, "lost", now.away[peer_id])
        self._swarm = now

    def measure(self) -> None:
        """Measure the initial, lone and outer parameters on the same held-out text; write the checkpoint and a sample."""
        self._recorder.poll()
        self._recorder.rest()
        snapshot = self._compare_folders() if self._options.swarm else self._dependencies.committed(self._folder.state)
        self._announce("measuring the final losses on held-out text")
        batches = FINAL_BATCHES // 4 if self._options.quick else FINAL_BATCHES
        self._losses = self._measurer.final(snapshot, self._folder.lone / "model.safetensors", batches)
        self._measurer.evaluator.save(snapshot.fragments, self._folder.checkpoint)
        self._sample = self._measurer.evaluator.sample(snapshot.fragments, _SAMPLE_BYTES, self._options.seed)
        self._folder.sample.write_text(self._sample, encoding="utf-8")

    def _compare_folders(self) -> Snapshot:
        """End the members, and compare what lies in their folders. Return the outer parameters."""
        for name in self._options.peer_ids:
            self._daemons.end(name)
        found = {name: _Folder.read(self._folder.home(name)) for name in self._options.peer_ids}
        newest = max(found.values(), key=lambda each: each.said)
        unequal = [f"{name} {each.differs(newest)}" for name, each in found.items() if each.said != newest.said]
        self._agreement = Agreement(newest.outer_step, len(found), tuple(unequal))
        split = any(each.said != newest.said and each.outer_step == newest.outer_step for each in found.values())
        if unequal:
            self._recorder.event("; ".join(unequal), "bad" if split else "info")
        else:
            self._recorder.event(f"all {len(found)} members have ended, and have the same outer parameters on disk", "good")
        return newest.snapshot

    def write(self) -> Results:
        """Write results.json and report.html from what is known. Raises ConfigError when the folder cannot be written."""
        ended = self._ended or self._dependencies.unix()
        results = collect(
            self._state,
            run_id=self._run_id(),
            seed=self._options.seed,
            wall_s=ended - self._started,
            losses=self._losses,
            restart=self._fault_runner.restart,
            sample=self._sample,
            parameters=self._parameters(),
            takeovers=self._fault_runner.takeovers,
            agreement=self._agreement,
        )
        settings = self._folder.run_toml.read_text(encoding="utf-8") if self._folder.run_toml.exists() else ""
        try:
            self._folder.results.write_text(json_text(results.as_json(), indent=2) + "\n", encoding="utf-8")
            self._folder.report.write_text(render_report(self._state, results, settings, self._started), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._folder.path}: cannot be written ({error.strerror})") from error
        return results

    def _parameters(self) -> int:
        """Return the elements of the model that run.toml asks for; 0 before it is written."""
        if not self._folder.run_toml.exists():
            return 0
        model = RunConfig.from_toml(self._folder.run_toml).model
        return gpt_schema(layers=model.layers, width=model.width, vocabulary=model.vocabulary).numel

    def _run_id(self) -> str:
        folder = self._folder.home(self._options.peer_ids[0]) if self._options.swarm else self._folder.state
        path = folder / ("identity.json" if self._options.swarm else "run.json")
        return str(json.loads(path.read_text())["run_id"]) if path.exists() else "demo"

    def _announce(self, text: str) -> None:
        self._recorder.event(text)
        self._display.draw(self._state)

    def _frame(self, rounds: int, events: int) -> Frame:
        return Frame(
            run_id=self._run_id(),
            role_of=self._plan.role_of,
            swarm=self._options.swarm,
            started=self._started,
            now=self._dependencies.unix(),
            rounds=rounds,
            events=events,
        )


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """The outer parameters of a coordinator that runs: those of now, while readers of a run may share an older snapshot."""

    state: Path
    read: Callable[[Path], Snapshot]

    def snapshot(self, schema: Schema) -> Snapshot:
        """Return what was committed last."""
        return self.read(self.state)


@dataclass(frozen=True, slots=True)
class _Folder:
    """What lies in the folder of a swarm's member. said: outer step and digest of each part."""

    said: tuple[tuple[int, str], ...]
    fragments: tuple[Tensor, ...]

    @classmethod
    def read(cls, home: Path) -> _Folder:
        """Raises StorageError, ConfigError, GoneError for a part that is not there."""
        config, run_id = RunConfig.from_toml(home / "run.toml"), identity_of(home).run_id
        fragments: dict[int, Tensor] = {}
        said = []
        for part, (ids, _) in enumerate(Settings.load(home).schemas(config)):
            outer = part_on_disk(home, run_id, config, part).outer
            fragments |= zip(ids, outer.theta, strict=True)
            said.append((outer.outer_step, outer.digest[:12]))
        return cls(tuple(said), tuple(fragments[i] for i in sorted(fragments)))

    @property
    def outer_step(self) -> int:
        """The last one of all parts."""
        return min(step for step, _ in self.said)

    def differs(self, newest: _Folder) -> str:
        """Say how this differs from another member's, in a few words."""
        behind = f"is at outer step {self.outer_step}, not {newest.outer_step}"
        return behind if self.outer_step < newest.outer_step else "has other parameters"

    @property
    def snapshot(self) -> Snapshot:
        """The outer parameters."""
        return Snapshot(self.outer_step, "", self.fragments)
