"""Tells a peer's own host for which owners the peer waits.

Hosts notice by this an owner that takes contributions and makes no update: it may keep its lease and its heartbeats. See
`edit.council.machine`, rule 18.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from editpb import council_pb2_grpc
from editpb.council_messages import waiting_to_pb
from editpb.identity import Identity
from peers.carriers.swarm.channels import PartChannels

__all__ = ["WaitingNews"]

EACH_S = 5.0
ANSWER_S = 10.0
_log = logging.getLogger(__name__)


class WaitingNews:
    """See above. On the loop's thread.

    Args:
        identity: of this peer.
        channels: of a part; what they know of this peer's own host counts.
        awaited: returns, of each part in order, the outer step that the peer is at and waits to leave; None: it does not wait.
    """

    def __init__(self, identity: Identity, channels: PartChannels, awaited: Callable[[], Sequence[int | None]]) -> None:
        self._identity, self._channels, self._awaited = identity, channels, awaited
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Tell it now and then, until `stop`."""
        self._task = asyncio.current_task()
        try:
            while True:
                await asyncio.sleep(EACH_S)
                waiting = {part: step for part, step in enumerate(self._awaited()) if step is not None}
                if waiting:
                    await self._tell(waiting)
        finally:
            await self._forget()

    def stop(self) -> None:
        """End `run`."""
        if self._task is not None:
            self._task.cancel()

    async def _tell(self, waiting: dict[int, int]) -> None:
        if self._channel is None:
            own = self._channels.hosts[self._identity.peer_id]
            self._channel = self._channels.member(own, self._identity.server_name)
        try:
            await council_pb2_grpc.CouncilStub(self._channel).Waiting(waiting_to_pb(waiting), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            _log.debug("this peer's host was not told that it waits: %s", error.details())
            await self._forget()

    async def _forget(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._channels.release(channel)
