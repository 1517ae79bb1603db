"""Bytes from another host: what it announces is bounded before memory is taken, and what it sends is what it announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.swarm import transfers
from aggregator.swarm.offers import MOST_MANIFEST, Offer, Round
from aggregator.swarm.replication import PartSnapshot
from aggregator.swarm.transfers import body_sizes, fetch_offer, fetch_phi, fetch_state, offer_parts, state_parts
from edit.config.average import AverageConfig
from edit.council.record import Update
from edit.errors import EditError, GoneError, RemoteProtocolError, TransportError
from edit.lab.council.parts_on_disk import merged_round, outer_state
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from editpb.council_messages import OfferHeader, StateHeader, offer_header_to_pb, state_header_to_pb
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.chunk_frames import add_council_servicer, council_stub, update_frames
from tests.support.council.replicated_table import SETTINGS
from tests.support.loops import pass_time, run_held

OUTER = outer_state(SETTINGS, 0)
SIZES = body_sizes(OUTER)
UPDATE = Update(0, 1, 1, "1" * 64, "2" * 64, "1" * 64)
STATE = "3" * 64
INT64 = b'{"metadata":{},"tensors":[["a","int64"]]}'
Message = Any


def header(manifest: int = 4, bodies: Sequence[int] = SIZES, update: Update = UPDATE) -> Message:
    return pb.OfferPart(header=offer_header_to_pb(OfferHeader(update, manifest, tuple(bodies))))


def state_header(description: int, tensors: Sequence[int]) -> Message:
    return pb.StatePart(header=state_header_to_pb(StateHeader(STATE, 5, description, tuple(tensors))))


def asked(messages: Sequence[Message | EditError | None], *, state: bool = False, uploads: UploadBuffer | None = None) -> Any:
    """Ask a host that answers with these messages. None: nothing comes any more. uploads: hold another member's parameters."""

    class Source(council_pb2_grpc.CouncilServicer):  # type: ignore[misc]
        async def FetchOffer(self, request: object, context: Any) -> AsyncIterator[Message]:
            async with abort_on_error(context):
                assert ("edit-part", "0") in map(tuple, context.invocation_metadata())
                for message in messages:
                    if isinstance(message, EditError):
                        raise message
                    while message is None:  # until who asked gives up: its next bound may begin after any of these
                        pass_time(transfers.STALL_S)
                        await asyncio.sleep(0)
                    yield message

        async def FetchPhi(self, request: object, context: Any) -> AsyncIterator[Message]:
            async with abort_on_error(context):
                for message in messages:
                    yield message

        FetchState = FetchOffer

        async def Meet(self, messages: object, context: object) -> None: ...

    async def body() -> Any:
        server = grpc.aio.server()
        add_council_servicer(Source(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = council_stub(channel)
                if uploads is not None:
                    return await fetch_phi(stub, 1, OUTER.schema, uploads)
                if state:
                    return await fetch_state(stub, 0, OUTER.schema, AverageConfig())
                return await fetch_offer(stub, 0, 1, "1" * 64, SIZES)
        finally:
            await server.stop(None)

    return run_held(body())


async def all_of(messages: AsyncIterator[Message]) -> list[Message]:
    return [message async for message in messages]


def test_an_update_comes_as_it_was() -> None:
    records = merged_round(OUTER, 2, 1)
    offer = Offer.of("run", 0, 1, OUTER.digest, 10, Round(1, "all are in", OUTER.digest, tuple(records)))
    offer = replace(offer, update=replace(offer.update, id="1" * 64))
    found = asked(asyncio.run(all_of(offer_parts(offer))))
    assert (found.update, found.manifest) == (offer.update, offer.manifest)
    assert [bytes(body) for body in found.bodies] == [bytes(body) for body in offer.bodies]


def test_a_state_comes_as_it_was() -> None:
    outer = outer_state(SETTINGS, 0)
    outer.commit(1, "all are in", merged_round(outer, 2, 1))
    tensors = outer.to_tensors()
    sent = PartSnapshot(STATE, 5, outer.schema.to_json(), tensors, outer.metadata())
    found = asked(asyncio.run(all_of(state_parts(sent))), state=True)
    assert (found.name, found.tokens, found.schema, found.metadata) == (STATE, 5, sent.schema, sent.metadata)
    assert found.tensors.keys() == tensors.keys() and all(torch.equal(found.tensors[i], tensors[i]) for i in tensors)
    assert any(name.startswith("residual") for name in tensors)


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20])
def test_outer_parameters_of_another_member_lie_in_the_buffer_and_nothing_of_those_that_break_off(
    tmp_path: Path, buffer_bytes: int
) -> None:
    theta = {f"theta.{i}": part for i, part in enumerate(OUTER.theta)}
    sent = asyncio.run(all_of(state_parts(PartSnapshot(STATE, 5, OUTER.schema.to_json(), theta, {"outer_step": 4}))))
    with ThreadPoolExecutor(1) as files:
        uploads = UploadBuffer(buffer_bytes, tmp_path, files)
        with pytest.raises(RemoteProtocolError, match="0 of"):
            asked(sent[:2], uploads=uploads)
        files.submit(list).result()  # what is to be removed is
        assert uploads.held_bytes == 0 and not [*tmp_path.iterdir()]
        found = asked(sent, uploads=uploads)
        assert all(torch.equal(found.tensors[name], part) for name, part in theta.items())
        assert bool([*tmp_path.iterdir()]) is (buffer_bytes == 0) and bool(uploads.held_bytes) is (buffer_bytes > 0)
        uploads.close()
        assert not [*tmp_path.iterdir()]
        assert all(torch.equal(found.tensors[name], part) for name, part in theta.items()), "who has them mapped has them still"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([header(bodies=(SIZES[0], 1 << 40))], "it has at most"),
        ([header(bodies=(*SIZES, 1))], "it has at most"),
        ([header(bodies=(SIZES[1], SIZES[1]))], "it has at most"),
        ([header(manifest=MOST_MANIFEST + 1)], "a manifest of"),
        ([header(update=replace(UPDATE, id="4" * 64))], "another update"),
        ([header(update=replace(UPDATE, part=1))], "another update"),
        ([header(update=replace(UPDATE, outer_step=2))], "another update"),
        ([], "begins with its header"),
        ([next(update_frames(0, b"1234"))], "begins with its header"),
        ([header(), header()], "only chunks"),
        ([header(), next(update_frames(3, b"1234"))], "only chunks"),
        ([header(), next(update_frames(0, b"12345"))], "more than the announced"),
        ([header(), next(update_frames(0, b"1234"))], "0 of"),
        ([header(manifest=0, bodies=()), next(update_frames(0, b"1"))], "more than the announced"),
    ],
)
def test_an_update_that_is_not_what_was_asked_for_is_refused(messages: Sequence[Message], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        asked(messages)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([state_header(transfers.MOST_DESCRIPTION + 1, ())], "it has at most"),
        ([state_header(2, (16 * OUTER.schema.numel + 1,))], "it has at most"),
        ([state_header(2, ()), next(update_frames(0, b"[]"))], "cannot be read"),
        ([state_header(13, ()), next(update_frames(0, b'{"metadata":1'))], "cannot be read"),
        ([state_header(29, ()), next(update_frames(0, b'{"metadata":{},"tensors":[1]}'))], "cannot be read"),
        ([state_header(len(INT64), (1,)), *map(next, (update_frames(0, INT64), update_frames(1, b"1")))], "cannot be read"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused(messages: Sequence[Message], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        asked(messages, state=True)


@pytest.mark.parametrize("sent", [[], [header()]], ids=["no header", "no bytes"])
def test_a_source_that_sends_nothing_is_given_up(sent: Sequence[Message]) -> None:
    with pytest.raises(TransportError, match="too slow"):
        asked([*sent, None])


class Busy:
    """A call whose first message does not come yet. begun: whether its metadata has come."""

    def __init__(self, *, begun: bool) -> None:
        self.metadata, self.message = (asyncio.get_running_loop().create_future() for _ in range(2))
        if begun:
            self.metadata.set_result(())

    async def initial_metadata(self) -> Any:
        return await self.metadata

    async def read(self) -> Any:
        return await self.message


@pytest.mark.parametrize(
    ("begun", "after_s", "given_up"),
    [
        (False, transfers.STALL_S - 1, False),
        (False, transfers.STALL_S + 1, True),
        (True, transfers.STALL_S + 1, False),
        (True, transfers.STALL_S + 59, False),
        (True, transfers.STALL_S + 61, True),
    ],
)
def test_a_source_that_has_begun_may_be_busy_as_long_as_its_bytes_may_take(begun: bool, after_s: float, given_up: bool) -> None:
    async def body() -> None:
        call = Busy(begun=begun)
        first = asyncio.ensure_future(transfers._first(call, most=60 * transfers.MIN_BYTES_PER_S))
        for _ in range(10):
            await asyncio.sleep(0)
        pass_time(after_s)
        for _ in range(10):
            await asyncio.sleep(0)
        assert first.done() == given_up
        if given_up:
            with pytest.raises(TimeoutError):
                await first
        else:
            call.message.set_result("header")
            assert await first == "header"

    run_held(body())


def test_what_the_source_says_is_the_error() -> None:
    with pytest.raises(GoneError, match="is not kept"):
        asked([GoneError("the update is not kept")])
