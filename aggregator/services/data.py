"""The Data service of data.proto: contributions up; updates, snapshots and the founder's parameters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from aggregator.control.run import Run
from aggregator.control.snapshot_donors import donors_of
from aggregator.control.views import injection_state
from aggregator.security.certificates import public_hash
from aggregator.services.authorization import Authorizer
from aggregator.services.readers import SnapshotReaders, UpdateReaders, send
from aggregator.storage.kept_contributions import KeptShard
from aggregator.storage.pending_injection import Sender
from edit.errors import EditError, GoneError, RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard
from edit.merging.injection import Injection
from edit.records import EncodedTensor
from edit.trust.signatures import key_hash
from editpb import data_pb2 as dpb
from editpb import tensors_pb2 as tpb
from editpb.data_messages import (
    contribution_header_from_pb,
    contribution_header_to_pb,
    contribution_request_from_pb,
    found_header_from_pb,
    scores_from_pb,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
)
from editpb.identity import Identity
from editpb.injection_messages import inject_header_from_pb, injection_state_to_pb
from editpb.limits import MAX_COUNT, MAX_READ_S, MAX_STEP, check_id, within
from editpb.messages import ContributionHeader, UpdateRequest
from editpb.signed_contributions import check_signature, config_digest, signs
from editpb.signed_scores import check_scores
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.chunk_frames import ReceivedChunk, update_frames
from editpb.transport.chunks import Reassembly
from editpb.transport.guarded_calls import in_time
from editpb.transport.sealing import Seal
from editpb.transport.send_limit import UNLIMITED, SendLimit

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["DataService"]

_Part = TypeVar("_Part", dpb.ContributePart, dpb.FoundPart, dpb.InjectPart)
ContributePart = dpb.ContributePart | ReceivedChunk

_DRAIN_S = 5.0
_CONTRIBUTION_CHUNK_BYTES = 1 << 18  # to a scorer: as much as one that reads nothing holds in memory
_UPDATE_READERS = ("peer", "scorer")  # the roles that may
_SNAPSHOT_READERS = ("peer", "region", "observer", "scorer", "operator")
_CLOCKS_S = 1.0  # by which a deadline may seem later here


class DataService:
    """Data of data.proto. Every call first authorizes its caller; an error that it raises is the status of the call.

    limit_of: returns what bounds the bytes that a caller is sent.
    """

    def __init__(
        self, run: Run, authorizer: Authorizer, limit_of: Callable[[Context], SendLimit] = lambda _: UNLIMITED
    ) -> None:
        self._run, self._authorizer, self._limit_of = run, authorizer, limit_of
        self._snapshot_readers, self._update_readers = SnapshotReaders(), UpdateReaders()
        self._signed = config_digest(run.config) if signs(run.config) else ""
        self._contributed: tuple[int, dict[tuple[str, int, int], KeptShard]] = 0, {}  # of one commit: by peer, fragment, rank

    async def Contribute(self, parts: AsyncIterator[ContributePart], context: Context) -> dpb.ContributionReceipt:
        """Receive one fragment of a pseudo-gradient, or a rank's part of it.

        Bad bytes are that peer's fault: it is out of the round, and nothing else is touched.
        """
        async with abort_on_error(context):
            with self._authorizer.admit(context, "peer") as identity:
                header = self._header(identity, (await _first(parts, "a contribution")).header)
                try:
                    self._check_signed(context, header)
                    return await self._receive(header, parts)
                except RemoteProtocolError as error:
                    self._run.rounds.fault(header.peer_id, header.round_id, str(error))
                    raise
        raise AssertionError("unreachable: abort raises")

    def _header(self, identity: Identity, message: dpb.ContributionHeader) -> ContributionHeader:
        header = contribution_header_from_pb(message, self._run.rounds.published.schema)
        self._run.check_run_id(header.run_id)
        self._run.check_consented(identity.peer_id)
        if header.peer_id != identity.peer_id:
            raise RefusedError(f"the certificate is {identity.peer_id}'s, the contribution says {header.peer_id}")
        if header.rank >= (ranks := self._run.attendances.ranks(identity.peer_id)):
            raise RemoteProtocolError(f"rank is {header.rank}, but Hello announced ranks = {ranks}: attend with all of them")
        return header

    def _check_signed(self, context: Context, header: ContributionHeader) -> None:
        """Raise RemoteProtocolError unless the caller has signed the header, where the run has contributions signed."""
        if not self._signed:
            return
        check_signature(header, self._signed)
        if key_hash(header.public_key) != public_hash(self._authorizer.certificate(context)):
            raise RemoteProtocolError(f"a contribution of {header.peer_id} is signed with another key than its certificate's")

    async def _receive(self, header: ContributionHeader, parts: AsyncIterator[ContributePart]) -> dpb.ContributionReceipt:
        rounds, attendances = self._run.rounds, self._run.attendances
        shard = rounds.offer(header)
        async for part in parts:
            if not isinstance(part, ReceivedChunk):
                raise RemoteProtocolError("after the header only chunks follow")
            if shard is not None:
                await rounds.receive(shard, part.offset, part.data)
            attendances.progress(header.peer_id)
        if shard is None:
            return dpb.ContributionReceipt(complete=True, received_bytes=header.total_bytes)
        if shard.upload.complete:
            await rounds.arrived(shard)
        return dpb.ContributionReceipt(complete=shard.upload.complete, received_bytes=shard.upload.received_bytes)

    async def Probe(self, request: dpb.ContributionHeader, context: Context) -> dpb.ProbeReply:
        """Say how much of this contribution is here already, so that a broken stream resumes where it broke."""
        async with abort_on_error(context):
            header = self._header(self._authorizer.authorize(context, "peer"), request)
            try:
                self._check_signed(context, header)
                shard = self._run.rounds.offer(header)
            except RemoteProtocolError as error:
                self._run.rounds.fault(header.peer_id, header.round_id, str(error))
                raise
            if shard is None:
                return dpb.ProbeReply(received_bytes=header.total_bytes, complete=True)
            if shard.upload.complete:  # the call that brought the last bytes may have broken before they were measured
                await self._run.rounds.arrived(shard)
            return dpb.ProbeReply(received_bytes=shard.upload.received_bytes, complete=shard.upload.complete)
        raise AssertionError("unreachable: abort raises")

    async def FetchUpdate(self, request: dpb.UpdateRequest, context: Context) -> None:
        """Send one commit, or what of it concerns a rank, or a range of that: the same bytes for every request of the same.

        A request that names the open round gets what there is of its update ahead of the commit, sealed: see data.proto.
        """
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, *_UPDATE_READERS)
            published = self._run.rounds.published
            wanted = update_request_from_pb(request, published.schema)
            self._run.check_run_id(wanted.run_id)
            if wanted.seen is not None:
                self._run.rounds.note_seen(identity.peer_id, wanted.seen)
            with self._update_readers.place(identity.peer_id, len(self._run.attendances.of(identity.peer_id))) as room:
                limit = self._limit_of(context)
                await published.measure(wanted)
                await send(context.write, self._update_parts(context, wanted, room, limit), limit=limit)

    async def _update_parts(
        self, context: Context, wanted: UpdateRequest, room: asyncio.Semaphore, limit: SendLimit
    ) -> AsyncGenerator[dpb.UpdatePart | bytes, None]:
        published = self._run.rounds.published
        coming = await published.coming(wanted) if wanted.round_id and not wanted.digest else None
        self._authorizer.authorize(context, *_UPDATE_READERS)  # it may have waited
        if coming is not None:
            first: dpb.UpdatePart | None = dpb.UpdatePart(ahead=dpb.UpdateAhead())
            async with contextlib.aclosing(self._frames(context, coming.fragments, wanted, room, limit, coming.key)) as frames:
                async for frame in frames:
                    if coming.dropped:
                        return
                    if first is not None:
                        yield first
                        first = None
                    yield frame
            return
        commit = published.update(wanted.outer_step)
        if not wanted.digest:
            receipt = await published.receipt(wanted)
            key = published.key(commit, wanted)
            yield dpb.UpdatePart(manifest=update_manifest_to_pb(commit, wanted.shards, key, receipt))
            wanted = wanted if key else dataclasses.replace(wanted, offset=0)
        elif wanted.digest != commit.digest:
            raise GoneError(f"the update to outer step {wanted.outer_step} is another one now than was begun")
        payloads = ((one.fragment_id, one.payload) for one in commit.fragments if one.payload is not None)
        async with contextlib.aclosing(self._frames(context, payloads, wanted, room, limit)) as frames:
            async for frame in frames:
                yield frame

    async def _frames(
        self,
        context: Context,
        fragments: Iterable[tuple[int, EncodedTensor]],
        wanted: UpdateRequest,
        room: asyncio.Semaphore,
        limit: SendLimit,
        key: bytes = b"",
    ) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of what is wanted of these fragments. key: what seals them; empty: they are not sealed."""
        published, left = self._run.rounds.published, wanted.limit or MAX_COUNT
        shards = wanted.shards or tuple(map(Shard, published.schema.fragments))
        async with contextlib.aclosing(published.payloads(fragments, wanted, room)) as payloads:
            async for fragment_id, payload, start in payloads:
                data = memoryview(payload.data).cast("B")[: start + left]
                seal = Seal(key, shards[fragment_id], start) if key else None
                frames = update_frames(
                    fragment_id,
                    data,
                    start=start,
                    seal=seal,
                    chunk_bytes=lambda: min(self._update_readers.chunk_bytes, limit.chunk_bytes),
                )
                for frame in frames:
                    self._authorizer.authorize(context, *_UPDATE_READERS)
                    yield frame
                if (left := left - (len(data) - start)) <= 0:
                    return

    async def DescribeSnapshot(self, request: dpb.SnapshotManifestRequest, context: Context) -> dpb.SnapshotManifest:
        """Describe the newest snapshot, and name members that serve it, too."""
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, *_SNAPSHOT_READERS)
            self._run.check_run_id(request.run_id)
            published = self._run.rounds.published
            manifest = await published.describe_snapshot()
            donors = donors_of(manifest, self._run.attendances.membership.members.values(), identity.peer_id)
            return snapshot_manifest_to_pb(dataclasses.replace(manifest, donors=donors, run_outer_step=published.outer_step))
        raise AssertionError("unreachable: abort raises")

    async def FetchSnapshot(self, request: dpb.SnapshotRequest, context: Context) -> None:
        """Send fragments of a snapshot that was described, or the boxes of them that are wanted.

        A request for none of its bytes keeps the snapshot for longer, and takes no reader's place. The call must have a
        deadline: at that, gRPC takes back what is not read, which nothing else does.
        """
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, *_SNAPSHOT_READERS)
            published = self._run.rounds.published
            wanted = snapshot_request_from_pb(request, published.schema)
            self._run.check_run_id(wanted.run_id)
            _check_deadline(context, "a snapshot is read")
            limit = self._limit_of(context)
            each = (published.snapshot_chunks(one, limit.chunk_bytes) for one in wanted.one_by_one())
            chunks = _limited(itertools.chain.from_iterable(each), wanted.limit)
            if (first := next(chunks, None)) is not None:
                with self._snapshot_readers.place(identity.peer_id, identity.role) as place:

                    async def admitted() -> AsyncGenerator[tpb.Chunk, None]:
                        for chunk in itertools.chain([first], chunks):
                            self._authorizer.authorize(context, *_SNAPSHOT_READERS)
                            yield chunk

                    await send(context.write, admitted(), stalled=place.give_up, limit=limit)

    async def DescribeContributions(self, request: dpb.ContributionsRequest, context: Context) -> None:
        """Describe what was merged in a commit, for a scorer."""
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, "scorer")
            self._run.check_run_id(check_id("run_id", request.run_id))
            _check_deadline(context, "contributions are read")
            shards = await self._shards(within("outer_step", request.outer_step, 1, MAX_STEP))
            with self._snapshot_readers.place(identity.peer_id, identity.role) as place:

                async def headers() -> AsyncGenerator[dpb.ContributionHeader, None]:
                    for shard in shards.values():
                        self._authorizer.authorize(context, "scorer")
                        yield contribution_header_to_pb(shard.header)

                await send(context.write, headers(), stalled=place.give_up, limit=self._limit_of(context))

    async def FetchContribution(self, request: dpb.ContributionRequest, context: Context) -> None:
        """Send a scorer the bytes of one shard of what was merged, or a range of them. With a deadline, as FetchSnapshot."""
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, "scorer")
            wanted = contribution_request_from_pb(request)
            self._run.check_run_id(wanted.run_id)
            _check_deadline(context, "a contribution is read")
            shard = (await self._shards(wanted.outer_step)).get((wanted.peer_id, wanted.fragment_id, wanted.rank))
            if shard is None:
                what = f"fragment {wanted.fragment_id} of {wanted.peer_id}, rank {wanted.rank}"
                raise RemoteProtocolError(f"{what} is not in the commit to outer step {wanted.outer_step}")
            limit, total = self._limit_of(context), shard.header.total_bytes
            end = min(total, wanted.offset + wanted.limit) if wanted.limit else total
            with self._snapshot_readers.place(identity.peer_id, identity.role) as place:

                async def chunks() -> AsyncGenerator[tpb.Chunk, None]:
                    at = wanted.offset
                    while at < end:
                        size = min(_CONTRIBUTION_CHUNK_BYTES, limit.chunk_bytes, end - at)
                        data = await asyncio.to_thread(shard.read, at, at + size)
                        if len(data) != size:
                            raise StorageError(f"{shard.path}: is cut short")
                        self._authorizer.authorize(context, "scorer")
                        yield tpb.Chunk(offset=at, data=data)
                        at += size

                await send(context.write, chunks(), stalled=place.give_up, limit=limit)

    async def _shards(self, outer_step: int) -> dict[tuple[str, int, int], KeptShard]:
        """Return what was merged in a commit, which does not change any more. Raises as `RoundRunner.contributed`."""
        rounds = self._run.rounds
        if outer_step > rounds.published.outer_step:
            raise StaleError(f"outer step {outer_step} is not committed yet; the last one is {rounds.published.outer_step}")
        if self._contributed[0] != outer_step:
            found = await asyncio.to_thread(rounds.contributed, outer_step)
            by_key = {(each.header.peer_id, each.header.fragment_id, each.header.rank): each for each in found}
            self._contributed = outer_step, by_key
        return self._contributed[1] if self._contributed[0] == outer_step else await self._shards(outer_step)

    async def Score(self, request: dpb.Scores, context: Context) -> dpb.ScoresReply:
        """Take what a scorer says of the last commit's contributions."""
        async with abort_on_error(context):
            with self._authorizer.admit(context, "scorer") as identity:
                report = scores_from_pb(request)
                self._run.check_run_id(report.run_id)
                if self._signed:
                    check_scores(report, identity.peer_id)
                    if key_hash(report.public_key) != public_hash(self._authorizer.certificate(context)):
                        raise RemoteProtocolError(
                            f"{identity.peer_id} signs its scores with another key than its certificate's"
                        )
                await self._run.rounds.score(identity.peer_id, report)
        return dpb.ScoresReply()

    async def Found(self, parts: AsyncIterator[dpb.FoundPart], context: Context) -> dpb.FoundReply:
        """Receive the founder's initial parameters, or some of them, or only say how much of them is here."""
        async with abort_on_error(context):
            with self._authorizer.admit(context, "peer") as identity:
                header = found_header_from_pb((await _first(parts, "founding")).header)
                with self._run.receive_founding(identity.peer_id, header) as transfer:
                    async for part in parts:
                        if part.WhichOneof("kind") != "chunk":
                            raise RemoteProtocolError("after the header only chunks follow")
                        transfer.take(part.chunk.fragment_id, part.chunk.chunk)
                        self._run.attendances.progress(identity.peer_id)
                    if (received := transfer.received_bytes) == transfer.turn.total_bytes:
                        await self._run.found(transfer, transfer.theta(), header.digest)
                        return dpb.FoundReply(received_bytes=received, complete=True)
                    return dpb.FoundReply(received_bytes=received)
        raise AssertionError("unreachable: abort raises")

    async def Inject(self, parts: AsyncIterator[dpb.InjectPart], context: Context) -> dpb.InjectReply:
        """Receive what the run above has decided; the regional aggregator alone may send it."""
        async with abort_on_error(context):
            with self._authorizer.admit(context, "region") as identity:
                sender = Sender(identity.peer_id, public_hash(self._authorizer.certificate(context)))
                async with _drained_on_error(parts):
                    rounds, schema = self._run.rounds, self._run.rounds.published.schema
                    header = inject_header_from_pb((await _first(parts, "an injection")).header, schema)
                    self._run.check_run_id(header.run_id)
                    if header.schema_hash != schema.schema_hash:
                        raise RefusedError("another model: the injection's schema_hash is not the run's")
                    rounds.check_injection(header.brings, header.base, header.replaces)
                    tensors = await _receive_fragments([schema.fragments[i] for i in header.fragments], parts)
                    injection = Injection(brings=header.brings, base=header.base, replaces=header.replaces, fragments=tensors)
                    await rounds.inject(injection, header.digest, sender)
        return dpb.InjectReply()

    async def DescribeInjection(self, request: dpb.InjectionStateRequest, context: Context) -> dpb.InjectionState:
        """Describe the run as its regional aggregator sees it."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, "region", "observer", "operator")
            self._run.check_run_id(request.run_id)
            return injection_state_to_pb(injection_state(self._run.rounds))
        raise AssertionError("unreachable: abort raises")


def _check_deadline(context: Context, what: str) -> None:
    """Raise RemoteProtocolError unless the call has a deadline: at that, gRPC takes back what is not read."""
    if not (context.time_remaining() or math.inf) <= MAX_READ_S + _CLOCKS_S:
        raise RemoteProtocolError(f"{what} with a deadline of at most {MAX_READ_S:g} s")


async def _first(parts: AsyncIterator[_Part | ReceivedChunk], what: str) -> _Part:
    """Return the first message of a request stream. Raises RemoteProtocolError unless it is the header, TransportError."""
    first = await in_time(anext(parts, None), f"the header of {what}")
    if first is None or isinstance(first, ReceivedChunk) or first.WhichOneof("kind") != "header":
        raise RemoteProtocolError(f"{what} begins with its header")
    return first


def _limited(chunks: Iterator[tpb.Chunk], limit: int) -> Iterator[tpb.Chunk]:
    """Yield the first `limit` bytes, or all where that is 0."""
    left = limit or MAX_COUNT
    for chunk in chunks:
        yield chunk if len(chunk.data) <= left else tpb.Chunk(offset=chunk.offset, data=chunk.data[:left])
        if (left := left - len(chunk.data)) <= 0:
            return


async def _receive_fragments(fragments: Sequence[FragmentSpec], parts: AsyncIterator[dpb.InjectPart]) -> dict[int, Tensor]:
    """Return these fragments' fp32 values, by fragment_id. Raises RemoteProtocolError."""
    buffers = {f.fragment_id: Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in fragments}
    async for part in parts:
        if part.WhichOneof("kind") != "chunk" or part.chunk.fragment_id not in buffers:
            raise RemoteProtocolError("after the header only chunks of the fragments that it names follow")
        buffers[part.chunk.fragment_id].take(part.chunk.chunk)
    return {i: torch.frombuffer(buffer.finish(), dtype=torch.float32) for i, buffer in buffers.items()}


@contextlib.asynccontextmanager
async def _drained_on_error(messages: AsyncIterator[object]) -> AsyncIterator[None]:
    """On an error, drain the request stream (at most 5 s) so that the client sees our status instead of a failed write."""
    try:
        yield
    except EditError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                async for _ in messages:
                    pass
        raise
