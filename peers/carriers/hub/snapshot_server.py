"""Serving snapshots: this peer's outer parameters, to members that the coordinator has sent here.

Owns: a small server (FetchSnapshot of data.proto and nothing else), who may read, how many at a time, how long a reader is
waited for, and how long outer parameters of a past step stay for a reader in the middle of them. They are kept by reference:
nothing is copied and training never waits. Must not know: training, rounds, where readers come from.

Whole fragments only: a reader can hold nothing else against a hash. A reader says the ticket of the outer step that it wants.
The coordinator hands tickets to members only, and each outer step has another one, so that whoever is evicted learns no later
step's parameters here.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from torch import Tensor

from edit.errors import ConfigError, GoneError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.replica.replica import Outer
from editpb import data_pb2, tensors_pb2
from editpb.abort_on_error import abort_on_error
from editpb.chunks import make_chunks
from editpb.data_messages import snapshot_request_from_pb
from editpb.identity import admitted
from editpb.messages import Serving, SnapshotManifest, SnapshotRequest
from editpb.snapshot_cache import SnapshotCache
from peers.carriers.hub.channels import Traffic

__all__ = ["MAX_PAST", "MAX_READERS", "SnapshotServer"]

MAX_READERS = 4  # at a time; each takes a share of this peer's uplink
MAX_PAST = 2  # past outer steps that readers may hold in memory
MAX_CALLS = 16  # with those whose readers have been let go, and whose connections are not gone yet
STALL_S = 30.0  # a reader that takes no chunk for so long is let go
CLOSE_S = 0.5
_OPTIONS = (
    ("grpc.max_receive_message_length", 1 << 16),
    ("grpc.max_connection_age_ms", 60_000),  # then calls that have begun may end, and new ones take another connection
    ("grpc.max_connection_age_grace_ms", 120_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class _Held:
    """theta as it is now. ticket: what a reader of this outer step must say."""

    manifest: SnapshotManifest
    fragments: tuple[Tensor, ...]
    ticket: str


class SnapshotServer:
    """One peer's server; everything but `listen` and `advertise` happens on the loop's thread.

    listen: HOST:PORT, port 0 chooses one; advertise: the host that others dial; clock: monotonic seconds; ticket: makes a word
    that cannot be guessed.
    """

    def __init__(
        self,
        run_id: str,
        credentials: grpc.ServerCredentials,
        listen: str,
        advertise: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        ticket: Callable[[], str] = lambda: secrets.token_urlsafe(18),
        stall_s: float = STALL_S,
    ) -> None:
        self._run_id = run_id
        self._credentials = credentials
        self._listen = listen
        self._advertise = advertise
        self._clock = clock
        self._ticket = ticket
        self._stall_s = stall_s
        self.traffic = Traffic()
        self._address = ""
        self._server: grpc.aio.Server | None = None
        self._held: _Held | None = None
        self._shelf = SnapshotCache()
        self._readers = 0
        self._tickets: dict[int, str] = {}  # of the snapshots that may be on the shelf

    async def start(self) -> str:
        """Listen; returns the address that others dial. Raises ConfigError for a port in use."""
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        handler = grpc.unary_stream_rpc_method_handler(
            self._fetch,
            request_deserializer=data_pb2.SnapshotRequest.FromString,
            response_serializer=tensors_pb2.Chunk.SerializeToString,
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("editpb.Data", {"FetchSnapshot": handler})])
        try:
            port = self._server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"--serve-snapshots {self._listen}: cannot be bound; is the port in use?") from error
        await self._server.start()
        self._address = f"{self._advertise}:{port}"
        return self._address

    async def close(self) -> None:
        """Stop; readers go on elsewhere."""
        if self._server is not None:
            await self._server.stop(CLOSE_S)

    def show(self, schema: Schema, outer: Outer) -> None:
        """From now on this is what is served, unless it is in the middle of partial and belongs to no outer step."""
        if combine(outer.hashes) != outer.digest:
            return
        before, now = self._held, self._clock()
        if before is not None and outer.outer_step <= before.manifest.outer_step:
            self._shelf = SnapshotCache()  # resynced, or another state of the run: nothing of before is to be had
        manifest = SnapshotManifest(outer_step=outer.outer_step, digest=outer.digest, schema=schema, fragment_hash=outer.hashes)
        self._held = _Held(manifest, outer.fragments, self._ticket())
        self._tickets = {step: word for step, word in self._tickets.items() if self._shelf.known(step, now)}
        self._tickets[outer.outer_step] = self._held.ticket

    def offer(self, outer_step: int) -> Serving | None:
        """What to tell the coordinator while this peer is at `outer_step`; None: there is nothing to be had."""
        if self._server is None or self._held is None or self._held.manifest.outer_step != outer_step:
            return None
        return Serving(self._address, self._held.ticket)

    async def _fetch(self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with abort_on_error(context):
            admitted(context.auth_context(), self._run_id, ("peer", "region", "observer"))
            if self._readers >= MAX_READERS:
                raise TransportError(f"{self._readers} others read here already; ask another")
            wanted, fragment = self._wanted(request)
            self._readers += 1
            try:
                for chunk in make_chunks(fragment.numpy().data, start=wanted.offset):
                    self.traffic.sent += chunk.ByteSize()
                    await self._write(context, chunk)
            finally:
                self._readers -= 1

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], chunk: tensors_pb2.Chunk) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(chunk)
        except TimeoutError:  # a status would wait behind the bytes that are not read; the connection's age ends the call
            raise asyncio.CancelledError(f"nothing was read for {self._stall_s:g} s") from None

    def _wanted(self, request: data_pb2.SnapshotRequest) -> tuple[SnapshotRequest, Tensor]:
        if self._held is None:
            raise StaleError("this peer has no outer parameters yet")
        wanted = snapshot_request_from_pb(request, self._held.manifest.schema)
        if wanted.run_id != self._run_id:
            raise RefusedError(f"this is run {self._run_id}, not {wanted.run_id}")
        if wanted.boxes is not None:
            raise RemoteProtocolError("a peer serves whole fragments only")
        if (word := self._tickets.get(wanted.outer_step)) is None:
            raise GoneError(f"outer step {wanted.outer_step} is not to be had here")
        if not hmac.compare_digest(word, wanted.ticket):
            raise RefusedError(f"this is not the ticket for outer step {wanted.outer_step}")
        self._keep(wanted.outer_step)
        return wanted, self._shelf.take(wanted.outer_step, wanted.fragment_id, self._clock())

    def _keep(self, outer_step: int) -> None:
        """Somebody reads the present step: it stays for a while, also when it is past."""
        held, now = self._held, self._clock()
        if held is None or held.manifest.outer_step != outer_step or self._shelf.known(outer_step, now):
            return
        if len(self._shelf) >= MAX_PAST:
            raise TransportError("this peer keeps as many past outer steps for its readers as it can; ask another")
        self._shelf.put(held.manifest, held.fragments, now)
