"""What an operator does with a swarm, from the folder of a member: one function for each verb of `python -m aggregator.swarm`.

The member's own host is asked first, then whom it names. Who gives orders has the authority's key (authority/ca.key) in
the folder: each command makes itself an operator's certificate that is valid for a few minutes. Everything else is asked as the
member itself.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.operator_client import drain_run, evict_peer, pause_run, resume_run
from aggregator.security.authority import COORDINATOR_ID, load_issuer
from aggregator.security.certificates import CA_LIFETIME_S, key_pem, make_ca, new_key
from aggregator.security.members import OPERATOR_ID
from aggregator.storage.state_folder import lock_folder
from aggregator.swarm.admission import Trust, addresses_of, authority_context, root_of
from aggregator.swarm.host_folder import (
    HostFolder,
    Settings,
    authority_folder,
    check_dht,
    check_folder,
    credentials,
    identity_of,
)
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.relay import relay_identity
from aggregator.swarm.standing import Report, Standing, report
from edit.config.run import RunConfig
from edit.council.record import Record, Root, Saved
from edit.durable_files import make_folder, read_json, read_private, rename, write_atomic, write_json
from edit.errors import BusyError, ConfigError, EditError, OutdatedError, RefusedError, StaleError, StorageError, TransportError
from edit.plain_text import quoted
from edit.trust.sealed import seal_for
from edit.trust.signatures import key_hash
from editpb import control_pb2_grpc, enrolment_pb2, enrolment_pb2_grpc
from editpb import council_pb2 as pb
from editpb.council_messages import COUNCIL_BYTES
from editpb.identity import Identity, check_member
from editpb.invitation import Invitation, local_address
from editpb.transport.channel_options import channel_options
from editpb.transport.chunk_frames import council_stub
from editpb.transport.parts import in_part
from editpb.transport.status import from_rpc, swarm_refusal

if TYPE_CHECKING:
    from aggregator.swarm.discovery import Discovery, Found

__all__ = [
    "Recovery",
    "Survey",
    "drain",
    "evict",
    "leave",
    "make_relay",
    "new_authority",
    "operator_credentials",
    "part_control",
    "pause",
    "recover",
    "rejoin",
    "renewed",
    "resume",
    "seek_coordinator",
    "seek_members",
    "share_authority",
    "status",
    "survey",
]

_T = TypeVar("_T")
ANSWER_S = 5.0  # for how long a host is waited for
ORDER_S = 30.0  # for how long an order is tried, while leaders change
MOST_ASKED = 16  # hosts at a time
OPERATOR_LIFETIME_S = 600.0
NEXT_FORMAT = 1  # of authority/next/root.json
MOST_KEPT = 32  # members of a record whose addresses are kept when it goes
SEEK_S = 30.0  # for how long a coordinator is looked for


class _Folder:
    """The folder of a member, and whom it knows. Raises ConfigError, StorageError."""

    def __init__(self, path: Path) -> None:
        self.path, self.host, self._member = path, HostFolder.load(path), MemberFolder(path)
        self.identity = identity_of(path)
        self.saved: Saved | None = self._member.saved()
        self.client, _ = credentials(path)

    @property
    def record(self) -> Record | None:
        return self.saved.record if self.saved is not None else None

    def latest_record(self) -> Record | None:
        """Return the newest record that the host of this folder has on disk by now."""
        saved = self._member.saved()
        return saved.record if saved is not None else None

    @property
    def has_host(self) -> bool:
        """Whether this is the folder of a member, not of one who only looks on."""
        return self.identity.role == "peer"

    def own_address(self) -> str:
        """HOST:PORT of the host of this folder; empty: none was ever started."""
        if not self.has_host:
            return ""
        host, _, port = self.host.listen.rpartition(":")
        port = str(self._member.port() or port)
        return local_address(f"{host}:{port}") if port != "0" else ""

    def others(self, *records: Record | None) -> dict[str, str]:
        """HOST:PORT of each other member that is known to have one, by the newest record that names it."""
        found = {peer_id: addresses[0] for peer_id, addresses in self.host.seeds.items() if addresses}
        for record in sorted(filter(None, (self.record, *records)), key=lambda record: record.stamp):
            found |= {peer_id: each.addresses[0] for peer_id, each in record.members.items() if each.addresses}
            found = {peer_id: address for peer_id, address in found.items() if peer_id not in record.evicted}
        return {peer_id: address for peer_id, address in found.items() if peer_id != self.identity.peer_id}

    def operator(self) -> grpc.ChannelCredentials:
        """Return an operator's credentials for this command. Raises ConfigError without the authority's key."""
        return operator_credentials(self.path, self.identity.run_id)


def operator_credentials(
    path: Path, run_id: str, lifetime_s: float = OPERATOR_LIFETIME_S, *, authority: Path | None = None
) -> grpc.ChannelCredentials:
    """Return credentials of an operator, made with the authority's key in a member's folder.

    authority: the folder with the key, where it is the next one's. Raises ConfigError without it, RefusedError for one that was
    replaced.
    """
    given, authority = authority, authority or authority_folder(path)
    if not (authority / "ca.key").exists():
        raise ConfigError(f"{authority / 'ca.key'}: is missing; only who has the authority's key gives orders to the swarm")
    issuer, key = load_issuer(authority), new_key()
    identity = Identity(run_id, "operator", OPERATOR_ID)
    certificate = issuer.issue(identity, key.public_key(), lifetime_s=lifetime_s, now=time.time())
    pem = serialization.Encoding.PEM
    roots = path / "ca.pem"  # while the authority is replaced, members have certificates of both
    if given is None and roots.exists() and issuer.certificate != x509.load_pem_x509_certificate(roots.read_bytes()):
        raise RefusedError("the authority was replaced, and this copy of its key gives no orders any more")
    trusted = roots.read_bytes() if roots.exists() else issuer.certificate.public_bytes(pem)
    return grpc.ssl_channel_credentials(trusted, key_pem(key), certificate.public_bytes(pem))


@asynccontextmanager
async def _connected(
    folder: _Folder, who: str, address: str, with_: grpc.ChannelCredentials
) -> AsyncIterator[grpc.aio.Channel]:
    """Connect to a host; raise what a failed call means, in one line."""
    name = Identity(folder.identity.run_id, "peer", who).server_name
    options = channel_options(address, COUNCIL_BYTES, server_name=name)
    async with grpc.aio.secure_channel(address, with_, options=options) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            if (stranger := swarm_refusal(error.details() or "")) is not None:
                raise RefusedError(f"{who} at {address}: {stranger}") from error
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise TransportError(f"nobody answers at {address}") from error
            raise from_rpc(error) from error


async def _ask(folder: _Folder, who: str, address: str, with_: grpc.ChannelCredentials) -> Standing:
    """Ask one host how things stand. Raises EditError."""
    async with _connected(folder, who, address, with_) as channel:
        reply = await council_stub(channel).Standing(pb.StandingRequest(), timeout=ANSWER_S)
    standing = Standing.decode(reply.standing)
    if (standing.run_id, standing.peer_id) != (folder.identity.run_id, who):
        raise RefusedError(f"{address} answers for {standing.peer_id} of run {standing.run_id}")
    return standing


async def _ask_all(
    folder: _Folder, hosts: Mapping[str, str], with_: grpc.ChannelCredentials
) -> tuple[dict[str, Standing], dict[str, str]]:
    """Ask several hosts; return what they say, and why others say nothing."""
    asked = dict(sorted(hosts.items())[:MOST_ASKED])
    found = await asyncio.gather(*(_ask(folder, who, address, with_) for who, address in asked.items()), return_exceptions=True)
    standings: dict[str, Standing] = {}
    silent: dict[str, str] = {}
    for who, answer in zip(asked, found, strict=True):
        if isinstance(answer, Standing):
            standings[who] = answer
        elif isinstance(answer, EditError):
            silent[who] = str(answer)
        else:
            raise answer
    return standings, silent


def _newest(folder: _Folder, standings: Mapping[str, Standing]) -> Record | None:
    records = [each.record for each in standings.values()] + [folder.record]
    return max(filter(None, records), key=lambda record: record.stamp, default=None)


def _leader(standings: Mapping[str, Standing]) -> str:
    """Return who leads, of the latest term: who says so itself before what others have heard."""
    said = [(each.term, each.peer_id == each.leader, each.leader) for each in standings.values() if each.leader]
    return max(said)[2] if said else ""


# -- status ----------------------------------------------------------------------------------------------------------------


def status(path: Path, *, at: str = "") -> Report:
    """Return how the swarm of this member stands. at: ask this member's host in place of the own one.

    Where the own host does not answer, it is what the files say. Raises ConfigError, StorageError; with `at` TransportError,
    RefusedError, EvictedError.
    """
    folder = _Folder(path)
    try:
        chosen = Settings.load(path).config().outer.chosen
    except ConfigError:  # a member that was not let in yet has none
        chosen = ""
    return replace(asyncio.run(_status(folder, at)), outer_chosen=chosen)


async def _status(folder: _Folder, at: str) -> Report:
    own, others = folder.own_address(), folder.others()
    first, address = (at, others.get(at, "")) if at and at != folder.identity.peer_id else (folder.identity.peer_id, own)
    if not at and not folder.has_host:
        return (await _survey_any(folder)).report
    if at and not address:
        raise ConfigError(f"{at} is not known here, or has no address; known are {', '.join(others) or 'none'}")
    try:
        return (await _survey(folder, first, address)).report
    except TransportError as error:
        if at:
            raise
        return _from_files(folder, str(error), others)


@dataclass(frozen=True, slots=True)
class Survey:
    """How the swarm stands, by what its hosts answered just now."""

    record: Record  # the newest
    report: Report
    addresses: Mapping[str, str]  # HOST:PORT by peer_id, of all that are known to have one


async def survey(path: Path) -> Survey:
    """Ask the host of a member's folder how the swarm stands, or, where it does not answer, another member's.

    Raises ConfigError, StorageError, and TransportError when nobody answers.
    """
    return await _survey_any(_Folder(path))


async def _survey_any(folder: _Folder) -> Survey:
    own = {folder.identity.peer_id: folder.own_address()} if folder.has_host else {}
    failures = []
    for who, address in list((own | folder.others()).items())[:MOST_ASKED]:
        try:
            return await _survey(folder, who, address)
        except (TransportError, OutdatedError) as error:
            failures.append(f"{who}: {error}")
    raise TransportError(f"no member answers: {'; '.join(failures) or 'none is known'}")


async def _survey(folder: _Folder, first: str, address: str) -> Survey:
    """Ask one host, then the leader and the owners that it names. Raises as `_ask`; StaleError before it was let in."""
    if not address:
        raise TransportError("its host was never started")
    said = await _ask(folder, first, address, folder.client)
    record = said.record
    if record is None:
        raise StaleError(f"{first} was not let in yet: {said.leader or 'nobody'} leads; is it connected to any member?")
    own = folder.identity.peer_id
    wanted = {said.leader, *(part.owner for part in record.parts)} - {first, ""}
    known = folder.others(record) | ({own: folder.own_address()} if folder.own_address() else {})
    standings, silent = await _ask_all(folder, {each: known[each] for each in wanted if each in known}, folder.client)
    standings = {first: said, **standings}
    silent |= dict.fromkeys(wanted - known.keys() - {own}, "it has no address")
    newest = _newest(folder, standings)
    assert newest is not None
    return Survey(newest, report(newest, f"{first} at {address}", standings, silent, said.term), known)


@asynccontextmanager
async def part_control(path: Path, who: str, address: str, part: int) -> AsyncIterator[Any]:
    """Connect to the owner of a part with the member's certificate of now, and yield a ControlStub for this part.

    Raises ConfigError, StorageError, and as `_connected`.
    """
    folder = _Folder(path)
    async with _connected(folder, who, address, folder.client) as channel:
        yield in_part(control_pb2_grpc.ControlStub(channel), part)


async def renewed(path: Path, who: str, address: str, timeout_s: float) -> bytes:
    """Ask a member with the authority's key for a later certificate of this folder's identity; return it in DER.

    Raises ConfigError, StorageError, and as `_connected`.
    """
    folder = _Folder(path)
    async with _connected(folder, who, address, folder.client) as channel:
        stub: Any = enrolment_pb2_grpc.RenewalStub(channel)
        reply: enrolment_pb2.RenewReply = await stub.Renew(enrolment_pb2.RenewRequest(), timeout=timeout_s)
        return reply.certificate_der


def _from_files(folder: _Folder, why: str, others: Mapping[str, str]) -> Report:
    saved = folder.saved
    if saved is None or saved.record is None:
        raise ConfigError(f"{folder.path}: {why}, and this member has not been let in yet")
    told = report(saved.record, str(folder.path / "council.json"), {}, {}, saved.term)
    asked = ", ".join(f"{peer_id} at {address}" for peer_id, address in sorted(others.items()))
    notes = (
        f"{folder.identity.peer_id}: {why}; this is what its files say",
        f"others to ask (--at NAME): {asked or 'none is known'}",
    )
    return replace(told, notes=(*notes, *told.notes))


# -- orders ----------------------------------------------------------------------------------------------------------------


def evict(path: Path, peer_id: str, reason: str = "evicted by the operator") -> str:
    """Shut a member out for good, or a name that was only invited. Return what came about.

    Raises ConfigError, RefusedError, TransportError.
    """
    folder, call, unknown = _Folder(path), evict_peer(peer_id, reason), ""

    async def give(channel: grpc.aio.Channel) -> None:
        nonlocal unknown
        reply = await council_stub(channel).Standing(pb.StandingRequest(), timeout=ANSWER_S)
        record = Standing.decode(reply.standing).record
        if record is not None and peer_id not in {**record.members, **record.enrolled, **record.evicted}:
            unknown = (
                f"; nobody had this name, so only invitations for it are void now: members are {', '.join(record.members)}"
            )
        await call(control_pb2_grpc.ControlStub(channel))

    leader = asyncio.run(_order_leader(folder, folder.operator(), give))
    return f"{peer_id} is evicted, as {leader} and a quorum agreed{unknown}"


def pause(path: Path) -> str:
    """Open no round until `resume`. Raises as `evict`."""
    _order(path, pause_run)
    return "paused"


def resume(path: Path) -> str:
    """Go on after `pause`, or after `drain` if outer steps are left. Raises as `evict`."""
    _order(path, resume_run)
    return "resumed"


def drain(path: Path) -> str:
    """End the run, all parts at one outer step. Raises as `evict`."""
    _order(path, drain_run)
    return "draining; `status` shows finished when it is done"


def _order(path: Path, call: Callable[[Any], Awaitable[object]]) -> str:
    """Give an order of Control to the leader; return who that is."""
    folder = _Folder(path)

    async def give(channel: grpc.aio.Channel) -> None:
        await call(control_pb2_grpc.ControlStub(channel))

    return asyncio.run(_order_leader(folder, folder.operator(), give))


async def _order_leader(
    folder: _Folder, operator: grpc.ChannelCredentials, call: Callable[[grpc.aio.Channel], Awaitable[object]]
) -> str:
    until, pause_s = time.monotonic() + ORDER_S, 0.2
    while True:
        try:
            leader, address = await _find_leader(folder, operator)
            async with _connected(folder, leader, address, operator) as channel:
                await call(channel)
            return leader
        except BusyError:
            raise
        except (OutdatedError, TransportError) as error:  # another leads by now, or none
            if time.monotonic() >= until:
                raise TransportError(f"the swarm takes no orders now: {error}") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


async def _find_leader(folder: _Folder, with_: grpc.ChannelCredentials) -> tuple[str, str]:
    """Return who leads, and where it is. Raises StaleError when nobody says so."""
    me, own = folder.identity.peer_id, folder.own_address()
    standings, silent = await _ask_all(folder, {me: own} if own else {}, with_)
    if not _leader(standings):
        more, others = await _ask_all(folder, folder.others(), with_)
        standings, silent = standings | more, silent | others
    leader = _leader(standings)
    known = folder.others(*(each.record for each in standings.values())) | ({me: own} if own else {})
    if leader and leader in known:
        return leader, known[leader]
    why = f"{leader} leads, but has no address" if leader else "no leader is heard"
    raise StaleError("; ".join((why, *(f"{who}: {reason}" for who, reason in silent.items()))))


# -- the authority -----------------------------------------------------------------------------------------------------------


def share_authority(path: Path, peer_id: str) -> str:
    """Give a member a copy of the authority's key. All agree first that it has one; it can be repeated.

    Raises ConfigError (there is none in this folder), RefusedError, TransportError, StorageError.
    """
    check_member(peer_id)
    folder = _Folder(path)
    return asyncio.run(_share(folder, folder.operator(), peer_id))


async def _share(folder: _Folder, operator: grpc.ChannelCredentials, peer_id: str) -> str:
    async def entrust(channel: grpc.aio.Channel) -> None:
        await council_stub(channel).Entrust(pb.EntrustRequest(peer_id=peer_id), timeout=ORDER_S)

    key, until = read_private(authority_folder(folder.path) / "ca.key"), time.monotonic() + ORDER_S
    await _order_leader(folder, operator, entrust)
    while True:
        try:
            said = await _ask(folder, *await _find_leader(folder, operator), operator)
            known = addresses_of(said.record)
            if said.record is None or peer_id not in known:
                raise TransportError("it has no address now")
            address = known[peer_id][0]
            async with _connected(folder, peer_id, address, operator) as channel:
                await _hand_over(folder, peer_id, channel, key, said.record)
            return f"{peer_id} has a copy of the authority's key; in all: {', '.join(said.record.holders)}"
        except (OutdatedError, TransportError) as error:  # another leads by now, or it has not heard yet
            if time.monotonic() >= until:
                raise TransportError(f"{peer_id} does not take the authority's key: {error}; say it again") from error
        await asyncio.sleep(0.2)


async def _hand_over(folder: _Folder, peer_id: str, channel: grpc.aio.Channel, key: bytes, said: Record | None = None) -> None:
    """Give a member the authority's key, sealed for the key that the member was enrolled for.

    The connection says the name alone: the machine before, or who has stolen its key, may answer. Raises RefusedError for it.

    said: the leader's record. It must name the same key as that in this folder, which is old where the host here was off.
    """
    records = [each for each in (folder.latest_record(), said) if each is not None]
    keys = {each.enrolled[peer_id].key for each in records if peer_id in each.enrolled}
    reply: pb.PublicKeyReply = await council_stub(channel).PublicKey(pb.PublicKeyRequest(), timeout=ANSWER_S)
    if len(keys) > 1:
        raise RefusedError(f"{peer_id} was enrolled again since this folder's host heard of it: start that host, and repeat")
    if keys and key_hash(reply.key) not in keys:
        raise RefusedError(f"who answers as {peer_id} has another key than {peer_id} was enrolled for: nothing was given to it")
    try:
        sealed = seal_for(reply.key, key, authority_context(folder.identity.run_id, peer_id))
    except ValueError as error:
        raise RefusedError(f"{peer_id} shows no key that the authority's can be sealed for ({error})") from None
    await council_stub(channel).TakeAuthority(pb.TakeAuthorityRequest(sealed=sealed), timeout=ANSWER_S)


def new_authority(path: Path) -> str:
    """Put another authority in the place of the present one: who has only the key of that can do nothing from then on.

    All agree first; then this member's host has the new key. It can be repeated, and goes on where it was. Raises as
    `share_authority`.
    """
    return asyncio.run(_replace_authority(_Folder(path)))


def _next_authority(folder: _Folder) -> tuple[Path, Root]:
    """Return where the key of the next authority is kept until it is the run's, and how the record names it.

    One that is there already is gone on with, unless another authority has taken the place of the one that endorsed it. The key
    of the present one is needed only where there is none: a host that was killed while it took the next key has no other.
    """
    authority, trust = authority_folder(folder.path), Trust(folder.path)
    kept = authority / "next"
    if all((kept / name).exists() for name in ("ca.key", "ca.pem", "root.json")):
        try:
            root = Root(
                **{key: value for key, value in read_json(kept / "root.json", version=NEXT_FORMAT).items() if key != "format"}
            )
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{kept}: is damaged; remove it, and say it again ({error})") from error
        if trust.leads_to(root):
            return kept, root
    present = load_issuer(authority)
    if present.certificate != trust.present:
        raise RefusedError("the authority was replaced, and this copy of its key makes no other")
    _remove_next(kept)
    make_folder(kept, 0o700)
    key, certificate = make_ca(folder.identity.run_id, time.time(), f"CA {secrets.token_hex(4)}")
    root = root_of(certificate, present.key)
    write_atomic(kept / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    write_atomic(kept / "ca.key", key_pem(key), mode=0o600)
    write_json(kept / "root.json", asdict(root), version=NEXT_FORMAT)  # last
    return kept, root


def _remove_next(kept: Path) -> None:
    """Remove the key of the next authority. root.json goes first: without it nothing is gone on with. Raises StorageError."""
    try:
        (kept / "root.json").unlink(missing_ok=True)
        if kept.exists():
            shutil.rmtree(kept)
    except OSError as error:
        raise StorageError(f"{kept}: cannot be removed ({error.strerror})") from error


async def _replace_authority(folder: _Folder) -> str:
    (kept, root), me, until = _next_authority(folder), folder.identity.peer_id, time.monotonic() + ORDER_S
    own = folder.own_address()
    if not own:
        raise ConfigError(f"{folder.path}: no host was started here")
    said = await _ask(folder, me, own, folder.client)
    if said.record is None or root not in said.record.roots:
        certificate, endorsement = (base64.b64decode(each) for each in (root.certificate, root.endorsement))
        request = pb.ReplaceAuthorityRequest(peer_id=me, certificate=certificate, endorsement=endorsement)

        async def order(channel: grpc.aio.Channel) -> None:
            await council_stub(channel).ReplaceAuthority(request, timeout=ORDER_S)

        await _order_leader(folder, folder.operator(), order)
    operator = operator_credentials(folder.path, folder.identity.run_id, authority=kept)
    key = read_private(kept / "ca.key")
    while True:
        try:
            async with _connected(folder, me, own, operator) as channel:
                await _hand_over(folder, me, channel, key)
            break
        except (OutdatedError, TransportError, RefusedError) as error:  # it has not heard yet
            if time.monotonic() >= until:
                raise TransportError(f"{me} does not take the new authority's key: {error}; say it again") from error
        await asyncio.sleep(0.2)
    _remove_next(kept)
    return (
        f"the authority is replaced; {me} alone has the new key: say share-authority for others, and invite who is to join anew"
    )


def make_relay(path: Path, made: Path) -> str:
    """Make the folder of a relay in `made`: with what is in it nobody can be a member, or give orders.

    Nothing is left of it where that fails.

    Raises ConfigError (no authority's key in `path`; the folder exists), RefusedError (a key that was replaced), StorageError.
    """
    authority, identity = authority_folder(path), relay_identity(identity_of(path).run_id)
    if not (authority / "ca.key").exists():
        raise ConfigError(f"{authority / 'ca.key'}: is missing; only who has the authority's key can make a relay's folder")
    issuer, key, trust = load_issuer(authority), new_key(), Trust(path)
    if issuer.certificate != trust.present:
        raise RefusedError("the authority was replaced, and this copy of its key makes no relays any more")
    names = (identity.server_name,)
    certificate = issuer.issue(identity, key.public_key(), lifetime_s=CA_LIFETIME_S, now=time.time(), server_names=names)
    try:
        made.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(f"{made}: cannot be made ({error.strerror}); name a new folder") from error
    pem = serialization.Encoding.PEM
    try:
        write_atomic(made / "ca.pem", issuer.certificate.public_bytes(pem))
        write_atomic(made / "relay.key", key_pem(key), mode=0o600)
        write_atomic(made / "relay.pem", certificate.public_bytes(pem))
    except StorageError:
        shutil.rmtree(made, ignore_errors=True)
        raise
    command = f"edit-peer swarm relay {quoted(made.name)}"
    return f"{made} is a relay's folder: copy it to a machine that all members reach; there: {command}"


# -- leaving ---------------------------------------------------------------------------------------------------------------


def leave(path: Path) -> str:
    """Let the host of this folder hand its parts over, be voted out and end. Raises ConfigError, TransportError."""
    folder = _Folder(path)
    if not (address := folder.own_address()):
        raise ConfigError(f"{path}: no host was started here")

    async def body() -> str:
        async with _connected(folder, folder.identity.peer_id, address, folder.client) as channel:
            reply = await council_stub(channel).LeaveSwarm(pb.LeaveRequest(), timeout=ORDER_S)
        return str(reply.outcome)

    return f"{folder.identity.peer_id} {asyncio.run(body())}"


# -- recovery --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` would do."""

    before: Record
    after: Record
    lines: tuple[str, ...]  # in words


def recover(path: Path, confirm: Callable[[Recovery], bool]) -> str:
    """Go on from this member alone, in a new lineage, when the majority of the voters is gone for good.

    confirm: is asked before anything is written. Raises ConfigError (the host runs), RefusedError (the swarm goes on without
    it, or was recovered elsewhere; not confirmed), StorageError.
    """
    with _locked(path):
        return _recover(path, confirm)


def _recover(path: Path, confirm: Callable[[Recovery], bool]) -> str:
    from aggregator.swarm.host import merging, part_store  # imports torch, which the other commands do without
    from aggregator.swarm.replication import PartReplica

    folder, config = _Folder(path), merging(RunConfig.from_toml(path / "run.toml"))
    if folder.saved is None or (record := folder.saved.record) is None:
        if earlier := sorted(each.name for each in path.glob("lineage-*")):
            moved = f"`rejoin` has moved what it had to {', '.join(earlier)}"
            raise ConfigError(f"{path}: {moved}: move what is in one of them back, and repeat")
        raise ConfigError(f"{path}: this member was never let in; there is nothing to recover from")
    asyncio.run(_check_gone(folder, record))
    states, logs = [], list[str]()
    for number in range(len(record.parts)):
        store = part_store(MemberFolder(path), number, config, folder.identity.run_id)
        try:
            states.append(PartReplica(folder.identity.run_id, number, config, store).state)
            if store.part_log is not None:
                tree = store.part_log.tree
                logs.append(f"the audit log of part {number} goes on from its {len(tree)} entries, root {tree.root().hex()}")
        finally:
            store.close()
    saved = folder.saved.recovered(folder.identity.peer_id, states)
    assert saved.record is not None
    words = (*_recovery_words(folder.identity.peer_id, record, saved.record), *logs)
    if not confirm(Recovery(record, saved.record, words)):
        raise RefusedError("not confirmed; nothing was changed")
    _keep_addresses(path, record)
    MemberFolder(path).save(saved)
    for number in range(len(states)):  # what is here is what all go on from
        store = part_store(MemberFolder(path), number, config, folder.identity.run_id)
        try:
            store.mark_forked("")
        finally:
            store.close()
    me = folder.identity.peer_id
    return f"recovered: lineage {saved.record.lineage}, {me} alone votes; start its host, let the others rejoin"


async def _check_gone(folder: _Folder, record: Record) -> None:
    """Raise RefusedError when the swarm goes on, or was recovered by another survivor."""
    standings, _ = await _ask_all(folder, folder.others(), folder.client)
    for who, standing in standings.items():
        if standing.record is not None and standing.record.lineage > record.lineage:
            raise RefusedError(f"it was recovered already: {who} is of lineage {standing.record.lineage}; rejoin")
        if standing.leader:
            raise RefusedError(f"{who} hears a leader, {standing.leader}: the swarm goes on; start this host again")


def _recovery_words(me: str, before: Record, after: Record) -> list[str]:
    gone = sorted(before.members.keys() - {me})
    lines = [
        f"lineage {before.lineage} -> {after.lineage}, with {me} as the only member and voter",
        f"{', '.join(gone) or 'nobody'} must rejoin: what they agreed on without {me} is lost",
    ]
    for i, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
        if new.outer_step != old.outer_step:
            lines.append(f"part {i} goes on from outer step {new.outer_step}, not {old.outer_step}")
    if after.phase is not before.phase:
        lines.append("the run, which had finished, goes on from there; drain it again if it was drained")
    return [*lines, "do it at ONE survivor only: two that recover are two runs from then on"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    check_folder(path)
    descriptor = lock_folder(path, "its host runs, or another command is at work in it")
    try:
        yield
    finally:
        os.close(descriptor)


def _keep_addresses(path: Path, record: Record) -> None:
    """Keep in host.json where other members are, by a record that is about to go: whoever is left of them is dialled.

    The same members at all folders, where there are many. Raises ConfigError, StorageError.
    """
    known = {peer_id: each for peer_id, each in sorted(addresses_of(record).items()) if peer_id not in record.evicted}
    if known:
        known.pop(identity_of(path).peer_id, None)
        HostFolder.load(path).with_seeds(dict([*known.items()][:MOST_KEPT])).save(path)


def rejoin(path: Path) -> str:
    """Put what a member of an earlier lineage has aside, so that it joins anew. Raises ConfigError, StorageError."""
    with _locked(path):
        folder = MemberFolder(path)
        saved = folder.saved()
        if saved is None or saved.record is None:
            raise ConfigError(f"{path}: has no record; repeat the command that started this member, and it joins")
        _keep_addresses(path, saved.record)
        aside = path / f"lineage-{saved.record.lineage}-{saved.incarnation}"
        try:
            aside.mkdir(mode=0o700, exist_ok=True)
            for each in folder.of_lineage():  # the record is the last: it can be repeated
                rename(each, aside / each.name)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
    again = "repeat the command that started this member, and it joins anew; if that has --checkpoints, once with --fresh"
    return f"what {path} had is in {aside.name}; {again}"


def seek_coordinator(path: Path, dht_peers: tuple[str, ...], *, within_s: float = SEEK_S) -> tuple[str, ...]:
    """Return where the coordinator of a peer's run says to be. path: of the peer's folder.

    Who answers there shows by its certificate that it is the run's. Raises ConfigError, TransportError when nothing is found.
    """
    check_dht("--dht-peers")
    from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

    discovery = Discovery.of_seeker(identity_of(path), path, dht_peers)
    found = asyncio.run(_sought(discovery, lambda those: COORDINATOR_ID in those, within_s))
    if found is None:
        raise TransportError(f"the DHT does not know of the coordinator within {within_s:g} s")
    return found[COORDINATOR_ID].addresses


def seek_enrolment(path: Path, invitation: str, dht_peers: tuple[str, ...], *, within_s: float = SEEK_S) -> tuple[str, ...]:
    """Return where the coordinator of the run that an invitation is to says that invitations are redeemed.

    path: where the search keeps the files of its node. What counts is signed by a coordinator's certificate of the invitation's
    authority, and who answers there must show one. Raises ConfigError, TransportError when nothing is found.
    """
    check_dht("--dht-peers")
    from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

    invited = Invitation.decode(invitation)
    if invited.swarm is not None:
        raise ConfigError("this is an invitation to a swarm")
    discovery = Discovery.of_invited(invited, path, dht_peers)

    def says(those: Found) -> bool:
        return COORDINATOR_ID in those and bool(those[COORDINATOR_ID].enrol)

    found = asyncio.run(_sought(discovery, says, within_s))
    if found is None:
        raise TransportError(f"the DHT does not know of the coordinator of {invited.identity.run_id} within {within_s:g} s")
    return found[COORDINATOR_ID].enrol


def seek_members(
    path: Path, invitation: str, dht_peers: tuple[str, ...], *, within_s: float = SEEK_S
) -> Mapping[str, tuple[str, ...]]:
    """Return where the members of a swarm say to be that an invitation is to.

    path: where the search keeps the files of its node. Who answers there shows by its certificate which member it is. Raises
    ConfigError, TransportError when nobody is found.
    """
    check_dht("--dht-peers")
    from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

    invited = Invitation.decode(invitation)
    if invited.swarm is None:
        raise ConfigError("this is an invitation to a run with a coordinator")
    me = invited.identity.peer_id  # what a machine before said under this name is no use
    discovery = Discovery.of_guest(invited, path, dht_peers)
    found = asyncio.run(_sought(discovery, lambda those: bool(those.keys() - {me}), within_s))
    if found is None:
        raise TransportError(f"the DHT does not know of any member of {invited.identity.run_id} within {within_s:g} s")
    return {peer_id: said.addresses for peer_id, said in sorted(found.items()) if peer_id != me}


async def _sought(discovery: Discovery, enough: Callable[[Found], bool], within_s: float) -> Found | None:
    """Return what the DHT knows once that is enough; None: it is not, in that time."""
    said: asyncio.Future[Found] = asyncio.get_running_loop().create_future()

    def found(those: Found) -> None:
        if enough(those) and not said.done():
            said.set_result(those)

    discovery.start(found, lambda maddr: None)
    try:
        async with asyncio.timeout(within_s):
            return await said
    except TimeoutError:
        return None
    finally:
        await discovery.close()
