"""Reading the fragments of a snapshot from other members that have it, so that many joining peers do not load the aggregator.

A donor that fails is not asked again for this snapshot. Donors are not trusted: their bytes are what the coordinator's manifest
says, or they are thrown away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from edit.errors import EditError, RemoteProtocolError, TransportError
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import snapshot_request_to_pb
from editpb.identity import Identity
from editpb.limits import one_line
from editpb.messages import Donor, SnapshotManifest
from editpb.snapshot_cache import KEPT_S
from editpb.transport.status import from_rpc
from peers.carriers.hub.assemblies import SnapshotAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.pace import Pace
from peers.carriers.hub.range_calls import read_in_ranges
from peers.carriers.run_connection import Traffic

__all__ = ["Donors", "Patience"]

_log = logging.getLogger(__name__)
_Call: TypeAlias = grpc.aio.UnaryStreamCall[data_pb2.SnapshotRequest, tensors_pb2.Chunk]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one donor is waited for."""

    chunk_s: float = 15.0  # between two of its chunks
    grace_s: float = 15.0  # in all, beyond what its bytes take at `bytes_per_s`
    bytes_per_s: float = 256 * 1024.0
    remind_s: float = KEPT_S / 3  # how often the aggregator is reminded to keep the snapshot meanwhile


class Donors:
    """The donors of one snapshot, asked in random order, one at a time. Close it at the end.

    Args:
        manifest: of the snapshot; names the donors and the fragments' hashes.
        run_id: the run's.
        channels: opens the channels to donors.
        traffic: where the bytes are counted.
        draw: random numbers in [0, 1), which put the donors in order.
        patience: with each donor.
    """

    def __init__(
        self,
        manifest: SnapshotManifest,
        run_id: str,
        channels: Channels,
        traffic: Traffic,
        draw: Callable[[], float],
        patience: Patience,
    ) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._channels = channels
        self._traffic = traffic
        self._patience = patience
        self._line = sorted(manifest.donors, key=lambda _: draw())  # those still to be asked; the first is being asked
        self._channel: grpc.aio.Channel | None = None
        self._pace = Pace()  # to the first donor
        self._begun = 0.0  # when the first donor was connected to, on the loop's clock
        self.sources: dict[str, None] = {}  # an ordered set: whose bytes were taken; the caller may add others

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channels.release(self._channel)
            self._channel = None

    async def read(self, assembly: SnapshotAssembly) -> None:
        """Complete `assembly`, of whole fragments, as far as the donors give it; one goes on where another broke off.

        What is missing when no donor is left may be read elsewhere.
        """
        givers: list[Donor] = []  # of what is here of the fragment that is not complete
        while self._line and not assembly.complete:
            donor, finished, before = self._line[0], assembly.finished, assembly.received
            error: EditError | None = None
            try:
                await self._fetch(donor, assembly)
            except EditError as failure:
                error = failure
            if assembly.finished > finished:
                self._gave([*givers, donor])
                givers = []
            if isinstance(error, RemoteProtocolError):
                assembly.clear_unfinished()  # any of those who gave bytes may have lied
                await self._dismiss([*givers, donor], error)
                givers = []
            elif error is not None:
                givers += [donor] if assembly.received > before and not assembly.at_an_end else []
                await self._dismiss([donor], error)
        self._gave(givers)

    async def _fetch(self, donor: Donor, assembly: SnapshotAssembly) -> None:
        stub = data_pb2_grpc.DataStub(self._connection(donor))
        begun, first = self._begun, assembly.received

        def ask(start: int, limit: int) -> _Call:
            asked = min(start + limit, assembly.total_bytes) - first  # since it was connected; what is asked again counts once
            bound.reschedule(begun + self._patience.grace_s + asked / self._patience.bytes_per_s)
            message = snapshot_request_to_pb(assembly.request(self._run_id, start, limit, donor.serving.ticket))
            self._traffic.sent += message.ByteSize()
            call: _Call = stub.FetchSnapshot(message)
            return call

        def take(chunk: tensors_pb2.Chunk) -> None:
            self._traffic.received += chunk.ByteSize()
            assembly.take(chunk)

        try:
            async with asyncio.timeout_at(begun + self._patience.grace_s) as bound:
                await read_in_ranges(assembly, self._pace, ask, self._next, take)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        except TimeoutError:
            raise TransportError("too slow") from None

    async def _next(self, call: _Call) -> tensors_pb2.Chunk | None:
        async with asyncio.timeout(self._patience.chunk_s):
            chunk = await call.read()
        return chunk if isinstance(chunk, tensors_pb2.Chunk) else None  # grpc.aio.EOF

    def _connection(self, donor: Donor) -> grpc.aio.Channel:
        if self._channel is None:
            identity = Identity(self._run_id, "peer", donor.peer_id)
            self._channel = self._channels.member(donor.serving.address, identity.server_name)
            self._begun = asyncio.get_running_loop().time()
            self._pace = Pace()
        return self._channel

    async def _dismiss(self, donors: Sequence[Donor], error: EditError) -> None:
        _log.info("snapshot of outer step %d: %s: %s", self._manifest.outer_step, donors[-1].peer_id, one_line(str(error), 200))
        self._line = [donor for donor in self._line if donor not in donors]
        await self.close()

    def _gave(self, donors: Sequence[Donor]) -> None:
        self.sources.update((donor.peer_id, None) for donor in donors)
