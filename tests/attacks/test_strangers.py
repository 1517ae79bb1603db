"""Who has no certificate: what connections, tokens and requests of strangers cost, and that members are served beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aggregator import server
from aggregator.security.authority import Authority
from aggregator.security.certificates import new_key
from aggregator.services.enrolment import Refusals
from aggregator.silent_connections import Remote, SilentConnections
from edit.errors import RefusedError, RemoteProtocolError
from editpb import enrolment_pb2, enrolment_pb2_grpc
from editpb.process_limits import raise_file_limit
from editpb.transport import channel_options, guarded_calls
from tests.support.loops import WAIT_S, on_a_loop
from tests.support.served import found_run, held_clock, new_folder, served, theta

TOKEN = "A" * 43  # well-formed, and nobody's


def request(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.DER)


def of_version_2(csr: bytes) -> bytes:
    at = csr.index(b"\x02\x01\x00")
    return csr[: at + 2] + b"\x01" + csr[at + 3 :]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path, "run", ["127.0.0.1"], now=time.time())


@pytest.mark.parametrize(
    "csr",
    [
        of_version_2(request(new_key())),
        request(ec.generate_private_key(ec.SECP384R1())),
        request(ec.generate_private_key(ec.BrainpoolP256R1())),
        request(new_key()).replace(bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030163")),
    ],
    ids=["version 2", "P-384", "brainpool", "no known curve"],
)
def test_a_request_of_another_kind_is_refused_and_uses_nothing_up(authority: Authority, csr: bytes) -> None:
    now = time.time()
    token = authority.invite("a", role="peer", enrol=["127.0.0.1:1"], lifetime_s=60, now=now).token
    with pytest.raises(RemoteProtocolError, match="the certificate request"):
        authority.redeem(token, csr, now=now)
    assert authority.redeem(token, request(new_key()), now=now)[1].peer_id == "a"


def test_an_unknown_token_costs_no_look_at_every_invitation(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed once, however many ask, and nothing of their requests is verified."""
    listed, listing = list[Path](), Path.iterdir

    def counted(path: Path) -> Iterator[Path]:
        listed.append(path)
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", counted)
    for _ in range(20):
        with pytest.raises(RefusedError, match="not known here"):
            authority.redeem(TOKEN, b"no request at all", now=time.time())
    assert len(listed) == 1


def test_refused_enrolments_are_one_line_a_second_and_source(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for i in range(2000):
        refusals.log("ipv4:10.0.0.1", "unknown", 100 + i / 1000)
    refusals.log("ipv4:10.0.0.2", "unknown", 101)
    refusals.log("ipv4:10.0.0.1", "unknown", 102)
    assert [record.getMessage() for record in caplog.records] == [
        "enrolment from ipv4:10.0.0.1 refused: unknown",
        "enrolment from ipv4:10.0.0.1 refused: unknown (999 more since the last line)",
        "enrolment from ipv4:10.0.0.2 refused: unknown",
        "enrolment from ipv4:10.0.0.1 refused: unknown (999 more since the last line)",
    ]
    for i in range(5000):
        refusals.log(f"ipv4:{i}", "unknown", 103)
    assert len(refusals._last) <= 1000


@on_a_loop
async def test_unknown_tokens_over_the_wire_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with served(new_folder(tmp_path / "run"), held_clock(lambda: 1e9)) as run:
        credentials = grpc.ssl_channel_credentials(run.ca)
        async with grpc.aio.secure_channel(run.coordinator.enrol_listen, credentials) as channel:
            stub = enrolment_pb2_grpc.EnrolmentStub(channel)
            for _ in range(100):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Enrol(enrolment_pb2.EnrolRequest(token=TOKEN, csr_der=b"x"), timeout=WAIT_S)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert sum("refused" in record.getMessage() for record in caplog.records) == 1


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@on_a_loop
async def test_a_stranger_s_calls_without_a_request_keep_nobody_from_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as its connections take. They end after a while; a large request is refused."""
    async with served(new_folder(tmp_path / "run")) as run, contextlib.AsyncExitStack() as stack:
        coordinator, options = run.coordinator, (("grpc.use_local_subchannel_pool", 1),)
        assert coordinator.authority is not None
        token = coordinator.authority.invite("a", role="peer", enrol=["h:1"], lifetime_s=60, now=time.time()).token

        async def connect() -> grpc.aio.Channel:
            credentials = grpc.ssl_channel_credentials(run.ca)
            return await stack.enter_async_context(grpc.aio.secure_channel(coordinator.enrol_listen, credentials, options))

        held = []
        for _ in range(20):
            channel = await connect()
            held += [channel.stream_unary("/editpb.Enrolment/Enrol")(_silence()) for _ in range(server._ENROLMENTS)]
            await channel.channel_ready()
        stub = enrolment_pb2_grpc.EnrolmentStub(await connect())
        asked = enrolment_pb2.EnrolRequest(token=token, csr_der=request(new_key()))
        assert (await stub.Enrol(asked, timeout=WAIT_S)).peer_id == "a"
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await stub.Enrol(enrolment_pb2.EnrolRequest(token=token, csr_der=bytes(server._ENROLMENT_BYTES)), timeout=WAIT_S)
        monkeypatch.setattr(guarded_calls, "REQUEST_S", 0.01)
        late = (await connect()).stream_unary("/editpb.Enrolment/Enrol")(_silence())
        async with asyncio.timeout(WAIT_S):
            assert await late.code() is grpc.StatusCode.UNAVAILABLE
        for call in (*held, late):
            call.cancel()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


@on_a_loop
async def test_a_connection_without_a_handshake_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "HANDSHAKE_MS", 300)
    async with served(new_folder(tmp_path / "run")) as run:
        for address in (run.coordinator.listen, run.coordinator.enrol_listen):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(WAIT_S):
                await _until_closed(reader)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@on_a_loop
async def test_strangers_leave_descriptors_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than are allowed, none of which says anything: the surplus is closed, and a run is founded."""
    monkeypatch.setattr(server, "_connections", lambda: (8, 8))
    monkeypatch.setattr(channel_options, "HANDSHAKE_MS", 600_000)  # so that it is not the handshake that ends them
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as peer:
        host, _, port = run.coordinator.enrol_listen.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        try:
            closed = [asyncio.ensure_future(_until_closed(reader)) for reader, _ in opened]
            surplus = asyncio.as_completed(closed, timeout=WAIT_S)
            for _ in range(32):
                await next(surplus)
            await found_run(peer)
        finally:
            for one in closed:
                one.cancel()
            await asyncio.gather(*closed, return_exceptions=True)
            for _, writer in opened:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in opened), return_exceptions=True)


@pytest.mark.covering
@pytest.mark.parametrize("hoarder", ["127.0.0.2", "127.0.0.1"], ids=["another source", "the members' own address"])
@pytest.mark.parametrize("port", ["listen", "enrol_listen"])
@on_a_loop
async def test_one_source_has_few_silent_connections_and_members_behind_it_are_not_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hoarder: str, port: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_connections", lambda: (32, 24))
    monkeypatch.setattr(channel_options, "HANDSHAKE_MS", 600_000)  # so that it is not the handshake that ends them
    most = {"listen": 4, "enrol_listen": 6}[port]
    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(served(new_folder(tmp_path / "run", start=6)))
        peers = [await stack.enter_async_context(run.peer(f"p{i}")) for i in range(6)]  # more than may be silent
        for peer in peers:
            await peer.attend()
        host, _, number = getattr(run.coordinator, port).rpartition(":")
        opened = [await asyncio.open_connection(host, int(number), local_addr=(hoarder, 0)) for _ in range(16)]
        other = await asyncio.open_connection(host, int(number), local_addr=("127.0.0.3", 0))
        closed = [asyncio.ensure_future(_until_closed(reader)) for reader, _ in opened]
        kept = asyncio.ensure_future(_until_closed(other[0]))
        try:
            surplus = asyncio.as_completed(closed, timeout=WAIT_S)
            for _ in range(16 - most):
                await next(surplus)
            await peers[0].view(lambda view: view.found)
            late = await stack.enter_async_context(run.peer("late"))
            await late.attend()  # the newest of that address: older silent ones go first
            await peers[0].found(theta())
            for peer in peers:
                await peer.report(0)
            round_id = (await peers[0].view(lambda view: view.round_id > 0)).round_id
            for peer in peers:
                await peer.contribute(round_id, 0, theta(1))
            await peers[0].view(lambda view: view.outer_step == 1)
            assert not kept.done() and all(run.coordinator.run.attendances.get(peer.peer_id) for peer in (*peers, late))
        finally:
            for one in (*closed, kept):
                one.cancel()
            await asyncio.gather(*closed, kept, return_exceptions=True)
            for _, writer in (*opened, other):
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in (*opened, other)), return_exceptions=True)
    lines = [record.getMessage() for record in caplog.records if "over which nobody called" in record.getMessage()]
    assert lines and all(f" connections from {hoarder} over which nobody called" in line for line in lines)


def test_a_source_is_an_address_or_the_network_of_an_ipv6_address() -> None:
    assert Remote("10.0.0.1", 5).source == "10.0.0.1"
    assert Remote("2001:db8:1:2:3:4:5:6", 5).source == Remote("2001:db8:1:2::9", 7).source == "2001:db8:1:2::/64"
    silent = SilentConnections()
    for name in ("ipv4:10.0.0.1:5", "ipv6:%5B2001:db8::1%5D:6", "ipv6:%5B::ffff:10.0.0.2%5D:7", "unix:/tmp/x", "ipv4:nonsense"):
        silent.spoke(name)
    assert silent._spoke == {Remote("10.0.0.1", 5), Remote("2001:db8::1", 6), Remote("10.0.0.2", 7)}


def test_the_limit_of_open_files_is_raised_and_some_are_kept_back() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        members, strangers = server._connections()
        assert members > strangers > 0 and members + strangers <= min(1024, hard) - 256
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
