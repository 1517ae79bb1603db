"""The data connection: contributions up; updates, snapshots and the founder's parameters down and up.

Owns: the calls, resuming a broken stream where it broke, bounded retries, the count of bytes. What arrives is checked by
`peers.carriers.hub.assembly` and `editpb.data_messages`. Must not know: rounds and outcomes (it is told whether a transfer is
still wanted), the control connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from edit.errors import EditError, RemoteProtocolError, TransportError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Snapshot
from editpb import data_pb2, data_pb2_grpc
from editpb.chunks import make_chunks
from editpb.data_messages import (
    contribution_header_to_pb,
    found_header_to_pb,
    received_from_pb,
    snapshot_manifest_from_pb,
    snapshot_request_to_pb,
    update_request_to_pb,
)
from editpb.messages import ContributionHeader, FoundHeader, Received, SnapshotManifest, SnapshotRequest, UpdateRequest
from editpb.status import from_rpc
from peers.carriers.hub.assembly import SnapshotFragment, UpdateAssembly
from peers.carriers.hub.channels import Channels, Traffic
from peers.carriers.hub.snapshot_donors import Donors, Origin, Patience
from peers.carriers.hub.stall_timeout import STALL_S, StallTimeout

__all__ = ["DataPlane", "Wanted"]

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 3.0
DAMAGED_TRIES, TRIES = 3, 40  # with the delays above: about two minutes
ANSWER_S = 30.0  # for an answer of a few bytes, on a connection that may have to be made first
AGGREGATOR = "the aggregator"
_PATIENCE = Patience()
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Part = TypeVar("_Part", bound=Message)
Wanted = Callable[[], bool]


class DataPlane:
    """The data calls of one peer, all on the loop's thread. `wanted` is asked before each further try.

    draw: random numbers in [0, 1), for the choice among donors; patience: with each of them; stall_s: after so long without a
    byte a try has failed.

    All raise: TransportError once not `wanted`; RefusedError; RemoteProtocolError when the coordinator's bytes were wrong three
    times; StaleError when what was asked for is over (the round closed, the update no longer kept).
    """

    def __init__(
        self,
        dial: Channels,
        run_id: str,
        traffic: Traffic,
        draw: Callable[[], float] = random.random,
        patience: Patience = _PATIENCE,
        stall_s: float = STALL_S,
    ) -> None:
        self._stall_s = stall_s
        self._dial = dial
        self._run_id = run_id
        self._traffic = traffic
        self._draw = draw
        self._patience = patience
        self.origin: Origin | None = None  # of the last snapshot
        self._channel: grpc.aio.Channel | None = None
        self._endpoint = ""
        self._retired: list[grpc.aio.Channel] = []  # other endpoints' connections; calls may still use them

    async def close(self) -> None:
        """Close the connections."""
        for channel in [*self._retired, self._channel]:
            if channel is not None:
                await channel.close()

    async def contribute(self, header: ContributionHeader, data: memoryview, wanted: Wanted, *, resuming: bool = False) -> None:
        """Send one fragment; returns once the coordinator has all of it. A broken stream goes on where it broke.

        resuming: the coordinator may have some of it, or all, from before.
        """
        message = contribution_header_to_pb(header)

        async def attempt() -> None:
            nonlocal resuming
            held = await self._probe(message) if resuming else Received(0, False)
            resuming = True
            if held.complete:
                return
            async with self._moving() as moving:
                parts = moving.sending(self._contribution(message, data, held.received_bytes))
                receipt = received_from_pb(self._down(await self._stub().Contribute(parts)), header.total_bytes)
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
                async with self._moving() as moving:
                    async for part in moving.reading(call):
                        if begun and not assembly.take(self._down(part)):
                            continue
                        if not begun:
                            assembly.begin(self._down(part))
                            begun = True
                        arrived()
            finally:
                call.cancel()
            assembly.finish()

        await _retrying(f"update {assembly.outer_step}", attempt, wanted)

    async def describe(self, schema: Schema | None, wanted: Wanted) -> SnapshotManifest:
        """What the snapshot of the latest commit consists of. schema: None for whoever does not know it yet."""

        async def attempt() -> SnapshotManifest:
            request = self._up(data_pb2.SnapshotManifestRequest(run_id=self._run_id))
            manifest = snapshot_manifest_from_pb(
                self._down(await self._stub().DescribeSnapshot(request, timeout=ANSWER_S)), schema
            )
            if combine(manifest.fragment_hash) != manifest.digest:
                raise RemoteProtocolError("a snapshot's digest is not that of its fragments")
            return manifest

        return await _retrying("snapshot", attempt, wanted)

    async def latest(self, schema: Schema, wanted: Wanted) -> int:
        """The coordinator's outer step of this moment; views may tell of it later."""
        return (await self.describe(schema, wanted)).outer_step

    async def snapshot(self, manifest: SnapshotManifest, shards: Sequence[Shard], wanted: Wanted) -> Snapshot:
        """The outer parameters of `manifest`: of each fragment this rank's shard; whole ones are held against their hashes.

        Whole ones come from its donors as long as there are any, everything else from the aggregator.
        """
        donors = Donors(manifest, self._run_id, self._dial, self._traffic, self._draw, self._patience)
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
                for chunk in make_chunks(theta.numpy().data):
                    part = data_pb2.FragmentChunk(fragment_id=fragment.fragment_id, chunk=chunk)
                    yield self._up(data_pb2.FoundPart(chunk=part))

        async def attempt() -> None:
            async with self._moving() as moving:
                self._down(await self._stub().Found(moving.sending(parts())))

        await _retrying("founding", attempt, wanted)

    async def _remind(self, manifest: SnapshotManifest) -> None:
        """Ask the aggregator for the empty end of a fragment now and then: it keeps the snapshot for those who ask, and would
        else have forgotten it when the last donor breaks off."""
        end = SnapshotRequest(
            run_id=self._run_id,
            outer_step=manifest.outer_step,
            fragment_id=0,
            offset=4 * manifest.schema.fragments[0].numel,
        )
        while True:
            await asyncio.sleep(self._patience.remind_s)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in self._stub().FetchSnapshot(self._up(snapshot_request_to_pb(end))):
                    pass

    async def _snapshot_fragment(self, manifest: SnapshotManifest, shard: Shard, donors: Donors, wanted: Wanted) -> Tensor:
        fragment = shard.fragment
        if shard.numel == 0:
            return torch.empty(0)
        into = SnapshotFragment(shard, manifest.fragment_hash[fragment.fragment_id])
        if (theta := await donors.read(shard, into)) is not None:
            return theta
        donors.sources[AGGREGATOR] = None

        async def attempt() -> Tensor:
            request = SnapshotRequest(
                run_id=self._run_id,
                outer_step=manifest.outer_step,
                fragment_id=fragment.fragment_id,
                offset=into.received,
                boxes=None if shard.is_whole else shard.boxes,
            )
            call = self._stub().FetchSnapshot(self._up(snapshot_request_to_pb(request)))
            try:
                async with self._moving() as moving:
                    async for chunk in moving.reading(call):
                        into.take(self._down(chunk))
                return into.finish()
            except RemoteProtocolError:
                into.clear()
                raise
            finally:
                call.cancel()

        return await _retrying(f"snapshot of fragment {fragment.name}", attempt, wanted)

    async def _probe(self, header: data_pb2.ContributionHeader) -> Received:
        reply = self._down(await self._stub().Probe(self._up(header), timeout=ANSWER_S))
        held = received_from_pb(reply, header.total_bytes)
        _log.info("fragment %d: %d of %d bytes have arrived", header.fragment_id, held.received_bytes, header.total_bytes)
        return held

    def _contribution(
        self, header: data_pb2.ContributionHeader, data: memoryview, start: int
    ) -> Iterator[data_pb2.ContributePart]:
        yield self._up(data_pb2.ContributePart(header=header))
        for chunk in make_chunks(data, start=start):
            yield self._up(data_pb2.ContributePart(chunk=chunk))

    def _stub(self) -> data_pb2_grpc.DataStub:
        if self._channel is None or self._endpoint != self._dial.endpoint:
            self._retired += [self._channel] if self._channel is not None else []
            self._channel, self._endpoint = self._dial.channel(), self._dial.endpoint
        return data_pb2_grpc.DataStub(self._channel)

    def _moving(self) -> StallTimeout:
        return StallTimeout(self._stall_s)

    def _up(self, message: _Part) -> _Part:
        self._traffic.sent += message.ByteSize()
        return message

    def _down(self, message: _Part) -> _Part:
        self._traffic.received += message.ByteSize()
        return message


async def _retrying(what: str, attempt: Callable[[], Awaitable[_T]], wanted: Wanted) -> _T:
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
