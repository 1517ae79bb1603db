"""Who is not admitted costs nothing: its messages are not converted, and a member's are small."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import grpc
import pytest

import aggregator.services.control as control_service
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from editpb import control_pb2 as cpb
from editpb import data_pb2 as dpb
from editpb.control_messages import coordinator_message_from_pb, peer_message_to_pb, schema_answer_to_pb
from editpb.messages import PROTOCOL, Expel, Hello, SchemaRequest
from editpb.tensor_messages import schema_from_bytes
from editpb.transport.status import to_status
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, BarePeer, found_run, new_folder, served

EIGHT_MB = (8 << 20) - 4096  # what gRPC lets through


def converted(monkeypatch: pytest.MonkeyPatch) -> list[cpb.PeerMessage]:
    """The messages of peers that the coordinator converts from now on."""
    seen: list[cpb.PeerMessage] = []
    convert = control_service.peer_message_from_pb

    def record(message: cpb.PeerMessage) -> object:
        seen.append(message)
        return convert(message)

    monkeypatch.setattr(control_service, "peer_message_from_pb", record)
    return seen


async def answer_to(peer: BarePeer, message: cpb.PeerMessage) -> object:
    call = peer.control.Attend()
    await call.write(message)
    answer = coordinator_message_from_pb(await call.read())
    call.cancel()
    return answer


def test_nothing_that_an_evicted_peer_says_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            await found_run(a)
            run.coordinator.run.evict("b", "bad manners")
            seen = converted(monkeypatch)
            hello = cpb.Hello(protocol=PROTOCOL, run_id=b.run_id, software="x" * EIGHT_MB)
            assert await answer_to(b, cpb.PeerMessage(hello=hello)) == Expel(evicted=True, reason="bad manners")
            assert [message for message in seen if message.ByteSize() > 4096] == []  # of `a` there may be heartbeats

    asyncio.run(scenario())


def test_a_members_message_is_small(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            await found_run(a)
            hello = cpb.Hello(protocol=PROTOCOL, run_id=b.run_id, software="x" * EIGHT_MB)
            with pytest.raises(grpc.aio.AioRpcError, match="bytes, more than 32768"):
                await answer_to(b, cpb.PeerMessage(hello=hello))

    asyncio.run(scenario())


def test_a_model_that_is_known_is_announced_by_its_hash_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            await found_run(a)
            await b.attend()
            assert [type(each) for each in a.received].count(SchemaRequest) == 1  # nobody had it
            assert [type(each) for each in b.received].count(SchemaRequest) == 0

    asyncio.run(scenario())


def test_a_schema_is_decoded_in_the_worker_thread_and_no_further_than_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[str, int | None]] = []

    def record(data: bytes, first: int | None = None) -> Schema:
        decoded.append((threading.current_thread().name.partition("_")[0], first))
        return schema_from_bytes(data, first)

    monkeypatch.setattr("aggregator.control.schemas.schema_from_bytes", record)
    tensors = tuple(TensorSpec(name=f"t{i}", shape=(1,)) for i in range(2000))
    other = Schema((FragmentSpec(fragment_id=0, name="layer0", tensors=tensors),))

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b", other) as b:
            await found_run(a)
            await b.open_stream()
            assert "tensor layer0.weight of the run stands where the peer has t0" in (await b.receive(Expel)).reason
            assert decoded == [("torch", None), ("torch", 3)]

    asyncio.run(scenario())


def test_a_schema_must_have_the_hash_that_was_announced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            call = b.control.Attend()
            await call.write(peer_message_to_pb(Hello(run_id=b.run_id, schema_hash="0" * 64)))
            assert isinstance(coordinator_message_from_pb(await call.read()), SchemaRequest)
            await call.write(schema_answer_to_pb(SCHEMA))
            with pytest.raises(grpc.aio.AioRpcError, match="does not have the schema_hash that Hello announced"):
                await call.read()
            await found_run(a)  # the liar founds nothing

    asyncio.run(scenario())


def test_bytes_that_are_no_schema_are_the_peers_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("b") as b:
            call = b.control.Attend()
            await call.write(peer_message_to_pb(Hello(run_id=b.run_id, schema_hash="0" * 64)))
            assert isinstance(coordinator_message_from_pb(await call.read()), SchemaRequest)
            await call.write(cpb.PeerMessage(schema=b"\xff" * 1000))
            with pytest.raises(grpc.aio.AioRpcError, match="no Schema message"):
                await call.read()

    asyncio.run(scenario())


def of_aborted_calls() -> list[BaseException]:
    """The exceptions that gRPC keeps of calls that were aborted, until the garbage collector comes by."""
    return [each for each in gc.get_objects() if type(each) is grpc.aio.AbortError]


@pytest.mark.parametrize("kind", ["hello", "heartbeat", "request"])
@on_a_loop
async def test_the_frames_of_a_refused_call_hold_its_messages_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    refused, earlier = list[Exception](), of_aborted_calls()  # of other tests of this process
    monkeypatch.setattr("editpb.transport.abort_on_error.to_status", lambda error: refused.append(error) or to_status(error))
    gc.disable()

    def of_this_test() -> list[BaseException]:
        return [each for each in of_aborted_calls() if not any(each is other for other in earlier)]

    try:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            with pytest.raises(grpc.aio.AioRpcError):
                if kind == "request":
                    await a.data.DescribeSnapshot(dpb.SnapshotManifestRequest(run_id="x" * 100_000))
                elif kind == "hello":
                    await answer_to(a, cpb.PeerMessage(hello=cpb.Hello(protocol=PROTOCOL, software="x" * 100_000)))
                else:
                    call = a.control.Attend()
                    await call.write(peer_message_to_pb(Hello(run_id=a.run_id, schema_hash=a.schema.schema_hash)))
                    await call.write(cpb.PeerMessage(heartbeat=cpb.Heartbeat(digest="x" * 100_000)))
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert len(refused) == 1 and of_this_test()
            await until(lambda: all(each.__traceback__ is None for each in (*refused, *of_this_test())))
    finally:
        gc.enable()
