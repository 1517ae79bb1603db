"""Two ranks of one peer against a scripted coordinator: each moves its own shards, both get the same answer.

The ranks are threads with a io, a connection and a session each; gRPC is real, on loopback.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
import torch
from torch import Tensor

from edit.errors import ConfigError, RefusedError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Aborted, Committed, EncodedTensor, Evicted, Finished, NeedsSnapshot, Outcome, Snapshot
from editpb.identity import Identity
from editpb.messages import Expel, RunPhase
from peers.carriers.hub import data_calls
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import read_configuration
from peers.carriers.hub.downlink import Arrival
from peers.carriers.run_connection import Interrupted
from tests.support.encoded import decode_shard
from tests.support.fake_coordinator import FIRST_ROUND, RUN_ID, FakeCoordinator
from tests.support.fake_run import config, open_when_ready, vectors
from tests.support.two_ranks import SCHEMA, SIZES, Rank, shards, with_two_ranks


def put_together(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Whole fragments from the ranks' shards."""
    whole = [torch.full((size,), torch.nan) for size in SIZES]
    for rank, vectors_of_rank in enumerate(parts):
        for shard, vector, fragment in zip(shards(rank), vectors_of_rank, whole, strict=True):
            shard.put(vector, fragment)
    return whole


def stepped(before: Sequence[Tensor], commit: Sequence[EncodedTensor | None], rank: int) -> list[Tensor]:
    return [
        shard.take(theta) - decode_shard(payload, shard)
        for shard, theta, payload in zip(shards(rank), before, commit, strict=True)
        if payload is not None
    ]


def test_each_rank_gets_the_regions_it_holds() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> Snapshot:
        snapshot = rank.join()
        fake.await_(lambda f: len(f.hellos) == 2)
        return snapshot

    snapshots = with_two_ranks(work, join=False)
    assert {snapshot.digest for snapshot in snapshots} == {digest(vectors(SIZES, 0))}
    whole = put_together([snapshot.fragments for snapshot in snapshots])
    assert all(torch.equal(a, b) for a, b in zip(whole, vectors(SIZES, 0), strict=True))


def test_a_snapshot_that_is_gone_for_one_rank_is_taken_anew_by_all() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> tuple[str, int]:
        rank.only(0, lambda: setattr(fake, "lose_snapshots", 1))
        described = fake.calls["DescribeSnapshot"]
        rank.gate.wait()
        snapshot = rank.collective.snapshot()
        return snapshot.digest, fake.calls["DescribeSnapshot"] - described

    assert with_two_ranks(work) == [(digest(vectors(SIZES, 0)), 2)] * 2


def test_every_rank_says_which_one_it_is_and_learns_the_configuration_from_rank_0() -> None:
    said: list[tuple[bool, int, int]] = []

    def work(fake: FakeCoordinator, rank: Rank) -> object:
        channels, identity = Channels([f"127.0.0.1:{fake.port}"]), Identity(RUN_ID, "peer", "a")
        configuration = read_configuration(rank.io, channels, identity, rank.ranks, draw=lambda: 0.0)
        rank.join()
        fake.await_(lambda f: len(f.hellos) == 3)
        said[:] = [(not hello.schema_hash, hello.rank, hello.ranks) for hello in fake.hellos]
        return configuration

    assert with_two_ranks(work, join=False) == [(config(), 0)] * 2
    assert sorted(said) == [(False, 0, 2), (False, 1, 2), (True, 0, 2)]


def test_a_replica_founds_the_run_once_from_all_its_ranks() -> None:
    gathered: list[int] = []

    def work(fake: FakeCoordinator, rank: Rank) -> int:
        fake.on_heartbeat = open_when_ready

        def found() -> list[Tensor]:
            gathered.append(rank.ranks.rank)
            return vectors(SIZES, 0) if rank.ranks.leads else []

        rank.collective.join(SCHEMA, found, rank.shards)
        assert fake.founding_starts == [0, 0], "one founding: what is here is asked, everything is sent"
        return len(fake.founded)

    assert with_two_ranks(work, founded=False, join=False) == [len(SIZES)] * 2
    assert sorted(gathered) == [0, 1]


def test_a_round_merges_the_ranks_parts_and_each_gets_its_cut() -> None:
    before, deltas = vectors(SIZES, 0), vectors(SIZES, 1)

    def work(fake: FakeCoordinator, rank: Rank) -> tuple[str, list[Tensor]]:
        fake.script = FakeCoordinator.commit
        rank.contribute(deltas)
        outcome = rank.collective.outcome(0, block=True)
        assert isinstance(outcome, Committed) and fake.state is not None
        payloads = [part.payload for part in outcome.commit.fragments]
        assert outcome.commit.digest == fake.state.digest
        assert [shard.numel for shard in rank.shards] == [payload.numel for payload in payloads if payload]
        return outcome.commit.digest, stepped(before, payloads, rank.ranks.rank)

    (claimed, first), (_, second) = with_two_ranks(work)
    assert digest(put_together([first, second])) == claimed


def test_rank_0_reports_the_traffic_of_all_ranks() -> None:
    sent: list[int] = []

    def work(fake: FakeCoordinator, rank: Rank) -> None:
        fake.script = FakeCoordinator.commit
        rank.contribute(vectors(SIZES, 1))
        assert isinstance(rank.collective.outcome(0, block=True), Committed)
        sent.append(rank.collective.traffic.sent)
        rank.gate.wait()
        fake.await_(lambda f: f.heartbeats[-1].bytes_sent == sum(sent) > max(sent))

    with_two_ranks(work)


def test_attempts_are_numbered_alike_and_a_lost_one_is_followed_by_a_higher_number() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> dict[tuple[int, int, int], int]:
        fake.script = lambda f: f.abort("the disk is full")
        rank.contribute(vectors(SIZES, 1))
        assert rank.collective.outcome(0, block=True) == Aborted("the disk is full")
        rank.only(0, lambda: setattr(fake, "script", FakeCoordinator.commit))
        rank.contribute(vectors(SIZES, 2))
        assert isinstance(rank.collective.outcome(0, block=True), Committed)
        return {slot: header.attempt for slot, header in fake.headers.items()}

    attempts, _ = with_two_ranks(work)
    by_round = [{attempts[slot] for slot in attempts if slot[0] == FIRST_ROUND + i} for i in range(2)]
    assert [len(numbers) for numbers in by_round] == [1, 1]
    assert max(by_round[1]) == max(by_round[0]) + 1
    assert max(by_round[0]) % (1 << 20) == 0 < max(by_round[0])


def test_a_rank_follows_rank_0_to_the_round_that_it_contributes_to() -> None:
    """Rank 1 has sent its part to a round that was lost before rank 0 knew of it: no outcome tells it to send again."""

    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        rank.only(1, lambda: rank.contribute(vectors(SIZES, 1)))
        fake.await_(lambda f: (FIRST_ROUND, 1, 1) in f.headers)
        rank.only(0, lambda: fake.io.change(lambda: fake.abort("too few")))
        fake.await_(lambda f: (FIRST_ROUND + 1, 1, 1) in f.headers)
        fake.script = FakeCoordinator.commit
        rank.only(0, lambda: rank.contribute(vectors(SIZES, 1)))
        return rank.collective.outcome(0, block=True)

    assert all(isinstance(outcome, Committed) for outcome in with_two_ranks(work))


def test_a_part_of_an_attempt_that_was_withdrawn_is_replaced() -> None:
    """Rank 0 was cut off and has sent nothing, so the attempt is lost; rank 1's part of it lies in the open round."""
    deltas = vectors(SIZES, 3)

    def work(fake: FakeCoordinator, rank: Rank) -> str:
        rank.only(1, lambda: rank.contribute(vectors(SIZES, 1)))
        fake.await_(lambda f: (FIRST_ROUND, 1, 1) in f.headers)
        rank.only(0, fake.stop)
        rank.await_link(False)
        rank.only(0, lambda: rank.contribute(vectors(SIZES, 1)))
        outcome = rank.collective.outcome(0, block=True)
        assert isinstance(outcome, Aborted) and "nothing was sent" in outcome.reason
        fake.script = FakeCoordinator.commit
        rank.only(0, fake.start)
        rank.contribute(deltas)
        rank.await_link(True)
        rank.gate.wait()
        outcome = rank.collective.outcome(0, block=True)
        assert isinstance(outcome, Committed)
        return outcome.commit.digest

    only_deltas = digest([theta - delta for theta, delta in zip(vectors(SIZES, 0), deltas, strict=True)])
    assert with_two_ranks(work) == [only_deltas] * 2


def of_rank_1(asked: Sequence[Shard] | None) -> bool:
    return asked is not None and any(shard.boxes and shard.boxes[0].offsets[0] > 0 for shard in asked)


def test_an_update_that_one_rank_cannot_get_leaves_all_behind() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        fake.script = FakeCoordinator.commit
        fake.refuse_update = lambda asked: (grpc.StatusCode.NOT_FOUND, "gone") if of_rank_1(asked) else None
        rank.contribute(vectors(SIZES, 1))
        outcome = rank.collective.outcome(0, block=True)
        assert rank.collective.snapshot().outer_step == 1
        return outcome

    assert with_two_ranks(work) == [NeedsSnapshot("update 1: gone")] * 2


def test_a_rank_that_is_cut_off_leaves_all_in_doubt_and_what_the_others_have_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_calls, "TRIES", 1)
    asked: list[Sequence[Shard] | None] = []

    def work(fake: FakeCoordinator, rank: Rank) -> tuple[Outcome | None, Outcome | None]:
        fake.script = FakeCoordinator.commit
        fake.refuse_update = lambda held: (grpc.StatusCode.UNAVAILABLE, "no route") if of_rank_1(held) else None
        rank.contribute(vectors(SIZES, 1))
        doubt = rank.collective.outcome(0, block=True)
        rank.only(0, lambda: setattr(fake, "refuse_update", lambda held: None))
        outcome = rank.collective.outcome(0, block=True)
        asked[:] = fake.asked_for
        return doubt, outcome

    for doubt, outcome in with_two_ranks(work):
        assert doubt is None
        assert isinstance(outcome, Committed)
    assert sorted(of_rank_1(held) for held in asked) == [False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all(rank: int) -> None:
    def work(fake: FakeCoordinator, each: Rank) -> int:
        each.contribute([-delta for delta in vectors(SIZES, 1)])
        each.only(rank, lambda: each.io.post(each.collective.interrupt))
        with pytest.raises(Interrupted):
            each.collective.outcome(0, block=True)
        with pytest.raises(Interrupted):
            each.collective.check()
        return each.ranks.rank

    assert with_two_ranks(work) == [0, 1]


def test_an_evicted_peer_hears_it_at_every_rank() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        rank.contribute(vectors(SIZES, 1))
        rank.only(0, lambda: (setattr(fake, "expel", Expel(True, "too noisy")), fake.show()))
        return rank.collective.outcome(0, block=True)

    assert with_two_ranks(work) == [Evicted("too noisy")] * 2


def test_what_is_refused_to_one_rank_ends_all() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> str:
        fake.refuse_contributions = [(grpc.StatusCode.PERMISSION_DENIED, "another model")] * 100  # each try: gRPC may lose one
        rank.only(1, lambda: rank.contribute(vectors(SIZES, 1)))
        with pytest.raises(RefusedError) as refused:
            rank.collective.outcome(0, block=True)
        return str(refused.value)

    assert with_two_ranks(work) == ["another model"] * 2


def test_ranks_with_different_models_are_told_before_anything_is_sent() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> int:
        schema = SCHEMA if rank.ranks.leads else Schema(SCHEMA.fragments[:2])
        with pytest.raises(ConfigError, match="the model"):
            rank.collective.join(schema, list, rank.shards[: len(schema.fragments)])
        return len(fake.hellos)

    assert with_two_ranks(work, join=False) == [0, 0]


def test_the_end_of_a_run_is_what_rank_0_sees() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> list[bool]:
        before = rank.collective.ended
        rank.only(0, lambda: fake.show(phase=RunPhase.FINISHED, round_id=0))
        finished = rank.collective.outcome(0, block=True)
        return [before, finished == Finished(0), rank.collective.ended, rank.collective.cut_off]

    assert with_two_ranks(work) == [[False, True, True, False]] * 2


def test_an_update_that_is_on_its_way_is_waited_for_by_all_ranks_together() -> None:
    deltas = vectors(SIZES, 1)

    def work(fake: FakeCoordinator, rank: Rank) -> list[EncodedTensor]:
        fake.script = FakeCoordinator.commit
        rank.only(0, lambda: fake.hold_update(1))
        rank.contribute(deltas)
        outcome = rank.collective.outcome(0, block=True)
        assert isinstance(outcome, Committed)
        assert [part.payload for part in outcome.commit.fragments] == [None] * 3
        arriving = [each for each in outcome.updates if isinstance(each, Arrival)]
        first = arriving[0].wait()
        rank.only(1, lambda: fake.release_update(1))
        return [first, *(each.wait() for each in arriving[1:])]

    for rank, payloads in enumerate(with_two_ranks(work, mode="forward")):
        after = stepped(vectors(SIZES, 0), payloads, rank)
        expected = [shard.take(delta) for shard, delta in zip(shards(rank), deltas, strict=True)]
        assert len(after) == 3
        for shard, theta, delta, now in zip(shards(rank), vectors(SIZES, 0), expected, after, strict=True):
            assert torch.equal(shard.take(theta) - delta, now)
