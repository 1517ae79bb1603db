"""A peer renews its certificate by itself: what is open stays open, what is opened next shows the new one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import peers
from aggregator.security.certificates import new_key
from edit.errors import RemoteProtocolError, TransportError
from editpb import data_pb2, data_pb2_grpc
from editpb.identity import Identity
from editpb.validity import DAY_S, Validity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import read_configuration
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import AGAIN_S, LOOK_S, Renewal
from peers.watching import read_status, statuses
from tests.integration.test_certificates import shown_by
from tests.support.running import address, running
from tests.support.served import SCHEMA, BarePeer, Served, found_run, new_folder, served

YEAR_S = 365 * DAY_S
DER = serialization.Encoding.DER


def home_of(run: Served, path: Path, peer_id: str = "a", age_s: float = 300 * DAY_S, role: str = "peer") -> PeerFolder:
    """A peer's folder, whose certificate is `age_s` old and valid for a year."""
    key, pem = run.certificate(peer_id, role, lifetime_s=YEAR_S, age_s=age_s)
    path.mkdir()
    (path / "peer.key").touch(mode=0o600)
    (path / "peer.key").write_bytes(key)
    ca = x509.load_pem_x509_certificate(run.ca).public_bytes(DER)
    own = x509.load_pem_x509_certificate(pem).public_bytes(DER)
    folder = PeerFolder(path)
    folder.store(Identity(run.folder.run_id, role, peer_id), (run.coordinator.listen,), own, ca)
    return folder


def files(folder: PeerFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


def channels_of(enrolled: Enrolment) -> Channels:
    return Channels(enrolled.endpoints, enrolled.credentials)


async def described(channel: grpc.aio.Channel, run: Served) -> None:
    request = data_pb2.SnapshotManifestRequest(run_id=run.folder.run_id)
    await data_pb2_grpc.DataStub(channel).DescribeSnapshot(request, timeout=10)


def test_a_due_certificate_is_renewed_and_nothing_that_is_open_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled = folder.load(time.time())
            channels, before = channels_of(enrolled), files(folder)
            further = channels.to(enrolled.endpoints)
            old, other = channels.data(), further.data()
            a = BarePeer("a", run.folder.run_id, old, SCHEMA)
            await found_run(a)
            await Renewal(folder, enrolled, channels).look()
            after = files(folder)
            assert {name for name in after if after[name] != before[name]} == {"peer.pem"}
            assert folder.load(time.time()).validity.ends == pytest.approx(time.time() + YEAR_S, abs=60)
            for dial, opened in ((channels, old), (further, other)):
                new = dial.data()
                assert new is not opened and dial.data() is new
                await described(new, run)
                await described(opened, run)
            a.received.clear()
            run.coordinator.run.pause()
            assert (await a.view()).reason.startswith("paused"), "the stream of the old channel goes on"
            assert run.coordinator.run.attendances.get("a") is not None
            await a.disconnect()
            await further.close()
            await channels.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert any("the certificate is renewed and expires in 364 days" in line for line in caplog.messages)


def test_one_that_is_not_due_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home", age_s=200 * DAY_S)
            enrolled, before = folder.load(time.time()), files(folder)
            channels = channels_of(enrolled)
            old, known = channels.data(), run.coordinator.run.members.get("a")
            await Renewal(folder, enrolled, channels).look()
            assert (channels.data() is old, files(folder), run.coordinator.run.members.get("a")) == (True, before, known)
            await channels.close()

    asyncio.run(scenario())


def test_the_other_ranks_take_what_one_has_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled = folder.load(time.time())
            first, second = channels_of(enrolled), channels_of(enrolled)
            old = second.data()
            rank = Renewal(folder, enrolled, second, asks=False)
            await rank.look()
            assert second.data() is old, "it does not ask"
            await Renewal(folder, enrolled, first).look()
            await rank.look()
            assert second.data() is not old
            await first.close()
            await second.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("days", "level"), [(70, logging.INFO), (20, logging.WARNING), (5, logging.WARNING)])
def test_a_coordinator_that_is_away_is_told_once_and_louder_near_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, level: int
) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
        enrolled, before = folder.load(time.time()), files(folder)
        channels = channels_of(enrolled)
        renewal = Renewal(folder, enrolled, channels, unix=lambda: enrolled.validity.ends - (days + 0.5) * DAY_S)
        await renewal.look()
        await renewal.look()
        assert files(folder) == before
        await channels.close()

    with caplog.at_level(logging.INFO, logger="peers"):
        asyncio.run(scenario())
    ((_, said_at, line),) = [record for record in caplog.record_tuples if record[0] == "peers"]
    assert said_at == level
    assert (
        f"the certificate expires in {days} days, on " in line
        and "could not be renewed yet: cannot be reached (connection refused)" in line
    )


def test_after_a_renewal_that_failed_it_asks_again_a_minute_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate may end within the hour."""
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled = folder.load(time.time())
            channels = channels_of(enrolled)
            renewal, answers = Renewal(folder, enrolled, channels), [TransportError("away"), TransportError("away")]
            asked = renewal._ask

            async def ask() -> bytes:
                if answers:
                    raise answers.pop()
                return await asked()

            monkeypatch.setattr(renewal, "_ask", ask)
            with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
                patch.setattr("peers.identity.renewal.asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
                await renewal.keep()
            await channels.close()

    asyncio.run(scenario())
    assert slept == [AGAIN_S, AGAIN_S, LOOK_S, LOOK_S]


def test_who_is_connected_is_kept_renewed_without_asking_for_it(tmp_path: Path) -> None:
    """`peers.connect`, as a user's own loop has it, against a coordinator in another thread."""
    state = new_folder(tmp_path / "run")
    with running(state) as here:
        folder = home_of(here.served, tmp_path / "home")
        before = folder.load(time.time())
        with peers.connect(folder.path):
            here.await_(lambda run: folder.load(time.time()).validity.ends > before.validity.ends)
            here.await_(lambda run: run.members.get("a").expires == folder.load(time.time()).validity.ends)


def test_who_was_evicted_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled, before = folder.load(time.time()), files(folder)
            channels = channels_of(enrolled)
            run.coordinator.run.evict("a", "bad manners")
            await Renewal(folder, enrolled, channels).look()
            assert files(folder) == before
            await channels.close()

    with caplog.at_level(logging.INFO, logger="peers"):
        asyncio.run(scenario())
    assert any("could not be renewed yet: bad manners" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda run, enrolled, own: b"", "a certificate of 0 bytes"),
        (lambda run, enrolled, own: b"x" * 20_000, "a certificate of 20000 bytes"),
        (lambda run, enrolled, own: b"\x30\x00", "a damaged certificate"),
        (lambda run, enrolled, own: issued(run, "a", new_key().public_key()), "for another key than peer.key"),
        (lambda run, enrolled, own: issued(run, "b", own), "is for edit://"),
        (lambda run, enrolled, own: issued(run, "a", own, lifetime_s=DAY_S), "ends no later than the present one"),
        (
            lambda run, enrolled, own: issued(run, "a", own, ahead_s=5 * 3600),
            r"^the new certificate is valid from [^;]+ on: the coordinator's clock, or this machine's, is wrong$",
        ),
    ],
)
def test_an_answer_that_does_not_fit_changes_nothing(
    tmp_path: Path, answer: Callable[[Served, Enrolment, object], bytes], said: str
) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled, before = folder.load(time.time()), files(folder)
            own = x509.load_pem_x509_certificate(enrolled.certificate).public_key()
            with pytest.raises(RemoteProtocolError, match=said):
                folder.renew(enrolled, answer(run, enrolled, own), time.time(), "the coordinator's clock")
            assert files(folder) == before

    asyncio.run(scenario())


def issued(run: Served, peer_id: str, public: object, lifetime_s: float = 2 * YEAR_S, ahead_s: float = 0.0) -> bytes:
    identity = Identity(run.folder.run_id, "peer", peer_id)
    issuer = run.coordinator.authority.issuer
    return issuer.issue(identity, public, lifetime_s=lifetime_s, now=time.time() + ahead_s).public_bytes(DER)


def test_a_peer_that_serves_shows_the_renewed_certificate_to_new_readers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home")
            enrolled = folder.load(time.time())
            server = grpc.aio.server()
            port = server.add_secure_port("127.0.0.1:0", enrolled.serving)
            await server.start()
            channels = channels_of(enrolled)
            before = await asyncio.to_thread(shown_by, f"127.0.0.1:{port}")
            await Renewal(folder, enrolled, channels).look()
            after = await asyncio.to_thread(shown_by, f"127.0.0.1:{port}")
            stored = x509.load_pem_x509_certificate((folder.path / "peer.pem").read_bytes())
            assert before != after == stored.serial_number
            assert Validity.of(stored).ends > enrolled.validity.ends
            await channels.close()
            await server.stop(None)

    asyncio.run(scenario())


def test_a_peer_whose_certificate_the_coordinator_does_not_take_is_told_what_that_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the peer's own clock it is valid; TLS says no more than that the connection was closed."""
    state = new_folder(tmp_path / "run")
    with caplog.at_level(logging.INFO), running(state) as here, IoThread() as io:
        key, pem = here.served.certificate("a", lifetime_s=DAY_S, age_s=2 * DAY_S)
        channels = Channels([address(state)], grpc.ssl_channel_credentials(here.served.ca, key, pem))
        identity = Identity(state.run_id, "peer", "a")
        asked = threading.Thread(target=_ask, args=(io, channels, identity))
        asked.start()
        here.await_(lambda run: any("by its clock this peer's certificate is not valid" in line for line in caplog.messages))
        io.interrupt()
        asked.join(timeout=30)
        assert not asked.is_alive()


def _ask(io: IoThread, channels: Channels, identity: Identity) -> None:
    with contextlib.suppress(Interrupted):
        read_configuration(io, channels, identity)


@pytest.mark.parametrize(("role", "renews"), [("observer", True), ("operator", True), ("peer", False)])
def test_the_certificate_of_one_that_only_looks_on_is_renewed_while_it_looks(tmp_path: Path, role: str, renews: bool) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            folder = home_of(run, tmp_path / "home", "looker", role=role)
            before, certificate = files(folder), folder.path / "peer.pem"
            async with aclosing(statuses(folder, itertools.count(), 0.1)) as told:
                await anext(told)
                while renews and certificate.read_bytes() == before["peer.pem"]:
                    await anext(told)
            changed = {name for name, data in files(folder).items() if data != before[name]}
            assert changed == ({"peer.pem"} if renews else set())
            assert (await read_status(folder)).run_id == run.folder.run_id, "the new certificate opens the run"
        assert not any("Renewal.keep" in repr(task) for task in asyncio.all_tasks()), "what renewed it has ended"

    asyncio.run(scenario())
