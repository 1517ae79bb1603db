"""The DHT, with real libp2p nodes on loopback: members find each other, strangers change nothing, and what dies comes back.

Time is real: a node starts in about half a second, and what is awaited is an event, within a bound.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("hivemind") is None:  # not imported here: that changes the process's logging, of other tests too
    pytest.skip("hivemind is not installed", allow_module_level=True)
import msgpack

from aggregator.swarm import discovery, operate
from aggregator.swarm.discovery import Discovery, Found, NodePlace
from aggregator.swarm.signed_records import MOST_BYTES, key_of
from edit.council import events as ev
from edit.errors import ConfigError, TransportError
from tests.support.council.announced import Run, record_with, said, signed
from tests.support.council.hosts import hosts
from tests.support.daemons import p2pds
from tests.support.fork_server import REPOSITORY
from tests.support.loops import WAIT_S, on_a_loop, run_held, until

pytestmark = [  # of hivemind: it uses what is deprecated, and leaves connections of a p2pd that is gone to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning"),
]


class Member:
    """A member's DHT, and what it was told."""

    def __init__(self, run: Run, peer_id: str, path: Path, seeds: tuple[str, ...], advertise: str) -> None:
        path.mkdir(exist_ok=True)
        self.peer_id, self.path, self.maddr, self.found = peer_id, path, "", dict[str, tuple[str, ...]]()
        self.nodes = self.passes = 0
        self.addresses = (f"127.0.0.1:{1000 + ord(peer_id)}",) if advertise else ()
        place = NodePlace(path, "127.0.0.1", advertise, 0, seeds)
        self.discovery = Discovery(run.run_id, peer_id, place, run.credentials(peer_id))
        self.discovery.tell(None, self.addresses, "")
        self.discovery.start(self._find, self._reach)

    def _find(self, found: Found) -> None:
        self.passes += 1
        self.found = {peer_id: each.addresses for peer_id, each in found.items()}

    def _reach(self, maddr: str) -> None:
        self.maddr, self.nodes = maddr, self.nodes + 1

    @property
    def p2pd(self) -> int:
        """The process that listens for this member: by the file of its key."""
        (found,) = p2pds(self.path)
        return found


class Members:
    """A run's members by peer_id."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.running = path, Run(path / "run"), dict[str, Member]()

    async def start(self, peer_id: str, *, seeds: str = "", advertise: str = "127.0.0.1") -> Member:
        """Start one that knows the nodes of these, and wait until its own is there."""
        maddrs = tuple(self.running[each].maddr for each in seeds)
        member = self.running[peer_id] = Member(self.run, peer_id, self.path / peer_id, maddrs, advertise)
        await until(lambda: member.nodes)
        return member

    def addresses(self, peer_ids: str) -> dict[str, tuple[str, ...]]:
        return {peer_id: self.running[peer_id].addresses for peer_id in peer_ids}


@asynccontextmanager
async def members(path: Path) -> AsyncIterator[Members]:
    made = Members(path)
    try:
        yield made
    finally:
        await asyncio.gather(*(member.discovery.close() for member in made.running.values()))
        await until(lambda: not p2pds(path))  # on a busy machine a thread is left behind, and ends its p2pd later


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import hivemind before any test, as the thread of a test would, which may be left behind meanwhile."""
    discovery._hivemind()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Say and look more often than in earnest; collect what hivemind leaves before another test begins."""
    monkeypatch.setattr(discovery, "REFRESH_S", 0.2)
    monkeypatch.setattr(discovery, "EMPTY_S", 0.2)
    yield
    gc.collect()


@on_a_loop
async def test_members_find_each_other_and_one_that_nobody_reaches_finds_them(tmp_path: Path) -> None:
    async with members(tmp_path) as swarm:
        await swarm.start("a")
        b = await swarm.start("b", seeds="a")
        c = await swarm.start("c", seeds="a", advertise="")
        await until(lambda: c.found == swarm.addresses("ab"))
        await until(lambda: b.found == swarm.addresses("a") and swarm.running["a"].found == swarm.addresses("b"))
        assert c.maddr == "" and b.maddr.startswith("/ip4/127.0.0.1/tcp/")


@on_a_loop
async def test_two_dhts_become_one_when_the_record_names_a_node_of_the_other(tmp_path: Path) -> None:
    async with members(tmp_path) as swarm:
        for peer_id, seeds in (("a", ""), ("b", "a"), ("c", ""), ("d", "c")):
            await swarm.start(peer_id, seeds=seeds)
        found = dict(swarm.running.items())
        await until(lambda: all(found[one].found == swarm.addresses(other) for one, other in ("ab", "ba", "cd", "dc")))
        record = record_with(swarm.run.run_id, {"a": found["a"].maddr, "d": found["d"].maddr})
        found["a"].discovery.tell(record, found["a"].addresses, "a")
        await until(lambda: all(found[one].found == swarm.addresses("abcd".replace(one, "")) for one in "abcd"))


@on_a_loop
@pytest.mark.parametrize(("number", "watch_s"), [(signal.SIGKILL, 1000.0), (signal.SIGSTOP, 0.1)], ids=["killed", "stopped"])
async def test_p2pd_is_replaced_by_one_with_the_same_id_and_port(
    tmp_path: Path,
    number: signal.Signals,
    watch_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its end is noticed at once, without asking; and again, with the pause that one that came up gets."""
    caplog.set_level(logging.INFO, logger="aggregator")
    pauses, of = list[int](), discovery._again_s
    monkeypatch.setattr(discovery, "_again_s", lambda failed: pauses.append(failed) or of(failed))
    monkeypatch.setattr(discovery, "CALL_S", 1.0)
    monkeypatch.setattr(discovery, "WATCH_S", watch_s)
    async with members(tmp_path) as swarm:
        a, b = await swarm.start("a"), await swarm.start("b", seeds="a")
        await until(lambda: a.found == swarm.addresses("b") and b.found == swarm.addresses("a"))
        was = a.maddr
        for nodes in (2, 3):
            killed, before = a.p2pd, len(pauses)
            os.kill(killed, number)
            await until(lambda nodes=nodes: a.nodes == nodes)
            assert a.maddr == was and a.p2pd != killed
            assert pauses[before] == 0
        a.found = b.found = {}
        await until(lambda: a.found == swarm.addresses("b") and b.found == swarm.addresses("a"))
    assert {record.name for record in caplog.records} <= {"aggregator.swarm.discovery"}, caplog.messages


@on_a_loop
async def test_what_takes_a_cancellation_for_itself_is_cancelled_again() -> None:
    """As `asyncio.wait_for` does in Python 3.11 where what it waits for ends at the same time."""
    taken, ended = list[str](), list[str]()

    async def deaf(times: int) -> None:
        try:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if len(taken) == times:
                        raise
                    taken.append("")
        finally:
            ended.append("deaf")

    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while it ends")

    tasks = [asyncio.ensure_future(deaf(2)), asyncio.ensure_future(fails())]
    await asyncio.sleep(0)
    await discovery._end(*tasks)
    assert (len(taken), ended) == (2, ["deaf"]) and tasks[0].cancelled()
    assert isinstance(tasks[1].exception(), ValueError)
    await discovery._end(*tasks)


@on_a_loop
async def test_what_is_cancelled_again_and_again_still_waits_for_the_end_of_its_p2pd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "CANCEL_S", 0.0)
    drop, codes = discovery._drop, list[int | None]()

    async def watched(p2p: Any) -> None:
        waited = p2p._child.wait

        async def late() -> None:
            for _ in range(20):  # of the loop; it is cancelled in each
                await asyncio.sleep(0)
            await waited()

        p2p._child.wait = late
        try:
            await drop(p2p)
        finally:
            codes.append(p2p._child.returncode)

    monkeypatch.setattr(discovery, "_drop", watched)
    async with members(tmp_path) as swarm:
        await swarm.start("a")
    assert codes == [-signal.SIGKILL]


@on_a_loop
async def test_a_node_that_is_collected_late_touches_nothing(tmp_path: Path) -> None:
    """hivemind's object removes its socket once more then, by a path through a descriptor that may be another file's by now."""
    async with members(tmp_path) as swarm:
        await swarm.start("a")
        of = discovery._hivemind().P2P
        (p2p,) = (each for each in gc.get_objects() if of in type(each).__mro__ and each.is_alive)
    folder, _, name = p2p._client_listen_maddr["unix"].rpartition("/")
    assert re.fullmatch("/proc/[0-9]+/fd/[0-9]+", folder) and name
    with ExitStack() as files:
        while files.enter_context(tempfile.TemporaryFile(dir=tmp_path)).fileno() < int(folder.rpartition("/")[2]):
            pass
        p2p.__del__()


@on_a_loop
async def test_who_does_not_answer_costs_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dial that p2pd is still busy with ends here, and so does the connection to p2pd over which it was asked."""
    monkeypatch.setattr(discovery, "CALL_S", 0.3)
    monkeypatch.setattr(discovery, "WATCH_S", 1000.0)
    accepted: list[asyncio.StreamWriter] = []
    async with members(tmp_path) as swarm:
        a = await swarm.start("a")
        silent = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
        maddr = f"/ip4/127.0.0.1/tcp/{silent.sockets[0].getsockname()[1]}/p2p/{a.maddr.rpartition('/')[2]}"
        b = swarm.running["b"] = Member(swarm.run, "b", tmp_path / "b", (maddr,), "127.0.0.1")
        try:
            await until(lambda: b.passes == 2)
            assert accepted
            before = _sockets()
            await until(lambda: b.passes == 10)
            assert _sockets() <= before + 2  # what is busy just now
        finally:
            silent.close()
            for writer in accepted:
                writer.close()


def _sockets() -> int:
    """How many this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(each.readlink()).startswith("socket:")
    return found


async def _stranger(maddr: str) -> Any:
    """A node of hivemind's as it comes, which checks nothing."""
    from hivemind.dht.node import DHTNode

    return await DHTNode.create(initial_peers=[maddr], wait_timeout=WAIT_S, nat_port_map=False, auto_nat=False, use_relay=False)


@on_a_loop
async def test_a_hostile_node_changes_nothing_and_hides_nobody(tmp_path: Path) -> None:
    async with members(tmp_path) as swarm:
        a, b = await swarm.start("a"), await swarm.start("b", seeds="a")
        await until(lambda: a.found == swarm.addresses("b") and b.found == swarm.addresses("a"))
        stranger = await _stranger(a.maddr)
        try:
            await _attack(swarm.run, stranger)
            c = await swarm.start("c", seeds="ab")
            x = {"x": ("127.0.0.1:1",)}  # the hostile member may say where it is
            await until(lambda: c.found == swarm.addresses("ab") | x)
            for member in swarm.running.values():
                member.found = {}
            await until(lambda: all(m.found == swarm.addresses("abc".replace(p, "")) | x for p, m in swarm.running.items()))
            swarm.running["a"].discovery.tell(record_with(swarm.run.run_id, {"c": c.maddr}, evicted="bx"), a.addresses, "a")
            await until(lambda: a.found == swarm.addresses("c"))
        finally:
            await stranger.shutdown()


async def _attack(run: Run, stranger: Any) -> None:
    """Ask all nodes to store, with the help of members c and x, and answer those that ask."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue

    key, later = DHTID.generate(key_of(run.run_id)), time.time() + 100.0
    found = (await stranger.get(key_of(run.run_id), latest=True)).value
    assert {*found} == {"a", "b"}, "it reads what is there, which is no secret"
    other, c = Run(run.path / "other", run.run_id), run.credentials("c")
    by_other, by_c = other.records(other.credentials("b"), key=key.to_bytes()), run.records(c, key=key.to_bytes())
    peers = list(stranger.protocol.routing_table.peer_id_to_uid)
    there, _ = (await stranger.protocol.call_find(peers[0], [key]))[key]
    local = there.value.data  # as it is stored, with the signatures
    x = signed(run.records(run.credentials("x"), key=key.to_bytes()), "x", later, key=key.to_bytes())
    alone = DictionaryDHTValue()  # what a node has in its cache, it gives away instead of what it stores, if it lasts longer
    alone.store("x", x.value, later)
    values = [
        signed(by_other, "b", later, key=key.to_bytes()).value,
        signed(by_c, "b", later, key=key.to_bytes()).value,
        msgpack.packb(said(later)),
        b"\xc1garbage",
        b"\x91" * 5000,
        b"\xc4" * (MOST_BYTES + 1),
        local["b"].value,  # a replay: it expires later than b said
    ]
    for peer in peers:
        for in_cache in (False, True):
            for value in values:
                stored = await stranger.protocol.call_store(peer, [key], [value], [later], ["b"], in_cache=[in_cache])
                assert stored == [False]
            whole = await stranger.protocol.call_store(peer, [key], [msgpack.packb("x")], [later], in_cache=[in_cache])
            assert whole == [False]
            elsewhere = await stranger.protocol.call_store(peer, [DHTID.generate("x")], [b"x"], [later], in_cache=[in_cache])
            assert elsewhere == [False], "a member's node keeps nothing but the run's members"
        assert await stranger.protocol.call_store(peer, [key], [alone], [later], in_cache=[True]) == [True]
        told, _ = (await stranger.protocol.call_find(peer, [key]))[key]
        assert {*told.value.data} == {"a", "b", "x"}
    lie = _answer([[subkey, value, later] for subkey, value in zip("bcdefgh", values, strict=True)])
    stranger.protocol.storage.store(key, alone, float("inf"))
    stranger.protocol.serializer = SimpleNamespace(dumps=lambda value: lie, loads=msgpack.unpackb)


def test_a_host_that_knows_a_node_of_the_dht_joins_and_who_is_evicted_is_not_dialled(tmp_path: Path) -> None:
    """No address was told to it. Where its own node is, the record says."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:

            def dht(peer_id: str, *seeds: str) -> Callable[[tuple[bytes, bytes, bytes]], Discovery]:
                place = NodePlace(swarm.path / peer_id, "127.0.0.1", "127.0.0.1", 0, seeds)
                return lambda credentials: Discovery(swarm.run_id, peer_id, place, credentials)

            swarm.found()
            a = await swarm.start("a", discovery=dht("a"))
            await swarm.until(lambda: swarm.leader == "a" and swarm.record.members["a"].maddr, passes=1.0)
            for peer_id in "bc":
                await swarm.start(peer_id, discovery=dht(peer_id, swarm.record.members["a"].maddr))
            await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
            await swarm.until(lambda: all(swarm.record.members[peer_id].maddr for peer_id in "abc"), passes=1.0)
            a.tell(ev.Evict("c", "it lies"))
            await swarm.until(lambda: "c" in swarm.record.evicted and not a.links.connected & {"c"}, passes=1.0)
            await swarm.until(lambda: {*a._found} == {"b"})
            assert "c" not in a.links._addresses
        assert not p2pds(tmp_path)

    run_held(body())


@on_a_loop
async def test_who_was_invited_finds_members_whose_addresses_it_was_not_told(tmp_path: Path) -> None:
    """With nothing but the invitation: by the key and the certificate in it, and the authority that it trusts."""
    async with members(tmp_path) as swarm:
        a, b = await swarm.start("a"), await swarm.start("b", seeds="a")
        await until(lambda: a.found == swarm.addresses("b"))
        for run, peer_id, expected in (
            (swarm.run, "c", swarm.addresses("ab")),
            (swarm.run, "b", swarm.addresses("a")),
            (Run(tmp_path / "other", swarm.run.run_id), "c", None),
        ):
            gone = {"a": ("127.0.0.1:1",)}
            text = run.authority.invite_to_swarm(peer_id, hosts=gone, lifetime_s=60.0, now=time.time()).encode()
            seeking = asyncio.to_thread(
                operate.seek_members,
                tmp_path / "new" / "seeking",
                text,
                (a.maddr, b.maddr),
                within_s=WAIT_S if expected else 2.0,
            )
            if expected:
                assert (found := await seeking).items() <= expected.items() and found
            else:
                with pytest.raises(TransportError, match="does not know of any member of run-0 within 2 s"):
                    await seeking


@on_a_loop
async def test_who_was_invited_to_a_run_with_a_coordinator_finds_where_it_redeems_invitations(tmp_path: Path) -> None:
    """By the authority in the invitation: a peer that is called as the coordinator is says nothing, nor does another run's."""
    async with members(tmp_path) as swarm:
        a, run = await swarm.start("a"), swarm.run
        other = Run(tmp_path / "other", run.run_id)
        credentials = run.credentials("coordinator", "coordinator")
        place = NodePlace(tmp_path / "c", "127.0.0.1", "127.0.0.1", 0, (a.maddr,))
        place.folder.mkdir()
        coordinator = Discovery(run.run_id, "coordinator", place, credentials, "coordinator")
        reached = list[str]()
        coordinator.tell(None, ("127.0.0.1:7",), "", ("127.0.0.1:8", "[::1]:8"))
        coordinator.start(lambda found: None, reached.append)
        try:
            await until(lambda: reached)
            for authority, within_s in ((run.authority, WAIT_S), (other.authority, 2.0)):
                invited = authority.invite("b", role="peer", enrol=["127.0.0.1:1"], lifetime_s=60.0, now=time.time())
                path, nodes = tmp_path / "new" / "seeking", (reached[0], a.maddr)
                seeking = asyncio.to_thread(operate.seek_enrolment, path, invited.encode(), nodes, within_s=within_s)
                if authority is run.authority:
                    assert await seeking == ("127.0.0.1:8", "[::1]:8")
                else:
                    with pytest.raises(TransportError, match="does not know of the coordinator of run-0 within 2 s"):
                        await seeking
        finally:
            await coordinator.close()


@on_a_loop
async def test_it_says_one_line_and_hivemind_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    with caplog.at_level(logging.INFO):
        async with members(tmp_path) as swarm:
            a = await swarm.start("a")
            await swarm.start("b", seeds="a")
            logging.getLogger("hivemind.dht.node").critical("not heard")
    assert [record.getMessage() for record in caplog.records] == [
        f"the DHT: this member's node is {swarm.running[peer_id].maddr}" for peer_id in "ab"
    ]
    assert a.maddr and logging.getLevelName(logging.WARNING) == "WARNING"
    assert capfd.readouterr() == ("", "")


def test_logging_is_as_before_when_this_file_is_read_and_when_hivemind_cannot_be_imported(tmp_path: Path) -> None:
    """In a process of its own: hivemind calls the level WARN, for everybody, as soon as it is imported."""
    (tmp_path / "hivemind").mkdir()
    (tmp_path / "hivemind" / "__init__.py").write_text("import logging; logging.addLevelName(30, 'WARN'); import no.such")
    program = """
import importlib, logging, sys
importlib.import_module(sys.argv[1])
assert "hivemind" not in sys.modules
sys.path.insert(0, sys.argv[2])
from aggregator.swarm.discovery import _hivemind
try:
    _hivemind()
except ModuleNotFoundError as error:
    print(error.name, logging.getLevelName(30))
"""
    command = [sys.executable, "-c", program, __name__, str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout == "no WARNING\n"


@on_a_loop
async def test_a_port_that_is_taken_is_said_once_and_another_node_made_when_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    there, found = Discovery(run.run_id, "a", NodePlace(tmp_path, "127.0.0.1", "localhost", port), run.credentials("a")), []
    with caplog.at_level(logging.INFO):
        there.start(lambda found: None, found.append)
        try:
            await until(lambda: caplog.messages)
            server.close()
            await until(lambda: found)
        finally:
            await there.close()
    assert "trying again" in caplog.messages[0] and len(caplog.messages) == 2, caplog.messages
    assert found[0].startswith(f"/dns/localhost/tcp/{port}/p2p/")


@on_a_loop
async def test_it_ends_at_once_however_far_it_is(tmp_path: Path) -> None:
    """Before it was started, while hivemind is imported, while p2pd starts."""
    run = Run(tmp_path / "run")
    for pause_s in (None, 0.0, 0.05, 0.2):
        there = Discovery(run.run_id, "a", NodePlace(tmp_path, "127.0.0.1", "127.0.0.1"), run.credentials("a"))
        if pause_s is not None:
            there.start(lambda found: None, lambda maddr: None)
            await asyncio.sleep(pause_s)
        await there.close()
        assert not p2pds(tmp_path)


def _answer(items: object) -> bytes:
    """What a node answers that stores these."""
    return msgpack.packb(msgpack.ExtType(discovery._DICTIONARY, msgpack.packb([None, float("inf"), items])))


def test_of_what_a_node_answers_only_what_can_be_a_record_is_looked_at() -> None:
    """By its types and sizes; who signed it is seen later."""
    good = ["b", b"signed", 7.0]
    assert discovery._items(_answer([good])) == [(msgpack.packb("b"), b"signed", 7.0)]
    odd = [
        [7, b"x", 7.0],
        ["i", 8, 7.0],
        ["j", b"x", None],
        [None, b"x", 7.0],
        [[], {}, 7.0],
        ["k"],
        "l",
        ["m", b"x" * 9000, 7.0],
    ]
    assert discovery._items(_answer([*odd, good])) == [(msgpack.packb("b"), b"signed", 7.0)]
    assert len(discovery._items(_answer([good] * 5000))) == 1024
    for answer in (b"\xc0", _answer(None), _answer(5), msgpack.packb([None, 1, [good]]), b"\xc4" * 2_000_000):
        assert discovery._items(answer) == []
    for answer in (b"", b"\xc1", _answer([good])[:-1], msgpack.packb(msgpack.ExtType(discovery._DICTIONARY, b"\xc1"))):
        with pytest.raises(ValueError):
            discovery._items(answer)


def test_keys_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    from aggregator.swarm.host_folder import HostFolder
    from editpb.identity import Identity

    with pytest.raises(ConfigError, match=r"peer.key: cannot be read \(No such file"):
        Discovery.of(HostFolder(), Identity("r", "peer", "a"), tmp_path)


def test_the_sockets_of_p2pd_lie_in_the_members_folder_however_long_its_name_is(tmp_path: Path) -> None:
    """So nothing is left anywhere else when a host is killed, and what is left there goes at the next start."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    (folder / "p2pd").mkdir()
    (folder / "p2pd" / "of-a-host-that-was-killed.sock").touch()
    with discovery._sockets(folder) as sockets, socket.socket(socket.AF_UNIX) as listening:
        assert not list((folder / "p2pd").iterdir())
        listening.bind(str(sockets / "p2pclient.sock"))
        assert [path.name for path in (folder / "p2pd").iterdir()] == ["p2pclient.sock"]
    assert not list((folder / "p2pd").iterdir())
