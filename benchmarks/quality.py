"""Validation loss at equal tokens: data-parallel training against exchanging every H steps, and streaming.

    .venv/bin/python benchmarks/quality.py                    # M = 2 and 4, 1200 steps: about 45 minutes on 2 idle cores
    .venv/bin/python benchmarks/quality.py --steps 300 --peers 2
    .venv/bin/python benchmarks/quality.py --steps 4800 --peers 2 --settings "DiLoCo, H 30" "DiLoCo, H 100"

M peers take N steps of B sequences each; data-parallel training takes N steps of M x B sequences. All see the same text (the
standard library's source, every peer in an order of its own), start from the same parameters and follow the same
learning rate. Loss: nats per byte of the outer parameters on held-out files. The gap is the loss minus
data-parallel's. Published for 35M parameters: H 30 / H 100: +0.03 / +0.05 with 2 peers, +0.09 / +0.13 with 4. The exchange is
in-process, with the codecs of a real run (int8 up, bf16 down). One line of JSON per setting is appended to
benchmarks/results/quality.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from edit.config.run import InnerConfig, ModelConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.lab.bench.apart import make_apart
from edit.lab.bench.results import Row, append_lines, one_line
from edit.lab.compare.corpus import whole_text
from edit.lab.compare.loop import enter, step_together
from edit.local import LocalRun
from peers.models.gpt import GPT
from peers.training.data import Batches, Tokens, evaluate
from peers.training.trainer import Trainer, use_threads

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
PUBLISHED = {(2, "H 30"): 0.03, (2, "H 100"): 0.05, (4, "H 30"): 0.09, (4, "H 100"): 0.13}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train. sync None: data-parallel."""

    name: str
    sync: SyncConfig | None = None
    penalty: bool = False


def settings(steps: int) -> list[Setting]:
    """Data-parallel, then what is compared with it."""

    def sync(every: int, groups: int = 1, **more: object) -> SyncConfig:
        return SyncConfig(every=every, outer_steps=steps * groups // every, groups=groups, **more)  # type: ignore[arg-type]

    return [
        Setting("data-parallel"),
        Setting("DiLoCo, H 30", sync(30)),
        Setting("DiLoCo, H 100", sync(100)),
        Setting("EDiT penalty, H 30", sync(30), penalty=True),
        Setting("streaming, H 30, 3 groups, 5 steps late", sync(30, 3, mode="delayed", delay=5, mix="replay")),
        Setting("streaming, H 100, 4 groups, 5 steps late", sync(100, 4, mode="delayed", delay=5, mix="replay")),
    ]


def outer(sync: SyncConfig) -> OuterConfig:
    """By the number of exchanges of each fragment, as docs/outer-settings.md says."""
    if sync.outer_steps // sync.groups < 30:
        return OuterConfig(optimizer="sgd", lr=1.0)
    return OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6)


def trainer(text: Tokens, inner: InnerConfig, steps: int, seed: int, stream: int) -> Trainer:
    model = ModelConfig()
    batches = Batches(text, model.context, inner.batch_size, stream)
    return Trainer(GPT(model, seed), batches, inner, total_steps=steps, device=torch.device("cpu"), clock=time.perf_counter)


def data_parallel(text: Tokens, peers: int, steps: int, seed: int) -> nn.Module:
    """M peers' gradients averaged every step: one model, batches M times as large."""
    alone = trainer(text, InnerConfig(batch_size=peers * InnerConfig().batch_size), steps, seed, stream=seed)
    for _ in range(steps):
        alone.step()
    return alone.model


def exchanging(setting: Setting, text: Tokens, peers: int, steps: int, seed: int) -> nn.Module:
    """One peer's model with the outer parameters in it, after all peers took their steps in turn."""
    assert setting.sync is not None
    config = RunConfig(seed=seed, sync=setting.sync, outer=outer(setting.sync), penalty=PenaltyConfig(enabled=setting.penalty))
    names = [f"peer-{i}" for i in range(peers)]
    run = LocalRun(config, names)
    trainers = [trainer(text, InnerConfig(), steps, seed, stream=seed + 1 + i) for i in range(peers)]
    joined = enter(trainers, [run.collective(name) for name in names], config)
    step_together(joined, lambda peer: peer.steps >= steps)
    for peer in joined:
        peer.worker.synchronize()
    model = GPT(ModelConfig(), seed)
    model.load_state_dict(joined[0].worker.outer_state_dict(), strict=False)
    return model


def one(name: str, peers: int, steps: int, seed: int) -> dict[str, object]:
    """Train one setting in this process."""
    use_threads(1)
    text, held_out = whole_text(seed)
    setting = next(setting for setting in settings(steps) if setting.name == name)
    began = time.monotonic()
    parallel = setting.sync is None
    model = data_parallel(text, peers, steps, seed) if parallel else exchanging(setting, text, peers, steps, seed)
    loss = evaluate(model, held_out, ModelConfig().context, 64)
    return {"setting": name, "peers": peers, "steps": steps, "seed": seed, "loss": loss, "s": round(time.monotonic() - began)}


def main() -> None:
    """Run every setting in a process of its own, two at a time; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="a multiple of 300, so that every H divides it")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", help="only these, and data-parallel training, by their names in the table")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(one(arguments.only, arguments.peers[0], arguments.steps, arguments.seed)))
        return
    known_names = [setting.name for setting in settings(arguments.steps)]
    if unknown := set(arguments.settings or ()) - set(known_names):
        parser.error(f"--settings {sorted(unknown)[0]!r}: known are {', '.join(map(repr, known_names))}")
    names = [name for name in known_names if not arguments.settings or name in ("data-parallel", *arguments.settings)]
    jobs = [(peers, name) for peers in sorted(arguments.peers, reverse=True) for name in names]

    def command(job: tuple[int, str]) -> tuple[Sequence[str], str]:
        words = [sys.executable, __file__, "--only", job[1], "--peers", str(job[0])]
        return [*words, "--steps", str(arguments.steps), "--seed", str(arguments.seed)], ""

    results: list[Row] = []

    def each(job: tuple[int, str], row: Row | Exception) -> None:
        if isinstance(row, Exception):
            print(f"{job[1]}, {job[0]} peers: failed: {one_line(row)}", file=sys.stderr)
        else:
            results.append(row)

    make_apart(jobs, command, os.cpu_count() or 2, each)
    base = {result["peers"]: result["loss"] for result in results if result["setting"] == "data-parallel"}
    print(f"{'peers':>5}  {'setting':<44} {'loss':>7} {'gap':>8} {'published':>10} {'s':>5}")
    for result in sorted(results, key=lambda r: (r["peers"], names.index(r["setting"]))):
        setting, peers = result["setting"], result["peers"]
        gap = result["loss"] - base[peers] if peers in base else None  # where that one failed
        known = next((v for (m, h), v in PUBLISHED.items() if m == peers and setting.endswith(h)), None)
        print(
            f"{peers:>5}  {setting:<44} {result['loss']:>7.4f} {'' if gap is None else f'{gap:+.4f}':>8} "
            f"{'' if known is None else f'{known:+.2f}':>10} {result['s']:>5}"
        )
        append_lines(RESULTS, [{**result, "gap": None if gap is None else round(gap, 4), "published_gap_35m": known}])
    if len(results) < len(jobs):
        sys.exit(f"{len(jobs) - len(results)} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
