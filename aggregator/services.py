"""The gRPC services: thin. The certificate says who calls, `editpb.convert` validates what is said, the engine decides.

Owns: streams, their end, and the mapping of errors to status codes. Must not know: rounds, penalties, files.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import torch
from cryptography import x509
from torch import Tensor

from aggregator.donors import donors_of
from aggregator.engine import Attendance, Engine
from aggregator.status import injection_state, status_reply
from edit.errors import EditError, EvictedError, RefusedError, RemoteProtocolError
from edit.injection import Injection
from editpb import control_pb2 as cpb
from editpb import convert
from editpb import data_pb2 as dpb
from editpb.answering import answering
from editpb.chunks import CHUNK_BYTES, Reassembly, make_chunks
from editpb.identity import Identity, admitted
from editpb.messages import PROTOCOL, ContributionHeader, Expel, Goodbye, Heartbeat, Hello, Welcome

if TYPE_CHECKING:
    import grpc

    from editpb import tensors_pb2 as tpb

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["ControlService", "DataService"]

_HELLO_S = 30.0  # an Attend stream that says nothing for so long is closed
_HEAR_OUT_S = 5.0


def _admit(engine: Engine, context: Context, *roles: str) -> Identity:
    """Who calls: a member of this run in a fitting role, neither evicted nor replaced. Raises RefusedError, EvictedError."""
    facts = context.auth_context()
    identity = admitted(facts, engine.run_id, roles)
    certificate = x509.load_pem_x509_certificate(next(iter(facts["x509_pem_cert"])))
    engine.members.see(identity, certificate)
    if (reason := engine.members.is_allowed(identity, certificate.serial_number)) is not None:
        raise EvictedError(reason) if engine.members.evicted(identity.peer_id) else RefusedError(reason)
    return identity


class ControlService:
    """Control of control.proto."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Attend(self, messages: AsyncIterator[cpb.PeerMessage], context: Context) -> AsyncIterator[cpb.CoordinatorMessage]:
        """A peer's stream: Hello, then heartbeats up; Welcome, then views down, one whenever something changed."""
        async with answering(context):
            try:
                hello = await self._hello(messages)  # also of whoever is refused: or its write might fail before it hears why
                identity = _admit(self._engine, context, "peer", "region")
                if identity.role == "region" and hello.schema is not None:
                    raise RefusedError(
                        "a regional aggregator takes no part in the rounds here; start it with `edit-peer region`"
                    )
                attendance = self._attendance(identity, hello)
            except (EvictedError, RefusedError) as error:
                yield _expel(error)
                return
            yield convert.coordinator_message_to_pb(self._welcome(identity))
            if attendance is not None:
                async for message in self._converse(attendance, messages):
                    yield message

    async def _hello(self, messages: AsyncIterator[cpb.PeerMessage]) -> Hello:
        try:
            first = await asyncio.wait_for(anext(messages), _HELLO_S)
        except (TimeoutError, StopAsyncIteration):
            raise RemoteProtocolError("the first message must be Hello") from None
        hello = convert.peer_message_from_pb(first)
        if not isinstance(hello, Hello):
            raise RemoteProtocolError("the first message must be Hello")
        if hello.protocol != PROTOCOL:
            raise RefusedError(f"this coordinator speaks protocol {PROTOCOL}, the peer {hello.protocol}; use the same version")
        if hello.run_id != self._engine.run_id:
            raise RefusedError(f"this is run {self._engine.run_id}, not {hello.run_id}")
        return hello

    def _attendance(self, identity: Identity, hello: Hello) -> Attendance | None:
        if hello.schema is None:
            return None
        return self._engine.attend(identity.peer_id, hello.schema, hello.rank, hello.ranks)

    def _welcome(self, identity: Identity) -> Welcome:
        engine = self._engine
        config_json, outer_step = engine.config.to_json(), engine.published_step
        return Welcome(run_id=engine.run_id, peer_id=identity.peer_id, config_json=config_json, outer_step=outer_step)

    async def _converse(
        self, attendance: Attendance, messages: AsyncIterator[cpb.PeerMessage]
    ) -> AsyncIterator[cpb.CoordinatorMessage]:
        ears = asyncio.get_running_loop().create_task(self._listen(attendance, messages))
        ears.add_done_callback(lambda _: attendance.changed.set())
        try:
            while attendance.expelled is None and not attendance.over and not ears.done():
                attendance.changed.clear()
                yield convert.coordinator_message_to_pb(self._engine.view(attendance))
                await attendance.changed.wait()
            if attendance.expelled is not None:
                yield _expel(attendance.expelled)
        finally:
            goodbye = ears.result() if ears.done() and not ears.cancelled() and ears.exception() is None else ""
            fault = ears.exception() if ears.done() and not ears.cancelled() else None
            ears.cancel()
            reason = goodbye or (str(fault) if isinstance(fault, EditError) else "the connection broke")
            self._engine.leave(attendance, reason, polite=bool(goodbye))
        if fault is not None:
            raise fault

    async def _listen(self, attendance: Attendance, messages: AsyncIterator[cpb.PeerMessage]) -> str:
        """Heartbeats, until the stream ends; returns the words of a polite goodbye, or ''. Raises RemoteProtocolError."""
        async for message in messages:
            match convert.peer_message_from_pb(message):
                case Goodbye(reason):
                    return reason or "goodbye"
                case Heartbeat() as heartbeat:
                    self._engine.heartbeat(attendance, heartbeat)
                case Hello():
                    raise RemoteProtocolError("Hello is said once")
        return ""

    async def Status(self, request: cpb.StatusRequest, context: Context) -> cpb.StatusReply:
        async with answering(context):
            _admit(self._engine, context, "operator", "observer")
            return status_reply(self._engine, request.rounds_after)
        raise AssertionError("unreachable: abort raises")

    async def Evict(self, request: cpb.EvictRequest, context: Context) -> cpb.EvictReply:
        async with answering(context):
            _admit(self._engine, context, "operator")
            self._engine.evict(*convert.evict_request_from_pb(request))
        return cpb.EvictReply()

    async def Pause(self, request: cpb.PauseRequest, context: Context) -> cpb.PauseReply:
        async with answering(context):
            _admit(self._engine, context, "operator")
            self._engine.pause()
        return cpb.PauseReply()

    async def Resume(self, request: cpb.ResumeRequest, context: Context) -> cpb.ResumeReply:
        async with answering(context):
            _admit(self._engine, context, "operator")
            self._engine.resume()
        return cpb.ResumeReply()

    async def Drain(self, request: cpb.DrainRequest, context: Context) -> cpb.DrainReply:
        async with answering(context):
            _admit(self._engine, context, "operator")
            self._engine.drain()
        return cpb.DrainReply()


def _expel(error: EvictedError | RefusedError) -> cpb.CoordinatorMessage:
    return convert.coordinator_message_to_pb(Expel(evicted=isinstance(error, EvictedError), reason=str(error)))


class DataService:
    """Data of data.proto."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Contribute(self, parts: AsyncIterator[dpb.ContributePart], context: Context) -> dpb.ContributionReceipt:
        """One fragment of a pseudo-gradient, or a rank's part of it. Bad bytes are that peer's fault and touch nothing else."""
        async with answering(context):
            identity = _admit(self._engine, context, "peer")
            first = await anext(parts, None)
            if first is None or first.WhichOneof("kind") != "header":
                raise RemoteProtocolError("a contribution begins with its header")
            header = self._header(identity, first.header)
            try:
                return await self._receive(header, parts)
            except RemoteProtocolError as error:
                self._engine.exchange.fault(header.peer_id, header.round_id, str(error))
                raise
        raise AssertionError("unreachable: abort raises")

    def _header(self, identity: Identity, message: dpb.ContributionHeader) -> ContributionHeader:
        header = convert.contribution_header_from_pb(message, self._engine.downlink.schema)
        self._engine.same_run(header.run_id)
        if header.peer_id != identity.peer_id:
            raise RefusedError(f"the certificate is {identity.peer_id}'s, the contribution says {header.peer_id}")
        return header

    async def _receive(self, header: ContributionHeader, parts: AsyncIterator[dpb.ContributePart]) -> dpb.ContributionReceipt:
        slot = self._engine.exchange.offer(header)
        async for part in parts:
            if part.WhichOneof("kind") != "chunk":
                raise RemoteProtocolError("after the header only chunks follow")
            if slot is not None:
                slot.write(part.chunk.offset, part.chunk.data, part.chunk.crc32)
            self._engine.progress(header.peer_id)
            self._engine.exchange.progress(header)
        if slot is None:
            return dpb.ContributionReceipt(complete=True, received_bytes=header.total_bytes)
        if slot.complete:
            await self._engine.exchange.arrived(header, slot)
        return dpb.ContributionReceipt(complete=slot.complete, received_bytes=slot.received_bytes)

    async def Probe(self, request: dpb.ContributionHeader, context: Context) -> dpb.ProbeReply:
        """How much of this contribution is here already: a broken stream resumes where it broke."""
        async with answering(context):
            header = self._header(_admit(self._engine, context, "peer"), request)
            try:
                slot = self._engine.exchange.offer(header)
            except RemoteProtocolError as error:
                self._engine.exchange.fault(header.peer_id, header.round_id, str(error))
                raise
            if slot is None:
                return dpb.ProbeReply(received_bytes=header.total_bytes, complete=True)
            return dpb.ProbeReply(received_bytes=slot.received_bytes, complete=slot.complete)
        raise AssertionError("unreachable: abort raises")

    async def FetchUpdate(self, request: dpb.UpdateRequest, context: Context) -> AsyncIterator[dpb.UpdatePart]:
        """One commit, or what of it concerns a rank: the same bytes for whoever asks for the same boxes."""
        async with answering(context):
            _admit(self._engine, context, "peer")
            downlink = self._engine.downlink
            wanted = convert.update_request_from_pb(request, downlink.schema)
            self._engine.same_run(wanted.run_id)
            commit = downlink.update(wanted.outer_step)
            yield dpb.UpdatePart(manifest=convert.update_manifest_to_pb(commit, wanted.regions))
            async for fragment_id, payload in downlink.payloads(commit, wanted):
                for chunk in make_chunks(payload.data, CHUNK_BYTES):
                    yield dpb.UpdatePart(chunk=dpb.FragmentChunk(fragment_id=fragment_id, chunk=chunk))

    async def DescribeSnapshot(self, request: dpb.SnapshotManifestRequest, context: Context) -> dpb.SnapshotManifest:
        async with answering(context):
            identity = _admit(self._engine, context, "peer", "region", "observer", "operator")
            self._engine.same_run(request.run_id)
            manifest = self._engine.downlink.describe_snapshot()
            donors = donors_of(manifest, self._engine.membership.members.values(), identity.peer_id)
            return convert.snapshot_manifest_to_pb(dataclasses.replace(manifest, donors=donors))
        raise AssertionError("unreachable: abort raises")

    async def FetchSnapshot(self, request: dpb.SnapshotRequest, context: Context) -> AsyncIterator[tpb.Chunk]:
        async with answering(context):
            _admit(self._engine, context, "peer", "region", "observer", "operator")
            wanted = convert.snapshot_request_from_pb(request, self._engine.downlink.schema)
            self._engine.same_run(wanted.run_id)
            fragment = await self._engine.downlink.snapshot_fragment(wanted)
            for chunk in make_chunks(fragment.numpy().data, CHUNK_BYTES, start=wanted.offset):
                yield chunk

    async def Found(self, parts: AsyncIterator[dpb.FoundPart], context: Context) -> dpb.FoundReply:
        """The founder's initial parameters."""
        async with answering(context):
            identity = _admit(self._engine, context, "peer")
            first = await anext(parts, None)
            if first is None or first.WhichOneof("kind") != "header":
                raise RemoteProtocolError("founding begins with its header")
            header = convert.found_header_from_pb(first.header)
            schema = self._engine.check_founder(identity.peer_id, header)
            buffers = [Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in schema.fragments]
            async for part in parts:
                if part.WhichOneof("kind") != "chunk" or part.chunk.fragment_id >= len(buffers):
                    raise RemoteProtocolError("after the header only chunks of the schema's fragments follow")
                buffers[part.chunk.fragment_id].take(part.chunk.chunk)
                self._engine.progress(identity.peer_id)
            theta = [_fp32(buffer.finish()) for buffer in buffers]
            await self._engine.found(identity.peer_id, schema, theta, header.digest)
        return dpb.FoundReply()

    async def Inject(self, parts: AsyncIterator[dpb.InjectPart], context: Context) -> dpb.InjectReply:
        """What the run above has decided, by the regional aggregator alone."""
        async with answering(context):
            _admit(self._engine, context, "region")
            async with _heard_out(parts):
                await self._inject(parts)
        return dpb.InjectReply()

    async def _inject(self, parts: AsyncIterator[dpb.InjectPart]) -> None:
        first = await anext(parts, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise RemoteProtocolError("an injection begins with its header")
        exchange, schema = self._engine.exchange, self._engine.downlink.schema
        header = convert.inject_header_from_pb(first.header, schema)
        self._engine.same_run(header.run_id)
        if header.schema_hash != schema.schema_hash:
            raise RefusedError("another model: the injection's schema_hash is not the run's")
        exchange.may_bring(header.brings, header.base, header.replaces)
        fragments = [schema.fragments[i] for i in header.fragments]
        buffers = {f.fragment_id: Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in fragments}
        async for part in parts:
            if part.WhichOneof("kind") != "chunk" or part.chunk.fragment_id not in buffers:
                raise RemoteProtocolError("after the header only chunks of the fragments that it names follow")
            buffers[part.chunk.fragment_id].take(part.chunk.chunk)
        tensors = {i: _fp32(buffers[i].finish()) for i in header.fragments}
        injection = Injection(brings=header.brings, base=header.base, replaces=header.replaces, fragments=tensors)
        await exchange.inject(injection, header.digest)

    async def DescribeInjection(self, request: dpb.InjectionStateRequest, context: Context) -> dpb.InjectionState:
        """The run as its regional aggregator sees it. Raises StaleError before the founding."""
        async with answering(context):
            _admit(self._engine, context, "region", "observer", "operator")
            self._engine.same_run(request.run_id)
            return convert.injection_state_to_pb(injection_state(self._engine))
        raise AssertionError("unreachable: abort raises")


@contextlib.asynccontextmanager
async def _heard_out(messages: AsyncIterator[object]) -> AsyncIterator[None]:
    """Whoever is refused is listened to to the end, but not for long: or a write of his might fail before he hears why."""
    try:
        yield
    except EditError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEAR_OUT_S):
                async for _ in messages:
                    pass
        raise


def _fp32(data: bytearray) -> Tensor:
    """Little-endian fp32 bytes as a flat tensor that shares them."""
    return torch.frombuffer(data, dtype=torch.float32)
