"""Whole trainings through EditWorker and LocalRun against oracles: plain AdamW, and the naive DiLoCo and EDiT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from edit import reference
from edit.config.run import OuterConfig, PenaltyConfig, RunConfig
from edit.local import LocalRun
from edit.records import Commit, Verdict
from edit.replica.flat import load_fragment
from edit.worker.worker import EditWorker
from tests.support.models import TinyTransformer, regression_batches, small_mlp, token_batches, train_step
from tests.support.scripted_peer import flat
from tests.support.settings import worker_config
from tests.support.trainee import DILOCO, Trainee, config

# Against plain training.


def batches(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    return token_batches(0) if kind == "transformer" else regression_batches(0)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("penalty", [DILOCO, PenaltyConfig(clip=0.0)], ids=["diloco", "edit"])
def test_one_peer_with_outer_sgd_1_follows_plain_adamw(kind: str, penalty: PenaltyConfig) -> None:
    make = TinyTransformer if kind == "transformer" else small_mlp
    plain, model = make(), make()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_batches, own_batches = batches(kind), batches(kind)
    collective = LocalRun(config(penalty=penalty), ["solo"]).collective("solo")
    with EditWorker(model, optimizer, collective, worker_config(every=7, codec="fp32")) as worker:
        for _ in range(42):
            expected = train_step(plain, plain_optimizer, next(plain_batches))
            assert train_step(model, optimizer, next(own_batches)) == pytest.approx(expected, rel=1e-4)
        worker.synchronize()
        outer = worker.outer_state_dict()
    assert worker.outer_step == 6
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(outer[name], parameter.detach(), rtol=1e-4, atol=1e-6)


# Against the reference: the same three loops, merged naively.

PEERS, ROUNDS, EVERY, DAMAGED = ("a", "b", "c"), 9, 3, (6, "c")


def damage(model: nn.Module, round_number: int, name: str) -> None:
    """In one round one peer's first layer goes astray, which no weight decay brings back."""
    if (round_number, name) == DAMAGED:
        with torch.no_grad():
            model[0].weight.add_(3.0)


Merger = Callable[[list[dict[str, Tensor]]], list[Tensor]]


def naive(theta: list[Tensor], merge: Merger) -> list[Tensor]:
    """theta after ROUNDS of EVERY plain AdamW steps by every peer; `merge` makes the next theta of all local fragments."""
    models = [small_mlp() for _ in PEERS]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    streams = [regression_batches(seed) for seed in range(len(PEERS))]
    for round_number in range(ROUNDS):
        for name, model, optimizer, stream in zip(PEERS, models, optimizers, streams, strict=True):
            for layer, vector in zip([model[0], model[2]], theta, strict=True):
                load_fragment(vector, list(layer.parameters()))
            for step in range(EVERY):
                if step == EVERY - 1:
                    damage(model, round_number, name)
                train_step(model, optimizer, next(stream))
        local = [flat(model) for model in models]
        theta = merge([dict(zip(PEERS, fragments, strict=True)) for fragments in zip(*local, strict=True)])
    return theta


def ours(run_config: RunConfig) -> tuple[list[Tensor], list[Commit]]:
    """theta after ROUNDS of three EditWorkers, and all commits."""
    run, commits = LocalRun(run_config, PEERS, theta=flat(small_mlp())), []
    peers = [Trainee(run, name, seed, EVERY) for seed, name in enumerate(PEERS)]
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.worker)
        for round_number in range(ROUNDS):
            for step in range(EVERY):
                for name, peer in zip(PEERS, peers, strict=True):
                    peer.worker.synchronize() if step == 0 else None
                    if step == EVERY - 1:
                        damage(peer.model, round_number, name)
                    peer.step()
            assert peers[0].worker.synchronize() and peers[0].worker.last_commit is not None
            commits.append(peers[0].worker.last_commit)
    return run.state.theta, commits


def test_three_peers_with_the_penalty_off_are_the_references_diloco() -> None:
    momenta = [torch.zeros(()), torch.zeros(())]
    theta = flat(small_mlp())

    def merge(local: list[dict[str, Tensor]]) -> list[Tensor]:
        for i, fragment in enumerate(local):
            theta[i], momenta[i] = reference.diloco(theta[i], momenta[i], fragment, 0.7, 0.9)
        return theta

    expected = naive(theta, merge)
    actual, commits = ours(config(outer=OuterConfig(lr=0.7, momentum=0.9)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [commit.outer_step for commit in commits] == list(range(1, ROUNDS + 1))


def test_three_peers_with_the_penalty_on_are_the_references_edit() -> None:
    penalty = PenaltyConfig(detector="edit", norm="raw", idle_ratio=0.0, observations=4, temperature=0.05, clip=0.05)
    fragments = [
        reference.Edit(theta, lr=0.7, mu=0.5, observations=4, temperature=0.05, clip=0.05) for theta in flat(small_mlp())
    ]
    weights: list[list[dict[str, float]]] = []

    def merge(local: list[dict[str, Tensor]]) -> list[Tensor]:
        weights.append([fragment.round(peers) for fragment, peers in zip(fragments, local, strict=True)])
        return [fragment.theta for fragment in fragments]

    expected = naive(flat(small_mlp()), merge)
    actual, commits = ours(config(penalty=penalty, outer=OuterConfig(lr=0.7, momentum=0.5)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for commit, round_weights in zip(commits, weights, strict=True):
        for fragment, by_peer in zip(commit.fragments, round_weights, strict=True):
            assert {v.peer_id: v.weight for v in fragment.verdicts} == pytest.approx(by_peer, rel=1e-3, abs=1e-6)
    judged = commits[DAMAGED[0]].fragments[0].verdict_of(DAMAGED[1])
    assert judged is not None and judged.verdict is Verdict.ANOMALOUS
    assert any(fragment.clip < 1 for commit in commits for fragment in commit.fragments)
    assert any(0.4 < v.weight < 0.9 for commit in commits for fragment in commit.fragments for v in fragment.verdicts)


def test_three_peers_with_the_default_detector_are_the_references_edit_by_levels() -> None:
    penalty = PenaltyConfig(norm="raw", observations=4, temperature=0.01, clip=0.05)
    fragments = [
        reference.EditByLevels(theta, lr=0.7, mu=0.5, observations=4, temperature=0.01, clip=0.05)
        for theta in flat(small_mlp())
    ]
    weights: list[list[dict[str, float]]] = []
    steps = dict.fromkeys(PEERS, EVERY)

    def merge(local: list[dict[str, Tensor]]) -> list[Tensor]:
        weights.append([fragment.round(peers, steps) for fragment, peers in zip(fragments, local, strict=True)])
        return [fragment.theta for fragment in fragments]

    expected = naive(flat(small_mlp()), merge)
    actual, commits = ours(config(penalty=penalty, outer=OuterConfig(lr=0.7, momentum=0.5)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for commit, round_weights in zip(commits, weights, strict=True):
        for fragment, by_peer in zip(commit.fragments, round_weights, strict=True):
            assert {v.peer_id: v.weight for v in fragment.verdicts} == pytest.approx(by_peer, rel=1e-3, abs=1e-6)
    judged = commits[DAMAGED[0]].fragments[0].verdict_of(DAMAGED[1])
    assert judged is not None and judged.verdict is Verdict.ANOMALOUS
    shares = [by_peer for one in weights for by_peer in one if min(by_peer.values()) > 0]
    assert max(max(by_peer.values()) for by_peer in shares) == pytest.approx(0.5), "of three, 1.5 / 3"
