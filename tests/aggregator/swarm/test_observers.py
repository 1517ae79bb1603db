"""An observer of a swarm: it is enrolled as a member is, sees the whole run from a folder without a host, and does no more."""

from __future__ import annotations

import time
from contextlib import aclosing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from aggregator.security.authority import MEMBER_LIFETIME_S
from aggregator.swarm import operate
from aggregator.swarm.admission import invite
from aggregator.swarm.host_folder import HostFolder, Settings
from aggregator.swarm.watching import SwarmWatch, begin_to_observe, whole_status
from edit.errors import ConfigError, EvictedError, RefusedError, TransportError
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from editpb.identity import Identity, from_certificate
from peers.identity.enrolment import join
from peers.swarm.membership import is_member
from tests.aggregator.swarm.test_admission import at, channel, redeemed, refused
from tests.aggregator.swarm.test_host import step
from tests.aggregator.swarm.test_new_authority import scenario
from tests.aggregator.swarm.test_operating import in_thread
from tests.aggregator.swarm.test_watching import first_that
from tests.support.council.hosts import SIZES, Hosts, schema_of


@pytest.fixture(autouse=True)
def model_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of the test have random vectors in place of a model."""
    monkeypatch.setattr(Settings, "schemas", lambda self, config: ((range(len(SIZES)), schema_of(0)),))


async def observer(swarm: Hosts, home: Path, name: str = "eye") -> Path:
    """Invite an observer at a, and make its folder, as `edit-peer join` does."""
    told = Settings((swarm.path / "run" / "run.toml").read_bytes())
    for host in swarm.running.values():
        host._settings = told
    invitation = invite(swarm.path / "a", name, role="observer", hours=1, now=time.time())
    assert await in_thread(join, at(swarm, invitation, "a"), home, time.time(), swarm=True, observes=True) == Identity(
        swarm.run_id, "observer", name
    )
    await in_thread(begin_to_observe, home, {"a": (swarm.running["a"].listen,)})
    return home


def page_of(swarm: Hosts, peer_id: str) -> SwarmWatch:
    """What the page of a member's folder asks."""
    folder = swarm.path / peer_id
    (folder / "run.toml").write_bytes((swarm.path / "run" / "run.toml").read_bytes())
    HostFolder(listen=swarm.running[peer_id].listen, advertise="127.0.0.1").save(folder)
    return SwarmWatch(folder, every_s=0.0)


def certified(home: Path) -> tuple[Identity, x509.Certificate]:
    certificate = x509.load_pem_x509_certificate((home / "peer.pem").read_bytes())
    return from_certificate(certificate), certificate


async def first(home: Path) -> object:
    async with aclosing(SwarmWatch(home, every_s=0.0).statuses()) as statuses:
        return await anext(statuses)


def test_an_observer_sees_the_whole_swarm_and_finds_it_when_who_invited_it_is_gone(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = await observer(swarm, tmp_path / "eye")
        await step(swarm, 1)
        assert swarm.record.enrolled.keys() == {*"abc", "eye"} and swarm.record.members.keys() == {*"abc"}
        assert [peer_id for peer_id, enrolled in swarm.record.enrolled.items() if enrolled.observer] == ["eye"]
        async with aclosing(SwarmWatch(home, every_s=0.0).statuses()) as statuses:
            told = await first_that(statuses, lambda status: status.rounds and status.council.leader == "a")
        assert told.outer_step == 1 and {one.peer_id for one in told.council.members} == {*"abc"}
        assert not (home / "members.json").exists() and (await in_thread(operate.status, home)).leader == "a"
        assert HostFolder.load(home).seeds.keys() == {*"abc"}
        await swarm.stop("a")
        await swarm.until(lambda: swarm.leader in ("b", "c") and swarm.owner() is not None, passes=1.0)
        assert (await in_thread(operate.status, home)).leader == swarm.leader
        written = await in_thread(whole_status, home)
        assert (written.outer_step, written.council.leader) == (1, swarm.leader)
        for peer_id in "bc":
            await swarm.stop(peer_id)
        with pytest.raises(TransportError, match="no member answers: a: nobody answers at"):
            await in_thread(operate.status, home)

    scenario(tmp_path, body)


def test_an_observer_is_no_member_gives_no_orders_and_can_be_evicted(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = await observer(swarm, tmp_path / "eye")
        client, _ = operate.credentials(home)
        async with channel(swarm, "b", client) as open_:
            council = council_pb2_grpc.CouncilStub(open_)
            for call in (
                council.FetchState(pb.StateRequest()).read(),
                council.WatchOwners(pb.OwnersRequest()).read(),
                council.LeaveSwarm(pb.LeaveRequest()),
                council.Entrust(pb.EntrustRequest(peer_id="eye")),
            ):
                error = await refused(call)
                assert isinstance(error, RefusedError) and "role observer may not do this" in str(error)
        for order in (operate.pause, operate.drain):
            with pytest.raises(ConfigError, match="only who has the authority's key gives orders"):
                await in_thread(order, home)
        with pytest.raises(ConfigError, match="is the folder of eye, an observer"):
            is_member(home)
        async with aclosing(SwarmWatch(home, every_s=0.0).statuses()) as statuses:
            await anext(statuses)
            watching = page_of(swarm, "a")
            assert watching.why_refused(*certified(home)) is None
            told = await in_thread(operate.evict, swarm.path / "a", "eye", "looked too long")
            assert told.startswith("eye is evicted") and swarm.record.members.keys() == {*"abc"}
            with pytest.raises(EvictedError, match="looked too long"):
                await first_that(statuses, lambda status: False)
        async with aclosing(watching.statuses()) as seen:
            await anext(seen)
        for of_a in (watching, SwarmWatch(swarm.path / "a")):  # by what hosts say; by what lies in the folder
            assert of_a.why_refused(*certified(home)) == "looked too long"
        assert "has not answered yet" in (SwarmWatch(home).why_refused(*certified(home)) or "")
        with pytest.raises(RefusedError, match="eye was evicted"):
            invite(swarm.path / "a", "eye", role="observer", hours=1, now=time.time())

    scenario(tmp_path, body)


def test_the_name_of_a_member_an_invitation_of_the_other_kind_and_a_second_machine_are_refused(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        with pytest.raises(RefusedError, match="b is a member as peer already"):
            invite(swarm.path / "a", "b", role="observer", hours=1, now=time.time())
        with pytest.raises(ConfigError, match="role 'operator': must be peer or observer in a swarm"):
            invite(swarm.path / "a", "new", role="operator", hours=1, now=time.time())
        invitation = at(swarm, invite(swarm.path / "a", "eye", role="observer", hours=1, now=time.time()), "a")
        said = await redeemed(invitation, tmp_path / "one")
        assert said == "ConfigError: this is an invitation for observer eye; redeem it with: edit-peer join"
        for_peer = at(swarm, invite(swarm.path / "a", "new", hours=1, now=time.time()), "a")
        with pytest.raises(ConfigError, match="this is an invitation for peer new; redeem it with: edit-peer swarm join"):
            join(for_peer, tmp_path / "one", time.time(), swarm=True, observes=True)
        home = await observer(swarm, tmp_path / "first")
        await observer(swarm, tmp_path / "second")
        with pytest.raises(RefusedError, match="eye was enrolled again, with another key"):
            await first(home)
        assert (await in_thread(operate.status, tmp_path / "second")).leader == "a"

    scenario(tmp_path, body)


def test_an_observers_certificate_is_renewed_while_it_looks(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = await observer(swarm, tmp_path / "eye")
        authority = swarm.running["a"].authority
        assert authority is not None
        before = x509.load_pem_x509_certificate((home / "peer.pem").read_bytes())
        key = before.public_key()
        old = authority.issuer.issue(from_certificate(before), key, lifetime_s=MEMBER_LIFETIME_S, now=time.time() - 300 * 86400)
        (home / "peer.pem").write_bytes(old.public_bytes(Encoding.PEM))
        await first(home)
        after = x509.load_pem_x509_certificate((home / "peer.pem").read_bytes())
        assert after.not_valid_after_utc > old.not_valid_after_utc and after.public_key() == key
        assert from_certificate(after) == Identity(swarm.run_id, "observer", "eye")
        await first(home)

    scenario(tmp_path, body)
