"""Where the hosts of a swarm are, as this peer's own says when the peer starts; from then on `owners` follows them."""

from __future__ import annotations

import asyncio
import logging

import grpc

from edit.errors import ConfigError, OutdatedError, TransportError
from editpb import council_pb2 as pb
from editpb.council_messages import SwarmDescription, description_from_pb
from editpb.identity import Identity
from editpb.invitation import is_loopback
from editpb.transport.channel_options import channel_options
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc

__all__ = ["describe_swarm", "hosts_of"]

ANSWER_S = 10.0
AGAIN_S = 0.2
_log = logging.getLogger(__name__)


def hosts_of(swarm: SwarmDescription, peer_id: str, own: str = "") -> dict[str, str]:
    """Return HOST:PORT of each host by peer_id, this peer's own first.

    Args:
        peer_id: of this peer.
        own: HOST:PORT of its own host, as this process reaches it; '': this rank runs on another machine, and reaches it where
            the other members do. Raises ConfigError where they do not.
    """
    others = {other: each[0] for other, each in swarm.hosts.items() if each and other != peer_id}
    if own:
        return {peer_id: own, **others}
    advertised = [each for each in swarm.hosts.get(peer_id, ()) if not is_loopback(each.rpartition(":")[0])]
    if not advertised:
        raise ConfigError(
            "this rank is not on the machine of rank 0, whose host it cannot reach; start the member with --advertise HOST"
        )
    return {peer_id: advertised[0], **others}


async def describe_swarm(own: str, identity: Identity, credentials: grpc.ChannelCredentials) -> SwarmDescription:
    """Return where the hosts are and how many parts there are, once this peer's own host was let in.

    Args:
        own: HOST:PORT of this peer's own host, as this process reaches it.
        identity: of this peer.
        credentials: likewise.

    Raises RefusedError, EvictedError, RemoteProtocolError.
    """
    told = ""
    while True:
        try:
            return await _describe(own, identity, credentials)
        except (TransportError, OutdatedError) as error:
            if isinstance(error, OutdatedError) and str(error) != told:
                told = str(error)
                _log.info("waiting: %s", error)
            await asyncio.sleep(AGAIN_S)


async def _describe(own: str, identity: Identity, credentials: grpc.ChannelCredentials) -> SwarmDescription:
    options = channel_options(own, server_name=identity.server_name)
    async with grpc.aio.secure_channel(own, credentials, options=options) as channel:
        try:
            return description_from_pb(await council_stub(channel).Describe(pb.DescribeRequest(), timeout=ANSWER_S))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
