"""A member that opens calls and leaves them open: others' calls are served all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest

import aggregator.server
from aggregator.services.call_limit import CALLS_OF_GUEST, CALLS_OF_MEMBER, CALLS_OF_RANK, MAX_GUESTS, RESERVED, CallLimit
from edit.errors import BusyError, RemoteProtocolError, TransportError
from editpb import control_pb2, control_pb2_grpc, data_pb2_grpc
from editpb.control_messages import peer_message_from_pb, peer_message_to_pb
from editpb.messages import Hello
from editpb.transport import guarded_calls
from editpb.transport.channel_options import MAX_STREAMS
from editpb.transport.status import from_status
from tests.support.loops import WAIT_S, on_a_loop
from tests.support.served import Served, found_run, new_folder, served, theta

PROBE, FETCH = "/editpb.Data/Probe", "/editpb.Data/FetchUpdate"
MOST = 80  # calls at a time, of everybody
CONNECTIONS = 4  # more than are needed to take all of them


async def open_calls(
    run: Served,
    stack: contextlib.AsyncExitStack,
    method: str,
    member: str = "thief",
    credentials: grpc.ChannelCredentials | None = None,
) -> list[grpc.aio.Call]:
    """Calls of one member, on connections of their own, that never say a word."""
    credentials, calls = credentials or run.credentials(member), list[grpc.aio.Call]()
    unary = method.startswith("/")
    for _ in range(CONNECTIONS):
        options = (("grpc.use_local_subchannel_pool", 1),)
        channel = await stack.enter_async_context(grpc.aio.secure_channel(run.coordinator.listen, credentials, options))
        stubs = {"Contribute": data_pb2_grpc.DataStub, "Attend": control_pb2_grpc.ControlStub}
        each = partial(headers_only, channel, method) if unary else getattr(stubs[method](channel), method)
        calls += [each() for _ in range(MAX_STREAMS)]
    for call in calls:
        stack.callback(call.cancel)
    return calls


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def headers_only(channel: grpc.aio.Channel, method: str) -> grpc.aio.Call:
    """A call of one request of which only the headers are sent."""
    return channel.stream_unary(method)(silence())


async def refused(calls: list[grpc.aio.Call], count: int) -> None:
    """Wait until so many were refused, as something that may be tried again."""
    ended = [asyncio.ensure_future(call.code()) for call in calls]
    async with asyncio.timeout(WAIT_S):
        for _, code in zip(range(count), asyncio.as_completed(ended), strict=False):
            await code
    done = [call for call, code in zip(calls, ended, strict=True) if code.done()]
    for call in done:
        assert isinstance(from_status(await call.code(), await call.details()), TransportError)
    assert Counter(["thief has 40 calls under way here already" in await call.details() for call in done])[True] >= count // 2
    for code in ended:
        code.cancel()


@pytest.mark.parametrize("method", ["Contribute", "Attend", PROBE, FETCH])
@on_a_loop
async def test_a_member_cannot_take_all_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(aggregator.server, "_MAX_CALLS", MOST)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest") as peer, contextlib.AsyncExitStack() as stack:
        view = await found_run(peer)
        calls = await open_calls(run, stack, method)
        await refused(calls, len(calls) - MOST // 2)
        for outer_step in range(3):
            await peer.contribute(view.round_id, outer_step, theta())
            done = await peer.view(lambda view, due=outer_step + 1: view.outer_step == due and view.round_id > 0)
            await peer.fetch(outer_step + 1)
            await peer.report(outer_step + 1, done.digest)
            view = done


@pytest.mark.parametrize("method", ["Attend", PROBE])
@on_a_loop
async def test_the_operator_is_answered_while_members_take_all_calls_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(aggregator.server, "_MAX_CALLS", MOST)
    async with served(new_folder(tmp_path / "run")) as run, contextlib.AsyncExitStack() as stack:
        credentials = {member: run.credentials(member) for member in "abc"}
        calls = [call for member in "abc" for call in await open_calls(run, stack, method, member, credentials[member])]
        ended = [asyncio.ensure_future(call.code()) for call in calls]
        async with asyncio.timeout(WAIT_S):
            for _, code in zip(range(len(calls) - MOST + RESERVED), asyncio.as_completed(ended), strict=False):
                await code
        assert sum(not code.done() for code in ended) == MOST - RESERVED
        async with run.channel("operator", "operator") as channel, asyncio.timeout(WAIT_S):
            stub = control_pb2_grpc.ControlStub(channel)
            for member in "abc":
                await stub.Evict(control_pb2.EvictRequest(peer_id=member, reason="takes all calls"))
            assert (await stub.Status(control_pb2.StatusRequest())).run_id == run.folder.run_id
            if method == PROBE:  # an eviction ends them, and further ones are not waited for
                await asyncio.wait(ended)
                again = await open_calls(run, stack, method, "a", credentials["a"])
                assert {await call.details() for call in again} == {"evicted: takes all calls"}
        for code in ended:
            code.cancel()


@on_a_loop
async def test_a_call_waits_for_its_request_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_calls, "REQUEST_S", 0.01)
    async with served(new_folder(tmp_path / "run")) as run, run.channel("a") as channel, asyncio.timeout(WAIT_S):
        contribute, found = data_pb2_grpc.DataStub(channel).Contribute(), data_pb2_grpc.DataStub(channel).Found()
        for call in (headers_only(channel, PROBE), headers_only(channel, FETCH), contribute, found):
            assert "did not arrive within 0.01 s" in (await call.details() or "")


def test_who_is_no_member_has_few_calls_alone_and_together() -> None:
    limit = CallLimit(1000, lambda _: 0, lambda _: contextlib.nullcontext())
    with contextlib.ExitStack() as taken:
        for certificate in range(MAX_GUESTS // CALLS_OF_GUEST):
            for _ in range(CALLS_OF_GUEST):
                taken.enter_context(limit._place_of_guest(bytes([certificate])))
            with pytest.raises(BusyError):
                taken.enter_context(limit._place_of_guest(bytes([certificate])))
        with pytest.raises(BusyError):
            taken.enter_context(limit._place_of_guest(b"another"))
        taken.enter_context(limit.place("a member"))
    assert not limit._guests and not limit._under_way


def test_a_hello_of_more_ranks_than_a_replica_may_have_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="ranks is 513, not 1 to 512"):
        peer_message_from_pb(peer_message_to_pb(Hello(run_id="run", schema_hash="", rank=0, ranks=513)))


def test_a_member_has_so_many_calls_for_each_rank_that_attends() -> None:
    ranks: dict[str, int] = {}
    limit = CallLimit(1000, lambda peer_id: ranks.get(peer_id, 0), lambda _: contextlib.nullcontext())
    for attending, most in ((0, CALLS_OF_MEMBER), (3, CALLS_OF_MEMBER + 3 * CALLS_OF_RANK), (100, 500)):
        ranks["one"] = attending
        with contextlib.ExitStack() as taken:
            for _ in range(most):
                taken.enter_context(limit.place("one"))
            with pytest.raises(BusyError, match=f"one has {most} calls under way here already"):
                taken.enter_context(limit.place("one"))
            taken.enter_context(limit.place("another"))
        assert not limit._under_way
