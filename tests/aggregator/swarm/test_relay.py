"""Members that nobody can dial reach each other through a relay, which passes on to them and to nobody else."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from aggregator.security.authority import load_issuer, load_key
from aggregator.security.certificates import key_pem, make_ca, new_key
from aggregator.swarm import operate, relay, watching
from aggregator.swarm.admission import invite
from aggregator.swarm.host_folder import HostFolder, Settings
from aggregator.swarm.process import settle
from aggregator.swarm.relay import (
    BACK,
    HELLO,
    MOST_UNDECIDED_FROM,
    MOVED,
    READY,
    Relay,
    relay_context,
    relay_identity,
    server_name_of,
)
from aggregator.swarm.relayed import RelayedPort
from aggregator.swarm.watching import SwarmWatch, begin_to_observe, whole_status
from edit.durable_files import write_atomic
from edit.errors import ConfigError, RefusedError, StorageError, TransportError
from editpb.identity import Identity
from peers.identity.enrolment import join
from tests.aggregator.swarm.test_host import step
from tests.aggregator.swarm.test_operating import equip, in_thread
from tests.aggregator.swarm.test_renewal import store
from tests.aggregator.swarm.test_watching import first_that
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.full_disk import FullDisk
from tests.support.loops import pass_time, run_held

NAME = "0123456789abcdef0123456789abcdef01234567.invalid"


def hello(name: str | None) -> bytes:
    """The first message of TLS of a client that wants this server."""
    context, to_server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(ssl.MemoryBIO(), to_server, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return to_server.read()


def test_the_server_name_is_read_off_the_first_message_once_all_of_it_is_there() -> None:
    whole = hello(NAME)
    assert server_name_of(whole) == server_name_of(whole + b"more") == NAME
    assert all(server_name_of(whole[:length]) is None for length in range(len(whole)))
    assert server_name_of(hello(None)) == ""


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", b"\x00"]
)
def test_what_is_no_first_message_of_tls_is_refused(first: bytes) -> None:
    with pytest.raises(RefusedError):
        server_name_of(first)


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_a_damaged_first_message_is_a_name_or_refused(at: int, byte: int, cut: int) -> None:
    whole = bytearray(HELLO_OF_NAME)
    whole[at % len(whole)] = byte
    try:
        found = server_name_of(bytes(whole[: cut % len(whole) + 1]))
    except RefusedError:
        return
    assert found is None or found.isascii()


HELLO_OF_NAME = hello(NAME)


@asynccontextmanager
async def relayed(swarm: Hosts) -> AsyncIterator[Relay]:
    """A relay of the run, whose folder the first member has made."""
    path = swarm.path / "relay"
    if not path.exists():
        swarm.folder("a")
        operate.make_relay(equip(swarm, "a", authority=True), path)
    run_id, context = relay_context(path)
    assert run_id == swarm.run_id
    one = Relay(run_id, context)
    await one.start("127.0.0.1:0")
    try:
        yield one
    finally:
        await one.close()


def scenario(tmp_path: Path, body: Callable[[Hosts, Relay], Any]) -> None:
    async def run() -> None:
        async with hosts(tmp_path) as swarm, relayed(swarm) as one:
            await body(swarm, one)
            for peer_id in list(swarm.running):
                await swarm.stop(peer_id)

    run_held(run())


async def grow(swarm: Hosts, one: Relay, members: str) -> None:
    """All members know of each other is the relay."""
    swarm.found(members[0])
    for peer_id in members:
        seeds = {other: (one.listen,) for other in members if other != peer_id}
        await swarm.start(peer_id, seeds=seeds, relay=one.listen)
        await swarm.until(lambda: swarm.leader == members[0], passes=1.0)
    await swarm.until(lambda: swarm.settled(members), passes=1.0)


def test_members_that_nobody_can_dial_train_vote_and_follow_each_other_as_owners(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        await grow(swarm, one, "abc")
        assert one.members == {"a", "b", "c"}
        assert all(member.reachable and member.addresses == (one.listen,) for member in swarm.record.members.values())
        assert all(member.relayed for member in swarm.record.members.values())
        await step(swarm, 1)
        owner = swarm.record.parts[0].owner
        await swarm.stop(owner)
        await swarm.until(lambda: swarm.owner() is not None and swarm.record.parts[0].owner != owner, passes=1.0)
        await step(swarm, 2)
        assert swarm.same()
        await swarm.until(lambda: owner not in one.members)

    scenario(tmp_path, body)


def test_who_looks_on_sees_members_through_the_relay_and_since_when_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observer knows nothing but the relay, too. Where an owner does not answer it, what the others say of it remains."""
    monkeypatch.setattr(Settings, "schemas", lambda self, config: ((range(len(SIZES)), schema_of(0)),))
    now = time.time()

    async def body(swarm: Hosts, one: Relay) -> None:
        nonlocal now
        await grow(swarm, one, "ab")
        await step(swarm, 1)
        home = observer_behind(swarm, one)
        async with aclosing(SwarmWatch(home, every_s=0.0, unix=lambda: now).statuses()) as statuses:
            told = await first_that(statuses, lambda status: status.rounds and status.council.leader == "a")
            assert (told.outer_step, told.reason) == (1, "")
            assert {row.peer_id: row.state for row in told.council.members} == {"a": "leads", "b": "here"}
            assert HostFolder.load(home).seeds == {"a": (one.listen,), "b": (one.listen,)}
        owner, silent = swarm.record.parts[0].owner, f"nobody answers at {one.listen}"

        @asynccontextmanager
        async def nobody(*_: object) -> AsyncIterator[None]:
            raise TransportError(silent)
            yield

        monkeypatch.setattr(watching, "part_control", nobody)
        async with aclosing(SwarmWatch(home, every_s=0.0, unix=lambda: now).statuses()) as statuses:
            told = await first_that(statuses, lambda status: status.reason)
            assert told.reason == f"part 0: {silent}"
            now += 90.0
            told = await anext(statuses)
            assert told.reason == f"part 0: {silent} (for 1 min); other members reach {owner}, and the run goes on"
            assert {row.peer_id: row.state for row in told.council.members} == {"a": "leads", "b": "here"}

    scenario(tmp_path, body)


def test_an_observer_is_enrolled_and_sees_the_run_through_the_relay_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the invitation that a member behind a relay makes: `join`, then status, watch and report of its folder."""
    monkeypatch.setattr(Settings, "schemas", lambda self, config: ((range(len(SIZES)), schema_of(0)),))

    async def run() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews = swarm.closed = True
            folder, home = store(swarm, "a", age_s=0.0, authority=True).path, swarm.path / "eye"
            swarm.keys["a"] = (folder / "peer.key").read_bytes(), (folder / "peer.pem").read_bytes()
            operate.make_relay(folder, swarm.path / "relay")
            async with relayed(swarm) as one:
                HostFolder(relay=one.listen).save(folder)
                swarm.found("a")
                await swarm.start("a", relay=one.listen)
                await swarm.until(lambda: swarm.leader == "a" and swarm.running["a"].reachable, passes=1.0)
                swarm.running["a"]._settings = Settings((swarm.path / "run" / "run.toml").read_bytes())
                invitation = invite(folder, "eye", role="observer", hours=1, now=time.time())
                assert invitation.swarm is not None and invitation.swarm.hosts == {"a": (one.listen,)}
                await in_thread(join, invitation.encode(), home, time.time(), swarm=True, observes=True)
                await in_thread(begin_to_observe, home, invitation.swarm.hosts)
                await step(swarm, 1)
                assert (await in_thread(operate.status, home)).leader == "a"
                async with aclosing(SwarmWatch(home, every_s=0.0).statuses()) as statuses:
                    told = await first_that(statuses, lambda status: status.rounds)
                assert (told.outer_step, told.reason) == (1, "")
                assert (await in_thread(whole_status, home)).outer_step == 1
                assert HostFolder.load(home).seeds == {"a": (one.listen,)}
                await swarm.stop("a")

    run_held(run())


def observer_behind(swarm: Hosts, one: Relay) -> Path:
    """Make the folder of an observer that knows of members only that they are behind the relay."""
    home = swarm.path / "eye"
    home.mkdir(mode=0o700)
    issuer, key = load_issuer(swarm.path / "a" / "authority"), new_key()
    identity = Identity(swarm.run_id, "observer", "eye")
    certificate = issuer.issue(identity, key.public_key(), lifetime_s=1e9, now=time.time())
    (home / "peer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_atomic(home / "peer.key", key_pem(key), mode=0o600)
    for name in ("ca.pem", "run.toml"):
        shutil.copy(swarm.path / "a" / name, home / name)
    HostFolder(seeds=dict.fromkeys(swarm.running, (one.listen,))).save(home)
    return home


def test_members_come_back_to_a_relay_that_was_started_again(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        await grow(swarm, one, "ab")
        await one.close()
        await swarm.until(lambda: not swarm.running["b"].links.connected, passes=1.0)
        notes = swarm.running["a"].standing().notices
        await swarm.until(
            lambda: any("others cannot dial" in note for note in swarm.running["a"].standing().notices), passes=1.0
        )
        assert any(note.endswith(": connected") for note in notes)
        again = Relay(swarm.run_id, relay_context(swarm.path / "relay")[1])
        await again.start(one.listen)
        try:
            await swarm.until(lambda: again.members == {"a", "b"}, passes=5.0)
            await swarm.until(lambda: swarm.running["b"].links.connected and swarm.running["b"].council.leader, passes=1.0)
            await step(swarm, 1)
        finally:
            for peer_id in "ab":
                await swarm.stop(peer_id)
            await again.close()

    scenario(tmp_path, body)


def test_members_meet_at_a_relay_that_has_moved(tmp_path: Path) -> None:
    """The record, and what their folders say, has the address before."""

    async def body(swarm: Hosts, one: Relay) -> None:
        await grow(swarm, one, "ab")
        for peer_id in "ab":
            await swarm.stop(peer_id)
        await one.close()
        moved = Relay(swarm.run_id, relay_context(swarm.path / "relay")[1])
        await moved.start("127.0.0.1:0")
        try:
            for peer_id, other in ("ab", "ba"):
                await swarm.start(peer_id, seeds={other: (one.listen,)}, relay=moved.listen)
            await swarm.until(lambda: swarm.running["a"].links.connected and swarm.leader, passes=1.0)
            new = await swarm.start("c", seeds={"a": (one.listen,)}, relay=moved.listen)
            assert new.links.addresses == {"a": (one.listen, moved.listen)}, "it has no record yet"
        finally:
            for peer_id in list(swarm.running):
                await swarm.stop(peer_id)
            await moved.close()

    scenario(tmp_path, body)


@pytest.mark.parametrize("passes", range(6))
def test_a_relay_that_ends_as_somebody_calls_leaves_no_connection_open(tmp_path: Path, passes: int) -> None:
    """At each point between the call and its first word. A socket that is left over warns, and a warning fails the test."""

    async def body(swarm: Hosts, one: Relay) -> None:
        host, _, port = one.listen.rpartition(":")
        with socket.create_connection((host, int(port))) as caller:
            for _ in range(passes):
                await asyncio.sleep(0.0)
            await one.close()
            caller.settimeout(10.0)
            with suppress(ConnectionResetError):  # it was not accepted yet
                assert caller.recv(1) == b""

    scenario(tmp_path, body)


# -- strangers -------------------------------------------------------------------------------------------------------------


async def answer(one: Relay, first: bytes) -> bytes:
    """What a stranger is told, until the connection ends."""
    host, _, port = one.listen.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_a_relay_passes_nothing_on_to_who_is_no_member(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        unknown = Identity(swarm.run_id, "peer", "z").server_name
        firsts = [hello(unknown), hello("example.org"), hello(None), b"CONNECT example.org:443 HTTP/1.1\r\n", BACK + bytes(32)]
        for first in firsts:
            assert await answer(one, first) == b"", first
        assert not one.members and not one._undecided

    scenario(tmp_path, body)


async def register(one: Relay, swarm: Hosts, credentials: tuple[bytes, bytes] | None, word: bytes = HELLO) -> bytes:
    """What is answered to somebody with this key and certificate who would be a member."""
    context = ssl.create_default_context(cadata=swarm.ca.decode())
    if credentials is not None:
        path = swarm.path / "shown.pem"
        path.write_bytes(b"".join(credentials))
        context.load_cert_chain(path)
    host, _, port = one.listen.rpartition(":")
    name = relay_identity(swarm.run_id).server_name
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
        writer.write(word)
        try:
            return await reader.readline()
        finally:
            writer.transport.abort()
    except (OSError, EOFError):
        return b""


def test_only_peers_of_the_run_are_passed_on_to(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        assert await register(one, swarm, swarm.certificate("b")) == READY
        await swarm.until(lambda: not one.members)
        assert await register(one, swarm, None) == b""
        for role, run_id in (("operator", ""), ("observer", ""), ("peer", "another")):
            assert await register(one, swarm, swarm.certificate("b", role, run_id)) == b""
        assert await register(one, swarm, swarm.certificate("b"), b"something else\n") == b""
        assert await register(one, swarm, swarm.certificate("b"), b"x" * 1000) == b""
        assert not one.members

    scenario(tmp_path, body)


def test_of_two_machines_of_one_name_the_one_that_was_certified_later_has_it(tmp_path: Path) -> None:
    """Also while that one is off. A renewed certificate is for the same key."""

    async def body(swarm: Hosts, one: Relay) -> None:
        identity, key = Identity(swarm.run_id, "peer", "b"), new_key()
        before, first, renewed = swarm.certificate("b"), swarm._issued(identity, key), swarm._issued(identity, key)
        assert [await register(one, swarm, each) for each in (before, renewed, first)] == [READY] * 3
        await swarm.until(lambda: not one.members)
        assert await register(one, swarm, before) == MOVED
        assert not one.members
        said, path = list[str](), swarm.folder("b").path
        for name, data in (("peer.key", before[0]), ("peer.pem", before[1]), ("ca.pem", swarm.ca)):
            (path / name).write_bytes(data)
        running = asyncio.ensure_future(RelayedPort(one.listen, path, identity).run("127.0.0.1:1", said.append))
        await swarm.until(lambda: said or running.done())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "refuses this machine: b was enrolled again, with another key: it is on another machine now" in said[0]

    scenario(tmp_path, body)


def test_connections_that_say_nothing_are_bounded(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        host, _, port = one.listen.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_UNDECIDED_FROM)]
        await swarm.until(lambda: one._undecided.total() == MOST_UNDECIDED_FROM)
        assert await answer(one, b"") == b""  # closed at once
        for _, writer in silent:
            writer.close()
        await swarm.until(lambda: not one._undecided)
        assert await register(one, swarm, swarm.certificate("b")) == READY

    scenario(tmp_path, body)


def test_who_wants_a_member_that_does_not_dial_back_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        monkeypatch.setattr(relay, "MOST_OF_MEMBER", 1)
        member = relay._Registered("b", _Deaf())  # type: ignore[arg-type]
        one._members[NAME] = member
        first = asyncio.ensure_future(answer(one, hello(NAME)))
        await swarm.until(lambda: member.streams == 1)
        assert await answer(one, hello(NAME)) == b""  # more than it may have
        assert not first.done()
        pass_time(relay.HELLO_S)
        assert await first == b""
        assert member.streams == 0 and not one._awaited and not one._streams
        del one._members[NAME]

    scenario(tmp_path, body)


class _Deaf:
    """A member's connection that is never answered."""

    def __init__(self) -> None:
        self.transport, self.written = self, b""

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data


# -- a relay that lies -----------------------------------------------------------------------------------------------------


def test_a_relay_that_asks_for_more_than_a_member_has_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr("aggregator.swarm.relayed.MOST_OF_MEMBER", 2)
        port = RelayedPort("127.0.0.1:1", tmp_path, Identity("r", "peer", "a"))
        for _ in range(5):
            port._take(b"open %s\n" % (b"0" * 64))
        assert len(port._passing) == 2
        with pytest.raises(Exception, match="this version does not know"):
            port._take(b"open ../../etc\n")
        await asyncio.gather(*port._passing)

    asyncio.run(body())


def test_a_relay_of_another_run_is_not_connected_to(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        other = RelayedPort(one.listen, swarm.path / "a", Identity("another", "peer", "a"))
        with pytest.raises(TransportError, match="is it a relay of this run"):
            await other._stay()
        (swarm.path / "a" / "ca.pem").write_bytes(
            make_ca(swarm.run_id, time.time())[1].public_bytes(serialization.Encoding.PEM)
        )
        with pytest.raises(RefusedError, match="if this member was off meanwhile, invite it again"):
            await RelayedPort(one.listen, swarm.path / "a", Identity(swarm.run_id, "peer", "a"))._stay()

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    ("begins_s", "why"),
    [
        (5 * 3600, "its certificate is not valid yet: the clock where its folder was made, or this machine's, is wrong"),
        (-2 * 86400, "its certificate has expired, by this machine's clock; set the clock if it is wrong"),
    ],
)
def test_a_relay_whose_certificate_is_not_valid_now_is_not_taken_for_a_strangers(
    tmp_path: Path, begins_s: float, why: str
) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        identity, folder = relay_identity(swarm.run_id), swarm.path / "relay"
        public, now = load_key(folder / "relay.key").public_key(), time.time() + begins_s
        issued = swarm.authority.issuer.issue(identity, public, lifetime_s=86400, now=now, server_names=(identity.server_name,))
        (folder / "relay.pem").write_bytes(issued.public_bytes(serialization.Encoding.PEM))
        other = Relay(swarm.run_id, relay_context(folder)[1])
        await other.start("127.0.0.1:0")
        try:
            with pytest.raises(RefusedError, match=f"^{why}"):
                await RelayedPort(other.listen, swarm.path / "a", Identity(swarm.run_id, "peer", "a"))._stay()
        finally:
            await other.close()

    scenario(tmp_path, body)


# -- settings --------------------------------------------------------------------------------------------------------------


def test_a_relay_whose_name_no_host_can_have_is_not_connected_to_and_ends_nothing(tmp_path: Path) -> None:
    """Settings refuse such a name."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a")
            said, port = (
                list[str](),
                RelayedPort("relay..example.org:443", store(swarm, "b", age_s=0.0).path, Identity(swarm.run_id, "peer", "b")),
            )
            running = asyncio.ensure_future(port.run("127.0.0.1:1", said.append))
            await swarm.until(lambda: said or running.done())
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            assert said and said[0].startswith("the relay at relay..example.org:443: does not answer")

    run_held(body())
    with pytest.raises(ConfigError, match=r"--relay 'relay\.\.example\.org:443': must be HOST:PORT"):
        HostFolder(relay="relay..example.org:443").save(tmp_path)


def test_relay_and_advertise_take_each_others_place(tmp_path: Path) -> None:
    assert settle(tmp_path, None, "me.example", {}).advertise == "me.example"
    found = settle(tmp_path, None, None, {}, relay="relay.example:7700")
    assert (found.advertise, found.relay) == ("", "relay.example:7700")
    assert settle(tmp_path, None, "", {}) == found
    found = settle(tmp_path, None, "me.example", {})
    assert (found.advertise, found.relay) == ("me.example", "")
    with pytest.raises(ConfigError, match="--relay r:1: not with --advertise me"):
        settle(tmp_path, None, "me.example", {}, relay="r:1")
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        HostFolder(relay="relay.example")


def test_a_relays_folder_is_made_by_who_has_the_authority_and_never_over_another(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        made = swarm.path / "relay"
        assert {each.name for each in made.iterdir()} == {"ca.pem", "relay.key", "relay.pem"}
        assert (made / "relay.key").stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="name a new folder"):
            operate.make_relay(swarm.path / "a", made)
        swarm.folder("b")
        with pytest.raises(ConfigError, match="only who has the authority's key"):
            operate.make_relay(equip(swarm, "b"), swarm.path / "relay-2")
        with pytest.raises(ConfigError, match="is no relay's folder"):
            relay_context(swarm.path / "b")

    scenario(tmp_path, body)


@pytest.mark.parametrize("room", [0, 1000])
def test_of_a_relays_folder_that_a_full_disk_has_no_room_for_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        made, full = tmp_path / "another", FullDisk(monkeypatch)
        full.room = room
        with pytest.raises(StorageError, match="No space left on device"):
            operate.make_relay(swarm.path / "a", made)
        assert not made.exists()
        full.room = None
        operate.make_relay(swarm.path / "a", made)

    scenario(tmp_path, body)


def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    async def body(swarm: Hosts, one: Relay) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot be bound"):
            await Relay(swarm.run_id, one._context).start(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"cannot be bound .encoding with"):  # a name that no host can have
            await Relay(swarm.run_id, one._context).start(f"{70 * 'ü'}:0")

    scenario(tmp_path, body)
