"""The data plane: contributions up; updates, snapshots and the founder's parameters down and up.

A broken stream resumes where it broke; a call is tried again a bounded number of times, while it is still wanted; a call in
which nothing moves for a minute is given up (`StallTimeout`). `Pace` says how many bytes a call carries: on a slow link few, so
that heartbeats do not wait behind them. What is read is put together by `assemblies`, which does no I/O. Which round or outer
step is worth asking for is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, cast

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from edit.errors import EditError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import EncodedTensor, Snapshot, round_number
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import (
    contribution_header_from_pb,
    contribution_header_to_pb,
    contribution_request_to_pb,
    found_header_to_pb,
    received_from_pb,
    scores_to_pb,
    snapshot_manifest_from_pb,
    snapshot_request_to_pb,
    update_request_to_pb,
)
from editpb.limits import CHUNK_BYTES, MAX_COUNT, MAX_READ_S
from editpb.messages import (
    ContributionHeader,
    FoundHeader,
    Received,
    ScoreReport,
    SnapshotManifest,
    SnapshotRequest,
)
from editpb.transport.chunk_frames import ReceivedChunk, contribute_frames, data_stub
from editpb.transport.chunks import make_chunks
from editpb.transport.status import from_rpc
from peers.carriers.hub.assemblies import ContributionAssembly, SnapshotAssembly, UpdateAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.pace import Pace
from peers.carriers.hub.range_calls import read_in_ranges
from peers.carriers.hub.snapshot_donors import Donors, Patience
from peers.carriers.run_connection import Origin, Traffic

__all__ = ["STALL_S", "DataCalls", "StallTimeout", "Wanted", "once"]

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 3.0
DAMAGED_TRIES, TRIES = 3, 40  # with the delays above: about two minutes
ANSWER_S = 30.0  # for an answer of a few bytes, on a connection that may have to be made first
OWN_STALL_S = 10.0  # for this peer's own host, which is near
OWN_COMES_S = 120.0  # that this peer's own host may still be fetching an update; then the aggregator is asked
STALL_S = 60.0  # far longer than one chunk takes
FOUNDING_CHUNK_BYTES = 256 << 10  # small: a founder of which nothing arrives for a minute hands over, and a link may be slow
AGGREGATOR = "the aggregator"
_PATIENCE = Patience()
_MOST_SHARDS = 1 << 20  # of one commit, that a scorer hears of
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Part = TypeVar("_Part")
_Request = TypeVar("_Request")
_Message = TypeVar("_Message", bound=Message)
_UpdatePart: TypeAlias = data_pb2.UpdatePart | ReceivedChunk
_UpdateCall: TypeAlias = grpc.aio.UnaryStreamCall[data_pb2.UpdateRequest, _UpdatePart]
_ContributionCall: TypeAlias = grpc.aio.UnaryStreamCall[data_pb2.ContributionRequest, tensors_pb2.Chunk]
_SnapshotCall: TypeAlias = grpc.aio.UnaryStreamCall[data_pb2.SnapshotRequest, tensors_pb2.Chunk]
Wanted = Callable[[], bool]


def once() -> bool:
    """No further try is wanted (`Wanted`)."""
    return False


class DataCalls:
    """The data calls of one rank to one aggregator, all on the loop's thread. `wanted` is asked before each further try.

    All raise: TransportError when the last try failed or no further one is wanted; RefusedError; RemoteProtocolError when the
    aggregator's bytes were wrong three times; OutdatedError when what was asked for is over (StaleError: the round closed;
    GoneError: the update is no longer kept).

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
        self._pace_up, self._pace_down, self._pace_own = (Pace(lambda: channels.rtt_s) for _ in range(3))

    async def contribute(
        self,
        header: ContributionHeader,
        data: memoryview,
        wanted: Wanted,
        *,
        resuming: bool = False,
        sent: Callable[[], object] = lambda: None,
        ahead: Callable[[], int] = lambda: MAX_COUNT,
    ) -> None:
        """Send one fragment; return once the aggregator has all of it. A broken stream resumes where it broke.

        resuming: the aggregator may have some of it, or all, from before. sent: called when all bytes are on their way.
        ahead: returns how many bytes may go before they are answered.
        """
        message = contribution_header_to_pb(header)
        total = header.total_bytes
        held = Received(0, False)

        def parts(start: int, stop: int, clock: _Stopwatch) -> Iterator[data_pb2.ContributePart | bytes]:
            yield self._up(data_pb2.ContributePart(header=message))
            for frame in contribute_frames(data[:stop], start=start, chunk_bytes=self._channels.limit.chunk_bytes):
                self._traffic.sent += len(frame)
                yield frame
            clock.split()
            if stop == total:
                sent()

        async def attempt() -> None:
            nonlocal resuming, held
            held = await self._probe(message) if resuming else held
            resuming = True
            while not held.complete:
                clock = _Stopwatch()
                async with StallTimeout(self._stall_s) as moving:
                    with self._pace_up.piece(held.received_bytes, total, max(ahead(), CHUNK_BYTES)) as piece:
                        paced = self._channels.limit.paced(parts(piece.start, piece.stop, clock))
                        sending = moving.sending(paced, ends=piece.last)
                        reply = await self._stub().Contribute(sending)
                held = received_from_pb(self._down(reply), total)
                if held.received_bytes < piece.stop or (piece.last and not held.complete):
                    raise TransportError(f"the stream ended after {held.received_bytes} of {total} bytes")
                piece.arrived(clock.split_s if piece.last else clock.seconds())  # the last answer waits for what is measured

        what = f"round {round_number(header.round_id)}, fragment {header.fragment_id}"
        await _retrying(self._channels, what, attempt, wanted, lambda: held.received_bytes)

    async def update(self, assembly: UpdateAssembly, wanted: Wanted, arrived: Callable[[], None]) -> None:
        """Complete `assembly`. arrived: called when its manifest is in, and each time one of its fragments is.

        With a round that may come to it, what is known of it is read before the commit; GoneError when that round came to
        nothing.
        """

        def ask(start: int, limit: int) -> _UpdateCall:
            message = update_request_to_pb(assembly.request(self._run_id, start, limit))
            call: _UpdateCall = self._stub(beside=self._pace_up.slow).FetchUpdate(self._up(message))
            return call

        def take(part: _UpdatePart) -> None:
            if isinstance(part, ReceivedChunk):
                self._traffic.received += len(part.data)
            else:
                self._down(part)
            if assembly.take(part):
                arrived()

        async def open_all() -> None:
            while assembly.open_one():
                arrived()
                await asyncio.sleep(0)  # heartbeats

        async def attempt() -> None:
            await open_all()  # the stream that brought the key may have broken
            begun = assembly.received > 0 and assembly.manifest is None  # at the aggregator, ahead of the commit
            if not begun and (own := self._channels.taken()) is not None:
                await self._from_own_host(own, assembly, take)
            async with StallTimeout(self._stall_s) as moving:
                while assembly.round_id and assembly.manifest is None:
                    await self._read_ahead(assembly, ask, moving, take)
                await open_all()
                await read_in_ranges(assembly, self._pace_down, ask, moving.read, take)
            assembly.finish()

        await _retrying(self._channels, f"update {assembly.outer_step}", attempt, wanted, lambda: assembly.received)

    async def _from_own_host(
        self, channel: grpc.aio.Channel, assembly: UpdateAssembly, take: Callable[[_UpdatePart], None]
    ) -> None:
        """Read an update that this peer's own host has, or is fetching. What it lacks, the aggregator has: the same bytes."""
        stub = self._channels.bound(data_stub(channel), taken=True)

        def ask(start: int, limit: int) -> _UpdateCall:
            call: _UpdateCall = stub.FetchUpdate(self._up(update_request_to_pb(assembly.request(self._run_id, start, limit))))
            return call

        clock = asyncio.get_running_loop().time
        give_up_at = clock() + OWN_COMES_S
        try:
            while True:
                try:
                    async with StallTimeout(OWN_STALL_S) as moving:
                        return await read_in_ranges(assembly, self._pace_own, ask, moving.read, take)
                except grpc.aio.AioRpcError as error:
                    if not isinstance(from_rpc(error), StaleError) or clock() > give_up_at:
                        raise
                await asyncio.sleep(FIRST_DELAY_S)
        except (grpc.aio.AioRpcError, TransportError, RemoteProtocolError) as error:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            _log.info("update %d is not read from this peer's own host: %s", assembly.outer_step, why)
            self._channels.not_taken()

    async def _read_ahead(
        self,
        assembly: UpdateAssembly,
        ask: Callable[[int, int], _UpdateCall],
        moving: StallTimeout,
        take: Callable[[_UpdatePart], None],
    ) -> None:
        """Read one call of an update whose manifest is not here: what there is of it ahead of its commit, or what follows that.

        The call waits for its first message, and what comes then is there: its time is the link's.
        """
        before, limit, clock = assembly.received, self._pace_down.bytes, None
        call = ask(before, limit)
        try:
            while (part := await moving.read(call)) is not None:
                take(part)
                clock = clock or _Stopwatch()
        finally:
            call.cancel()
        if assembly.manifest is None and assembly.received == before:
            raise TransportError("nothing has come ahead of the commit for a while")
        if clock is not None and assembly.received > before:
            self._pace_down.carried(assembly.received - before, clock.seconds(), asked=limit)

    async def describe(self, schema: Schema | None, wanted: Wanted) -> SnapshotManifest:
        """Return what the snapshot of the latest commit consists of. schema: None where it is not known yet."""

        async def attempt() -> SnapshotManifest:
            request = self._up(data_pb2.SnapshotManifestRequest(run_id=self._run_id))
            reply = await self._answer(self._stub().DescribeSnapshot(request, timeout=ANSWER_S))
            manifest = snapshot_manifest_from_pb(self._down(reply), schema)
            if combine(manifest.fragment_hash) != manifest.digest:
                raise RemoteProtocolError("a snapshot's digest is not that of its fragments")
            return manifest

        return await _retrying(self._channels, "snapshot", attempt, wanted)

    async def snapshot(self, manifest: SnapshotManifest, shards: Sequence[Shard], wanted: Wanted) -> Snapshot:
        """Return the outer parameters of `manifest`, of each fragment this rank's shard; an empty tensor for an empty one.

        Whole fragments are checked against their hashes, and come from the manifest's donors as long as there are any;
        everything else comes from the aggregator.
        """
        held = [shard for shard in shards if shard.numel]
        whole = SnapshotAssembly(manifest, [shard for shard in held if shard.is_whole])
        cut = SnapshotAssembly(manifest, [shard for shard in held if not shard.is_whole])
        donors = Donors(manifest, self._run_id, self._channels, self._traffic, self._draw, self._patience)
        reminder = asyncio.create_task(self._remind(manifest))
        try:
            await donors.read(whole)
        finally:
            reminder.cancel()
            await asyncio.wait([reminder])
            await donors.close()
        for assembly in (whole, cut):
            if not assembly.complete:
                donors.sources[AGGREGATOR] = None
                await self._read_snapshot(assembly, wanted)
        self.origin = Origin(manifest.outer_step, manifest.digest, tuple(donors.sources))
        sources = ", ".join(donors.sources) or "this peer itself: nothing was fetched"
        _log.info("snapshot of outer step %d from %s", manifest.outer_step, sources)
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        fragments = [(whole if shard.is_whole else cut).tensor(shard) if shard.numel else none for shard in shards]
        run_step = max(manifest.outer_step, manifest.run_outer_step)
        return Snapshot(manifest.outer_step, manifest.digest, tuple(fragments), run_step)

    async def _read_snapshot(self, assembly: SnapshotAssembly, wanted: Wanted) -> None:
        """Complete it from the aggregator."""

        def ask(start: int, limit: int) -> _SnapshotCall:
            message = snapshot_request_to_pb(assembly.request(self._run_id, start, limit))
            call: _SnapshotCall = self._stub().FetchSnapshot(self._up(message), timeout=MAX_READ_S)
            return call

        async def attempt() -> None:
            before = assembly.received
            try:
                async with StallTimeout(self._stall_s) as moving:
                    await read_in_ranges(
                        assembly, self._pace_down, ask, moving.read, lambda chunk: assembly.take(self._down(chunk))
                    )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or assembly.received == before:
                    raise
                await attempt()
            except RemoteProtocolError:
                assembly.clear_unfinished()
                raise

        await _retrying(self._channels, "snapshot", attempt, wanted, lambda: assembly.received)

    async def contributions(self, outer_step: int, schema: Schema, wanted: Wanted) -> list[ContributionHeader]:
        """Return what was merged in the commit to an outer step, shard by shard; for a scorer. GoneError: it is not kept."""

        async def attempt() -> list[ContributionHeader]:
            found: dict[tuple[str, int, int], ContributionHeader] = {}
            request = data_pb2.ContributionsRequest(run_id=self._run_id, outer_step=outer_step)
            call = self._stub().DescribeContributions(self._up(request), timeout=MAX_READ_S)
            async with StallTimeout(self._stall_s) as moving:
                while isinstance(message := await moving.read(call), data_pb2.ContributionHeader):
                    header = contribution_header_from_pb(self._down(message), schema)
                    if header.schema_hash != schema.schema_hash:
                        raise RemoteProtocolError(f"a contribution of {header.peer_id} is to another model")
                    key = header.peer_id, header.fragment_id, header.rank
                    if key in found or len(found) == _MOST_SHARDS:
                        raise RemoteProtocolError(f"fragment {key[1]} of {key[0]}, rank {key[2]}: twice, or too many shards")
                    found[key] = header
            return list(found.values())

        return await _retrying(self._channels, "contributions", attempt, wanted)

    async def contribution(self, header: ContributionHeader, outer_step: int, wanted: Wanted) -> EncodedTensor:
        """Return the payload of a shard of what was merged in the commit to an outer step; as `contributions`."""
        assembly = ContributionAssembly(header, outer_step)

        def ask(start: int, limit: int) -> _ContributionCall:
            message = contribution_request_to_pb(assembly.request(self._run_id, start, limit))
            call: _ContributionCall = self._stub().FetchContribution(self._up(message), timeout=MAX_READ_S)
            return call

        async def attempt() -> EncodedTensor:
            try:
                async with StallTimeout(self._stall_s) as moving:
                    await read_in_ranges(
                        assembly, self._pace_down, ask, moving.read, lambda chunk: assembly.take(self._down(chunk))
                    )
                return assembly.payload()
            except RemoteProtocolError:
                assembly.clear()
                raise

        return await _retrying(self._channels, "contribution", attempt, wanted, lambda: assembly.received)

    async def score(
        self,
        outer_step: int,
        scores: Mapping[str, float],
        wanted: Wanted,
        *,
        sign: Callable[[ScoreReport], ScoreReport] = lambda report: report,
    ) -> None:
        """Say what the contributions to an outer step are worth. StaleError: it is not the last one any more."""
        report = sign(ScoreReport(run_id=self._run_id, outer_step=outer_step, scores=scores))

        async def attempt() -> None:
            self._down(await self._answer(self._stub().Score(self._up(scores_to_pb(report)), timeout=ANSWER_S)))

        await _retrying(self._channels, "scores", attempt, wanted)

    async def found(self, schema: Schema, fragments: Sequence[Tensor], digest: str, wanted: Wanted) -> None:
        """Send the run's initial parameters: one flat fp32 tensor per fragment. StaleError when the run has some already."""
        message = found_header_to_pb(FoundHeader(run_id=self._run_id, schema_hash=schema.schema_hash, digest=digest))
        total, reached, limit = 4 * schema.numel, 0, self._channels.limit

        def parts(start: int, stop: int) -> Iterator[data_pb2.FoundPart]:
            yield self._up(data_pb2.FoundPart(header=message))
            for fragment, theta in zip(schema.fragments, fragments, strict=True):
                size = 4 * fragment.numel
                if size > 0 and start < size and stop > 0:
                    data = memoryview(theta.numpy().data).cast("B")[:stop]
                    for chunk in make_chunks(data, min(FOUNDING_CHUNK_BYTES, limit.chunk_bytes), start=max(0, start)):
                        part = data_pb2.FragmentChunk(fragment_id=fragment.fragment_id, chunk=chunk)
                        yield self._up(data_pb2.FoundPart(chunk=part))
                start, stop = start - size, stop - size

        async def send(start: int, stop: int) -> Received:
            async with StallTimeout(self._stall_s) as moving:
                reply = self._down(
                    await self._stub().Found(moving.sending(limit.paced(parts(start, stop)), ends=stop == total))
                )
            return received_from_pb(reply, total)

        async def attempt() -> None:
            nonlocal reached
            held = await send(0, 0)  # some of it may be here, also from before the connections broke
            while not held.complete:
                clock = _Stopwatch()
                with self._pace_up.piece(held.received_bytes, total) as piece:
                    held = await send(piece.start, piece.stop)
                reached = held.received_bytes
                if held.received_bytes < piece.stop or (piece.last and not held.complete):
                    raise TransportError(f"the stream ended after {held.received_bytes} of {total} bytes")
                if not piece.last:
                    piece.arrived(clock.seconds())

        await _retrying(self._channels, "founding", attempt, wanted, lambda: reached)

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

    async def _probe(self, header: data_pb2.ContributionHeader) -> Received:
        reply = self._down(await self._answer(self._stub().Probe(self._up(header), timeout=ANSWER_S)))
        held = received_from_pb(reply, header.total_bytes)
        _log.info("fragment %d: %d of %d bytes have arrived", header.fragment_id, held.received_bytes, header.total_bytes)
        return held

    async def _answer(self, call: Awaitable[_T]) -> _T:
        """Return the answer to a small question; on a connection that is there it takes a round trip."""
        clock = _Stopwatch()
        answer = await call
        self._channels.answered(clock.seconds())
        return answer

    def _stub(self, *, beside: bool = False) -> data_pb2_grpc.DataStub:
        """Return a stub. beside: over a connection of its own, where receipts and requests would wait behind an update's bytes,
        which come while a contribution goes up."""
        return self._channels.bound(data_stub(self._channels.beside() if beside else self._channels.data()))

    def _up(self, message: _Message) -> _Message:
        self._traffic.sent += message.ByteSize()
        return message

    def _down(self, message: _Message) -> _Message:
        self._traffic.received += message.ByteSize()
        return message


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

    async def read(self, call: grpc.aio.UnaryStreamCall[_Request, _Part]) -> _Part | None:
        """Return the next message, which is a movement; None at the end."""
        part = await call.read()
        self.moved()
        return None if part is grpc.aio.EOF else cast(_Part, part)

    async def sending(self, parts: AsyncIterable[_Part], *, ends: bool = True) -> AsyncIterator[_Part]:
        """Yield what goes; each message is asked for, and so a movement, when the ones before are on their way.

        ends: with these parts everything is there. Then the answer may take as long as the connection lives: a large state is
        on disk before it comes.
        """
        async for part in parts:
            self.moved()
            yield part
            self.moved()  # it may have to wait for its turn
        if ends:
            self._allow(None)

    def _allow(self, until: float | None) -> None:
        if self._open and not self._bound.expired():
            self._bound.reschedule(until)


class _Stopwatch:
    """Seconds since it was made, on the loop's clock."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self.split_s = 0.0  # at the last `split`

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._now() - self._began

    def split(self) -> None:
        """Keep the seconds so far."""
        self.split_s = self.seconds()


async def _retrying(
    channels: Channels, what: str, attempt: Callable[[], Awaitable[_T]], wanted: Wanted, reached: Callable[[], int] = lambda: 0
) -> _T:
    """Try until an attempt succeeds, with growing delays; raise the last error when no other try may help.

    A try at a place where the aggregator is no longer is given up, and the next one made at once.
    reached: bytes so far; a try that has brought some begins the count of tries anew.
    """
    failures, damaged = 0, 0
    while True:
        before = reached()
        try:
            async with channels.while_here():
                return await attempt()
        except grpc.aio.AioRpcError as error:
            blame: EditError = from_rpc(error)
        except (TransportError, RemoteProtocolError) as error:
            blame = error
        if isinstance(blame, RemoteProtocolError):
            damaged += 1
        if not isinstance(blame, (TransportError, RemoteProtocolError)) or damaged >= DAMAGED_TRIES:
            raise blame
        failures = 1 if reached() > before else failures + 1
        if failures >= TRIES or not wanted():
            raise blame
        _log.log(logging.INFO if failures == 1 else logging.DEBUG, "%s: %s; trying again", what, blame)
        await channels.pause(min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 10)))
