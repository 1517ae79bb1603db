"""Validation loss at equal tokens: swaps of two peers (gossip, NoLoCo) beside DiLoCo and EDiT; how far apart peers stay; bytes.

    .venv/bin/python benchmarks/swarm/gossip.py              # 4 peers, 300 steps, 3 seeds: about 20 minutes on 2 idle cores
    .venv/bin/python benchmarks/swarm/gossip.py --steps 1200 --peers 8 --seeds 1 --settings DiLoCo gossip
    .venv/bin/python benchmarks/swarm/gossip.py --print      # only the table of what is recorded

Peers, text and inner settings are those of benchmarks/quality.py: the built-in GPT (0.8M parameters) on the standard library's
source, in this process; contributions int8. Loss: nats per byte on held-out files, of the outer parameters: with gossip of the
one model that the peers settle on, and beside it the mean loss of the peers' own outer parameters before that. Apart: the mean
over all pairs of ||phi_i - phi_j||, in percent of the length of their mean. Bytes are counted: what a peer sends and receives
in an outer step, for each parameter; DiLoCo's and EDiT's updates are bf16, and a coordinator receives and sends as much for
each peer. Settling costs an exchange in fp32, which is not in them. Refused: fragments that a pair did not take together.
Outer settings: 0.7 / 0.6 for DiLoCo and EDiT (docs/outer-settings.md), the paper's 0.7 / 0.5 for gossip, or 1.0 / 0.

Each run is a process of its own and appends one line of JSON to benchmarks/results/gossip.jsonl; runs that are there for the
same setting, peers, steps, H and seed are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # before site-packages: opacus installs a package `benchmarks`, too

import torch
from torch import Tensor

from benchmarks.bits import Results, Shape, gaps, make, recorded
from benchmarks.quality import trainer
from edit.collective import Collective
from edit.config.run import (
    CodecConfig,
    GossipConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    PenaltyConfig,
    RunConfig,
    SyncConfig,
)
from edit.fragments.schema import Schema
from edit.lab.compare.corpus import whole_text
from edit.lab.compare.intervals import half_width
from edit.lab.compare.loop import Counting, enter, step_together
from edit.lab.compare.trial import load_theta
from edit.local import LocalGossip, LocalRun
from edit.merging.gossip import settle, settling
from edit.merging.outer_state import OuterState
from peers.models.gpt import GPT
from peers.training.data import Tokens, evaluate
from peers.training.trainer import use_threads

RESULTS = Path(__file__).parents[1] / "results" / "gossip.jsonl"
NESTEROV = OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6)
GOSSIP = OuterConfig(algorithm="gossip")


@dataclass(frozen=True, slots=True)
class Setting:
    """How peers take an outer step."""

    outer: OuterConfig
    penalty: bool
    gossip: GossipConfig = field(default_factory=GossipConfig)


SETTINGS: dict[str, Setting] = {
    "DiLoCo": Setting(NESTEROV, penalty=False),
    "EDiT": Setting(NESTEROV, penalty=True),
    "gossip": Setting(GOSSIP, penalty=False),
    "gossip, penalty": Setting(GOSSIP, penalty=True),
    "gossip, 1.0 / 0": Setting(GOSSIP, penalty=False, gossip=GossipConfig(lr=1.0, momentum=0.0)),
    "gossip, settled every 5": Setting(GOSSIP, penalty=False, gossip=GossipConfig(settle_every=5)),
}


def configured(setting: Setting, shape: Shape, seed: int) -> RunConfig:
    """The run's configuration, with one outer step that is never taken: peers settle on the way only."""
    return RunConfig(
        seed=seed,
        sync=SyncConfig(every=shape.every, outer_steps=shape.steps // shape.every + 1),
        outer=setting.outer,
        gossip=setting.gossip,
        penalty=PenaltyConfig(enabled=setting.penalty),
        codec=CodecConfig(up="int8", down="bf16"),
    )


def train(collectives: Sequence[Collective], config: RunConfig, shape: Shape, text: Tokens, seed: int) -> None:
    """All steps of all peers, in turn."""
    trainers = [trainer(text, InnerConfig(), shape.steps, seed, stream=seed + 1 + i) for i in range(shape.peers)]
    peers = enter(trainers, collectives, config)
    step_together(peers, lambda peer: peer.steps >= shape.steps)
    for peer in peers:
        peer.worker.synchronize()


def loss_of(schema: Schema, theta: Sequence[Tensor], held_out: Tokens, seed: int) -> float:
    """The loss of these outer parameters."""
    return float(evaluate(load_theta(schema, theta, GPT(ModelConfig(), seed)), held_out, ModelConfig().context, 64))


def apart(theta: Sequence[Sequence[Tensor]]) -> float:
    """The mean distance of two, in percent of the length of the mean of all."""
    vectors = [torch.cat(list(one)).double() for one in theta]
    distance = statistics.fmean(float((a - b).norm()) for a, b in combinations(vectors, 2)) if len(vectors) > 1 else 0.0
    return 100 * distance / float(torch.stack(vectors).mean(dim=0).norm())


def one(name: str, shape: Shape, seed: int) -> dict[str, Any]:
    """Train one setting in this process, the peers in turn."""
    use_threads(1)
    began, (text, held_out), setting = time.monotonic(), whole_text(seed), SETTINGS[name]
    config = configured(setting, shape, seed)
    names = [f"peer-{i}" for i in range(shape.peers)]
    measured: dict[str, Any]
    if setting.outer.algorithm == "gossip":
        swaps = LocalGossip(config, names)
        train([swaps.collective(peer_id) for peer_id in names], config, shape, text, seed)
        states = swaps.states
        schema, own = (
            states[names[0]].schema,
            {peer_id: [part.clone() for part in state.theta] for peer_id, state in states.items()},
        )
        common, outer_steps = OuterState(schema, settling(config), own[names[0]]), states[names[0]].outer_step
        common.commit(1, "settled", settle(common, own))
        theta = common.theta
        sent = statistics.fmean(swaps.sent.values()) / outer_steps / schema.numel
        measured = {
            "own_loss": statistics.fmean(loss_of(schema, each, held_out, seed) for each in own.values()),
            "apart": round(apart(list(own.values())), 4),
            "sent": round(sent, 4),
            "received": round(sent, 4),
            "refused": swaps.refused,
        }
    else:
        run = LocalRun(config, names)
        counted = [Counting(run.collective(peer_id)) for peer_id in names]
        train(counted, config, shape, text, seed)
        schema, theta, outer_steps = run.state.schema, run.state.theta, run.state.outer_step
        measured = {
            "sent": round(counted[0].sent / outer_steps / schema.numel, 4),
            "received": round(counted[0].received / outer_steps / schema.numel, 4),
        }
    return {
        "setting": name,
        **asdict(shape),
        "seed": seed,
        "loss": loss_of(schema, theta, held_out, seed),
        **measured,
        "outer_steps": outer_steps,
        "s": round(time.monotonic() - began),
    }


def show(results: Results) -> None:
    """Print the table: means over the seeds, and the gap to DiLoCo with its interval."""
    head = f"{'setting':<26} {'seeds':>5} {'loss':>8} {'to DiLoCo, %':>18} {'own loss':>9}"
    print(f"{head} {'apart, %':>8} {'sent':>7} {'received':>8} {'refused':>7}")
    for name in SETTINGS:
        runs = [each for (of, _), each in results.items() if of == name]
        if not runs:
            continue

        def mean(key: str, runs: Sequence[dict[str, Any]] = runs) -> float:
            return statistics.fmean(each[key] for each in runs)

        gap = gaps(results, name, "DiLoCo") if name != "DiLoCo" else []
        wide = f" +- {half_width(gap):.3f}" if len(gap) > 1 else ""
        said = f"{statistics.fmean(gap):+.3f}{wide}" if gap else ""
        own = f"{mean('own_loss'):>9.4f} {mean('apart'):>8.3f}" if "apart" in runs[0] else f"{'':>9} {'':>8}"
        refused = f"{mean('refused'):>7.1f}" if "refused" in runs[0] else ""
        row = f"{name:<26} {len(runs):>5} {mean('loss'):>8.4f} {said:>18} {own}"
        print(f"{row} {mean('sent'):>7.3f} {mean('received'):>8.3f} {refused}")


def main() -> None:
    """Make the runs that are missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="a multiple of --every (300)")
    parser.add_argument("--every", type=int, default=30, metavar="H", help="inner steps between two exchanges (30)")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", help=f"only these: {', '.join(SETTINGS)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, metavar="N", help="runs at a time (one per core)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--print", action="store_true", help="make no run")
    parser.add_argument("--only", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = Shape(arguments.peers, arguments.steps, arguments.every)
    if arguments.only:
        print(json.dumps(one(arguments.only[0], shape, int(arguments.only[1]))))
        return
    if shape.every < 1 or shape.steps % shape.every:
        parser.error(f"--steps {shape.steps}: must be a multiple of --every {shape.every}")
    if unknown := set(arguments.settings or ()) - set(SETTINGS):
        parser.error(f"--settings {sorted(unknown)[0]!r}: known are {', '.join(map(repr, SETTINGS))}")
    chosen = arguments.settings or list(SETTINGS)
    done = recorded(arguments.results).get(shape, {})
    missing = [(name, seed) for seed in range(arguments.seeds) for name in chosen if (name, seed) not in done]
    failed = [] if arguments.print else make(missing, shape, arguments.results, arguments.processes, __file__)
    show(recorded(arguments.results).get(shape, {}))
    if failed:
        sys.exit(f"{len(failed)} of {len(missing)} runs failed")


if __name__ == "__main__":
    main()
