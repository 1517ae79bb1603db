"""The stage between the choice of a round and the header: what masks or signs a contribution."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from edit.records import Committed, Contribution, EncodedTensor, Outcome
from peers.carriers.hub.uplink import RoundContext, as_it_is
from tests.support.fake_coordinator import FIRST_ROUND, RUN_ID, FakeCoordinator
from tests.support.fake_run import LARGE, SMALL, run_of, vectors
from tests.support.two_ranks import SIZES, Rank, with_two_ranks


class Mask:
    """Flips every bit of the payload, and remembers for which round."""

    def __init__(self) -> None:
        self.seen: list[tuple[RoundContext, int]] = []

    def __call__(self, context: RoundContext, contribution: Contribution) -> Contribution:
        self.seen.append((context, contribution.fragment_id))
        payload = contribution.payload
        flipped = bytes(byte ^ 0xFF for byte in memoryview(payload.data).cast("B"))
        return dataclasses.replace(contribution, payload=EncodedTensor(payload.codec, payload.numel, flipped))


def test_what_is_sent_is_what_the_stage_gives() -> None:
    mask = Mask()
    with run_of(stage=mask) as (fake, peer):
        deltas = vectors(SMALL, 1)
        peer.contribute(deltas)
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        for i, delta in enumerate(deltas):
            assert bytes(fake.received[FIRST_ROUND, i, 0]) == bytes(byte ^ 0xFF for byte in delta.numpy().tobytes())
            assert fake.headers[FIRST_ROUND, i, 0].total_bytes == 4 * delta.numel()
    assert [fragment_id for _, fragment_id in mask.seen] == [0, 1]
    context = mask.seen[0][0]
    attempt = context.attempt
    assert context == RoundContext(run_id=RUN_ID, peer_id="a", round_id=FIRST_ROUND, outer_step=0, attempt=attempt, rank=0)


def test_a_stream_that_broke_goes_on_with_the_same_bytes() -> None:
    mask = Mask()
    with run_of(LARGE, stage=mask) as (fake, peer):
        fake.break_contribution_after = [1 << 40, 1 << 18]
        deltas = vectors(LARGE, 1)
        peer.contribute(deltas)
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        assert fake.calls["Probe"] == 1
        assert bytes(fake.received[FIRST_ROUND, 1, 0]) == bytes(byte ^ 0xFF for byte in deltas[1].numpy().tobytes())
    assert len(mask.seen) == len(LARGE)


def test_what_is_sent_again_under_the_same_name_is_not_staged_again() -> None:
    mask = Mask()
    with run_of(max_staleness=2, stage=mask) as (fake, peer):
        peer.contribute(vectors(SMALL, 1))
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        before = [bytes(fake.received[FIRST_ROUND, i, 0]) for i in range(len(SMALL))]
        fake.io.change(lambda: fake.lose(FIRST_ROUND))
        fake.io.change(lambda: fake.abort("the disk is full"))
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        assert [bytes(fake.received[FIRST_ROUND, i, 0]) for i in range(len(SMALL))] == before
    assert len(mask.seen) == len(SMALL)


def test_no_more_than_the_coordinator_has_room_for_is_on_its_way() -> None:
    """A fragment begins when the ones before are answered, and is sent in calls of what may be on its way."""
    room, arrived = 1 << 20, []

    def begins(context: RoundContext, contribution: Contribution) -> Contribution:
        arrived.append(len(fake.headers))
        return contribution

    sizes = (700_000, 300_000, 100_000, 100_000, 300_000)
    with run_of(sizes, stage=begins, ahead_bytes=room) as (fake, peer):
        before = len(fake.starts)
        peer.contribute(vectors(sizes, 1))
        fake.await_(lambda f: f.complete(FIRST_ROUND))
        starts = fake.starts[before:]
    assert arrived[:3] == [0, 1, 2] and arrived[4] == 4, "what is answered when a fragment begins"
    assert arrived[3] in (2, 3), "the third and the fourth are 800 kB together"
    first = [*starts[: starts.index(0, 1)], 4 * sizes[0]]
    assert all(stop - start <= room for start, stop in pairwise(first)), first


def test_a_rank_that_follows_to_a_newer_round_stages_for_that_one() -> None:
    mask = Mask()
    deltas = vectors(SIZES, 1)

    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        rank.only(1, lambda: rank.contribute(deltas))
        rank.only(1, lambda: fake.await_(lambda f: len(f.headers) == 2))
        rank.only(1, lambda: fake.io.change(lambda: fake.abort("too few")))
        rank.only(1, lambda: fake.await_(lambda f: len(f.headers) == 4))
        return None

    with_two_ranks(work, stage=mask)
    assert [(context.round_id, context.rank) for context, _ in mask.seen] == [(FIRST_ROUND, 1)] * 2 + [(FIRST_ROUND + 1, 1)] * 2


def test_the_stage_of_a_plain_run_changes_nothing() -> None:
    with run_of(stage=as_it_is) as (fake, peer):
        fake.script = FakeCoordinator.commit
        peer.contribute(vectors(SMALL, 1))
        assert isinstance(peer.ask(), Committed)
