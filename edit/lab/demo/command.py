"""`edit-lab demo`: run a coordinator, peers and a lone peer as real processes, inject faults, measure, and write a report.

The demo uses only what a user has: command lines, the daemons' files, and the operator's connection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from rich.console import Console

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema
from edit.lab.demo.corpus import plan_corpus, standard_library, write_corpus
from edit.lab.demo.daemons import DemoDaemons
from edit.lab.demo.display import Display, open_display
from edit.lab.demo.evaluate import FINAL_BATCHES, Evaluator, Measurer
from edit.lab.demo.faults import FaultRunner, FaultSchedule
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import DemoOptions, plan_faults, plan_run
from edit.lab.demo.recorder import LONE, Recorder
from edit.lab.demo.report import render_report, results_table
from edit.lab.demo.results import Losses, Results, collect
from edit.lab.demo.screen import Frame
from edit.lab.demo.state import DemoState
from edit.lab.observations import Status
from edit.lab.observer import open_observer
from edit.lab.processes import Programs, Supervisor, terminated_as_interrupt
from edit.lab.run_toml import to_toml
from edit.lab.units import bytes_text
from edit.plain_text import json_text
from edit.records import Snapshot

__all__ = ["Demo", "Dependencies", "RunView", "run_demo"]

_LEAVE_S = 15.0  # how long peers may take to exit once the run has finished
_SAMPLE_BYTES = 400
_LISTEN = "127.0.0.1:0"  # port 0: the coordinator chooses its ports, writes them to addresses.json and keeps them over restarts


class RunView(Protocol):
    """The operator's connection to the run."""

    def status(self) -> Status | None: ...

    def snapshot(self, schema: Schema) -> Snapshot | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What the demo depends on outside itself; tests replace it."""

    programs: Programs = field(default_factory=Programs)
    connect: Callable[[Path], RunView] = open_observer
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
    folder.claim()
    demo = Demo(options, folder, dependencies or Dependencies(), console)
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
        self._state = DemoState(options.peer_ids, options.outer_steps, options.sync_every)
        self._recorder = Recorder(self._state, folder.metrics, dependencies.unix)
        self._supervisor = Supervisor(folder.logs)
        self._daemons = DemoDaemons(dependencies.programs, self._supervisor, folder, options, self._plan, dependencies.pause)
        self._fault_runner = FaultRunner(FaultSchedule(self._plan), self._daemons, self._recorder)
        self._display: Display = open_display(console, self._frame)
        self._open = ExitStack()
        self._started, self._ended = dependencies.unix(), 0.0
        self._losses: Losses | None = None
        self._sample = ""

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
        self._announce("the coordinator serves; every peer exchanges its single-use invitation for a certificate")
        self._daemons.enrol()
        self._recorder.follow("coordinator", self._folder.state / "metrics.jsonl")
        self._recorder.follow(LONE, self._folder.lone / "alone.jsonl")
        for name in self._options.peer_ids:
            self._recorder.follow(name, self._folder.home(name) / "metrics.jsonl")
        for name in (*self._options.peer_ids, LONE):
            self._daemons.start(name)
        self._announce(
            f"{self._options.peers} peers train over gRPC with mutual TLS; a lone peer trains on peer-0's text without exchange"
        )

    def follow(self) -> None:
        """Poll until the last outer step is committed, the lone peer is done and the peers have left."""
        evaluator = self._dependencies.evaluator(RunConfig.from_toml(self._folder.run_toml), self._folder.data / "validation")
        self._measurer = Measurer(evaluator, self._recorder, points=5 if self._options.quick else 12)
        self._run = self._dependencies.connect(self._folder.state)
        self._open.callback(self._run.close)
        self._measurer.initial()
        while not self._finished:
            self._poll()
        leave_by = self._dependencies.monotonic() + _LEAVE_S
        while self._daemons.running(LONE) or (self._any_peer and self._dependencies.monotonic() < leave_by):
            self._poll()

    @property
    def _finished(self) -> bool:
        return self._state.outer_step >= self._state.outer_steps

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
            self._measurer.track(self._run)
        self._display.draw(self._state)
        self._dependencies.pause()

    def measure(self) -> None:
        """Measure the initial, lone and outer parameters on the same held-out text; write the checkpoint and a sample."""
        self._recorder.poll()
        self._announce("measuring the final losses on held-out text")
        batches = FINAL_BATCHES // 4 if self._options.quick else FINAL_BATCHES
        self._losses, snapshot = self._measurer.final(self._run, self._folder.lone / "model.safetensors", batches)
        self._measurer.evaluator.save(snapshot.fragments, self._folder.checkpoint)
        self._sample = self._measurer.evaluator.sample(snapshot.fragments, _SAMPLE_BYTES, self._options.seed)
        self._folder.sample.write_text(self._sample, encoding="utf-8")

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
        )
        settings = self._folder.run_toml.read_text(encoding="utf-8") if self._folder.run_toml.exists() else ""
        try:
            self._folder.results.write_text(json_text(results.as_json(), indent=2) + "\n", encoding="utf-8")
            self._folder.report.write_text(render_report(self._state, results, settings, self._started), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._folder.path}: cannot be written ({error.strerror})") from error
        return results

    def _run_id(self) -> str:
        path = self._folder.state / "run.json"
        return str(json.loads(path.read_text())["run_id"]) if path.exists() else "demo"

    def _announce(self, text: str) -> None:
        self._recorder.event(text)
        self._display.draw(self._state)

    def _frame(self, rounds: int, events: int) -> Frame:
        return Frame(
            run_id=self._run_id(),
            faults=self._plan,
            started=self._started,
            now=self._dependencies.unix(),
            rounds=rounds,
            events=events,
        )
