"""EditWorker against a scripted carrier: when it exchanges, and what becomes of local parameters and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edit.codecs import decode
from edit.errors import ConfigError, EvictedError, LocalProtocolError, RemoteProtocolError, TransportError
from edit.records import Aborted, Behind, Evicted, Finished, Snapshot, Verdict
from edit.worker import EditWorker, WorkerConfig
from tests.support.models import TinyTransformer, regression_batches, small_mlp, token_batches, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of

OK, NONFINITE, ANOMALOUS, IDLE = Verdict.OK, Verdict.NONFINITE, Verdict.ANOMALOUS, Verdict.IDLE
BOTH_OK = [OK, OK]


def flat(model: nn.Module) -> list[Tensor]:
    """The fragments `0` and `2` of small_mlp, as the worker orders them."""
    return [
        torch.cat([p.detach().float().flatten() for p in layer.parameters()])
        for layer in model.children()
        if [*layer.parameters()]
    ]


def same(a: list[Tensor] | tuple[Tensor, ...], b: list[Tensor] | tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass
class Peer:
    """A worker on small_mlp with its script."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    collective: ScriptedCollective
    worker: EditWorker
    batches: Iterator[tuple[Tensor, Tensor]]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            train_step(self.model, self.optimizer, next(self.batches))

    def forward(self) -> None:
        self.model(next(self.batches)[0])

    @property
    def theta(self) -> Snapshot:
        return Snapshot(self.worker.outer_step, self.worker.digest, tuple(outer_vectors(self.worker)))


def outer_vectors(worker: EditWorker) -> list[Tensor]:
    state = worker.outer_state_dict()
    return [
        torch.cat([state[f"{i}.weight"].flatten(), state[f"{i}.bias"]])
        for i in sorted({int(name.split(".")[0]) for name in state})
    ]


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Makes entered peers; leaves them as after an exception, so that no outcome is waited for."""
    workers: list[EditWorker] = []

    def make(every: int = 2, codec: str = "fp32", dtype: torch.dtype = torch.float32, theta: Snapshot | None = None) -> Peer:
        model = small_mlp(dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        collective = ScriptedCollective(theta)
        worker = EditWorker(model, optimizer, collective, WorkerConfig(sync_every=every, codec=codec))
        workers.append(worker.__enter__())
        return Peer(model, optimizer, collective, worker, regression_batches(0, dtype))

    yield make
    for worker in workers:
        worker.__exit__(KeyboardInterrupt, None, None)


# Entering and leaving.


def test_t19_entering_loads_the_runs_parameters() -> None:
    theirs = snapshot_of(4, flat(small_mlp(seed=1)))
    model = small_mlp(seed=2)
    with EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(theirs), WorkerConfig()) as worker:
        assert same(flat(model), list(theirs.fragments))
        assert (worker.outer_step, worker.digest) == (4, theirs.digest)


def test_the_founder_keeps_its_own(peer: Callable[..., Peer]) -> None:
    p = peer()
    assert same(flat(p.model), flat(small_mlp())) and p.worker.outer_step == 0


def test_leaving_waits_for_the_outcome_and_removes_every_hook() -> None:
    model = small_mlp()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    with EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32")) as worker:
        theta = snapshot_of(0, outer_vectors(worker))
        train_step(model, optimizer, next(regression_batches(0)))
        answer, after = committed(theta, random_steps(theta), BOTH_OK)
        collective.answers[0].append(answer)
    assert worker.outer_step == 1 and same(flat(model), list(after.fragments))
    train_step(model, optimizer, next(regression_batches(0)))
    assert worker.inner_steps == 1 and len(collective.rounds()) == 1


def test_leaving_by_an_exception_waits_for_nothing() -> None:
    model = small_mlp()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    worker = EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32"))
    with pytest.raises(KeyboardInterrupt), worker:
        train_step(model, optimizer, next(regression_batches(0)))
        raise KeyboardInterrupt
    assert collective.waited == 0 and not worker.pending
    train_step(model, optimizer, next(regression_batches(0)))
    assert worker.inner_steps == 1


def test_calls_out_of_order_are_our_bug(peer: Callable[..., Peer]) -> None:
    p = peer()
    with pytest.raises(LocalProtocolError, match="already entered"):
        p.worker.__enter__()
    fresh = EditWorker(p.model, p.optimizer, p.collective, WorkerConfig())
    with pytest.raises(LocalProtocolError, match="enter the EditWorker first"):
        _ = fresh.outer_step


@pytest.mark.parametrize("theta", [snapshot_of(1, [torch.zeros(3)]), Snapshot(1, "not it", tuple(flat(small_mlp())))])
def test_a_snapshot_that_does_not_fit_is_the_other_sides_fault(theta: Snapshot) -> None:
    model = small_mlp()
    with pytest.raises(RemoteProtocolError, match="snapshot of outer step 1 does not"):
        EditWorker(model, torch.optim.SGD(model.parameters()), ScriptedCollective(theta), WorkerConfig()).__enter__()


@pytest.mark.parametrize(("settings", "message"), [({"sync_every": 0}, "sync_every"), ({"codec": "zip"}, "codec = 'zip'")])
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(**settings)  # type: ignore[arg-type]


# What goes out, and when.


def test_a_contribution_is_outer_minus_local_with_this_rounds_work(peer: Callable[..., Peer]) -> None:
    p = peer(every=3)
    for _ in range(3):
        assert p.collective.contributed == []
        p.worker.count_tokens(8)
        p.step()
    assert p.worker.pending and p.worker.round_inner_steps == 0
    assert [c.fragment_id for c in p.collective.contributed] == [0, 1]
    for contribution, outer, local in zip(p.collective.contributed, p.theta.fragments, flat(p.model), strict=True):
        assert (contribution.outer_step, contribution.inner_steps, contribution.tokens) == (0, 3, 24)
        assert torch.equal(decode(contribution.payload), outer - local)


def test_t20_a_warm_up_before_entering_is_not_in_the_first_pseudo_gradient() -> None:
    model = small_mlp()
    optimizer, collective, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), ScriptedCollective(), regression_batches(0)
    for _ in range(20):
        train_step(model, optimizer, next(batches))
    warm = flat(model)
    worker = EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32"))
    with pytest.raises(KeyboardInterrupt), worker:
        train_step(model, optimizer, next(batches))
        for contribution, before, after in zip(collective.contributed, warm, flat(model), strict=True):
            assert torch.equal(decode(contribution.payload), before - after)
        raise KeyboardInterrupt


def commit_next(p: Peer, verdicts: list[Verdict | None] | None = None, seed: int = 0) -> Snapshot:
    """Script a commit as the answer about the present outer step; returns theta after it."""
    answer, after = committed(p.theta, random_steps(p.theta, seed), BOTH_OK if verdicts is None else verdicts)
    p.collective.answers[p.worker.outer_step].append(answer)
    return after


def test_t5_only_the_first_forward_takes_the_outcome_and_none_exchanges(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    p.step(2)
    after = commit_next(p)
    p.forward()
    assert p.worker.outer_step == 1 and not p.worker.pending and same(flat(p.model), list(after.fragments))
    questions = len(p.collective.asked)
    for _ in range(3):
        p.forward()
    assert len(p.collective.asked) == questions and len(p.collective.rounds()) == 1
    assert same(flat(p.model), list(after.fragments))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_t7_evaluation_right_after_the_exchange_sees_the_merged_parameters(
    peer: Callable[..., Peer], guard: Callable[[], torch.no_grad]
) -> None:
    p = peer(every=1, codec="int8")
    inputs = next(p.batches)[0]
    p.step()
    after = commit_next(p)
    p.model.eval()
    with guard():
        outputs = p.model(inputs)
    p.model.train()
    reference = small_mlp()
    with torch.no_grad():
        for layer, vector in zip([reference[0], reference[2]], after.fragments, strict=True):
            layer.weight.copy_(vector[: layer.weight.numel()].view_as(layer.weight))
            layer.bias.copy_(vector[layer.weight.numel() :])
        assert torch.equal(outputs, reference(inputs))
    for _ in range(2):  # nothing made under inference_mode may come back to haunt the training
        p.step()
        commit_next(p)
    p.forward()
    assert p.worker.outer_step == 3


def test_t8_reading_a_state_dict_triggers_nothing(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    p.step(2)
    local, questions = flat(p.model), len(p.collective.asked)
    for _ in range(2):
        p.model.state_dict()
        p.optimizer.state_dict()
        p.worker.outer_state_dict()
    assert len(p.collective.asked) == questions and len(p.collective.rounds()) == 1
    assert p.worker.pending and same(flat(p.model), local)


@pytest.mark.parametrize("reentrant", [True, False])
def test_t6_activation_checkpointing_exchanges_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyTransformer()

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.inner.embed(tokens)
            for block in self.inner.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return self.inner.head(self.inner.norm(hidden))

    counts = []
    for model in (Checkpointed(), nn.Sequential(TinyTransformer())):
        optimizer, collective = torch.optim.AdamW(model.parameters()), ScriptedCollective()
        with EditWorker(model, optimizer, collective, WorkerConfig(sync_every=2, codec="fp32")) as worker:
            for _, batch in zip(range(4), token_batches(0), strict=False):
                collective.answers[0] = [Aborted("scripted")] if worker.pending else []
                train_step(model, optimizer, batch)
            collective.answers[0] = [Aborted("scripted")]
        counts.append((len(collective.rounds()), collective.waited))
    assert counts[0] == counts[1] == (2, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_root_recomputes_on_the_parameters_of_its_forward(peer: Callable[..., Peer], reentrant: bool) -> None:
    """The recomputation calls the root's hooks again, in backward: there must be nothing left for them to do."""
    p = peer(every=1)
    p.step()
    commit_next(p)
    inputs = next(p.batches)[0].requires_grad_()
    checkpoint(p.model, inputs, use_reentrant=reentrant).sum().backward()
    assert p.worker.outer_step == 1 and p.collective.waited == 1 and len(p.collective.rounds()) == 1


def test_gradient_accumulation_counts_optimizer_steps_only(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    for _ in range(2):
        for _ in range(3):
            inputs, targets = next(p.batches)
            (p.model(inputs) - targets).square().mean().backward()
        assert not p.worker.pending
        p.optimizer.step()
        p.optimizer.zero_grad()
    assert p.worker.inner_steps == 2 and p.collective.contributed[0].inner_steps == 2


def test_a_step_that_the_grad_scaler_skips_does_not_count(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for poison in (1.0, float("inf"), 1.0):
        p.optimizer.zero_grad()
        inputs, targets = next(p.batches)
        scaler.scale((p.model(inputs) - targets).square().mean() * poison).backward()
        scaler.step(p.optimizer)
        scaler.update()
    assert p.worker.inner_steps == 2 and len(p.collective.rounds()) == 1


def test_t14_a_frozen_root_with_trainable_adapters_exchanges() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 3).requires_grad_(False)
            self.scale = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.low = nn.Linear(4, 2, bias=False)
            self.high = nn.Linear(2, 3, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.base(inputs) + self.scale + self.high(self.low(inputs))

    model, collective = Adapted(), ScriptedCollective()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    frozen = model.base.weight.clone()
    with EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32")) as worker:
        train_step(model, optimizer, next(regression_batches(0)))
        assert sorted(worker.outer_state_dict()) == ["high.weight", "low.weight"]
        collective.answers[0].append(Aborted("scripted"))
    assert len(collective.contributed) == 2 and torch.equal(model.base.weight, frozen)


def test_t21_a_parameter_without_gradient_keeps_its_place() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.experts[0](inputs) + self.experts[2](inputs)

    model, collective = Experts(), ScriptedCollective()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    with EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32")):
        train_step(model, optimizer, next(regression_batches(0)))
        moved = [bool(decode(contribution.payload).any()) for contribution in collective.contributed]
        collective.answers[0].append(Aborted("scripted"))
    assert moved == [True, False, True]


def test_a_training_loop_with_only_submodule_forwards_takes_the_outcome_before_the_next_step(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    after = commit_next(p)
    inputs, targets = next(p.batches)
    p.optimizer.zero_grad()
    (p.model[2](torch.tanh(p.model[0](inputs))) - targets).square().mean().backward()
    before = flat(p.model)
    p.optimizer.step()
    assert p.worker.outer_step == 1 and not same(before, list(after.fragments))
    assert [bool((local - outer).abs().max() < 0.05) for local, outer in zip(flat(p.model), after.fragments, strict=True)] == [
        True
    ] * 2


def test_a_compiled_model_trains_and_exchanges(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    compiled = torch.compile(p.model, backend="eager")
    for _ in range(3):
        if p.worker.pending:
            commit_next(p)
        train_step(compiled, p.optimizer, next(p.batches))
    assert p.worker.outer_step == 2 and len(p.collective.rounds()) == 3


# What an outcome does.


def test_synchronize_applies_the_outcome_without_a_forward(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    after = commit_next(p)
    assert p.worker.synchronize() and p.worker.synchronize()
    assert same(flat(p.model), list(after.fragments)) and p.worker.last_commit is not None
    assert p.worker.last_commit.digest == p.worker.digest == after.digest


def test_commits_already_known_are_replayed_before_contributing(peer: Callable[..., Peer]) -> None:
    """A peer that joined in the middle of a round keeps its progress and puts it onto the newer outer parameters."""
    p = peer(every=2)
    p.step()
    start = p.theta
    first, middle = committed(start, random_steps(start, 1), [None, None])
    second, last = committed(middle, random_steps(start, 2), [None, None])
    p.collective.answers[0].append(first)
    p.collective.answers[1].append(second)
    p.step()
    assert p.worker.outer_step == 2 and p.worker.digest == last.digest
    contributions = p.collective.contributed
    assert [c.outer_step for c in contributions] == [2, 2] and contributions[0].inner_steps == 2
    for contribution, outer, local in zip(contributions, last.fragments, flat(p.model), strict=True):
        assert torch.equal(decode(contribution.payload), outer - local)


def residuals(p: Peer) -> list[Tensor]:
    """What the codec still owes of each fragment. The one look inside in this file."""
    state = p.worker._feedback.state()
    return [state.get(f"residual.{i}", torch.zeros(outer.numel())).clone() for i, outer in enumerate(p.theta.fragments)]


def test_an_aborted_round_leaves_everything_and_the_next_attempt_carries_all_work(peer: Callable[..., Peer]) -> None:
    p = peer(every=2, codec="int8")
    p.step(2)
    local, owed = flat(p.model), residuals(p)
    p.collective.answers[0].append(Aborted("too few"))
    p.forward()
    assert same(flat(p.model), local) and same(residuals(p), owed) and not any(r.any() for r in owed)
    assert (p.worker.outer_step, p.worker.pending, p.worker.last_reason) == (0, False, "too few")
    p.step()
    assert len(p.collective.rounds()) == 1
    p.step()
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [4, 4]
    commit_next(p)
    p.forward()
    assert any(r.any() for r in residuals(p))  # adopted with the commit, and only then


@pytest.mark.parametrize("verdict", [NONFINITE, ANOMALOUS, IDLE])
def test_a_rejected_fragment_takes_theta_and_keeps_its_old_residual(peer: Callable[..., Peer], verdict: Verdict) -> None:
    p = peer(every=1, codec="int8")
    p.step()
    commit_next(p)
    p.step()
    owed = residuals(p)
    after = commit_next(p, [verdict, OK])
    p.forward()
    assert same(flat(p.model), list(after.fragments))
    assert owed[0].any() and torch.equal(residuals(p)[0], owed[0]) and not torch.equal(residuals(p)[1], owed[1])


def test_nan_local_parameters_and_moments_are_cured_by_the_commit(peer: Callable[..., Peer]) -> None:
    p = peer(every=2, codec="int8")
    p.step()
    with torch.no_grad():
        p.model[0].weight.fill_(float("nan"))
        p.model[0].weight.grad = torch.full_like(p.model[0].weight, float("nan"))
    p.optimizer.step()
    assert not torch.isfinite(p.optimizer.state[p.model[0].weight]["exp_avg"]).any()
    kept = p.optimizer.state[p.model[2].weight]["exp_avg"].clone()
    after = commit_next(p, [NONFINITE, OK])
    p.forward()
    assert same(flat(p.model), list(after.fragments))
    assert torch.equal(p.optimizer.state[p.model[2].weight]["exp_avg"], kept)
    p.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in p.model.parameters())


def test_a_rolled_back_fragment_returns_to_theta(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    answer, after = committed(p.theta, [None, random_steps(p.theta)[1]], [NONFINITE, OK])
    p.collective.answers[0].append(answer)
    before = p.theta
    p.forward()
    assert torch.equal(after.fragments[0], before.fragments[0]) and same(flat(p.model), list(after.fragments))


def test_in_doubt_the_peer_trains_on_and_replays_what_it_did_since(peer: Callable[..., Peer]) -> None:
    p = peer(every=2)
    p.step(2)
    sent_from, theta = flat(p.model), p.theta
    p.collective.answers[0].append(None)  # cut off
    p.step()
    assert p.worker.pending and p.worker.outer_step == 0
    p.collective.answers[0] += [None, None]  # asked after the step, and at the boundary
    p.step(2)
    assert len(p.collective.rounds()) == 1 and p.worker.round_inner_steps == 3
    answer, after = committed(theta, random_steps(theta), BOTH_OK)
    p.collective.answers[0].append(answer)
    inputs, targets = next(p.batches)
    p.optimizer.zero_grad()
    (p.model(inputs) - targets).square().mean().backward()
    expected: list[Tensor] = []
    handle = p.optimizer.register_step_post_hook(lambda *_: expected.extend(flat(p.model)))  # runs after the worker's
    p.optimizer.step()
    handle.remove()
    assert p.worker.outer_step == 1 and p.worker.pending
    second = p.collective.rounds()[1]
    assert [c.inner_steps for c in second] == [4, 4]  # the two steps of the first contribution are merged
    for contribution, outer, local, origin in zip(second, after.fragments, flat(p.model), sent_from, strict=True):
        delta = decode(contribution.payload)
        assert torch.equal(delta, outer - local)
        assert 0 < float(delta.abs().max()) < 0.1 and not torch.equal(local, origin)


def exact_replay(p: Peer, answer_about: int, answer: object) -> tuple[list[Tensor], list[Tensor]]:
    """Resolve with `synchronize`: local parameters before and after."""
    before = flat(p.model)
    p.collective.answers[answer_about].append(answer)  # type: ignore[arg-type]
    assert p.worker.synchronize()
    return before, flat(p.model)


@pytest.mark.parametrize(
    ("verdicts", "kept"),
    [([OK, OK], "since"), ([None, None], "all"), ([NONFINITE, IDLE], "none")],
)
def test_in_doubt_each_verdict_has_its_replay(peer: Callable[..., Peer], verdicts: list[Verdict | None], kept: str) -> None:
    p = peer(every=2)
    p.step(2)
    sent_from, theta = flat(p.model), p.theta
    p.collective.answers[0].append(None)
    p.step()
    answer, after = committed(theta, random_steps(theta), verdicts)
    before, now = exact_replay(p, 0, answer)
    origin = {"since": sent_from, "all": list(theta.fragments), "none": before}[kept]
    expected = [outer + (local - start) for outer, local, start in zip(after.fragments, before, origin, strict=True)]
    assert same(now, expected)


def test_late_the_peer_replays_and_contributes_again_at_once(peer: Callable[..., Peer]) -> None:
    p = peer(every=2, codec="int8")
    p.step(2)
    theta, before = p.theta, flat(p.model)
    first, middle = committed(theta, random_steps(theta, 1), [None, None])
    second, last = committed(middle, random_steps(theta, 2), [None, None])
    p.collective.answers[0].append(first)
    p.collective.answers[1].append(second)
    p.forward()
    assert p.worker.outer_step == 2 and p.worker.pending and not any(r.any() for r in residuals(p))
    once = [outer + (local - start) for outer, local, start in zip(middle.fragments, before, theta.fragments, strict=True)]
    twice = [outer + (local - start) for outer, local, start in zip(last.fragments, once, middle.fragments, strict=True)]
    assert same(flat(p.model), twice)
    assert [(c.outer_step, c.inner_steps) for c in p.collective.rounds()[1]] == [(2, 2), (2, 2)]
    p.step()  # it overlaps: the next forward and step do not wait for it
    assert p.worker.pending and p.collective.waited == 1
    answer, after = committed(last, random_steps(last, 3), BOTH_OK)
    before, now = exact_replay(p, 2, answer)
    assert same(now, [o + (local - start) for o, local, start in zip(after.fragments, before, twice, strict=True)])


def test_a_late_contribution_on_leaving_is_not_sent_again() -> None:
    model = small_mlp()
    optimizer, collective = torch.optim.SGD(model.parameters(), lr=0.1), ScriptedCollective()
    with EditWorker(model, optimizer, collective, WorkerConfig(sync_every=1, codec="fp32")) as worker:
        theta = snapshot_of(0, outer_vectors(worker))
        train_step(model, optimizer, next(regression_batches(0)))
        collective.answers[0].append(committed(theta, random_steps(theta), [None, None])[0])
    assert worker.outer_step == 1 and len(collective.rounds()) == 1 and not worker.pending


def test_a_fragment_that_did_not_arrive_is_replayed_while_the_others_are_taken(peer: Callable[..., Peer]) -> None:
    p = peer(every=1, codec="int8")
    p.step()
    theta, before = p.theta, flat(p.model)
    after = commit_next(p, [None, OK])
    p.forward()
    assert torch.equal(flat(p.model)[0], after.fragments[0] + (before[0] - theta.fragments[0]))
    assert torch.equal(flat(p.model)[1], after.fragments[1])
    first, second = residuals(p)
    assert not first.any() and second.any() and len(p.collective.rounds()) == 1


@pytest.mark.parametrize("finite", [True, False])
def test_behind_takes_a_snapshot_and_replays_what_is_finite(peer: Callable[..., Peer], finite: bool) -> None:
    p = peer(every=1, codec="int8")
    p.step()
    if not finite:
        with torch.no_grad():
            p.model[0].bias[0] = float("inf")
    theta, before = p.theta, flat(p.model)
    target = snapshot_of(9, [part + 0.25 for part in theta.fragments])
    p.collective.answers[0].append(Behind("too far"))
    p.collective.snapshots.append(target)
    p.forward()
    expected = [o + (local - start) for o, local, start in zip(target.fragments, before, theta.fragments, strict=True)]
    if not finite:
        expected[0] = target.fragments[0]
    assert same(flat(p.model), expected)
    assert (p.worker.outer_step, p.worker.pending, p.worker.last_reason) == (9, False, "too far")
    assert not any(r.any() for r in residuals(p))


def test_behind_and_cut_off_the_peer_trains_on(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    p.collective.answers[0].append(Behind("too far"))
    p.collective.snapshots.append(TransportError("unreachable"))
    p.forward()
    assert p.worker.pending and p.worker.outer_step == 0
    p.collective.answers[0].append(Behind("too far"))
    p.collective.snapshots.append(snapshot_of(9, p.theta.fragments))
    p.step()
    assert p.worker.outer_step == 9 and p.collective.rounds()[1][0].outer_step == 9


def test_behind_and_cut_off_at_the_boundary_nothing_is_contributed_to_the_old_step(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.collective.answers[0].append(Behind("too far"))
    p.collective.snapshots.append(TransportError("unreachable"))
    p.step()
    assert p.collective.contributed == [] and not p.worker.pending


def test_a_wrong_digest_after_a_commit_is_healed_by_a_snapshot(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    answer, after = committed(p.theta, random_steps(p.theta), BOTH_OK, digest_of="of the run")
    right = snapshot_of(1, [part + 1.0 for part in after.fragments])
    p.collective.answers[0].append(answer)
    p.collective.snapshots.append(right)
    p.forward()
    assert p.worker.digest == right.digest and same(flat(p.model), list(right.fragments))
    assert "another digest" in p.worker.last_reason


def test_a_wrong_digest_while_cut_off_changes_nothing(peer: Callable[..., Peer]) -> None:
    p = peer(every=1, codec="int8")
    p.step()
    theta, local = p.theta, flat(p.model)
    answer, _ = committed(theta, random_steps(theta), BOTH_OK, digest_of="of the run")
    p.collective.answers[0].append(answer)
    p.collective.snapshots.append(TransportError("unreachable"))
    p.forward()
    assert p.worker.pending and p.worker.digest == theta.digest and same(flat(p.model), local)
    assert not any(r.any() for r in residuals(p))


def test_a_commit_that_does_not_follow_is_the_other_sides_fault(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    ahead = Snapshot(3, p.worker.digest, p.theta.fragments)
    p.collective.answers[0].append(committed(ahead, random_steps(ahead), BOTH_OK)[0])
    with pytest.raises(RemoteProtocolError, match="commit to outer step 4 cannot follow 0"):
        p.forward()


def test_eviction_ends_the_loop(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    p.collective.answers[0].append(Evicted("misbehaved"))
    with pytest.raises(EvictedError, match="misbehaved"):
        p.forward()


def test_eviction_is_noticed_before_contributing(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.collective.answers[0].append(Evicted("misbehaved"))
    with pytest.raises(EvictedError, match="misbehaved"):
        p.step()
    assert p.collective.contributed == []


def test_a_finished_run_lets_the_loop_go_on_without_exchange(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    commit_next(p)
    p.collective.answers[1].append(Finished(1))
    p.forward()
    assert p.worker.finished and p.worker.outer_step == 1
    p.step(3)
    assert len(p.collective.rounds()) == 1 and not p.worker.pending and p.worker.inner_steps == 4


def test_finished_without_this_peer_it_still_gets_the_last_parameters(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    last = snapshot_of(7, [part * 2 for part in p.theta.fragments])
    p.collective.answers[0].append(Finished(7))
    p.collective.snapshots.append(last)
    p.forward()
    assert p.worker.finished and p.worker.outer_step == 7 and p.worker.digest == last.digest


def test_t15_a_pure_bf16_model_has_fp32_outer_parameters(peer: Callable[..., Peer]) -> None:
    p = peer(every=1, dtype=torch.bfloat16)
    for _ in range(2):
        p.step()
        after = commit_next(p)
        p.forward()
    assert all(tensor.dtype == torch.float32 for tensor in p.worker.outer_state_dict().values())
    assert p.worker.digest == after.digest
    assert any(not torch.equal(part, part.bfloat16().float()) for part in after.fragments)
    assert all(parameter.dtype == torch.bfloat16 for parameter in p.model.parameters())
    assert same(flat(p.model), [part.bfloat16().float() for part in after.fragments])


# The outer parameters, for evaluating and saving.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_parameters_are_lent_and_the_local_ones_come_back_to_the_bit(
    peer: Callable[..., Peer], dtype: torch.dtype
) -> None:
    p = peer(every=2, dtype=dtype)
    p.step(2)
    local = [parameter.detach().clone() for parameter in p.model.parameters()]
    with p.worker.outer_parameters() as model:
        assert same(flat(model), [part.to(dtype).float() for part in p.theta.fragments])
        model(next(p.batches)[0])  # neither waits nor applies: the outcome belongs to the local parameters
        with pytest.raises(LocalProtocolError, match=r"optimizer\.step\(\) inside outer_parameters"):
            p.optimizer.step()
        with pytest.raises(LocalProtocolError, match="synchronize"):
            p.worker.synchronize()
        with pytest.raises(LocalProtocolError, match="inside outer_parameters"), p.worker.outer_parameters():
            pass
    assert same([parameter.detach() for parameter in p.model.parameters()], local) and p.collective.waited == 0
    with pytest.raises(KeyboardInterrupt), p.worker.outer_parameters():
        raise KeyboardInterrupt
    assert same([parameter.detach() for parameter in p.model.parameters()], local)


def test_the_outer_state_dict_is_a_copy_in_full_shape(peer: Callable[..., Peer]) -> None:
    p = peer()
    state = p.worker.outer_state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: tuple(parameter.shape) for name, parameter in p.model.named_parameters()
    }
    state["0.weight"].zero_()
    assert p.worker.outer_state_dict()["0.weight"].any()
