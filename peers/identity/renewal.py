"""Keeps a peer's certificate renewed while its process runs: over the present one, for the same key, without an invitation.

Only peer.pem is replaced, as a whole. The channels that are open stay open, and calls under way go on: the coordinator accepts
the certificate before until it expires. New channels, to whichever aggregator or member, show the new one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from edit.errors import EditError, TransportError
from editpb import enrolment_pb2, enrolment_pb2_grpc
from editpb.identity import Identity
from editpb.transport.channel_options import attempts
from editpb.transport.status import from_rpc
from editpb.validity import Notice
from peers.carriers.hub.channels import Channels
from peers.identity.peer_folder import Enrolment, PeerFolder

__all__ = ["Renewal"]

LOOK_S = 3600.0
AGAIN_S = 60.0  # after one that failed; in a swarm between two rounds of questions to the hosts
STORED_S = 5.0  # between two looks for what another process has stored
ANSWER_S = 15.0
_log = logging.getLogger("peers")


class Renewal:
    """Looks after the certificate of one peer. Its methods run on the loop's thread.

    Args:
        folder: of the peer.
        enrolled: what was loaded from it.
        channels: to the coordinator, or in a swarm to a part; they, and those made from them, get the new credentials.
        asks: whether this process asks the coordinator. Of the ranks on one machine one does; the others find what it has
            stored. In a swarm one does only on a machine without the peer's host; the host stores what it was given.
        unix: the clock, in seconds since 1970.
        hosts: in a swarm, returns HOST:PORT of the hosts that are known, by peer_id: they are asked in turn, for only some have
            the authority's key.
    """

    def __init__(
        self,
        folder: PeerFolder,
        enrolled: Enrolment,
        channels: Channels,
        *,
        asks: bool = True,
        unix: Callable[[], float] = time.time,
        hosts: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._folder, self._enrolled, self._channels = folder, enrolled, channels
        self._asks, self._unix, self._hosts = asks, unix, hosts
        self._asked_at = -math.inf  # when the hosts were asked last
        self._trouble = ""  # why the last attempt failed
        self._said: object = None

    async def keep(self) -> None:
        """Look at once, and then every hour; after a renewal that failed, a minute later.

        More often where another process renews it, or replaces the run's authority.
        """
        while True:
            await self.look()
            if self._asks and self._hosts is None:
                await asyncio.sleep(AGAIN_S if self._trouble else LOOK_S)
            else:
                await asyncio.sleep(STORED_S)

    async def look(self) -> None:
        """Take a certificate that another process has stored, or renew a due one; warn of one that ends soon nevertheless."""
        try:
            await self._take_stored()
            if self._asks and self._enrolled.validity.renewal_due(self._unix()):
                if self._hosts is not None:
                    await self._ask_hosts(self._hosts())
                else:
                    await self._take(await self._ask(), "the coordinator's clock")
            else:
                self._trouble = ""
        except EditError as error:
            self._trouble = str(error)
        self._say()

    async def _take_stored(self) -> None:
        stored = await asyncio.to_thread(self._folder.load, swarm=not self._enrolled.endpoints)
        before, self._enrolled = self._enrolled, stored
        if (stored.certificate, stored.authority) != (before.certificate, before.authority):
            self._channels.renew(stored.credentials)
        if stored.certificate != before.certificate:
            _log.info("%s: the certificate is renewed and %s", self._folder.path, stored.validity.text(self._unix()))

    async def _take(self, certificate: bytes, clock: str) -> None:
        """Store a new certificate, in DER, and use it. Raises EditError for one that does not fit. clock: it is dated by."""
        await asyncio.to_thread(self._folder.renew, self._enrolled, certificate, self._unix(), clock)
        await self._take_stored()
        self._trouble = ""

    async def _ask_hosts(self, hosts: Mapping[str, str]) -> None:
        """Take the first new certificate that fits, of whichever host; once in AGAIN_S. One that lies is passed over."""
        if self._unix() < self._asked_at + AGAIN_S:
            return
        self._asked_at, self._trouble = self._unix(), "nobody to ask"
        for peer_id, address in tuple(hosts.items()):
            identity = Identity(self._enrolled.run_id, "peer", peer_id)
            channel = self._channels.member(address, identity.server_name)
            stub: Any = enrolment_pb2_grpc.RenewalStub(channel)
            try:
                reply: enrolment_pb2.RenewReply = await stub.Renew(enrolment_pb2.RenewRequest(), timeout=ANSWER_S)
                await self._take(reply.certificate_der, f"the clock of {peer_id}")
                return
            except grpc.aio.AioRpcError as error:
                self._trouble = f"{peer_id}: {from_rpc(error)}"
            except EditError as error:
                self._trouble = f"{peer_id}: {error}"
            finally:
                await self._channels.release(channel)

    async def _ask(self) -> bytes:
        """Return the new certificate in DER, of the first endpoint that answers. Raises EditError."""
        channels, silent = self._channels.to(self._enrolled.endpoints), TransportError("nobody to ask")
        for _ in attempts(channels.known):
            channel = channels.control()
            stub: Any = enrolment_pb2_grpc.RenewalStub(channel)
            try:
                reply: enrolment_pb2.RenewReply = await stub.Renew(enrolment_pb2.RenewRequest(), timeout=ANSWER_S)
                return reply.certificate_der
            except grpc.aio.AioRpcError as error:
                if not isinstance(blame := from_rpc(error), TransportError):
                    raise blame from error
                silent = blame
            finally:
                await channels.release(channel)
            channels.rotate()
        raise silent

    def _say(self) -> None:
        """Say what is new: that a renewal fails, louder the nearer the end is."""
        now, validity = self._unix(), self._enrolled.validity
        notice = validity.notice(now)
        if (notice, self._trouble) == self._said or (notice is Notice.NONE and not self._trouble):
            return
        self._said = notice, self._trouble
        because = f" and could not be renewed yet: {self._trouble}" if self._trouble else ""
        level = logging.INFO if notice is Notice.NONE else logging.WARNING
        _log.log(level, "%s: the certificate %s%s", self._folder.path, validity.text(now), because)
