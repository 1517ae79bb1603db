"""Joining a run: create the key, redeem the invitation, check the reply, store it. Blocking, for the command line.

This is the only call without a member's certificate; it trusts only the authority in the invitation. A member of a swarm is
called with the certificate in the invitation: see `editpb.invitation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edit.errors import ConfigError, OutdatedError, RefusedError, RemoteProtocolError, RemoteStorageError, TransportError
from edit.plain_text import reason_of
from editpb import enrolment_pb2 as pb
from editpb import enrolment_pb2_grpc
from editpb.audit_log import log_origin
from editpb.folder_kinds import refuse_coordinators
from editpb.identity import MAX_CERTIFICATE_BYTES, Identity, certificate_fault
from editpb.invitation import MAX_ENDPOINTS, MAX_TEXT_CHARS, VERSION, Invitation, guest_key, is_endpoint
from editpb.transport.channel_options import attempts, connect_ms
from editpb.transport.http_proxy import through
from editpb.transport.status import from_rpc, handshake_refusal
from editpb.validity import Validity
from peers.carriers.hub.channels import enrolment_channel
from peers.carriers.hub.kept_receipts import pinned_key
from peers.identity.peer_folder import PeerFolder, key_pem

__all__ = ["UntrustedServerError", "invitation_text", "join"]

TIMEOUT_S = 15.0  # of each address
_MAX_PATH_CHARS = 255  # of the argument that names a file; an invitation is longer


class UntrustedServerError(RefusedError):
    """At an address of the invitation somebody shows a certificate that is not of its authority, or not valid now."""


def invitation_text(argument: str, stdin: TextIO) -> str:
    """Return the invitation that an argument of the command line means.

    `-` is a line of `stdin`, the path of a file the invitation among its lines, and anything else the invitation itself. Raises
    ConfigError when the file cannot be read or is empty, and for a short word that is neither a file nor the beginning of an
    invitation.
    """
    if argument == "-":
        return _not_empty(stdin.readline(MAX_TEXT_CHARS + 1), "standard input: ")
    path = Path(_not_empty(argument, ""))
    try:
        if len(argument) <= _MAX_PATH_CHARS and path.is_dir():
            raise ConfigError(f"{argument}: is a folder; name the file of an invitation")
        if len(argument) <= _MAX_PATH_CHARS and path.is_file():
            with path.open(encoding="utf-8") as file:
                text = _not_empty(file.read(MAX_TEXT_CHARS + 1), f"{argument}: ")
                return next((line for line in text.splitlines() if line.startswith(f"edit{VERSION}.")), text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{argument}: cannot be read ({reason_of(error)})") from error
    if len(argument) <= _MAX_PATH_CHARS and not argument.lstrip().startswith("edit"):
        raise ConfigError(f"{argument}: there is no such file, and it is not an invitation (one begins with edit{VERSION}.)")
    return argument


def _not_empty(text: str, where: str) -> str:
    if not text.strip():
        words = f"the invitation is empty; one begins with edit{VERSION}. and is printed by `edit-coordinator invite`"
        raise ConfigError(f"{where}{words}")
    return text


def join(
    invitation: str, home: Path, now: float, *, swarm: bool = False, observes: bool = False, timeout_s: float = TIMEOUT_S
) -> Identity:
    """Redeem the text of an invitation into the folder `home`.

    It can be repeated after any failure with the same invitation: the key in `home` is reused. One process at a time joins.

    Args:
        now: unix seconds.
        swarm: whether it must be to a swarm; else it must be to a run with a coordinator.
        observes: in a swarm, whether it must be for an observer; else it must be for a peer.
        timeout_s: of each address that is tried.

    Raises ConfigError (text, folder, another join there), RefusedError (expired, used, unknown, wrong authority),
    TransportError (no answer), RemoteStorageError (the other side's disk), RemoteProtocolError (the reply does not fit),
    StorageError.
    """
    invited = Invitation.decode(invitation, now)
    if swarm != (invited.swarm is not None):
        to, command = ("a run with a coordinator", "edit-peer join") if swarm else ("a swarm", "edit-peer swarm join")
        raise ConfigError(f"this is an invitation to {to}; redeem it with: {command}")
    if swarm and observes != (invited.identity.role == "observer"):
        command = "edit-peer swarm join" if observes else "edit-peer join"
        raise ConfigError(
            f"this is an invitation for {invited.identity.role} {invited.identity.peer_id}; redeem it with: {command}"
        )
    folder, authority = PeerFolder(home), _authority(invited)
    refuse_coordinators(home)
    with folder.joining():
        _check_unclaimed(folder, invited.identity)
        key = folder.make_key()
        if invited.log_key:
            pinned_key(home, invited.log_key, log_origin(invited.identity.run_id))
        request = pb.EnrolRequest(token=invited.token, csr_der=_request(key, invited.identity))
        reply = _first_answer(invited, lambda door, within_ms: _call(door, authority, request, timeout_s, within_ms))
        _check_reply(reply, invited, authority, key)
        signer = "the coordinator's clock" if invited.swarm is None else "the clock of the member that signed it"
        _check_clock(reply.certificate_der, now, signer)
        endpoints = tuple(reply.endpoints) if invited.swarm is None else ()
        folder.store(invited.identity, endpoints, reply.certificate_der, invited.ca)
    return invited.identity


def _check_unclaimed(folder: PeerFolder, invited: Identity) -> None:
    present = folder.identity()
    if present is not None and present != invited:
        raise ConfigError(
            f"{folder.path} belongs to {present.peer_id} ({present.role}) of run {present.run_id}; "
            f"choose another --home for {invited.peer_id} of run {invited.run_id}"
        )


def _authority(invitation: Invitation) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(invitation.ca)
    except ValueError as error:
        raise ConfigError("the invitation's authority is damaged; copy the whole line again") from error


def _request(key: ec.EllipticCurvePrivateKey, identity: Identity) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.peer_id)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


@dataclass(frozen=True, slots=True)
class _Door:
    """Where an invitation may be redeemed."""

    endpoint: str
    server_name: str = ""  # "": the endpoint's host
    guest: tuple[bytes | None, bytes | None] = (None, None)  # key and certificate to show


def _doors(invitation: Invitation) -> tuple[_Door, ...]:
    if (swarm := invitation.swarm) is None:
        return tuple(map(_Door, invitation.enrol))
    key = guest_key(invitation.token)
    try:
        certificate = x509.load_der_x509_certificate(swarm.certificate)
    except ValueError as error:
        raise ConfigError("the invitation's certificate is damaged; copy the whole line again") from error
    if certificate.public_key() != key.public_key():
        raise ConfigError("the invitation is altered: its certificate is for another token; copy the whole line again")
    guest = key_pem(key), certificate.public_bytes(serialization.Encoding.PEM)
    names = {peer_id: Identity(invitation.identity.run_id, "peer", peer_id).server_name for peer_id in swarm.hosts}
    return tuple(_Door(each, names[peer_id], guest) for peer_id, addresses in swarm.hosts.items() for each in addresses)


def _first_answer(invitation: Invitation, call: Callable[[_Door, int], pb.EnrolReply]) -> pb.EnrolReply:
    """Return the first reply. A refusal counts as a reply; silence, or a server of another authority, does not.

    call: at a door, with how many milliseconds connecting may take. Who was silent is tried again, with more of them.

    In a swarm, another host may know the invitation that one refuses, or have a disk with room.
    """
    strangers: list[str] = []
    silent: dict[_Door, str] = {}
    refused: RefusedError | RemoteStorageError | None = None
    doors = _doors(invitation)
    for turn in attempts(len(doors)):
        door = doors[turn % len(doors)]
        if turn >= len(doors) and door not in silent:
            continue
        silent.pop(door, None)
        try:
            return call(door, connect_ms(turn, len(doors)))
        except RemoteStorageError as error:
            refused = refused or RemoteStorageError(f"{door.endpoint}: {error}")
            if invitation.swarm is None:
                raise refused from None
        except (TransportError, OutdatedError) as error:
            if (stranger := handshake_refusal(str(error))) is not None:
                strangers.append(f"{door.endpoint}: {stranger}")
            else:
                silent[door] = f"{door.endpoint}{through(door.endpoint)}: {error}"
        except RefusedError as error:
            if invitation.swarm is None:
                raise
            if not isinstance(refused, RefusedError):  # it counts for more than a disk that is full
                refused = error
    if refused is not None:
        raise refused
    if strangers and not silent:
        raise UntrustedServerError(f"{'; '.join(strangers)}; the invitation is for run {invitation.identity.run_id}")
    who = "coordinator" if invitation.swarm is None else "member that invited you"
    told = "; ".join([*silent.values(), *strangers])
    raise TransportError(f"no answer from {told}; is the {who} running and reachable?")


def _call(
    door: _Door, authority: x509.Certificate, request: pb.EnrolRequest, timeout_s: float, within_ms: int
) -> pb.EnrolReply:
    pem = authority.public_bytes(serialization.Encoding.PEM)
    opened = enrolment_channel(door.endpoint, pem, server_name=door.server_name, guest=door.guest, within_ms=within_ms)
    with opened as channel:
        stub: Any = enrolment_pb2_grpc.EnrolmentStub(channel)
        try:
            reply: pb.EnrolReply = stub.Enrol(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return reply


def _check_clock(certificate_der: bytes, now: float, signer: str) -> None:
    """Raise ConfigError when the certificate, which was issued just now by that clock, is not valid yet: the clocks differ."""
    validity = Validity.of(x509.load_der_x509_certificate(certificate_der))
    if (early := validity.not_yet(now, signer)) is not None:
        raise ConfigError(f"{early}; set it, and run the same command again")


def _check_reply(
    reply: pb.EnrolReply, invitation: Invitation, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    identity, endpoints = invitation.identity, list(reply.endpoints)
    if (reply.run_id, reply.role, reply.peer_id) != (identity.run_id, identity.role, identity.peer_id):
        raise RemoteProtocolError("the coordinator enrolled another identity than the invitation names")
    if reply.ca_der != invitation.ca:
        raise RemoteProtocolError("the coordinator sent another authority than the invitation names")
    if not 1 <= len(endpoints) <= MAX_ENDPOINTS or not all(is_endpoint(each) for each in endpoints):
        raise RemoteProtocolError("the coordinator sent no usable addresses")
    if len(reply.certificate_der) > MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(f"the coordinator sent a certificate of {len(reply.certificate_der)} bytes")
    try:
        certificate = x509.load_der_x509_certificate(reply.certificate_der)
    except ValueError as error:
        raise RemoteProtocolError("the coordinator sent a damaged certificate") from error
    if (fault := certificate_fault(certificate, [authority], identity, key)) is not None:
        raise RemoteProtocolError(f"the coordinator's answer does not fit: {fault}")
