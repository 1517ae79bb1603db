"""Certificates are renewed while the run goes on: a member's over its own connection, the server's without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
import time
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.control.status import run_status
from edit.errors import ConfigError
from editpb import data_pb2, enrolment_pb2, enrolment_pb2_grpc
from editpb.identity import from_certificate
from editpb.server_certificate import ServerCertificate
from editpb.validity import DAY_S
from tests.support.loops import until
from tests.support.served import SCHEMA, BarePeer, Served, found_run, held_clock, new_folder, served

YEAR_S = 365 * DAY_S


def due(run: Served, peer_id: str, role: str = "peer") -> tuple[bytes, bytes]:
    """The key of a member, and its certificate of 300 days ago, that ends in 65 days."""
    return run.certificate(peer_id, role, lifetime_s=YEAR_S, age_s=300 * DAY_S)


async def renewed(run: Served, pair: tuple[bytes, bytes], ca: bytes | None = None) -> x509.Certificate:
    """ca: whom the member trusts; None: who is in the run's folder now."""
    credentials = grpc.ssl_channel_credentials(run.ca if ca is None else ca, *pair)
    async with grpc.aio.secure_channel(run.coordinator.listen, credentials) as channel:
        reply = await enrolment_pb2_grpc.RenewalStub(channel).Renew(enrolment_pb2.RenewRequest(), timeout=10)
        return x509.load_der_x509_certificate(reply.certificate_der)


async def refusal(run: Served, pair: tuple[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await renewed(run, pair)
    return caught.value.code(), str(caught.value.details())


def shown_by(address: str) -> int:
    """The serial number of the certificate that a new connection gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw, context.wrap_socket(raw) as connection:
        return x509.load_der_x509_certificate(connection.getpeercert(True) or b"").serial_number


def early(run: Served, pem: bytes) -> bytes:
    """The server's certificate, made again by a clock that is 5 h ahead."""
    own, issuer = x509.load_pem_x509_certificate(pem), run.coordinator.authority.issuer
    key = own.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    ahead = time.time() + 5 * 3600
    made = issuer.issue(from_certificate(own), key, lifetime_s=YEAR_S, now=ahead, server_names=("127.0.0.1",))
    return made.public_bytes(serialization.Encoding.PEM)


# ---- a member's ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["peer", "region", "observer", "operator"])
def test_every_member_renews_its_own(tmp_path: Path, role: str) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            pair = due(run, "a", role)
            certificate = await renewed(run, pair)
            own = x509.load_pem_x509_certificate(pair[1])
            assert certificate.public_key() == own.public_key() and certificate.subject == own.subject
            assert certificate.not_valid_after_utc.timestamp() == pytest.approx(time.time() + YEAR_S, abs=60)

    asyncio.run(scenario())


def test_who_was_evicted_or_has_another_key_now_gets_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            evicted, replaced, fresh = due(run, "a"), due(run, "b"), run.certificate("c", lifetime_s=YEAR_S)
            run.coordinator.run.evict("a", "bad manners")
            run.certificate("b", anew=True)
            assert await refusal(run, evicted) == (grpc.StatusCode.PERMISSION_DENIED, "evicted: bad manners")
            assert await refusal(run, replaced) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "the certificate of b was replaced by a newer one",
            )
            code, reason = await refusal(run, fresh)
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "the certificate of c is not due for renewal" in reason

    asyncio.run(scenario())


def test_a_stream_goes_on_over_the_end_of_the_certificate_that_opened_it(tmp_path: Path) -> None:
    """Its key is the renewed one's: nothing is connected anew, and no round is lost. Without a renewal it ends."""
    ahead = 0.0

    async def scenario() -> None:
        nonlocal ahead
        clock = held_clock(lambda: time.time() + ahead)
        async with served(new_folder(tmp_path / "run"), clock) as run:
            pairs = {name: due(run, name) for name in "ab"}
            async with (
                grpc.aio.secure_channel(run.coordinator.listen, grpc.ssl_channel_credentials(run.ca, *pairs["a"])) as one,
                grpc.aio.secure_channel(run.coordinator.listen, grpc.ssl_channel_credentials(run.ca, *pairs["b"])) as two,
            ):
                a, b = BarePeer("a", run.folder.run_id, one, SCHEMA), BarePeer("b", run.folder.run_id, two, SCHEMA)
                await found_run(a)
                await b.attend()
                await renewed(run, pairs["a"])
                ahead = 70 * DAY_S
                await until(lambda: run.coordinator.run.attendances.get("b") is None)
                assert run.coordinator.run.attendances.get("a") is not None
                await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
                with pytest.raises(grpc.aio.AioRpcError, match=r"the certificate of b expired on .* ago by the aggregator"):
                    await b.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=b.run_id))
                await a.disconnect()

    asyncio.run(scenario())


# ---- the server's --------------------------------------------------------------------------------------------------------


def test_the_server_renews_its_own_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead = 0.0

    async def scenario() -> None:
        nonlocal ahead
        async with served(new_folder(tmp_path / "run"), held_clock(lambda: time.time() + ahead)) as run, run.peer("a") as a:
            await found_run(a)
            ports = run.coordinator.listen, run.coordinator.enrol_listen
            before = [await asyncio.to_thread(shown_by, port) for port in ports]
            ahead = 250 * DAY_S
            run.coordinator.look_after_certificates()
            after = [await asyncio.to_thread(shown_by, port) for port in ports]
            on_disk = x509.load_pem_x509_certificate((run.folder.path / "server.pem").read_bytes()).serial_number
            assert before[0] == before[1] != on_disk and after == [on_disk, on_disk]
            a.received.clear()
            run.coordinator.run.pause()
            assert (await a.view()).reason.startswith("paused"), "the open stream goes on"

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert "renewed server.pem" in caplog.messages


def test_a_certificate_that_is_replaced_twice_in_a_moment_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            authority = run.coordinator.authority
            assert authority is not None
            path = run.folder.path / "server.pem"
            times = path.stat()
            for name in ("one.example", "two.example", "six.example"):  # of one length
                authority.renew_own(("127.0.0.1", name), now=time.time())
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                expected = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
                assert await asyncio.to_thread(shown_by, run.coordinator.listen) == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["missing", "damaged", "of another key", "not valid yet"])
def test_what_cannot_be_used_leaves_the_certificate_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run:
            before = await asyncio.to_thread(shown_by, run.coordinator.listen)
            path = folder.path / "server.pem"
            if damage == "missing":
                path.unlink()
            elif damage == "not valid yet":
                path.write_bytes(early(run, path.read_bytes()))
            else:
                path.write_bytes(b"x" if damage == "damaged" else (folder.path / "operator.pem").read_bytes())
            for _ in range(2):
                assert await asyncio.to_thread(shown_by, run.coordinator.listen) == before

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    said = [line for line in caplog.messages if "the server's certificate before it stays in use" in line]
    assert len(said) == 1 and "server.pem" in said[0], "once, not at each handshake"


@pytest.mark.parametrize(
    ("damage", "words"),
    [("empty", "is damaged"), ("cut", "is damaged"), ("of another run", "has no authority that signed server.pem")],
)
def test_an_authority_that_cannot_be_this_servers_leaves_the_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, words: str
) -> None:
    other = (new_folder(tmp_path / "other").path / "ca.pem").read_bytes()

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        path = folder.path / "ca.pem"
        good = path.read_bytes()
        bad = {"empty": b"", "cut": good[: len(good) // 2], "of another run": other}[damage]
        async with served(folder) as run:
            path.write_bytes(bad)
            for name in "ab":
                await renewed(run, due(run, name), good)
            path.write_bytes(other + good)  # while an authority is replaced there are several
            await renewed(run, due(run, "c"), good)
            path.write_bytes(bad)
        files = (folder.path / name for name in ("server.key", "server.pem"))
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: {words}"):
            ServerCertificate(*files, path)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    said = [line for line in caplog.messages if "the server's certificate before it stays in use" in line]
    assert len(said) == 1 and said[0].startswith(f"{tmp_path / 'run' / 'ca.pem'}: {words}"), "once, not at each handshake"
    assert sum(line.startswith("new connections get") for line in caplog.messages) == 1, "of the two authorities"


# ---- what is told --------------------------------------------------------------------------------------------------------


def test_what_ends_soon_stands_in_the_log_and_in_the_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = time.time()
    at = now

    async def scenario() -> None:
        nonlocal at
        async with served(new_folder(tmp_path / "run"), held_clock(lambda: at)) as run:
            run.certificate("a", lifetime_s=YEAR_S)
            coordinator = run.coordinator
            (row,) = run_status(coordinator.run).members
            assert row.expires == pytest.approx(now + YEAR_S, abs=60) and run_status(coordinator.run).warnings == ()
            for days in (20.5, 19.5, 6.5, -2.5):
                at = now + YEAR_S - days * DAY_S
                coordinator.look_after_certificates()
                coordinator.tell_of_certificates()
            assert run_status(coordinator.run).warnings == (), "the server's own was renewed on the way"
            at = now - 5 * 3600
            coordinator.tell_of_certificates()
            warnings = run_status(coordinator.run).warnings
            assert any("the authority of this run is valid from" in line for line in warnings)
            assert all("this machine's clock is at least" in line and line.endswith("set the clock") for line in warnings)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    of_a = [line.partition(",")[0] for line in caplog.messages if line.startswith("a: its certificate")]
    assert [line for line in of_a if "valid from" not in line] == [
        "a: its certificate expires in 20 days",
        "a: its certificate expires in 6 days",
        next(line for line in of_a if "expired on" in line),
    ]
