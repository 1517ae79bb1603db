"""Four peers of which one is slow: tokens per second against ideal, and validation loss at equal tokens.

    .venv/bin/python benchmarks/asynchrony.py                 # 1200 steps in all, both kinds of slowness, 3 seeds: 30 minutes
    .venv/bin/python benchmarks/asynchrony.py --steps 400 --seeds 0 --only steps arrivals

Real training in one process, in virtual time: an inner step of a peer takes 1 s, a slow one `--slow` times as long, an exchange
nothing. `constant`: peer 3 is always slow; `random`: each step of each peer is, with a chance of 1 in 4 (the same draws for
every setting). A peer that must wait for an outcome takes no step until it is there. Ideal: no peer ever waits (with `random`,
for the steps that were drawn). Every setting ends after the same number of inner steps in all, so at equal tokens. Loss: nats
per byte of the outer parameters on held-out files, the mean over the seeds (of model, data split and draws); then the mean
difference to the first setting of the same seed, and how far these differences lie apart. One line of JSON per setting and seed
is appended to benchmarks/results/asynchrony.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import os
import platform
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edit.config.run import InnerConfig, ModelConfig, OuterConfig, PenaltyConfig, RoundsConfig, RunConfig, SyncConfig
from edit.lab.demo.corpus import plan_corpus, standard_library
from edit.local import LocalRun
from edit.worker.worker import EditWorker, WorkerConfig
from peers.models.gpt import GPT
from peers.training.data import SEPARATOR, Batches, Tokens, evaluate
from peers.training.trainer import Trainer, use_threads

RESULTS = Path(__file__).parent / "results" / "asynchrony.jsonl"
MODEL = ModelConfig(layers=2, heads=4, width=64)
PEERS = 4
EVERY = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One schedule. staleness: the exponent of `penalty.staleness` or `penalty.damping`, 0.5 where the name does not say it.
    quorum: a round closes grace_s after so many are in, None: when all are; dylu: H by speed."""

    name: str
    sync: SyncConfig
    outer: OuterConfig
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    quorum: int | None = None
    grace_s: float = 2.0
    dylu: bool = False
    staleness: float = 0.5


def settings() -> list[Setting]:
    """What is compared; the outer optimizers are docs/outer-settings.md's for a short run."""
    sgd, more = OuterConfig(optimizer="sgd", lr=1.0), {"every": EVERY, "outer_steps": 1 << 30}
    arrivals = RoundsConfig(merging="arrivals", max_staleness=64)

    def sync(**fields: object) -> SyncConfig:
        return SyncConfig(**(more | fields))  # type: ignore[arg-type]

    def delayed(lr: float, **fields: object) -> OuterConfig:
        return OuterConfig(optimizer="delayed_nesterov", lr=lr, momentum=0.5, period=PEERS, **fields)  # type: ignore[arg-type]

    late = RoundsConfig(max_staleness=4)
    return [
        Setting("steps", sync(), sgd),
        Setting("steps, dylu", sync(), sgd, dylu=True),
        Setting("time", sync(schedule="time", time_s=float(EVERY)), sgd),
        Setting("quorum 3 of 4, grace 2 s, H late", sync(mode="delayed", delay=EVERY), sgd, late, quorum=3),
        Setting(
            "quorum 3 of 4, grace 2 s, H late, staleness 0", sync(mode="delayed", delay=EVERY), sgd, late, 3, staleness=0.0
        ),
        Setting("arrivals, delayed_nesterov", sync(), delayed(1.0), arrivals),
        Setting("arrivals, delayed_nesterov, staleness 0", sync(), delayed(1.0), arrivals, staleness=0.0),
        Setting("arrivals, delayed_nesterov, heloco", sync(), delayed(1.0, correct="heloco"), arrivals),
        Setting(
            "arrivals, delayed_nesterov, heloco, staleness 0", sync(), delayed(1.0, correct="heloco"), arrivals, staleness=0.0
        ),
        Setting("arrivals, delayed_nesterov, dylu", sync(), delayed(1.0), arrivals, dylu=True),
        Setting("arrivals, sgd 1/4, staleness 0", sync(), OuterConfig(optimizer="sgd", lr=1 / PEERS), arrivals, staleness=0.0),
    ]


class Race:
    """One setting, trained in virtual time until all peers together have taken `steps` inner steps."""

    def __init__(self, setting: Setting, steps: int, slow: str, factor: float, seed: int) -> None:
        self.setting, self.steps, self.slow, self.factor = setting, steps, slow, factor
        self.config = RunConfig(
            seed=seed,
            sync=setting.sync,
            outer=setting.outer,
            penalty=PenaltyConfig(enabled=False, staleness=setting.staleness, damping=setting.staleness),
            rounds=setting.rounds,
        )
        self.run = LocalRun(self.config, [f"peer-{i}" for i in range(PEERS)])
        self.now, self.done, self.close_at = 0.0, 0, float("inf")
        self.draws = [random.Random(1000 * seed + i) for i in range(PEERS)]
        self.busy_s = 0.0
        text, self.held_out = corpus(seed)
        self.trainers = [self._trainer(text, seed, i) for i in range(PEERS)]
        self.workers = [self._worker(i) for i in range(PEERS)]

    def _trainer(self, text: Tokens, seed: int, i: int) -> Trainer:
        batches = Batches(text, MODEL.context, InnerConfig().batch_size, seed + 1 + i)
        return Trainer(
            GPT(MODEL, seed),
            batches,
            InnerConfig(),
            total_steps=self.steps // PEERS,
            device=torch.device("cpu"),
            clock=lambda: self.now,
        )

    def _worker(self, i: int) -> EditWorker:
        config = WorkerConfig.of(self.config)
        if self.setting.dylu and self.slow == "constant" and i == PEERS - 1:
            config = replace(config, sync=replace(config.sync, every=max(1, int(EVERY / self.factor))))
        trainer = self.trainers[i]
        return EditWorker(trainer.model, trainer.optimizer, self.run.collective(f"peer-{i}"), config, clock=lambda: self.now)

    def _step_s(self, i: int) -> float:
        drawn = self.draws[i].random() < 0.25
        return self.factor if (drawn if self.slow == "random" else i == PEERS - 1) else 1.0

    def _must_wait(self, worker: EditWorker) -> bool:
        """Whether the worker's next inner step would wait for an outcome that is not there yet."""
        if not worker.pending or self.run.state.outer_step > worker.outer_step:
            return False
        sync = self.setting.sync
        return sync.mode == "blocking" or worker.round_inner_steps + 1 >= sync.delay

    def train(self) -> None:
        for worker in self.workers:
            worker.__enter__()
        ends: list[tuple[float, int, float]] = []
        standing: set[int] = set()

        def go_on(peers: Iterable[int]) -> None:
            for i in peers:
                if self._must_wait(self.workers[i]):
                    standing.add(i)
                    continue
                standing.discard(i)
                seconds = self._step_s(i)
                heapq.heappush(ends, (self.now + seconds, i, seconds))

        go_on(range(PEERS))
        while self.done < self.steps:
            outer_step = self.run.state.outer_step
            if not ends or self.close_at <= ends[0][0]:
                self.now, self.close_at = self.close_at, float("inf")
                self.run.close("quorum and grace")
            else:
                self.now, i, seconds = heapq.heappop(ends)
                self.busy_s += seconds
                self.workers[i].count_tokens(self.trainers[i].step(lambda: self.done // PEERS).tokens)
                self.done += 1
                standing.add(i)
                self._look_at_quorum(outer_step)
            if self.run.state.outer_step > outer_step:
                self.close_at = float("inf")
                for i in [i for i in standing if self.workers[i].pending]:
                    self.workers[i].synchronize()
                self._look_at_quorum(self.run.state.outer_step)
            go_on(sorted(standing))

    def _look_at_quorum(self, outer_step: int) -> None:
        quorum = self.setting.quorum
        if quorum and self.run.state.outer_step == outer_step and len(self.run.complete) >= quorum:
            self.close_at = min(self.close_at, self.now + self.setting.grace_s)

    def result(self) -> dict[str, Any]:
        model = GPT(MODEL, 0)
        state: dict[str, Tensor] = {}
        for fragment, theta in zip(self.run.state.schema.fragments, self.run.state.theta, strict=True):
            parts = torch.split(theta, [tensor.numel for tensor in fragment.tensors])
            state |= {t.name: part.view(t.shape) for t, part in zip(fragment.tensors, parts, strict=True)}
        model.load_state_dict(state, strict=False)
        tokens = InnerConfig().batch_size * MODEL.context
        share = self._ideal_steps_per_s()
        return {
            "setting": self.setting.name,
            "slow": self.slow,
            "factor": self.factor,
            "steps": self.done,
            "loss": round(evaluate(model, self.held_out, MODEL.context, 64), 4),
            "commits": self.run.state.outer_step,
            "virtual_s": round(self.now, 1),
            "tokens_per_s": round(self.done * tokens / self.now, 1),
            "ideal_tokens_per_s": round(share * tokens, 1),
            "against_ideal": round(self.done / self.now / share, 4),
        }

    def _ideal_steps_per_s(self) -> float:
        if self.slow == "random":
            return PEERS * self.done / self.busy_s
        return PEERS - 1 + 1 / self.factor


def corpus(seed: int) -> tuple[Tokens, Tokens]:
    """All training text as one row of bytes, and what is held out."""
    groups = plan_corpus(standard_library(), 1, seed)
    train = [file.path.read_bytes() for group in groups for file in group.train]
    held_out = [file.path.read_bytes() for group in groups for file in group.held_out]
    joined = [np.frombuffer(bytes([SEPARATOR]).join(files), np.uint8) for files in (train, held_out)]
    return Tokens(joined[0], "train", 256), Tokens(joined[1], "held out", 256)


def main() -> None:
    """Train every setting; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="inner steps of all peers together")
    parser.add_argument("--slow", type=float, default=4.0, help="how much longer a slow step takes")
    parser.add_argument("--kinds", nargs="+", default=["constant", "random"], choices=["constant", "random"])
    parser.add_argument("--only", nargs="+", help="settings whose names begin so")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    use_threads(1)
    machine = {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(
        f"{'slow':<9} {'setting':<48} {'loss':>7} {'to first':>8} {'spread':>7} {'commits':>8} {'tokens/s':>9} {'of ideal':>9}"
    )
    for slow in arguments.kinds:
        first: list[float] = []
        for setting in settings():
            if arguments.only and not setting.name.startswith(tuple(arguments.only)):
                continue
            if setting.dylu and slow == "random":
                continue  # no peer is slower than another
            results = []
            for seed in arguments.seeds:
                race = Race(setting, arguments.steps, slow, arguments.slow, seed)
                race.train()
                results.append(race.result())
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**machine, "seed": seed, **results[-1]}) + "\n")
            mean = {
                key: fmean(result[key] for result in results) for key in ("loss", "commits", "tokens_per_s", "against_ideal")
            }
            first = first or [result["loss"] for result in results]
            apart = [result["loss"] - base for result, base in zip(results, first, strict=True)]
            print(
                f"{slow:<9} {setting.name:<48} {mean['loss']:>7.4f} {fmean(apart):>+8.4f} {max(apart) - min(apart):>7.4f} "
                f"{mean['commits']:>8.1f} {mean['tokens_per_s']:>9.1f} {mean['against_ideal']:>9.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
