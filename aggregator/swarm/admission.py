"""How a machine becomes a member: a member with the authority's key invites it, and any such member redeems the invitation on
its only port; then the new member asks any host for the run's settings, and the council lets it in.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.security.authority import Authority, load_key
from aggregator.security.certificates import public_der, public_key_of
from aggregator.security.members import Members
from aggregator.services.enrolment import Refusals, source_of
from aggregator.swarm.callers import Callers, certificate_of
from aggregator.swarm.host_folder import (
    AUTHORITY_FORMAT,
    HostFolder,
    Settings,
    authority_folder,
    credentials,
    identity_of,
    run_of,
)
from aggregator.swarm.member_folder import MemberFolder
from edit.council.events import Claim
from edit.council.record import Enrolled, Record, Root
from edit.durable_files import write_atomic, write_json
from edit.errors import (
    ConfigError,
    EditError,
    EvictedError,
    OutdatedError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    StorageError,
    TransportError,
)
from edit.plain_text import reason_of
from edit.trust.signatures import statement
from editpb import council_pb2 as pb
from editpb import enrolment_pb2 as epb
from editpb.council_messages import SwarmDescription, description_from_pb
from editpb.identity import MAX_CERTIFICATE_BYTES, Identity, certificate_fault, invited_by, is_signed_by
from editpb.invitation import MAX_ENDPOINTS, TOKEN, Invitation, endpoint_of, guest_key, is_endpoint
from editpb.limits import one_line
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import channel_options, connect_ms
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc, swarm_refusal
from editpb.validity import Notice, Validity, over

__all__ = [
    "REPLACE_AUTHORITY",
    "Gate",
    "OwnCertificate",
    "SwarmEnrolment",
    "SwarmRenewal",
    "Trust",
    "Waiting",
    "addresses_of",
    "authority_context",
    "invite",
    "keep_authority",
    "open_authority",
    "root_of",
    "take_settings",
]

ANSWER_S = 15.0  # of each host that is asked for the settings
AGAIN_S = 2.0
REPLACE_AUTHORITY = "replace it with: edit-peer swarm new-authority"  # what helps before it ends
SAY_S = 10.0  # between two lines that say what is waited for
JOIN_S = 120.0  # after which a member that was never let in gives up
MOST_WHAT = 600  # characters of such a line
_ENDORSES = b"edit: this authority takes the place of the one that signs, 1\n"  # its key signs certificates, too
_log = logging.getLogger(__name__)


def addresses_of(record: Record | None) -> dict[str, tuple[str, ...]]:
    """Return HOST:PORT of each member that accepts connections; what a member says that is no address is left out."""
    members = record.members.items() if record is not None else ()
    found = {peer_id: tuple(filter(is_endpoint, each.addresses)) for peer_id, each in members if each.reachable}
    return {peer_id: addresses for peer_id, addresses in found.items() if addresses}


def root_of(certificate: x509.Certificate, before: ec.EllipticCurvePrivateKey | None = None) -> Root:
    """Return how the record names an authority. before: the key of the one that it takes the place of."""
    der = certificate.public_bytes(serialization.Encoding.DER)
    endorsement = before.sign(_ENDORSES + der, ec.ECDSA(hashes.SHA256())) if before is not None else b""
    return Root(base64.b64encode(der).decode(), base64.b64encode(endorsement).decode())


class Trust:
    """The authorities of the run that a member trusts, in its folder's ca.pem: the present one first.

    Those before it stay while other members have certificates of them. Another one is trusted when the present one has endorsed
    it, whoever says that it is agreed on. Raises ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / "ca.pem"
        try:
            self._roots = x509.load_pem_x509_certificates(self._file.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._file}: cannot be read ({reason_of(error)})") from error

    @property
    def present(self) -> x509.Certificate:
        """The certificate of the authority that gives orders and lets others in."""
        return self._roots[0]

    @property
    def pem(self) -> bytes:
        """All of them, in PEM."""
        return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in self._roots)

    def check(self, root: Root) -> x509.Certificate:
        """Return the certificate of an authority that is to take the place of the present one, or is trusted already.

        Raises RefusedError unless the present one has endorsed it.
        """
        return self._checked(root, self._roots)

    def leads_to(self, root: Root) -> bool:
        """Return whether an authority is the present one, or is endorsed by that."""
        try:
            self._checked(root, self._roots[:1])
        except RefusedError:
            return False
        return True

    @staticmethod
    def _checked(root: Root, trusted: Sequence[x509.Certificate]) -> x509.Certificate:
        try:
            der, endorsement = base64.b64decode(root.certificate), base64.b64decode(root.endorsement)
            certificate = x509.load_der_x509_certificate(der)
            if certificate not in trusted:
                key = trusted[0].public_key()
                assert isinstance(key, ec.EllipticCurvePublicKey)
                key.verify(endorsement, _ENDORSES + der, ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature) as error:
            raise RefusedError("the present authority has not endorsed the one that is to take its place") from error
        if not isinstance(certificate.public_key(), ec.EllipticCurvePublicKey):
            raise RefusedError("the key of the new authority is not P-256")
        return certificate

    def follow(self, roots: Sequence[Root]) -> bool:
        """Trust what a committed record says, and no more; return whether that is new. Raises RefusedError, StorageError.

        From the present one on, each must be endorsed by the one before it. Those before that are trusted only if they are
        already: who joins between two replacements knows nothing of them.
        """
        own = root_of(self.present).certificate
        begin = max((at for at, root in enumerate(roots) if root.certificate == own), default=0)
        earlier = {root.certificate for root in roots[:begin]}
        found = [each for each in self._roots if root_of(each).certificate in earlier]
        trusted = self._roots
        for root in roots[begin:]:
            found.insert(0, self._checked(root, trusted))
            trusted = found[:1]
        if not found or found == self._roots:
            return False
        self._roots = found
        write_atomic(self._file, self.pem)
        return True


def open_authority(path: Path) -> Authority | None:
    """Return the run's authority, if this member has it. Raises ConfigError, StorageError."""
    folder = authority_folder(path)
    there = all((folder / name).exists() for name in ("run.json", "ca.key"))
    return Authority.load(folder, run_of(path)) if there else None


def authority_context(run_id: str, peer_id: str) -> bytes:
    """Return with what the authority's key is sealed for a member."""
    return statement("edit-authority-v1", (run_id, peer_id))


def keep_authority(path: Path, run_id: str, key: bytes) -> Authority:
    """Keep a copy of the authority's key (PEM) in a member's folder. It can be repeated; a kill leaves no half of it.

    Raises RefusedError when it is not the key of the authority that this member trusts, ConfigError, StorageError.
    """
    folder, certificate = authority_folder(path), path / "ca.pem"
    try:
        trusted = x509.load_pem_x509_certificate(certificate.read_bytes())  # the present one
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
    if not (folder / "ca.pem").exists() or x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()) != trusted:
        (folder / "ca.key").unlink(missing_ok=True)  # of an authority that was replaced
        write_atomic(folder / "ca.pem", trusted.public_bytes(serialization.Encoding.PEM))
    Members(folder / "members.json", new=True)
    write_atomic(folder / "ca.key", key, mode=0o600)  # last: its presence means that all is there
    return Authority.load(folder, run_id)


def invite(path: Path, peer_id: str, *, role: str = "peer", hours: float, now: float) -> Invitation:
    """Return a new invitation, which any member with the authority's key redeems. now: unix seconds.

    Raises ConfigError, RefusedError, StorageError.
    """
    authority = Authority.load(authority_folder(path), run_of(path))
    if authority.issuer.certificate != Trust(path).present:
        raise RefusedError(f"{path}: the authority was replaced, and this copy of its key lets nobody in any more")
    folder, member, own = HostFolder.load(path), MemberFolder(path), identity_of(path).peer_id
    saved = member.saved()
    record = saved.record if saved is not None else None
    if record is not None and peer_id in record.evicted:
        raise RefusedError(f"{peer_id} was evicted ({record.evicted[peer_id]}); choose another name")
    if role == "observer" and record is not None and peer_id in record.members:
        raise RefusedError(f"{peer_id} is a member as peer already; choose another name")
    known, holders = addresses_of(record), record.holders if record is not None else ()
    port = int(folder.listen.rpartition(":")[2]) or member.port()
    if folder.advertise and port:
        known[own] = (endpoint_of(folder.advertise, port),)
    elif folder.relay:
        known[own] = (folder.relay,)
    if not known.keys() & {own, *holders}:
        raise ConfigError(f"{path}: nobody reaches this member yet; start it, with --advertise HOST, or --relay HOST:PORT")
    first = sorted(known, key=lambda each: (each != own, each not in holders))  # who redeems it comes first
    hosts = {each: known[each] for each in first[:MAX_ENDPOINTS]}
    before = record.enrolled.get(peer_id) if record is not None else None
    after = before.invitation if before is not None else ""
    return authority.invite_to_swarm(peer_id, role=role, hosts=hosts, lifetime_s=hours * 3600, now=now, after=after)


class Gate(Protocol):
    """What Enrolment needs of a host."""

    run_id: str
    callers: Callers

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

    def is_member(self, peer_id: str) -> bool:
        """Return whether a member of the swarm has this name, by the record."""
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
                return await self._redeem(request, certificate_of(context))
            except EditError as error:
                self._refusals.log(source_of(context.peer()), str(error), self._gate.unix())
                raise
        raise AssertionError("unreachable: abort raises")

    async def _redeem(self, request: epb.EnrolRequest, guest: x509.Certificate) -> epb.EnrolReply:
        gate, identity, now = self._gate, invited_by(guest), self._gate.unix()
        if gate.authority is None:
            holders = ", ".join(gate.holders)
            raise StaleError(f"this member has no copy of the authority's key; ask one of {holders or 'those that have'}")
        if identity.run_id != gate.run_id or identity.role not in ("peer", "observer"):
            raise RefusedError(f"the invitation is for {identity.uri}, not for a peer or an observer of {gate.run_id}")
        if identity.role == "observer" and gate.is_member(identity.peer_id):
            raise RefusedError(f"{identity.peer_id} is a member as peer already; ask for an invitation with another name")
        if not TOKEN.fullmatch(request.token) or guest_key(request.token).public_key() != guest.public_key():
            raise RefusedError("the token is not that of the invitation whose certificate was shown")
        if not is_signed_by(guest, gate.authority.issuer.certificate):
            raise RefusedError("this invitation is of an authority that was replaced; ask for a new one")
        if now >= Validity.of(guest).ends:
            raise RefusedError("this invitation has expired; ask for a new one")
        key, number = public_key_of(request.csr_der), f"{guest.serial_number:032x}"
        enrolled = Enrolled(number, hashlib.sha256(public_der(key)).hexdigest(), identity.role == "observer")
        await gate.claim(Claim(identity.peer_id, enrolled))
        certificate = gate.authority.enrol(identity, key, now=now)
        _log.info("%s is enrolled as %s", identity.peer_id, identity.role)
        return epb.EnrolReply(
            certificate_der=certificate.public_bytes(serialization.Encoding.DER),
            ca_der=gate.authority.ca_der,
            run_id=identity.run_id,
            peer_id=identity.peer_id,
            role=identity.role,
            endpoints=gate.reachable,
        )


class SwarmRenewal:
    """Renewal of enrolment.proto, at a member with the authority's key: for the same identity and key, so nobody need agree."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Renew(self, request: epb.RenewRequest, context: Any) -> epb.RenewReply:
        """Return a new certificate for the caller's identity and key."""
        async with abort_on_error(context):
            identity, now = self._gate.callers.peer_or_observer(context), self._gate.unix()
            if self._gate.authority is None:
                raise StaleError("this member has no copy of the authority's key")
            present = certificate_of(context)
            if now >= (ends := Validity.of(present).ends):
                raise TransportError(over(identity.peer_id, ends, now, self._gate.callers.clock))
            certificate = self._gate.authority.renew(identity, present, now=now, mend=REPLACE_AUTHORITY)
            _log.info("the certificate of %s is renewed", identity.peer_id)
            return epb.RenewReply(certificate_der=certificate)
        raise AssertionError("unreachable: abort raises")


class OwnCertificate:
    """The certificate of a member, in its folder, while its host runs: `look` renews it when it is due.

    Only peer.pem is replaced, as a whole: new connections to this host show what lies there
    (`editpb.server_certificate`), and the peer that trains beside it looks there, too.

    Args:
        path: the member's folder.
        unix: the clock, in seconds since 1970.

    Raises ConfigError for what the folder has.
    """

    def __init__(self, path: Path, identity: Identity, unix: Callable[[], float]) -> None:
        self._path, self._identity, self._unix = path, identity, unix
        self.present = self._load()
        self._trouble = ""  # why the last attempt failed
        self._said: object = None

    def is_of(self, authority: x509.Certificate) -> bool:
        """Return whether this authority signed it."""
        return is_signed_by(self.present, authority)

    @property
    def pem(self) -> bytes:
        """In PEM."""
        return self.present.public_bytes(serialization.Encoding.PEM)

    async def look(
        self,
        sources: Callable[[], Iterable[tuple[str, Callable[[], Awaitable[bytes]]]]],
        warn: Callable[[str], None] = lambda text: None,
        *,
        replaced: bool = False,
    ) -> bool:
        """Renew the certificate if it is due; return whether there is another one now. Log what is new of its end.

        Args:
            sources: who is asked for a certificate in DER, and the call, in turn, until one gives one that is right; each may
                raise EditError.
            warn: is told, too, when it ends soon nevertheless.
            replaced: it is due, since another authority than signed it is the run's.
        """
        before, self._trouble = self.present, ""
        if replaced or Validity.of(self.present).renewal_due(self._unix()):
            self._trouble = "nobody with the authority's key is known"
            for peer_id, ask in sources():
                try:
                    await asyncio.to_thread(self._take, await ask(), peer_id)
                except EditError as error:
                    self._trouble = str(error)
                else:
                    self._trouble = ""
                    break
        renewed = self.present is not before
        if renewed:
            _log.info("this member's certificate is renewed and %s", Validity.of(self.present).text(self._unix()))
        self._say(warn)
        return renewed

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self._trouble)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return this member's as a client, of what lies in the folder now. Raises ConfigError."""
        return credentials(self._path)[0]

    def _take(self, der: bytes, signer: str) -> None:
        """Replace the certificate by what `signer` sent.

        Raises RemoteProtocolError for anything but a later one for the same identity and key, and for one that is not valid
        yet while the present one is.
        """
        if not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
            raise RemoteProtocolError(f"a certificate of {len(der)} bytes was sent")
        try:
            certificate = x509.load_der_x509_certificate(der)
        except ValueError as error:
            raise RemoteProtocolError("a damaged certificate was sent") from error
        key = load_key(self._path / "peer.key")
        authority = x509.load_pem_x509_certificate((self._path / "ca.pem").read_bytes())  # the present one
        if (fault := certificate_fault(certificate, [authority], self._identity, key)) is not None:
            raise RemoteProtocolError(f"the new certificate does not fit: {fault}")
        validity, present = Validity.of(certificate), Validity.of(self.present)
        if self.is_of(authority) and validity.ends <= present.ends:
            raise RemoteProtocolError("the new certificate ends no later than the present one")
        if (early := validity.too_early(present, self._unix(), f"the clock of {signer}")) is not None:
            raise RemoteProtocolError(early)
        write_atomic(self._path / "peer.pem", certificate.public_bytes(serialization.Encoding.PEM))
        self.present = certificate

    def _load(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate((self._path / "peer.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path / 'peer.pem'}: cannot be read ({reason_of(error)})") from error

    def _say(self, warn: Callable[[str], None]) -> None:
        """Say what is new: that a renewal fails, louder the nearer the end is."""
        now, validity = self._unix(), Validity.of(self.present)
        notice = validity.notice(now)
        if (notice, self._trouble) == self._said or (notice is Notice.NONE and not self._trouble):
            return
        self._said = notice, self._trouble
        because = f" and could not be renewed yet: {self._trouble}" if self._trouble else ""
        level = logging.INFO if notice is Notice.NONE else logging.WARNING
        text = f"this member's certificate {validity.text(now)}{because}"
        _log.log(level, "%s", text)
        if level == logging.WARNING:
            warn(text)


class Waiting:
    """What a member that was never let in waits for: a line each SAY_S seconds, and an end after JOIN_S. On the event loop."""

    def __init__(self, quiet_s: float = 0.0) -> None:
        """Say nothing for `quiet_s`."""
        self._clock = asyncio.get_running_loop().time
        self._until, self._say_at = self._clock() + JOIN_S, self._clock() + quiet_s

    def go_on(self, what: str) -> None:
        """Say what is waited for, if it is time. Raises TransportError after JOIN_S."""
        what = one_line(what, MOST_WHAT)
        if self._clock() >= self._until:
            raise TransportError(f"gives up after {JOIN_S:.0f} s: {what}; the same command tries again")
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + SAY_S
            _log.info("waiting: %s", what)


async def take_settings(
    path: Path, credentials: grpc.ChannelCredentials, me: Identity, hosts: Mapping[str, Sequence[str]]
) -> None:
    """Ask hosts in turn for run.toml and the model, until one has answered, and write them.

    What no run can have is not written, and another host is asked: one may lie. Raises TransportError when none has answered in
    JOIN_S, RefusedError and EvictedError when all say so, StorageError, ConfigError where nobody is known.
    """
    asked = [(peer_id, address) for peer_id, addresses in hosts.items() for address in addresses]
    if not asked:
        raise ConfigError(f"{path}: knows no host; join with an invitation")
    waiting, turns = Waiting(), itertools.count()
    while True:
        answers: list[EditError] = []
        for peer_id, address in asked:
            within_ms = connect_ms(next(turns), len(asked))
            try:
                found = await _describe(address, credentials, Identity(me.run_id, "peer", peer_id).server_name, within_ms)
                told = Settings(found.run_toml, found.schema)
                told.schemas(told.config())
            except (TransportError, OutdatedError, RemoteProtocolError, RefusedError, EvictedError, ConfigError) as error:
                answers.append(error)
                continue
            if found.schema:
                write_atomic(path / "schema.json", found.schema)
            write_atomic(path / "run.toml", found.run_toml)
            return
        if all(isinstance(error, (RefusedError, EvictedError)) for error in answers):
            raise answers[0]
        said = [f"{peer_id} at {address}: {error}" for (peer_id, address), error in zip(asked, answers, strict=True)]
        waiting.go_on(f"no host says the run's settings ({'; '.join(said)})")
        await asyncio.sleep(AGAIN_S)


async def _describe(address: str, credentials: grpc.ChannelCredentials, server_name: str, within_ms: int) -> SwarmDescription:
    options = channel_options(address, server_name=server_name, within_ms=within_ms)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        try:
            reply = await council_stub(channel).Describe(pb.DescribeRequest(settings=True), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            stranger = swarm_refusal(error.details() or "")
            raise (RefusedError(f"{address}: {stranger}") if stranger else from_rpc(error)) from None
        return description_from_pb(reply)
