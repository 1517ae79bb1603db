"""What can be done without a certificate: connections, handshakes, calls and enrolments."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edit.lab.hostile.member import Attacker
from editpb import enrolment_pb2
from editpb.invitation import is_endpoint
from editpb.transport.channel_options import channel_options

__all__ = ["refused_enrolments", "silent_calls", "silent_connections", "uncertified_handshakes"]

CONNECTIONS = 2000  # that say nothing
_ENROL = "/editpb.Enrolment/Enrol"


def _addresses(attacker: Attacker) -> tuple[tuple[str, int], ...]:
    """Return (host, port) of control and data, and of the enrolment."""
    both = (attacker.home.member.load().endpoints[0], attacker.home.enrol_listen)
    assert all(is_endpoint(each) for each in both)
    return tuple((each.rpartition(":")[0], int(each.rpartition(":")[2])) for each in both)


async def silent_connections(attacker: Attacker) -> None:
    """Open 2000 connections, begin no handshake on any of them, and open each again that is closed."""
    slots = asyncio.Semaphore(100)  # that are being opened at a time

    async def hold(host: str, port: int) -> None:
        async def attempt() -> None:
            async with slots:
                reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.read()
            finally:
                writer.close()

        await attacker.again_and_again(attempt)

    async with asyncio.TaskGroup() as group:
        for i in range(CONNECTIONS):
            group.create_task(hold(*_addresses(attacker)[i % 2]))


async def uncertified_handshakes(attacker: Attacker) -> None:
    """Finish handshakes without a certificate with the port of control and data, several at a time."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    (host, port), _ = _addresses(attacker)

    async def attempt() -> None:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            await reader.read()
        finally:
            writer.close()

    await _at_a_time(attacker, 8, attempt)


async def silent_calls(attacker: Attacker) -> None:
    """Begin as many enrolments as fit on many connections, and send no request on any of them."""

    async def connection() -> None:
        async with _stranger(attacker) as channel:
            begin = channel.stream_unary(_ENROL)
            calls = [begin() for _ in range(32)]

            async def ended(call: grpc.aio.Call) -> None:
                attacker.tally[f"call {(await call.code()).name}"] += 1

            try:
                await asyncio.gather(*map(ended, calls))
            finally:
                for call in calls:
                    call.cancel()

    await _at_a_time(attacker, 32, connection)


async def refused_enrolments(attacker: Attacker) -> None:
    """Enrol with tokens that nobody has and requests of every kind, several at a time."""
    requests = _requests()

    async def attempt() -> None:
        token = "".join(attacker.chance.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", k=43))
        if attacker.chance.random() < 0.1:
            token = token * attacker.chance.randrange(1000)
        await enrol(enrolment_pb2.EnrolRequest(token=token, csr_der=attacker.chance.choice(requests)).SerializeToString())

    async with _stranger(attacker) as channel:
        enrol = channel.unary_unary(_ENROL)
        await _at_a_time(attacker, 4, attempt)


def _requests() -> list[bytes]:
    """Return certificate requests: of a P-256 and a P-384 key, of another version, too long, and none at all."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    good, other = (
        builder.sign(ec.generate_private_key(curve), hashes.SHA256()).public_bytes(serialization.Encoding.DER)
        for curve in (ec.SECP256R1(), ec.SECP384R1())
    )
    at = good.index(b"\x02\x01\x00")
    return [good, other, good[: at + 2] + b"\x01" + good[at + 3 :], good + bytes(1 << 20), b"", b"\xff" * 1000]


@contextlib.asynccontextmanager
async def _stranger(attacker: Attacker):  # type: ignore[no-untyped-def]
    ca = (attacker.home.member.path / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(ca)
    async with grpc.aio.secure_channel(
        attacker.home.enrol_listen, credentials, options=channel_options(attacker.home.enrol_listen)
    ) as channel:
        yield channel


async def _at_a_time(attacker: Attacker, count: int, attempt: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(attacker.again_and_again(attempt))
