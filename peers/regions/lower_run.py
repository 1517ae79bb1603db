"""The connection of a regional aggregator to the run below it: how it stands, its outer parameters, what is injected into it.

Owns: these calls, each tried once (whoever asks looks again soon), and what a failed one means: nothing for now, or the end.
Must not know: the run above, what is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc

from edit.errors import EditError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.merging.injection import Injection
from edit.regional_peer import Below
from editpb import data_pb2, data_pb2_grpc
from editpb.chunks import make_chunks
from editpb.injection_messages import inject_header_to_pb, injection_state_from_pb
from editpb.messages import InjectHeader, InjectionState
from editpb.status import from_rpc
from peers.carriers.hub.channels import Channels, Traffic
from peers.carriers.hub.data_calls import DataPlane
from peers.carriers.hub.stall_timeout import StallTimeout
from peers.carriers.io_thread import IoThread

__all__ = ["RunBelow"]

ANSWER_S = 10.0
DAMAGED_TRIES = 3
_log = logging.getLogger("peers")
_T = TypeVar("_T")


class RunBelow:
    """A broken link, and a run that is not (or no longer) where it was thought to be, are None or False.

    All methods raise RefusedError, EvictedError, Interrupted, and RemoteProtocolError when what came was wrong three times.
    """

    def __init__(self, bridge: IoThread, dial: Channels, run_id: str) -> None:
        self._bridge, self._dial, self._run_id = bridge, dial, run_id
        self._data = DataPlane(dial, run_id, Traffic())
        self._channel: grpc.aio.Channel | None = None
        self._said = ""
        self._damaged = 0

    def close(self) -> None:
        """Close the connections."""
        self._bridge.resume()
        self._bridge.call(self._hang_up())
        self._bridge.call(self._data.close())

    def look(self) -> InjectionState | None:
        """The run as it stands; None: not known, or it has no parameters yet."""

        async def ask() -> InjectionState:
            request = data_pb2.InjectionStateRequest(run_id=self._run_id)
            return injection_state_from_pb(await self._stub().DescribeInjection(request, timeout=ANSWER_S))

        return self._tried(ask)

    def parameters(self, state: InjectionState, schema: Schema | None = None) -> tuple[Schema, Below] | None:
        """The outer parameters that `state` is about; None when the run has moved on. schema: known from before."""

        async def fetch() -> tuple[Schema, Below] | None:
            manifest = await self._data.describe(schema, lambda: False)
            if manifest.outer_step != state.outer_step:
                return None
            regions = [Shard(fragment) for fragment in manifest.schema.fragments]
            snapshot = await self._data.snapshot(manifest, regions, lambda: False)
            return manifest.schema, Below(state.outer_step, state.tokens, state.injected, snapshot.fragments)

        return self._tried(fetch)

    def inject(self, injection: Injection, schema: Schema) -> bool:
        """Hand it down; True once it is on disk there."""
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
                await self._stub().Inject(moving.sending(parts()))
            return True

        return self._tried(send) or False

    def _tried(self, attempt: Callable[[], Coroutine[Any, Any, _T | None]]) -> _T | None:
        """What the attempt gives; None where it may give more later."""
        try:
            answer = self._bridge.call(_with_blame(attempt))
        except (StaleError, TransportError) as error:
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
        """Each reason once in a row; a link that is broken is dialled anew, the next endpoint first."""
        if str(error) != self._said:
            self._said = str(error)
            _log.info("run below, %s: %s; trying again", self._dial.endpoint, error)
        if isinstance(error, TransportError):
            self._dial.rotate()
            self._bridge.call(self._hang_up())

    def _stub(self) -> data_pb2_grpc.DataStub:
        if self._channel is None:
            self._channel = self._dial.channel()
        return data_pb2_grpc.DataStub(self._channel)

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


async def _with_blame(attempt: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    try:
        return await attempt()
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
