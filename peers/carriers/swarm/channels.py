"""The channels of one part: to the host that owns it, as far as is known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TypeVar

import grpc

from edit.council.record import MOST_MEMBERS
from editpb.council_messages import PartOwner
from editpb.identity import Identity
from editpb.invitation import is_loopback
from editpb.transport.channel_options import CONNECT_MS
from editpb.transport.parts import in_part, owner_in
from editpb.transport.send_limit import UNLIMITED, SendLimit
from peers.carriers.hub.channels import Channels

__all__ = ["PartChannels"]

TAKEN_AGAIN_S = 30.0  # after which this peer's own host is asked for updates again, when it did not have one
MOST_STAYS = 10  # refusals of a host that owns the part by the news, and has not heard so itself; or the news was a lie

_Stub = TypeVar("_Stub")


class PartChannels(Channels):
    """As `Channels`. A host that does not own the part says who does, and that one is asked next; else all in turn.

    Args:
        hosts: HOST:PORT of each host, by peer_id; this peer's own first, which the news do not move.
        part: which all calls are for.
        credentials: of this peer.
        limit: of what is sent; not of what this peer's own host is sent on this machine.
        own_takes: whether this peer's own host is a member that takes the outer steps, and says what they are.
    """

    moves = True

    def __init__(
        self,
        run_id: str,
        hosts: Mapping[str, str],
        part: int,
        credentials: grpc.ChannelCredentials,
        limit: SendLimit = UNLIMITED,
        *,
        own_takes: bool = False,
    ) -> None:
        super().__init__((), credentials, limit)
        self._own_takes, self._taken_from = own_takes, -math.inf  # when it is asked again
        self._run_id, self._part, self._named = run_id, part, ""
        self._own, self._hosts = next(iter(hosts)), dict(hosts)
        self._served_from = 0  # the first round of the owner that was heard last
        self._told: PartOwner | None = None  # the news that was acted on last
        self._stays = 0  # refusals after it
        self._endpoints = tuple(self._hosts.values())

    @property
    def hosts(self) -> Mapping[str, str]:
        """HOST:PORT of each host that is known, by peer_id."""
        return self._hosts

    @property
    def limit(self) -> SendLimit:
        """See `Channels`."""
        own = self._hosts[self._own]
        return UNLIMITED if self.endpoint == own and is_loopback(own.rpartition(":")[0]) else super().limit

    def bound(self, stub: _Stub, *, taken: bool = False) -> _Stub:
        """See `Channels`."""
        return in_part(stub, self._part, taken=taken)

    @property
    def takes_itself(self) -> bool:
        """See `Channels`."""
        now = asyncio.get_running_loop().time()
        return self._own_takes and self.endpoint != self._hosts[self._own] and now >= self._taken_from

    def taken(self) -> grpc.aio.Channel | None:
        """See `Channels`."""
        return self._kept_to(self._hosts[self._own]) if self.takes_itself else None

    def not_taken(self) -> None:
        """See `Channels`."""
        self._taken_from = asyncio.get_running_loop().time() + TAKEN_AGAIN_S

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        """See `Channels`."""
        self._named = owner_in(error.trailing_metadata())

    def rotate(self) -> None:
        """See `Channels`."""
        named, self._named = self._named, ""
        if named and self._told is not None and self._told.first_round_id > self._served_from and self._stays < MOST_STAYS:
            self._stays += 1
            named = self._told.peer_id
        super().rotate()
        if named in self._hosts:
            self._turn = list(self._hosts).index(named)
        self._moved()

    def welcomed(self, first_round_id: int) -> None:
        """See `Channels`. What waits to be tried again is tried now."""
        super().welcomed(first_round_id)
        self._served_from = first_round_id
        self._wake()

    def owned_by(self, owner: PartOwner) -> None:
        """Take the news of who owns the part, and go there unless that is old. Who said so may lie: then that host refuses."""
        if owner.first_round_id <= self._served_from or owner == self._told:
            return
        self._told, self._stays = owner, 0
        known = owner.peer_id in self._hosts
        if owner.addresses and owner.peer_id != self._own and (known or len(self._hosts) < MOST_MEMBERS):
            self._hosts[owner.peer_id] = owner.addresses[0]
            self._endpoints = tuple(self._hosts.values())
        if owner.peer_id in self._hosts:
            self.rtt_s, self._turn = 0.0, list(self._hosts).index(owner.peer_id)
            self._moved()

    def _channel(self, address: str, server_name: str = "", within_ms: int = CONNECT_MS) -> grpc.aio.Channel:
        peer_id = next((peer_id for peer_id, known in self._hosts.items() if known == address), "")
        return super()._channel(address, server_name or Identity(self._run_id, "peer", peer_id).server_name, within_ms)
