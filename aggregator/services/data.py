"""The Data service of data.proto: contributions up; updates, snapshots and the founder's parameters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aggregator.control.run import Run
from aggregator.control.snapshot_donors import donors_of
from aggregator.control.views import injection_state
from aggregator.services.admission import admit
from edit.errors import EditError, RefusedError, RemoteProtocolError
from edit.merging.injection import Injection
from editpb import data_pb2 as dpb
from editpb.abort_on_error import abort_on_error
from editpb.chunks import CHUNK_BYTES, Reassembly, make_chunks
from editpb.data_messages import (
    contribution_header_from_pb,
    found_header_from_pb,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
)
from editpb.identity import Identity
from editpb.injection_messages import inject_header_from_pb, injection_state_to_pb
from editpb.messages import ContributionHeader

if TYPE_CHECKING:
    import grpc

    from editpb import tensors_pb2 as tpb

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["DataService"]

_HEAR_OUT_S = 5.0


class DataService:
    """Data of data.proto."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def Contribute(self, parts: AsyncIterator[dpb.ContributePart], context: Context) -> dpb.ContributionReceipt:
        """One fragment of a pseudo-gradient, or a rank's part of it. Bad bytes are that peer's fault and touch nothing else."""
        async with abort_on_error(context):
            identity = admit(self._run, context, "peer")
            first = await anext(parts, None)
            if first is None or first.WhichOneof("kind") != "header":
                raise RemoteProtocolError("a contribution begins with its header")
            header = self._header(identity, first.header)
            try:
                return await self._receive(header, parts)
            except RemoteProtocolError as error:
                self._run.rounds.fault(header.peer_id, header.round_id, str(error))
                raise
        raise AssertionError("unreachable: abort raises")

    def _header(self, identity: Identity, message: dpb.ContributionHeader) -> ContributionHeader:
        header = contribution_header_from_pb(message, self._run.rounds.published.schema)
        self._run.check_run_id(header.run_id)
        if header.peer_id != identity.peer_id:
            raise RefusedError(f"the certificate is {identity.peer_id}'s, the contribution says {header.peer_id}")
        return header

    async def _receive(self, header: ContributionHeader, parts: AsyncIterator[dpb.ContributePart]) -> dpb.ContributionReceipt:
        upload = self._run.rounds.offer(header)
        async for part in parts:
            if part.WhichOneof("kind") != "chunk":
                raise RemoteProtocolError("after the header only chunks follow")
            if upload is not None:
                upload.write(part.chunk.offset, part.chunk.data, part.chunk.crc32)
            self._run.attendances.progress(header.peer_id)
            self._run.rounds.progress(header)
        if upload is None:
            return dpb.ContributionReceipt(complete=True, received_bytes=header.total_bytes)
        if upload.complete:
            await self._run.rounds.arrived(header, upload)
        return dpb.ContributionReceipt(complete=upload.complete, received_bytes=upload.received_bytes)

    async def Probe(self, request: dpb.ContributionHeader, context: Context) -> dpb.ProbeReply:
        """How much of this contribution is here already: a broken stream resumes where it broke."""
        async with abort_on_error(context):
            header = self._header(admit(self._run, context, "peer"), request)
            try:
                upload = self._run.rounds.offer(header)
            except RemoteProtocolError as error:
                self._run.rounds.fault(header.peer_id, header.round_id, str(error))
                raise
            if upload is None:
                return dpb.ProbeReply(received_bytes=header.total_bytes, complete=True)
            return dpb.ProbeReply(received_bytes=upload.received_bytes, complete=upload.complete)
        raise AssertionError("unreachable: abort raises")

    async def FetchUpdate(self, request: dpb.UpdateRequest, context: Context) -> AsyncIterator[dpb.UpdatePart]:
        """One commit, or what of it concerns a rank: the same bytes for whoever asks for the same boxes."""
        async with abort_on_error(context):
            admit(self._run, context, "peer")
            published = self._run.rounds.published
            wanted = update_request_from_pb(request, published.schema)
            self._run.check_run_id(wanted.run_id)
            commit = published.update(wanted.outer_step)
            yield dpb.UpdatePart(manifest=update_manifest_to_pb(commit, wanted.shards))
            async for fragment_id, payload in published.payloads(commit, wanted):
                for chunk in make_chunks(payload.data, CHUNK_BYTES):
                    yield dpb.UpdatePart(chunk=dpb.FragmentChunk(fragment_id=fragment_id, chunk=chunk))

    async def DescribeSnapshot(self, request: dpb.SnapshotManifestRequest, context: Context) -> dpb.SnapshotManifest:
        async with abort_on_error(context):
            identity = admit(self._run, context, "peer", "region", "observer", "operator")
            self._run.check_run_id(request.run_id)
            manifest = self._run.rounds.published.describe_snapshot()
            donors = donors_of(manifest, self._run.attendances.membership.members.values(), identity.peer_id)
            return snapshot_manifest_to_pb(dataclasses.replace(manifest, donors=donors))
        raise AssertionError("unreachable: abort raises")

    async def FetchSnapshot(self, request: dpb.SnapshotRequest, context: Context) -> AsyncIterator[tpb.Chunk]:
        async with abort_on_error(context):
            admit(self._run, context, "peer", "region", "observer", "operator")
            wanted = snapshot_request_from_pb(request, self._run.rounds.published.schema)
            self._run.check_run_id(wanted.run_id)
            fragment = await self._run.rounds.published.snapshot_fragment(wanted)
            for chunk in make_chunks(fragment.numpy().data, CHUNK_BYTES, start=wanted.offset):
                yield chunk

    async def Found(self, parts: AsyncIterator[dpb.FoundPart], context: Context) -> dpb.FoundReply:
        """The founder's initial parameters."""
        async with abort_on_error(context):
            identity = admit(self._run, context, "peer")
            first = await anext(parts, None)
            if first is None or first.WhichOneof("kind") != "header":
                raise RemoteProtocolError("founding begins with its header")
            header = found_header_from_pb(first.header)
            schema = self._run.check_founder(identity.peer_id, header)
            buffers = [Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in schema.fragments]
            async for part in parts:
                if part.WhichOneof("kind") != "chunk" or part.chunk.fragment_id >= len(buffers):
                    raise RemoteProtocolError("after the header only chunks of the schema's fragments follow")
                buffers[part.chunk.fragment_id].take(part.chunk.chunk)
                self._run.attendances.progress(identity.peer_id)
            theta = [_fp32(buffer.finish()) for buffer in buffers]
            await self._run.found(identity.peer_id, schema, theta, header.digest)
        return dpb.FoundReply()

    async def Inject(self, parts: AsyncIterator[dpb.InjectPart], context: Context) -> dpb.InjectReply:
        """What the run above has decided, by the regional aggregator alone."""
        async with abort_on_error(context):
            admit(self._run, context, "region")
            async with _heard_out(parts):
                await self._inject(parts)
        return dpb.InjectReply()

    async def _inject(self, parts: AsyncIterator[dpb.InjectPart]) -> None:
        first = await anext(parts, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise RemoteProtocolError("an injection begins with its header")
        rounds, schema = self._run.rounds, self._run.rounds.published.schema
        header = inject_header_from_pb(first.header, schema)
        self._run.check_run_id(header.run_id)
        if header.schema_hash != schema.schema_hash:
            raise RefusedError("another model: the injection's schema_hash is not the run's")
        rounds.may_bring(header.brings, header.base, header.replaces)
        fragments = [schema.fragments[i] for i in header.fragments]
        buffers = {f.fragment_id: Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in fragments}
        async for part in parts:
            if part.WhichOneof("kind") != "chunk" or part.chunk.fragment_id not in buffers:
                raise RemoteProtocolError("after the header only chunks of the fragments that it names follow")
            buffers[part.chunk.fragment_id].take(part.chunk.chunk)
        tensors = {i: _fp32(buffers[i].finish()) for i in header.fragments}
        injection = Injection(brings=header.brings, base=header.base, replaces=header.replaces, fragments=tensors)
        await rounds.inject(injection, header.digest)

    async def DescribeInjection(self, request: dpb.InjectionStateRequest, context: Context) -> dpb.InjectionState:
        """The run as its regional aggregator sees it. Raises StaleError before the founding."""
        async with abort_on_error(context):
            admit(self._run, context, "region", "observer", "operator")
            self._run.check_run_id(request.run_id)
            return injection_state_to_pb(injection_state(self._run.rounds))
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
