"""LocalRun with arrivals and with contributions that outlive their round, and workers in it: fast and slow, late and stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RoundsConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import LocalProtocolError
from edit.fragments.schema import plan_fragments
from edit.local import LocalCollective, LocalRun
from edit.records import Aborted, Commit, Committed, Contribution, Finished
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.encoded import LOSSY, encode
from tests.support.exhaustive import rarely
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted_peer import flat

ARRIVALS = RoundsConfig(merging="arrivals", max_staleness=16)
SCHEMA = plan_fragments(small_mlp().named_parameters())


DAMPED = PenaltyConfig(enabled=False, damping=0.5)


def configured(
    rounds: RoundsConfig,
    outer: OuterConfig | None = None,
    sync: SyncConfig | None = None,
    penalty: PenaltyConfig | None = None,
) -> RunConfig:
    return RunConfig(
        sync=sync or SyncConfig(every=4),
        outer=outer or OuterConfig(optimizer="sgd", lr=1.0),
        penalty=penalty or PenaltyConfig(enabled=False),
        codec=CodecConfig(up="fp32", down="fp32"),
        rounds=rounds,
        storage=StorageConfig(keep_updates=64),
    )


def founded(config: RunConfig, names: Sequence[str] = "ab") -> tuple[LocalRun, list[LocalCollective]]:
    run = LocalRun(config, list(names))
    sides = [run.collective(name) for name in names]
    for side in sides:
        side.join(SCHEMA, lambda: flat(small_mlp()))
    return run, sides


def contribute(side: LocalCollective, outer_step: int, value: float = 1.0, tokens: int = 10) -> None:
    for fragment in SCHEMA.fragments:
        payload = encode("fp32", torch.full((fragment.numel,), value))
        side.contribute(
            Contribution(outer_step=outer_step, fragment_id=fragment.fragment_id, inner_steps=1, tokens=tokens, payload=payload)
        )


def weight(commit: Commit, peer_id: str) -> float | None:
    verdict = commit.fragments[0].verdict_of(peer_id)
    return verdict.weight if verdict else None


def answer(side: LocalCollective, outer_step: int) -> Committed:
    outcome = side.outcome(outer_step, block=True)
    assert isinstance(outcome, Committed)
    return outcome


# The run's answers.


def test_each_arrival_is_a_commit_and_counts_the_less_the_staler_it_is() -> None:
    run, (a, b) = founded(configured(ARRIVALS, penalty=DAMPED))
    for outer_step in range(3):
        contribute(a, outer_step)
    contribute(b, 0)
    assert run.state.outer_step == 4
    assert [weight(answer(a, outer_step).commit, "a") for outer_step in range(4)] == [1.0, 1.0, 1.0, None]
    assert weight(answer(b, 3).commit, "b") == 0.5, "(1 + 3) ** -0.5"


def test_a_peer_is_told_that_its_contribution_comes_later() -> None:
    run, (a, b) = founded(configured(RoundsConfig(max_staleness=2)))
    contribute(a, 0)
    run.close("deadline")
    contribute(b, 0)
    assert answer(b, 0).carried and not answer(a, 0).carried, "a is part of it"
    contribute(a, 1, 3.0)
    commit = answer(b, 1).commit
    assert weight(commit, "b") == pytest.approx(2**-0.5 / (1 + 2**-0.5)) and answer(b, 0).carried
    assert run.state.outer_step == 2 and not answer(b, 1).carried


def test_what_is_too_stale_is_refused_with_the_reason() -> None:
    run, (a, b) = founded(configured(RoundsConfig(max_staleness=1)))
    contribute(a, 0)
    run.close("deadline")
    contribute(a, 1)
    run.close("deadline")
    contribute(b, 0)
    assert b.outcome(2, block=True) == Aborted("computed against outer step 0; the run is at 2, max_staleness = 1")
    assert not answer(b, 1).carried
    contribute(b, 1)
    assert b.outcome(2, block=False) is None, "news of the one before are over"
    contribute(a, 2)
    assert weight(answer(b, 2).commit, "b") is not None


def test_half_a_contribution_that_becomes_too_stale_is_dropped() -> None:
    run, (a, b) = founded(configured(RoundsConfig(max_staleness=1)))
    payload = encode("fp32", torch.ones(SCHEMA.fragments[0].numel))
    b.contribute(Contribution(outer_step=0, fragment_id=0, inner_steps=1, tokens=1, payload=payload))
    for outer_step in range(2):
        contribute(a, outer_step)
        run.close("deadline")
    assert b.outcome(2, block=True) == Aborted("computed against outer step 0; the run is at 2, max_staleness = 1")


def test_without_staleness_a_late_contribution_is_lost_as_ever() -> None:
    run, (a, b) = founded(configured(RoundsConfig()))
    contribute(a, 0)
    run.close("deadline")
    contribute(b, 0)
    assert not answer(b, 0).carried and run.complete == ()
    with pytest.raises(LocalProtocolError, match="no contribution is complete"):
        run.close("deadline")


def test_the_run_ends_when_enough_tokens_are_merged() -> None:
    run, (a,) = founded(configured(RoundsConfig(), sync=SyncConfig(every=4, tokens=25)), "a")
    for outer_step in range(2):
        contribute(a, outer_step)
        assert not run.finished
    contribute(a, 2)
    assert run.finished and a.outcome(3, block=True) == Finished(3)


# Workers.


class Peer:
    def __init__(self, run: LocalRun, config: RunConfig, peer_id: str, seed: int) -> None:
        self.model = small_mlp(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.worker = EditWorker(self.model, self.optimizer, run.collective(peer_id), WorkerConfig.of(config))
        self.batches = regression_batches(0)  # one task for all: what is measured is the rule, not the data
        self.commits: dict[int, Commit] = {}

    def step(self) -> None:
        train_step(self.model, self.optimizer, next(self.batches))
        if (commit := self.worker.last_commit) is not None:
            self.commits[commit.outer_step] = commit


def raced(config: RunConfig, steps: int = 160) -> tuple[LocalRun, Peer, Peer]:
    """A fast peer and one that is four times slower, step by step."""
    run = LocalRun(config, ["fast", "slow"])
    fast, slow = Peer(run, config, "fast", 1), Peer(run, config, "slow", 2)
    for peer in (fast, slow):
        peer.worker.__enter__()
    for step in range(steps):
        fast.step()
        if step % 4 == 3:
            slow.step()
    return run, fast, slow


def loss(run: LocalRun) -> float:
    """Of the outer parameters, on data that nobody trained on."""
    model, generator = small_mlp(), torch.Generator().manual_seed(0)
    teacher = torch.randn(4, 3, generator=generator)
    inputs = torch.randn(500, 4, generator=torch.Generator().manual_seed(99))
    for parameters, theta in zip((model[0], model[2]), run.state.theta, strict=True):
        nn.utils.vector_to_parameters(theta, parameters.parameters())
    return nn.functional.mse_loss(model(inputs), inputs @ teacher).item()


RULES = [
    OuterConfig(optimizer="sgd", lr=1.0),
    OuterConfig(optimizer="nesterov", lr=0.5, momentum=0.3),
    OuterConfig(optimizer="nesterov", lr=0.5, momentum=0.3, correct="heloco"),
    OuterConfig(optimizer="delayed_nesterov", lr=1.0, momentum=0.5, period=2),
    OuterConfig(optimizer="delayed_nesterov", lr=1.0, momentum=0.5, period=2, c=0.25, correct="heloco", direction="rda"),
]


@pytest.mark.covering
@pytest.mark.parametrize("outer", RULES)
@pytest.mark.parametrize("mode", ["blocking", "delayed"])
def test_fast_and_slow_both_contribute_and_the_loss_falls_with_each_rule(outer: OuterConfig, mode: str) -> None:
    config = configured(ARRIVALS, outer, SyncConfig(every=4, mode=mode, delay=2))
    before = loss(founded(config)[0])
    run, fast, slow = raced(config)
    commits = fast.commits | slow.commits
    merged = {name: sum(weight(commit, name) is not None for commit in commits.values()) for name in ("fast", "slow")}
    assert merged["fast"] >= 35 and merged["slow"] >= 8
    assert loss(run) < 0.6 * before
    for peer in (fast, slow):
        assert peer.worker.synchronize() and peer.worker.digest == run.state.digest


@pytest.mark.parametrize("text", rarely(LOSSY, kept=("int8", "topk")))
def test_fast_and_slow_both_contribute_with_every_codec(text: str) -> None:
    codecs = CodecConfig(up=text, down=text, up_decay=0.95)
    config = dataclasses.replace(configured(ARRIVALS, None, SyncConfig(every=4, mode="delayed", delay=2)), codec=codecs)
    before = loss(founded(config)[0])
    run, fast, slow = raced(config)
    assert loss(run) < 0.6 * before
    for peer in (fast, slow):
        assert peer.worker.synchronize() and peer.worker.digest == run.state.digest


def test_a_slow_peers_contribution_names_where_its_work_began() -> None:
    _, fast, slow = raced(configured(ARRIVALS, penalty=DAMPED))
    weights = [share for commit in (fast.commits | slow.commits).values() if (share := weight(commit, "slow")) is not None]
    assert weights and all(share < 1 for share in weights), "four commits of the fast one lie between: stale"
    shares = [share for commit in (fast.commits | slow.commits).values() if (share := weight(commit, "fast")) is not None]
    assert max(shares) == 1.0
