"""What one bad peer, or a lasting change, does to a run: with the penalty off, with the paper's detector and with ours.

    nice -n 5 .venv/bin/python benchmarks/damage.py           # 3 seeds: about 5 minutes of one core
    .venv/bin/python benchmarks/damage.py --seeds 0 --peers 8 --kinds x3 zeros --out /tmp/some

Real training in one process (`LocalRun`): a small byte-level GPT on the source of Python's standard library, a different part
for each peer, with the codecs of a real run (int8 up, bf16 down); learning rates and outer settings are the same everywhere.

Damage: the last of 4 peers is bad, in every round, or in a burst of 2 rounds past the middle of the run; for some kinds also
the last of 2. It trains on shuffled labels or on one label, or what it sends is replaced, fragment by fragment, before it is
merged: by random bytes in place of the int8 payload, by zeros, by Gaussian noise of the same norm, or by a multiple.
`absent` is a run without that peer: what a perfect judge makes of damage in every round.
Changes: past the middle, one of 4 peers goes from 4 to 15 inner steps a round, or all peers' learning rate rises 10 times.

Loss: nats per byte of the outer parameters on held-out files; the mean over the seeds (of model, held-out files, order, damage)
of its difference to the clean run of the same seed and setting, and its range. Caught: how many of the bad contributions to a
fragment had no weight, in %; weight: their mean share of the merged fragment; honest: honest contributions without a weight, in
%. Of changes: how many contributions of those that changed had no weight, and in which round after the change the last one was
(1: the first; of 16); for each seed. A table goes to damage.txt, one line of JSON per run to damage.jsonl as soon as it
has ended; --resume goes on after those.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edit.codecs import codec, decode
from edit.config.run import InnerConfig, ModelConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.lab.demo.corpus import SourceFile, plan_corpus, standard_library
from edit.local import LocalCollective, LocalRun
from edit.records import Committed, Contribution, EncodedTensor, Lacks, Outcome, Snapshot, Verdict
from edit.worker.worker import EditWorker, WorkerConfig
from peers.models.gpt import GPT
from peers.training.data import SEPARATOR, Batches, Tokens, evaluate
from peers.training.trainer import learning_rate, use_threads

RESULTS = Path(__file__).parent / "results"
MODEL = ModelConfig(layers=2, heads=4, width=48, context=32)
INNER = InnerConfig(warmup_steps=20)
OUTER = OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6)
SETTINGS = {"off": PenaltyConfig(enabled=False), "edit": PenaltyConfig(detector="edit"), "level": PenaltyConfig()}
PEERS, ROUNDS, EVERY = 4, 24, 4  # EVERY: inner steps of a round
BURST = range(17, 19)  # outer steps
CHANGE, ROUNDS_OF_CHANGES, MORE_STEPS = 16, 32, 15  # CHANGE: an outer step; MORE_STEPS: of a round after it
Vector = Callable[[Tensor, torch.Generator], Tensor]


def random_bytes(sent: EncodedTensor, generator: torch.Generator) -> EncodedTensor:
    """Return as many random bytes: int8 values, and scales that may be anything, NaN and Inf included."""
    data = torch.randint(0, 256, (memoryview(sent.data).nbytes,), dtype=torch.uint8, generator=generator)
    return replace(sent, data=data.numpy().tobytes())


def random_values(sent: EncodedTensor, generator: torch.Generator) -> EncodedTensor:
    """Return random int8 values with the scales as they were: no direction, and about twice the norm."""
    values = torch.randint(0, 256, (sent.numel,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    return replace(sent, data=bytes(sent.data)[: -sent.numel] + values)


def noise(vector: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gaussian noise of the same norm."""
    drawn = torch.randn(vector.shape, generator=generator)
    return drawn * float(vector.norm() / drawn.norm())


def times(factor: float) -> Vector:
    """Return what multiplies a vector by `factor`."""
    return lambda vector, _: vector * factor


VECTORS: dict[str, Vector] = {
    "zeros": times(0.0),
    "x3": times(3.0),
    "x-3": times(-3.0),
    "x100": times(100.0),
    "x-1": times(-1.0),
    "equal noise": noise,
}
PAYLOADS = {"random bytes": random_bytes, "random values": random_values}
LABELS = ("shuffled labels", "one label")
KINDS = (*PAYLOADS, *LABELS, *VECTORS)
OF_TWO = ("x3", "x100", "x-1")
CHANGES = ("more steps", "warm restart")
Result = tuple["Case", dict[str, Any]]
Judged = dict[int, dict[str, tuple[Verdict, float]]]  # by fragment and peer: verdict and weight


@dataclass(frozen=True, slots=True)
class Case:
    """One run, but for its seed."""

    setting: str
    # Of the damage or of the change; `clean`, `absent`.
    kind: str
    # `always`, `burst`, `change`.
    when: str
    peers: int = PEERS

    @property
    def hurt(self) -> range:
        """The outer steps in which the last peer is bad."""
        if self.kind not in KINDS:
            return range(0)
        return range(ROUNDS) if self.when == "always" else BURST


class Tapped(LocalCollective):
    """The side of one peer: keeps the verdicts of every commit, and sends something else, or works longer, where it is told to.

    Nobody but the last peer of a case does either.
    """

    def __init__(self, run: LocalRun, peer_id: str, seed: int) -> None:
        super().__init__(run, peer_id)
        self.case: Case | None = None
        self.judged: dict[int, Judged] = {}  # by the outer step that the contributions were computed against
        self._generator = torch.Generator().manual_seed(seed)
        self._schema: Schema | None = None

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        """See `Collective.join`."""
        self._schema = schema
        return super().join(schema, found, shards, lacks)

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`."""
        case = self.case
        if case is not None and contribution.outer_step in case.hurt and case.kind not in LABELS:
            contribution = replace(contribution, payload=self._damaged(contribution, case.kind))
        super().contribute(contribution)

    def _damaged(self, contribution: Contribution, kind: str) -> EncodedTensor:
        assert self._schema is not None
        sent = contribution.payload
        if kind in PAYLOADS:
            return PAYLOADS[kind](sent, self._generator)
        vector = VECTORS[kind](decode(sent), self._generator)
        return codec(sent.codec).encode(vector, self._schema.fragments[contribution.fragment_id])

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = super().outcome(outer_step, block=block)
        if isinstance(outcome, Committed):
            self.judged[outer_step] = {
                part.fragment_id: {one.peer_id: (one.verdict, one.weight) for one in part.verdicts}
                for part in outcome.commit.fragments
            }
            if self.case is not None and self.case.kind == "more steps" and outcome.commit.outer_step >= CHANGE:
                return replace(outcome, inner_steps=MORE_STEPS)
        return outcome


class Peer:
    """One peer's training: its own model, optimizer, text and order."""

    def __init__(self, text: Tokens, collective: Tapped, config: RunConfig, seed: int, stream: int) -> None:
        self.collective = collective
        self.model = GPT(MODEL, seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=INNER.lr, betas=(INNER.beta1, INNER.beta2), weight_decay=INNER.weight_decay, fused=True
        )
        self.worker = EditWorker(self.model, self.optimizer, collective, WorkerConfig.of(config))
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(Batches(text, MODEL.context, INNER.batch_size, stream))
        self._generator = torch.Generator().manual_seed(stream)

    def step(self, rate: float, labels: str = "") -> None:
        """Take one inner step at this learning rate; labels: how they are damaged."""
        inputs, targets = next(self._batches)
        if labels == "shuffled labels":
            targets = targets.flatten()[torch.randperm(targets.numel(), generator=self._generator)].view_as(targets)
        elif labels == "one label":
            targets = torch.full_like(targets, ord("e"))
        elif labels == "flipped labels":
            targets = 255 - targets
        self.optimizer.zero_grad()
        self.model(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), INNER.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.worker.count_tokens(targets.numel())


@cache
def corpus(peers: int, seed: int) -> tuple[list[Tokens], Tokens]:
    """Return each peer's text, and what is held out of all."""
    groups = plan_corpus(standard_library(), peers, seed)

    def joined(files: Iterable[SourceFile], origin: str) -> Tokens:
        return Tokens(np.frombuffer(bytes([SEPARATOR]).join(f.path.read_bytes() for f in files), np.uint8), origin, 256)

    texts = [joined(group.train, f"peer-{i}") for i, group in enumerate(groups)]
    return texts, joined((file for group in groups for file in group.held_out), "held out")


class Training:
    """One run that is trained round by round; clean, or with a peer absent, until it is told to become another case."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed, self.done = case, seed, 0
        texts, self._held_out = corpus(case.peers, seed)
        self._rounds = ROUNDS_OF_CHANGES if case.when == "change" else ROUNDS
        sync = SyncConfig(every=EVERY, outer_steps=self._rounds)
        config = RunConfig(seed=seed, sync=sync, outer=OUTER, penalty=SETTINGS[case.setting])
        texts = texts[:-1] if case.kind == "absent" else texts
        run = LocalRun(config, [f"peer-{i}" for i in range(len(texts))])
        self._peers = [Peer(text, Tapped(run, f"peer-{i}", seed), config, seed, 100 * seed + i) for i, text in enumerate(texts)]
        for peer in self._peers:
            peer.worker.__enter__()
        self.become(case)

    def become(self, case: Case) -> None:
        """Go on as this case, which may differ in its kind and when that begins."""
        self.case = case
        if case.kind not in ("clean", "absent"):
            self._peers[-1].collective.case = case

    def go_on(self, rounds: int) -> None:
        """Train until so many rounds are done."""
        for number in range(self.done, rounds):
            changes = self.case.when == "change" and number >= CHANGE
            raised = 10.0 if changes and self.case.kind == "warm restart" else 1.0
            for i, peer in enumerate(self._peers):
                last = i == self.case.peers - 1
                for step in range(MORE_STEPS if last and changes and self.case.kind == "more steps" else EVERY):
                    position = number * EVERY + min(step, EVERY - 1)
                    rate = raised * learning_rate(INNER, position, self._rounds * EVERY)
                    peer.step(rate, self.case.kind if last and number in self.case.hurt else "")
        self.done = rounds

    def finish(self) -> dict[str, Any]:
        """Train to the end and return what became of it."""
        self.go_on(self._rounds)
        for peer in self._peers:
            peer.worker.synchronize()
        model = GPT(MODEL, self.seed)
        model.load_state_dict(self._peers[0].worker.outer_state_dict(), strict=False)
        loss = evaluate(model, self._held_out, MODEL.context, 32)
        judged = self._peers[0].collective.judged
        if len(judged) != self._rounds:
            raise RuntimeError(f"{self.case}: {len(judged)} of {self._rounds} rounds were seen")
        counted = changed(judged, self.case) if self.case.when == "change" else caught(judged, self.case)
        return {"loss": round(loss, 4) if math.isfinite(loss) else None, **counted}


def forked(training: Training, case: Case) -> dict[str, Any]:
    """Finish a training as this case in a fork of this process: what was trained so far is shared, and stays as it is here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            training.become(case)
            os.write(write, json.dumps(training.finish()).encode())  # shorter than a pipe's buffer
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as result:
        text = result.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{case} failed")
    return dict(json.loads(text))


def trained(setting: str, peers: int, kinds: Sequence[str], seed: int, known: Set[Case]) -> Iterator[Result]:
    """Train what is not known of the damage of one setting, number of peers and seed."""
    clean = Case(setting, "clean", "always", peers)
    for kind in ("absent", *kinds):
        if (case := replace(clean, kind=kind)) not in known:
            yield case, Training(case, seed).finish()
    bursts = [replace(clean, kind=kind, when="burst") for kind in kinds]
    yield from branches(clean, BURST.start, [case for case in bursts if case not in known], seed, known)


def branches(clean: Case, begin: int, cases: Sequence[Case], seed: int, known: Set[Case]) -> Iterator[Result]:
    """Train a clean run; the cases go on from what it is after `begin` rounds."""
    if not cases and clean in known:
        return
    training = Training(clean, seed)
    training.go_on(begin)
    for case in cases:
        yield case, forked(training, case)
    if clean not in known:
        yield clean, training.finish()


def everything(kinds: Sequence[str], peers: Sequence[int], seed: int, known: Set[Case]) -> Iterator[Result]:
    """Train what is not known of one seed."""
    for setting in SETTINGS:
        for count in peers:
            yield from trained(setting, count, [kind for kind in kinds if count != 2 or kind in OF_TWO], seed, known)
        clean = Case(setting, "clean", "change")
        changes = [case for kind in CHANGES if (case := replace(clean, kind=kind)) not in known]
        # The commit of the last round before the change says how many steps the next one has.
        yield from branches(clean, CHANGE - 1, changes, seed, known)


def caught(judged: dict[int, Judged], case: Case) -> dict[str, Any]:
    """Count the verdicts and weights of the bad contributions, and the honest ones without a weight."""
    of_bad, of_honest, weights = Counter[str](), Counter[str](), []
    for step, parts in judged.items():
        for peer_id, (verdict, weight) in ((p, found) for part in parts.values() for p, found in part.items()):
            bad = step in case.hurt and peer_id == f"peer-{case.peers - 1}"
            (of_bad if bad else of_honest)[verdict.value] += 1
            if bad:
                weights.append(weight)
    return {"bad": dict(of_bad), "bad_weight": round(fmean(weights), 4) if weights else None, "honest": dict(of_honest)}


def changed(judged: dict[int, Judged], case: Case) -> dict[str, Any]:
    """Count the contributions without a weight of those that changed: how many, and when the last one was."""
    names = {f"peer-{case.peers - 1}"} if case.kind == "more steps" else {f"peer-{i}" for i in range(case.peers)}
    found = [
        step - CHANGE + 1
        for step, parts in judged.items()
        if step >= CHANGE
        for part in parts.values()
        for peer_id, (verdict, _) in part.items()
        if peer_id in names and verdict is not Verdict.OK
    ]
    return {"rejected": len(found), "rejected_last": max(found, default=0)}


def table(results: Mapping[Case, Mapping[int, dict[str, Any]]]) -> list[str]:
    """Return the lines of the tables: results by case and seed."""
    lines = []
    for when, peers in sorted({(case.when, case.peers) for case in results}, key=lambda key: (key[0], -key[1])):
        what = {"always": "bad in every round", "burst": "bad in 2 rounds", "change": "a lasting change"}[when]
        head = "rejected (last)" if when == "change" else "caught weight honest"
        columns = [f"{setting + ': loss (lowest highest)':<30}{head}" for setting in SETTINGS]
        lines += ["", _line(f"{what}, {peers} peers", columns)]
        kinds = {case.kind for case in results if (case.when, case.peers) == (when, peers)}
        for kind in (kind for kind in ("clean", "absent", *KINDS, *CHANGES) if kind in kinds):
            lines.append(_line(kind, [_cell(results, Case(setting, kind, when, peers)) for setting in SETTINGS]))
    return lines


def _line(name: str, cells: Sequence[str]) -> str:
    return (f"{name:<30}" + "".join(f"{cell:<54}" for cell in cells)).rstrip()


def _cell(results: Mapping[Case, Mapping[int, dict[str, Any]]], case: Case) -> str:
    clean = results.get(replace(case, kind="clean", when="always" if case.when == "burst" else case.when), {})
    by_seed = {seed: found for seed, found in sorted(results.get(case, {}).items()) if seed in clean}
    if not by_seed:
        return ""
    losses = {seed: math.inf if one["loss"] is None else float(one["loss"]) for seed, one in by_seed.items()}
    differences = [loss if case.kind == "clean" else loss - clean[seed]["loss"] for seed, loss in losses.items()]
    found = list(by_seed.values())
    sign = "" if case.kind == "clean" else "+"
    summary = fmean(differences), min(differences), max(differences)
    shown = [f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.0e}" for value in summary]
    loss = f"{shown[0]} ({shown[1]} {shown[2]})"
    if case.when == "change":
        rejected = ", ".join(f"{one['rejected']} ({one['rejected_last']})" for one in found)
        return f"{loss:<30}{rejected}"
    bad, honest = (sum((Counter(one[who]) for one in found), Counter[str]()) for who in ("bad", "honest"))
    rejected = f"{100 * (1 - honest['ok'] / honest.total()):.1f}"
    if not bad:
        return f"{loss:<30}{'':>6} {'':>6} {rejected:>6}"
    weight = fmean(one["bad_weight"] for one in found)
    return f"{loss:<30}{100 * (1 - bad['ok'] / bad.total()):>6.0f} {weight:>6.3f} {rejected:>6}"


def read(lines: Path) -> dict[Case, dict[int, dict[str, Any]]]:
    """Return the runs that are recorded, by case and seed."""
    results: dict[Case, dict[int, dict[str, Any]]] = {}
    for line in lines.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        case = Case(found["setting"], found["kind"], found["when"], found["peers"])
        results.setdefault(case, {})[found["seed"]] = found
    return results


def main() -> None:
    """Train every case with every seed; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--peers", type=int, nargs="+", default=[PEERS, 2])
    parser.add_argument("--resume", action="store_true", help="go on from the lines that are there, whoever stopped")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of damage.txt and damage.jsonl")
    arguments = parser.parse_args()
    use_threads(1)
    about = {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    lines = arguments.out / "damage.jsonl"
    if not arguments.resume:
        lines.write_text("")
    for seed in arguments.seeds:
        known = {case for case, found in read(lines).items() if seed in found}
        for case, found in everything(arguments.kinds, arguments.peers, seed, known):
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **asdict(case), "seed": seed, **found}) + "\n")
    results = read(lines)
    parameters = sum(parameter.numel() for parameter in GPT(MODEL, 0).parameters())
    size = f"{parameters} parameters in 4 fragments, {INNER.batch_size} x {MODEL.context} bytes a step"
    text = [
        f"{about['date']}, {about['machine']}; python benchmarks/damage.py",
        f"GPT of {size}; {ROUNDS} rounds of {EVERY} steps, {ROUNDS_OF_CHANGES} with changes",
        "loss: of clean runs in nats per byte, of others the difference to the clean run; caught, honest: % without weight",
        *table(results),
    ]
    print("\n".join(text))
    (arguments.out / "damage.txt").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
