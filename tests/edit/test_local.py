"""LocalRun: several peers in one process, and the run's answers to each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RoundsConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import LocalProtocolError, RefusedError, RemoteProtocolError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, plan_fragments
from edit.local import LocalCollective, LocalRun
from edit.merging.merge import Measured
from edit.merging.mergers import Admitted, Rejected
from edit.records import Aborted, Committed, Contribution, Evicted, Finished, NeedsSnapshot, Verdict
from edit.worker.worker import EditWorker
from editpb.data_messages import contribution_header_from_pb, contribution_header_to_pb
from editpb.messages import ContributionHeader
from tests.support.encoded import LOSSY, encode
from tests.support.exhaustive import rarely
from tests.support.models import regression_batches, small_mlp
from tests.support.scripted_peer import flat
from tests.support.settings import worker_config
from tests.support.trainee import Trainee, config

# Several peers.


def trained(run_config: RunConfig, names: Sequence[str], rounds: int, every: int = 3, codec: str = "fp32") -> list[Trainee]:
    """Peers after so many rounds; the last outcome is applied, nobody has stepped since."""
    run = LocalRun(run_config, names)
    peers = [Trainee(run, name, seed, every, codec) for seed, name in enumerate(names)]
    for peer in peers:
        peer.worker.__enter__()
    for _ in range(rounds * every):
        for peer in peers:
            peer.step()
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    return peers


class Rejecting:
    """Admits nothing of one peer."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    def admit(self, fragment: FragmentSpec, contribution: Measured) -> Admitted | Rejected:
        return Rejected("its signature is wrong") if contribution.peer_id == self.peer_id else Admitted(contribution)


@pytest.mark.parametrize("names", ["ab", "b"])
def test_what_the_policy_rejects_is_not_merged_and_has_its_verdict(names: str) -> None:
    run = LocalRun(config(), names, policy=Rejecting("b"))
    peers = [Trainee(run, name, 0, every=2) for name in names]
    for peer in peers:
        peer.worker.__enter__()
    before = list(run.state.theta)
    for _ in range(2):
        for peer in peers:
            peer.step()
    own = flat(peers[0].model)
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    commit = peers[-1].worker.last_commit
    assert commit is not None
    for part in commit.fragments:
        assert [(said.peer_id, said.verdict, said.weight) for said in part.verdicts] == [
            *([("a", Verdict.OK, 1.0)] if "a" in names else []),
            ("b", Verdict.REJECTED, 0.0),
        ]
    expected = own if "a" in names else before
    for theta, one in zip(run.state.theta, expected, strict=True):
        torch.testing.assert_close(theta, one)


def test_t19_replicas_coincide_after_entering_although_initialised_differently() -> None:
    run = LocalRun(config(), ["a", "b", "c"])
    peers = [Trainee(run, name, seed, every=2) for seed, name in enumerate("abc")]
    assert not torch.equal(flat(peers[0].model)[0], flat(peers[1].model)[0])
    first = flat(peers[0].model)
    for peer in peers:
        with pytest.raises(KeyboardInterrupt), peer.worker:
            assert all(torch.equal(a, b) for a, b in zip(flat(peer.model), first, strict=True))
            raise KeyboardInterrupt


def test_a_given_theta_is_taken_instead_of_the_first_joiners() -> None:
    theta = flat(small_mlp(seed=9))
    run = LocalRun(config(), ["a"], theta=theta)
    peer = Trainee(run, "a", 0, every=1)
    with peer.worker:
        assert all(torch.equal(a, b) for a, b in zip(flat(peer.model), theta, strict=True))
        peer.step(2)
    assert torch.equal(theta[0], flat(small_mlp(seed=9))[0])


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("fp32", "fp32"),
        ("int8", "bf16"),
        *rarely([(text, text) for text in LOSSY], kept=[("topk", "topk"), ("stat2", "stat2")]),
    ],
)
def test_every_round_theta_is_the_same_bits_on_all_peers_and_in_the_run(up: str, down: str) -> None:
    run = LocalRun(config(codec=CodecConfig(up=up, down=down), outer=OuterConfig(), penalty=PenaltyConfig()), list("abc"))
    peers = [Trainee(run, name, seed, every=2, codec=up) for seed, name in enumerate("abc")]
    for peer in peers:
        peer.worker.__enter__()
    seen = set()
    for round_number in range(1, 6):
        for _ in range(2):
            for peer in peers:
                peer.step()
        for peer in peers:
            assert peer.worker.synchronize() and peer.worker.outer_step == round_number
        assert {peer.worker.digest for peer in peers} == {run.state.digest}
        assert run.state.digest == digest(run.state.theta)
        seen.add(run.state.digest)
    assert len(seen) == 5
    for peer in peers:
        peer.worker.__exit__(None, None, None)


def test_a_peer_that_sends_nan_is_cured_and_harms_nobody() -> None:
    """T2: one bad element on one replica made every parameter of every replica non-finite."""
    run = LocalRun(config(penalty=PenaltyConfig()), list("abc"))
    peers = [Trainee(run, name, seed, every=2) for seed, name in enumerate("abc")]
    for peer in peers:
        peer.worker.__enter__()
    for peer in peers:
        peer.step()
    with torch.no_grad():
        peers[1].model[0].weight[0, 0] = float("nan")
    for _ in range(5):
        for peer in peers:
            peer.step()
        if (commit := peers[1].worker.last_commit) is not None and commit.outer_step == 1:
            verdicts = {verdict.peer_id: verdict.verdict for verdict in commit.fragments[0].verdicts}
            assert verdicts == {"a": Verdict.OK, "b": Verdict.NONFINITE, "c": Verdict.OK}
    for peer in peers:
        assert peer.worker.synchronize()
        assert all(bool(torch.isfinite(parameter).all()) for parameter in peer.model.parameters())
        assert peer.worker.digest == run.state.digest and peer.worker.outer_step == 3
        peer.worker.__exit__(None, None, None)


def test_training_together_beats_no_training_on_every_peers_data() -> None:
    names = list("ab")
    before, after = [], []
    for seed, peer in enumerate(trained(config(outer=OuterConfig(lr=0.7, momentum=0.6)), names, rounds=20)):
        inputs, targets = next(regression_batches(seed, batch=200))
        before.append(nn.functional.mse_loss(small_mlp()(inputs), targets).item())
        after.append(nn.functional.mse_loss(peer.model(inputs), targets).item())
    assert sum(after) < sum(before)


def test_the_run_finishes_and_the_loops_go_on_alone() -> None:
    run = LocalRun(config(sync=SyncConfig(every=1, outer_steps=2)), ["a", "b"])
    peers = [Trainee(run, name, seed, every=1) for seed, name in enumerate("ab")]
    for peer in peers:
        peer.worker.__enter__()
    for _ in range(5):
        for peer in peers:
            peer.step()
    assert run.finished and [peer.worker.finished for peer in peers] == [True, True]
    assert {peer.worker.outer_step for peer in peers} == {2} and {peer.worker.digest for peer in peers} == {run.state.digest}
    for peer in peers:
        peer.worker.__exit__(None, None, None)
    late = Trainee(run, "a", 0, every=1)
    with late.worker:
        assert late.worker.finished


def test_a_peer_that_leaves_blocks_nobody_and_one_that_returns_starts_from_the_snapshot() -> None:
    """T23, in process."""
    run = LocalRun(config(), ["a", "b"])
    a, b = Trainee(run, "a", 0, every=1), Trainee(run, "b", 1, every=1)
    with pytest.raises(KeyboardInterrupt), b.worker:
        with a.worker:
            a.step()
            run.leave("b")
            a.step(3)
        raise KeyboardInterrupt
    assert run.state.outer_step == 4
    back = Trainee(run, "b", 2, every=1)
    with pytest.raises(KeyboardInterrupt), back.worker:
        assert back.worker.outer_step == 4 and back.worker.digest == run.state.digest
        with pytest.raises(LocalProtocolError, match="but a must contribute first"):
            back.step(2)
        raise KeyboardInterrupt


def test_a_peer_that_misses_commits_catches_up_by_replay_and_beyond_the_kept_ones_by_snapshot() -> None:
    for missed in (2, 5):
        run = LocalRun(config(storage=StorageConfig(keep_updates=3)), ["a", "b"])
        a, b = Trainee(run, "a", 0, every=1), Trainee(run, "b", 1, every=2)
        b.worker.__enter__()
        a.worker.__enter__()
        b.step()
        theta, local = [t.clone() for t in run.state.theta], flat(b.model)
        run.leave("b")
        a.step(missed)
        a.worker.__exit__(None, None, None)
        assert run.state.outer_step == missed
        assert b.worker.synchronize() and b.worker.outer_step == missed and b.worker.digest == run.state.digest
        progress = [now - outer for now, outer in zip(flat(b.model), run.state.theta, strict=True)]
        for kept, before, outer in zip(progress, local, theta, strict=True):
            torch.testing.assert_close(kept, before - outer, rtol=1e-4, atol=1e-6)
        assert ("no longer kept" in b.worker.last_reason) == (missed == 5)
        b.worker.__exit__(KeyboardInterrupt, None, None)


# The run's answers, one by one.


def contribute(collective: LocalCollective, outer_step: int, value: float = 1.0) -> None:
    """All fragments of small_mlp, each element `value`."""
    for fragment in plan_fragments(small_mlp().named_parameters()).fragments:
        payload = encode("fp32", torch.full((fragment.numel,), value))
        collective.contribute(
            Contribution(outer_step=outer_step, fragment_id=fragment.fragment_id, inner_steps=1, tokens=1, payload=payload)
        )


def founded(names: Sequence[str], **sections: object) -> tuple[LocalRun, list[LocalCollective]]:
    run = LocalRun(config(**sections), names)
    sides = [run.collective(name) for name in names]
    for side in sides:
        side.join(plan_fragments(small_mlp().named_parameters()), lambda: flat(small_mlp()))
    return run, sides


@pytest.mark.parametrize("inner_steps", [0, 1, 7])
@pytest.mark.parametrize("tokens", [-1, 0, 5])
@pytest.mark.parametrize("norm", [None, 0.0, 2.5, math.inf, -1.0, math.nan])
def test_it_takes_the_numbers_that_an_aggregator_takes(inner_steps: int, tokens: int, norm: float | None) -> None:
    _, (a,) = founded(["a"])
    schema = plan_fragments(small_mlp().named_parameters())
    payload = encode("fp32", torch.ones(schema.fragments[0].numel))
    said = Contribution(outer_step=0, fragment_id=0, inner_steps=inner_steps, tokens=tokens, payload=payload, norm=norm)
    header = ContributionHeader(
        run_id="run",
        round_id=1,
        outer_step=0,
        peer_id="a",
        fragment_id=0,
        schema_hash=schema.schema_hash,
        inner_steps=inner_steps,
        tokens=tokens,
        codec="fp32",
        numel=payload.numel,
        total_bytes=memoryview(payload.data).nbytes,
        norm=norm,
    )
    try:
        contribution_header_from_pb(contribution_header_to_pb(header), schema)
    except (RemoteProtocolError, ValueError):  # protobuf's, for what is negative
        with pytest.raises(LocalProtocolError, match="fragment 0: a contribution of"):
            a.contribute(said)
    else:
        a.contribute(said)


def test_a_round_commits_with_the_last_fragment_of_the_last_peer() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0)
    assert a.outcome(0, block=False) is None and run.state.outer_step == 0
    contribute(b, 0, 3.0)
    outcome = a.outcome(0, block=True)
    assert isinstance(outcome, Committed) and outcome == b.outcome(0, block=True)
    assert outcome.commit.outer_step == 1 == run.state.outer_step
    assert [verdict.peer_id for verdict in outcome.commit.fragments[0].verdicts] == ["a", "b"]
    torch.testing.assert_close(run.state.theta[0], flat(small_mlp())[0] - 2.0)


def test_who_would_wait_for_ever_is_told_for_whom() -> None:
    _, (a, _, _) = founded(["a", "b", "c"])
    contribute(a, 0)
    with pytest.raises(LocalProtocolError, match="peer a waits for the round at outer step 0, but b, c must contribute first"):
        a.outcome(0, block=True)


def test_a_retry_of_the_same_contribution_counts_once() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0, 5.0)
    contribute(a, 0, 1.0)
    contribute(b, 0, 1.0)
    torch.testing.assert_close(run.state.theta[0], flat(small_mlp())[0] - 1.0)


def test_a_peer_that_starts_again_takes_its_half_sent_contribution_with_it() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0, 5.0)
    a.join(plan_fragments(small_mlp().named_parameters()), list)
    contribute(b, 0, 1.0)
    assert run.state.outer_step == 0
    contribute(a, 0, 1.0)
    torch.testing.assert_close(run.state.theta[0], flat(small_mlp())[0] - 1.0)


def test_the_run_keeps_its_own_copy_of_a_given_theta() -> None:
    theta = flat(small_mlp())
    run = LocalRun(config(), ["a"], theta=theta)
    before = run.collective("a").join(plan_fragments(small_mlp().named_parameters()), list)
    theta[0].zero_()
    assert digest(run.state.theta) == run.state.digest == before.digest


def test_a_late_contribution_is_dropped_and_answered_with_the_commit() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0)
    run.leave("b")
    before = run.state.digest
    contribute(b, 0)
    outcome = b.outcome(0, block=True)
    assert isinstance(outcome, Committed) and outcome.commit.fragments[0].verdict_of("b") is None
    assert run.state.digest == before and run.state.outer_step == 1


def test_an_aborted_round_is_told_once_and_tried_again_under_a_new_id() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0)
    run.abort("power cut")
    assert a.outcome(0, block=True) == Aborted("power cut")
    assert a.outcome(0, block=False) is None and b.outcome(0, block=False) is None
    contribute(a, 0)
    contribute(b, 0)
    outcome = a.outcome(0, block=True)
    assert isinstance(outcome, Committed) and outcome.commit.round_id == 2


@pytest.mark.parametrize("rounds", [{"start_peers": 5, "quorum": 3}, {"wait": "slack", "grace_s": 0.0}, {"ceiling_s": 5.0}])
def test_all_peers_are_waited_for_whatever_the_run_says_of_quorum_and_times(rounds: dict[str, object]) -> None:
    run, (a, b) = founded(["a", "b"], rounds=RoundsConfig(**rounds))  # type: ignore[arg-type]
    for outer_step in range(3):
        contribute(a, outer_step)
        assert run.state.outer_step == outer_step and run.complete == ("a",)
        contribute(b, outer_step)
    assert run.state.outer_step == 3


def test_a_peer_that_comes_back_is_waited_for_in_the_open_round() -> None:
    run, (a, b) = founded(["a", "b"])
    for outer_step in range(2):
        run.leave("b")
        b.join(plan_fragments(small_mlp().named_parameters()), list)
        contribute(a, outer_step)
        assert run.state.outer_step == outer_step
        contribute(b, outer_step)
        assert run.state.outer_step == outer_step + 1


def test_only_whole_contributions_are_merged_at_a_close() -> None:
    run, (a, b) = founded(["a", "b"])
    fragment = run.state.schema.fragments[0]
    half = Contribution(
        outer_step=0, fragment_id=0, inner_steps=1, tokens=1, payload=encode("fp32", torch.ones(fragment.numel))
    )
    b.contribute(half)
    contribute(a, 0)
    run.close("enough")
    outcome = b.outcome(0, block=True)
    assert isinstance(outcome, Committed) and outcome.commit.reason == "enough" and not outcome.carried
    assert all(part.verdict_of("b") is None for part in outcome.commit.fragments)


@pytest.mark.parametrize("step", ["reduce", "record", "commit"])
def test_a_merge_that_fails_loses_the_round_and_the_run_goes_on(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (a, b) = founded(["a", "b"])
    before = run.state.digest

    def fails(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    contribute(a, 0)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(run.state, step, fails)
        contribute(b, 0)
    assert (run.state.outer_step, run.state.digest, run.complete) == (0, before, ())
    assert a.outcome(0, block=True) == Aborted("RuntimeError: out of memory")
    for side in (a, b):
        contribute(side, 0)
    outcome = a.outcome(0, block=True)
    assert isinstance(outcome, Committed) and outcome.commit.round_id == 2


def test_beyond_the_kept_commits_a_peer_is_behind() -> None:
    _, (a,) = founded(["a"], storage=StorageConfig(keep_updates=1))
    contribute(a, 0)
    contribute(a, 1)
    assert isinstance(a.outcome(0, block=True), NeedsSnapshot) and isinstance(a.outcome(1, block=True), Committed)


def test_the_last_outer_step_is_finished() -> None:
    run, (a,) = founded(["a"], sync=SyncConfig(outer_steps=1))
    contribute(a, 0)
    assert isinstance(a.outcome(0, block=True), Committed) and a.outcome(1, block=True) == Finished(1)
    contribute(a, 1)
    assert run.state.outer_step == 1


def test_an_evicted_peer_is_told_and_cannot_come_back() -> None:
    run, (a, b) = founded(["a", "b"])
    contribute(a, 0)
    run.evict("b", "misbehaved")
    assert run.state.outer_step == 1 and b.outcome(0, block=True) == Evicted("misbehaved")
    with pytest.raises(RefusedError, match="peer b was evicted: misbehaved"):
        b.join(plan_fragments(small_mlp().named_parameters()), list)


def test_another_model_is_refused_by_the_name_of_its_first_differing_tensor() -> None:
    run, _ = founded(["a", "b"])
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    worker = EditWorker(other, torch.optim.SGD(other.parameters()), run.collective("b"), worker_config(codec="fp32"))
    with pytest.raises(
        RefusedError, match=r"peer b has another model: tensor 2\.weight has shape \[3, 6\] in the run and \[2, 6\]"
    ):
        worker.__enter__()
    assert run.state.outer_step == 0


def test_calls_out_of_order_are_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="distinct peers"):
        LocalRun(config(), ["a", "a"])
    run = LocalRun(config(), ["a"])
    with pytest.raises(LocalProtocolError, match="peer z is not one of a"):
        run.collective("z")
    with pytest.raises(LocalProtocolError, match="before its first peer joins"):
        run.snapshot()
    _, (a,) = founded(["a"])
    with pytest.raises(LocalProtocolError, match="at outer step 0"):
        contribute(a, 1)
    with pytest.raises(LocalProtocolError, match="the run is at 0"):
        a.outcome(1, block=False)


def test_a_snapshot_stays_valid_while_the_run_goes_on() -> None:
    run, (a,) = founded(["a"])
    snapshot = a.snapshot()
    contribute(a, 0)
    assert digest(snapshot.fragments) == snapshot.digest != run.state.digest
