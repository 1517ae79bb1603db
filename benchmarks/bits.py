"""Validation loss against bits on the wire, by codec of the contributions; paired by seed with fp32 runs.

    .venv/bin/python benchmarks/bits.py                      # 4 peers, 1200 steps, 3 seeds: hours on 2 cores; may be stopped
    .venv/bin/python benchmarks/bits.py --steps 300 --peers 2 --seeds 1 --settings int4 "top-k 64"
    .venv/bin/python benchmarks/bits.py --print              # only the table of what is recorded

Peers, text and inner settings are those of benchmarks/quality.py: the built-in GPT (0.8M parameters) on the standard library's
source, H 30, the exchange in this process. Loss: nats per byte of the outer parameters on held-out files. Bits are counted: the
bytes of all payloads, over parameters, contributions and outer steps; beside them those of the updates. Updates are bf16, fp32
in the fp32 runs, or as the setting's name says.

Each run is a process of its own and appends one line of JSON to benchmarks/results/bits.jsonl; runs that are there for the same
setting, peers, steps and seed are not made again. The gap is the loss less that of the fp32 run with the same outer optimizer
and seed, in percent of it; its interval has 95 % by Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.quality import corpus, trainer
from edit.collective import Collective
from edit.config.run import CodecConfig, InnerConfig, ModelConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.local import LocalRun
from edit.records import Contribution, Outcome, Snapshot
from edit.worker.worker import EditWorker, WorkerConfig
from peers.models.gpt import GPT
from peers.training.data import evaluate
from peers.training.trainer import use_threads

RESULTS = Path(__file__).parent / "results" / "bits.jsonl"
EVERY = 30
NESTEROV = OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6)
PLAIN = OuterConfig(optimizer="sgd", lr=1.0)  # as SparseLoCo: without outer momentum
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5 %, by n - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Codecs and an outer optimizer. base: the setting that the loss is compared with."""

    codec: CodecConfig
    outer: OuterConfig = NESTEROV
    base: str = "fp32"


def _up(text: str, decay: float = 1.0, down: str = "bf16") -> CodecConfig:
    return CodecConfig(up=text, down=down, up_decay=decay)


EXACT = CodecConfig(up="fp32", down="fp32")
SETTINGS: dict[str, Setting] = {
    "fp32": Setting(EXACT),
    "bf16": Setting(_up("bf16")),
    "int8": Setting(_up("int8")),
    "int4": Setting(_up("int4")),
    "int4 both ways": Setting(_up("int4", down="int4")),
    "e3m0": Setting(_up("e3m0")),
    "e3m0 both ways": Setting(_up("e3m0", down="e3m0")),
    "2-bit": Setting(_up("stat2")),
    "2-bit, range 6": Setting(_up("stat2:range=6")),
    "2-bit without feedback": Setting(_up("stat2", 0.0)),
    "sign": Setting(_up("sign")),
    "fp32, no momentum": Setting(EXACT, PLAIN, "fp32, no momentum"),
    "top-k 128": Setting(_up("topk:k=128", 0.95), PLAIN, "fp32, no momentum"),
    "top-k 64": Setting(_up("topk", 0.95), PLAIN, "fp32, no momentum"),
    "top-k 64, decay 1": Setting(_up("topk"), PLAIN, "fp32, no momentum"),
    "top-k 64 without feedback": Setting(_up("topk", 0.0), PLAIN, "fp32, no momentum"),
}


@dataclass(slots=True)
class Counting:
    """A Collective that counts the bytes of all payloads that pass it."""

    inner: Collective
    sent: int = 0
    received: int = 0
    steps: set[int] = field(default_factory=set)  # outer steps whose updates were counted

    @property
    def peer_id(self) -> str:
        """Of this peer."""
        return self.inner.peer_id

    def join(self, schema: Schema, found: Callable[[], Sequence[Tensor]], shards: Sequence[Shard] | None = None) -> Snapshot:
        """See `Collective.join`."""
        return self.inner.join(schema, found, shards)

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`."""
        self.sent += memoryview(contribution.payload.data).nbytes
        self.inner.contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = self.inner.outcome(outer_step, block=block)
        commit = getattr(outcome, "commit", None)
        if commit is not None and commit.outer_step not in self.steps:
            self.steps.add(commit.outer_step)
            payloads = [one.payload for one in commit.fragments if one.payload is not None]
            self.received += sum(memoryview(payload.data).nbytes for payload in payloads)
        return outcome

    def snapshot(self) -> Snapshot:
        """See `Collective.snapshot`."""
        return self.inner.snapshot()


def one(name: str, peers: int, steps: int, seed: int) -> dict[str, Any]:
    """Train one setting in this process, the peers in turn."""
    use_threads(1)
    began, (text, held_out), setting = time.monotonic(), corpus(seed), SETTINGS[name]
    config = RunConfig(
        seed=seed,
        sync=SyncConfig(every=EVERY, outer_steps=steps // EVERY),
        outer=setting.outer,
        penalty=PenaltyConfig(enabled=False),
        codec=setting.codec,
    )
    names = [f"peer-{i}" for i in range(peers)]
    run = LocalRun(config, names)
    trainers = [trainer(text, InnerConfig(), steps, seed, stream=seed + 1 + i) for i in range(peers)]
    counted = [Counting(run.collective(name)) for name in names]
    settings = WorkerConfig.of(config)
    workers = [EditWorker(t.model, t.optimizer, c, settings) for t, c in zip(trainers, counted, strict=True)]
    for worker in workers:
        worker.__enter__()
    for _ in range(steps):
        for t in trainers:
            t.step()
    for worker in workers:
        worker.synchronize()
    model = GPT(ModelConfig(), seed)
    model.load_state_dict(workers[0].outer_state_dict(), strict=False)
    loss, outer_steps = float(evaluate(model, held_out, ModelConfig().context, 64)), run.state.outer_step
    parameters = run.state.schema.numel
    return {
        "setting": name,
        "peers": peers,
        "steps": steps,
        "seed": seed,
        "loss": loss if math.isfinite(loss) else None,
        "outer_steps": outer_steps,
        "bits_up": round(8 * sum(c.sent for c in counted) / (parameters * peers * outer_steps), 4),
        "bits_down": round(8 * counted[0].received / (parameters * len(counted[0].steps)), 4),
        "s": round(time.monotonic() - began),
    }


def recorded(file: Path, peers: int, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """What a results file has of these runs, by (setting, seed)."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = (json.loads(line) for line in lines)
    return {(each["setting"], each["seed"]): each for each in found if (each["peers"], each["steps"]) == (peers, steps)}


def show(results: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Print the table: means over the seeds, and the gap with its interval."""
    print(f"{'setting':<28} {'bits up':>8} {'down':>7} {'seeds':>5} {'loss':>8} {'gap to fp32, %':>22}")
    for name, setting in SETTINGS.items():
        runs = {seed: each for (of, seed), each in results.items() if of == name}
        if not runs:
            continue
        losses = [each["loss"] for each in runs.values()]
        pairs = [(each["loss"], results.get((setting.base, seed), {}).get("loss")) for seed, each in sorted(runs.items())]
        gaps = [100 * (loss / base - 1) for loss, base in pairs if loss is not None and base is not None]
        loss = f"{statistics.fmean(losses):8.4f}" if None not in losses else "diverged"
        bits = next(iter(runs.values()))
        print(f"{name:<28} {bits['bits_up']:>8.3f} {bits['bits_down']:>7.3f} {len(runs):>5} {loss:>8} {_interval(gaps):>22}")


def _interval(gaps: Sequence[float]) -> str:
    if not gaps:
        return ""
    if len(gaps) == 1:
        return f"{gaps[0]:+.3f}"
    half = STUDENT.get(len(gaps) - 1, 1.96) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.fmean(gaps):+.3f} +- {half:.3f}"


def main() -> None:
    """Make the runs that are missing, one process per core; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help=f"a multiple of {EVERY}")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", help=f"only these, and what they are compared with: {', '.join(SETTINGS)}")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--print", action="store_true", help="make no run")
    parser.add_argument("--only", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers, steps = arguments.peers, arguments.steps
    if arguments.only:
        print(json.dumps(one(arguments.only[0], peers, steps, int(arguments.only[1]))))
        return
    if steps % EVERY:
        parser.error(f"--steps {steps}: must be a multiple of {EVERY}")
    if unknown := set(arguments.settings or ()) - set(SETTINGS):
        parser.error(f"--settings {sorted(unknown)[0]!r}: known are {', '.join(map(repr, SETTINGS))}")
    chosen = set(arguments.settings or SETTINGS)
    chosen |= {SETTINGS[name].base for name in chosen}
    done = recorded(arguments.results, peers, steps)
    missing = [
        (name, seed) for seed in range(arguments.seeds) for name in SETTINGS if name in chosen and (name, seed) not in done
    ]
    machine = {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}

    def run(job: tuple[str, int]) -> str:
        command = [sys.executable, __file__, "--only", job[0], str(job[1]), "--peers", str(peers), "--steps", str(steps)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if not arguments.print:
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            for ended in as_completed([pool.submit(run, job) for job in missing]):
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**machine, **json.loads(ended.result())}) + "\n")
    show(recorded(arguments.results, peers, steps))


if __name__ == "__main__":
    main()
