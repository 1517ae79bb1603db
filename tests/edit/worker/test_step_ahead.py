"""codec.up_residual = "local": what a codec left out of a contribution stays in the peer's local parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.codecs import decode
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import CodecChoice, CodecConfig, CodecSpec
from edit.config.run import OuterConfig, RunConfig, SyncConfig
from edit.errors import ConfigError
from edit.local import LocalCollective, LocalRun
from edit.merging.merge import Measured
from edit.merging.mergers import Admitted, Rejected
from edit.records import Contribution, Verdict
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.encoded import whole_shards
from tests.support.models import TinyTransformer, token_batches, train_step
from tests.support.trainee import config

EVERY = 3
MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "delayed": {"mode": "delayed", "delay": 2},
    "streaming": {"mode": "delayed", "delay": 1, "groups": 3},
}


class Recording:
    """A Collective that keeps, by fragment, the pseudo-gradient as it is when it is contributed, and what is sent of it."""

    def __init__(self, inner: LocalCollective, model: torch.nn.Module) -> None:
        self.inner, self.replica = inner, Replica(model)
        self.local: dict[int, Tensor] = {}
        self.sent: dict[int, Tensor] = {}
        self.peer_id, self.join, self.outcome, self.snapshot = inner.peer_id, inner.join, inner.outcome, inner.snapshot
        self.report = inner.report

    def contribute(self, contribution: Contribution) -> None:
        i = contribution.fragment_id
        self.local[i], self.sent[i] = self.replica.local_fragment(i).clone(), decode(contribution.payload)
        self.inner.contribute(contribution)


def settings(up: str = "topk:k=9", decay: float = 1.0, outer: OuterConfig | None = None, **sync: Any) -> RunConfig:
    return config(
        sync=SyncConfig(every=EVERY, **sync),
        codec=CodecConfig(up=up, down="fp32", up_decay=decay, up_residual="local"),
        outer=outer or OuterConfig(optimizer="sgd", lr=1.0),
    )


def alone(steps: int) -> list[Tensor]:
    model = TinyTransformer(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = token_batches(0)
    for _ in range(steps):
        train_step(model, optimizer, next(batches))
    return Replica(model).local()


@pytest.mark.covering
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("up", ["topk:k=9", "sign", "int8"])
def test_an_exchange_does_not_move_a_lone_peer_that_sends_little_of_its_progress(kind: str, up: str) -> None:
    """theta moves by what was sent, and the local parameters stay: theta - (delta - sent) with a theta that is less by sent."""
    run_config = settings(up, **MODES[kind])
    run = LocalRun(run_config, ["a"], theta=Replica(TinyTransformer(seed=3)).local())
    model = TinyTransformer(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = token_batches(0)
    with EditWorker(model, optimizer, run.collective("a"), WorkerConfig.of(run_config)) as worker:
        for _ in range(5 * EVERY):
            train_step(model, optimizer, next(batches))
        assert worker.outer_step >= 4
        worker.synchronize()
        assert "residual" not in worker.state_dict(), "nothing is kept beside the local parameters"
        for ours, expected in zip(Replica(model).local(), alone(5 * EVERY), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        theta = run.state.theta
        far = max(float((a - b).abs().max()) for a, b in zip(theta, Replica(model).local(), strict=True))
    assert far > (1e-3 if up != "int8" else 0), "theta has not all of it yet"


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_peers_go_on_from_theta_less_what_they_did_not_send(decay: float) -> None:
    run_config = settings(decay=decay, outer=OuterConfig(lr=0.7, momentum=0.6))
    run = LocalRun(run_config, ["a", "b"], theta=Replica(TinyTransformer(seed=3)).local())
    models = [TinyTransformer(seed=3) for _ in "ab"]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    sides = [Recording(run.collective(name), model) for name, model in zip("ab", models, strict=True)]
    batches = [token_batches(seed) for seed in range(2)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(EditWorker(model, optimizer, side, WorkerConfig.of(run_config)))
            for model, optimizer, side in zip(models, optimizers, sides, strict=True)
        ]
        for _ in range(4):
            before = [theta.clone() for theta in run.state.theta]
            for _ in range(EVERY):
                for model, optimizer, own in zip(models, optimizers, batches, strict=True):
                    train_step(model, optimizer, next(own))
            for worker, side in zip(workers, sides, strict=True):
                worker.synchronize()
                for i, local in enumerate(side.replica.local()):
                    expected = reference.step_ahead(before[i], side.local[i], side.sent[i], run.state.theta[i], decay)
                    torch.testing.assert_close(local, expected, rtol=1e-6, atol=1e-7)
                    assert not torch.equal(local, run.state.theta[i])
            assert {worker.digest for worker in workers} == {run.state.digest}


class Rejecting:
    """Admits nothing."""

    def admit(self, fragment: Any, contribution: Measured) -> Admitted | Rejected:
        return Rejected("no")


def test_of_a_refused_contribution_nothing_stays() -> None:
    run_config = settings()
    run = LocalRun(run_config, ["a"], policy=Rejecting())
    model = TinyTransformer(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with EditWorker(model, optimizer, run.collective("a"), WorkerConfig.of(run_config)) as worker:
        for _, batch in zip(range(EVERY), token_batches(0), strict=False):
            train_step(model, optimizer, batch)
        worker.synchronize()
        assert worker.last_commit is not None
        assert {said.verdict for part in worker.last_commit.fragments for said in part.verdicts} == {Verdict.REJECTED}
        assert all(torch.equal(a, b) for a, b in zip(Replica(model).local(), run.state.theta, strict=True))


def test_the_residual_is_handed_over_once() -> None:
    choice = CodecChoice(CodecSpec.parse("topk:k=9"), decay=0.5, residual="local")
    feedback, delta = ErrorFeedback(choice, whole_shards(300)), torch.randn(300, generator=torch.Generator().manual_seed(1))
    encoded = feedback.stage(0, delta)
    feedback.commit(0, delta)
    owed = feedback.step_ahead(0)
    assert owed is not None and torch.equal(owed, 0.5 * (delta - decode(encoded)))
    assert feedback.residuals() == {}
    again = feedback.step_ahead(0)
    assert again is not None and not bool(again.any())
    for other in ("fp32", "int8"):
        kept = ErrorFeedback(CodecChoice(CodecSpec.parse("sign"), residual=other), whole_shards(300))
        kept.stage(0, delta)
        kept.commit(0, delta)
        assert kept.step_ahead(0) is None and kept.residuals()


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"mode": "eager", "delay": 1}, r"codec\.up_residual.*must not be local with sync\.mode"),
        ({"mode": "delayed", "delay": 1, "mix": "lerp"}, r"codec\.up_residual.*must not be local with sync\.mix"),
    ],
)
def test_what_has_no_room_for_it_is_refused(sync: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("int4", **sync)
