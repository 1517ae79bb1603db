"""How a machine becomes a member: a member with the authority's key invites it, and any such member redeems the invitation on
its only port; then the new member asks any host for the run's settings, and the council lets it in.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority, made_at
from aggregator.security.certificates import public_der, public_key_of
from aggregator.security.members import Members
from aggregator.services.enrolment import Refusals, source_of
from aggregator.swarm.host_folder import AUTHORITY_FORMAT, HostFolder, authority_folder, identity_of, run_of
from aggregator.swarm.member_folder import MemberFolder
from edit.council.events import Claim
from edit.council.record import Enrolled, Record
from edit.durable_files import write_atomic, write_json
from edit.errors import ConfigError, EditError, RefusedError, StaleError, StorageError, TransportError
from editpb import council_pb2 as pb
from editpb import enrolment_pb2 as epb
from editpb.council_messages import SwarmDescription, description_from_pb
from editpb.identity import Identity, invited_by
from editpb.invitation import MAX_ENDPOINTS, TOKEN, Invitation, guest_key, is_endpoint
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import channel_options
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc, handshake_refusal
from editpb.validity import Validity

__all__ = ["Gate", "SwarmEnrolment", "addresses_of", "invite", "keep_authority", "open_authority", "take_settings"]

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
    folder = authority_folder(path)
    there = all((folder / name).exists() for name in ("run.json", "ca.key"))
    return Authority.load(folder, run_of(path)) if there else None


def keep_authority(path: Path, run_id: str, key: bytes) -> Authority:
    """Keep a copy of the authority's key (PEM) in a member's folder. It can be repeated; a kill leaves no half of it.

    Raises RefusedError when it is not the key of the authority that this member trusts, ConfigError, StorageError.
    """
    folder, certificate = authority_folder(path), path / "ca.pem"
    try:
        trusted = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key, None)
    except OSError as error:
        raise ConfigError(f"{certificate}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise RefusedError("this is not a private key") from error
    if private.public_key() != trusted.public_key():
        raise RefusedError("this is the key of another authority than this member trusts")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made ({error.strerror})") from error
    write_json(folder / "run.json", {"run_id": run_id}, version=AUTHORITY_FORMAT)
    write_atomic(folder / "ca.pem", certificate.read_bytes())
    Members(folder / "members.json", new=True)
    write_atomic(folder / "ca.key", key, mode=0o600)  # last: its presence means that all is there
    return Authority.load(folder, run_id)


def invite(path: Path, peer_id: str, *, hours: float, now: float) -> Invitation:
    """Return a new invitation, which any member with the authority's key redeems. now: unix seconds.

    Raises ConfigError, RefusedError, StorageError.
    """
    authority = Authority.load(authority_folder(path), run_of(path))
    folder, member, own = HostFolder.load(path), MemberFolder(path), identity_of(path).peer_id
    saved = member.saved()
    record = saved.record if saved is not None else None
    if record is not None and peer_id in record.evicted:
        raise RefusedError(f"{peer_id} was evicted ({record.evicted[peer_id]}); choose another name")
    known, holders = addresses_of(record), record.holders if record is not None else ()
    port = int(folder.listen.rpartition(":")[2]) or member.port()
    if folder.advertise and port:
        known[own] = (f"{folder.advertise}:{port}",)
    if not known.keys() & {own, *holders}:
        raise ConfigError(f"{path}: nobody reaches this member yet; start it, with --advertise HOST")
    first = sorted(known, key=lambda each: (each != own, each not in holders))  # who redeems it comes first
    hosts = {each: known[each] for each in first[:MAX_ENDPOINTS]}
    before = record.enrolled.get(peer_id) if record is not None else None
    after = before.invitation if before is not None else ""
    return authority.invite_to_swarm(peer_id, hosts=hosts, lifetime_s=hours * 3600, now=now, after=after)


class Gate(Protocol):
    """What Enrolment needs of a host."""

    run_id: str

    @property
    def authority(self) -> Authority | None:
        """The run's, if this member has a copy."""
        ...

    @property
    def holders(self) -> tuple[str, ...]:
        """Who has one, by the record."""
        ...

    @property
    def reachable(self) -> list[str]:
        """HOST:PORT of members."""
        ...

    def unix(self) -> float:
        """Return the time in seconds since 1970."""
        ...

    async def claim(self, claim: Claim) -> None:
        """Have all agree on who is enrolled with an invitation. Raises EditError."""
        ...


class SwarmEnrolment:
    """Enrolment of enrolment.proto, at a member with the authority's key.

    The certificate of the connection is that of the invitation: it says whom that is for, and until when, and its serial number
    is the invitation's. For which key it is used all members agree on before there is a certificate for that key. So nothing of
    it is kept here, and who lost the answer may ask again, here or elsewhere.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate, self._refusals = gate, Refusals()

    async def Enrol(self, request: epb.EnrolRequest, context: Any) -> epb.EnrolReply:
        """Redeem an invitation. Aborts with the status of RefusedError, RemoteProtocolError, StaleError or TransportError."""
        async with abort_on_error(context):
            try:
                return await self._redeem(request, guest_of(context))
            except EditError as error:
                self._refusals.log(source_of(context.peer()), str(error), self._gate.unix())
                raise
        raise AssertionError("unreachable: abort raises")

    async def _redeem(self, request: epb.EnrolRequest, guest: x509.Certificate) -> epb.EnrolReply:
        gate, identity, now = self._gate, invited_by(guest), self._gate.unix()
        if gate.authority is None:
            holders = ", ".join(gate.holders)
            raise StaleError(f"this member has no copy of the authority's key; ask one of {holders or 'those that have'}")
        if identity.run_id != gate.run_id or identity.role != "peer":
            raise RefusedError(f"the invitation is for {identity.uri}, not for a peer of {gate.run_id}")
        if not TOKEN.fullmatch(request.token) or guest_key(request.token).public_key() != guest.public_key():
            raise RefusedError("the token is not that of the invitation whose certificate was shown")
        if now >= Validity.of(guest).ends:
            raise RefusedError("this invitation has expired; ask for a new one")
        key, number = public_key_of(request.csr_der), f"{guest.serial_number:032x}"
        await gate.claim(Claim(identity.peer_id, Enrolled(number, hashlib.sha256(public_der(key)).hexdigest())))
        certificate = gate.authority.enrol(identity, key, now=max(now, made_at(number)))
        _log.info("%s is enrolled", identity.peer_id)
        return epb.EnrolReply(
            certificate_der=certificate.public_bytes(serialization.Encoding.DER),
            ca_der=gate.authority.ca_der,
            run_id=identity.run_id,
            peer_id=identity.peer_id,
            role=identity.role,
            endpoints=gate.reachable,
        )


def guest_of(context: Any) -> x509.Certificate:
    """Return the certificate of the caller's connection."""
    return x509.load_pem_x509_certificate(next(iter(context.auth_context()["x509_pem_cert"])))


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
