"""How a machine becomes a member: a member with the run's authority invites it, and redeems the invitation on its only port;
then the new member asks any host for the run's settings, and the council lets it in.

An invitation is redeemed where it was made: that folder knows whether it was used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from aggregator.run_feed import EventLog, RunFeed
from aggregator.security.authority import Authority
from aggregator.services.enrolment import EnrolmentService
from aggregator.swarm.host_folder import HostFolder, authority_folder, identity_of, run_of
from aggregator.swarm.member_folder import MemberFolder
from edit.council.record import Record
from edit.durable_files import write_atomic
from edit.errors import ConfigError, EditError, RefusedError, StaleError, TransportError
from editpb import council_pb2 as pb
from editpb import enrolment_pb2 as epb
from editpb.council_messages import SwarmDescription, description_from_pb
from editpb.identity import Identity
from editpb.invitation import MAX_ENDPOINTS, Invitation, is_endpoint
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import channel_options
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc, handshake_refusal

__all__ = ["addresses_of", "enrolment", "invite", "open_authority", "take_settings"]

ANSWER_S = 15.0  # of each host that is asked for the settings
AGAIN_S = 2.0
_log = logging.getLogger(__name__)


def addresses_of(record: Record | None) -> dict[str, tuple[str, ...]]:
    """Return HOST:PORT of each member that accepts connections; what a member says that is no address is left out."""
    members = record.members.items() if record is not None else ()
    found = {peer_id: tuple(filter(is_endpoint, each.addresses)) for peer_id, each in members if each.reachable}
    return {peer_id: addresses for peer_id, addresses in found.items() if addresses}


def open_authority(path: Path) -> Authority | None:
    """Return the run's authority, if this member has it. Raises ConfigError, StorageError."""
    return Authority.load(authority_folder(path), run_of(path)) if (authority_folder(path) / "run.json").exists() else None


def invite(path: Path, peer_id: str, *, hours: float, now: float) -> Invitation:
    """Return a new invitation, which this member redeems. now: unix seconds. Raises ConfigError, RefusedError, StorageError."""
    authority = Authority.load(authority_folder(path), run_of(path))
    folder, member, own = HostFolder.load(path), MemberFolder(path), identity_of(path).peer_id
    saved = member.saved()
    port = int(folder.listen.rpartition(":")[2]) or member.port()
    if not folder.advertise or not port:
        raise ConfigError(f"{path}: nobody reaches this member yet; start it, with --advertise HOST")
    others = addresses_of(saved.record if saved is not None else None)
    hosts = {own: (f"{folder.advertise}:{port}",), **{peer_id: each for peer_id, each in others.items() if peer_id != own}}
    kept = dict([*hosts.items()][:MAX_ENDPOINTS])
    return authority.invite(peer_id, role="peer", hosts=kept, lifetime_s=hours * 3600, now=now)


def enrolment(authority: Authority | None, unix: Callable[[], float], endpoints: Callable[[], Sequence[str]]) -> Any:
    """Return what serves Enrolment. Where there is no authority, it says so."""
    if authority is None:
        return _NoEnrolment()
    feed = RunFeed(unix)
    feed.subscribe(EventLog().on_event)
    return EnrolmentService(authority, unix, endpoints, feed)


class _NoEnrolment:
    """Enrolment where nobody can be enrolled."""

    async def Enrol(self, request: epb.EnrolRequest, context: Any) -> None:
        """See the service."""
        async with abort_on_error(context):
            raise StaleError("this member does not redeem invitations; ask the one that made it")


async def take_settings(
    path: Path, credentials: grpc.ChannelCredentials, me: Identity, hosts: Mapping[str, Sequence[str]]
) -> None:
    """Ask hosts in turn for run.toml and the model, until one has answered, and write them.

    Raises RefusedError, EvictedError, StorageError, ConfigError where nobody is known.
    """
    told = ""
    while True:
        why: EditError = ConfigError(f"{path}: knows no host; join with an invitation")
        for peer_id, address in [(peer_id, each) for peer_id, addresses in hosts.items() for each in addresses]:
            try:
                found = await _describe(address, credentials, Identity(me.run_id, "peer", peer_id).server_name)
                if found.schema:
                    write_atomic(path / "schema.json", found.schema)
                write_atomic(path / "run.toml", found.run_toml)
                return
            except (TransportError, StaleError) as error:
                why = error
        if isinstance(why, ConfigError):
            raise why
        if str(why) != told:
            told = str(why)
            _log.info("waiting for a host that says the run's settings: %s", why)
        await asyncio.sleep(AGAIN_S)


async def _describe(address: str, credentials: grpc.ChannelCredentials, server_name: str) -> SwarmDescription:
    async with grpc.aio.secure_channel(
        address, credentials, options=channel_options(address, server_name=server_name)
    ) as channel:
        try:
            reply = await council_stub(channel).Describe(pb.DescribeRequest(settings=True), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            stranger = handshake_refusal(error.details() or "")
            raise (RefusedError(f"{address}: {stranger}") if stranger else from_rpc(error)) from None
        return description_from_pb(reply)
