"""What faults cost: real processes on this machine, killed and restarted at once, beside what others have published.

    python benchmarks/faults.py --part kill [--every 5]          # one of two peers of a 50M-parameter model, three times
    python benchmarks/faults.py --part replicas --minutes 30     # two replicas, 69 and 85 faults per hour
    python benchmarks/faults.py --part many --minutes 30         # 32 small peers, 125 faults per hour; or --peers 16

Each kill is a SIGKILL and the same command line again, as a supervisor of processes would. kill: the victim dies while the
other's contribution is in already and its own is not; next commit: on the coordinator's disk, then applied by the survivor;
again: from the kill to the first commit that the victim is in, so with Python's and torch's own start. replicas, many: gaps are
exponential with the mean that the rate gives; inner steps that counted: those behind merged contributions, by the tokens that
the coordinator counts, of all that were made (rather too many, see edit/lab/chaos/history.py). Every digest is compared, and
every rule of `edit-lab chaos` holds, or the benchmark fails. Appended to benchmarks/results/faults.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from edit.lab.chaos.command import run_chaos
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.history import History, Incident
from edit.lab.chaos.invariants import broken
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.outcome import as_json
from edit.lab.chaos.testbed import Testbed
from edit.lab.observer import Observer, open_observer
from edit.lab.processes import COORDINATOR, terminated_as_interrupt
from edit.lab.tail import JsonLines
from editpb import control_pb2, control_pb2_grpc

RESULTS = Path(__file__).parent / "results" / "faults.jsonl"
PUBLISHED_KILL = {"survivor_next_commit_s": 5.0, "victim_again_s": 54.0}
PUBLISHED_COUNTED = {69: 0.882, 85: 0.850}  # torchft deployment
PUBLISHED_MANY: dict[str, Any] = {"rate": 125, "participation": "about 16 of 32"}
LARGE = {"layers": 8, "width": 720, "heads": 8, "batch_size": 1}  # 50M parameters


# ---- one of two peers -------------------------------------------------------------------------------------------------------


class Pair:
    """Two peers of a large model, watched closely. Opened by `pair`."""

    def __init__(self, testbed: Testbed, options: ChaosOptions, observer: Observer) -> None:
        self._testbed, self._options = testbed, options
        self.history = History(options.peer_ids, options.step_tokens)
        self._lines = {name: JsonLines(testbed.metrics(name)) for name in (COORDINATOR, *options.peer_ids)}
        self._stub: Any = control_pb2_grpc.ControlStub(observer.control)

    def read(self) -> None:
        for name, lines in self._lines.items():
            for line in lines.read():
                self.history.take(name, line)
        for end in self._testbed.unexpected_ends():
            raise SystemExit(str(end))

    def until(self, what: str, done: Callable[[], bool], bound_s: float = 300.0) -> None:
        give_up = time.monotonic() + bound_s
        while not done():
            if time.monotonic() > give_up:
                raise SystemExit(f"{what}: not within {bound_s:.0f} s")
            time.sleep(0.02)
            self.read()

    def all_in(self, t: float) -> None:
        """Both are in a commit after `t`."""
        self.until("both in a commit", lambda: all(self.history.commit_after(t, name) for name in self._options.peer_ids))

    def waiting(self) -> set[str]:
        """Whose contribution is not in, with the other's in."""
        reply = self._stub.Status(control_pb2.StatusRequest(rounds_after=1 << 62), timeout=10.0)
        return set(reply.expected) - set(reply.arrived) if len(reply.arrived) == 1 and len(reply.expected) == 2 else set()

    def kill(self) -> dict[str, float] | None:
        """One kill; None when the victim's contribution came in just then."""
        self.until("one contribution is in", lambda: bool(self.waiting()))
        (victim,) = self.waiting() or {""}
        if not victim:
            return None
        (survivor,) = set(self._options.peer_ids) - {victim}
        fault = Fault(number=1, at_s=0.0, kind=Kind.KILL_PEER, target=victim, lasts_s=0.0)
        killed = time.time()
        self._testbed.inject(fault)
        self.read()  # what the killed peer had written
        self._testbed.repair(fault)
        incident = Incident(fault, killed, time.time())
        self.history.started(victim)
        self.until("the survivor's next commit", lambda: self.history.commit_after(killed) is not None)
        commit = self.history.commit_after(killed)
        assert commit is not None
        self.until("the survivor applied it", lambda: self._applied(survivor, commit.outer_step) is not None)
        self.until("the victim again", lambda: self.history.returned(incident) is not None)
        again, applied = self.history.returned(incident), self._applied(survivor, commit.outer_step)
        assert again is not None and applied is not None
        return {"next_commit": commit.t - killed, "applied": applied - killed, "again": again.t - killed}

    def _applied(self, who: str, outer_step: int) -> float | None:
        return next((c.t for c in self.history.claims if c.who == who and c.outer_step >= outer_step), None)


@contextmanager
def pair(options: ChaosOptions) -> Iterator[Pair]:
    with Testbed(options) as testbed:
        testbed.found()
        observer = open_observer(testbed.folder.state)
        pair = Pair(testbed, options, observer)
        for name in options.peer_ids:
            testbed.start(name)
            pair.history.started(name)
        try:
            yield pair
        finally:
            observer.close()


def kill_one_of_two(out: Path, times: int, model: dict[str, Any]) -> dict[str, Any]:
    """Part kill: medians over `times` kills."""
    patient: dict[str, Any] = {"heartbeat_s": 1.0, "lease_s": 6.0, "floor_s": 30.0, "ceiling_s": 60.0, "checkpoint_every": 20}
    options = ChaosOptions(peers=2, faults=(), throttle=1.0, disk_bytes=0, out=out, **patient, **model)
    measured: list[dict[str, float]] = []
    with pair(options) as both:
        both.all_in(time.time())
        while len(measured) < times:
            both.all_in(time.time())
            both.all_in(time.time())
            if (one := both.kill()) is not None:
                measured.append(one)
                print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in one.items()), flush=True)
        wrong = [str(violation) for violation in broken(both.history, options.bounds, time.time())]
    row = {f"{name}_s": [round(one[name], 2) for one in measured] for name in measured[0]}
    medians = {f"{name}_median_s": round(statistics.median(one[name] for one in measured), 2) for name in measured[0]}
    return {"part": "kill", **model, **row, **medians, "published": PUBLISHED_KILL, "violations": wrong}


# ---- faults per hour --------------------------------------------------------------------------------------------------------


def faults_per_hour(part: str, options: ChaosOptions, rate: int, published: object) -> dict[str, Any]:
    """Parts replicas and many."""
    report = run_chaos(options, True, Console(stderr=True))
    values = as_json(report)
    kept = ("seconds", "peers", "commits", "aborted", "participation", "contributes_again_s", "goodput", "violation")
    kills = sum(kind["count"] for kind in values["faults"].values())
    steps = {name: values[name] for name in ("inner_steps_made", "inner_steps_counted", "digests_compared")}
    return {
        "part": part,
        "faults_per_hour": rate,
        "faults": kills,
        **{k: values[k] for k in kept},
        **steps,
        "published": published,
    }


def replicas(out: Path, minutes: float, rate: int, seed: int) -> dict[str, Any]:
    kills: dict[str, Any] = {"kinds": (Kind.KILL_PEER,), "gap_s": 3600 / rate, "longest_s": 0.2}
    options = ChaosOptions(peers=2, seconds=60 * minutes, seed=seed, out=out, disk_bytes=0, throttle=4.0, **kills)
    return faults_per_hour("replicas", options, rate, PUBLISHED_COUNTED.get(rate))


def many(out: Path, minutes: float, peers: int, seed: int) -> dict[str, Any]:
    rate = int(PUBLISHED_MANY["rate"])
    kills: dict[str, Any] = {"kinds": (Kind.KILL_PEER,), "gap_s": 3600 / rate, "longest_s": 0.2}
    patient: dict[str, Any] = {"quorum": peers // 2, "floor_s": 3.0, "ceiling_s": 30.0, "heartbeat_s": 1.0, "lease_s": 10.0}
    slow: dict[str, Any] = {"throttle": 30.0, "start_s": 180.0, "begin_s": 900.0, "disk_bytes": 0}
    options = ChaosOptions(peers=peers, seconds=60 * minutes, seed=seed, out=out, **kills, **patient, **slow)
    return faults_per_hour("many", options, rate, PUBLISHED_MANY["participation"])


# ---- the command ------------------------------------------------------------------------------------------------------------


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--part", choices=("kill", "replicas", "many"), required=True)
    arguments.add_argument("--minutes", type=float, default=3.0, help="of faults; for replicas at each rate")
    arguments.add_argument("--rates", nargs="+", type=int, default=[69, 85], help="faults per hour, of part replicas")
    arguments.add_argument("--times", type=int, default=3, help="kills, of part kill")
    arguments.add_argument("--every", type=int, default=5, help="H, of part kill: its victim takes so many steps first")
    arguments.add_argument("--peers", type=int, default=32, help="of part many")
    arguments.add_argument("--small", action="store_true", help="part kill with a model of 0.9M parameters")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="edit-faults-") as scratch, terminated_as_interrupt():
        out = Path(scratch) / "run"
        if options.part == "kill":
            model = {**LARGE, "every": options.every, **({"layers": 4, "width": 128} if options.small else {})}
            write(kill_one_of_two(out, options.times, model))
        elif options.part == "replicas":
            for rate in options.rates:
                write(replicas(out, options.minutes, rate, options.seed))
        else:
            write(many(out, options.minutes, options.peers, options.seed))


def write(row: dict[str, Any]) -> None:
    """Print it and append it to the results. Exit code 1 when a rule was broken."""
    load = os.getloadavg()[1]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {load:.1f}"
    row = {"date": datetime.date.today().isoformat(), "machine": machine, **row}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))
    if row.get("violation") or row.get("violations"):
        sys.exit(1)


if __name__ == "__main__":
    main()
