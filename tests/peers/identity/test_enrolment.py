"""Joining for real: a TLS server on loopback, an invitation, and a folder that afterwards opens the run, or nothing at all."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import pytest
from click.testing import Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from aggregator.run_feed import RunFeed
from aggregator.security.authority import Authority
from aggregator.security.certificates import new_key
from aggregator.services.enrolment import EnrolmentService
from edit.errors import (
    ConfigError,
    EditError,
    RefusedError,
    RemoteProtocolError,
    RemoteStorageError,
    StorageError,
    TransportError,
)
from edit.lab.link import Link, LinkShape
from editpb import enrolment_pb2 as pb
from editpb import enrolment_pb2_grpc
from editpb.earlier_keys import earlier_keys, public_key_of
from editpb.identity import Identity, from_auth_context
from editpb.invitation import Invitation
from editpb.transport.abort_on_error import abort_on_error
from peers import cli
from peers.daemon import PeerOptions, server_of
from peers.identity import peer_folder, seeking
from peers.identity.enrolment import UntrustedServerError, invitation_text, join
from peers.identity.peer_folder import PeerFolder
from peers.training.torchrun import ALONE

NOW = time.time()  # TLS reads the real clock; everything else is told this one
RUN = "run-0123abcd"
ENDPOINTS = ("127.0.0.1:7700", "localhost:7700")
ALICE = Identity(RUN, "peer", "alice")
_T = TypeVar("_T")
Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Run:
    """One coordinator's folder and authority."""

    folder: Path
    authority: Authority

    def pair(self, name: str = "server") -> Pair:
        return (self.folder / f"{name}.key").read_bytes(), (self.folder / f"{name}.pem").read_bytes()

    def invite(self, *ports: int, peer_id: str = "alice", host: str = "127.0.0.1") -> Invitation:
        enrol = tuple(f"{host}:{port}" for port in ports)
        return self.authority.invite(peer_id, role="peer", enrol=enrol, lifetime_s=60, now=NOW)

    def service(self, now: float = NOW) -> EnrolmentService:
        return EnrolmentService(self.authority, lambda: now, lambda: ENDPOINTS, RunFeed(lambda: now))

    def issue(self, identity: Identity) -> Pair:
        """A key and certificate (DER) for any identity."""
        key = new_key()
        pem = key.private_bytes(*_PKCS8, serialization.NoEncryption())
        certificate = self.authority.issuer.issue(identity, key.public_key(), lifetime_s=60, now=NOW)
        return pem, certificate.public_bytes(serialization.Encoding.PEM)


_PKCS8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)


def make_run(folder: Path, run_id: str = RUN) -> Run:
    folder.mkdir()
    return Run(folder, Authority.create(folder, run_id, ("127.0.0.1", "localhost"), now=NOW))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "state")


def serving(pair: Pair, service: Any, call: Callable[[int], _T]) -> _T:
    """`call(port)` in a thread while `service` is served with the key and certificate of `pair`."""

    async def scenario() -> _T:
        server = grpc.aio.server()
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, server)
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await server.start()
        try:
            return await asyncio.to_thread(call, port)
        finally:
            await server.stop(None)

    return asyncio.run(scenario())


def refused(text: str, home: Path, now: float = NOW) -> EditError:
    with pytest.raises(EditError) as caught:
        join(text, home, now)
    assert "\n" not in str(caught.value)
    assert not (home / "identity.json").exists()
    return caught.value


# ---- joining -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_joining_makes_a_folder_that_opens_the_run(run: Run, tmp_path: Path, host: str) -> None:
    home = tmp_path / "deep" / "home"
    assert serving(run.pair(), run.service(), lambda port: join(run.invite(port, host=host).encode(), home, NOW)) == ALICE
    enrolled = PeerFolder(home).load(NOW)
    assert (enrolled.identity, enrolled.endpoints, enrolled.run_id) == (ALICE, ENDPOINTS, RUN)
    assert {path.name for path in home.iterdir()} == {"identity.json", "join.lock", "peer.key", "peer.pem", "ca.pem"}
    assert (home / "peer.key").stat().st_mode & 0o777 == 0o600
    assert not run.authority.members.evicted("alice") and run.authority.members.get("alice") is not None


def test_a_coordinator_whose_disk_is_full_did_answer(run: Run, tmp_path: Path) -> None:
    class Full:
        async def Enrol(self, request: Any, context: Any) -> None:
            async with abort_on_error(context):
                raise StorageError("members.json: cannot be written (No space left on device)")

    def call(port: int) -> None:
        error = refused(run.invite(port, 1).encode(), tmp_path / "home")
        assert type(error) is RemoteStorageError
        assert str(error) == f"127.0.0.1:{port}: members.json: cannot be written (No space left on device)"

    serving(run.pair(), Full(), call)


def test_addresses_are_tried_in_order(run: Run, tmp_path: Path) -> None:
    def call(port: int) -> Identity:
        return join(run.invite(1, port).encode(), tmp_path / "home", NOW)  # nobody listens on port 1

    assert serving(run.pair(), run.service(), call) == ALICE


def test_a_link_with_a_long_round_trip_is_waited_for(run: Run, tmp_path: Path) -> None:
    """Of two addresses it is tried again with more time: the TLS handshake alone takes two round trips, so 2.8 s."""

    def call(port: int) -> Identity:
        with Link(("127.0.0.1", port), LinkShape(latency_s=0.7)) as link:
            return join(run.invite(1, link.port).encode(), tmp_path / "home", NOW)

    assert serving(run.pair(), run.service(), call) == ALICE


def test_nobody_answers(run: Run, tmp_path: Path) -> None:
    error = refused(run.invite(1).encode(), tmp_path / "home")
    assert isinstance(error, TransportError) and "127.0.0.1:1" in str(error) and "is the coordinator running" in str(error)


def test_a_used_invitation_is_refused(run: Run, tmp_path: Path) -> None:
    def call(port: int) -> EditError:
        text = run.invite(port).encode()
        join(text, tmp_path / "home", NOW)
        return refused(text, tmp_path / "thief")

    error = serving(run.pair(), run.service(), call)
    assert isinstance(error, RefusedError) and "used already" in str(error)


def test_an_expired_invitation_is_refused_by_either_side(run: Run, tmp_path: Path) -> None:
    def call(port: int) -> tuple[EditError, EditError]:
        text = run.invite(port).encode()
        return refused(text, tmp_path / "home", NOW + 61), refused(text, tmp_path / "home", NOW)

    for error in serving(run.pair(), run.service(NOW + 61), call):
        assert isinstance(error, RefusedError) and "expired" in str(error)


def test_an_invitation_of_another_run_does_not_trust_this_server(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "other-1")
    error = serving(run.pair(), run.service(), lambda port: refused(other.invite(port).encode(), tmp_path / "home"))
    assert isinstance(error, RefusedError)
    assert "certificate is not from this run's authority" in str(error) and "other-1" in str(error)


def test_who_is_silent_is_not_taken_for_the_stranger_at_another_address(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "other-1")

    def call(port: int) -> EditError:
        invitation = other.invite(port)
        return refused(replace(invitation, enrol=(*invitation.enrol, "127.0.0.1:1")).encode(), tmp_path / "home")

    error = serving(run.pair(), run.service(), call)
    assert isinstance(error, TransportError)
    assert "no answer from 127.0.0.1:1: " in str(error) and "certificate is not from this run's authority" in str(error)


@pytest.mark.parametrize(("peer_id", "host"), [("mallory", "127.0.0.1"), ("localhost", "localhost")])
def test_a_member_cannot_pose_as_the_coordinator(run: Run, tmp_path: Path, peer_id: str, host: str) -> None:
    """Although a peer's certificate may serve: it names no host, not even by its peer_id."""
    mallory = run.issue(Identity(RUN, "peer", peer_id))
    error = serving(mallory, run.service(), lambda port: refused(run.invite(port, host=host).encode(), tmp_path / "home"))
    assert isinstance(error, (RefusedError, TransportError))
    assert run.authority.members.get("alice") is None


def test_an_invitation_need_not_stand_on_the_command_line(run: Run, tmp_path: Path) -> None:
    """Where every user of the machine could read it."""
    text = run.invite(7701).encode()
    (tmp_path / "edit1.txt").write_text(f"{text}\n")
    assert invitation_text("-", io.StringIO(f"{text}\nnot read\n")).strip() == text
    assert invitation_text(str(tmp_path / "edit1.txt"), io.StringIO()).strip() == text
    (tmp_path / "printed").write_text(f"invite:\n{text}\nfor alice, single use\n")
    assert invitation_text(str(tmp_path / "printed"), io.StringIO()) == text
    assert invitation_text(text, io.StringIO()) == text
    with pytest.raises(ConfigError, match=r"^invitation\.txt: there is no such file, and it is not an invitation"):
        invitation_text("invitation.txt", io.StringIO())
    with pytest.raises(ConfigError, match=r"^the invitation is empty"):
        invitation_text("", io.StringIO())
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=r"/empty: the invitation is empty; one begins with edit1\."):
        invitation_text(str(tmp_path / "empty"), io.StringIO())
    with pytest.raises(ConfigError, match=r"^standard input: the invitation is empty"):
        invitation_text("-", io.StringIO())
    endless = io.StringIO("x" * 1_000_000)
    assert len(invitation_text("-", endless)) < 20_000 and endless.tell() < 20_000


@pytest.mark.parametrize("argument", ["-", "file"])
def test_the_command_joins_without_an_argument_that_others_see(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    def call(port: int) -> Result:
        text = run.invite(port).encode()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(seeking, "time", SimpleNamespace(time=lambda: NOW))
        (tmp_path / "file").write_text(text)
        return CliRunner().invoke(cli.app, ["join", argument, "--home", str(tmp_path / "home")], input=text)

    result = serving(run.pair(), run.service(), call)
    assert result.exit_code == 0, (result.output, result.exception)
    assert PeerFolder(tmp_path / "home").load(NOW).identity == ALICE


def test_a_clock_that_is_wrong_is_told_and_nothing_is_used_up(run: Run, tmp_path: Path) -> None:
    def call(port: int) -> EditError:
        text = run.invite(port).encode()
        error = refused(text, tmp_path / "home", NOW - 5 * 3600)
        assert join(text, tmp_path / "home", NOW) == ALICE
        return error

    error = serving(run.pair(), run.service(), call)
    assert isinstance(error, ConfigError)
    assert re.search(
        "the new certificate is valid from .* on: the coordinator's clock, or this machine's, is wrong; set it,", str(error)
    )


@pytest.mark.parametrize(
    ("age_s", "said"),
    [
        (1000.0, "its certificate has expired, or this machine's clock is ahead"),
        (-8000.0, "its certificate is not valid yet by this machine's clock, which is behind: set it"),
    ],
)
def test_a_server_whose_certificate_is_not_valid_now_is_not_taken_for_a_stranger(
    run: Run, tmp_path: Path, age_s: float, said: str
) -> None:
    key, coordinator = new_key(), Identity(RUN, "coordinator", "coordinator")
    certificate = run.authority.issuer.issue(
        coordinator, key.public_key(), lifetime_s=60, now=NOW - age_s, server_names=("127.0.0.1",)
    )
    pair = key.private_bytes(*_PKCS8, serialization.NoEncryption()), certificate.public_bytes(serialization.Encoding.PEM)
    error = serving(pair, run.service(), lambda port: refused(run.invite(port).encode(), tmp_path / "home"))
    assert isinstance(error, UntrustedServerError) and said in str(error)


def test_what_is_not_an_invitation_leaves_no_folder(tmp_path: Path) -> None:
    assert isinstance(refused("hello", tmp_path / "home"), ConfigError)
    assert not (tmp_path / "home").exists()


class LosesTheReply:
    """Enrols, and then the connection breaks before the first answer is through."""

    def __init__(self, service: EnrolmentService) -> None:
        self._service, self._lost = service, 0

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        reply = await self._service.Enrol(request, context)
        self._lost += 1
        if self._lost == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return reply


def test_a_lost_reply_does_not_burn_the_invitation(run: Run, tmp_path: Path) -> None:
    def call(port: int) -> tuple[EditError, EditError, Identity]:
        text = run.invite(port).encode()
        lost = refused(text, tmp_path / "home")
        thief = refused(text, tmp_path / "thief")
        return lost, thief, join(text, tmp_path / "home", NOW + 1)

    lost, thief, identity = serving(run.pair(), LosesTheReply(run.service()), call)
    assert isinstance(lost, TransportError) and isinstance(thief, RefusedError) and identity == ALICE
    assert PeerFolder(tmp_path / "home").load(NOW).identity == ALICE


class Calls:
    """Calls something in another thread before each answer."""

    def __init__(self, service: EnrolmentService, call: Callable[[], object]) -> None:
        self._service, self._call = service, call

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        await asyncio.to_thread(self._call)
        return await self._service.Enrol(request, context)


@pytest.mark.parametrize("peer_id", ["alice", "bob"])
def test_a_second_join_into_a_folder_is_refused_while_the_first_is_under_way(run: Run, tmp_path: Path, peer_id: str) -> None:
    home, errors, texts = tmp_path / "home", list[EditError](), list[str]()

    def call(port: int) -> Identity:
        mine = run.invite(port).encode()
        texts.append(mine if peer_id == "alice" else run.invite(port, peer_id=peer_id).encode())
        return join(mine, home, NOW)

    assert serving(run.pair(), Calls(run.service(), lambda: errors.append(refused(texts[0], home))), call) == ALICE
    (error,) = errors
    assert isinstance(error, ConfigError) and str(error) == f"another join is under way in {home}; wait until it has ended"
    assert PeerFolder(home).load(NOW).identity == ALICE
    assert serving(run.pair(), run.service(), lambda port: join(run.invite(port).encode(), home, NOW)) == ALICE


class Answers:
    """A coordinator that holds the right server key and answers wrongly."""

    def __init__(self, service: EnrolmentService, change: Callable[[pb.EnrolReply], object]) -> None:
        self._service, self._change = service, change

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        reply = await self._service.Enrol(request, context)
        self._change(reply)
        return reply


def with_certificate(run: Run, identity: Identity) -> Callable[[pb.EnrolReply], object]:
    certificate = run.authority.issuer.issue(identity, new_key().public_key(), lifetime_s=60, now=NOW)
    return lambda reply: setattr(reply, "certificate_der", certificate.public_bytes(serialization.Encoding.DER))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run, other: lambda reply: setattr(reply, "peer_id", "bob"), "another identity"),
        (lambda run, other: lambda reply: setattr(reply, "role", "operator"), "another identity"),
        (lambda run, other: lambda reply: setattr(reply, "ca_der", other.authority.ca_der), "another authority"),
        (lambda run, other: lambda reply: reply.ClearField("endpoints"), "no usable addresses"),
        (lambda run, other: lambda reply: reply.endpoints.append("x"), "no usable addresses"),
        (lambda run, other: lambda reply: reply.endpoints.extend(["a:1"] * 20), "no usable addresses"),
        (lambda run, other: lambda reply: setattr(reply, "certificate_der", b"x" * 20_000), "20000 bytes"),
        (lambda run, other: lambda reply: setattr(reply, "certificate_der", b"\x30\x00"), "damaged certificate"),
        (lambda run, other: with_certificate(run, ALICE), "another key"),
        (lambda run, other: with_certificate(run, Identity(RUN, "peer", "bob")), "the certificate is for edit://"),
        (lambda run, other: with_certificate(other, ALICE), "not signed by the run's authority"),
    ],
)
def test_an_answer_that_does_not_fit_is_not_kept(
    run: Run, tmp_path: Path, change: Callable[[Run, Run], Callable[[pb.EnrolReply], object]], reason: str
) -> None:
    service = Answers(run.service(), change(run, make_run(tmp_path / "other", "other-1")))
    error = serving(run.pair(), service, lambda port: refused(run.invite(port).encode(), tmp_path / "home"))
    assert isinstance(error, RemoteProtocolError) and reason in str(error)


def test_an_oversized_request_is_refused_before_it_is_looked_at(run: Run) -> None:
    def call(port: int) -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials((run.folder / "ca.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub: Any = enrolment_pb2_grpc.EnrolmentStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Enrol(pb.EnrolRequest(token="x" * 65, csr_der=b""), timeout=10)
            code: grpc.StatusCode = caught.value.code()  # type: ignore[attr-defined]
            return code

    assert serving(run.pair(), run.service(), call) is grpc.StatusCode.INVALID_ARGUMENT


# ---- the folder afterwards -----------------------------------------------------------------------------------------------


@pytest.fixture
def home(run: Run, tmp_path: Path) -> Path:
    """Alice's folder."""
    path = tmp_path / "home"
    serving(run.pair(), run.service(), lambda port: join(run.invite(port).encode(), path, NOW))
    return path


def test_a_folder_of_another_run_is_not_overwritten(tmp_path: Path, home: Path) -> None:
    other = make_run(tmp_path / "other", "other-1")
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    with pytest.raises(ConfigError, match=r"belongs to alice \(peer\) of run run-0123abcd; choose another --home"):
        join(other.invite(1).encode(), home, NOW)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


def test_joining_again_renews_the_certificate_with_the_same_key(run: Run, home: Path) -> None:
    key, certificate = (home / "peer.key").read_bytes(), (home / "peer.pem").read_bytes()
    serving(run.pair(), run.service(NOW + 30), lambda port: join(run.invite(port).encode(), home, NOW))
    assert (home / "peer.key").read_bytes() == key and (home / "peer.pem").read_bytes() != certificate
    assert PeerFolder(home).load(NOW).identity == ALICE and earlier_keys(home, ALICE) == ()


def test_joining_with_a_new_key_keeps_the_earlier_one_before_the_new_one_counts(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = public_key_of(x509.load_pem_x509_certificate((home / "peer.pem").read_bytes()))
    (home / "peer.key").unlink()

    def joined(port: int) -> Identity:
        text, written = run.invite(port).encode(), peer_folder.write_atomic

        def full(path: Path, data: bytes, **named: Any) -> None:
            if path.name == "peer.pem":
                raise StorageError(f"{path}: the disk is full")
            written(path, data, **named)

        monkeypatch.setattr(peer_folder, "write_atomic", full)
        with pytest.raises(StorageError, match=r"peer\.pem"):
            join(text, home, NOW)
        assert earlier_keys(home, ALICE) == (key,)
        monkeypatch.setattr(peer_folder, "write_atomic", written)
        return join(text, home, NOW)

    assert serving(run.pair(), run.service(), joined) == ALICE
    assert earlier_keys(home, ALICE) == (key,) and PeerFolder(home).load(NOW).identity == ALICE


def test_a_certificate_from_before_peers_could_serve_still_trains_but_serves_nothing(run: Run, home: Path) -> None:
    assert PeerFolder(home).load(NOW).serving is not None
    text = home / "text.txt"
    text.write_text("to be or not to be")
    with pytest.raises(ConfigError, match=r"ask for a new invitation for alice and run: edit-peer join INVITATION --home"):
        make_old(run, home)
        server_of(PeerOptions(home=home, data=text, serve_snapshots="127.0.0.1:0"), PeerFolder(home).load(NOW), ALONE)
    assert PeerFolder(home).load(NOW).serving is None
    assert who_am_i(run, PeerFolder(home).load(NOW).credentials) == ALICE.uri.encode()


def make_old(run: Run, home: Path) -> None:
    """Alice's certificate as older versions issued it: for a client, without a name to serve under."""
    own = x509.load_pem_x509_certificate((home / "peer.pem").read_bytes())
    builder = x509.CertificateBuilder(own.issuer, own.subject, own.public_key(), own.serial_number)  # type: ignore[arg-type]
    builder = builder.not_valid_before(own.not_valid_before_utc).not_valid_after(own.not_valid_after_utc)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(ALICE.uri)]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
    key = serialization.load_pem_private_key((run.folder / "ca.key").read_bytes(), None)
    certificate = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    (home / "peer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def test_a_folder_that_never_joined_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no invitation redeemed in .*; run: edit-peer join INVITATION --home"):
        PeerFolder(tmp_path).load()
    assert PeerFolder(tmp_path).identity() is None


def other_key(run: Run, home: Path) -> None:
    (home / "peer.key").write_bytes(run.issue(ALICE)[0])


def other_certificate(run: Run, home: Path) -> None:
    (home / "peer.pem").write_bytes(run.issue(Identity(RUN, "peer", "bob"))[1])


def other_authority(run: Run, home: Path) -> None:
    shutil.copy(make_run(home.parent / "other").folder / "ca.pem", home / "ca.pem")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run, home: (home / "peer.key").chmod(0o640), r"others can read this key \(mode 0640\); run: chmod 600"),
        (lambda run, home: (home / "peer.key").unlink(), r"peer\.key: cannot be read"),
        (lambda run, home: (home / "peer.key").write_text("x"), r"peer\.key: is not a private key"),
        (lambda run, home: (home / "peer.pem").unlink(), r"peer\.pem: cannot be read"),
        (lambda run, home: (home / "peer.pem").write_text("x"), r"peer\.pem or .*ca\.pem is damaged"),
        (lambda run, home: (home / "identity.json").write_text("{"), r"identity\.json: is damaged"),
        (lambda run, home: (home / "identity.json").write_text('{"run_id": "../x"}'), r"identity\.json: is damaged"),
        (other_key, "another key than peer.key"),
        (other_certificate, "for edit://run-0123abcd/peer/bob, not edit://run-0123abcd/peer/alice"),
        (other_authority, "not signed by the run's authority"),
    ],
)
def test_a_damaged_folder_names_the_file_and_the_mend(
    run: Run, home: Path, damage: Callable[[Run, Path], object], reason: str
) -> None:
    damage(run, home)
    with pytest.raises(ConfigError, match=reason):
        PeerFolder(home).load(NOW)


def test_an_expired_certificate_is_told_before_dialling(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"peer\.pem: expired on 20\d\d-.* by this machine's clock; ask for a new invitation"):
        PeerFolder(home).load(NOW + 366 * 86400)


def test_a_clock_before_the_certificate_is_told_before_connecting(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"peer\.pem: is valid from .* clock is at least [34] h behind; set the clock"):
        PeerFolder(home).load(NOW - 5 * 3600)


# ---- mutual TLS with these credentials -----------------------------------------------------------------------------------


async def _who(request: bytes, context: Any) -> bytes:
    return from_auth_context(context.auth_context()).uri.encode()


def who_am_i(run: Run, credentials: grpc.ChannelCredentials) -> bytes:
    """What a mutual-TLS server of `run` sees of a caller with these credentials."""

    async def scenario() -> bytes:
        server = grpc.aio.server()
        handlers = {"Who": grpc.unary_unary_rpc_method_handler(_who)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        ca = (run.folder / "ca.pem").read_bytes()
        mutual = grpc.ssl_server_credentials([run.pair()], ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", mutual)
        await server.start()
        try:
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                seen: bytes = await channel.unary_unary("/test.Test/Who")(b"", timeout=10)
                return seen
        finally:
            await server.stop(None)

    return asyncio.run(scenario())


def test_the_server_sees_the_identity_of_the_certificate(run: Run, home: Path) -> None:
    assert who_am_i(run, PeerFolder(home).load(NOW).credentials) == ALICE.uri.encode()


def test_a_certificate_of_another_authority_or_none_is_refused(run: Run, tmp_path: Path) -> None:
    ca = (run.folder / "ca.pem").read_bytes()
    stranger = make_run(tmp_path / "other").issue(ALICE)  # even one that claims the same run and name
    for credentials in (grpc.ssl_channel_credentials(ca, *stranger), grpc.ssl_channel_credentials(ca)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            who_am_i(run, credentials)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_servers_own_certificate_opens_nothing(run: Run) -> None:
    credentials = grpc.ssl_channel_credentials((run.folder / "ca.pem").read_bytes(), *run.pair())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        who_am_i(run, credentials)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_coordinators_folder_is_not_made_a_peers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the folder of a coordinator; choose another --home"):
        join(run.invite(1).encode(), tmp_path, NOW)
    assert [path.name for path in tmp_path.glob("*.p*")] == [] and not (tmp_path / "identity.json").exists()
