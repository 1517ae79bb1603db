"""An in-process coordinator that speaks the real protocol and does what a test's script says.

It keeps a view, an outer state and the published updates; it merges only when told to. Faults are counters that a test sets:
each broken or damaged answer counts one down. Runs on a loop of its own; the test's thread reads and changes it under the lock.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import grpc
import torch
from torch import Tensor

from edit.boxes import Region, partition_fault
from edit.codecs import cut
from edit.config import RunConfig
from edit.merge import Part, measure, whole_norm
from edit.outer import digest, fragment_hash
from edit.outer_state import Measured, OuterState
from edit.records import Commit, EncodedTensor
from edit.schema import Schema
from editpb import control_pb2_grpc, data_pb2, data_pb2_grpc, tensors_pb2
from editpb.convert import (
    contribution_header_from_pb,
    make_chunks,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
)
from editpb.messages import (
    ContributionHeader,
    Expel,
    Heartbeat,
    Hello,
    RunPhase,
    SnapshotManifest,
    View,
)
from peers.bridge import Bridge
from tests.support.fake_control import RUN_ID, FakeControl

__all__ = ["FIRST_ROUND", "RUN_ID", "FakeCoordinator", "Slot"]

FIRST_ROUND = 1_000_001
Slot = tuple[int, int, int]  # round_id, fragment_id, rank


class FakeCoordinator:
    """Context manager. `script`: called under the lock, on the loop, when a peer has delivered every fragment of a round."""

    def __init__(self, config: RunConfig, schema: Schema, theta: Sequence[Tensor] | None, *, peer_id: str = "a") -> None:
        self.bridge = Bridge("fake-coordinator")
        self.config = config
        self.schema = schema
        self.peer_id = peer_id
        self.state = None if theta is None else OuterState(schema, config, theta)
        phase = RunPhase.FOUNDING if theta is None else RunPhase.COLLECTING
        self.view = View(
            sequence=1, phase=phase, round_id=0 if theta is None else FIRST_ROUND, digest=self._digest(), found=theta is None
        )
        self.script: Callable[[FakeCoordinator], None] = lambda fake: None
        self.on_heartbeat: Callable[[FakeCoordinator, Heartbeat], None] = lambda fake, beat: None
        self.updates: dict[int, Commit] = {}
        self.hellos: list[Hello] = []
        self.heartbeats: list[Heartbeat] = []
        self.goodbyes: list[str] = []
        self.founded: list[Tensor] = []
        self.expel: Expel | None = None
        self.received: defaultdict[Slot, bytearray] = defaultdict(bytearray)
        self.offered: dict[Slot, ContributionHeader] = {}
        self.headers: dict[Slot, ContributionHeader] = {}  # of those that are complete
        self.starts: list[int] = []  # offsets at which contribution and snapshot streams began
        self.break_contribution_after: list[int] = []  # bytes after which the next streams break
        self.break_snapshot_after: list[int] = []
        self.refuse_contributions: list[tuple[grpc.StatusCode, str]] = []
        self.refuse_attendance: list[tuple[grpc.StatusCode, str]] = []
        self.damage_updates = 0
        self.damage_snapshots = 0
        self.lose_snapshots = 0
        self.refuse_update: Callable[[Sequence[Region] | None], tuple[grpc.StatusCode, str] | None] = lambda regions: None
        self.broken_gates: set[int] = set()
        self.asked_for: list[Sequence[Region] | None] = []  # in FetchUpdate
        self._gates: dict[int, asyncio.Event] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.port = 0
        self._credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None
        self._changed: set[asyncio.Event] = set()

    def __enter__(self) -> FakeCoordinator:
        self.bridge.__enter__()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.bridge.__exit__(kind, error, trace)

    # ---- what a test's thread does ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen on 127.0.0.1, on the same port as before when it was stopped."""
        self.port = self.bridge.call(self._start(), timeout=10)

    def stop(self) -> None:
        """Stop at once, as a killed process would."""
        self.bridge.call(self._stop(), timeout=10)

    def show(self, **changes: object) -> None:
        """Change the view and send it to whoever attends."""
        self.bridge.change(lambda: self.change_view(**changes))

    def await_(self, look: Callable[[FakeCoordinator], object]) -> None:
        """Wait until `look(self)` is true. Fails the test after ten seconds."""
        assert self.bridge.wait(lambda: look(self) or None, timeout=10) is not None, "the fake coordinator waited in vain"

    def hold_update(self, fragment_id: int) -> None:
        """Updates stop before this fragment until it is released; `await_held` waits for the first that has."""
        self._gates[fragment_id] = asyncio.Event()

    def await_held(self) -> None:
        """Wait until an update has stopped where it is held."""
        self.await_(lambda fake: fake.calls["held"])

    def release_update(self, fragment_id: int, *, broken: bool = False) -> None:
        """Let the held updates go on, or their streams break."""
        if broken:
            self.broken_gates.add(fragment_id)
        self.bridge.post(self._gates.pop(fragment_id).set)

    async def gate(self, fragment_id: int) -> bool:
        """Wait while this fragment is held (loop's thread); returns whether the stream shall break here, once."""
        if fragment_id in self._gates:
            gate = self._gates[fragment_id]
            self.bridge.change(lambda: self.calls.update(held=self.calls["held"] + 1))
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.bridge.change(lambda: self.calls.update(abandoned=self.calls["abandoned"] + 1))
                raise
        broken = fragment_id in self.broken_gates
        self.broken_gates.discard(fragment_id)
        return broken

    # ---- what scripts do (under the lock) --------------------------------------------------------------------------------

    def commit(self, reason: str = "all in") -> None:
        """Merge the open round's contributions for real, publish, open the next round."""
        state, round_id = self.state, self.view.round_id
        assert state is not None
        staged = [state.stage(state.reduce(i, [self._measured(round_id, i)])) for i in state.due]
        done = state.commit(round_id, reason, staged)
        self.updates[done.outer_step] = done
        self.change_view(
            outer_step=done.outer_step,
            digest=done.digest,
            round_id=round_id + 1,
            oldest_update=min(self.updates),
            last_round_id=round_id,
            last_committed=True,
            last_reason=reason,
        )

    def abort(self, reason: str) -> None:
        """Lose the open round and open the next one."""
        round_id = self.view.round_id
        self.change_view(round_id=round_id + 1, last_round_id=round_id, last_committed=False, last_reason=reason)

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _digest(self) -> str:
        return "" if self.state is None else self.state.digest

    def change_view(self, **changes: object) -> None:
        """Change the view and send it (under the lock; `show` is for a test's thread)."""
        self.view = dataclasses.replace(self.view, **{"sequence": self.view.sequence + 1, **changes})  # type: ignore[arg-type]
        self.bridge.post(self._wake)

    def _wake(self) -> None:
        for event in self._changed:
            event.set()

    def _parts(self, round_id: int, fragment_id: int) -> list[tuple[ContributionHeader, Region, EncodedTensor]]:
        """By rank, of the newest attempt."""
        fragment = self.schema.fragments[fragment_id]
        slots = [slot for slot in sorted(self.headers) if slot[:2] == (round_id, fragment_id)]
        newest = max((self.headers[slot].attempt for slot in slots), default=0)
        return [
            (header, Region(fragment, header.boxes), EncodedTensor(header.codec, header.numel, self.received[slot]))
            for slot in slots
            if (header := self.headers[slot]).attempt == newest
        ]

    def _measured(self, round_id: int, fragment_id: int) -> Measured:
        parts = self._parts(round_id, fragment_id)
        header = parts[0][0]
        return Measured(
            peer_id=header.peer_id,
            inner_steps=header.inner_steps,
            tokens=header.tokens,
            norm=whole_norm(measure(payload) for _, _, payload in parts),
            payload=tuple(Part(region, payload) for _, region, payload in parts),
        )

    async def _start(self) -> int:
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(FakeControl(self), server)
        data_pb2_grpc.add_DataServicer_to_server(_Data(self), server)
        port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server
        return int(port)

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def complete(self, round_id: int) -> bool:
        """Whether every due fragment of a round is in, all parts of one attempt."""
        assert self.state is not None
        return all(
            partition_fault(self.schema.fragments[i], [region.boxes for _, region, _ in self._parts(round_id, i)]) is None
            for i in self.state.due
        )


class _Data(data_pb2_grpc.DataServicer):
    def __init__(self, fake: FakeCoordinator) -> None:
        self._fake = fake

    async def Contribute(
        self, requests: AsyncIterator[data_pb2.ContributePart], context: grpc.aio.ServicerContext
    ) -> data_pb2.ContributionReceipt:
        fake = self._fake
        fake.calls["Contribute"] += 1
        header = contribution_header_from_pb((await anext(requests)).header, fake.schema)
        if fake.refuse_contributions:
            await context.abort(*fake.refuse_contributions.pop(0))
        slot = header.round_id, header.fragment_id, header.rank
        if header.round_id != fake.view.round_id or header.outer_step != fake.view.outer_step:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"round {header.round_id} is closed")
        if not fake.bridge.change(lambda: self._offer(slot, header)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer attempt is on its way")
        into, limit = fake.received[slot], fake.break_contribution_after.pop(0) if fake.break_contribution_after else None
        fake.bridge.change(lambda: fake.starts.append(len(into)))
        async for part in requests:
            assert part.chunk.offset == len(into)
            into += part.chunk.data
            if limit is not None and len(into) >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        fake.bridge.change(lambda: self._contributed(slot, header))
        return data_pb2.ContributionReceipt(complete=len(into) == header.total_bytes, received_bytes=len(into))

    def _offer(self, slot: Slot, header: ContributionHeader) -> bool:
        """Whether this attempt is the newest; what an older one left is thrown away."""
        fake, before = self._fake, self._fake.offered.get(slot, header)
        if header.attempt < before.attempt:
            return False
        if header.attempt > before.attempt:
            fake.headers.pop(slot, None)
            fake.received[slot] = bytearray()
        fake.offered[slot] = header
        return True

    def _contributed(self, slot: Slot, header: ContributionHeader) -> None:
        fake = self._fake
        if fake.offered[slot].attempt != header.attempt:
            return
        fake.headers[slot] = header
        if slot[0] == fake.view.round_id and fake.complete(header.round_id):
            fake.script(fake)

    async def Probe(self, request: data_pb2.ContributionHeader, context: grpc.aio.ServicerContext) -> data_pb2.ProbeReply:
        self._fake.calls["Probe"] += 1
        held = len(self._fake.received[request.round_id, request.fragment_id, request.rank])
        return data_pb2.ProbeReply(received_bytes=held, complete=held == request.total_bytes)

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        fake = self._fake
        fake.calls["FetchUpdate"] += 1
        commit, regions = fake.updates.get(request.outer_step), update_request_from_pb(request, fake.schema).regions
        if commit is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
            return
        if (refusal := fake.refuse_update(regions)) is not None:
            await context.abort(*refusal)
        commit = _cut(commit, regions) if regions is not None else commit
        fake.asked_for.append(regions)
        yield data_pb2.UpdatePart(manifest=update_manifest_to_pb(commit))
        for fragment in commit.fragments:
            if await fake.gate(fragment.fragment_id):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            for chunk in make_chunks(fragment.payload.data if fragment.payload is not None else b""):
                if fake.damage_updates > 0:
                    fake.damage_updates -= 1
                    chunk = _damaged(chunk)
                yield data_pb2.UpdatePart(chunk=data_pb2.FragmentChunk(fragment_id=fragment.fragment_id, chunk=chunk))

    async def DescribeSnapshot(
        self, request: data_pb2.SnapshotManifestRequest, context: grpc.aio.ServicerContext
    ) -> data_pb2.SnapshotManifest:
        fake = self._fake
        fake.calls["DescribeSnapshot"] += 1
        assert fake.state is not None
        return snapshot_manifest_to_pb(
            SnapshotManifest(
                outer_step=fake.state.outer_step,
                digest=fake.state.digest,
                schema=fake.schema,
                fragment_hash=tuple(fragment_hash(part) for part in fake.state.theta),
            )
        )

    async def FetchSnapshot(
        self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tensors_pb2.Chunk]:
        fake = self._fake
        fake.calls["FetchSnapshot"] += 1
        if fake.lose_snapshots > 0:
            fake.lose_snapshots -= 1
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
        fake.starts.append(request.offset)
        assert fake.state is not None
        sent, limit = 0, fake.break_snapshot_after.pop(0) if fake.break_snapshot_after else None
        wanted = snapshot_request_from_pb(request, fake.schema)
        part = Region(fake.schema.fragments[wanted.fragment_id], wanted.boxes).take(fake.state.theta[wanted.fragment_id])
        for chunk in make_chunks(part.numpy().data, 1024, start=wanted.offset):
            if limit is not None and sent >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            if fake.damage_snapshots > 0:
                fake.damage_snapshots -= 1
                chunk = _damaged(chunk)
            sent += len(chunk.data)
            yield chunk

    async def Found(
        self, requests: AsyncIterator[data_pb2.FoundPart], context: grpc.aio.ServicerContext
    ) -> data_pb2.FoundReply:
        fake = self._fake
        fake.calls["Found"] += 1
        header = (await anext(requests)).header
        data = [bytearray() for _ in fake.schema.fragments]
        async for part in requests:
            data[part.chunk.fragment_id] += part.chunk.chunk.data
        fake.bridge.change(lambda: self._founded(header.digest, data))
        return data_pb2.FoundReply()

    def _founded(self, claimed: str, data: Sequence[bytearray]) -> None:
        fake = self._fake
        fake.founded = [torch.frombuffer(each, dtype=torch.float32) for each in data]
        assert digest(fake.founded) == claimed
        fake.state = OuterState(fake.schema, fake.config, fake.founded)
        fake.change_view(phase=RunPhase.GATHERING, digest=fake.state.digest, found=False)


def _cut(commit: Commit, regions: Sequence[Region]) -> Commit:
    return dataclasses.replace(
        commit,
        fragments=tuple(
            dataclasses.replace(part, payload=part.payload and cut(part.payload, regions[part.fragment_id]))
            for part in commit.fragments
        ),
    )


def _damaged(chunk: tensors_pb2.Chunk) -> tensors_pb2.Chunk:
    return tensors_pb2.Chunk(offset=chunk.offset, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:], crc32=chunk.crc32)
