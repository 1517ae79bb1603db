"""A real coordinator in this process (mutual TLS, port 0) and a bare peer that says exactly what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from aggregator.resources import Clock
from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.server import Coordinator
from aggregator.storage.journal import Disk
from aggregator.storage.state_folder import StateFolder
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.records import Commit
from edit.rounds.machine import RoundMachine
from editpb import control_pb2_grpc, data_pb2, data_pb2_grpc, tensors_pb2
from editpb.control_messages import coordinator_message_from_pb, peer_message_to_pb, schema_answer_to_pb
from editpb.data_messages import (
    commit_from_parts,
    contribution_header_to_pb,
    found_header_to_pb,
    snapshot_request_to_pb,
    update_manifest_from_pb,
    update_request_to_pb,
)
from editpb.identity import Identity
from editpb.limits import CHUNK_BYTES
from editpb.messages import (
    ContributionHeader,
    FoundHeader,
    Goodbye,
    Heartbeat,
    Hello,
    PeerState,
    SchemaRequest,
    Serving,
    SnapshotRequest,
    UpdateRequest,
    View,
    Welcome,
)
from editpb.signed_contributions import ContributionSigner
from editpb.transport.channel_options import Options
from editpb.transport.chunks import make_chunks
from tests.support.encoded import encode
from tests.support.loops import until
from tests.support.ports import hold_ports

TOML = """
name = "test"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = 100
[penalty]
enabled = false
[outer]
optimizer = "sgd"
lr = 1.0
[codec]
up = "fp32"
down = "fp32"
[rounds]
start_peers = {start}
quorum = {quorum}
floor_s = 1000.0
ceiling_s = 1000.0
[storage]
checkpoint_every = 3
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(n,)),))
        for i, n in enumerate((5, 300))
    )
)
WAIT_S = 30.0
LIFETIME_S = 100 * 365 * 86_400.0  # of a certificate: clocks of tests may jump by years
Layout = Sequence[Sequence[Shard]]  # by rank, by fragment: what each rank owns


def theta(seed: int = 0, schema: Schema = SCHEMA) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(fragment.numel, generator=generator) for fragment in schema.fragments]


def sharded(schema: Schema, ranks: int, dimension: int) -> Layout:
    """As FSDP2 (dimension 0) or tensor parallelism (-1) would: each tensor in even chunks, the last ones short or empty;
    a scalar is rank 0's."""

    def box(i: int, shape: tuple[int, ...], rank: int) -> Box | None:
        if not shape:
            return Box(i, (), ()) if rank == 0 else None
        axis = dimension % len(shape)
        chunk = -(-shape[axis] // ranks)
        start, end = min(rank * chunk, shape[axis]), min((rank + 1) * chunk, shape[axis])
        offsets = tuple(start if d == axis else 0 for d in range(len(shape)))
        return Box(i, offsets, tuple(end - start if d == axis else n for d, n in enumerate(shape))) if end > start else None

    return [
        [Shard(f, [b for i, t in enumerate(f.tensors) if (b := box(i, t.shape, rank))]) for f in schema.fragments]
        for rank in range(ranks)
    ]


def new_folder(path: Path, *, start: int = 1, quorum: int = 1, toml: str = TOML) -> StateFolder:
    folder = StateFolder.create(path, toml.format(start=max(start, quorum), quorum=quorum))
    Authority.create(folder.path, folder.run_id, folder.config().server.advertise, now=time.time())
    return folder


class FillableDisk:
    """The journal's disk; `full` makes every write fail as a full disk does."""

    full = False

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    def reserve(self, descriptor: int, begin: int, count: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, begin, count)

    def fill(self) -> None:
        """No further write succeeds."""
        self.full = True


@dataclass
class Served:
    coordinator: Coordinator
    folder: StateFolder
    disk: FillableDisk
    keys: dict[tuple[str, str], ec.EllipticCurvePrivateKey] = field(default_factory=dict)

    def credentials(self, peer_id: str, role: str = "peer", authority: Authority | None = None) -> grpc.ChannelCredentials:
        """A certificate without the detour over an invitation; authority: another one, for an impostor."""
        return grpc.ssl_channel_credentials(self.ca, *self.certificate(peer_id, role, authority))

    @property
    def ca(self) -> bytes:
        return (self.folder.path / "ca.pem").read_bytes()

    def certificate(
        self,
        peer_id: str,
        role: str = "peer",
        authority: Authority | None = None,
        *,
        lifetime_s: float = LIFETIME_S,
        age_s: float = 0.0,
        anew: bool = False,
    ) -> tuple[bytes, bytes]:
        """(key, certificate) in PEM, issued `age_s` ago. Each one replaces the member's last, for the same key (a renewal) or
        `anew` (another machine)."""
        own = self.coordinator.authority
        identity, key = Identity(self.folder.run_id, role, peer_id), new_key()
        if authority is None:
            key = self.keys.setdefault((role, peer_id), key)
            if anew:
                key = self.keys[role, peer_id] = new_key()
        issued = time.time() - age_s
        certificate = (authority or own).issuer.issue(identity, key.public_key(), lifetime_s=lifetime_s, now=issued)
        if authority is None:
            own.members.add(identity, certificate, issued)
        return key_pem(key), certificate.public_bytes(serialization.Encoding.PEM)

    @asynccontextmanager
    async def channel(
        self, peer_id: str, role: str = "peer", authority: Authority | None = None, options: Options = ()
    ) -> AsyncIterator[grpc.aio.Channel]:
        credentials = self.credentials(peer_id, role, authority)
        async with grpc.aio.secure_channel(self.coordinator.listen, credentials, options) as channel:
            yield channel

    @asynccontextmanager
    async def signing_peer(self, peer_id: str) -> AsyncIterator[tuple[BarePeer, ContributionSigner]]:
        """A peer, and what signs its contributions with the key of its certificate."""
        key, certificate = self.certificate(peer_id)
        credentials = grpc.ssl_channel_credentials(self.ca, key, certificate)
        async with self._rank(peer_id, 0, 1, SCHEMA, credentials, ()) as peer:
            yield peer, ContributionSigner(key, self.coordinator.config)

    @asynccontextmanager
    async def peer(self, peer_id: str, schema: Schema = SCHEMA) -> AsyncIterator[BarePeer]:
        async with self.replica(peer_id, 1, schema) as (peer,):
            yield peer

    @asynccontextmanager
    async def replica(
        self, peer_id: str, ranks: int, schema: Schema = SCHEMA, options: Options = ()
    ) -> AsyncIterator[list[BarePeer]]:
        """All ranks of one replica, each with a connection of its own, under one certificate."""
        credentials = self.credentials(peer_id)
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(self._rank(peer_id, rank, ranks, schema, credentials, options))
                for rank in range(ranks)
            ]

    @asynccontextmanager
    async def _rank(
        self, peer_id: str, rank: int, ranks: int, schema: Schema, credentials: grpc.ChannelCredentials, options: Options
    ) -> AsyncIterator[BarePeer]:
        async with grpc.aio.secure_channel(self.coordinator.listen, credentials, options) as channel:
            peer = BarePeer(peer_id, self.folder.run_id, channel, schema, rank, ranks)
            try:
                yield peer
            finally:
                await peer.disconnect()


def small_chunks(data: bytes) -> Iterator[tensors_pb2.Chunk]:
    """Several chunks also of a small vector; of a large one, those that a peer sends."""
    return make_chunks(data, 512) if len(data) < CHUNK_BYTES else make_chunks(data)


def held_clock(unix: Callable[[], float] = time.time) -> Clock:
    """A clock on which no time passes, so that no lease and no round ends by accident. unix: only people read it."""
    return Clock(monotonic=lambda: 0.0, unix=unix)


@asynccontextmanager
async def served(
    folder: StateFolder, clock: Clock | None = None, *, kill: bool = False, accept_rollback: bool = False
) -> AsyncIterator[Served]:
    """clock: a `held_clock` where none is given; kill: end as SIGKILL would, without a last checkpoint."""
    disk = FillableDisk()
    coordinator = Coordinator.open(
        folder, clock or held_clock(), Disk(write=disk.write, reserve=disk.reserve), accept_rollback=accept_rollback
    )
    hold_ports(folder)
    await coordinator.start()
    try:
        yield Served(coordinator, folder, disk)
    finally:
        await coordinator.close(checkpoint=not kill)


@dataclass
class BarePeer:
    """One attendance and the data calls. Views are kept; `view(until)` waits for one that satisfies a condition."""

    peer_id: str
    run_id: str
    channel: grpc.aio.Channel
    schema: Schema
    rank: int = 0
    ranks: int = 1
    received: list[object] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.control = control_pb2_grpc.ControlStub(self.channel)
        self.data = data_pb2_grpc.DataStub(self.channel)

    async def attend(self) -> Welcome:
        await self.open_stream()
        return await self.receive(Welcome)

    async def open_stream(self) -> None:
        self._call = self.control.Attend()
        hello = Hello(run_id=self.run_id, schema_hash=self.schema.schema_hash, rank=self.rank, ranks=self.ranks)
        await self._call.write(peer_message_to_pb(hello))
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                heard = coordinator_message_from_pb(message)
                if isinstance(heard, SchemaRequest):
                    await self._call.write(schema_answer_to_pb(self.schema))
                self.received.append(heard)
                self._news.set()

    async def _until(self, condition: Callable[[object], bool]) -> object:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = next((m for m in reversed(self.received) if condition(m)), None)
                if found is not None:
                    return found
                self._news.clear()
                await self._news.wait()

    async def view(self, until: Callable[[View], bool] = lambda _: True) -> View:
        return await self._until(lambda m: isinstance(m, View) and until(m))

    async def receive(self, kind: type) -> object:
        return await self._until(lambda m: isinstance(m, kind))

    async def report(
        self,
        outer_step: int,
        digest_: str = "",
        state: PeerState = PeerState.TRAINING,
        serving: Serving | None = None,
    ) -> None:
        beat = Heartbeat(state=state, outer_step=outer_step, digest=digest_, serving=serving)
        await self._call.write(peer_message_to_pb(beat))

    async def goodbye(self) -> None:
        """Leave politely; returns when the coordinator has ended the stream."""
        await self._call.write(peer_message_to_pb(Goodbye("done")))
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def disconnect(self) -> None:
        if self._reader is not None:
            self._call.cancel()
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def found(self, parameters: Sequence[Tensor]) -> None:
        def parts() -> Iterable[data_pb2.FoundPart]:
            header = FoundHeader(run_id=self.run_id, schema_hash=self.schema.schema_hash, digest=digest(parameters))
            yield data_pb2.FoundPart(header=found_header_to_pb(header))
            for i, fragment in enumerate(parameters):
                for chunk in make_chunks(fragment.numpy().tobytes()):
                    yield data_pb2.FoundPart(chunk=data_pb2.FragmentChunk(fragment_id=i, chunk=chunk))

        await self.data.Found(parts())

    def header(
        self, round_id: int, outer_step: int, fragment_id: int, total_bytes: int, changes: dict[str, object] | None = None
    ) -> ContributionHeader:
        values = {
            "run_id": self.run_id,
            "round_id": round_id,
            "outer_step": outer_step,
            "peer_id": self.peer_id,
            "fragment_id": fragment_id,
            "schema_hash": self.schema.schema_hash,
            "inner_steps": 2,
            "tokens": 10,
            "codec": "fp32",
            "numel": self.schema.fragments[fragment_id].numel,
            "total_bytes": total_bytes,
            "rank": self.rank,
            **(changes or {}),
        }
        return ContributionHeader(**values)  # type: ignore[arg-type]

    async def contribute_signed(
        self, sign: ContributionSigner, round_id: int, outer_step: int, deltas: Sequence[Tensor], **changes: object
    ) -> None:
        """As `contribute`. changes: of the headers, once they are signed."""
        for i, delta in enumerate(deltas):
            data = bytes(encode("fp32", delta).data)
            signed = sign(self.header(round_id, outer_step, i, len(data)), memoryview(data))
            await self.send(replace(signed, **changes), small_chunks(data))  # type: ignore[arg-type]

    async def send(self, header: ContributionHeader, chunks: Iterable[object]) -> data_pb2.ContributionReceipt:
        def parts() -> Iterable[data_pb2.ContributePart]:
            yield data_pb2.ContributePart(header=contribution_header_to_pb(header))
            for chunk in chunks:
                yield data_pb2.ContributePart(chunk=chunk)

        return await self.data.Contribute(parts())

    async def contribute(self, round_id: int, outer_step: int, deltas: Sequence[Tensor]) -> None:
        for i, delta in enumerate(deltas):
            data = bytes(encode("fp32", delta).data)
            await self.send(self.header(round_id, outer_step, i, len(data)), small_chunks(data))

    async def contribute_part(
        self, round_id: int, outer_step: int, shard: Shard, delta: Tensor, **changes: object
    ) -> data_pb2.ContributionReceipt:
        """This rank's shard of a fragment's `delta`."""
        data = bytes(encode("fp32", shard.take(delta)).data)
        values: dict[str, object] = {"boxes": None if shard.is_whole else shard.boxes, "numel": shard.numel, **changes}
        header = self.header(round_id, outer_step, shard.fragment.fragment_id, len(data), values)
        return await self.send(header, small_chunks(data))

    async def fetch(
        self, outer_step: int, *, due: Sequence[int] | None = None, shards: Sequence[Shard] | None = None
    ) -> Commit:
        """The update, or what of it concerns `shards`; due: the fragments that it must consist of."""
        wanted = UpdateRequest(self.run_id, outer_step, None if shards is None else tuple(shards))
        manifest, parts = None, {}
        async for part in self.data.FetchUpdate(update_request_to_pb(wanted)):
            if part.WhichOneof("kind") == "manifest":
                manifest = update_manifest_from_pb(part.manifest, self.schema, outer_step, due=due, shards=shards)
            else:
                parts.setdefault(part.chunk.fragment_id, bytearray()).extend(part.chunk.chunk.data)
        assert manifest is not None
        return commit_from_parts(manifest, [parts.get(f.commit.fragment_id) for f in manifest.fragments])

    async def snapshot_part(self, outer_step: int, shard: Shard, offset: int = 0) -> bytes:
        """The fp32 bytes of a shard of theta, from `offset` on."""
        wanted = SnapshotRequest(
            run_id=self.run_id,
            outer_step=outer_step,
            fragment_id=shard.fragment.fragment_id,
            offset=offset,
            boxes=None if shard.is_whole else shard.boxes,
        )
        chunks = [chunk async for chunk in self.data.FetchSnapshot(snapshot_request_to_pb(wanted), timeout=WAIT_S)]
        assert [chunk.offset for chunk in chunks][:1] in ([], [offset])
        return b"".join(chunk.data for chunk in chunks)


async def contribute_sharded(
    ranks: Sequence[BarePeer], layout: Layout, round_id: int, outer_step: int, deltas: Mapping[int, Tensor], attempt: int = 0
) -> None:
    """Every rank sends what it owns of the fragments in `deltas` (by fragment_id); who owns nothing of one sends nothing."""
    for peer, shards in zip(ranks, layout, strict=True):
        for fragment_id, delta in deltas.items():
            if shards[fragment_id].numel:
                await peer.contribute_part(round_id, outer_step, shards[fragment_id], delta, attempt=attempt)


async def found_run(founder: BarePeer, *others: BarePeer) -> View:
    """All attend, the first one founds the run, all report as ready; returns its first view with an open round."""
    await founder.attend()
    await founder.view(lambda view: view.found)
    for peer in others:
        await peer.attend()
    await founder.found(theta(0, founder.schema))
    for peer in (founder, *others):
        await peer.report(0)
    return await founder.view(lambda view: view.round_id > 0)


async def found_together(at: Served, *peers: BarePeer) -> RoundMachine:
    """As `found_run`; the open round then waits for all of them."""
    await found_run(*peers)
    machine = at.coordinator.run.rounds.machine
    await until(lambda: machine.expected == {peer.peer_id for peer in peers})
    return machine
