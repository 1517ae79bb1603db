"""A member of a swarm renews its certificate by itself, with whoever has the authority's key; nothing restarts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from shutil import copytree

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.certificates import CA_LIFETIME_S, Issuer, key_pem, make_ca, new_key
from aggregator.swarm import operate
from aggregator.swarm.admission import OwnCertificate, SwarmRenewal, invite, keep_authority
from aggregator.swarm.host import Host
from aggregator.swarm.host_folder import HostFolder
from edit.durable_files import write_atomic
from edit.errors import EditError, EvictedError, RefusedError, StaleError
from editpb import enrolment_pb2, enrolment_pb2_grpc
from editpb.identity import Identity
from editpb.validity import DAY_S
from peers.carriers.swarm.channels import PartChannels
from peers.identity.enrolment import join
from peers.identity.peer_folder import PeerFolder
from peers.identity.renewal import AGAIN_S, Renewal
from tests.aggregator.swarm.test_admission import at, channel, refused
from tests.aggregator.swarm.test_host import step
from tests.aggregator.swarm.test_operating import in_thread
from tests.integration.test_certificates import shown_by
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import run_held

YEAR_S = 365 * DAY_S
DER = serialization.Encoding.DER


class Hand:
    """A clock that a test sets. gRPC has its own: so certificates are old by both, and this one is behind at first."""

    def __init__(self, behind_s: float) -> None:
        self.behind_s = behind_s

    def __call__(self) -> float:
        return time.time() - self.behind_s


def store(swarm: Hosts, peer_id: str, *, age_s: float, authority: bool = False, lifetime_s: float = YEAR_S) -> PeerFolder:
    """A member's folder, whose certificate is `age_s` old and valid for a year."""
    path, key, identity = swarm.path / peer_id, new_key(), Identity(swarm.run_id, "peer", peer_id)
    path.mkdir(exist_ok=True)
    write_atomic(path / "peer.key", key_pem(key), mode=0o600)
    issued = swarm.authority.issuer.issue(identity, key.public_key(), lifetime_s=lifetime_s, now=time.time() - age_s)
    folder = PeerFolder(path)
    folder.store(identity, (), issued.public_bytes(DER), x509.load_pem_x509_certificate(swarm.ca).public_bytes(DER))
    HostFolder(advertise="127.0.0.1").save(path)
    if authority:
        keep_authority(path, swarm.run_id, (swarm.path / "run" / "ca.key").read_bytes())
    return folder


def serial(folder: PeerFolder) -> int:
    return x509.load_pem_x509_certificate((folder.path / "peer.pem").read_bytes()).serial_number


async def looked(swarm: Hosts) -> None:
    """Let all look at their certificates."""
    for host in swarm.running.values():
        host._look.set()
    await swarm.until(lambda: not any(host._look.is_set() for host in swarm.running.values()))


def lie(swarm: Hosts, kind: str, folder: PeerFolder) -> bytes:
    """What a holder answers that lies."""
    present = x509.load_pem_x509_certificate((folder.path / "peer.pem").read_bytes())
    issuer, now, key = swarm.authority.issuer, time.time(), present.public_key()
    if kind == "damaged":
        return b"x" * 100
    if kind == "huge":
        return b"x" * 20_000
    if kind == "earlier":
        return present.public_bytes(DER)
    identity = Identity(swarm.run_id, "peer", "c" if kind == "another name" else "b")
    if kind == "another key":
        key = new_key().public_key()
    if kind == "another authority":
        issuer = Issuer(*make_ca(swarm.run_id, now))
    if kind == "not valid yet":
        now += 5 * 3600
    return issuer.issue(identity, key, lifetime_s=YEAR_S, now=now).public_bytes(DER)


def test_all_renew_what_is_due_by_whoever_has_the_key_and_nothing_is_connected_anew(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews, swarm.unix = True, (clock := Hand(200 * DAY_S))
            folders = {each: store(swarm, each, age_s=300 * DAY_S, authority=each == "a") for each in "abc"}
            await swarm.grow("a", "b", "c")
            before = {each: serial(folder) for each, folder in folders.items()}
            running, linked = dict(swarm.running), {each: host.links.connected for each, host in swarm.running.items()}
            streams = {each: [*host.links._streams.values()] for each, host in swarm.running.items()}
            await step(swarm, 1)
            await looked(swarm)
            assert before == {each: serial(folder) for each, folder in folders.items()}, "none is due by the clock"

            clock.behind_s = 0.0
            await looked(swarm)
            await swarm.until(lambda: all(before[each] != serial(folder) for each, folder in folders.items()))
            for each, folder in folders.items():
                enrolled = folder.load(time.time(), swarm=True)  # checks that it fits the key, and who it is of
                assert enrolled.validity.ends == pytest.approx(time.time() + YEAR_S, abs=60)
                assert await in_thread(shown_by, swarm.running[each].listen) == serial(folder)
            assert swarm.running == running and linked == {p: host.links.connected for p, host in running.items()}
            assert streams == {each: [*host.links._streams.values()] for each, host in running.items()}
            after = {each: serial(folder) for each, folder in folders.items()}
            await looked(swarm)
            assert after == {each: serial(folder) for each, folder in folders.items()}, "once"
            await step(swarm, 2)
            record = swarm.running["a"]._members.get("b")
            assert record is not None and int(record.serial, 16) == after["b"], "b fetched with the new one"
            await swarm.stop("c")
            await swarm.start("c")
            await swarm.until(lambda: swarm.steps()["c"] == 2, passes=1.0)

    run_held(body())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", ["damaged", "huge", "earlier", "another name", "another key", "another authority", "not valid yet"]
)
def test_a_holder_that_lies_is_passed_over(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews, swarm.unix = True, (clock := Hand(200 * DAY_S))
            folders = {each: store(swarm, each, age_s=300 * DAY_S, authority=each == "a") for each in "abc"}
            await swarm.grow("a", "b", "c")
            asked = list[str]()
            real = swarm.running["b"]._ask_certificate

            async def ask(peer_id: str) -> bytes:
                asked.append(peer_id)
                return lie(swarm, kind, folders["b"]) if peer_id == "a" else await real(peer_id)

            monkeypatch.setattr(swarm.running["b"], "_ask_certificate", ask)
            before, clock.behind_s = serial(folders["b"]), 0.0
            await looked(swarm)
            await swarm.until(lambda: asked)
            await in_thread(operate.share_authority, swarm.path / "a", "c")
            assert serial(folders["b"]) == before
            await looked(swarm)
            await swarm.until(lambda: serial(folders["b"]) != before)
            assert asked[-2:] == ["a", "c"]
            folders["b"].load(time.time(), swarm=True)

    run_held(body())


def test_who_is_not_due_was_evicted_or_is_on_another_machine_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(host: Host, own: OwnCertificate) -> None:
        pass

    monkeypatch.setattr(Host, "_keep_certificate", never)

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews = True
            folders = {
                each: store(swarm, each, age_s=age * DAY_S, authority=each == "a")
                for each, age in (("a", 10), ("b", 200), ("c", 300), ("d", 300))
            }
            swarm.unix = clock = Hand(0.0)
            await swarm.grow("a", "b", "c")
            home = swarm.path / "a"
            await in_thread(operate.evict, home, "c", "it lies")
            await in_thread(
                join, at(swarm, invite(home, "d", hours=1, now=time.time()), "a"), tmp_path / "new d", time.time(), swarm=True
            )

            async def why(peer_id: str, to: str = "a") -> EditError:
                async with channel(swarm, to, folders[peer_id].load(swarm=True).credentials) as found:
                    return await refused(enrolment_pb2_grpc.RenewalStub(found).Renew(enrolment_pb2.RenewRequest()))

            error = await why("b")
            assert isinstance(error, StaleError) and "the certificate of b is not due for renewal" in str(error)
            error = await why("c")
            assert isinstance(error, EvictedError) and str(error).endswith("it lies")
            error = await why("d")
            assert isinstance(error, RefusedError) and "d was enrolled again, with another key" in str(error)
            error = await why("b", to="b")
            assert isinstance(error, StaleError) and "no copy of the authority's key" in str(error)
            clock.behind_s = -200 * DAY_S
            assert "invite the member again" in str(await why("b")), "a connection outlives its certificate"

    run_held(body())


@pytest.mark.parametrize(("days", "level"), [(70, logging.INFO), (20, logging.WARNING), (5, logging.WARNING)])
def test_without_a_holder_it_is_said_once_and_louder_near_the_end_and_in_the_status(
    tmp_path: Path, days: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews = True
            for each in "abc":
                store(swarm, each, age_s=10 * DAY_S if each == "a" else YEAR_S - (days + 0.5) * DAY_S)
            await swarm.grow("a", "b")
            for _ in range(3):
                await looked(swarm)
            told = [each for each in caplog.records if "no copy of the authority's key" in each.getMessage()]
            assert [each.levelno for each in told] == [level]
            assert f"this member's certificate expires in {days} days" in told[0].getMessage()
            shown = [each for each in swarm.running["b"].standing().notices if f"expires in {days} days" in each]
            assert bool(shown) == (level == logging.WARNING)
            await swarm.until(lambda: swarm.leader == "a")

    with caplog.at_level(logging.INFO):
        run_held(body())


def test_near_the_end_of_the_authority_all_say_that_it_can_be_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            for each in "ab":
                store(swarm, each, age_s=0.0, authority=each == "a", lifetime_s=CA_LIFETIME_S)
            swarm.renews, swarm.unix = True, Hand(5.5 * DAY_S - CA_LIFETIME_S)
            await swarm.grow("a", "b")
            await looked(swarm)
            said = "no certificate outlives it: replace it with: edit-peer swarm new-authority"
            for host in swarm.running.values():
                await swarm.until(lambda host=host: any(each.endswith(said) for each in host.standing().notices))

    with caplog.at_level(logging.INFO):
        run_held(body())
    assert "new run" not in caplog.text


def test_the_peer_beside_a_host_takes_what_the_host_has_stored_for_all_parts(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, parts=2) as swarm:
            swarm.renews = True
            folder = store(swarm, "a", age_s=300 * DAY_S, authority=True)
            enrolled = folder.load(time.time(), swarm=True)
            there = {"a": "127.0.0.1:1"}
            channels = [PartChannels(swarm.run_id, there, part, enrolled.credentials) for part in range(2)]
            channels[1].share(channels[0])
            renewal = Renewal(folder, enrolled, channels[0], asks=False)
            old = [each.data() for each in channels]
            await renewal.look()
            assert old == [each.data() for each in channels], "there is no other yet"
            own = OwnCertificate(folder.path, enrolled.identity, time.time)
            present = own.present
            assert await own.look(lambda: [("a", lambda: renewed(swarm, enrolled.identity, present))])
            await renewal.look()
            assert not {*old} & {each.data() for each in channels}
            for each in channels:
                await each.close()

    run_held(body())


def test_one_that_is_not_valid_yet_is_not_taken_and_the_next_holder_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            folder = store(swarm, "b", age_s=300 * DAY_S)
            own = OwnCertificate(folder.path, Identity(swarm.run_id, "peer", "b"), time.time)
            before = serial(folder)

            async def early() -> bytes:
                return lie(swarm, "not valid yet", folder)

            assert not await own.look(lambda: [("a", early)])
            assert own.failing and serial(folder) == before
            assert "on: the clock of a, or this machine's, is wrong" in caplog.text
            present = own.present
            assert await own.look(
                lambda: [("a", early), ("c", lambda: renewed(swarm, Identity(swarm.run_id, "peer", "b"), present))]
            )
            assert folder.load(time.time(), swarm=True).validity.ends == pytest.approx(time.time() + YEAR_S, abs=60)

    with caplog.at_level(logging.INFO):
        run_held(body())


async def renewed(swarm: Hosts, identity: Identity, present: x509.Certificate) -> bytes:
    return swarm.authority.renew(identity, present, now=time.time())


def test_a_rank_on_another_machine_renews_its_copy_by_whichever_host_can_and_passes_over_one_that_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews, swarm.unix = True, (clock := Hand(200 * DAY_S))
            folders = {each: store(swarm, each, age_s=300 * DAY_S, authority=each in "ac") for each in "abc"}
            asked, renew = list[str](), SwarmRenewal.Renew

            async def answer(self: SwarmRenewal, request: enrolment_pb2.RenewRequest, context: object) -> object:
                (host,) = (peer_id for peer_id, host in swarm.running.items() if host is self._gate)
                asked.append(host)
                if host == "c":
                    return enrolment_pb2.RenewReply(certificate_der=lie(swarm, "another key", folders["b"]))
                return await renew(self, request, context)

            monkeypatch.setattr(SwarmRenewal, "Renew", answer)
            await swarm.grow("a", "b", "c")
            copied = PeerFolder(Path(copytree(swarm.path / "b", tmp_path / "elsewhere")))
            enrolled = copied.load(swarm=True)
            known = {each: swarm.running[each].listen for each in "bc"}
            part = PartChannels(swarm.run_id, known, 0, enrolled.credentials)
            renewal = Renewal(copied, enrolled, part, unix=clock, hosts=lambda: known)
            before, old = serial(copied), part.data()
            await renewal.look()
            assert not asked, "it is not due by the clock"

            clock.behind_s = 0.0
            await renewal.look()
            assert asked == ["b", "c"] and serial(copied) == before
            assert "could not be renewed yet: c: the coordinator's answer does not fit" in caplog.text
            await renewal.look()
            assert asked == ["b", "c"], "they are not asked all the time"
            known["a"] = swarm.running["a"].listen
            clock.behind_s = -AGAIN_S
            await renewal.look()
            assert asked == ["b", "c", "b", "c", "a"] and serial(copied) != before
            assert copied.load(time.time(), swarm=True).validity.ends == pytest.approx(time.time() + YEAR_S, abs=120)
            assert part.data() is not old, "new channels show it, without a restart"
            await renewal.look()
            assert len(asked) == 5
            await part.close()

    with caplog.at_level(logging.INFO):
        run_held(body())
