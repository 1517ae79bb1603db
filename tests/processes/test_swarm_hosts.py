"""Hosts as processes: the owner of a part is killed in the middle of an exchange, and the others go on to the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import torch
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from aggregator.swarm.host import found_swarm
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit.durable_files import write_atomic
from edit.fragments.digest import digest
from edit.lab.council.replicated import same
from edit.merging.outer_state import OuterState
from editpb.identity import Identity
from editpb.messages import View
from editpb.transport.channel_options import channel_options
from editpb.transport.chunks import make_chunks
from editpb.transport.parts import in_part
from tests.support.fork_server import REPOSITORY
from tests.support.loops import WAIT_S, on_a_loop
from tests.support.served import LIFETIME_S, SCHEMA, TOML, BarePeer, theta

ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]
MEMBERS = ("a", "b", "c", "d")


class Swarm:
    """Four members in folders of their own; the model has one part."""

    def __init__(self, path: Path) -> None:
        self.path, self.processes = path, dict[str, subprocess.Popen[bytes]]()
        self.folder = StateFolder.create(path / "run", TOML.format(start=1, quorum=1))
        self.config, self.run_id = self.folder.config(), self.folder.run_id
        self._authority = Authority.create(self.folder.path, self.run_id, ("localhost",), now=time.time())
        for peer_id in MEMBERS:
            self._equip(peer_id)
        outer = OuterState(SCHEMA, self.config, theta())
        found_swarm(self.run_id, "a", self.config, MemberFolder(path / "a"), [outer], incarnation=1)

    def _equip(self, peer_id: str) -> None:
        folder, (key, certificate) = self.path / peer_id, self.certificate(peer_id)
        folder.mkdir()
        write_atomic(folder / "peer.key", key, mode=0o600)
        write_atomic(folder / "peer.pem", certificate)
        write_atomic(folder / "ca.pem", (self.folder.path / "ca.pem").read_bytes())
        write_atomic(folder / "run.toml", self.folder.run_toml.read_bytes())
        write_atomic(folder / "schema.json", SCHEMA.to_json().encode())

    def certificate(self, peer_id: str) -> tuple[bytes, bytes]:
        key = new_key()
        identity = Identity(self.run_id, "peer", peer_id)
        issued = self._authority.issuer.issue(identity, key.public_key(), lifetime_s=LIFETIME_S, now=time.time())
        return key_pem(key), issued.public_bytes(serialization.Encoding.PEM)

    def start(self, peer_id: str) -> None:
        """Start a host; it ends with this process, whose pipe it reads."""
        seeds = {other: (self.address(other),) for other in MEMBERS if (self.path / other / "port").exists()}
        host = HostFolder(run_id=self.run_id, peer_id=peer_id, parts=1, advertise="127.0.0.1", seeds=seeds)
        host.save(self.path / peer_id)
        with (self.path / f"{peer_id}.log").open("ab") as log:
            command = [sys.executable, "-m", "aggregator.swarm", str(self.path / peer_id)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[peer_id] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, cwd=REPOSITORY, env=environment
            )

    def address(self, peer_id: str) -> str:
        return f"127.0.0.1:{(self.path / peer_id / 'port').read_text()}"

    def log(self, peer_id: str) -> str:
        return (self.path / f"{peer_id}.log").read_text()

    def kill(self, peer_id: str) -> None:
        process = self.processes.pop(peer_id)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def end(self) -> None:
        """By the end of their standard input."""
        for process in self.processes.values():
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes.values():
            assert process.wait(WAIT_S) == 0
        self.processes.clear()

    def states(self, *peer_ids: str) -> list[PartReplica]:
        """What lies in their folders."""
        stores = [Store(MemberFolder(self.path / each).part(0), self.config, self.run_id) for each in peer_ids]
        replicas = [PartReplica(self.run_id, 0, self.config, store) for store in stores]
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
                    options = channel_options(server_name=Identity(self.run_id, "peer", peer_id).server_name)
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
def swarm(path: Path) -> Iterator[Swarm]:
    made = Swarm(path)
    try:
        yield made
    finally:
        for peer_id in list(made.processes):
            made.kill(peer_id)


async def _until(swarm: Swarm, peer_id: str, words: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while words not in swarm.log(peer_id):
            assert swarm.processes[peer_id].poll() is None, swarm.log(peer_id)
            await asyncio.sleep(0.02)


async def _contribute(peer: BarePeer, view: View, fragments: int = len(ONES)) -> None:
    for i, delta in list(enumerate(ONES))[:fragments]:
        data = delta.numpy().tobytes()
        await peer.send(peer.header(view.round_id, view.outer_step, i, len(data)), make_chunks(data))


@on_a_loop
async def test_the_owner_is_killed_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    with swarm(tmp_path) as members:
        members.start("a")
        await _until(members, "a", "listens on")
        for peer_id in MEMBERS[1:]:
            members.start(peer_id)
        await _until(members, "a", "vote, of 4 members")
        expected = theta()
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
        for peer_id in MEMBERS:
            await _until(members, peer_id, "part 0 is at outer step 2")
        members.end()
        one, *others = [replica.snapshot() for replica in members.states(*MEMBERS)]
        assert one.metadata["outer_step"] == 2 and one.metadata["digest"] == digest(expected)
        assert all(same(one, other) for other in others)
