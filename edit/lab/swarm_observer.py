"""The lab's connection to the hosts of a swarm on this machine, with an operator's certificate: how they stand, and the outer
parameters. And what lies in their folders once they have ended.

A host that does not answer, because it is stopped, costs nobody any waiting: `status` takes the answers that have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from aggregator.storage.store import Store
from aggregator.swarm.host_folder import Settings, identity_of
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.operate import operator_credentials
from aggregator.swarm.replication import PartReplica
from aggregator.swarm.standing import Standing, report
from edit.config.run import RunConfig
from edit.council.record import Record
from edit.errors import RemoteProtocolError
from edit.fragments.schema import Schema
from edit.lab.observer import read_snapshot
from edit.records import Snapshot
from edit.view.observations import Status, SwarmStatus
from editpb import council_pb2, council_pb2_grpc, data_pb2_grpc
from editpb.council_messages import COUNCIL_BYTES
from editpb.identity import Identity
from editpb.transport.channel_options import channel_options
from editpb.transport.parts import in_part

__all__ = ["SwarmObserver", "part_on_disk"]

FRESH_S = 2.0  # what a host said before that is no longer how it stands
_LIFETIME_S = 2 * 86_400.0


@dataclass(slots=True)
class _Host:
    channel: grpc.Channel
    address: str
    asked: Any = None  # the call under way
    said: Standing | None = None
    at: float = 0.0  # when it said so


class SwarmObserver:
    """Ask the hosts of members.

    Args:
        homes: the folders of members by peer_id; the first has the run's authority. A host is asked once it has a port.
        timeout_s: of each call.
        monotonic: the clock.
    """

    def __init__(
        self, homes: Mapping[str, Path], timeout_s: float = 5.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._homes, self._timeout_s, self._monotonic = homes, timeout_s, monotonic
        self._first = next(iter(homes.values()))
        self.run_id = identity_of(self._first).run_id
        self._credentials = operator_credentials(self._first, self.run_id, _LIFETIME_S)
        settings, self.config = Settings.load(self._first), RunConfig.from_toml(self._first / "run.toml")
        self.parts = settings.schemas(self.config)
        self._parameters = sum(schema.numel for _, schema in self.parts)
        self._hosts: dict[str, _Host] = {}
        self._record: Record | None = None  # the newest that was seen

    @property
    def answers(self) -> Mapping[str, Standing]:
        """What each host said lately, by peer_id."""
        since = self._monotonic() - FRESH_S
        return {peer_id: host.said for peer_id, host in self._hosts.items() if host.said is not None and host.at >= since}

    @property
    def record(self) -> Record | None:
        """The newest record that was seen."""
        return self._record

    def status(self) -> Status | None:
        """Return how the swarm stands by the last answers, and ask again; None before the first one. Does not wait."""
        for peer_id in self._homes:
            self._ask(peer_id)
        answers = self.answers
        seen = [*(each.record for each in answers.values()), self._record]
        self._record = max(filter(None, seen), key=lambda record: record.stamp, default=None)
        if self._record is None or not answers:
            return None
        silent = {peer_id: "its host does not answer" for peer_id in self._record.members if peer_id not in answers}
        told = report(self._record, "the lab", answers, silent)
        away = {row["peer_id"]: row["why"] for row in told.members if row["state"] == "away"}
        steps = tuple(part.outer_step for part in self._record.parts)
        return Status(
            phase=told.phase,
            outer_step=min(steps),
            digest="",
            parameters=self._parameters,
            deadline_s=None,
            arrived=0,
            expected=0,
            memory_bytes=0,
            tokens=sum(part.tokens for part in self._record.parts),
            swarm=SwarmStatus(
                leader=told.leader,
                owners=tuple(part.owner for part in self._record.parts),
                steps=steps,
                quorum=told.quorum,
                has_quorum=told.has_quorum is not False,
                away=away,
            ),
        )

    def _ask(self, peer_id: str) -> None:
        """Take the answer of a host, if it has come, and ask it again."""
        if (host := self._connected(peer_id)) is None or (host.asked is not None and not host.asked.done()):
            return
        if host.asked is not None:
            with suppress(grpc.RpcError, RemoteProtocolError):
                host.said, host.at = Standing.decode(host.asked.result().standing), self._monotonic()
        stub: Any = council_pb2_grpc.CouncilStub(host.channel)
        host.asked = stub.Standing.future(council_pb2.StandingRequest(), timeout=self._timeout_s)

    def _connected(self, peer_id: str) -> _Host | None:
        """Return the connection to a host, which may have another port than before; None where none has served yet."""
        port = MemberFolder(self._homes[peer_id]).port()
        address = f"127.0.0.1:{port}"
        host = self._hosts.get(peer_id)
        if port and (host is None or host.address != address):
            if host is not None:
                host.channel.close()
            name = Identity(self.run_id, "peer", peer_id).server_name
            options = channel_options(address, COUNCIL_BYTES, server_name=name)
            host = self._hosts[peer_id] = _Host(grpc.secure_channel(address, self._credentials, options=options), address)
        return host

    def snapshot(self, schema: Schema) -> Snapshot | None:
        """Return the newest outer parameters: of each part from its owner. None while one does not answer.

        Parts may be an outer step apart. Raises RemoteProtocolError when they do not match their manifests.
        """
        if self._record is None:
            return None
        found: dict[int, Any] = {}
        steps = []
        for number, (ids, part) in enumerate(self.parts):
            owner = self._record.parts[number].owner
            if owner not in self.answers:
                return None
            stub = in_part(data_pb2_grpc.DataStub(self._hosts[owner].channel), number)
            try:
                snapshot = read_snapshot(stub, self.run_id, part, self._timeout_s)
            except grpc.RpcError:
                return None
            found |= zip(ids, snapshot.fragments, strict=True)
            steps.append(snapshot.outer_step)
        return Snapshot(min(steps), "", tuple(found[i] for i in range(len(schema.fragments))))

    def close(self) -> None:
        """End all connections."""
        for host in self._hosts.values():
            host.channel.close()


def part_on_disk(home: Path, run_id: str, config: RunConfig, part: int) -> PartReplica:
    """Return what lies in the folder of a member whose host has ended. Raises StorageError, ConfigError."""
    store = Store(MemberFolder(home).part(part), config, run_id)
    try:
        return PartReplica(run_id, part, config, store)
    finally:
        store.close()
