"""The channels of one part: to the host that owns it, as far as is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import grpc

from editpb.identity import Identity
from editpb.transport.parts import in_part, owner_in
from peers.carriers.hub.channels import Channels

__all__ = ["PartChannels"]

_Stub = TypeVar("_Stub")


class PartChannels(Channels):
    """As `Channels`. A host that does not own the part says who does, and that one is asked next; else all in turn.

    Args:
        hosts: HOST:PORT of each host, by peer_id.
        part: which all calls are for.
        credentials: of this peer.
    """

    moves = True

    def __init__(self, run_id: str, hosts: Mapping[str, str], part: int, credentials: grpc.ChannelCredentials) -> None:
        super().__init__(tuple(hosts.values()), credentials)
        self._peers, self._part, self._owner = tuple(hosts), part, ""
        names = (Identity(run_id, "peer", peer_id).server_name for peer_id in hosts)
        self._names = dict(zip(hosts.values(), names, strict=True))  # by address

    def bound(self, stub: _Stub) -> _Stub:
        """See `Channels`."""
        return in_part(stub, self._part)

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        """See `Channels`."""
        self._owner = owner_in(error.trailing_metadata())

    def rotate(self) -> None:
        """See `Channels`."""
        owner, self._owner = self._owner, ""
        super().rotate()
        if owner in self._peers:
            self._turn = self._peers.index(owner)

    def _channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        return super()._channel(address, server_name or self._names[address])
