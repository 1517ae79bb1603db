"""Reading a snapshot from members that have it: one that breaks off, lies or is slow is given up, its bytes not trusted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
import torch

from edit.errors import GoneError
from edit.fragments.digest import combine, fragment_hash
from edit.fragments.shards import Box, Shard
from edit.records import Snapshot
from editpb import data_pb2, tensors_pb2
from editpb.messages import Donor, Serving, SnapshotManifest, SnapshotRequest
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.hub.snapshot_donors import Patience
from peers.carriers.run_connection import Origin, Traffic
from tests.support import fake_donor
from tests.support.fake_donor import PIECE, FakeDonor, breaking, dripping, honest, listening
from tests.support.fake_run import schema_of, vectors
from tests.support.loops import pass_time, run_held

SIZES = (40, 2000, 24)
SCHEMA = schema_of(SIZES)
THETA = vectors(SIZES, seed=3)
HASHES = tuple(fragment_hash(theta) for theta in THETA)
RUN = "run-0a1b2c3d"
WHOLE = [Shard(fragment) for fragment in SCHEMA.fragments]


def donor(answer: fake_donor.Answer = honest) -> FakeDonor:
    return FakeDonor(SCHEMA, THETA, answer)


def read(
    *donors: FakeDonor,
    aggregator: FakeDonor | None = None,
    patience: Patience = Patience(),  # noqa: B008
    draws: Sequence[float] = (0.1, 0.2, 0.3),
    shards: Sequence[Shard] = WHOLE,
    traffic: Traffic | None = None,
) -> tuple[Snapshot, Origin, Traffic]:
    """The snapshot of outer step 12, with donors named b, c, d, asked in the order of `draws`, on a `HeldLoop`."""
    traffic = traffic or Traffic()
    aggregator = aggregator or donor(breaking(0, grpc.StatusCode.NOT_FOUND))

    async def scenario() -> tuple[Snapshot, Origin, Traffic]:
        async with listening(aggregator, *donors):
            named = tuple(each.named(name) for each, name in zip(donors, "bcd", strict=False))
            manifest = SnapshotManifest(
                outer_step=12, digest=combine(HASHES), schema=SCHEMA, fragment_hash=HASHES, donors=named
            )
            numbers = iter(draws)
            channels = Channels([aggregator.address])
            data = DataCalls(channels, RUN, traffic, lambda: next(numbers), patience)
            try:
                snapshot = await data.snapshot(manifest, shards, lambda: True)
            finally:
                await channels.close()
            assert data.origin is not None
            return snapshot, data.origin, traffic

    return run_held(scenario())


def same(snapshot: Snapshot) -> bool:
    return snapshot.outer_step == 12 and all(map(torch.equal, snapshot.fragments, THETA))


def test_a_donor_gives_everything_and_the_aggregator_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = donor()
    snapshot, origin, traffic = read(one)
    assert same(snapshot)
    assert origin == Origin(12, combine(HASHES), ("b",))
    assert one.asked == [(0, 0, "ticket-of-b")], "one call brings all fragments"
    assert traffic.received > 4 * sum(SIZES)
    assert "snapshot of outer step 12 from b" in caplog.messages


def test_without_donors_everything_comes_from_the_aggregator() -> None:
    aggregator = donor()
    snapshot, origin, _ = read(aggregator=aggregator)
    assert same(snapshot) and origin.sources == ("the aggregator",)
    assert {ticket for _, _, ticket in aggregator.asked} == {""}


def test_the_draw_says_which_donor_is_asked_first() -> None:
    first, second = donor(), donor()
    snapshot, origin, _ = read(first, second, draws=(0.9, 0.1))
    assert same(snapshot) and origin.sources == ("c",)
    assert first.asked == []


def test_a_donor_that_breaks_off_is_gone_on_from_at_another() -> None:
    first, second = donor(breaking(3)), donor()
    snapshot, origin, _ = read(first, second)
    assert same(snapshot)
    assert origin.sources == ("b", "c")
    assert first.asked == [(0, 0, "ticket-of-b")]
    assert second.asked == [(1, 3 * PIECE, "ticket-of-c")]


def test_and_from_the_last_donor_at_the_aggregator() -> None:
    only, aggregator = donor(breaking(5)), donor()
    snapshot, origin, _ = read(only, aggregator=aggregator)
    assert same(snapshot)
    assert origin.sources == ("b", "the aggregator")
    assert aggregator.asked == [(1, 5 * PIECE, "")]


LIARS = {
    "lies": fake_donor.lying,
    "is short": fake_donor.short,
    "sends too much": fake_donor.too_much,
    "sends damaged chunks": fake_donor.damaged,
    "is silent": fake_donor.silent,
    "is busy": breaking(0, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "is at another step": breaking(0, grpc.StatusCode.NOT_FOUND),
    "refuses": breaking(0, grpc.StatusCode.PERMISSION_DENIED),
    "evicts": breaking(0, grpc.StatusCode.UNAUTHENTICATED),
    "has a bug": breaking(2, grpc.StatusCode.UNKNOWN),
}


@pytest.mark.parametrize("answer", LIARS.values(), ids=LIARS)
def test_a_donor_that_does_anything_else_is_asked_once_and_never_believed(answer: fake_donor.Answer) -> None:
    bad, good = donor(answer), donor()
    snapshot, origin, _ = read(bad, good)
    assert same(snapshot)
    assert origin.sources in (("c",), ("b", "c"))
    asked = [i for i, _, _ in bad.asked]
    assert asked in ([0], [0, 1]), "what fits into its first chunks it may give; once it failed it is not asked again"


def test_a_silent_donor_is_not_waited_for_however_long_its_bytes_may_take() -> None:
    snapshot, origin, _ = read(donor(fake_donor.silent), donor(), patience=Patience(grace_s=1e9))
    assert same(snapshot) and origin.sources == ("c",)


def test_a_donor_that_drips_is_not_waited_for_longer_than_its_bytes_may_take() -> None:
    """No two of its chunks are far apart."""
    patience, traffic = Patience(), Traffic()
    slow, good = donor(dripping(traffic, gap_s=0.9 * patience.chunk_s)), donor()
    snapshot, origin, _ = read(slow, good, patience=patience, traffic=traffic)
    assert same(snapshot) and origin.sources == ("b", "c")
    assert slow.asked == [(0, 0, "ticket-of-b")]
    assert 0 < good.asked[0][1] < 4 * SIZES[0]


def test_a_donor_that_ends_its_calls_early_does_not_get_more_time_with_each_of_them() -> None:
    """A call may end with a fragment, before its limit; what it was asked for beyond that is asked for again."""

    class OneByOne(FakeDonor):
        async def FetchSnapshot(
            self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[tensors_pb2.Chunk]:
            request.ClearField("following")
            pass_time(20.0)
            async for chunk in super().FetchSnapshot(request, context):
                yield chunk

    patience = Patience(chunk_s=1e9, grace_s=1.0, bytes_per_s=4 * sum(SIZES) / 30.0)
    slow, good = OneByOne(SCHEMA, THETA), donor()
    snapshot, origin, _ = read(slow, good, patience=patience)
    assert same(snapshot) and origin.sources == ("b", "c")
    assert [i for i, _, _ in slow.asked] == [0, 1]
    assert good.asked[0][:2] == (1, 0)


def test_bytes_of_a_liar_that_broke_off_are_not_mixed_into_the_next_donors() -> None:
    """Nobody can tell which of the two it was, so neither is asked again; the aggregator gives the fragment anew."""

    async def half_a_lie(wanted: object, data: bytes) -> object:
        async for chunk in fake_donor.lying(wanted, data):  # type: ignore[arg-type]
            yield chunk
            raise fake_donor.Break(grpc.StatusCode.UNAVAILABLE)

    first, second, aggregator = donor(half_a_lie), donor(), donor()  # type: ignore[arg-type]
    snapshot, origin, _ = read(first, second, aggregator=aggregator, shards=WHOLE[1:2])
    assert torch.equal(snapshot.fragments[0], THETA[1])
    assert origin.sources == ("the aggregator",)
    assert [(i, offset) for i, offset, _ in second.asked] == [(1, PIECE)]
    assert [(i, offset) for i, offset, _ in aggregator.asked] == [(1, 0)]


def test_where_nobody_listens_any_more_the_next_is_asked() -> None:
    class Gone(FakeDonor):
        def named(self, peer_id: str) -> Donor:
            return Donor(peer_id, Serving("127.0.0.1:1", "word"))

    snapshot, origin, _ = read(Gone(SCHEMA, THETA), donor())
    assert same(snapshot) and origin.sources == ("c",)


def test_a_part_of_a_fragment_comes_from_the_aggregator_for_it_cannot_be_checked() -> None:
    part = Shard(SCHEMA.fragments[1], (Box(0, (100,), (50,)),))
    one, aggregator = donor(), donor()
    snapshot, origin, _ = read(one, aggregator=aggregator, shards=[WHOLE[0], part])
    assert torch.equal(snapshot.fragments[1], THETA[1][100:150])
    assert origin.sources == ("b", "the aggregator")
    assert [i for i, _, _ in one.asked] == [0]


def test_the_aggregator_is_reminded_to_keep_the_snapshot_while_a_donor_is_read() -> None:
    reminded = asyncio.Event()

    class Keeper(FakeDonor):
        async def FetchSnapshot(
            self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[tensors_pb2.Chunk]:
            async for chunk in super().FetchSnapshot(request, context):
                yield chunk
            reminded.set()

    async def when_reminded(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
        await reminded.wait()
        async for chunk in honest(wanted, data):
            yield chunk

    aggregator = Keeper(SCHEMA, THETA)
    snapshot, origin, _ = read(donor(when_reminded), aggregator=aggregator, patience=Patience(remind_s=0.0))
    assert same(snapshot) and origin.sources == ("b",)
    assert set(aggregator.asked) == {(0, 4 * SIZES[0], "")}


def test_where_all_fail_the_error_is_the_aggregators() -> None:
    with pytest.raises(GoneError):
        read(donor(fake_donor.lying), donor(fake_donor.lying))
