"""The data plane: contributions up; updates, snapshots and the founder's parameters down and up.

A broken stream resumes where it broke; a call is tried again a bounded number of times, while it is still wanted; a call in
which nothing moves for a minute is given up (`StallTimeout`). Updates are put together by `UpdateAssembly`, which does no I/O.
Which round or outer step is worth asking for is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from edit.errors import EditError, RemoteProtocolError, TransportError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Commit, EncodedTensor, Snapshot
from editpb import data_pb2, data_pb2_grpc
from editpb.data_messages import (
    commit_from_parts,
    contribution_header_to_pb,
    found_header_to_pb,
    received_from_pb,
    snapshot_manifest_from_pb,
    snapshot_request_to_pb,
    update_manifest_from_pb,
    update_request_to_pb,
)
from editpb.limits import MAX_READ_S
from editpb.messages import (
    ContributionHeader,
    FoundHeader,
    FragmentUpdate,
    Received,
    SnapshotManifest,
    SnapshotRequest,
    UpdateManifest,
    UpdateRequest,
)
from editpb.transport.chunk_frames import ReceivedChunk, contribute_frames, data_stub
from editpb.transport.chunks import Reassembly, make_chunks
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.snapshot_donors import Donors, Patience
from peers.carriers.run_connection import Origin, Traffic

__all__ = ["STALL_S", "DataCalls", "StallTimeout", "UpdateAssembly", "Wanted"]

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 3.0
DAMAGED_TRIES, TRIES = 3, 40  # with the delays above: about two minutes
ANSWER_S = 30.0  # for an answer of a few bytes, on a connection that may have to be made first
STALL_S = 60.0  # far longer than one chunk takes
FOUNDING_CHUNK_BYTES = 256 << 10  # small: a founder of which nothing arrives for a minute hands over, and a link may be slow
AGGREGATOR = "the aggregator"
_PATIENCE = Patience()
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Part = TypeVar("_Part")
_Request = TypeVar("_Request")
_Message = TypeVar("_Message", bound=Message)
Wanted = Callable[[], bool]


class DataCalls:
    """The data calls of one rank to one aggregator, all on the loop's thread. `wanted` is asked before each further try.

    All raise: TransportError when the last try failed or no further one is wanted; RefusedError; RemoteProtocolError when the
    aggregator's bytes were wrong three times; StaleError when what was asked for is over (the round closed, the update no
    longer kept).

    Args:
        channels: to the aggregator and to other members.
        run_id: the run's.
        traffic: where the bytes are counted.
        draw: random numbers in [0, 1), for the choice among donors of a snapshot.
        patience: with each donor.
        stall_s: after so many seconds without a byte a try has failed.
    """

    def __init__(
        self,
        channels: Channels,
        run_id: str,
        traffic: Traffic,
        draw: Callable[[], float] = random.random,
        patience: Patience = _PATIENCE,
        stall_s: float = STALL_S,
    ) -> None:
        self.origin: Origin | None = None  # of the last snapshot
        self._channels = channels
        self._run_id = run_id
        self._traffic = traffic
        self._draw = draw
        self._patience = patience
        self._stall_s = stall_s

    async def contribute(self, header: ContributionHeader, data: memoryview, wanted: Wanted, *, resuming: bool = False) -> None:
        """Send one fragment; return once the aggregator has all of it. A broken stream resumes where it broke.

        resuming: the aggregator may have some of it, or all, from before.
        """
        message = contribution_header_to_pb(header)

        def parts(start: int) -> Iterator[data_pb2.ContributePart | bytes]:
            yield self._up(data_pb2.ContributePart(header=message))
            for frame in contribute_frames(data, start=start):
                self._traffic.sent += len(frame)
                yield frame

        async def attempt() -> None:
            nonlocal resuming
            held = await self._probe(message) if resuming else Received(0, False)
            resuming = True
            if held.complete:
                return
            async with StallTimeout(self._stall_s) as moving:
                reply = await self._stub().Contribute(moving.sending(parts(held.received_bytes)))
            receipt = received_from_pb(self._down(reply), header.total_bytes)
            if not receipt.complete:
                raise TransportError(f"the stream ended after {receipt.received_bytes} of {header.total_bytes} bytes")

        await _retrying(f"round {header.round_id}, fragment {header.fragment_id}", attempt, wanted)

    async def update(self, assembly: UpdateAssembly, wanted: Wanted, arrived: Callable[[], None]) -> None:
        """Complete `assembly`. arrived: called when its manifest is in, and each time one of its fragments is."""

        async def attempt() -> None:
            request = UpdateRequest(self._run_id, assembly.outer_step, assembly.missing)
            call = self._stub().FetchUpdate(self._up(update_request_to_pb(request)))
            begun = False
            try:
                async with StallTimeout(self._stall_s) as moving:
                    async for part in moving.reading(call):
                        if begun == isinstance(part, data_pb2.UpdatePart):
                            raise RemoteProtocolError("an update is its manifest, and then chunks")
                        if isinstance(part, data_pb2.UpdatePart):
                            assembly.begin(self._down(part))
                            begun = True
                        else:
                            self._traffic.received += len(part.data)
                            if not assembly.take(part):
                                continue
                        arrived()
            finally:
                call.cancel()
            assembly.finish()

        await _retrying(f"update {assembly.outer_step}", attempt, wanted)

    async def describe(self, schema: Schema | None, wanted: Wanted) -> SnapshotManifest:
        """Return what the snapshot of the latest commit consists of. schema: None where it is not known yet."""

        async def attempt() -> SnapshotManifest:
            request = self._up(data_pb2.SnapshotManifestRequest(run_id=self._run_id))
            reply = await self._stub().DescribeSnapshot(request, timeout=ANSWER_S)
            manifest = snapshot_manifest_from_pb(self._down(reply), schema)
            if combine(manifest.fragment_hash) != manifest.digest:
                raise RemoteProtocolError("a snapshot's digest is not that of its fragments")
            return manifest

        return await _retrying("snapshot", attempt, wanted)

    async def snapshot(self, manifest: SnapshotManifest, shards: Sequence[Shard], wanted: Wanted) -> Snapshot:
        """Return the outer parameters of `manifest`, of each fragment this rank's shard.

        Whole fragments are checked against their hashes, and come from the manifest's donors as long as there are any;
        everything else comes from the aggregator.
        """
        donors = Donors(manifest, self._run_id, self._channels, self._traffic, self._draw, self._patience)
        reminder = asyncio.create_task(self._remind(manifest))
        try:
            fragments = [await self._snapshot_fragment(manifest, shard, donors, wanted) for shard in shards]
        finally:
            reminder.cancel()
            await asyncio.wait([reminder])
            await donors.close()
        self.origin = Origin(manifest.outer_step, manifest.digest, tuple(donors.sources))
        _log.info("snapshot of outer step %d from %s", manifest.outer_step, ", ".join(donors.sources))
        return Snapshot(manifest.outer_step, manifest.digest, tuple(fragments))

    async def found(self, schema: Schema, fragments: Sequence[Tensor], digest: str, wanted: Wanted) -> None:
        """Send the run's initial parameters: one flat fp32 tensor per fragment. StaleError when the run has some already."""
        header = FoundHeader(run_id=self._run_id, schema_hash=schema.schema_hash, digest=digest)

        def parts() -> Iterator[data_pb2.FoundPart]:
            yield self._up(data_pb2.FoundPart(header=found_header_to_pb(header)))
            for fragment, theta in zip(schema.fragments, fragments, strict=True):
                for chunk in make_chunks(theta.numpy().data, FOUNDING_CHUNK_BYTES):
                    part = data_pb2.FragmentChunk(fragment_id=fragment.fragment_id, chunk=chunk)
                    yield self._up(data_pb2.FoundPart(chunk=part))

        async def attempt() -> None:
            async with StallTimeout(self._stall_s) as moving:
                self._down(await self._stub().Found(moving.sending(parts())))

        await _retrying("founding", attempt, wanted)

    async def _remind(self, manifest: SnapshotManifest) -> None:
        """Ask the aggregator for the empty end of a fragment now and then, while donors are read.

        It keeps the snapshot for those who ask, and would have forgotten it when the last donor breaks off.
        """
        end = SnapshotRequest(
            run_id=self._run_id,
            outer_step=manifest.outer_step,
            fragment_id=0,
            offset=4 * manifest.schema.fragments[0].numel,
        )
        while True:
            await asyncio.sleep(self._patience.remind_s)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in self._stub().FetchSnapshot(self._up(snapshot_request_to_pb(end)), timeout=ANSWER_S):
                    pass

    async def _snapshot_fragment(self, manifest: SnapshotManifest, shard: Shard, donors: Donors, wanted: Wanted) -> Tensor:
        fragment = shard.fragment
        if shard.numel == 0:
            return torch.empty(0)
        digest = manifest.fragment_hash[fragment.fragment_id] if shard.is_whole else None
        into = Reassembly(f"snapshot of fragment {fragment.name}", 4 * shard.numel, 4 * shard.numel, digest)

        async def read_on() -> None:
            request = SnapshotRequest(
                run_id=self._run_id,
                outer_step=manifest.outer_step,
                fragment_id=fragment.fragment_id,
                offset=into.received,
                boxes=None if shard.is_whole else shard.boxes,
            )
            call = self._stub().FetchSnapshot(self._up(snapshot_request_to_pb(request)), timeout=MAX_READ_S)
            try:
                async with StallTimeout(self._stall_s) as moving:
                    async for chunk in moving.reading(call):
                        into.take(self._down(chunk))
            finally:
                call.cancel()

        async def attempt() -> memoryview:
            while True:
                before = into.received
                try:
                    await read_on()
                    return into.finish()
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or into.received == before:
                        raise
                except RemoteProtocolError:
                    into.clear()
                    raise

        if (data := await donors.read(shard, into)) is None:
            donors.sources[AGGREGATOR] = None
            data = await _retrying(f"snapshot of fragment {fragment.name}", attempt, wanted)
        return torch.frombuffer(data, dtype=torch.float32)

    async def _probe(self, header: data_pb2.ContributionHeader) -> Received:
        reply = self._down(await self._stub().Probe(self._up(header), timeout=ANSWER_S))
        held = received_from_pb(reply, header.total_bytes)
        _log.info("fragment %d: %d of %d bytes have arrived", header.fragment_id, held.received_bytes, header.total_bytes)
        return held

    def _stub(self) -> data_pb2_grpc.DataStub:
        return data_stub(self._channels.data())

    def _up(self, message: _Message) -> _Message:
        self._traffic.sent += message.ByteSize()
        return message

    def _down(self, message: _Message) -> _Message:
        self._traffic.received += message.ByteSize()
        return message


class UpdateAssembly:
    """This rank's shards of one update, over as many streams as it takes.

    A stream begins with its manifest; then come the bytes of each fragment that was not rolled back, one after the other. The
    next stream need not repeat fragments that are complete (see `missing`). Raises RemoteProtocolError for whatever does not
    fit `schema`, `outer_step`, `due` or the manifest.

    Args:
        schema: of the model.
        outer_step: the one that the update leads to.
        due: the fragments that the update is of, ascending.
        shards: what this rank holds, one per fragment of the schema.
    """

    def __init__(self, schema: Schema, outer_step: int, due: Sequence[int], shards: Sequence[Shard]) -> None:
        self.outer_step = outer_step
        self._schema = schema
        self._due = tuple(due)
        self._shards = tuple(shards)
        self._manifest: UpdateManifest | None = None
        self._updates: list[FragmentUpdate] = []  # of the first stream's manifest, which lists all fragments
        self._data: dict[int, memoryview] = {}  # by position in the manifest; whole ones only
        self._arriving: list[tuple[int, Reassembly]] = []  # of the present stream, in their order

    @property
    def missing(self) -> tuple[Shard, ...]:
        """What to ask for: this rank's shards, empty for the fragments that are here."""
        here = {self._due[position] for position in self._data}
        return tuple(Shard(shard.fragment, ()) if i in here else shard for i, shard in enumerate(self._shards))

    @property
    def manifest(self) -> Commit | None:
        """The commit without its payloads, once the first message is in."""
        manifest = self._manifest
        if manifest is None:
            return None
        fragments = tuple(update.commit for update in self._updates)
        return Commit(
            outer_step=manifest.outer_step,
            round_id=manifest.round_id,
            digest=manifest.digest,
            reason=manifest.reason,
            fragments=fragments,
        )

    def rolled_back(self, position: int) -> bool:
        """Return whether the fragment at this position of the manifest comes without a payload."""
        return self._updates[position].codec is None

    def payload(self, position: int) -> EncodedTensor | None:
        """Return the fragment at this position of the manifest; None while bytes are missing."""
        update, data = self._updates[position], self._data.get(position)
        return None if update.codec is None or data is None else EncodedTensor(update.codec, update.numel, data)

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self._manifest is not None and all(
            update.codec is None or position in self._data for position, update in enumerate(self._updates)
        )

    def begin(self, first: data_pb2.UpdatePart) -> None:
        """Take a stream's first message. What an earlier stream left incomplete is forgotten."""
        if first.WhichOneof("kind") != "manifest":
            raise RemoteProtocolError("an update does not begin with its manifest")
        manifest = update_manifest_from_pb(first.manifest, self._schema, self.outer_step, due=self._due, shards=self.missing)
        if self._manifest is None:
            self._manifest, self._updates = manifest, list(manifest.fragments)
        elif (manifest.digest, manifest.round_id) != (self._manifest.digest, self._manifest.round_id):
            raise RemoteProtocolError(f"the update to outer step {self.outer_step} is another than before")
        self._arriving = []
        for position, (update, fragment_id) in enumerate(zip(manifest.fragments, self._due, strict=True)):
            if update.codec is not None and position not in self._data:
                name = f"update of fragment {self._schema.fragments[fragment_id].name}"
                self._arriving.append((position, Reassembly(name, update.total_bytes, update.total_bytes)))
        self._move_on()

    def take(self, chunk: ReceivedChunk) -> bool:
        """Append one chunk to the fragment whose turn it is; return whether that is complete now."""
        if not self._arriving or chunk.fragment_id != self._due[self._arriving[0][0]]:
            raise RemoteProtocolError(f"an update's chunk of fragment {chunk.fragment_id} is out of turn")
        self._arriving[0][1].take(chunk)
        return self._move_on()

    def finish(self) -> Commit:
        """Return the commit with its payloads, once all bytes are here."""
        if self._manifest is None:
            raise RemoteProtocolError("an empty update")
        if self._arriving:
            self._arriving[0][1].finish()
        return commit_from_parts(
            dataclasses.replace(self._manifest, fragments=tuple(self._updates)),
            [self._data.get(position) for position in range(len(self._updates))],
        )

    def _move_on(self) -> bool:
        """Move on to the next fragment that has bytes to come."""
        before = len(self._arriving)
        while self._arriving and self._arriving[0][1].complete:
            position, payload = self._arriving.pop(0)
            self._data[position] = payload.finish()
        return len(self._arriving) < before


class StallTimeout:
    """A context that raises TransportError in what it surrounds once nothing has moved for `seconds`. On the loop's thread.

    It is the bound of a call that has no other: one that waits for a connection that never comes, or for bytes that never do,
    is given up and tried again. Each movement restarts the time.
    """

    def __init__(self, seconds: float = STALL_S) -> None:
        self._seconds = seconds
        self._bound = asyncio.timeout(seconds)
        self._open = False

    async def __aenter__(self) -> Self:
        await self._bound.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        try:
            await self._bound.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TransportError(f"nothing has moved for {self._seconds:g} s") from None

    def moved(self) -> None:
        """Restart the time, also from another task. After the end it changes nothing."""
        self._allow(asyncio.get_running_loop().time() + self._seconds)

    async def reading(self, call: grpc.aio.UnaryStreamCall[_Request, _Part]) -> AsyncIterator[_Part]:
        """Yield what comes; each message is a movement."""
        async for part in call:
            self.moved()
            yield part

    def sending(self, parts: Iterable[_Part]) -> Iterable[_Part]:
        """Yield what goes; each message is asked for, and so a movement, when the ones before are on their way.

        When all are, the answer may take as long as the connection lives: a large state is on disk before it comes.
        """
        for part in parts:
            self.moved()
            yield part
        self._allow(None)

    def _allow(self, until: float | None) -> None:
        if self._open and not self._bound.expired():
            self._bound.reschedule(until)


async def _retrying(what: str, attempt: Callable[[], Awaitable[_T]], wanted: Wanted) -> _T:
    """Try until an attempt succeeds, with growing delays; raise the last error when no other try may help."""
    failures, damaged = 0, 0
    while True:
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            blame: EditError = from_rpc(error)
        except (TransportError, RemoteProtocolError) as error:
            blame = error
        if isinstance(blame, RemoteProtocolError):
            damaged += 1
        if not isinstance(blame, (TransportError, RemoteProtocolError)) or damaged >= DAMAGED_TRIES:
            raise blame
        failures += 1
        if failures >= TRIES or not wanted():
            raise blame
        _log.log(logging.INFO if failures == 1 else logging.DEBUG, "%s: %s; trying again", what, blame)
        await asyncio.sleep(min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 10)))
