"""The connection of a region to the run below it: its state, its outer parameters, what is injected into it.

Each call is tried once, since the region's loop looks again soon; a failed one means nothing for now, or the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc

from edit.errors import EditError, OutdatedError, RemoteProtocolError, TransportError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.merging.injection import Injection
from edit.regional_peer import Below
from editpb import data_pb2, data_pb2_grpc
from editpb.injection_messages import inject_header_to_pb, injection_state_from_pb
from editpb.messages import InjectHeader, InjectionState
from editpb.transport.chunks import make_chunks
from editpb.transport.send_limit import UNLIMITED
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import DataCalls, StallTimeout
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Traffic

__all__ = ["RunBelow"]

ANSWER_S = 10.0
DAMAGED_TRIES = 3
_log = logging.getLogger("peers")
_T = TypeVar("_T")


class RunBelow:
    """The calls of the main thread to the run below. A broken link, and a run that has moved on, are answered None or False.

    All methods raise RefusedError, EvictedError, Interrupted, and RemoteProtocolError when what came was wrong three times.
    """

    def __init__(self, io: IoThread, channels: Channels, run_id: str) -> None:
        self._io, self._channels, self._run_id = io, channels, run_id
        self._data = DataCalls(channels, run_id, Traffic())
        self._said = ""  # the reason logged last
        self._damaged = 0  # wrong answers in a row
        self._broken = False

    def close(self) -> None:
        """Close the connections."""
        self._io.resume()
        self._io.call(self._channels.close())

    def came_back(self) -> bool:
        """Return whether the link broke since this was asked last, so that another process may answer now."""
        broken, self._broken = self._broken, False
        return broken

    def look(self) -> InjectionState | None:
        """Return the run's state; None: not known, or it has no parameters yet."""

        async def ask() -> InjectionState:
            request = data_pb2.InjectionStateRequest(run_id=self._run_id)
            return injection_state_from_pb(await self._stub().DescribeInjection(request, timeout=ANSWER_S))

        return self._tried(ask)

    def parameters(self, state: InjectionState, schema: Schema | None = None) -> tuple[Schema, Below] | None:
        """Return the outer parameters that `state` is about; None when the run has moved on. schema: if it is known already."""

        async def fetch() -> tuple[Schema, Below] | None:
            manifest = await self._data.describe(schema, lambda: False)
            if manifest.outer_step != state.outer_step:
                return None
            shards = [Shard(fragment) for fragment in manifest.schema.fragments]
            snapshot = await self._data.snapshot(manifest, shards, lambda: False)
            return manifest.schema, Below(state.outer_step, state.tokens, state.injected, snapshot.fragments)

        return self._tried(fetch)

    def inject(self, injection: Injection, schema: Schema) -> bool:
        """Send it to the run below; return True once it is on disk there."""
        fragments = sorted(injection.fragments.items())
        header = InjectHeader(
            run_id=self._run_id,
            schema_hash=schema.schema_hash,
            brings=injection.brings,
            base=injection.base,
            replaces=injection.replaces,
            fragments=tuple(i for i, _ in fragments),
            digest=digest([part for _, part in fragments]),
        )

        def parts() -> Iterator[data_pb2.InjectPart]:
            yield data_pb2.InjectPart(header=inject_header_to_pb(header))
            for i, part in fragments:
                for chunk in make_chunks(part.numpy().data):
                    yield data_pb2.InjectPart(chunk=data_pb2.FragmentChunk(fragment_id=i, chunk=chunk))

        async def send() -> bool:
            async with StallTimeout() as moving:
                await self._stub().Inject(moving.sending(UNLIMITED.paced(parts())))
            return True

        return self._tried(send) or False

    def _tried(self, attempt: Callable[[], Coroutine[Any, Any, _T | None]]) -> _T | None:
        """Return what the attempt gives; None where it failed and may succeed later."""
        try:
            answer = self._io.call(_with_blame(attempt))
        except (OutdatedError, TransportError) as error:
            self._say(error)
        except RemoteProtocolError as error:
            self._damaged += 1
            if self._damaged >= DAMAGED_TRIES:
                raise
            self._say(error)
        else:
            self._said, self._damaged = "", 0
            return answer
        return None

    def _say(self, error: EditError) -> None:
        """Log each reason once in a row. After a broken link, connect to the next endpoint."""
        if str(error) != self._said:
            self._said = str(error)
            _log.info("run below, %s: %s; trying again", self._channels.endpoint, error)
        if isinstance(error, TransportError):
            self._broken = True
            self._io.post(self._channels.rotate)
            self._io.call(self._channels.close())

    def _stub(self) -> data_pb2_grpc.DataStub:
        return data_pb2_grpc.DataStub(self._channels.data())


async def _with_blame(attempt: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    try:
        return await attempt()
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
