"""What a hostile third does to a run: with a plain mean, with the penalty, and with each robust rule.

    python benchmarks/hostile_third.py                        # 3 seeds: about an hour of one core
    python benchmarks/hostile_third.py --seeds 0 --attacks "sign flip" mimic --rules mean recommended

Real training in one process, as benchmarks/damage.py has it: a small byte-level GPT on the source of Python's standard library,
a different part for each of 9 peers; 3 of them attack in every round. They know what the honest peers have contributed to the
round before they contribute themselves, and keep their norms plausible: as long as the median of the honest, unless said.

sign flip: their own pseudo-gradients, reversed; `half`: half as long. reversed mean: minus the honest mean; `noisy`: with noise
of their own (cosine 0.9 to each other). IPM (Xie et al. 2019): minus half of the honest mean, not lengthened. ALIE (Baruch et
al. 2019): the honest mean less 1.5 standard deviations, element by element, not lengthened. label flip: they train on 255 minus
each byte. replay: the last update. one direction: a random one for all, noisy. noise: Gaussian. mimic
(Karimireddy et al. 2022): all repeat the first honest peer. one fragment: minus the honest mean, 2.5 times as long as the
median in one fragment and a twentieth as long in the others, so that the whole is about as long as that of an honest one.

Rules: `mean` and `penalty` (the defaults) without [robust]; `recommended`: geometric_median with its defaults and hostile = 3;
`by model`: it with robust.scope = "model"; `as sent`: it without mixing and equal lengths; `clip by loss` and `recommended by
loss`: with robust.trust = "loss", a scorer that measures 64 windows of held-out text, on none of which the loss below is
measured; the others with their defaults. Loss: nats per byte of the outer parameters on held-out files, the mean over the
seeds, and in % of that of a plain mean of the six honest peers alone. One line of JSON per run goes to hostile_third.jsonl as
soon as it has ended; runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # before site-packages: opacus installs a package `benchmarks`, too

import numpy as np
import torch
from torch import Tensor

from benchmarks.damage import INNER, MODEL, OUTER, Peer, Tapped, corpus
from edit.codecs import codec, decode
from edit.config.robust import RobustConfig
from edit.config.run import PenaltyConfig, RoundsConfig, RunConfig, SyncConfig
from edit.fragments.digest import digest
from edit.local import LocalRun, Scorer
from edit.merging.trust import scores
from edit.records import Commit, Committed, Contribution, Outcome
from edit.replica.layout import exchanged
from peers.models.gpt import GPT
from peers.training.data import Tokens, evaluate
from peers.training.trainer import learning_rate, use_threads

RESULTS = Path(__file__).parent / "results" / "hostile_third.jsonl"
PEERS, HOSTILE, ROUNDS, EVERY = 9, 3, 24, 12
OFF = PenaltyConfig(enabled=False)
RULES: dict[str, dict[str, Any]] = {
    "mean": {"penalty": OFF},
    "penalty": {},
    "trimmed_mean": {"robust": RobustConfig(rule="trimmed_mean", hostile=HOSTILE)},
    "median": {"robust": RobustConfig(rule="median", hostile=HOSTILE)},
    "multi_krum": {"robust": RobustConfig(rule="multi_krum", hostile=HOSTILE)},
    "centered_clip": {"robust": RobustConfig(rule="centered_clip", hostile=HOSTILE)},
    "as sent": {"robust": RobustConfig(rule="geometric_median", hostile=HOSTILE, mixing="none", equalise=False)},
    "recommended": {"robust": RobustConfig(rule="geometric_median", hostile=HOSTILE)},
    "by model": {"robust": RobustConfig(rule="geometric_median", hostile=HOSTILE, scope="model")},
    "clip by loss": {"robust": RobustConfig(rule="clip", trust="loss")},
    "recommended by loss": {"robust": RobustConfig(rule="geometric_median", hostile=HOSTILE, trust="loss")},
}
BATCHES, WINDOWS_PER_BATCH, SCORED_WINDOWS = 32, 16, 64


@dataclass
class Known:
    """What an attacker knows."""

    generator: torch.Generator
    # Of the fragment in this round, by peer.
    honest: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    # The last update, by fragment.
    merged: dict[int, Tensor] = field(default_factory=dict)
    # One direction for all attackers, by fragment and outer step.
    drawn: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def noise(self, like: Tensor) -> Tensor:
        """Return Gaussian noise as long as a vector."""
        drawn = torch.randn(like.shape, generator=self.generator)
        return drawn * float(like.norm() / drawn.norm())

    def noisy(self, vector: Tensor) -> Tensor:
        """Return it with noise, such that two of these have cosine 0.9."""
        return vector + self.noise(vector) / 3

    def direction(self, key: tuple[int, int], like: Tensor) -> Tensor:
        """Return the direction of this fragment and outer step."""
        return self.drawn.setdefault(key, self.noise(like))


def concentrated(known: Known, key: tuple[int, int], own: Tensor, honest: Tensor) -> Tensor:
    """Return minus the honest mean: long in fragment 1, short in the others."""
    mean, length = honest.mean(dim=0), median(float(one.norm()) for one in honest)
    return -mean * (length * (2.5 if key[0] == 1 else 0.05) / float(mean.norm()))


Attack = Callable[[Known, tuple[int, int], Tensor, Tensor], Tensor]  # known, (fragment, outer step), own, honest [n, numel]
# The second: the length, of the median of the honest; 0: as it is.
ATTACKS: dict[str, tuple[Attack, float]] = {
    "none": (lambda known, key, own, honest: own, 0.0),
    "sign flip": (lambda known, key, own, honest: -own, 1.0),
    "sign flip, half": (lambda known, key, own, honest: -own, 0.5),
    "reversed mean": (lambda known, key, own, honest: -honest.mean(dim=0), 1.0),
    "reversed mean, noisy": (lambda known, key, own, honest: known.noisy(-honest.mean(dim=0)), 1.0),
    "IPM": (lambda known, key, own, honest: -0.5 * honest.mean(dim=0), 0.0),
    "ALIE": (lambda known, key, own, honest: honest.mean(dim=0) - 1.5 * honest.std(dim=0), 0.0),
    "label flip": (lambda known, key, own, honest: own, 0.0),
    "replay": (lambda known, key, own, honest: known.merged.get(key[0], own), 1.0),
    "one direction": (lambda known, key, own, honest: known.noisy(known.direction(key, own)), 1.0),
    "noise": (lambda known, key, own, honest: known.noise(own), 1.0),
    "mimic": (lambda known, key, own, honest: honest[0], 0.0),
    "one fragment": (concentrated, 0.0),
}


class Side(Tapped):
    """The side of one peer; a hostile one sends something else. The honest ones contribute before them in every round."""

    def __init__(self, run: LocalRun, peer_id: str, seed: int, known: Known, attack: str) -> None:
        super().__init__(run, peer_id, seed)
        self._known, self._attack = known, attack

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`."""
        known, key = self._known, (contribution.fragment_id, contribution.outer_step)
        own = decode(contribution.payload)
        if not self._attack:
            known.honest.setdefault(key, {})[self.peer_id] = own
        else:
            assert self._schema is not None
            honest = torch.stack(list(known.honest[key].values()))
            attack, length = ATTACKS[self._attack]
            sent = attack(known, key, own, honest)
            if length and (size := float(sent.norm())):
                sent = sent * (length * median(float(one.norm()) for one in honest) / size)
            payload = codec(contribution.payload.codec).encode(sent, self._schema.fragments[contribution.fragment_id])
            contribution = replace(contribution, payload=payload)
        super().contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = super().outcome(outer_step, block=block)
        if isinstance(outcome, Committed):
            self._learn(outcome.commit)
        return outcome

    def _learn(self, commit: Commit) -> None:
        for part in commit.fragments:
            if part.payload is not None:
                self._known.merged[part.fragment_id] = decode(part.payload)


def judge(held_out: Tokens, seed: int) -> Scorer:
    """Return a scorer, on windows of the held-out text that `evaluate` leaves out, drawn by theta's digest."""
    model = GPT(MODEL, seed).eval()
    schema, named = exchanged(model, "local")
    available = (len(held_out) - 1) // MODEL.context
    measured = np.arange(BATCHES * WINDOWS_PER_BATCH) * available // (BATCHES * WINDOWS_PER_BATCH)
    others = np.setdiff1d(np.arange(available), measured) * MODEL.context

    @torch.no_grad()
    def loss(rows: Tensor, fragments: Sequence[Tensor]) -> float:
        for flat, fragment in zip(fragments, schema.fragments, strict=True):
            for part, spec in zip(torch.split(flat, [each.numel for each in fragment.tensors]), fragment.tensors, strict=True):
                named[spec.name].copy_(part.view(spec.shape))
        return float(model(rows[:, :-1], rows[:, 1:]))

    def score(theta: Sequence[Tensor], sent: Iterable[tuple[str, Mapping[int, Tensor]]]) -> Mapping[str, float]:
        starts = np.random.default_rng(int(digest(theta)[:16], 16)).choice(others, SCORED_WINDOWS, replace=False)
        return scores(theta, sent, partial(loss, held_out.windows(starts, MODEL.context + 1)))

    return score


def trained(rule: str, attack: str, seed: int) -> float:
    """Return the held-out loss of a run. attack: empty for the honest peers alone."""
    texts, held_out = corpus(PEERS, seed)
    count = PEERS if attack else PEERS - HOSTILE
    settings = RULES[rule]
    least = settings["robust"].least if "robust" in settings else 1
    config = RunConfig(
        seed=seed,
        sync=SyncConfig(every=EVERY, outer_steps=ROUNDS),
        outer=OUTER,
        rounds=RoundsConfig(quorum=least, start_peers=max(1, least)),
        **settings,
    )
    scorer = judge(held_out, seed) if config.robust.scored else None
    run = LocalRun(config, [f"peer-{i}" for i in range(count)], scorer=scorer)
    known = Known(torch.Generator().manual_seed(seed))
    bad = [i >= PEERS - HOSTILE and attack != "none" for i in range(count)]
    sides = [Side(run, f"peer-{i}", seed, known, attack if bad[i] else "") for i in range(count)]
    peers = [Peer(texts[i], side, config, seed, 100 * seed + i) for i, side in enumerate(sides)]
    for peer in peers:
        peer.worker.__enter__()
    for number in range(ROUNDS):
        for i, peer in enumerate(peers):
            for step in range(EVERY):
                rate = learning_rate(INNER, number * EVERY + step, ROUNDS * EVERY)
                peer.step(rate, "flipped labels" if bad[i] and attack == "label flip" else "")
        known.honest.clear()
        known.drawn.clear()
    for peer in peers:
        peer.worker.synchronize()
    model = GPT(MODEL, seed)
    model.load_state_dict(peers[0].worker.outer_state_dict(), strict=False)
    return evaluate(model, held_out, MODEL.context, BATCHES, WINDOWS_PER_BATCH)


def table(found: Mapping[tuple[str, str, int], float], rules: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the lines of the table."""
    alone = {seed: found["mean", "", seed] for seed in seeds}
    lines = [f"the six honest peers alone, plain mean: {fmean(alone.values()):.3f}"]
    lines += [f"{'':<22}" + "".join(f"{rule:>20}" for rule in rules)]
    for attack in ATTACKS:
        cells = []
        for rule in rules:
            losses = [found[rule, attack, seed] for seed in seeds if (rule, attack, seed) in found]
            if len(losses) < len(seeds):
                cells.append("")
                continue
            worse = 100 * (fmean(losses) / fmean(alone.values()) - 1)
            cells.append(f"{fmean(losses):.3f} ({worse:+.1f} %)" if math.isfinite(worse) else "not finite")
        if any(cells):
            lines.append(f"{attack:<22}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


def main() -> None:
    """Train every rule under every attack with every seed; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    use_threads(1)
    about = {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    found: dict[tuple[str, str, int], float] = {}
    if arguments.out.exists():
        for line in arguments.out.read_text().splitlines():
            each = json.loads(line)
            found[each["rule"], each["attack"], each["seed"]] = math.nan if each["loss"] is None else each["loss"]
    for seed in arguments.seeds:
        for attack, rule in [("", "mean"), *((attack, rule) for attack in arguments.attacks for rule in arguments.rules)]:
            if (rule, attack, seed) not in found:
                loss = found[rule, attack, seed] = trained(rule, attack, seed)
                kept = round(loss, 4) if math.isfinite(loss) else None
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**about, "rule": rule, "attack": attack, "seed": seed, "loss": kept}) + "\n")
    print("\n".join(table(found, arguments.rules, arguments.seeds)))


if __name__ == "__main__":
    main()
