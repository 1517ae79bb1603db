"""An eviction, or another key, ends calls under way and drops what is not merged; a certificate that is over counts no more."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from aggregator.run_feed import MemberEnrolled
from aggregator.security.certificates import new_key
from edit.errors import RefusedError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.rounds import events
from editpb import data_pb2
from editpb.data_messages import contribution_header_to_pb, found_header_to_pb, snapshot_request_to_pb
from editpb.messages import Expel, FoundHeader, SnapshotRequest
from editpb.transport.channel_options import server_options
from editpb.transport.chunks import make_chunks
from tests.support.encoded import encode
from tests.support.loops import on_a_loop, until
from tests.support.served import (
    LIFETIME_S,
    SCHEMA,
    TOML,
    WAIT_S,
    BarePeer,
    Served,
    found_run,
    held_clock,
    new_folder,
    served,
    theta,
)

LARGE = Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(1 << 23,)),)),))  # 32 MiB


async def ended(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(WAIT_S):
        return await call.code(), await call.details()


def test_what_an_evicted_peer_delivered_is_not_merged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            round_id = (await found_run(a, b)).round_id
            await b.contribute(round_id, 0, [torch.ones(5), torch.ones(300)])
            run.coordinator.run.evict("b", "bad manners")
            own = [torch.full((5,), 0.5), torch.full((300,), 0.5)]
            await a.contribute(round_id, 0, own)
            committed = await a.view(lambda view: view.outer_step == 1)
            commit = await a.fetch(1)
            assert [[v.peer_id for v in f.verdicts] for f in commit.fragments] == [["a"], ["a"]]
            assert committed.digest == digest([t - d for t, d in zip(theta(), own, strict=True)])

    asyncio.run(scenario())


PLAIN = "start_peers = {start}\nquorum = {quorum}\nfloor_s = 1000.0\nceiling_s = 1000.0\n"
STALE = TOML.replace("enabled = false\n", "enabled = false\nstaleness = 0.0\n").replace(
    "[rounds]\n", "[rounds]\nmax_staleness = 2\n"
)
ARRIVALS = TOML.replace(PLAIN, 'merging = "arrivals"\nmax_staleness = 2\n')
OWN, EVIL = [torch.full((5,), 0.5), torch.full((300,), 0.5)], [torch.full((5,), 9.0), torch.full((300,), 9.0)]
AFTER_OWN = [t - d for t, d in zip(theta(), OWN, strict=True)]


async def begin(a: BarePeer, b: BarePeer) -> int:
    """Found the run; return the first round, to which both are ready."""
    return (await found_run(a, b)).round_id


async def send(peer: BarePeer, round_id: int, fragment_id: int, delta: torch.Tensor, chunks: int | None = None) -> None:
    """A fragment, or its first chunks."""
    data = bytes(encode("fp32", delta).data)
    await peer.send(peer.header(round_id, 0, fragment_id, len(data)), list(make_chunks(data, 512))[:chunks])


async def merged_of(peer: BarePeer, outer_step: int) -> list[list[str]]:
    """By fragment, whose contributions the commit TO this outer step has."""
    return [[verdict.peer_id for verdict in fragment.verdicts] for fragment in (await peer.fetch(outer_step)).fragments]


@on_a_loop
async def test_what_is_carried_over_of_an_evicted_peer_is_not_merged(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=STALE)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        rounds, round_id = run.coordinator.run, await begin(a, b)
        await send(b, round_id, 0, EVIL[0])
        await send(b, round_id, 1, EVIL[1], 1)
        await a.contribute(round_id, 0, OWN)
        rounds.rounds.feed(events.Close("the test's"))
        first = await a.view(lambda view: view.outer_step == 1 and view.round_id > 0)
        assert rounds.rounds.upload("b")[0] > 0, "carried over"
        await send(b, round_id, 1, EVIL[1])  # now it is whole, and waits for the others
        rounds.evict("b", "bad manners")
        assert rounds.rounds.upload("b") == (0, 0)
        await a.report(1, first.digest)
        await a.contribute(first.round_id, 1, OWN)
        await a.view(lambda view: view.outer_step == 2)
        assert [await merged_of(a, step) for step in (1, 2)] == [[["a"], ["a"]]] * 2


@pytest.mark.parametrize("whole", [False, True], ids=["on its way", "whole"])
@on_a_loop
async def test_what_an_evicted_peer_sent_is_not_merged_where_contributions_may_be_stale(tmp_path: Path, whole: bool) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=STALE)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        round_id = await begin(a, b)
        await send(b, round_id, 0, EVIL[0])
        await send(b, round_id, 1, EVIL[1], None if whole else 1)
        await send(a, round_id, 0, OWN[0])
        run.coordinator.run.evict("b", "bad manners")
        await send(a, round_id, 1, OWN[1])
        committed = await a.view(lambda view: view.outer_step == 1)
        assert committed.digest == digest(AFTER_OWN) and await merged_of(a, 1) == [["a"], ["a"]]
        assert run.coordinator.run.rounds.upload("b") == (0, 0)


@on_a_loop
async def test_an_eviction_drops_what_has_not_arrived_and_disturbs_no_other_arrival(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", toml=ARRIVALS)) as run, run.peer("a") as a, run.peer("b") as b:
        round_id = await begin(a, b)
        await send(a, round_id, 0, OWN[0])
        await send(b, round_id, 0, EVIL[0])
        await send(b, round_id, 1, EVIL[1], 1)
        run.coordinator.run.evict("b", "bad manners")
        assert run.coordinator.run.rounds.upload("b") == (0, 0)
        assert run.coordinator.run.rounds.machine.round_id == round_id, "no round is aborted by it"
        await send(a, round_id, 1, OWN[1])
        committed = await a.view(lambda view: view.outer_step == 1)
        assert committed.digest == digest(AFTER_OWN) and await merged_of(a, 1) == [["a"], ["a"]]


@on_a_loop
async def test_a_fragment_that_was_merged_early_with_an_evicted_peer_is_not_committed(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
        round_id = await begin(a, b)
        machine = run.coordinator.run.rounds.machine
        await send(b, round_id, 0, EVIL[0])
        await send(a, round_id, 0, OWN[0])  # now both are in: it is merged, before the round closes
        await until(lambda: machine._round is not None and machine._round.reduced == {0})
        run.coordinator.run.evict("b", "bad manners")
        aborted = await a.view(lambda view: view.round_id > round_id)
        assert (aborted.last_committed, aborted.last_reason) == (
            False,
            "b was evicted, and a part of what it sent is merged already",
        )
        await a.contribute(aborted.round_id, 0, OWN)
        committed = await a.view(lambda view: view.outer_step == 1)
        assert committed.digest == digest(AFTER_OWN) and await merged_of(a, 1) == [["a"], ["a"]]


@on_a_loop
async def test_an_eviction_before_anything_is_merged_aborts_no_round(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
        round_id = await begin(a, b)
        for fragment_id in (0, 1):
            await send(b, round_id, fragment_id, EVIL[fragment_id])
        run.coordinator.run.evict("b", "bad manners")
        await a.contribute(round_id, 0, OWN)
        assert (await a.view(lambda view: view.outer_step == 1)).last_round_id == round_id


def test_an_eviction_ends_a_contribution_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            round_id = (await found_run(a)).round_id
            data = bytes(encode("fp32", torch.ones(300)).data)
            call = a.data.Contribute()
            header = contribution_header_to_pb(a.header(round_id, 0, 1, len(data)))
            await call.write(data_pb2.ContributePart(header=header))
            await call.write(data_pb2.ContributePart(chunk=next(iter(make_chunks(data, 512)))))
            await until(lambda: run.coordinator.run.rounds.upload("a")[0] > 0)
            run.coordinator.run.evict("a", "bad manners")
            assert await ended(call) == (grpc.StatusCode.PERMISSION_DENIED, "evicted: bad manners")

    asyncio.run(scenario())


def invite_again(run: Served, peer_id: str) -> None:
    """Enrol another machine under the name of a member."""
    authority = run.coordinator.authority
    assert authority is not None
    invitation = authority.invite(peer_id, role="peer", enrol=["127.0.0.1:1"], lifetime_s=3600.0, now=time.time())
    subject = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = subject.sign(new_key(), hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    authority.redeem(invitation.token, request, now=time.time())
    run.coordinator.run.feed.publish(MemberEnrolled(peer_id, "peer"))


@on_a_loop
async def test_a_machine_whose_member_has_another_key_is_shut_out_with_all_that_it_had_open(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
        round_id = await begin(a, b)
        await send(b, round_id, 0, EVIL[0])
        data = bytes(encode("fp32", EVIL[1]).data)
        call = b.data.Contribute()
        header = contribution_header_to_pb(b.header(round_id, 0, 1, len(data)))
        await call.write(data_pb2.ContributePart(header=header))
        await call.write(data_pb2.ContributePart(chunk=next(iter(make_chunks(data, 512)))))
        await until(lambda: run.coordinator.run.rounds.upload("b")[0] > len(encode("fp32", EVIL[0]).data))
        invite_again(run, "a")
        invite_again(run, "b")
        reason = "the certificate of b was replaced by a newer one"
        assert await ended(call) == (grpc.StatusCode.PERMISSION_DENIED, reason)
        assert run.coordinator.run.rounds.upload("b") == (0, 0)
        for peer in (a, b):
            expel = await peer.receive(Expel)
            assert isinstance(expel, Expel) and "replaced by a newer one" in expel.reason and not expel.evicted
        await until(lambda: run.coordinator.run.attendances.members() == [])
        async with run.peer("b") as again:
            run.coordinator.run.end_replaced()
            await again.attend()
            assert (await again.view()).outer_step == 0, "the member itself may come back"


@on_a_loop
async def test_a_machine_before_that_says_hello_late_does_not_take_the_place_of_the_new_one(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as new:
        await new.attend()
        before = run.coordinator.run.attendances.get("a")
        with pytest.raises(RefusedError, match="the certificate of a was replaced by a newer one"):
            run.coordinator.run.attend("a", SCHEMA, 0, 1, lambda: 0.0)
        assert run.coordinator.run.attendances.get("a") is before and before is not None and before.expelled is None


@on_a_loop
async def test_who_redeems_again_with_the_same_key_goes_on(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
        round_id = (await found_run(a)).round_id
        await send(a, round_id, 0, OWN[0])
        run.coordinator.run.feed.publish(MemberEnrolled("a", "peer"))
        run.coordinator.run.members.pin({"a": run.coordinator.run.members.keys["a"]})
        run.coordinator.run.end_replaced()
        await send(a, round_id, 1, OWN[1])
        assert (await a.view(lambda view: view.outer_step == 1)).last_committed


def test_an_eviction_ends_a_founding_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            await a.attend()
            await a.view(lambda view: view.found)
            await b.attend()
            call = a.data.Found()
            header = FoundHeader(run_id=a.run_id, schema_hash=SCHEMA.schema_hash, digest=digest(theta()))
            await call.write(data_pb2.FoundPart(header=found_header_to_pb(header)))
            chunk = next(iter(make_chunks(theta()[0].numpy().tobytes())))
            await call.write(data_pb2.FoundPart(chunk=data_pb2.FragmentChunk(fragment_id=0, chunk=chunk)))
            await until(lambda: (turn := run.coordinator.run.founding.turn) and turn.received_bytes)
            run.coordinator.run.evict("a", "bad manners")
            assert await ended(call) == (grpc.StatusCode.PERMISSION_DENIED, "evicted: bad manners")
            await b.view(lambda view: view.found)
            await b.found(theta())

    asyncio.run(scenario())


def test_an_eviction_ends_a_snapshot_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a", LARGE) as a, run.channel("eve", "observer") as channel:
            await found_run(a)
            request = SnapshotRequest(run_id=a.run_id, outer_step=0, fragment_id=0)
            eve = type(a)("eve", a.run_id, channel, LARGE)
            await eve.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
            call = eve.data.FetchSnapshot(snapshot_request_to_pb(request), timeout=WAIT_S)
            received = len((await call.read()).data)
            run.coordinator.run.evict("eve", "bad manners")
            with pytest.raises(grpc.aio.AioRpcError, match="evicted: bad manners"):
                async with asyncio.timeout(WAIT_S):
                    while (chunk := await call.read()) is not grpc.aio.EOF:
                        received += len(chunk.data)
            assert received < 4 * LARGE.numel

    asyncio.run(scenario())


def test_a_certificate_that_is_over_counts_no_more_on_a_warm_connection(tmp_path: Path) -> None:
    ahead = 0.0

    async def scenario() -> None:
        nonlocal ahead
        async with served(new_folder(tmp_path / "run"), held_clock(lambda: time.time() + ahead)) as run, run.peer("a") as a:
            await found_run(a)
            ahead = 2 * LIFETIME_S
            over = (
                r"the certificate of a expired on .* UTC, \d+ days ago by the aggregator's clock; invite the member again, or "
            )
            with pytest.raises(grpc.aio.AioRpcError, match=over) as refused:
                await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "the clock may be wrong: the peer tries again"
            code, details = await ended(a._call)
            assert code is grpc.StatusCode.UNAVAILABLE and re.match(over, details)

    asyncio.run(scenario())


def test_an_aged_connection_takes_no_new_call_and_keeps_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.server.server_options", partial(server_options, connection_age_s=0.2))

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            async with asyncio.timeout(WAIT_S):
                while (state := a.channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await a.channel.wait_for_state_change(state)
            await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))  # over a new connection
            a.received.clear()
            run.coordinator.run.pause()
            assert (await a.view()).reason.startswith("paused")  # over the old one
            assert run.coordinator.run.attendances.get("a") is not None

    asyncio.run(scenario())
