"""What each attack of a hostile member or a stranger costs honest peers and the coordinator, beside the same run at rest.

    python benchmarks/attacks.py                       # about 10 minutes on 2 cores
    python benchmarks/attacks.py --only bad-bytes tokens --seconds 8 --rest 3

A real coordinator process, four honest peers that train a GPT of 1.2M parameters, a hostile member, and a probe: a process with
a peer's certificate that asks for the description of the snapshot every 20 ms and for the last update every 200 ms, and keeps
how long each answer took. `edit/lab/hostile/catalogue.py` has what each attack does. First a hostile founder is there
before anybody else; then the run is left alone, attacked in each way in turn, and left alone again. The attacker has a lower
priority than the others (nice 10), since it would have a machine of its own; it still shares the memory and the two cores.

By phase: the probe's median, 99th percentile and longest wait in ms; commits per minute, and how many honest peers are in one
on average; how often an honest peer was declared lost; by how much the coordinator's peak of resident memory (VmHWM, reset
before each phase) is above its resident memory at rest; CPU seconds of the coordinator, of the honest peers with the probe, and
of the attacker, per second of the phase. The limits: the 99th percentile at most 100 ms above the one at rest, memory at most
100 MB above; `met` or `missed` beside each. Appends to benchmarks/results/attacks.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.table import Table

from edit.lab import procfs
from edit.lab.chaos.history import History
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.testbed import Testbed
from edit.lab.hostile.catalogue import BEHAVIOURS
from edit.lab.joining import enrol
from edit.lab.processes import COORDINATOR, Supervisor, terminated_as_interrupt
from edit.lab.tail import JsonLines
from editpb import data_pb2, data_pb2_grpc
from editpb.transport.channel_options import channel_options
from peers.identity.peer_folder import PeerFolder

RESULTS = Path(__file__).parent / "results" / "attacks.jsonl"
MODEL: dict[str, Any] = {"layers": 6, "width": 128, "heads": 4, "batch_size": 1, "every": 10, "throttle": 4.0}
PATIENT: dict[str, Any] = {
    "heartbeat_s": 1.0,
    "lease_s": 6.0,
    "floor_s": 3.0,
    "ceiling_s": 10.0,
    "checkpoint_every": 20,
    "disk_bytes": 0,
}
PEERS, HOSTILE, PROBE, REST = 4, "hostile-0", "probe", "at rest"
MAX_WAIT_MS, MAX_BYTES = 100.0, 100e6  # above the run at rest
FOUNDER = "silent-founder"
FOUNDED_WITHIN_S = 180.0
ASK_EVERY_S, UPDATE_EVERY = 0.02, 10
PATIENCE_S = 60.0


# ---- the probe --------------------------------------------------------------------------------------------------------------


def probe(home: Path) -> None:
    """Ask for ever; write a line of JSON for each answer: when, what, its milliseconds, its status."""
    enrolment = PeerFolder(home).load()
    with grpc.secure_channel(
        enrolment.endpoints[0], enrolment.credentials, options=channel_options(enrolment.endpoints[0])
    ) as channel:
        stub, outer_step, number = data_pb2_grpc.DataStub(channel), 0, 0
        while True:
            number += 1
            began, status, what = time.perf_counter(), "OK", "describe"
            try:
                if number % UPDATE_EVERY or not outer_step:
                    request = data_pb2.SnapshotManifestRequest(run_id=enrolment.run_id)
                    outer_step = stub.DescribeSnapshot(request, timeout=PATIENCE_S).outer_step
                else:
                    what = "update"
                    for _ in stub.FetchUpdate(
                        data_pb2.UpdateRequest(run_id=enrolment.run_id, outer_step=outer_step), timeout=PATIENCE_S
                    ):
                        pass
            except grpc.RpcError as error:
                status = error.code().name
            waited = time.perf_counter() - began
            line = {"kind": "wait", "t": time.time(), "what": what, "ms": 1000 * waited, "status": status}
            print(json.dumps(line), flush=True)
            time.sleep(max(0.0, ASK_EVERY_S - waited))


# ---- a phase ----------------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """What was measured while one thing went on."""

    name: str
    seconds: float = 0.0
    waits_ms: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    participation: float = 0.0
    lost: int = 0
    resident: int = 0  # of the coordinator, when the phase began
    peak: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)

    def row(self, rest: Phase) -> dict[str, Any]:
        """Return its numbers. rest: the phase before all attacks."""
        waits = sorted(self.waits_ms)
        above = self.peak - rest.resident
        extra_ms = _quantile(waits, 0.99) - _quantile(sorted(rest.waits_ms), 0.99)
        return {
            "phase": self.name,
            "seconds": round(self.seconds, 1),
            "answers": len(waits),
            "p50_ms": round(_quantile(waits, 0.5), 1),
            "p99_ms": round(_quantile(waits, 0.99), 1),
            "max_ms": round(waits[-1], 1) if waits else None,
            "failed": dict(self.failed),
            "commits_per_minute": round(60 * self.commits / self.seconds, 1),
            "participation": round(self.participation, 2),
            "lost": self.lost,
            "above_rest_mb": round(above / 1e6, 1),
            "cpu_per_s": {who: round(used / self.seconds, 2) for who, used in self.cpu.items()},
            "attacker": self.answers,
            "wait": "met" if waits and extra_ms <= MAX_WAIT_MS else "missed",
            "memory": "met" if above <= MAX_BYTES else "missed",
        }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


class Measured:
    """A run that is being attacked. Opened by `measured`."""

    def __init__(self, testbed: Testbed, asking: Supervisor, options: ChaosOptions) -> None:
        self._testbed, self._asking, self._options = testbed, asking, options
        self.history = History(options.peer_ids, options.step_tokens, options.hostile_ids)
        self._lines = {name: JsonLines(testbed.metrics(name)) for name in (COORDINATOR, *options.peer_ids)}
        self._waits = JsonLines(testbed.folder.logs / f"{PROBE}.log")
        self._answers = JsonLines(testbed.folder.logs / f"{HOSTILE}.log")
        self._lost, self._attended = 0, set[str]()

    def read(self) -> list[dict[str, Any]]:
        """Take what was written since the last call, and return the probe's lines."""
        for name, lines in self._lines.items():
            for line in lines.read():
                self.history.take(name, line)
                if line.get("kind") == "member":
                    self._attended.add(line["peer_id"])
                honest = line.get("kind") == "member" and line["peer_id"] in self._options.peer_ids
                self._lost += honest and line["state"] == "lost"
        for end in (*self._testbed.unexpected_ends(), *self._asking.ended()):
            raise SystemExit(str(end))
        return self._waits.read()

    def founded(self, attacked: bool) -> float:
        """Start the honest peers and return the seconds until all are in a commit; inf when they never are."""
        if attacked:
            self._testbed.attack(HOSTILE, (FOUNDER,), 1e6)
            self._until(lambda: HOSTILE in self._attended, 30.0)
        began = time.time()
        for name in self._options.peer_ids:
            self._testbed.start(name)
        inside = lambda: all(self.history.commit_after(began, name) for name in self._options.peer_ids)  # noqa: E731
        found = self._until(inside, FOUNDED_WITHIN_S)
        seconds = time.time() - began
        if attacked:
            self._testbed.finish(HOSTILE)
        if not found:
            self._until(inside, FOUNDED_WITHIN_S)
        return seconds if found else float("inf")

    def _until(self, done: Any, bound_s: float) -> bool:
        give_up = time.monotonic() + bound_s
        while not done():
            if time.monotonic() > give_up:
                return False
            self.read()
            time.sleep(0.05)
        return True

    def phase(self, name: str, seconds: float) -> Phase:
        """Leave the run alone (REST) or attack it, and measure."""
        phase, pids = Phase(name), self._pids()
        self.read()
        if name != REST:
            self._testbed.attack(HOSTILE, (name,), seconds)
            self._until(lambda: any(line["kind"] == "begins" for line in self._answers.read()), FOUNDED_WITHIN_S)
            pids[HOSTILE] = self._testbed.pid(HOSTILE)
        before = {who: procfs.cpu_s(pid) for who, pid in pids.items()}
        commits, self._lost = len(self.history.commits), 0
        phase.resident = self._testbed.resident_bytes() or 0
        procfs.forget_peak(pids[COORDINATOR])
        began = time.time()
        while time.time() < began + seconds:
            time.sleep(0.25)
            self._take(phase, self.read(), began)
        phase.seconds, phase.peak = time.time() - began, procfs.peak_bytes(pids[COORDINATOR]) or 0
        used = {who: procfs.cpu_s(pid) - before[who] for who, pid in pids.items()}
        if name != REST:
            self._testbed.finish(HOSTILE)
            for line in self._answers.read():
                phase.answers = dict(Counter(phase.answers) + Counter(line.get("answers", {})))
        self._take(phase, self.read(), began)
        phase.cpu = {
            "coordinator": used.pop(COORDINATOR),
            "attacker": used.pop(HOSTILE, 0.0),
            "honest": sum(used.values()),
        }
        made = self.history.commits[commits:]
        phase.commits, phase.lost = len(made), self._lost
        counted = sum(commit.weights.get(peer, 0.0) > 0 for commit in made for peer in self._options.peer_ids)
        phase.participation = counted / len(made) if made else 0.0
        return phase

    def _take(self, phase: Phase, lines: list[dict[str, Any]], began: float) -> None:
        for line in lines:
            if line["t"] >= began:  # also what was asked before and answered since
                phase.waits_ms.append(line["ms"])
                if line["status"] != "OK":
                    phase.failed[line["status"]] += 1

    def _pids(self) -> dict[str, int]:
        pids = {name: self._testbed.pid(name) for name in (COORDINATOR, *self._options.peer_ids)}
        return {**pids, PROBE: self._asking.pid(PROBE)}


@contextmanager
def measured(options: ChaosOptions) -> Iterator[Measured]:
    with Testbed(options) as testbed, Supervisor(testbed.folder.logs) as asking:
        testbed.found()
        home = testbed.folder.home(PROBE)
        enrol(testbed.folder.state, PROBE, home)
        run = Measured(testbed, asking, options)
        asking.start(PROBE, (sys.executable, __file__, "--probe", str(home)))
        yield run


# ---- the command ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows for people."""
    columns = (
        "phase",
        "p50",
        "p99",
        "max ms",
        "wait",
        "commits/min",
        "peers in",
        "lost",
        "+MB",
        "memory",
        "cpu: coord.",
        "attacker",
    )
    shown = Table(*columns, box=None, header_style="dim")
    for row in rows:
        cpu = row["cpu_per_s"]
        values = [row["phase"], row["p50_ms"], row["p99_ms"], row["max_ms"], row["wait"], row["commits_per_minute"]]
        values += [row["participation"], row["lost"], row["above_rest_mb"], row["memory"], cpu["coordinator"], cpu["attacker"]]
        shown.add_row(*map(str, values))
    return shown


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=tuple(BEHAVIOURS), help="these attacks instead of all")
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each attack, and of the run at rest")
    arguments.add_argument("--rest", type=float, default=5.0, help="between two attacks")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--dry", action="store_true", help="record nothing")
    arguments.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.probe is not None:
        probe(options.probe)
    torch.set_num_threads(1)
    names = [name for name in options.only or BEHAVIOURS if not BEHAVIOURS[name].unfounded]
    founder = FOUNDER in (options.only or BEHAVIOURS)
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="edit-attacks-") as scratch, terminated_as_interrupt():
        out = Path(scratch) / "run"
        settings = ChaosOptions(peers=PEERS, hostile=1, faults=(), seed=options.seed, out=out, **PATIENT, **MODEL)
        with measured(settings) as run:
            founded_s = run.founded(founder)
            print(f"in a commit after {founded_s:.1f} s, with {FOUNDER if founder else 'nobody'} before them", flush=True)
            run.phase(REST, options.rest)
            rest = run.phase(REST, options.seconds)
            phases = [rest]
            for name in names:
                phases.append(run.phase(name, options.seconds))
                console.print(table([phases[-1].row(rest)]))
                run.phase(REST, options.rest)
            phases.append(run.phase(REST, options.seconds))
            rows = [phase.row(rest) for phase in phases]
    console.print(table(rows))
    load = os.getloadavg()
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {load[2]:.1f}",
        "seconds": options.seconds,
        "resident_at_rest_mb": round(rest.resident / 1e6),
        "founded_s": round(founded_s, 1) if founded_s < FOUNDED_WITHIN_S else None,
        "with_silent_founder": founder,
        "missed": [row["phase"] for row in rows if "missed" in (row["wait"], row["memory"])],
        "rows": rows,
    }
    print(json.dumps({**record, "rows": len(rows)}))
    if not options.dry:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
