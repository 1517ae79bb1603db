"""`edit-lab demo`: a coordinator and peers as real processes, faults on purpose, a lone peer to compare with, a report.

Owns: the order of things: prepare, enrol, start, follow, measure, write. Must not know: what the processes do inside; it speaks
to them by their command lines, their files and the operator's connection, as a user would.
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
from edit.lab.demo.evaluate import Evaluator
from edit.lab.demo.fault_runner import FaultRunner
from edit.lab.demo.fault_schedule import FaultSchedule
from edit.lab.demo.measurements import FINAL_BATCHES, Measurer
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import DemoOptions, plan_run, plan_show
from edit.lab.demo.recorder import LONE, Recorder
from edit.lab.demo.report import render_report
from edit.lab.demo.results import Losses, Results, collect
from edit.lab.demo.screen import Frame
from edit.lab.demo.state import DemoState
from edit.lab.demo.summary import results_table
from edit.lab.observations import Status
from edit.lab.observer import open_observer
from edit.lab.processes import Supervisor, terminated_as_interrupt
from edit.lab.programs import Programs
from edit.lab.run_toml import to_toml
from edit.lab.units import bytes_text
from edit.records import Snapshot

__all__ = ["Demo", "Outside", "RunView", "run_demo"]

_LEAVE_S = 15.0
_SAMPLE_BYTES = 400
_LISTEN = "127.0.0.1:0"  # the coordinator chooses, writes addresses.json and keeps its ports over restarts


class RunView(Protocol):
    """The operator's connection to the run."""

    def status(self) -> Status | None: ...

    def snapshot(self, schema: Schema) -> Snapshot | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a demo takes from the world around it; tests put their own in. pause: between two looks at everything."""

    programs: Programs = field(default_factory=Programs)
    connect: Callable[[Path], RunView] = open_observer
    evaluator: Callable[[RunConfig, Path], Evaluator] = Evaluator
    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    pause: Callable[[], None] = lambda: time.sleep(0.2)


def run_demo(options: DemoOptions, console: Console, outside: Outside | None = None) -> Results:
    """Run the whole demo; prints and writes its results. Raises ConfigError, ChildDied, and KeyboardInterrupt on Ctrl-C.

    However it ends, every process it started has ended before it returns or raises, and what was measured is on disk.
    """
    torch.set_num_threads(1)
    folder = DemoFolder(options.out)
    folder.claim()
    demo = Demo(options, folder, outside or Outside(), console)
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
    """One demo's life: `prepare`, `start`, `follow`, `measure`; `write` at any time. On leaving it no process is left."""

    def __init__(self, options: DemoOptions, folder: DemoFolder, outside: Outside, console: Console) -> None:
        self._options, self._folder, self._outside = options, folder, outside
        self._plan = plan_show(options)
        self._board = DemoState(options.peer_ids, options.outer_steps, options.sync_every)
        self._recorder = Recorder(self._board, folder.metrics, outside.unix)
        self._supervisor = Supervisor(folder.logs)
        self._crew = DemoDaemons(outside.programs, self._supervisor, folder, options, self._plan, outside.pause)
        self._director = FaultRunner(FaultSchedule(self._plan), self._crew, self._recorder)
        self._stage: Display = open_display(console, self._frame)
        self._open = ExitStack()
        self._started, self._ended = outside.unix(), 0.0
        self._losses: Losses | None = None
        self._sample = ""

    def __enter__(self) -> Demo:
        for part in (self._recorder, self._supervisor, self._stage):
            self._open.enter_context(part)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended = self._outside.unix()
        self._open.__exit__(kind, error, trace)

    def prepare(self) -> None:
        """Write the corpus and run.toml."""
        options = self._options
        corpus = write_corpus(plan_corpus(standard_library(), options.peers, options.seed), self._folder.data)
        self._folder.run_toml.write_text(to_toml(plan_run(options, self._plan, _LISTEN, _LISTEN)), encoding="utf-8")
        smallest = bytes_text(min(sum(file.size for file in group.train) for group in corpus.groups))
        held_out = bytes_text(corpus.validation_bytes)
        self._say(f"text: another part of Python's standard library for each peer, {smallest}; held out {held_out}")

    def start(self) -> None:
        """Found the run, enrol the peers, start them and the lone one."""
        self._crew.found()
        self._say("the coordinator serves; every peer redeems its single-use invitation for a certificate")
        self._crew.enrol()
        self._recorder.follow("coordinator", self._folder.state / "metrics.jsonl")
        self._recorder.follow(LONE, self._folder.lone / "alone.jsonl")
        for name in self._options.peer_ids:
            self._recorder.follow(name, self._folder.home(name) / "metrics.jsonl")
        for name in (*self._options.peer_ids, LONE):
            self._crew.start(name)
        self._say(
            f"{self._options.peers} peers train over gRPC with mutual TLS; beside them, peer-0's text is trained on alone"
        )

    def follow(self) -> None:
        """Until the last outer step is committed, the lone peer is done and the peers have left."""
        evaluator = self._outside.evaluator(RunConfig.from_toml(self._folder.run_toml), self._folder.data / "validation")
        self._measurer = Measurer(evaluator, self._recorder, points=5 if self._options.quick else 12)
        self._run = self._outside.connect(self._folder.state)
        self._open.callback(self._run.close)
        self._measurer.initial()
        while not self._finished:
            self._look()
        leave_by = self._outside.monotonic() + _LEAVE_S
        while self._crew.running(LONE) or (self._any_peer and self._outside.monotonic() < leave_by):
            self._look()

    @property
    def _finished(self) -> bool:
        return self._board.outer_step >= self._board.outer_steps

    @property
    def _any_peer(self) -> bool:
        return any(self._crew.running(name) for name in self._options.peer_ids)

    def _look(self) -> None:
        """One turn: read, act, ask, measure, draw, wait."""
        self._recorder.poll()
        self._crew.check(self._finished)
        if not self._finished:
            self._director.act(self._outside.monotonic())
        status = self._run.status()
        if status is not None:
            self._board.status = status
            self._director.seen(status)
            self._measurer.track(self._run)
        self._stage.draw(self._board)
        self._outside.pause()

    def measure(self) -> None:
        """Compare initial, lone and outer parameters on the same held-out text; write the checkpoint and a sample."""
        self._recorder.poll()
        self._say("measuring the final losses on held-out text")
        batches = FINAL_BATCHES // 4 if self._options.quick else FINAL_BATCHES
        self._losses, snapshot = self._measurer.final(self._run, self._folder.lone / "model.safetensors", batches)
        self._measurer.evaluator.save(snapshot.fragments, self._folder.checkpoint)
        self._sample = self._measurer.evaluator.sample(snapshot.fragments, _SAMPLE_BYTES, self._options.seed)
        self._folder.sample.write_text(self._sample, encoding="utf-8")

    def write(self) -> Results:
        """Write results.json and report.html from what is known. Raises ConfigError when the folder cannot be written."""
        ended = self._ended or self._outside.unix()
        results = collect(
            self._board,
            run_id=self._run_id(),
            seed=self._options.seed,
            wall_s=ended - self._started,
            losses=self._losses,
            restart=self._director.restart,
            sample=self._sample,
        )
        settings = self._folder.run_toml.read_text(encoding="utf-8") if self._folder.run_toml.exists() else ""
        try:
            self._folder.results.write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
            self._folder.report.write_text(render_report(self._board, results, settings, self._started), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._folder.path}: cannot be written ({error.strerror})") from error
        return results

    def _run_id(self) -> str:
        path = self._folder.state / "run.json"
        return str(json.loads(path.read_text())["run_id"]) if path.exists() else "demo"

    def _say(self, text: str) -> None:
        self._recorder.event(text)
        self._stage.draw(self._board)

    def _frame(self, rounds: int, events: int) -> Frame:
        return Frame(
            run_id=self._run_id(),
            show=self._plan,
            started=self._started,
            now=self._outside.unix(),
            rounds=rounds,
            events=events,
        )
