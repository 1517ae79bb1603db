"""The simulator against our own measured runs: the same figures from real processes and from `edit-lab simulate`, side by side.

    .venv/bin/python benchmarks/simulate_measured.py            # under 3 minutes, on an idle machine
    .venv/bin/python benchmarks/simulate_measured.py --only steady --out /tmp/trial.jsonl

Three real peers and a coordinator, each peer behind a link of its own (edit.lab.link).

overhead  no link is shaped, H 20, blocking: how long one exchange takes that travels no distance (encoding, chunks, merging,
          journal, applying), as the last of the three sees it. It becomes hub.commit_s of both scenarios: while training waits
          for an exchange it does not matter whose seconds they are.
In the other two the peers rest after each step (--throttle), so that two cores do for all. The rest after the step that
contributes passes while the exchange is on its way: so the scenario says that a peer waits one step later (delay 1).
steady    12 Mbit/s up and 24 down, 20 ms, H 40, blocking, a round waits for all peers.
churn     the same links; one peer is three times slower, a quorum of 2 waits for nobody (wait "slack", grace 0.3 s), late
          contributions are carried over (max_staleness 8); one peer is killed at a third of the run and started again at once.

Fed into the scenario, measured in the run itself: the seconds per inner step of each peer (median of the gaps of ten steps in
which nothing is exchanged) and their spread, and how long the killed process was away until it attended again. Compared: what
the simulator has to find out from these. goodput: inner steps that were merged / seconds times the peers' own speeds;
utilisation: seconds of inner steps / seconds alive; participation: contributors / live peers, mean over the commits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from edit.config.run import RunConfig
from edit.fragments.schema import plan_fragments
from edit.lab.bench.measured_run import MeasuredRun
from edit.lab.link import LinkShape
from edit.lab.processes import terminated_as_interrupt
from edit.lab.simulation.outcome import Outcome
from edit.lab.simulation.scenario import Scenario
from edit.lab.simulation.simulate import simulate
from peers.models.registry import build

RESULTS = Path(__file__).parent / "results" / "simulate_measured.jsonl"
PEERS = ("ada", "grace", "alan")
LINE_STEPS = 10  # between two lines of a peer's metrics file
UP_MBIT, DOWN_MBIT, LATENCY_S = 12.0, 24.0, 0.02
MODEL = {"name": "builtin:gpt", "layers": 4, "heads": 4, "width": 128, "context": 64, "vocabulary": 256}
BATCH = 2
STEP_TOKENS = BATCH * 64  # of one inner step
SHAPED = LinkShape(up_bits_per_s=1e6 * UP_MBIT, down_bits_per_s=1e6 * DOWN_MBIT, latency_s=LATENCY_S)
NEVER_LATE = {"start_peers": 3, "quorum": 3, "ceiling_s": 120.0}
COMPARED = ("commits_per_s", "goodput", "utilisation", "participation")


@dataclass(frozen=True, slots=True)
class Run:
    """What is run. slower: throttle of the last peer, in times of the others'; killed: the commit after which `grace` dies."""

    name: str
    every: int
    outer_steps: int
    rounds: Mapping[str, Any]
    shape: LinkShape
    slower: float = 1.0
    killed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Of run.toml."""
        return {
            "name": self.name,
            "model": MODEL,
            "inner": {"batch_size": BATCH},
            "sync": {"every": self.every, "outer_steps": self.outer_steps},
            "codec": {"up": "int8", "down": "bf16"},
            "rounds": dict(self.rounds),
            "membership": {"heartbeat_s": 0.5, "lease_s": 5.0},
            "storage": {"keep_updates": 16},
        }


RUNS = (
    Run("overhead", 20, 14, NEVER_LATE, LinkShape()),
    Run("steady", 40, 8, NEVER_LATE, SHAPED),
    Run(
        "churn",
        40,
        14,
        {"start_peers": 3, "quorum": 2, "wait": "slack", "grace_s": 0.3, "floor_s": 1.0, "max_staleness": 8},
        SHAPED,
        slower=3.0,
        killed=4,
    ),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared; of a real run or of a simulated one."""

    commits_per_s: float
    goodput: float
    utilisation: float
    participation: float
    seconds: float

    @classmethod
    def simulated(cls, outcome: Outcome) -> Figures:
        speed = outcome.commits / outcome.seconds
        return cls(speed, outcome.goodput, outcome.utilisation, outcome.participation, outcome.seconds)


@dataclass(frozen=True, slots=True)
class Observed:
    """A real run. step_s, by peer; jitter: of a whole phase; away_s: of the killed process, from dies_s on."""

    figures: Figures
    step_s: Mapping[str, float]
    jitter: float
    dies_s: float
    away_s: float


# ---- the real run -----------------------------------------------------------------------------------------------------------


class Watched:
    """The lines that a run left. dead: when one process was killed, and when its next one attended; None without."""

    def __init__(self, run: Run, real: MeasuredRun, killed_at: float | None) -> None:
        self.run = run
        self.coordinator = real.lines()
        self.steps = {name: [line for line in real.lines(name) if line["kind"] == "step"] for name in PEERS}
        self.commits = [line for line in self.coordinator if line["kind"] == "round" and line["committed"]]
        self.began = self.commits[0]["t"] - self.commits[0]["seconds"]
        self.ended = self.commits[-1]["t"]
        self.dead = None if killed_at is None else (killed_at, self._back(killed_at))
        self.counted = real.tokens() / STEP_TOKENS

    def _back(self, killed_at: float) -> float:
        """When the process that was started again attended for good: it does so twice, first to read the configuration."""
        later = [line for line in self.coordinator if line["kind"] == "member" and line["t"] > killed_at]
        mine = [line for line in later if line["peer_id"] == PEERS[1]]
        training = next(place for place, line in enumerate(mine) if line["state"] == "training")
        return max(float(line["t"]) for line in mine[:training] if line["state"] == "starting")

    def gaps(self, name: str, *, exchanging: bool) -> list[tuple[dict[str, Any], float]]:
        """Seconds of ten steps in a row, and the line before them: of those that begin with waiting for an exchange (a peer
        contributes within a step, and waits before the next one), or of all others."""
        pairs = [(a, b["t"] - a["t"]) for a, b in pairwise(self.steps[name]) if b["step"] - a["step"] == LINE_STEPS]
        return [(line, seconds) for line, seconds in pairs[1:] if (line["step"] % self.run.every == 0) == exchanging]

    def observed(self) -> Observed:
        pure = {name: [seconds for _, seconds in self.gaps(name, exchanging=False)] for name in PEERS}
        step_s = {name: statistics.fmean(gaps) / LINE_STEPS for name, gaps in pure.items()}
        spread = [statistics.pstdev(map(math.log, gaps)) for gaps in pure.values()]
        seconds = self.ended - self.began
        live = seconds * len(PEERS) - (self.dead[1] - self.dead[0] if self.dead else 0.0)
        figures = Figures(
            commits_per_s=len(self.commits) / seconds,
            goodput=self.counted / sum(seconds / each for each in step_s.values()),
            utilisation=sum(self._made(name) * step_s[name] for name in PEERS) / live,
            participation=statistics.fmean(self._participation()),
            seconds=seconds,
        )
        dies_s, away_s = (self.dead[0] - self.began, self.dead[1] - self.dead[0]) if self.dead else (0.0, 0.0)
        return Observed(figures, step_s, statistics.fmean(spread) * (LINE_STEPS / self.run.every) ** 0.5, dies_s, away_s)

    def _made(self, name: str) -> float:
        """Inner steps of all its processes until the last commit."""
        lines = [line for line in self.steps[name] if line["t"] <= self.ended + 0.05]
        lives = [before["step"] for before, after in pairwise(lines) if after["step"] <= before["step"]]
        return float(sum(lives) + lines[-1]["step"])

    def _participation(self) -> Iterator[float]:
        for commit in self.commits:
            contributors = {peer for fragment in commit["verdicts"] for peer in fragment["peers"]}
            dead = self.dead is not None and self.dead[0] <= commit["t"] <= self.dead[1]
            yield len(contributors) / max(len(contributors), len(PEERS) - dead)


def really(run: Run, folder: Path, data: Path, throttle: float) -> Watched:
    """Run it with processes."""
    killed_at = None
    with MeasuredRun(folder, run.settings, data) as real:
        for name in PEERS:
            slower = run.slower if name == PEERS[-1] else 1.0
            real.enrol(name, run.shape, "--throttle", str(throttle * slower), "--checkpoint-every", "0")
        real.start(*PEERS)
        if run.killed:
            real.until("the commit before the kill", lambda: _commits(real) >= run.killed, 120.0)
            killed_at = time.time()
            real.kill(PEERS[1])
            real.start(PEERS[1])
        real.finish(180.0)
        return Watched(run, real, killed_at)


def _commits(real: MeasuredRun) -> int:
    return sum(line["kind"] == "round" and line["committed"] for line in real.lines())


def overhead_s(watched: Watched) -> float:
    """Of one exchange, as the peer sees it that contributed last and so waits for nobody: the mean over the commits."""
    pure = {name: statistics.fmean(seconds for _, seconds in watched.gaps(name, exchanging=False)) for name in PEERS}
    last: dict[int, tuple[float, float]] = {}
    for name in PEERS:
        for line, seconds in watched.gaps(name, exchanging=True):
            last[line["step"]] = max(last.get(line["step"], (0.0, 0.0)), (line["t"], seconds - pure[name]))
    return max(0.0, statistics.fmean(seconds for _, seconds in last.values()))


# ---- the simulated one ------------------------------------------------------------------------------------------------------


def scenario(run: Run, observed: Observed, exchange_s: float, seed: int) -> Scenario:
    """The same run in virtual time."""
    config = RunConfig.from_mapping(run.settings)
    schema = plan_fragments(build(config.model, 0, frozenset()).named_parameters())
    fastest = min(observed.step_s.values())
    kill = {"dies_s": observed.dies_s, "after_s": observed.away_s}
    classes = [
        {
            "share": 1 / len(PEERS),
            "slower": observed.step_s[name] / fastest,
            **(kill if name == PEERS[1] and run.killed else {}),
        }
        for name in PEERS
    ]
    return Scenario.from_mapping(
        {
            "peers": len(PEERS),
            "seed": seed,
            "compute": {"step_s": fastest, "jitter": observed.jitter},
            "classes": classes,
            "link": {"up_mbit": UP_MBIT, "down_mbit": DOWN_MBIT, "latency_s": LATENCY_S},
            "size": {"parameters": float(schema.numel), "fragments": len(schema.fragments)},
            "hub": {"commit_s": exchange_s},
            "sync": {**run.settings["sync"], "mode": "delayed", "delay": 1},
            **{table: run.settings[table] for table in ("codec", "rounds", "membership", "storage")},
        }
    )


def simulated(run: Run, observed: Observed, exchange_s: float, seeds: int) -> Figures:
    """Mean over some seeds."""
    outcomes = [Figures.simulated(simulate(scenario(run, observed, exchange_s, seed))) for seed in range(seeds)]
    return Figures(*(statistics.fmean(values) for values in zip(*(asdict(each).values() for each in outcomes), strict=True)))


def compare(run: Run, observed: Observed, exchange_s: float, seeds: int) -> dict[str, object]:
    """Print both, and the relative error."""
    real, ours = asdict(observed.figures), asdict(simulated(run, observed, exchange_s, seeds))
    speeds = ", ".join(f"{name} {1000 * each:.1f} ms" for name, each in observed.step_s.items())
    print(f"{run.name}: {real['seconds']:.1f} s; {speeds} per step, jitter {100 * observed.jitter:.1f} %")
    print(f"  {'':<16}{'measured':>10}{'simulated':>11}{'error':>9}")
    errors = {key: ours[key] / real[key] - 1 for key in COMPARED}
    for key in COMPARED:
        print(f"  {key:<16}{real[key]:>10.4f}{ours[key]:>11.4f}{100 * errors[key]:>+8.1f} %", flush=True)
    return {
        "run": run.name,
        "measured": {key: round(value, 4) for key, value in real.items()},
        "simulated": {key: round(value, 4) for key, value in ours.items()},
        "error": {key: round(value, 4) for key, value in errors.items()},
        "step_ms": {name: round(1000 * value, 2) for name, value in observed.step_s.items()},
        "jitter": round(observed.jitter, 4),
        "away_s": round(observed.away_s, 2),
    }


def main() -> None:
    """Run, simulate, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[run.name for run in RUNS[1:]], help="besides the overhead")
    parser.add_argument(
        "--throttle", type=float, default=4.0, help="a step takes so many times as long as it computes, except for the overhead"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of the simulation")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, terminated_as_interrupt():
        folder, data = Path(scratch), Path(scratch) / "text.py"
        data.write_bytes(Path(argparse.__file__).read_bytes())
        first, *others = RUNS
        exchange_s = overhead_s(really(first, folder / first.name, data, 1.0))
        print(f"overhead of one exchange: {1000 * exchange_s:.0f} ms")
        for run in others:
            if arguments.only in (None, run.name):
                observed = really(run, folder / run.name, data, arguments.throttle).observed()
                rows.append(compare(run, observed, exchange_s, arguments.seeds))
    print(f"{time.perf_counter() - began:.0f} s in all")
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "overhead_ms": round(1000 * exchange_s, 1),
    }
    with arguments.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**facts, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
