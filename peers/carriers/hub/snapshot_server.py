"""Serving snapshots: this peer's outer parameters, to members that the coordinator has sent here.

A small gRPC server with FetchSnapshot of data.proto and nothing else. It bounds how many members read at a time, how long a
reader is waited for, and how long the outer parameters of a past step stay for a reader in the middle of them. Parameters are
kept by reference: nothing is copied and training never waits.

Only whole fragments are served, because a reader can check nothing else against a hash. A reader says the ticket of the outer
step that it wants. The coordinator hands tickets to members only, and each outer step has another one, so that an evicted
member learns no later step's parameters here.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from torch import Tensor

from edit.errors import BusyError, ConfigError, GoneError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.replica.replica import Outer
from editpb import data_pb2, tensors_pb2
from editpb.data_messages import snapshot_request_from_pb
from editpb.identity import admitted, from_auth_context
from editpb.invitation import endpoint_of
from editpb.limits import MAX_COUNT
from editpb.messages import Serving, SnapshotManifest, SnapshotRequest
from editpb.snapshot_cache import SnapshotCache
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import server_options
from editpb.transport.chunks import make_chunks
from editpb.transport.guarded_calls import counted, guarded
from editpb.transport.listening import listen_at
from editpb.transport.send_limit import UNLIMITED, SendLimit, size_of
from peers.carriers.run_connection import Traffic

__all__ = ["MAX_PAST", "MAX_READERS", "SnapshotServer"]

MAX_READERS = 8  # calls at a time, of which a member has two while one goes over into the next; they share this peer's uplink
MAX_PAST = 2  # past outer steps that readers may hold in memory
MAX_CALLS = 24  # with those whose readers have been let go, and whose connections are not gone yet; one member has half of them
_MAX_ENDING = 40  # more, which are too many, until they have ended
STALL_S = 30.0  # a reader that takes no chunk for so long is let go
CLOSE_S = 0.5
REQUEST_BYTES = 1 << 16  # the largest request
AGE_S = 60.0  # of a connection; then calls that have begun may end, and new ones take another one
GRACE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Held:
    """The outer parameters that are served now."""

    manifest: SnapshotManifest
    fragments: tuple[Tensor, ...]  # flat fp32, whole
    ticket: str  # what a reader of this outer step must say


class SnapshotServer:
    """One peer's server. All its methods run on the loop's thread.

    Args:
        run_id: the run's; members of another one are refused.
        credentials: of this peer as a server (mutual TLS).
        listen: HOST:PORT; port 0 chooses a free one.
        advertise: the host at which others reach this peer.
        clock: monotonic seconds.
        ticket: makes a word that cannot be guessed.
        stall_s: a reader that takes no chunk for so many seconds is let go.
        limit: of what is sent.
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
        limit: SendLimit = UNLIMITED,
    ) -> None:
        self._run_id, self._limit = run_id, limit
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
        self._past = SnapshotCache()  # what has been read lately, of past outer steps, too
        self._readers = 0
        self._calls: Counter[str] = Counter()  # by member
        self._tickets: dict[int, str] = {}  # of the snapshots that readers may still ask for

    async def start(self) -> str:
        """Listen; return the address at which others reach it. Raises ConfigError for a port in use."""
        options = server_options(REQUEST_BYTES, connection_age_s=AGE_S, connection_grace_s=GRACE_S)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS + _MAX_ENDING)
        handler = grpc.unary_stream_rpc_method_handler(
            self._fetch,
            request_deserializer=data_pb2.SnapshotRequest.FromString,
            response_serializer=tensors_pb2.Chunk.SerializeToString,
        )
        methods = {"FetchSnapshot": guarded(handler, self._admitted, self._place)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("editpb.Data", methods)])
        try:
            port = listen_at(self._server, self._listen, self._credentials)
        except ConfigError as error:
            raise ConfigError(f"--serve-snapshots {error}") from error
        await self._server.start()
        self._address = endpoint_of(self._advertise, port)
        return self._address

    async def close(self) -> None:
        """Stop; readers resume at another donor."""
        if self._server is not None:
            await self._server.stop(CLOSE_S)

    def show(self, schema: Schema, outer: Outer) -> None:
        """Serve `outer` from now on. Does nothing while a commit has been applied to only some of its fragments."""
        if combine(outer.hashes) != outer.digest:
            return
        before, now = self._held, self._clock()
        if before is not None and outer.outer_step <= before.manifest.outer_step:
            self._past = SnapshotCache()  # resynced, or the run went back to a checkpoint: what was served before is void
        manifest = SnapshotManifest(outer_step=outer.outer_step, digest=outer.digest, schema=schema, fragment_hash=outer.hashes)
        self._held = _Held(manifest, outer.fragments, self._ticket())
        self._tickets = {step: word for step, word in self._tickets.items() if self._past.known(step, now)}
        self._tickets[outer.outer_step] = self._held.ticket

    def offer(self, outer_step: int) -> Serving | None:
        """Return what to tell the coordinator while this peer is at `outer_step`; None: that step is not served."""
        if self._server is None or self._held is None or self._held.manifest.outer_step != outer_step:
            return None
        return Serving(self._address, self._held.ticket)

    @contextmanager
    def _admitted(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        admitted(context.auth_context(), self._run_id, ("peer", "region", "observer"))
        yield

    @contextmanager
    def _place(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count a call, until the block ends. Raises BusyError when its member, or all, have too many."""
        member = from_auth_context(context.auth_context()).peer_id
        if self._calls[member] >= MAX_CALLS // 2 or self._calls.total() >= MAX_CALLS:
            raise BusyError("too many calls are under way here; ask another")
        with counted(self._calls, member):
            yield

    async def _fetch(self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with abort_on_error(context):
            if self._readers >= MAX_READERS:
                raise TransportError(f"{self._readers} others read here already; ask another")
            wanted = self._wanted(request)
            self._readers += 1  # before anything is waited for: others come meanwhile
            try:
                await context.send_initial_metadata(())  # with the first message, gRPC refuses a status until that is written
                left = wanted.limit or MAX_COUNT
                for one in wanted.one_by_one():
                    data = self._fragment(one).numpy().data.cast("B")[: one.offset + left]
                    for chunk in make_chunks(data, self._limit.chunk_bytes, start=one.offset):
                        await self._limit.room(size_of(chunk))
                        self.traffic.sent += chunk.ByteSize()
                        await self._write(context, chunk)
                    if (left := left - (len(data) - one.offset)) <= 0:
                        return
            finally:
                self._readers -= 1

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], chunk: tensors_pb2.Chunk) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(chunk)
        except TimeoutError:  # the status waits behind the bytes that are not read, until the connection's age ends the call
            raise TransportError(f"nothing was read for {self._stall_s:g} s; ask again") from None

    def _wanted(self, request: data_pb2.SnapshotRequest) -> SnapshotRequest:
        if self._held is None:
            raise StaleError("this peer has no outer parameters yet")
        wanted = snapshot_request_from_pb(request, self._held.manifest.schema)
        if wanted.run_id != self._run_id:
            raise RefusedError(f"this is run {self._run_id}, not {wanted.run_id}")
        if any(one.boxes is not None for one in wanted.one_by_one()):
            raise RemoteProtocolError("a peer serves whole fragments only")
        if (word := self._tickets.get(wanted.outer_step)) is None:
            raise GoneError(f"outer step {wanted.outer_step} is not to be had here")
        if not hmac.compare_digest(word, wanted.ticket):
            raise RefusedError(f"this is not the ticket for outer step {wanted.outer_step}")
        self._keep(wanted.outer_step)
        return wanted

    def _fragment(self, one: SnapshotRequest) -> Tensor:
        return self._past.take(one.outer_step, one.fragment_id, self._clock())

    def _keep(self, outer_step: int) -> None:
        """Keep the present step for a while, also when it is past: a member reads it."""
        held, now = self._held, self._clock()
        if held is None or held.manifest.outer_step != outer_step or self._past.known(outer_step, now):
            return
        if len(self._past) >= MAX_PAST:
            raise TransportError("this peer keeps as many past outer steps for its readers as it can; ask another")
        self._past.put(held.manifest, held.fragments, now)
