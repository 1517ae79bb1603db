"""Hosts as processes: the owner of a part is killed in the middle of an exchange, and the others go on to the same bits."""

from __future__ import annotations

import asyncio
import copy
import logging
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from torch import Tensor, nn

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from aggregator.swarm.host import found_swarm
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit import LocalRun
from edit.config.run import RunConfig
from edit.durable_files import write_atomic
from edit.errors import EvictedError
from edit.fragments.assignment import assign
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.lab.council.replicated import same
from edit.merging.outer_state import OuterState
from edit.replica.replica import Replica
from edit.worker.config import WorkerConfig
from edit.worker.worker import EditWorker
from editpb.identity import Identity
from editpb.messages import View
from editpb.transport.channel_options import channel_options
from editpb.transport.chunks import make_chunks
from editpb.transport.parts import in_part
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm.connect import connect_swarm
from tests.support.daemons import Daemon
from tests.support.fork_server import REPOSITORY
from tests.support.loops import WAIT_S, on_a_loop
from tests.support.served import LIFETIME_S, SCHEMA, TOML, BarePeer
from tests.support.served import theta as first_theta

pytestmark = pytest.mark.timeout(300)
TRAINS_S = 100.0
ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]


class Swarm:
    """Members in folders of their own.

    theta: what the run is founded with.
    """

    def __init__(
        self, path: Path, schema: Schema = SCHEMA, parts: int = 1, theta: Sequence[Tensor] | None = None, members: str = "abcd"
    ) -> None:
        self.path, self.processes = path, dict[str, Daemon]()
        self.schema, self.parts, self.members = schema, parts, members
        self.folder = StateFolder.create(path / "run", TOML.format(start=1, quorum=1))
        self.run_id = self.folder.run_id
        self._run_toml = f"{TOML.format(start=1, quorum=1).partition('[server]')[0]}[swarm]\nparts = {parts}\n"
        self.config = RunConfig.from_mapping(tomllib.loads(self._run_toml))
        self._authority = Authority.create(self.folder.path, self.run_id, ("localhost",), now=time.time())
        for peer_id in members:
            self._equip(peer_id)
        first = theta if theta is not None else first_theta()
        cut = [[schema.subset(ids), [first[i] for i in ids]] for ids in assign(schema, parts)]
        outers = [OuterState(schema, self.config, tensors) for schema, tensors in cut]
        found_swarm(self.run_id, "a", self.config, MemberFolder(path / "a"), outers, incarnation=1)

    def _equip(self, peer_id: str) -> None:
        folder, (key, certificate) = self.path / peer_id, self.certificate(peer_id)
        folder.mkdir()
        write_atomic(folder / "peer.key", key, mode=0o600)
        write_atomic(folder / "peer.pem", certificate)
        write_atomic(folder / "ca.pem", (self.folder.path / "ca.pem").read_bytes())
        write_atomic(folder / "run.toml", self._run_toml.encode())
        write_atomic(folder / "schema.json", self.schema.to_json().encode())

    def certificate(self, peer_id: str) -> tuple[bytes, bytes]:
        key = new_key()
        identity = Identity(self.run_id, "peer", peer_id)
        issued = self._authority.issuer.issue(identity, key.public_key(), lifetime_s=LIFETIME_S, now=time.time())
        return key_pem(key), issued.public_bytes(serialization.Encoding.PEM)

    def share_authority(self, peer_id: str) -> None:
        """Give a member the authority's key, by hand."""
        folder = self.path / peer_id / "authority"
        folder.mkdir(mode=0o700)
        for name in ("ca.key", "ca.pem"):
            write_atomic(folder / name, (self.folder.path / name).read_bytes(), mode=0o600)

    def start(self, peer_id: str, **settings: Any) -> None:
        """Start a host; it knows those that were started before. settings: of host.json, that are different."""
        seeds = {other: (self.address(other),) for other in self.members if (self.path / other / "port").exists()}
        known: dict[str, Any] = {"advertise": "127.0.0.1", "seeds": seeds, "discovery": "addresses", **settings}
        HostFolder(**known).save(self.path / peer_id)
        self.processes[peer_id] = Daemon("aggregator.swarm", self.path / peer_id)

    def until(self, peer_id: str, words: str) -> None:
        """Read on until a line of a host's log has these words, unless one had."""
        daemon = self.processes[peer_id]
        if not any(words in line for line in daemon.lines):
            daemon.until(words)

    def grow(self) -> None:
        """Start all, and wait until all vote."""
        self.start("a")
        self.until("a", "listens on")
        for peer_id in self.members[1:]:
            self.start(peer_id)
        self.until("a", f"{len(self.members)} vote, of {len(self.members)} members")
        for peer_id in self.members[1:]:
            self.until(peer_id, "listens on")

    def address(self, peer_id: str) -> str:
        return f"127.0.0.1:{(self.path / peer_id / 'port').read_text()}"

    def kill(self, peer_id: str) -> None:
        self.processes.pop(peer_id).kill()

    def end(self) -> None:
        """By SIGTERM."""
        for daemon in self.processes.values():
            daemon.process.send_signal(signal.SIGTERM)
        for daemon in self.processes.values():
            assert daemon.finish() == 0, daemon.lines
        self.processes.clear()

    def states(self, part: int = 0) -> list[PartReplica]:
        """What lies in all folders."""
        stores = [Store(MemberFolder(self.path / each).part(part), self.config, self.run_id) for each in self.members]
        replicas = [PartReplica(self.run_id, part, self.config, store) for store in stores]
        for store in stores:
            store.close()
        return replicas

    @asynccontextmanager
    async def owner(self, outer_step: int) -> AsyncIterator[tuple[str, BarePeer, View]]:
        """Find who serves the part, as a trainer does: ask all that run. Its first view of an open round."""
        key, certificate = self.certificate("peer")
        credentials = grpc.ssl_channel_credentials((self.folder.path / "ca.pem").read_bytes(), key, certificate)
        async with asyncio.timeout(WAIT_S):
            while True:
                for peer_id in self.processes:
                    options = channel_options(
                        self.address(peer_id), server_name=Identity(self.run_id, "peer", peer_id).server_name
                    )
                    async with grpc.aio.secure_channel(self.address(peer_id), credentials, options) as channel:
                        peer = BarePeer("peer", self.run_id, channel, SCHEMA)
                        in_part(peer.control, 0), in_part(peer.data, 0)
                        try:
                            view = await self._served(peer, outer_step)
                            if view is not None:
                                yield peer_id, peer, view
                                return
                        finally:
                            await peer.disconnect()
                await asyncio.sleep(0.02)

    async def _served(self, peer: BarePeer, outer_step: int) -> View | None:
        """Attend; None when the host does not own the part."""
        try:
            await peer.open_stream()
        except grpc.aio.AioRpcError:
            return None
        assert peer._reader is not None
        opened = asyncio.ensure_future(self._open(peer, outer_step))
        await asyncio.wait([opened, peer._reader], return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            return opened.result()
        opened.cancel()
        return None

    @staticmethod
    async def _open(peer: BarePeer, outer_step: int) -> View:
        view = await peer.view()
        await peer.report(view.outer_step)
        return await peer.view(lambda view: view.round_id > 0 and view.outer_step >= outer_step)


@contextmanager
def swarm(path: Path, **named: Any) -> Iterator[Swarm]:
    made = Swarm(path, **named)
    try:
        yield made
    finally:
        for peer_id in list(made.processes):
            made.kill(peer_id)


async def _contribute(peer: BarePeer, view: View, fragments: int = len(ONES)) -> None:
    for i, delta in list(enumerate(ONES))[:fragments]:
        data = delta.numpy().tobytes()
        await peer.send(peer.header(view.round_id, view.outer_step, i, len(data)), make_chunks(data))


@on_a_loop
async def test_the_owner_is_killed_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    with swarm(tmp_path) as members:
        members.grow()
        expected = first_theta()
        async with members.owner(0) as (owner, peer, view):
            await _contribute(peer, view)
            await peer.view(lambda view: view.outer_step == 1)
            expected = [part - 1 for part in expected]
            again = await peer.view(lambda view: view.round_id > 0 and view.outer_step == 1)
            await peer.report(1)
            await _contribute(peer, again, 1)  # of two fragments
            members.kill(owner)
        async with members.owner(1) as (second, peer, view):
            assert second != owner and view.round_id > again.round_id and view.outer_step == 1
            await _contribute(peer, view)
            taken = await peer.view(lambda view: view.outer_step == 2)
            expected = [part - 1 for part in expected]
            assert taken.digest == digest(expected)
        members.start(owner)
        for peer_id in members.members:
            members.until(peer_id, "part 0 is at outer step 2")
        members.end()
        one, *others = [replica.snapshot() for replica in members.states()]
        assert one.metadata["outer_step"] == 2 and one.metadata["digest"] == digest(expected)
        assert all(same(one, other) for other in others)


@on_a_loop
async def test_an_owner_that_is_stopped_loses_its_part_and_follows_when_it_goes_on(tmp_path: Path) -> None:
    with swarm(tmp_path, members="abc") as members:
        members.grow()
        async with members.owner(0) as (owner, peer, view):
            await _contribute(peer, view, 1)  # of two fragments
            stopped = members.processes.pop(owner)
            stopped.process.send_signal(signal.SIGSTOP)
        async with members.owner(0) as (second, peer, view):
            assert second != owner
            await _contribute(peer, view)
            taken = await peer.view(lambda view: view.outer_step == 1)
        stopped.process.send_signal(signal.SIGCONT)
        members.processes[owner] = stopped
        for peer_id in members.members:
            members.until(peer_id, "part 0 is at outer step 1")
        members.end()
        one, *others = [replica.snapshot() for replica in members.states()]
        assert one.metadata["digest"] == taken.digest == digest([part - 1 for part in first_theta()])
        assert all(same(one, other) for other in others)


def test_a_peer_trains_on_while_the_owners_of_its_parts_are_killed(tmp_path: Path) -> None:
    """An `EditWorker` over the network: it finds the owner of each part, and follows it to another host."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    replica = Replica(model)
    theta = [fragment.clone() for fragment in replica.founding()]
    hub = trained_at_a_hub(copy.deepcopy(model), until=2)
    with swarm(tmp_path, schema=replica.schema, parts=2, theta=theta, members="abc") as members:
        members.grow()
        key, certificate = members.certificate("peer")
        credentials = grpc.ssl_channel_credentials((members.folder.path / "ca.pem").read_bytes(), key, certificate)
        hosts = {peer_id: members.address(peer_id) for peer_id in members.members}
        identity = Identity(members.run_id, "peer", "peer")
        with IoThread() as io, connect_swarm(io, hosts, 2, credentials, identity) as (connection, config, _):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with EditWorker(model, optimizer, connection, WorkerConfig(sync=config.sync, codec=config.codec)) as worker:
                train(model, optimizer, worker, until=2)
                assert worker.digest == hub.digest
                members.kill("a")
                killed_at = worker.outer_step
                train(model, optimizer, worker, until=killed_at + 3)
                members.start("a")
                members.until("a", "3 vote, of 3 members")
                train(model, optimizer, worker, until=worker.outer_step + 2)
                taken = [share.outer_step for share in worker.shares]
                digests = [share.digest for share in worker.shares]
        for part, outer_step in enumerate(taken):
            for peer_id in members.members:
                members.until(peer_id, f"part {part} is at outer step {outer_step}")
        members.end()
        for part in range(2):
            one, *others = [replica.snapshot() for replica in members.states(part)]
            assert (one.metadata["outer_step"], one.metadata["digest"]) == (taken[part], digests[part])
            assert all(same(one, other) for other in others)


@pytest.mark.parametrize("asked", ["the owner", "another"])
def test_a_peer_leaves_an_owner_that_is_stopped_before_its_connection_tells(
    asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asked: the host that it hears of owners from. What it contributed meanwhile is the hub's outer step."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    replica = Replica(model)
    theta = [fragment.clone() for fragment in replica.founding()]
    hub = trained_at_a_hub(copy.deepcopy(model), until=4)
    caplog.set_level(logging.INFO, "peers")
    with swarm(tmp_path, schema=replica.schema, theta=theta, members="abc") as members:
        members.grow()
        key, certificate = members.certificate("peer")
        credentials = grpc.ssl_channel_credentials((members.folder.path / "ca.pem").read_bytes(), key, certificate)
        hosts = {peer_id: members.address(peer_id) for peer_id in ("abc" if asked == "the owner" else "bca")}
        identity = Identity(members.run_id, "peer", "peer")
        with IoThread() as io, connect_swarm(io, hosts, 1, credentials, identity) as (connection, config, _):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with EditWorker(model, optimizer, connection, WorkerConfig(sync=config.sync, codec=config.codec)) as worker:
                train(model, optimizer, worker, until=1)
                members.processes["a"].process.send_signal(signal.SIGSTOP)
                train(model, optimizer, worker, until=4)
                assert (worker.outer_step, worker.digest) == (4, hub.digest)
        members.processes["a"].process.send_signal(signal.SIGCONT)
        for peer_id in members.members:
            members.until(peer_id, "part 0 is at outer step 4")
        members.end()
    stopped = next(line for line in caplog.messages if line.startswith(f"{hosts['a']}: ") and "trying again" in line)
    assert "it is at" in stopped, "the news, and not the connection, ended it"


def test_a_peer_that_trains_hears_why_its_member_was_evicted(tmp_path: Path) -> None:
    """`edit-peer` ends with this error's exit code, as at a hub."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    replica = Replica(model)
    theta = [fragment.clone() for fragment in replica.founding()]
    with swarm(tmp_path, schema=replica.schema, parts=2, theta=theta, members="abc") as members:
        members.grow()
        members.share_authority("a")
        key, certificate = members.certificate("c")
        credentials = grpc.ssl_channel_credentials((members.folder.path / "ca.pem").read_bytes(), key, certificate)
        hosts = {peer_id: members.address(peer_id) for peer_id in members.members}
        with (
            IoThread() as io,
            connect_swarm(io, hosts, 2, credentials, Identity(members.run_id, "peer", "c")) as (collective, config, _),
        ):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with (
                pytest.raises(EvictedError, match="it lies") as caught,
                EditWorker(model, optimizer, collective, WorkerConfig(sync=config.sync, codec=config.codec)) as worker,
            ):
                train(model, optimizer, worker, until=2)
                assert "c is evicted" in _verb("evict", tmp_path / "a", "c", "--reason", "it lies")
                train(model, optimizer, worker, until=1 << 30)
            assert caught.value.exit_code == 4
        evicted = members.processes.pop("c")
        assert evicted.finish() == 4, evicted.lines[-3:]


def trained_at_a_hub(model: nn.Module, *, until: int) -> EditWorker:
    """The same peer in a run of its own."""
    config = RunConfig.from_mapping(tomllib.loads(TOML.format(start=1, quorum=1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collective = LocalRun(config, ["peer"]).collective("peer")
    with EditWorker(model, optimizer, collective, WorkerConfig(sync=config.sync, codec=config.codec)) as worker:
        train(model, optimizer, worker, until=until)
        return worker


def train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: EditWorker, *, until: int) -> None:
    """Take steps until all parts are at this outer step."""
    begun = time.monotonic()
    while min(share.outer_step for share in worker.shares) < until:
        assert time.monotonic() - begun < TRAINS_S, [share.outer_step for share in worker.shares]
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


def test_a_host_that_is_told_to_stop_leaves_and_joins_again_and_one_that_is_evicted_ends_with_its_reason(
    tmp_path: Path,
) -> None:
    """By the commands, as an operator types them."""
    with swarm(tmp_path, members="abc") as members:
        members.grow()
        members.share_authority("b")
        leaver = members.processes.pop("c")
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.finish() == 0 and any("c has left" in line for line in leaver.lines), leaver.lines
        members.until("a", "c has left")
        assert "2 of 2 here" in _verb("status", tmp_path / "a")
        members.start("c")
        members.until("c", "3 vote, of 3 members")
        assert "c has left; the same command joins again" in _verb("leave", tmp_path / "c")
        assert members.processes.pop("c").finish() == 0
        members.start("c")
        members.until("c", "3 vote, of 3 members")
        assert "c is evicted" in _verb("evict", tmp_path / "b", "c", "--reason", "it lies")
        evicted = members.processes.pop("c")
        assert evicted.finish() == 4 and "it lies" in evicted.lines[-1], evicted.lines[-3:]
        assert "its host was never started" not in (said := _verb("status", tmp_path / "b")) and "c is evicted: it lies" in said
        members.start("c")
        again = members.processes.pop("c")
        assert again.finish() == 4 and "it lies" in again.lines[-1], again.lines[-3:]
        members.members = "ab"
        members.end()  # both at once: nobody is voted out
        for peer_id in "ab":
            saved = MemberFolder(tmp_path / peer_id).saved()
            assert saved is not None and saved.record is not None and {*saved.record.members} == {"a", "b"}


def _verb(*words: object) -> str:
    command = [sys.executable, "-m", "aggregator.swarm", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=WAIT_S * 2, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@on_a_loop
async def test_members_that_no_other_can_dial_take_an_outer_step_through_a_relay(tmp_path: Path) -> None:
    with swarm(tmp_path, members="ab") as members:
        members.share_authority("a")
        assert "is a relay's folder" in _verb("make-relay", tmp_path / "a", tmp_path / "relay")
        passing = Daemon("aggregator.swarm", "relay", tmp_path / "relay", "--listen", "127.0.0.1:0")
        try:
            there = passing.until("listens on").split()[-1]
            for peer_id, other in ("ab", "ba"):
                members.start(peer_id, advertise="", relay=there, seeds={other: (there,)})
            members.until("a", "2 vote, of 2 members")
            async with members.owner(0) as (_, peer, view):
                await _contribute(peer, view)
                await peer.view(lambda view: view.outer_step == 1)
            for peer_id in "ab":
                members.until(peer_id, "part 0 is at outer step 1")
            members.end()
            assert len({replica.state.digest for replica in members.states()}) == 1
        finally:
            passing.process.send_signal(signal.SIGTERM)
            assert passing.finish() == 0


def test_a_host_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Its standard input is a pipe that is closed when that process ends, however it ends."""
    with swarm(tmp_path, members="a"):
        command = [sys.executable, "-m", "aggregator.swarm", str(tmp_path / "a")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, text=True) as process:
            assert any("listens on" in line for line in process.stderr)
            process.stdin.close()
            assert process.wait(WAIT_S) == 0
            process.stdin = None
