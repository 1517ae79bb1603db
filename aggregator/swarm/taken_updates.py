"""The updates of a part that this member has taken, for the ranks of the peer beside it: they come over a slow link once.

Each member takes an outer step by itself and keeps the update as it is published, the same bytes as at the part's owner. So the
peer need not fetch it from the owner. It asks once it has heard of the commit, which may be before this member has taken it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aggregator.data.published import wanted_payloads
from aggregator.services.readers import UpdateReaders, send
from edit.errors import GoneError, RefusedError, RemoteProtocolError, StaleError
from edit.fragments.schema import Schema
from edit.records import Commit
from editpb import data_pb2 as dpb
from editpb.data_messages import update_manifest_to_pb, update_request_from_pb
from editpb.limits import MAX_COUNT
from editpb.messages import UpdateRequest
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.chunk_frames import update_frames
from editpb.transport.send_limit import SendLimit

if TYPE_CHECKING:
    import grpc

    from aggregator.swarm.callers import Callers

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["TakenUpdates"]

WAITS_S = 2.0  # for an update that is about to be taken; then the peer asks again, or the owner
MOST_RANKS = 64  # of the peer beside this member, whose calls are served at a time
_T = TypeVar("_T")


class Member(Protocol):
    """What it asks of the host."""

    run_id: str
    peer_id: str

    callers: Callers

    def limit_of(self, context: Context) -> SendLimit: ...


class Thread(Protocol):
    """Runs a call in the part's thread."""

    async def __call__(self, call: Callable[..., Any], *arguments: object) -> Any: ...


class TakenUpdates:
    """FetchUpdate of data.proto for one part, from what this member has. Used on the event loop.

    Args:
        member: the host; only its own peer is served.
        schema: of the part.
        find: returns the update to an outer step that is kept here, or None.
        comes: whether the update to an outer step is on its way here.
        do: runs a call in the part's thread.
    """

    def __init__(
        self,
        member: Member,
        schema: Schema,
        find: Callable[[int], Commit | None],
        comes: Callable[[int], bool],
        do: Thread,
    ) -> None:
        self._member, self._schema, self._find, self._comes, self._do = member, schema, find, comes, do
        self._readers = UpdateReaders()
        self._taken = asyncio.Event()  # pulsed at each outer step

    def taken(self) -> None:
        """An outer step was taken here."""
        self._taken.set()
        self._taken.clear()

    async def FetchUpdate(self, request: dpb.UpdateRequest, context: Context) -> None:
        """Send one commit, or what of it concerns a rank, or a range of that. Nothing is sent ahead of it."""
        async with abort_on_error(context):
            if (caller := self._member.callers.peer(context)) != self._member.peer_id:
                raise RefusedError(f"{caller} is not the peer beside this host: ask the part's owner")
            wanted = update_request_from_pb(request, self._schema)
            if wanted.run_id != self._member.run_id:
                raise RemoteProtocolError(f"this is run {self._member.run_id}, not {wanted.run_id}")
            with self._readers.place(caller, MOST_RANKS) as room:
                limit = self._member.limit_of(context)
                await send(context.write, self._parts(wanted, room, limit), limit=limit)

    async def _parts(
        self, wanted: UpdateRequest, room: asyncio.Semaphore, limit: SendLimit
    ) -> AsyncGenerator[dpb.UpdatePart | bytes, None]:
        commit = await self._commit(wanted.outer_step)
        if not wanted.digest:
            yield dpb.UpdatePart(manifest=update_manifest_to_pb(commit, wanted.shards, b"", None))
            wanted = dataclasses.replace(wanted, offset=0)
        elif wanted.digest != commit.digest:
            raise GoneError(f"the update to outer step {wanted.outer_step} is another one here than was begun")
        left = wanted.limit or MAX_COUNT
        fragments = ((one.fragment_id, one.payload) for one in commit.fragments if one.payload is not None)
        async with contextlib.aclosing(wanted_payloads(fragments, wanted, room, self._do)) as payloads:
            async for fragment_id, payload, start in payloads:
                data = memoryview(payload.data).cast("B")[: start + left]
                frames = update_frames(
                    fragment_id,
                    data,
                    start=start,
                    chunk_bytes=lambda: min(self._readers.chunk_bytes, limit.chunk_bytes),
                )
                for frame in frames:
                    yield frame
                if (left := left - (len(data) - start)) <= 0:
                    return

    async def _commit(self, outer_step: int) -> Commit:
        """Return the update to an outer step, once it is here. Raises StaleError when it is still coming, GoneError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAITS_S):
                while (commit := self._find(outer_step)) is None:
                    await self._taken.wait()
                return commit
        if self._comes(outer_step):
            raise StaleError(f"the update to outer step {outer_step} is on its way here: ask again")
        raise GoneError(f"outer step {outer_step} was not taken here within {WAITS_S:g} s, or is not kept: ask the owner")
