"""EditWorker against a scripted carrier: what each outcome does to local parameters, residuals and optimizer state."""

from __future__ import annotations

import math
import re
from collections import UserList
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from edit.codecs import decode
from edit.errors import EvictedError, RemoteProtocolError, TransportError
from edit.records import Aborted, Committed, Evicted, Finished, NeedsSnapshot, Snapshot, Verdict
from edit.worker.local_progress import scrub
from edit.worker.worker import EditWorker
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of
from tests.support.scripted_peer import BOTH_OK, Peer, commit_next, flat, outer_vectors, residuals, same
from tests.support.settings import worker_config

OK, NONFINITE, ANOMALOUS, IDLE = Verdict.OK, Verdict.NONFINITE, Verdict.ANOMALOUS, Verdict.IDLE
NAN = math.nan


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


def test_nan_in_an_optimizers_state_is_cleaned_wherever_containers_and_groups_hold_it() -> None:
    mine, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def bad() -> Tensor:
        return torch.tensor([NAN, math.inf])

    zero = [0.0, 0.0]
    groups: list[dict[str, Any]] = [
        {"params": [mine], "d": NAN, "bound": math.inf, "sum": bad()},
        {"params": [other], "d": NAN},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.state[mine] = {"list": [bad(), NAN], "tuple": (bad(), {"in": bad()}), "table": {"q": [bad()], "x": NAN}, "n": 3}
    optimizer.state[other] = {"list": [bad()]}
    optimizer.state["all"] = bad()  # type: ignore[index]
    scrub(optimizer, [mine])
    found = tree_map(lambda each: each.tolist() if isinstance(each, Tensor) else each, dict(optimizer.state))
    assert found.pop(other)["list"] != [zero]
    cleaned = {"list": [zero, 0.0], "tuple": (zero, {"in": zero}), "table": {"q": [zero], "x": 0.0}, "n": 3}
    assert found == {mine: cleaned, "all": zero}
    group, untouched = optimizer.param_groups
    assert (group["d"], group["bound"], group["sum"].tolist()) == (0.0, math.inf, zero) and math.isnan(untouched["d"])
    assert group["params"] == [mine]


def test_nan_in_an_optimizers_float8_state_is_cleaned() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["codes"] = torch.tensor([NAN, 1.5, -2.0]).to(torch.float8_e4m3fn)
    scrub(optimizer, [parameter])
    assert optimizer.state[parameter]["codes"].tolist() == [0.0, 1.5, -2.0]


def test_settings_of_a_group_that_refuse_writing_are_left_alone() -> None:
    class Fixed(UserList[float]):
        """As a list of OmegaConf that is read-only."""

        def __setitem__(self, place: object, value: object) -> NoReturn:
            raise TypeError("read-only")

    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([{"params": [parameter], "betas": Fixed([0.9, 0.95])}])
    parameter.grad = torch.full_like(parameter, NAN)
    optimizer.step()
    scrub(optimizer, [parameter])
    assert optimizer.state[parameter]["exp_avg"].tolist() == [0.0, 0.0]


def test_the_moments_of_an_optimizer_that_was_not_given_but_trains_the_model_are_cleaned(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    inner = torch.optim.AdamW(p.model.parameters(), lr=1e-2)  # as those within the backward, or in ZeroRedundancyOptimizer
    for parameter in p.model.parameters():
        parameter.grad = torch.full_like(parameter, NAN)
    inner.step()
    p.optimizer.zero_grad()
    p.optimizer.step()  # a dummy: without gradients it does nothing
    commit_next(p, [NONFINITE, NONFINITE])
    p.forward()
    assert all(bool(inner.state[parameter]["exp_avg"].isfinite().all()) for parameter in p.model.parameters())


def test_who_may_keep_nan_is_said_once_when_two_contributions_in_a_row_are_not_finite(
    peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    p = peer(every=1)
    said = []
    for verdict in (NONFINITE, OK, NONFINITE, ANOMALOUS, NONFINITE, NONFINITE, NONFINITE):
        p.step()
        commit_next(p, [verdict, verdict])
        p.forward()
        said.append(len(caplog.records))
    assert said == [0, 0, 0, 0, 0, 1, 1]
    words = r"two contributions in a row have NaN or Inf \(0\): if the loss is finite, AdamW keeps NaN beside [^\n]*$"
    assert re.match(words, caplog.records[0].getMessage())


def test_a_rolled_back_fragment_returns_to_theta(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    answer, after = committed(p.theta, [None, random_steps(p.theta)[1]], [NONFINITE, OK])
    p.collective.answers[0].append(answer)
    before = p.theta
    p.forward()
    assert torch.equal(after.fragments[0], before.fragments[0]) and same(flat(p.model), list(after.fragments))


@pytest.mark.parametrize("digest", [None, "of the run"])
def test_a_good_contribution_to_a_fragment_that_is_rolled_back_leaves_its_old_residual(
    peer: Callable[..., Peer], digest: str | None
) -> None:
    """It was not merged, and what its codec left out is lost with it."""
    p = peer(every=1, codec="int8")
    p.step()
    commit_next(p)
    p.step()
    owed = residuals(p)
    answer, after = committed(p.theta, [None, random_steps(p.theta)[1]], BOTH_OK, digest)
    p.collective.answers[1].append(answer)
    p.collective.snapshots.append(after)
    p.forward()
    assert p.worker.outer_step == 2 and same(flat(p.model), list(after.fragments))
    assert owed[0].any() and torch.equal(residuals(p)[0], owed[0]) and not torch.equal(residuals(p)[1], owed[1])


@pytest.mark.parametrize("said", [{"weight": 0.0}, {"merged_norm": 0.0}], ids=str)
def test_a_rollback_in_the_merge_leaves_the_old_residual_also_where_a_region_moves_the_fragment(
    peer: Callable[..., Peer], said: dict[str, float]
) -> None:
    p = peer(every=1, codec="int8")
    p.step()
    commit_next(p)
    p.step()
    owed = residuals(p)
    answer, after = committed(p.theta, random_steps(p.theta), BOTH_OK)
    injected, merged = answer.commit.fragments
    if "weight" in said:
        injected = replace(injected, verdicts=tuple(replace(each, weight=0.0) for each in injected.verdicts))
    else:
        injected = replace(injected, merged_norm=0.0)
    p.collective.answers[1].append(Committed(replace(answer.commit, fragments=(injected, merged))))
    p.forward()
    assert p.worker.outer_step == 2 and same(flat(p.model), list(after.fragments))
    assert owed[0].any() and torch.equal(residuals(p)[0], owed[0]) and not torch.equal(residuals(p)[1], owed[1])


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
    local = flat(p.model)
    p.collective.answers[0].append(None)
    assert not p.worker.synchronize() and p.worker.pending and same(flat(p.model), local)
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
    with EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32")) as worker:
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


@pytest.mark.parametrize("in_doubt", [False, True])
def test_behind_never_counts_a_pending_contribution_twice(peer: Callable[..., Peer], in_doubt: bool) -> None:
    """It may be in the snapshot: only what was done after sending it is replayed."""
    p = peer(every=1, codec="fp32")
    p.step()
    sent, target = flat(p.model), snapshot_of(9, [part + 0.25 for part in p.theta.fragments])
    if in_doubt:
        p.collective.answers[0].append(None)
        p.collective.answers[0].append(None)
        p.step()
    before = flat(p.model)
    assert same(before, sent) is not in_doubt
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(target)
    p.worker.synchronize()
    expected = [o + (now - then) for o, now, then in zip(target.fragments, before, sent, strict=True)]
    assert same(flat(p.model), expected)


@pytest.mark.parametrize("finite", [True, False])
def test_behind_takes_a_snapshot_and_replays_what_is_finite(peer: Callable[..., Peer], finite: bool) -> None:
    p = peer(every=5, codec="int8")
    p.step()
    if not finite:
        with torch.no_grad():
            p.model[0].bias[0] = float("inf")
    theta, before = p.theta, flat(p.model)
    target = snapshot_of(9, [part + 0.25 for part in theta.fragments])
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(target)
    p.worker.synchronize()
    expected = [o + (local - start) for o, local, start in zip(target.fragments, before, theta.fragments, strict=True)]
    if not finite:
        expected[0] = target.fragments[0]
    assert same(flat(p.model), expected)
    assert (p.worker.outer_step, p.worker.pending, p.worker.last_reason) == (9, False, "too far")
    assert not any(r.any() for r in residuals(p))


def test_behind_and_cut_off_the_peer_trains_on(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.step()
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(TransportError("unreachable"))
    p.forward()
    assert p.worker.pending and p.worker.outer_step == 0
    p.collective.answers[0].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(snapshot_of(9, p.theta.fragments))
    p.step()
    assert p.worker.outer_step == 9 and p.collective.rounds()[1][0].outer_step == 9


def test_behind_and_cut_off_at_the_boundary_nothing_is_contributed_to_the_old_step(peer: Callable[..., Peer]) -> None:
    p = peer(every=1)
    p.collective.answers[0].append(NeedsSnapshot("too far"))
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
