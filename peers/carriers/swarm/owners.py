"""Is told by a host who owns each part of the model, and tells the channels.

Without it a peer would learn that an owner was stopped, or lost its network, from gRPC's keepalive after 15 s; the hosts know
it after a lease. The first host that is asked is the first that is known, which is this peer's own; while one says nothing for
SILENCE_S, the next is asked. To connect there is more time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from edit.errors import RemoteProtocolError
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from editpb.council_messages import owners_from_pb
from editpb.identity import Identity
from editpb.transport.channel_options import connect_ms
from peers.carriers.swarm.channels import PartChannels

__all__ = ["OwnerWatch"]

SILENCE_S = 3.0  # a host says something each second
FIRST_DELAY_S, LAST_DELAY_S = 0.2, 2.0  # before another host is asked; doubling while none answers
EACH_S = 0.1  # at least, from one piece of news to the next that is read


class OwnerWatch:
    """See above. On the loop's thread.

    Args:
        run_id: of the run.
        channels: of all parts, in order.
    """

    def __init__(self, run_id: str, channels: Sequence[PartChannels]) -> None:
        self._run_id, self._channels = run_id, channels
        self._asking = channels[0].to(())  # those of a part are closed when the settings are read, and its calls end
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Watch until `stop`."""
        self._task = asyncio.current_task()
        delay_s, turn = FIRST_DELAY_S, 0
        while True:
            heard = await self._listen(turn)
            delay_s = FIRST_DELAY_S if heard else min(2 * delay_s, LAST_DELAY_S)
            turn += 1
            await asyncio.sleep(delay_s)

    def stop(self) -> None:
        """End `run`."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self, turn: int) -> bool:
        """Take what one host says until it says no more; return whether it said anything."""
        hosts, heard = self._channels[0].hosts, False
        peer_id, address = list(hosts.items())[turn % len(hosts)]
        within_ms = connect_ms(turn, len(hosts))
        channel = self._asking.member(address, Identity(self._run_id, "peer", peer_id).server_name, within_ms)
        call = council_pb2_grpc.CouncilStub(channel).WatchOwners(pb.OwnersRequest())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S if heard else within_ms / 1000 + SILENCE_S):
                    message = await call.read()
                if not isinstance(message, pb.Owners):
                    return heard  # grpc.aio.EOF
                self._tell(message)
                heard = True
                await asyncio.sleep(EACH_S)
        except (grpc.aio.AioRpcError, RemoteProtocolError, TimeoutError):
            return heard
        finally:
            call.cancel()
            await self._asking.release(channel)

    def _tell(self, message: pb.Owners) -> None:
        if not message.parts:
            return  # the host has no record yet
        owners = owners_from_pb(message)
        if len(owners) != len(self._channels):
            raise RemoteProtocolError(f"a host speaks of {len(owners)} parts, not of {len(self._channels)}")
        for channels, owner in zip(self._channels, owners, strict=True):
            channels.owned_by(owner)
