"""Where the hosts of a swarm are, as this peer's own says when the peer starts; from then on `owners` follows them."""

from __future__ import annotations

import asyncio
import logging

import grpc

from edit.errors import StaleError, TransportError
from editpb import council_pb2 as pb
from editpb.council_messages import SwarmDescription, description_from_pb
from editpb.identity import Identity
from editpb.transport.channel_options import channel_options
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc

__all__ = ["hosts_of_swarm"]

ANSWER_S = 10.0
AGAIN_S = 0.2
_log = logging.getLogger(__name__)


async def hosts_of_swarm(own: str, identity: Identity, credentials: grpc.ChannelCredentials) -> tuple[dict[str, str], int]:
    """Return HOST:PORT of each host by peer_id, this peer's own first, and how many parts there are, once it was let in.

    Args:
        own: HOST:PORT of this peer's own host, as this process reaches it.
        identity: of this peer.
        credentials: likewise.

    Raises RefusedError, EvictedError, RemoteProtocolError.
    """
    told = ""
    while True:
        try:
            swarm = await _describe(own, identity, credentials)
        except (TransportError, StaleError) as error:
            if isinstance(error, StaleError) and str(error) != told:
                told = str(error)
                _log.info("waiting: %s", error)
            await asyncio.sleep(AGAIN_S)
        else:
            others = {peer_id: each[0] for peer_id, each in swarm.hosts.items() if each and peer_id != identity.peer_id}
            return {identity.peer_id: own, **others}, swarm.parts


async def _describe(own: str, identity: Identity, credentials: grpc.ChannelCredentials) -> SwarmDescription:
    options = channel_options(own, server_name=identity.server_name)
    async with grpc.aio.secure_channel(own, credentials, options=options) as channel:
        try:
            return description_from_pb(await council_stub(channel).Describe(pb.DescribeRequest(), timeout=ANSWER_S))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
