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
from edit.fragments.shards import Shard
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import snapshot_request_to_pb
from editpb.identity import Identity
from editpb.limits import one_line
from editpb.messages import Donor, SnapshotManifest, SnapshotRequest
from editpb.snapshot_cache import KEPT_S
from editpb.transport.chunks import Reassembly
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels
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
        self._until = 0.0  # the deadline of the first donor, on the loop's clock
        self.sources: dict[str, None] = {}  # an ordered set: whose bytes were taken; the caller may add others

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channels.release(self._channel)
            self._channel = None

    async def read(self, shard: Shard, into: Reassembly) -> memoryview | None:
        """Complete `into` and return its bytes; one donor goes on where another broke off.

        Return None when no donor is left; what is in `into` then may be completed elsewhere. Of a part of a fragment nothing is
        read, for its hash is not known.
        """
        givers: list[Donor] = []
        while shard.is_whole and self._line:
            donor, before = self._line[0], into.received
            try:
                await self._fetch(donor, shard, into)
                data = into.finish()
            except RemoteProtocolError as error:
                into.clear()  # any of those who gave bytes may have lied
                await self._dismiss([*givers, donor], error)
                givers = []
            except EditError as error:
                givers += [donor] if into.received > before else []
                await self._dismiss([donor], error)
            else:
                self._gave([*givers, donor])
                return data
        self._gave(givers)
        return None

    async def _fetch(self, donor: Donor, shard: Shard, into: Reassembly) -> None:
        stub = data_pb2_grpc.DataStub(self._connection(donor))
        request = SnapshotRequest(
            run_id=self._run_id,
            outer_step=self._manifest.outer_step,
            fragment_id=shard.fragment.fragment_id,
            offset=into.received,
            ticket=donor.serving.ticket,
        )
        message = snapshot_request_to_pb(request)
        self._traffic.sent += message.ByteSize()
        self._until += (4 * shard.numel - into.received) / self._patience.bytes_per_s
        call = stub.FetchSnapshot(message)
        try:
            async with asyncio.timeout_at(self._until):
                while not into.complete and (chunk := await self._next(call)) is not None:
                    self._traffic.received += chunk.ByteSize()
                    into.take(chunk)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        except TimeoutError:
            raise TransportError("too slow") from None
        finally:
            call.cancel()

    async def _next(self, call: _Call) -> tensors_pb2.Chunk | None:
        async with asyncio.timeout(self._patience.chunk_s):
            chunk = await call.read()
        return chunk if isinstance(chunk, tensors_pb2.Chunk) else None  # grpc.aio.EOF

    def _connection(self, donor: Donor) -> grpc.aio.Channel:
        if self._channel is None:
            identity = Identity(self._run_id, "peer", donor.peer_id)
            self._channel = self._channels.member(donor.serving.address, identity.server_name)
            self._until = asyncio.get_running_loop().time() + self._patience.grace_s
        return self._channel

    async def _dismiss(self, donors: Sequence[Donor], error: EditError) -> None:
        _log.info("snapshot of outer step %d: %s: %s", self._manifest.outer_step, donors[-1].peer_id, one_line(str(error), 200))
        self._line = [donor for donor in self._line if donor not in donors]
        await self.close()

    def _gave(self, donors: Sequence[Donor]) -> None:
        self.sources.update((donor.peer_id, None) for donor in donors)
