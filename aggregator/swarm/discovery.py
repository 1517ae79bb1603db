"""Where members are, from a DHT: hivemind's `DHTNode`, on a thread and an event loop of its own.

The DHT says where to look, never who is alive or what is true: what is found here is dialled as the addresses of the record
are, and a certificate says who answers. A host without it, or whose DHT fails in whatever way, does all else.

    each REFRESH_S      dial all libp2p nodes that are known and not connected; say where this member is; look who else is there
    each WATCH_S        is p2pd there, and does it answer?

hivemind starts p2pd, a libp2p daemon, and does not notice its end: a search then finds nothing, a store says yes, a shutdown
hangs. So it is watched here. When it ends or does not answer, the node is dropped, never shut down, and a new one is made, with
the same identity and port. p2pd ends when the connection of this process does, so none is left over after a SIGKILL.

Its own loop: strangers may send whatever they like to the port of p2pd, and each message costs hivemind Python; what it raises
there, and what it logs, is nobody's business here; and what hangs in it can be left behind. hivemind's `DHT` would fork.

Do not import this module where hivemind is not installed: see `HostFolder.uses_dht`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import COORDINATOR_ID
from aggregator.security.certificates import key_pem
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.signed_records import LONGEST_S, MOST_BYTES, Announcement, SignedRecords, key_of
from edit.council.record import MOST_MEMBERS, Record, Stamp
from edit.durable_files import read_private, write_atomic, write_atomic_with
from edit.errors import ConfigError
from editpb.identity import Identity
from editpb.invitation import Invitation, guest_key, is_maddr

__all__ = ["REFRESH_S", "TTL_S", "Discovery", "Found", "NodePlace"]

_log = logging.getLogger(__name__)
TTL_S = 60.0  # that an announcement lasts
REFRESH_S = 20.0
EMPTY_S = 2.0  # likewise, while there are nodes to dial, and none answered
WATCH_S = 1.0  # p2pd is asked whether it is there; its end is noticed at once
FIRST_AGAIN_S, AGAIN_S = 0.2, 20.0  # until another node is made after one that did not come up; doubled from first to last
UP_AGAIN_S = 0.5  # likewise, after one that did
START_S = 20.0  # within which a node is there
CALL_S = 3.0  # within which another node answers
CLOSE_S = 2.0  # within which the thread ends; then it is left behind
CANCEL_S = 0.1  # after which what was cancelled and did not end is cancelled again
MOST_DIALLED = 256  # of the nodes that are known
MOST_ASKED = 20
_MOST_ANSWER = MOST_MEMBERS * 1024  # bytes
_DICTIONARY = 0x50  # hivemind's code for a DictionaryDHTValue in msgpack: [size, latest, [[subkey, value, expires], ...]]

assert TTL_S < LONGEST_S
_NONE = Stamp(0, 0, 0)

Found = Mapping[str, Announcement]  # by peer_id


@dataclass(frozen=True, slots=True)
class _Known:
    """What the host knows, for what is said and who is dialled. Replaced in one go."""

    addresses: tuple[str, ...] = ()  # of this host; a member without any says nothing
    stamp: Stamp = _NONE
    leader: str = ""
    maddrs: frozenset[str] = frozenset()  # of the record's members
    evicted: frozenset[str] = frozenset()
    enrol: tuple[str, ...] = ()  # of a coordinator: where invitations are redeemed


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a libp2p node is.

    Args:
        folder: of the member; its node's key and port are kept there.
        listen: host (a name or an address) that it binds.
        advertise: host at which others reach it; '': nobody does, and it answers nothing.
        port: to bind; 0: one that the system chooses, once.
        seeds: multiaddresses of nodes to begin with.
    """

    folder: Path
    listen: str
    advertise: str = ""
    port: int = 0
    seeds: tuple[str, ...] = ()


def _credentials(path: Path, name: str) -> tuple[bytes, bytes, bytes]:
    """Return the key, the certificate and the authority of a folder. Raises ConfigError."""
    try:
        return read_private(path / f"{name}.key"), (path / f"{name}.pem").read_bytes(), (path / "ca.pem").read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error


@dataclass(slots=True)
class _Node:
    """One life of a node: hivemind's objects."""

    node: Any
    p2p: Any
    maddr: str


class Discovery:
    """The DHT as a host uses it. `start` it, `tell` it, `close` it; used on the host's loop.

    credentials: private key, certificate and authority, in PEM; key and certificate b"": who only looks. role: of those who say
    where they are: peers, in a swarm; the coordinator of a run that has one.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        place: NodePlace,
        credentials: tuple[bytes, bytes, bytes],
        role: str = "peer",
    ) -> None:
        self._role = role
        self._run_id, self._peer_id, self._place, self._credentials = run_id, peer_id, place, credentials
        self._known = _Known()
        self._records: SignedRecords | None = None  # of the present node
        self._host: asyncio.AbstractEventLoop | None = None
        self._loop = _Loop()  # the thread's
        self._news, self._stop = asyncio.Event(), asyncio.Event()  # set on that loop
        self._closed = self._up = False  # up: the present node is there
        self._ended: Future[None] = Future()
        self._complaint = ""

    @classmethod
    def of(cls, folder: HostFolder, identity: Identity, path: Path) -> Discovery:
        """Return the DHT for a host's folder. Raises ConfigError."""
        credentials = _credentials(path, "peer")
        listen = folder.listen.rpartition(":")[0].strip("[]")
        place = NodePlace(path, listen, folder.advertise, folder.dht_port, folder.dht_peers)
        return cls(identity.run_id, identity.peer_id, place, credentials)

    @classmethod
    def of_coordinator(cls, run_id: str, path: Path, listen: str, advertise: str, seeds: tuple[str, ...]) -> Discovery:
        """Return the DHT in which a coordinator says where it is. listen: HOST:PORT. Raises ConfigError."""
        place = NodePlace(path, listen.rpartition(":")[0].strip("[]"), advertise.strip("[]"), 0, seeds)
        return cls(run_id, COORDINATOR_ID, place, _credentials(path, "server"), "coordinator")

    @classmethod
    def of_seeker(cls, identity: Identity, path: Path, seeds: tuple[str, ...]) -> Discovery:
        """Return the DHT in which a peer looks for its coordinator. path: of the peer's folder. Raises ConfigError."""
        (path / "dht").mkdir(mode=0o700, exist_ok=True)
        place = NodePlace(path / "dht", "127.0.0.1", "", 0, seeds)
        return cls(identity.run_id, identity.peer_id, place, _credentials(path, "peer"), "coordinator")

    @classmethod
    def of_guest(cls, invited: Invitation, path: Path, seeds: tuple[str, ...]) -> Discovery:
        """Return the DHT in which who was invited to a swarm looks for its members. path: where its node keeps its files.

        Raises ConfigError.
        """
        assert invited.swarm is not None
        try:
            authority, guest = map(x509.load_der_x509_certificate, (invited.ca, invited.swarm.certificate))
        except ValueError as error:
            raise ConfigError("the invitation is damaged; copy the whole line again") from error
        pem, key = serialization.Encoding.PEM, key_pem(guest_key(invited.token))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = NodePlace(path, "127.0.0.1", "", 0, seeds)
        credentials = key, guest.public_bytes(pem), authority.public_bytes(pem)
        return cls(invited.identity.run_id, invited.identity.peer_id, place, credentials)

    @classmethod
    def of_invited(cls, invited: Invitation, path: Path, seeds: tuple[str, ...]) -> Discovery:
        """Return the DHT in which who was invited to a run with a coordinator looks for it, and says nothing.

        path: where its node keeps its files. Raises ConfigError.
        """
        try:
            authority = x509.load_der_x509_certificate(invited.ca).public_bytes(serialization.Encoding.PEM)
        except ValueError as error:
            raise ConfigError("the invitation is damaged; copy the whole line again") from error
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = NodePlace(path, "127.0.0.1", "", 0, seeds)
        return cls(invited.identity.run_id, invited.identity.peer_id, place, (b"", b"", authority), "coordinator")

    # -- on the host's loop ------------------------------------------------------------------------------------------------

    def start(self, found: Callable[[Found], None], reached: Callable[[str], None]) -> None:
        """Begin, beside all else: importing hivemind takes seconds.

        Args:
            found: is told of all that are found, on this loop.
            reached: is told of this node's multiaddress, likewise; '' where nobody reaches it.
        """
        self._host, self._found, self._reached = asyncio.get_running_loop(), found, reached
        threading.Thread(target=self._run, name="dht", daemon=True).start()

    def tell(self, record: Record | None, addresses: tuple[str, ...], leader: str, enrol: tuple[str, ...] = ()) -> None:
        """Take what the host knows now. addresses: its own. enrol: where a coordinator's invitations are redeemed."""
        known = _Known(addresses, enrol=enrol)
        if record is not None:
            maddrs = frozenset(member.maddr for member in record.members.values() if is_maddr(member.maddr))
            known = _Known(addresses, record.stamp, leader, maddrs, frozenset(record.evicted))
        before, self._known = self._known, known
        if (before.addresses, before.maddrs) != (known.addresses, known.maddrs):
            self._set(self._news)

    def renew(self, certificate: bytes, authority: bytes) -> None:
        """Sign what this member says with a new certificate from now on, and trust these authorities (PEM)."""
        self._credentials = self._credentials[0], certificate, authority
        if self._records is not None:
            self._records.renew(certificate, authority)

    async def close(self) -> None:
        """End p2pd and the thread. Waits at most CLOSE_S; then the thread is left behind."""
        self._closed = True
        if self._host is not None:
            self._set(self._stop)
            await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=CLOSE_S)
        else:
            self._loop.close()

    def _set(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(event.set)

    def _take(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._closed:
            call(*arguments)

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def _tell_host(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._host is not None
        with suppress(RuntimeError):  # its loop has ended
            self._host.call_soon_threadsafe(self._take, call, *arguments)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        finally:
            self._ended.set_result(None)

    async def _live(self) -> None:
        """Make a node, and another one when it has failed, until `close`."""
        self._loop.set_exception_handler(_ignore)
        stop, failed = asyncio.ensure_future(self._stop.wait()), 0
        while not stop.done():
            self._up = False
            life = asyncio.ensure_future(self._one_life())
            await asyncio.wait([stop, life], return_when=asyncio.FIRST_COMPLETED)
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await _end(life)
            if life.done() and not life.cancelled() and (error := life.exception()) is not None:
                self._complain(error)
            failed = 0 if self._up else min(failed + 1, 16)
            await asyncio.wait([stop], timeout=_again_s(failed))

    def _complain(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = " ".join(f"{type(error).__name__} {error}".split())[:200]
        if text != self._complaint:
            self._complaint = text
            _log.info("the DHT: %s; trying again. Training goes on, with the addresses that are known", text)

    async def _one_life(self) -> None:
        """Be a node, until p2pd ends. Raises whatever hivemind raises, P2PDaemonError when p2pd has ended."""
        hivemind = _hivemind()
        records = self._records = SignedRecords(
            self._run_id,
            hivemind.DHTID.generate(key_of(self._run_id)).to_bytes(),
            self._credentials[2],
            *self._credentials[:2],
            evicted=lambda peer_id: peer_id in self._known.evicted,
            role=self._role,
        )
        async with self._node(hivemind, records) as node:
            self._complaint, self._up = "", True
            _log.info("the DHT: %s", f"this member's node is {node.maddr}" if node.maddr else "a node that only asks")
            self._tell_host(self._reached, node.maddr)
            watch = asyncio.ensure_future(self._watch(hivemind, node))
            work = asyncio.ensure_future(self._work(hivemind, records, node))
            try:
                await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(watch, work)
            for each in (watch, work):  # the reason first
                if not each.cancelled():
                    each.result()

    @asynccontextmanager
    async def _node(self, hivemind: _Hivemind, records: SignedRecords) -> AsyncIterator[_Node]:
        place, reachable = self._place, bool(self._place.advertise)
        with _sockets(place.folder) as sockets:
            base, made = hivemind.P2P, list[Any]()

            class P2P(base):  # type: ignore[misc, valid-type]
                _UNIX_SOCKET_PREFIX = f"/unix{sockets}/"

                def __init__(self) -> None:
                    super().__init__()
                    made.append(self)  # so that one that does not come up is ended, too

                def __del__(self) -> None:
                    """Do nothing: `_drop` has ended it, and the path of its socket may be another file's by now."""

            address = _address(place.listen)
            port = place.port or _port(place.folder, address)
            there = f"/ip{address.version}/{address}/tcp/{port}"
            seen = f"{_advertised(place.advertise)}/tcp/{port}" if reachable else ""
            try:
                async with asyncio.timeout(START_S):
                    p2p = await P2P.create(
                        host_maddrs=[there] if reachable else None,
                        announce_maddrs=[seen] if reachable else None,
                        no_listen=not reachable,
                        dht_mode="server" if reachable else "client",
                        identity_path=str(_identity(place.folder, hivemind)),
                        startup_timeout=START_S / 2,
                        idle_timeout=START_S,  # of a p2pd whose host is killed before they are connected
                        nat_port_map=False,
                        auto_nat=False,
                        use_relay=False,
                    )
                    node = await hivemind.DHTNode.create(
                        p2p=p2p,
                        node_id=hivemind.DHTID.generate(p2p.peer_id.to_bytes()),
                        client_mode=not reachable,
                        record_validator=records,
                        wait_timeout=CALL_S,
                        cache_locally=False,
                        cache_nearest=0,
                        cache_on_store=False,
                        reuse_get_requests=False,
                    )
                node.protocol.cache = node.protocol.storage  # a stranger's copy of one record must not hide the others
                yield _Node(node, p2p, f"{seen}/p2p/{p2p.peer_id.to_base58()}" if reachable else "")
            finally:
                for each in made:
                    await _drop(each)

    async def _watch(self, hivemind: _Hivemind, node: _Node) -> None:
        """Wait until p2pd ends, or does not answer. Raises P2PDaemonError."""
        control = node.p2p._client.control
        ends = [asyncio.ensure_future(node.p2p._child.wait()), control._read_task, control._write_task]
        while not (await asyncio.wait(ends, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            try:
                await asyncio.wait_for(asyncio.ensure_future(node.p2p._client.identify()), CALL_S)
            except TimeoutError:
                raise hivemind.P2PDaemonError("p2pd does not answer") from None
        raise hivemind.P2PDaemonError("p2pd ended")

    async def _work(self, hivemind: _Hivemind, records: SignedRecords, node: _Node) -> None:
        while True:
            self._news.clear()
            await self._dial(hivemind, node)
            await self._announce(node)
            found = await self._look(hivemind, records, node)
            self._tell_host(self._found, {peer_id: said for peer_id, said in found.items() if peer_id != self._peer_id})
            alone = not self._neighbours(node) and (self._known.maddrs or self._place.seeds)
            with suppress(TimeoutError):
                async with asyncio.timeout(EMPTY_S if alone else REFRESH_S):
                    await self._news.wait()

    @staticmethod
    def _neighbours(node: _Node) -> Mapping[Any, Any]:
        return dict(node.node.protocol.routing_table.peer_id_to_uid)

    async def _dial(self, hivemind: _Hivemind, node: _Node) -> None:
        """Connect to all nodes that are known, unless they are. So two DHTs become one when any two members meet."""
        there = {peer.to_base58() for peer in self._neighbours(node)} | {node.p2p.peer_id.to_base58()}
        wanted = [maddr for maddr in sorted({*self._place.seeds, *self._known.maddrs}) if maddr.rpartition("/")[2] not in there]
        await asyncio.gather(*(self._meet(hivemind, node, maddr) for maddr in wanted[:MOST_DIALLED]))

    async def _meet(self, hivemind: _Hivemind, node: _Node, maddr: str) -> None:
        with suppress(*hivemind.failures):
            there, _, name = maddr.rpartition("/p2p/")
            peer = hivemind.PeerID.from_base58(name)
            await asyncio.wait_for(asyncio.ensure_future(node.p2p._client.connect(peer, [hivemind.Multiaddr(there)])), CALL_S)
            await asyncio.wait_for(node.node.protocol.call_ping(peer), 2 * CALL_S)

    async def _announce(self, node: _Node) -> None:
        known = self._known
        if not known.addresses:
            return
        expires = time.time() + TTL_S
        value = Announcement(
            addresses=known.addresses,
            maddr=node.maddr,
            stamp=known.stamp,
            leader=known.leader,
            expires=expires,
            enrol=known.enrol,
        ).as_value()
        with suppress(TimeoutError):
            await asyncio.wait_for(node.node.store(key_of(self._run_id), value, expires, subkey=self._peer_id), 4 * CALL_S)

    async def _look(self, hivemind: _Hivemind, records: SignedRecords, node: _Node) -> Found:
        """Ask the nodes that should know, each for itself: what one of them sends cannot spoil what others say."""
        key = hivemind.DHTID.generate(key_of(self._run_id))
        nearest: Mapping[Any, Any] = {}
        with suppress(TimeoutError):
            nearest = (await asyncio.wait_for(node.node.find_nearest_nodes([key], exclude_self=True), 4 * CALL_S))[key]
        asked = [self._ask(hivemind, node, peer, key) for peer in list(nearest.values())[:MOST_ASKED]]
        answers = [_items_here(node.node.protocol.storage.get(key)), *await asyncio.gather(*asked)]
        items = [item for answer in answers for item in answer]
        return await asyncio.to_thread(records.found, items, hivemind.DHTRecord)

    async def _ask(self, hivemind: _Hivemind, node: _Node, peer: Any, key: Any) -> list[tuple[bytes, bytes, float]]:
        protocol = node.node.protocol
        request = hivemind.FindRequest(keys=[key.to_bytes()], peer=protocol.node_info)
        with suppress(*hivemind.failures):
            response = await protocol.get_stub(peer).rpc_find(request, timeout=CALL_S)
            return _items(response.results[0].value) if len(response.results) == 1 else []
        return []


# -- hivemind --------------------------------------------------------------------------------------------------------------


class _Loop(asyncio.SelectorEventLoop):
    """A connection to p2pd ends with the task that opened it: hivemind leaves it open when a call fails or is cancelled.

    Neither side would close it: each member that does not answer would cost this process and p2pd a socket at each attempt.
    """

    async def create_unix_connection(self, *arguments: Any, **named: Any) -> Any:
        transport, protocol = await super().create_unix_connection(*arguments, **named)
        task = asyncio.current_task(self)
        assert task is not None
        task.add_done_callback(lambda _: transport.abort())
        return transport, protocol


@dataclass(frozen=True, slots=True)
class _Hivemind:
    """What is used of it."""

    DHTNode: Any
    DHTID: Any
    DHTRecord: Any
    P2P: Any
    P2PDaemonError: type[Exception]
    PeerID: Any
    Multiaddr: Any
    FindRequest: Any
    failures: tuple[type[Exception], ...]  # of a call to another node


def _hivemind() -> _Hivemind:
    """Import it, and take its own log handler and names of levels away, also when it cannot be imported."""
    try:
        from google.protobuf.message import DecodeError
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID
        from hivemind.dht.validation import DHTRecord
        from hivemind.p2p import P2P, PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
        from hivemind.proto.dht_pb2 import FindRequest
        from hivemind.utils.multiaddr import Multiaddr
    finally:
        logging.addLevelName(logging.WARNING, "WARNING")
        logging.getLogger("hivemind").setLevel(logging.CRITICAL + 1)

    failures = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError, ValueError, DecodeError)
    return _Hivemind(DHTNode, DHTID, DHTRecord, P2P, P2PDaemonError, PeerID, Multiaddr, FindRequest, failures)


def _ignore(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What ends a task of hivemind's that nobody waits for: a node that answers garbage, or p2pd that is gone."""
    _log.debug("%s: %s", context.get("message"), context.get("exception"))


def _again_s(failed: int) -> float:
    """Return the seconds until another node is made. failed: how many in a row did not come up."""
    return min(FIRST_AGAIN_S * 2**failed, AGAIN_S) if failed else UP_AGAIN_S


async def _end(*tasks: asyncio.Future[None]) -> None:
    """Cancel these until they have ended. Raises nothing of theirs.

    Once is not enough: in Python 3.11 `asyncio.wait_for` takes a cancellation for itself when what it waits for ends just then,
    as all does that waits for a p2pd when that ends (github.com/python/cpython/issues/86296, mended in 3.12).
    """
    while alive := [each for each in tasks if not each.done()]:
        for each in alive:
            each.cancel()
        await asyncio.wait(alive, timeout=CANCEL_S)


async def _drop(p2p: Any) -> None:
    """Leave a node, and end its p2pd. Its shutdown would wait for a p2pd that does not answer, and there is nothing to save.

    `_end`, which cancels again and again, does not break this off: p2pd is killed, and would be left to the collector.
    """
    if p2p._child is not None:
        if p2p._child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(p2p._child.pid, signal.SIGKILL)  # its own `kill` may reap it before asyncio does, which then complains
        ends = asyncio.ensure_future(p2p._child.wait())
        while not ends.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([ends])
    p2p._terminate()


def _items_here(stored: Any) -> list[tuple[bytes, bytes, float]]:
    if stored is None or not hasattr(stored.value, "data"):
        return []
    return [(msgpack.packb(subkey), each.value, each.expiration_time) for subkey, each in stored.value.data.items()]


def _items(answer: bytes) -> list[tuple[bytes, bytes, float]]:
    """Return (subkey, value, expiration) of what a node sent, as far as that is what it should be. Raises ValueError."""
    if len(answer) > _MOST_ANSWER:
        return []
    packed = msgpack.unpackb(answer)
    inner = msgpack.unpackb(packed.data) if isinstance(packed, msgpack.ExtType) and packed.code == _DICTIONARY else None
    if not isinstance(inner, list) or len(inner) != 3 or not isinstance(inner[2], list):
        return []
    items = [each for each in inner[2] if isinstance(each, list) and len(each) == 3]
    return [
        (msgpack.packb(subkey), value, expires)
        for subkey, value, expires in items
        if isinstance(subkey, str) and type(value) is bytes and type(expires) is float and len(value) <= MOST_BYTES
    ][:MOST_MEMBERS]


# -- where a node is -------------------------------------------------------------------------------------------------------


@contextmanager
def _sockets(folder: Path) -> Iterator[Path]:
    """Give a folder for the sockets of p2pd, whose names have at most 107 bytes: in the member's, by a short name.

    So nothing lies elsewhere when a host is killed. Only processes of this user reach it by that name.
    """
    path = folder / "p2pd"
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _clear(path)  # a host that was killed left some
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
        _clear(path)


def _clear(path: Path) -> None:
    for each in path.iterdir():
        each.unlink(missing_ok=True)


def _identity(folder: Path, hivemind: _Hivemind) -> Path:
    """Return the file with the node's key, which is made once: its id stays. Raises StorageError."""
    path = folder / "libp2p.key"
    if not path.exists():
        write_atomic_with(path, lambda file: hivemind.P2P.generate_identity(str(file)), mode=0o600)
    return path


def _port(folder: Path, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """Return the port of last time if it is free, else one that the system chooses. Raises OSError, StorageError."""
    file = folder / "dht-port"
    try:
        kept = int(file.read_bytes())
    except (OSError, ValueError):
        kept = 0
    for port in (kept if 0 < kept < 1 << 16 else 0, 0):
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((str(address), port))
            bound = int(probe.getsockname()[1])
            if bound != kept:
                write_atomic(file, str(bound).encode())
            return bound
    raise ConfigError(f"{address}: nothing can listen there")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a host that is listened at. Raises OSError for a name that is not known."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _advertised(host: str) -> str:
    """Return the first part of a multiaddress."""
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}"
    except ValueError:
        return f"/dns/{host}"
