"""Several hosts of a swarm in this process: loopback, mutual TLS, real folders. No time passes but what a test lets pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from aggregator.resources import Clock
from aggregator.run_feed import Subscriber
from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key, public_hash
from aggregator.security.members import Members
from aggregator.storage.state_folder import StateFolder
from aggregator.swarm.admission import OwnCertificate, open_authority, root_of
from aggregator.swarm.host import Host, Place, found_swarm, merging
from aggregator.swarm.host_folder import credentials
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.relayed import RelayedPort
from edit.config.run import RunConfig
from edit.council import events as events_of_council
from edit.council.machine import Role, Timing
from edit.council.record import Enrolled, Record, name_of
from edit.durable_files import write_atomic
from edit.fragments.assignment import assign
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.lab.council.replicated import same
from edit.merging.outer_state import OuterState
from edit.records import Commit
from edit.rounds import events
from edit.trust.signatures import Signer
from editpb.identity import Identity
from editpb.messages import ContributionHeader
from editpb.signed_contributions import ContributionSigner, signs
from editpb.transport.channel_options import channel_options
from editpb.transport.parts import in_part
from editpb.transport.send_limit import UNLIMITED, SendLimit
from tests.support.encoded import encode
from tests.support.loops import HeldLoop, outside, pass_time
from tests.support.served import LIFETIME_S, TOML, WAIT_S, BarePeer, theta

TIMING = Timing(heartbeat_s=0.25, lease_s=1.0, forget_s=60.0, stall_s=8.0)
SIZES = (5, 300)
STEP_S = 0.02  # of time that passes at once
SILENT_S = 1.0  # outside: no message takes so long, so who is silent for longer is meant to be


def schema_of(part: int) -> Schema:
    """The fragments of a part."""
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"part{part}.layer{i}", shape=(n,)),))
            for i, n in enumerate(SIZES)
        )
    )


@dataclass
class Hosts:
    """Members a, b, c, ...; a is the founder."""

    path: Path
    authority: Authority
    run_id: str
    config: RunConfig
    parts: int
    model: tuple[Schema, Sequence[Tensor]] | None = None  # and its parameters; None: one of random vectors
    running: dict[str, Host] = field(default_factory=dict)
    limits: dict[str, SendLimit] = field(default_factory=dict)  # of what members send, from their next start on
    unix: Callable[[], float] = time.time  # of all members
    renews: bool = False  # whether members have their certificates in their folders, and renew them
    closed: bool = False  # whether only who is enrolled is a member, as in every real swarm
    keys: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # of members, as their folders keep them
    others: dict[Identity, ec.EllipticCurvePrivateKey] = field(default_factory=dict)  # see `certificate`
    subscribers: Callable[[int], Sequence[Subscriber]] = lambda part: ()  # to the rounds of members, from their next start on
    taken: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # digests that members came to, by part and step
    touched: float = field(default_factory=time.monotonic)  # outside: when members were last heard in time

    @property
    def schemas(self) -> Sequence[Schema]:
        if self.model is None:
            return tuple(map(schema_of, range(self.parts)))
        return tuple(map(self.model[0].subset, assign(self.model[0], self.parts)))

    def first_state(self, part: int) -> OuterState:
        """What the run is founded with."""
        if self.model is None:
            return OuterState(schema_of(part), merging(self.config), theta(part, schema_of(part)))
        schema, first = self.model
        return OuterState(
            self.schemas[part], merging(self.config), [first[i].clone() for i in assign(schema, self.parts)[part]]
        )

    @property
    def ca(self) -> bytes:
        return (self.path / "run" / "ca.pem").read_bytes()

    def certificate(self, peer_id: str, role: str = "peer", run_id: str = "") -> tuple[bytes, bytes]:
        """(key, certificate) in PEM, of a machine that is not the member's own; for the same key each time."""
        identity = Identity(run_id or self.run_id, role, peer_id)
        return self._issued(identity, self.others.setdefault(identity, new_key()))

    def _issued(self, identity: Identity, key: ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
        certificate = self.authority.issuer.issue(identity, key.public_key(), lifetime_s=LIFETIME_S, now=time.time())
        return key_pem(key), certificate.public_bytes(serialization.Encoding.PEM)

    def own(self, peer_id: str) -> tuple[bytes, bytes]:
        """(key, certificate) of a member: what serves has what trains beside it has, and the same after a restart."""
        if peer_id not in self.keys:
            self.keys[peer_id] = self._issued(Identity(self.run_id, "peer", peer_id), new_key())
        return self.keys[peer_id]

    def folder(self, peer_id: str) -> MemberFolder:
        path = self.path / peer_id
        path.mkdir(exist_ok=True)
        return MemberFolder(path)

    def found(self, peer_id: str = "a") -> None:
        """Make the folder of the first member."""
        states = [self.first_state(part) for part in range(self.parts)]
        key = public_hash(x509.load_pem_x509_certificate(self.own(peer_id)[1])) if self.closed else ""
        root = root_of(self.authority.issuer.certificate) if self.closed else None
        found_swarm(self.run_id, peer_id, self.config, self.folder(peer_id), states, incarnation=1, root=root, key=key)

    async def start(
        self,
        peer_id: str,
        *,
        advertise: str = "127.0.0.1",
        seeds: dict[str, tuple[str, ...]] | None = None,
        discovery: Callable[[tuple[bytes, bytes, bytes]], Any] | None = None,
        relay: str = "",
    ) -> Host:
        """Start a member from its folder. It knows those that run, unless it is to discover them.

        Args:
            advertise: '': it accepts no connections.
            seeds: whom it knows, and where; None: all that run.
            discovery: makes it of (private key, certificate, authority).
            relay: HOST:PORT by which others reach it; nobody dials it then.
        """
        path, key, certificate = self.path / peer_id, *self.own(peer_id)
        client = grpc.ssl_channel_credentials(self.ca, key, certificate)
        server = grpc.ssl_server_credentials([(key, certificate)], self.ca, True)
        if self.renews:
            client, server = credentials(path)
        running = {other: (host.listen,) for other, host in self.running.items() if host._place.advertise and discovery is None}

        def took(part: int, commit: Commit) -> None:
            self.taken.setdefault((part, commit.outer_step), set()).add(commit.digest)

        if relay:
            path.mkdir(exist_ok=True)
            write_atomic(path / "peer.key", key, mode=0o600)
            write_atomic(path / "peer.pem", certificate)
            write_atomic(path / "ca.pem", self.ca)
        identity = Identity(self.run_id, "peer", peer_id)
        host = Host(
            self.run_id,
            peer_id,
            self.config,
            self.folder(peer_id),
            self.schemas,
            Place("127.0.0.1:0", "" if relay else advertise, relay),
            client,
            server,
            Members(self.path / peer_id / "members.json", new=True, enrols=False),
            seeds=running if seeds is None else seeds,
            timing=TIMING,
            discovery=discovery((key, certificate, self.ca)) if discovery is not None else None,
            clock=Clock(monotonic=asyncio.get_running_loop().time, unix=self.unix),
            on_commit=took,
            subscribers=self.subscribers,
            limit=self.limits.get(peer_id, UNLIMITED),
            authority=open_authority(path),
            certificate=OwnCertificate(path, identity, self.unix) if self.renews else None,
            signer=Signer((path / "peer.key").read_bytes() if self.renews else key),
            relayed=RelayedPort(relay, path, identity) if relay else None,
        )
        await host.start()
        self.running[peer_id] = host
        return host

    async def stop(self, peer_id: str) -> None:
        """End a member; its connections break.

        Time passes once that takes long: gRPC leaves a call that it is about to answer to the server's grace.
        """
        begun, closing = time.monotonic(), asyncio.get_running_loop().create_task(self.running.pop(peer_id).close())
        while not closing.done():
            await asyncio.wait([closing, asyncio.ensure_future(outside(0.001))], return_when="FIRST_COMPLETED")
            if time.monotonic() - begun > 1.0:
                pass_time(0.001)
        await closing

    # -- what the test waits for -------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], *, passes: float = 0.0) -> None:
        """Let the loop go on until the condition is true. passes: seconds, for each second outside.

        They pass in small steps: where the machine stands still for a while, no bound is met by that.
        """
        await self._until(condition, passes, None)

    async def until_said(self, say: Callable[[], Awaitable[object]], condition: Callable[[], object]) -> None:
        """Say something again and again while time passes, ten times as fast as outside, until the condition is true."""
        await self._until(condition, 10.0, say)

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass while the members hear each other: at once, it would end the leader's lease."""
        end = self.now() + seconds
        await self._until(lambda: self.now() >= end, 10.0, None)

    async def _until(self, condition: Callable[[], object], passes: float, say: Callable[[], Awaitable[object]] | None) -> None:
        """Where members are slower than usual, because the machine is busy, time waits for them: else a message between them
        would take a lease. It does not wait for who is silent for long outside.
        """
        begun = looked = time.monotonic()
        while not condition():
            for host in self.running.values():
                assert host.failure is None, host.failure
            assert time.monotonic() - begun < WAIT_S, self.describe()
            if say is not None:
                await say()
            await outside(0.001)
            before, looked = looked, time.monotonic()
            if self.in_touch():
                self.touched = looked
            if passes and (self.touched == looked or looked - self.touched > SILENT_S):
                pass_time(passes * min(looked - before, STEP_S))

    def in_touch(self) -> bool:
        """Whether the leader, if there is one, has heard all others within half a lease."""
        if not self.leader:
            return True
        leader = self.running[self.leader].council
        silent = [known.silent_s for peer_id in self.running if (known := leader.known(peer_id, self.now())) is not None]
        return max(silent, default=0.0) < TIMING.lease_s / 2

    def now(self) -> float:
        """The time of all members."""
        return asyncio.get_running_loop().time()

    def describe(self) -> str:
        """What members think, for a test that fails."""
        return "\n".join(
            f"{peer_id}: {host.council.role} leader {host.council.leader} term {host.council.term} "
            f"{host.council.record and host.council.record.parts} states {host.council.states}"
            for peer_id, host in self.running.items()
        )

    async def grow(self, *peer_ids: str) -> None:
        """Found with the first, start the others; return when all vote and the first leads."""
        self.found(peer_ids[0])
        await self.start(peer_ids[0])
        await self.until(lambda: self.leader == peer_ids[0], passes=1.0)
        for peer_id in peer_ids[1:]:
            await self.start(peer_id)
        await self.until(lambda: self.settled(peer_ids), passes=1.0)

    def settled(self, peer_ids: Sequence[str]) -> bool:
        """Whether these are the voters, by what each has heard."""
        wanted = {name_of(peer_id, self.running[peer_id].incarnation) for peer_id in peer_ids}
        found = [host.council.committed for host in self.running.values()]
        return all(record is not None and {*record.voters} == wanted and not record.before for record in found)

    @property
    def leader(self) -> str:
        """Who leads, of the latest term."""
        leading = [(host.council.term, peer_id) for peer_id, host in self.running.items() if host.council.role is Role.LEADER]
        return max(leading)[1] if leading else ""

    @property
    def record(self) -> Record:
        """The newest that is committed anywhere."""
        found = [record for host in self.running.values() if (record := host.council.committed or host.council.record)]
        return max(found, key=lambda record: record.stamp)

    def owner(self, part: int = 0) -> Host | None:
        """The host whose engine serves the part, by the newest record."""
        if not self.leader:
            return None
        named = self.record.parts[part]
        host = self.running.get(named.owner)
        engine = host.parts[part].engine if host is not None else None
        return host if engine is not None and engine.grant == named.grant and engine.run.founded else None

    def steps(self, part: int = 0) -> dict[str, int]:
        """The outer step that each council knows of, once it has told the leader or is about to."""
        return {peer_id: host.council.states[part].outer_step for peer_id, host in self.running.items()}

    @asynccontextmanager
    async def channel(
        self, to: str, peer_id: str, role: str = "peer", run_id: str = "", *, own: bool = False
    ) -> AsyncIterator[grpc.aio.Channel]:
        """A connection to a host, under a certificate of the run's authority: a new one, or the peer's own."""
        pair = self.own(peer_id) if own else self.certificate(peer_id, role, run_id)
        credentials = grpc.ssl_channel_credentials(self.ca, *pair)
        options = channel_options(self.running[to].listen, server_name=Identity(self.run_id, "peer", to).server_name)
        async with grpc.aio.secure_channel(self.running[to].listen, credentials, options) as channel:
            yield channel

    @asynccontextmanager
    async def peer(self, to: str, peer_id: str, part: int = 0, *, own: bool = False) -> AsyncIterator[BarePeer]:
        """A peer that trains, at this host."""
        async with self.channel(to, peer_id, own=own) as channel:
            peer = BarePeer(peer_id, self.run_id, channel, schema_of(part))
            in_part(peer.control, part)
            in_part(peer.data, part)
            try:
                yield peer
            finally:
                await peer.disconnect()

    def same(self, part: int = 0) -> bool:
        """Whether all have the part at one outer step, to the bit: parameters, slots, statistics."""
        one, *others = [host.parts[part].replica.snapshot() for host in self.running.values()]
        return all(same(one, other) for other in others)

    async def enrol(self, *peer_ids: str) -> None:
        """Have all agree on the key of each, as a member with the authority's key does."""
        for peer_id in peer_ids:
            key = public_hash(x509.load_pem_x509_certificate(self.own(peer_id)[1]))
            self.running[self.record.holders[0]].tell(events_of_council.Claim(peer_id, Enrolled("1" * 32, key)))
        await self.until(lambda: all({*peer_ids} <= host.council.committed.enrolled.keys() for host in self.running.values()))

    async def contribute(self, part: int, deltas: Sequence[Tensor], peer_id: str = "peer") -> None:
        """A whole contribution to the owner's open round, as if it had come in by the network."""
        await self.until(lambda: self.owner(part) is not None)
        owner = self.owner(part)
        assert owner is not None
        engine = owner.parts[part].engine
        assert engine is not None
        rounds = engine.run.rounds
        rounds.feed(events.MemberReady(peer_id, rounds.outer.outer_step, 0.0))
        round_id = rounds.machine.round_id
        for i, delta in enumerate(deltas):
            data = bytes(encode("fp32", delta).data)
            header = ContributionHeader(
                run_id=self.run_id,
                round_id=round_id,
                outer_step=rounds.machine.outer_step,
                peer_id=peer_id,
                fragment_id=i,
                schema_hash=schema_of(part).schema_hash,
                inner_steps=2,
                tokens=10,
                codec="fp32",
                numel=delta.numel(),
                total_bytes=len(data),
            )
            if signs(self.config):
                header = ContributionSigner(self.own(peer_id)[0], self.config)(header, memoryview(data))
            shard = rounds.offer(header)
            assert shard is not None
            await rounds.receive(shard, 0, data)
            await rounds.arrived(shard)


@asynccontextmanager
async def hosts(
    path: Path,
    parts: int = 1,
    *,
    model: tuple[Schema, Sequence[Tensor]] | None = None,
    toml: str = TOML,
    config: RunConfig | None = None,
) -> AsyncIterator[Hosts]:
    """No member runs yet; at the end all are stopped. config: in place of what `toml` says."""
    assert isinstance(asyncio.get_running_loop(), HeldLoop)
    folder = StateFolder.create(path / "run", toml.format(start=1, quorum=1))
    config, server = config or folder.config(), folder.config().server
    authority = Authority.create(folder.path, folder.run_id, server.advertise, now=time.time())
    swarm = Hosts(path, authority, folder.run_id, config, parts, model)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop_all, swarm)
        yield swarm


async def _stop_all(swarm: Hosts) -> None:
    for peer_id in list(swarm.running):
        await swarm.stop(peer_id)
