"""The collective against a scripted coordinator, over real gRPC on loopback: rounds, losses, broken streams, restarts."""

from __future__ import annotations

import grpc
import pytest
import torch

from edit.codecs import decode
from edit.errors import EvictedError, LocalProtocolError, RefusedError, TransportError
from edit.fragments.digest import digest
from edit.records import Aborted, Committed, Contribution, Evicted, Finished, NeedsSnapshot, Outcome, Progress
from editpb.messages import Expel, PeerState, RunPhase
from peers.carriers.run_connection import Interrupted
from tests.support.encoded import encode
from tests.support.fake_coordinator import AHEAD, FIRST_ROUND, FakeCoordinator
from tests.support.fake_run import HEARTBEAT_S, LARGE, SMALL, config, open_when_ready, run_of, schema_of, vectors


def test_the_configuration_is_asked_for_without_a_schema() -> None:
    with run_of(join=False) as (fake, peer):
        assert peer.configuration() == (config(), 0)
        assert [hello.schema_hash for hello in fake.hellos] == [""]


def test_join_brings_the_outer_parameters_and_heartbeats_tell_of_them() -> None:
    with run_of(join=False) as (fake, peer):
        snapshot = peer.collective.join(peer.schema, lambda: pytest.fail("not the founder"))
        assert all(torch.equal(a, b) for a, b in zip(snapshot.fragments, vectors(SMALL, 0), strict=True))
        fake.await_(lambda f: f.heartbeats and f.heartbeats[-1].state is PeerState.TRAINING)
        assert fake.heartbeats[-1].digest == snapshot.digest
        assert fake.heartbeats[-1].bytes_received > 4 * sum(SMALL)
        with pytest.raises(LocalProtocolError, match=r"one training per connection: leave peers\.connect, and connect again"):
            peer.collective.join(peer.schema, lambda: pytest.fail("not the founder"))


def finish(fake: FakeCoordinator) -> None:
    fake.commit()
    fake.change_view(phase=RunPhase.FINISHED, round_id=0)


def test_the_founder_sends_its_parameters_and_waits_for_the_first_round() -> None:
    mine = vectors(SMALL, seed=7)
    with run_of(founded=False, join=False) as (fake, peer):
        fake.on_heartbeat = open_when_ready
        snapshot = peer.collective.join(peer.schema, lambda: mine)
        assert fake.view.round_id == FIRST_ROUND
        assert all(torch.equal(a, b) for a, b in zip(snapshot.fragments, mine, strict=True))
        assert fake.founding_starts == [0, 0], "it asks how much is here, and sends everything"


def test_a_round_commits_and_the_update_is_what_the_coordinator_applied() -> None:
    with run_of(LARGE) as (fake, peer):
        fake.script = FakeCoordinator.commit
        before, deltas = vectors(LARGE, 0), vectors(LARGE, 1)
        peer.contribute(deltas)
        outcome = peer.ask()
        assert isinstance(outcome, Committed)
        assert fake.state is not None and outcome.commit.digest == fake.state.digest
        after = [theta - decode(f.payload) for theta, f in zip(before, outcome.commit.fragments, strict=True) if f.payload]
        assert digest(after) == outcome.commit.digest
        verdict = outcome.commit.fragments[1].verdict_of("a")
        assert verdict is not None and verdict.weight == 1.0
        header = fake.headers[FIRST_ROUND, 1, 0]
        assert (header.inner_steps, header.tokens, header.total_bytes) == (5, 50, 4 * LARGE[1])
        assert peer.collective.traffic.sent > 4 * sum(LARGE)


def test_an_outer_step_exchanges_its_group_of_fragments_only() -> None:
    with run_of((24, 40, 8), groups=2) as (fake, peer):
        fake.script = FakeCoordinator.commit
        deltas = vectors((24, 40, 8), 1)
        for outer_step, group in enumerate([(0, 2), (1,), (0, 2)]):
            for i in group:
                payload = encode("fp32", deltas[i])
                peer.collective.contribute(
                    Contribution(outer_step=outer_step, fragment_id=i, inner_steps=5, tokens=50, payload=payload)
                )
            outcome = peer.ask(outer_step)
            assert isinstance(outcome, Committed)
            assert tuple(part.fragment_id for part in outcome.commit.fragments) == group


def test_an_aborted_round_is_tried_again_under_a_new_one() -> None:
    with run_of() as (fake, peer):
        fake.script = lambda f: f.abort("the disk is full")
        peer.contribute(vectors(SMALL, 1))
        assert peer.ask() == Aborted("the disk is full")
        fake.script = FakeCoordinator.commit
        peer.contribute(vectors(SMALL, 2))
        assert isinstance(peer.ask(), Committed)
        assert (FIRST_ROUND + 1, 0, 0) in fake.headers


def test_contributions_wait_for_an_open_round() -> None:
    with run_of() as (fake, peer):
        fake.show(phase=RunPhase.PAUSED, round_id=0)
        fake.await_(lambda f: any(beat.state is PeerState.TRAINING for beat in f.heartbeats))
        peer.io.wait(lambda: None, timeout=HEARTBEAT_S)
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.heartbeats[-1].state is PeerState.EXCHANGING)
        assert fake.calls["Contribute"] == 0
        assert peer.collective.outcome(0, block=False) is None
        fake.script = FakeCoordinator.commit
        fake.show(phase=RunPhase.COLLECTING, round_id=FIRST_ROUND + 1)
        assert isinstance(peer.ask(), Committed)


def test_a_peer_that_comes_late_gets_the_update_without_its_own_verdict() -> None:
    with run_of() as (fake, peer):
        fake.script = FakeCoordinator.commit
        peer.contribute(vectors(SMALL, 1))
        assert isinstance(peer.ask(), Committed)
        late = [encode("fp32", delta) for delta in vectors(SMALL, 2)]
        fake.io.change(lambda: fake.other_peer_commits(late))
        peer.contribute(vectors(SMALL, 3), outer_step=1)
        outcome = peer.ask(1)
        assert isinstance(outcome, Committed)
        assert outcome.commit.outer_step == 2
        assert outcome.commit.fragments[0].verdict_of("b") is not None
        assert outcome.commit.fragments[0].verdict_of("a") is None


def test_an_update_no_longer_kept_means_behind() -> None:
    with run_of() as (fake, peer):
        fake.script = _commit_and_forget
        peer.contribute(vectors(SMALL, 1))
        outcome = peer.ask()
        assert isinstance(outcome, NeedsSnapshot) and "no longer kept" in outcome.reason
        assert peer.collective.snapshot().outer_step == 1


def _commit_and_forget(fake: FakeCoordinator) -> None:
    fake.commit()
    fake.updates.clear()


def test_an_update_is_fetched_while_training_goes_on_and_only_once() -> None:
    with run_of() as (fake, peer):
        fake.script = FakeCoordinator.commit
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.calls["FetchUpdate"] == 1)  # nobody has asked for the outcome
        assert isinstance(peer.ask(), Committed)
        assert fake.calls["FetchUpdate"] == 1


def test_an_update_is_fetched_while_training_goes_on_when_its_commit_is_heard_before_the_answer_that_it_is_not_there() -> None:
    with run_of() as (fake, peer):
        fake.hold_update(AHEAD)
        peer.contribute(vectors(SMALL, 1))
        fake.await_held()
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        fake.io.change(fake.commit)
        assert peer.io.wait(lambda: ((view := peer.collective.last_view) and view.outer_step == 1) or None, timeout=10)
        fake.release_update(AHEAD)
        fake.await_(lambda f: f.calls["FetchUpdate"] == 1)  # nobody has asked for the outcome
        assert isinstance(peer.ask(), Committed)
        assert fake.calls["FetchUpdate"] == 1


def test_an_update_is_asked_for_ahead_of_its_commit_once_for_a_round() -> None:
    """A round that has nothing to send ahead, or came to nothing, is not asked again; the commit is fetched all the same."""
    with run_of() as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.calls["ahead"] == 1)
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        fake.show(last_reason="news")
        fake.io.change(fake.commit)
        outcome = peer.ask()
        assert isinstance(outcome, Committed) and outcome.commit.outer_step == 1
        assert fake.calls["ahead"] == 1


def test_a_view_that_says_so_means_behind() -> None:
    with run_of() as (fake, peer):
        fake.show(resync="your digest is not ours")
        peer.contribute(vectors(SMALL, 1))
        assert peer.ask() == NeedsSnapshot("your digest is not ours")
        peer.collective.snapshot()
        assert peer.collective.outcome(0, block=False) is None


def test_a_broken_contribution_resumes_where_it_broke() -> None:
    with run_of(LARGE) as (fake, peer):
        fake.script = FakeCoordinator.commit
        fake.break_contribution_after = [1 << 40, 1 << 18, 1]  # the small fragment, then the large one twice
        peer.contribute(vectors(LARGE, 1))
        assert isinstance(peer.ask(), Committed)
        assert 1 << 18 in fake.starts
        assert fake.calls["Probe"] >= 2


def test_a_founder_whose_stream_broke_goes_on_where_it_broke() -> None:
    with run_of(LARGE, join=False, founded=False) as (fake, peer):
        fake.break_founding_after, fake.on_heartbeat = [1 << 40, 1 << 17], open_when_ready
        peer.collective.join(peer.schema, lambda: vectors(LARGE, 7))
        assert digest(fake.founded) == digest(vectors(LARGE, 7))
        assert fake.founding_starts[:2] == [0, 0] and min(fake.founding_starts[2:]) >= 1 << 17


def test_a_refused_contribution_waits_for_the_outcome_of_its_round() -> None:
    with run_of() as (fake, peer):
        fake.refuse_contributions = [(grpc.StatusCode.FAILED_PRECONDITION, "the round is closed")]
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.calls["Contribute"] >= 1 and not f.refuse_contributions)
        assert peer.collective.outcome(0, block=False) is None
        fake.io.change(lambda: fake.abort("too few"))
        assert peer.ask() == Aborted("too few")


def test_a_refusal_for_good_ends_the_peer_also_where_grpc_loses_the_first_status() -> None:
    with run_of() as (fake, peer):
        lost = (grpc.StatusCode.INTERNAL, "Internal error from Core")
        fake.refuse_contributions = [lost] * 2 + [(grpc.StatusCode.PERMISSION_DENIED, "another model")] * 100
        peer.contribute(vectors(SMALL, 1))
        with pytest.raises(RefusedError, match="another model"):
            peer.ask()


def test_a_broken_snapshot_resumes_and_a_damaged_one_is_fetched_again() -> None:
    with run_of(join=False, sizes=(24, 4000)) as (fake, peer):
        fake.break_snapshot_after = [4 * 24 + 2048]
        snapshot = peer.collective.join(peer.schema, lambda: [])
        assert snapshot.digest == fake.view.digest
        assert 2048 in fake.starts
        fake.damage_snapshots = 1
        assert peer.collective.snapshot().digest == fake.view.digest
        fake.damage_snapshots = 1 << 30
        with pytest.raises(TransportError, match="BLAKE3 is not the manifest's"):
            peer.collective.snapshot()


def test_a_snapshot_fetched_ahead_is_what_join_returns() -> None:
    with run_of(join=False) as (fake, peer):
        peer.collective.prefetch()
        fake.await_(lambda f: f.calls["FetchSnapshot"] == 1)
        assert not fake.heartbeats
        snapshot = peer.collective.join(peer.schema, lambda: [])
        assert snapshot.digest == fake.view.digest and digest(snapshot.fragments) == snapshot.digest
        assert (fake.calls["DescribeSnapshot"], fake.calls["FetchSnapshot"]) == (1, 1)
        assert peer.collective.snapshot().digest == fake.view.digest
        assert fake.calls["DescribeSnapshot"] == 2, "it is given once"


def test_what_the_run_commits_while_a_snapshot_was_fetched_ahead_is_caught_up_with() -> None:
    with run_of(join=False) as (fake, peer):
        peer.collective.prefetch()
        fake.await_(lambda f: f.calls["FetchSnapshot"] == 1)
        theirs = [encode("fp32", delta) for delta in vectors(SMALL, 2)]
        fake.io.change(lambda: fake.other_peer_commits(theirs))
        snapshot = peer.collective.join(peer.schema, lambda: [])
        assert snapshot.outer_step == 0
        outcome = peer.ask()
        assert isinstance(outcome, Committed) and outcome.commit.outer_step == 1


@pytest.mark.parametrize("trouble", ["damaged", "broken"])
def test_a_snapshot_that_could_not_be_fetched_ahead_is_fetched_on_joining(trouble: str) -> None:
    with run_of(join=False, sizes=(24, 4000)) as (fake, peer):
        fake.damage_snapshots, fake.break_snapshot_after = (1, []) if trouble == "damaged" else (0, [0])
        peer.collective.prefetch()
        fake.await_(lambda f: f.calls["FetchSnapshot"] == 1)
        snapshot = peer.collective.join(peer.schema, lambda: [])
        assert snapshot.digest == fake.view.digest
        assert fake.calls["DescribeSnapshot"] == 2


def test_a_snapshot_of_another_model_is_of_no_use() -> None:
    with run_of(join=False) as (_, peer):
        peer.collective.prefetch()
        assert peer.collective._take_prefetched(schema_of((3,))) is None
        assert peer.collective._take_prefetched(peer.schema) is None, "it was given up"


@pytest.mark.parametrize(("damaged", "kind"), [(1, Committed), (1 << 30, NeedsSnapshot)])
def test_a_damaged_update_is_fetched_again_and_in_the_end_a_snapshot_is_taken(damaged: int, kind: type[Outcome]) -> None:
    with run_of() as (fake, peer):
        fake.script = FakeCoordinator.commit
        fake.damage_updates = damaged
        peer.contribute(vectors(SMALL, 1))
        assert isinstance(peer.ask(), kind)
        assert fake.calls["FetchUpdate"] == (2 if damaged == 1 else 3)


def test_an_evicted_peer_is_told_why() -> None:
    with run_of() as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        fake.expel = Expel(True, "too noisy")
        fake.show()
        assert peer.collective.outcome(0, block=True) == Evicted("too noisy")
        with pytest.raises(EvictedError, match="too noisy"):
            peer.collective.check()


def test_a_peer_that_does_not_fit_is_refused_on_joining() -> None:
    with run_of(join=False) as (fake, peer):
        fake.expel = Expel(False, "tensor f0.weight has shape [1] in the run and [24] at the peer")
        with pytest.raises(RefusedError, match=r"f0\.weight"):
            peer.collective.join(peer.schema, lambda: [])


def test_a_passing_failure_of_the_coordinator_is_tried_again() -> None:
    with run_of(join=False) as (fake, peer):
        fake.refuse_attendance = [(grpc.StatusCode.INTERNAL, "a bug"), (grpc.StatusCode.UNAVAILABLE, "starting")]
        assert peer.configuration() == (config(), 0)


@pytest.mark.parametrize(
    ("code", "details", "error", "told"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "the peer speaks protocol 1, this side 2", RefusedError, "protocol 1, this side 2$"),
        (grpc.StatusCode.PERMISSION_DENIED, "the certificate is of another run", RefusedError, "of another run"),
        (grpc.StatusCode.PERMISSION_DENIED, "evicted: key lost", EvictedError, "key lost"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: self signed",
            RefusedError,
            "not from this run's authority",
        ),
    ],
)
def test_a_peer_that_is_refused_on_connecting_is_told_why_and_does_not_try_again(
    code: grpc.StatusCode, details: str, error: type[Exception], told: str
) -> None:
    with run_of(join=False) as (fake, peer):
        fake.refuse_attendance = [(code, details)]
        with pytest.raises(error, match=told):
            peer.configuration()


def test_a_snapshot_that_is_gone_while_it_is_read_is_replaced_by_a_newer_one() -> None:
    with run_of(join=False) as (fake, peer):
        fake.lose_snapshots = 2
        assert peer.collective.join(peer.schema, lambda: []).digest == fake.view.digest
        assert fake.calls["DescribeSnapshot"] == 3


def test_a_finished_run_says_so() -> None:
    with run_of() as (fake, peer):
        fake.script = finish
        peer.contribute(vectors(SMALL, 1))
        assert isinstance(peer.ask(), Committed)
        assert peer.ask(1) == Finished(1)


def test_in_doubt_while_the_coordinator_is_down_then_committed() -> None:
    with run_of() as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        fake.stop()
        assert peer.collective.outcome(0, block=True) is None
        fake.io.change(fake.commit)
        fake.start()
        assert isinstance(peer.ask(), Committed)


def test_in_doubt_while_the_coordinator_is_down_then_aborted_by_its_restart() -> None:
    with run_of() as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        fake.stop()
        assert peer.collective.outcome(0, block=True) is None
        fake.show(sequence=0, round_id=2_000_001, last_round_id=0)
        fake.start()
        outcome = peer.ask()
        assert isinstance(outcome, Aborted) and outcome.reason.endswith("of an earlier start was lost; round 1 is open")
        fake.script = FakeCoordinator.commit
        peer.contribute(vectors(SMALL, 1))
        assert isinstance(peer.ask(), Committed)
        assert (2_000_001, 0, 0) in fake.headers


def test_cut_off_with_nothing_sent_is_a_lost_round_not_a_doubt() -> None:
    with run_of() as (fake, peer):
        fake.stop()
        peer.await_link(False)
        peer.contribute(vectors(SMALL, 1))
        outcome = peer.collective.outcome(0, block=True)
        assert isinstance(outcome, Aborted) and "nothing was sent" in outcome.reason
        with pytest.raises(TransportError):
            peer.collective.snapshot()
        fake.script = FakeCoordinator.commit
        fake.start()
        peer.await_link(True)
        peer.contribute(vectors(SMALL, 2))
        assert isinstance(peer.ask(), Committed)


def test_waits_can_be_interrupted_and_goodbye_is_said() -> None:
    with run_of() as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        peer.io.post(peer.collective.interrupt)
        with pytest.raises(Interrupted):
            peer.collective.outcome(0, block=True)
        peer.collective.close()
        fake.await_(lambda f: f.goodbyes)


def test_a_report_goes_out_with_the_next_heartbeat() -> None:
    with run_of() as (fake, peer):
        progress = Progress(
            outer_step=3,
            digest="",
            exchanging=False,
            inner_steps=40,
            round_inner_steps=0,
            loss=1.5,
            step_s=0.1,
            metrics={"accuracy": 0.5},
        )
        peer.collective.report(progress)
        fake.await_(lambda f: f.heartbeats[-1].inner_steps == 40)
        assert fake.heartbeats[-1].loss == 1.5 and fake.heartbeats[-1].outer_step == 3
        assert fake.heartbeats[-1].metrics == {"accuracy": 0.5}
